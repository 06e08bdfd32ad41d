"""Comparisons with peers and floors, side by side in one run: `make bench`."""
