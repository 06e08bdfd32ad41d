"""Processes on a node: started, prepared, signalled, and how they end."""
