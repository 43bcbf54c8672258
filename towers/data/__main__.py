"""Checks a data set before training, see `towers.cli.data`."""

from towers.cli.main import run_data

if __name__ == "__main__":
    run_data()
