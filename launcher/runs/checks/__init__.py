"""What the machine is, and whether a run can work there: preflight, and `launcher doctor`."""
