"""A page of all runs: their states, curves and failures, written to a file or served here."""
