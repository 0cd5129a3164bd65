"""Algorithms: each is one record, in one file by family; beside them what their formulas are made of."""
