"""Flags, help and recipes of the programs, and the call of each."""
