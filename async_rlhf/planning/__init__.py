"""How fast a run would be: its schedule simulated, with times that were measured, given or estimated. No torch."""
