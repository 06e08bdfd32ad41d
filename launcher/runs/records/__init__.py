"""What is kept of a run, and what is made of it: record, log, metrics, lists, resume, repeat."""
