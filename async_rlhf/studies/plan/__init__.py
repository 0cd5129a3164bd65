"""How fast a run would be, by simulating the schedule."""
