"""Prompts and data sets: loading them, streaming them, and the built-in docstring task."""
