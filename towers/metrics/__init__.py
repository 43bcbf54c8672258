"""Predictions of a split, their metrics, and the results of an evaluation."""
