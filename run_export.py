#!/usr/bin/env python3
"""See towers/cli/export.py, or --help."""

from towers.cli.main import run_export

if __name__ == "__main__":
    run_export()
