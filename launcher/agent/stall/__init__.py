"""A run that stands still: which rank waits where."""
