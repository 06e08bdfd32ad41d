"""A run file of what a user has today: a shell script's training command. Pure."""
