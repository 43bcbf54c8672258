"""A run: its folder, checkpoints, summaries, periods and watchdog."""
