"""Launchers of the workers of a cluster; they import no TensorFlow."""
