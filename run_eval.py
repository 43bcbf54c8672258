#!/usr/bin/env python3
"""See towers/commands/eval.py, or --help."""

from towers.commands import run_eval

if __name__ == "__main__":
    run_eval()
