"""Gradients that inspect a network: channel split, synchronized normalization."""
