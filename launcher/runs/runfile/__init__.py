"""The run file: its sections, values, secrets and where each came from."""
