"""Evaluation, prediction and reports."""
