"""Algorithms: each is one record, with one file per family. Other files hold the formulas that they share."""
