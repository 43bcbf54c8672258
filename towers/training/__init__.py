"""A run: loop, watchdog, display, restore; and its trials, folds and linear probe."""
