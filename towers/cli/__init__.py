"""The command lines: flags, help, and the program of each."""
