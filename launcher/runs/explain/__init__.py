"""What made a run fail, from its log."""
