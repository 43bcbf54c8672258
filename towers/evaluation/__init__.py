"""Metrics of trained networks, predictions, calibration and averages of runs."""
