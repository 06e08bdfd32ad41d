"""`python3 -m launcher`: the command line."""

import sys

from launcher.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
