"""A run: the loop, the watchdog, the display, the banner and the restore."""
