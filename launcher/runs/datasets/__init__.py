"""Megatron's indexed datasets: .bin and .idx, read and written."""
