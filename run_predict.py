#!/usr/bin/env python3
"""See towers/commands/predict.py, or --help."""

from towers.commands import run_predict

if __name__ == "__main__":
    run_predict()
