"""Models: loading and saving, forward passes, adapters, numbered snapshots of weights."""
