"""A run: its configuration, how it is put together, the loop, the schedule, its checkpoints and logs."""
