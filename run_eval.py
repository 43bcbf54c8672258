#!/usr/bin/env python3
"""See towers/cli/eval.py, or --help."""

from towers.cli.main import run_eval

if __name__ == "__main__":
    run_eval()
