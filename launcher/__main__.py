"""`python3 -m launcher`: the command line."""

import sys

from launcher.cli import program

if __name__ == "__main__":
    sys.exit(program())
