"""HTML pages of ours: each is one file that names no other."""
