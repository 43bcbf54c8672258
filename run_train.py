#!/usr/bin/env python3
"""See towers/cli/train.py, or --help."""

from towers.cli.main import run_train

if __name__ == "__main__":
    run_train()
