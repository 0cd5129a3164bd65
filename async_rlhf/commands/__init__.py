"""The commands, and what skips one that is done."""
