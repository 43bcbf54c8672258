"""The folder of a run on disk: its checkpoints, progress, records and lock."""
