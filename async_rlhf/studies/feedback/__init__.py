"""People who label a run, and what they have said."""
