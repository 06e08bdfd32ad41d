"""Ranks of a node: prepared, started, signalled, how they end; and the connections of nodes."""
