"""One HTML page of runs."""
