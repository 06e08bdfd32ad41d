"""What runs on a node, and what launcher and node share: ranks, nodes, stalls, checkpoints."""
