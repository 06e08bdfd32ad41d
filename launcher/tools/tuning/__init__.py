"""`launcher tune`: the fastest setting of a run that keeps its mathematics."""
