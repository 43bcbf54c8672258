"""The network of a run in formats of other programs, each checked in a new process."""
