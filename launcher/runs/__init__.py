"""From a run file to the end of the run."""
