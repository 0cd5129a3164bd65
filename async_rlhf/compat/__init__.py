"""Configurations of other programs, read as ours."""
