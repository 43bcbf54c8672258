#!/usr/bin/env python3
"""See towers/commands/train.py, or --help."""

from towers.commands import run_train

if __name__ == "__main__":
    run_train()
