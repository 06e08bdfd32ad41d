"""Our training program."""
