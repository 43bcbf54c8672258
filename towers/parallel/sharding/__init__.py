"""Everything that inspects a network: channel splits, synchronized normalization."""
