"""The fast path: compiled, graphed, with kernels of our own."""
