"""Run the command line: `python -m stampede`."""

from __future__ import annotations

import sys

from stampede.cli.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
