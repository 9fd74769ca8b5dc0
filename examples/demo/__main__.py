"""Play the demo: `python examples/demo`. It counts, times and draws herds of real processes on the disk engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from play import demo

from stampede.errors import StampedeError


def main() -> int:
    """Play the demo, and return 0; 2 if an argument can't be used; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="demo",
        description="Herds of real processes on the disk engine: without stampede, with it, and with a holder killed.",
    )
    parser.add_argument("--processes", type=_between(int, 2, 32), default=8, metavar="N")
    parser.add_argument("--callers", type=_between(int, 1, 32), default=8, metavar="N", help="in each process")
    parser.add_argument("--seconds", type=_between(float, 0.01, 10), default=0.25, help="of one computation")
    parser.add_argument("--out", type=Path, default=Path("demo.html"), metavar="FILE", help="a page, or an .svg")
    options = parser.parse_args()
    try:
        demo(options.processes, options.callers, options.seconds, options.out)
    except StampedeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _between(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not least <= value <= most:
            what = "a whole number" if kind is int else "seconds"
            raise argparse.ArgumentTypeError(f"{text!r}: give {what} from {least:g} to {most:g}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
