"""Reproducible Megatron-LM images, and a launcher for training runs in them."""

__version__ = "0.2.0"
