"""Where runs part, and why."""
