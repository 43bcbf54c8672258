"""Parallel training: contracts, the step, the trainers, one strategy a file."""
