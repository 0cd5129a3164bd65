"""Reads configurations of other programs as ours."""
