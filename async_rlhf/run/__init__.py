"""A run: its configuration, how it is put together, the loop, the schedule, and what is in a checkpoint."""
