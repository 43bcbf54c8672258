"""The synchronous strategies, one per file, and their interface."""
