"""Kernels of our own, in Triton, of tensors alone: what is faster so than by torch's compiler."""
