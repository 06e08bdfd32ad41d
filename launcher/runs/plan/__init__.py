"""A run file becomes a plan: config, checks, arguments, plan. Pure but for reading the file."""
