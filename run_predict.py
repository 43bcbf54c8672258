#!/usr/bin/env python3
"""See towers/cli/predict.py, or --help."""

from towers.cli.main import run_predict

if __name__ == "__main__":
    run_predict()
