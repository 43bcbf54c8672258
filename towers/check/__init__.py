"""The program `python -m towers.check`, which inspects a data set before training."""
