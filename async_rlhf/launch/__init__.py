"""Launching runs: several ranks, DeepSpeed, Ray."""
