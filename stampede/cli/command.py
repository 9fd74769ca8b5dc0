"""`stampede COMMAND`: its arguments, its exit codes, and how errors are printed."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

from stampede.errors import MissingExtra, OptionError, StampedeError
from stampede.settings.options import seconds

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code. 0: done. 1: no value, or an engine is out of reach. 2: wrong arguments
    or settings, or an engine that failed."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a value may hold what a terminal can't show
    logging.getLogger("stampede").addHandler(logging.NullHandler())  # errors are printed
    try:
        done = _run(options)
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
    for name, run, add, help in (
        ("check", "check:check", (_add_json,), "the settings as they are read, and whether each engine answers"),
        (
            "get",
            "keys:get",
            (_add_key, _add_json),
            "a key's value, how long it is fresh and kept, and which process computes it now",
        ),
        ("keys", "keys:keys", (_add_prefix, _add_json), "the stored keys of the cache itself, or of a function"),
        (
            "invalidate",
            "keys:forget",
            (_add_key_or_tags,),
            "remove a key's value, or all that carries a tag, also what is being computed",
        ),
        ("stats", "stats:stats", (_add_json, _add_every), "what an engine holds: entries, bytes, leases"),
    ):
        command = commands.add_parser(name, help=help, description=help)
        command.add_argument(
            "--settings", type=Path, metavar="FILE", help="by default $STAMPEDE_SETTINGS or ./stampede.toml"
        )
        command.add_argument("--cache", metavar="NAME", help="a cache of the settings")
        for add_more in add:
            add_more(command)
        command.set_defaults(run=run)
    _add_locks(commands.add_parser("locks", help="the locks that are held, their holders, and the record of locks"))
    _add_limits(commands.add_parser("limits", help="how much of each limit is used"))
    _add_postgres(commands.add_parser("postgres", help="the tables of the Postgres engine"))
    _add_diskcache(commands.add_parser("diskcache", help="move the directories of diskcache"))
    _add_serve(commands.add_parser("serve", help="run a broker: a server of locks for zmq://"))
    return parser


def _add_every(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--every", type=_duration, metavar="2s", help="again and again, with the changes per second, until Ctrl-C"
    )


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="URL|CACHE", nargs="?", help="an engine's address, or a cache of the settings")
    parser.add_argument(
        "--settings", type=Path, metavar="FILE", help="by default $STAMPEDE_SETTINGS or ./stampede.toml"
    )


def _add_locks(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show the locks that are held, if the engine can list them; on postgres:// also the record of locks. Without "
        "an argument, show those of all caches of the settings, and of file://, where locks are that name no engine."
    )
    _add_where(parser)
    parser.add_argument("--break", dest="name", metavar="NAME", help="take this lock from its holders")
    parser.add_argument("--history", action="store_true", help="show the record of released locks, newest first")
    parser.add_argument("--failed", action="store_true", help="only locks that had a problem (with --history)")
    parser.add_argument("--since", type=_duration, metavar="1h", help="only the last hour, say (with --history)")
    parser.add_argument("--most", type=_number(1, 99_999_999), default=100, metavar="N", help="show at most so many")
    _add_json(parser)
    parser.set_defaults(run="locks:locks")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show how much of each limit is used, booked ahead and penalized. Without an argument, show those of all "
        "caches of the settings, and of file://, where limits are that name no engine."
    )
    _add_where(parser)
    _add_json(parser)
    parser.set_defaults(run="limits:limits")


def _add_postgres(parser: argparse.ArgumentParser) -> None:
    parser.description = "The tables of the Postgres engine."
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    init = commands.add_parser("init", help="make the tables and functions, or upgrade them")
    init.description = (
        "Make the tables and functions in the schema `stampede`, or upgrade them. If they are up to date, do nothing."
    )
    _add_where(init)
    init.add_argument("--sql", action="store_true", help="print the SQL, and do not connect")
    init.add_argument(
        "--durable", action="store_true", help="values survive a crash, and are on replicas; writes cost more"
    )
    init.add_argument("--grant", metavar="ROLE", help="give this role the rights that a program needs")
    init.set_defaults(run="postgres:init")


def _add_diskcache(parser: argparse.ArgumentParser) -> None:
    parser.description = "The directories of diskcache, for stampede.contrib.diskcache."
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add = commands.add_parser("import", help="copy the entries of a directory, without running its pickles")
    add.description = (
        "Copy the entries of a diskcache Cache or FanoutCache, with their tags and the time they have left. Nothing "
        "changes in DIRECTORY, and no pickle of it can run code. Entries with other types than builtins are skipped, "
        "and listed with the reason. Keys that are in the new directory stay as they are."
    )
    add.add_argument("directory", type=Path, metavar="DIRECTORY", help="the directory that diskcache has written")
    add.add_argument("url", metavar="URL", help="disk:///var/cache/app, for example; it may be the same directory")
    add.add_argument("--namespace", default="diskcache", help="the namespace= of the new cache; by default diskcache")
    add.add_argument("--json-disk", action="store_true", help="the directory was written by JSONDisk")
    add.set_defaults(run="diskcache:import_directory")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a broker for zmq://HOST: a small server of locks, which stores none on disk. SIGTERM ends it."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """examples:
  stampede serve --memory broker.json                  # for this machine: zmq://localhost
  stampede serve --make-keys /etc/stampede             # once, before it serves other machines
  stampede serve --bind 0.0.0.0 --keys /etc/stampede --memory /var/lib/stampede/broker.json"""
    parser.add_argument(
        "--bind", action="append", default=[], metavar="HOST[:PORT]", help="by default 127.0.0.1:7867; may be repeated"
    )
    parser.add_argument("--keys", type=Path, metavar="DIR", help="CURVE keys: needed on any address but loopback")
    parser.add_argument("--make-keys", type=Path, metavar="DIR", help="make new keys there, and do nothing else")
    parser.add_argument("--longest", type=_duration, default=30.0, metavar="30s", help="the longest lease it grants")
    parser.add_argument(
        "--grace", type=_duration, metavar="30s",
        help="for so long it grants only what clients held when its predecessor ended; by default --longest",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=Path, metavar="FILE", help="remember here how long --grace has to be: 0s for the first start"
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="HOST[:PORT]", help="another broker, with which it shares limits"
    )
    parser.add_argument("--max-clients", type=_number(1, 99_999_999), default=10_000, metavar="N")
    parser.add_argument("--max-locks", type=_number(1, 99_999_999), default=1_000_000, metavar="N")
    parser.add_argument(
        "--max-queue", type=_number(1, 99_999_999), default=10_000, metavar="N", help="waiters for one lock"
    )
    parser.add_argument("--max-limits", type=_number(1, 99_999_999), default=10_000, metavar="N")
    parser.set_defaults(run="serve:serve")


_KEY = "a key of the cache itself, or of a function as its key(...) returns it"


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help=_KEY)
    _add_function(parser)


def _add_key_or_tags(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("key", metavar="KEY", nargs="?", help=_KEY)
    either.add_argument(
        "--tag", action="append", metavar="TAG", help="instead of KEY: all that carries this tag; may be repeated"
    )
    _add_function(parser)


def _add_function(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--function", metavar="MODULE:NAME", help="import this function, which knows the value's type")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prefix", metavar="PREFIX", nargs="?", default="", help="how the keys begin; or a function, as shop:report"
    )
    parser.add_argument("--tag", metavar="TAG", help="only keys whose stored value carries this tag")


def _run(options: argparse.Namespace) -> int:
    """Run the command. Its module is imported only now."""
    module, _, name = options.run.partition(":")
    try:
        found = import_module(f"stampede.cli.{module}")
    except ModuleNotFoundError as missing:
        what, extra = {"postgres": ("postgres://", "postgres"), "serve": ("stampede serve", "zmq")}[module]
        line = f"pip install 'stampede-guard[{extra}]'"
        raise MissingExtra(f"{what} needs the package {missing.name!r}: {line}") from missing
    done: int = getattr(found, name)(options)
    return done


def _number(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isdecimal() and len(text) < 9 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {least} to {most}")
        return int(text)

    return number


def _duration(text: str) -> float:
    try:
        return seconds("--since", float(text) if text.replace(".", "", 1).isdecimal() else text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give a time such as 90s, 10m, 1h or 7d") from error
