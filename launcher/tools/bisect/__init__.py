"""`launcher bisect`: which difference of two runs makes one of them fail."""
