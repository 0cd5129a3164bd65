"""What staleness costs, decided by pairs of runs."""
