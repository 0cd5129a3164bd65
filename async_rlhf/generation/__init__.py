"""Sampling completions: engines, and where they run."""
