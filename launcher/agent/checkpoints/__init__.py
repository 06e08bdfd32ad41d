"""Checkpoints: written, judged by their files, kept, and whose they are."""
