"""Weights of other programs, their names and their standardization."""
