"""Megatron's data files: token sequences as .bin, where they lie as .idx."""
