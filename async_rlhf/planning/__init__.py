"""Predicts the speed of a run: simulates its schedule with measured, given or estimated times. Needs no torch."""
