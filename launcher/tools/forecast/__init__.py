"""What a run will take before it starts, and what it took after it ended."""
