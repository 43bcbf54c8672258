"""A launcher of the workers of a cluster on one machine; imports no TensorFlow."""
