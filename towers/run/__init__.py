"""A run: its folder, checkpoints, reports, periods and watchdog."""
