"""Pages with charts about one run or several, from plain values."""
