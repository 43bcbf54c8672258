"""The folder of a run, and what is written there: checkpoints, metrics, summaries."""
