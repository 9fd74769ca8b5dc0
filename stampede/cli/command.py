"""`stampede COMMAND`: arguments, and what an error looks like to a person."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from math import isfinite
from pathlib import Path

from stampede.cli.screen import screen
from stampede.errors import StampedeError
from stampede.settings import CacheSettings

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done. 1: no value, an engine out of reach. 2: wrong arguments or settings, or an engine that failed."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a value may hold what a terminal can't show
    logging.getLogger("stampede").addHandler(logging.NullHandler())  # what matters here is printed
    try:
        done: int = options.run(options)
        sys.stdout.flush()
        return done
    except StampedeError as error:
        print(f"stampede: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `stampede stats | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stampede", description="A read-through cache that stops stampedes.")
    version = import_module("stampede").__version__
    parser.add_argument("--version", action="version", version=f"stampede {version}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="herds of processes with and without stampede, counted and drawn"))
    for name, run, add, help in (
        ("check", _check, (), "the settings as they are read, and whether each engine answers"),
        ("get", _get, (_add_key, _add_json), "a key's value, how long it is fresh and kept, and who computes it now"),
        ("keys", _keys, (_add_prefix,), "the keys that are kept, but for functions' own"),
        ("invalidate", _invalidate, (_add_key,), "a key's value is gone, also one that is being computed"),
        ("stats", _stats, (), "what an engine holds: entries, bytes, leases"),
    ):
        command = commands.add_parser(name, help=help, description=help)
        command.add_argument("--settings", type=Path, metavar="FILE", help="else $STAMPEDE_SETTINGS or ./stampede.toml")
        command.add_argument("--cache", metavar="NAME", help="a cache of the settings")
        for add_more in add:
            add_more(command)
        command.set_defaults(run=run)
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = "Herds of real processes on the disk engine: without stampede, with it, and with a murder."
    parser.add_argument("--processes", type=_number(2, 32), default=8, metavar="N")
    parser.add_argument("--callers", type=_number(1, 32), default=8, metavar="N", help="in each process")
    parser.add_argument("--seconds", type=_seconds, default=0.25, help="that one computation takes")
    parser.add_argument("--out", type=Path, default=Path("demo.html"), metavar="FILE", help="a page, or an .svg")
    parser.set_defaults(run=_demo)


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="a cache's own, or a function's as its key(...) returns it")
    parser.add_argument("--function", metavar="MODULE:NAME", help="import this function, which knows the value's type")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="what they begin with")


# -- commands: what they need is imported when it is needed -----------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    from stampede.cli.demo.play import demo

    demo(screen(), options.processes, options.callers, options.seconds, options.out)
    return 0


def _check(options: argparse.Namespace) -> int:
    from stampede.cli.address import settings_of
    from stampede.cli.check import check

    return check(screen(), settings_of(options.settings), options.cache)


def _get(options: argparse.Namespace) -> int:
    from stampede.cli.keys import get

    return get(screen(), _cache(options), options.key, options.function, as_json=options.json)


def _keys(options: argparse.Namespace) -> int:
    from stampede.cli.keys import keys

    return keys(screen(), _cache(options), options.prefix)


def _invalidate(options: argparse.Namespace) -> int:
    from stampede.cli.keys import forget

    return forget(screen(), _cache(options), options.key, options.function)


def _stats(options: argparse.Namespace) -> int:
    from stampede.cli.stats import stats

    return stats(screen(), _cache(options))


def _cache(options: argparse.Namespace) -> CacheSettings:
    from stampede.cli.address import settings_of, the_one

    return the_one(settings_of(options.settings), options.cache)


def _number(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isdecimal() and len(text) < 9 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {least} to {most}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and 0.01 <= seconds <= 10):
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds from 0.01 to 10")
    return seconds
