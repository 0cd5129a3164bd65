"""Where a run runs: several ranks, DeepSpeed, Ray."""
