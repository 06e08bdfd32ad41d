"""A run followed from its start to its end: preflight, record, attempts, ending."""
