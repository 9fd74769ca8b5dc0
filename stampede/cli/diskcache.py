"""`stampede diskcache import`: the entries of a diskcache directory, in one of ours."""

from __future__ import annotations

from argparse import Namespace

from stampede.api.cache import Cache
from stampede.cli.show import say, shown
from stampede.contrib.diskcache.moving import move
from stampede.engines import check_url, safe_url
from stampede.errors import OptionError

__all__ = ["import_directory"]

EXAMPLES = 3


def import_directory(options: Namespace) -> int:
    """Copy the entries, and print what was skipped and why. Return 1 if something was skipped."""
    check_url(options.url)
    if not options.url.startswith("disk:"):
        raise OptionError(f"{safe_url(options.url)} is not on disk: give disk:///var/cache/app, for example")
    with Cache(options.url, namespace=options.namespace, on_engine_error="raise") as cache:
        report = move(options.directory, cache, json_disk=options.json_disk)
        stored = sum(1 for _ in cache.keys())  # noqa: SIM118  # a Cache is no dict
    say(f"{report.moved:,} entries of {options.directory} were copied to {safe_url(options.url)}")
    if report.expired:
        say(f"{report.expired:,} had expired")
    if report.there:
        say(f"{report.there:,} were there already, and are as they were")
    for reason, keys in sorted(report.skipped.items(), key=lambda each: -len(each[1])):
        more = ", ..." if len(keys) > EXAMPLES else ""
        say(f"{len(keys):,} skipped: {shown(reason)}\n  {', '.join(keys[:EXAMPLES])}{more}")
    if stored < report.moved:
        wider = f"{safe_url(options.url).partition('?')[0]}?max_bytes=..."
        say(f"only {stored:,} had room: give {wider}, or make room if the disk is full, and import again")
    return 1 if report.skipped or stored < report.moved else 0
