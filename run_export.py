#!/usr/bin/env python3
"""See towers/commands/export.py, or --help."""

from towers.commands import run_export

if __name__ == "__main__":
    run_export()
