"""Export to formats that other programs load."""
