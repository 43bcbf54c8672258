"""Losses, learning-rate schedules, optimizers and the update: pure functions."""
