"""The folder of a run on disk: checkpoints, progress, records and lock."""
