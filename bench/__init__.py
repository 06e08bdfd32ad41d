"""What the launcher costs beside bare docker and a bare interpreter, in one run: `make bench`."""
