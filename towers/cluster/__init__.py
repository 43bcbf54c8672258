"""The workers of a cluster: addresses, joining, and what they must agree on."""
