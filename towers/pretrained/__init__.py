"""Weights of other programs: files, names of variables, initial values, moments."""
