"""The README, tried: its code is run as it stands, and what it says of options, engines and files is compared."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from memcached_server import MemcachedServer
from servers import PATIENCE, RedisCluster, RedisServer, Sentinels, wait_until

import stampede.engines
from stampede import Cache, cached
from stampede.colour import run_blocking
from stampede.engines import open_engine
from stampede.faces import Options, PolicyOptions
from stampede.policy import DEFAULT
from stampede.settings import load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LINES = README.splitlines()


def blocks(language: str) -> list[tuple[int, str]]:
    """Every block of one language: the number of its first line, and its text."""
    found = []
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        found.append((README.count("\n", 0, match.start(1)) + 1, match[1]))
    return found


def section(heading: str) -> str:
    """What stands under a heading, to the next one of its kind or above."""
    level = heading.split()[0]
    text = README.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"\n#{{2,{len(level)}}} ", text, maxsplit=1)[0]


def chapter(heading: str, language: str) -> list[tuple[int, str]]:
    """The blocks of one language under a heading."""
    text = section(heading)
    return [(first, block) for first, block in blocks(language) if block in text]


def rows(heading: str, number: int = 0) -> list[list[str]]:
    """The cells of a table under a heading, without its head."""
    tables = re.findall(r"(?:^\|.*\n?)+", section(heading), re.MULTILINE)
    lines = [line for line in tables[number].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def named(text: str) -> list[str]:
    """What stands in `code`."""
    return re.findall(r"`([^`]+)`", text)


def alone(home: Path) -> dict[str, str]:
    """An environment in which nothing is found, and nothing left behind, outside of `home`."""
    return os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home), "COLUMNS": "120"}


def run(home: Path, *command: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=home, env=alone(home), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_every_block_is_of_a_language_that_is_tested_here() -> None:
    """A block in another language would be shown to everybody and tried by nobody."""
    opened = [line for line in LINES if line.startswith("```")]
    assert set(opened[::2]) == {"```python", "```sh", "```toml"}
    assert set(opened[1::2]) == {"```"}


# What the comments beside the code say, where the code itself doesn't assert it.
CLAIMS = """
assert exchange_rate.stats().computations == 1
assert price.many([("tea",), ("salt",)]) == [9.5, 9.5]
assert "price" in price.key("tea") and isinstance(price.key("tea"), str)
kept = price.peek("tea")
assert kept.value == 9.5 and kept.cost >= 0 and 0 < kept.fresh <= 600 < kept.keep <= 600 + 3600
price.set(8.0, "tea")
assert price("tea") == 8.0
assert price.refresh("tea") == 9.5
price.expire("tea")
assert price.peek("tea").fresh <= 0 < price.peek("tea").keep
postponed = []
price.invalidate("tea", via=postponed.append)
assert price.peek("tea") is not None
postponed[0]()
assert price.peek("tea") is None
assert "Shop.turnover" in shop.turnover.key("2026-11-21")
assert shop.turnover.peek("2026-11-21") is None
assert not lock.held
"""


def program(parts: list[tuple[int, str]]) -> str:
    """Blocks as one program. Its tracebacks tell the README's own lines."""
    lines: list[str] = []
    for first, block in parts:
        lines += [""] * (first - 1 - len(lines))
        lines += block.splitlines()
    return "\n".join(lines)


def test_the_python_runs(tmp_path: Path) -> None:
    """Who copies the README's code, from top to bottom, would meet an error."""
    theirs = [block for heading in CHAPTERS for block in chapter(heading, "python")]
    ours = [block for block in blocks("python") if block not in theirs]
    (tmp_path / "README.py").write_text(program(ours) + CLAIMS)
    run(tmp_path, "-W", "error", "README.py")


def test_the_settings_can_be_read(tmp_path: Path) -> None:
    """Who copies the README's settings would meet an error."""
    for _, block in blocks("toml"):
        file = tmp_path / "stampede.toml"
        file.write_text(block)
        settings = load(file, {"HOME": str(tmp_path), "SHOP_PASSWORD": "secret"})
        assert settings.caches
        for each in settings.caches.values():
            if "redis" in stampede.engines.url.scheme_of(each.url):
                pytest.importorskip("redis")
                open_engine(each.url).close()  # which connects to nobody, but knows the options


# -- servers --------------------------------------------------------------------------------------------------------

CHAPTERS = {"### Redis": "redis", "### memcached": "pymemcache", "## Coming from dogpile.cache": "dogpile.cache"}
"""What runs on real servers, and the package that it needs."""

CLAIMS_OF = {
    "### Redis": """
assert shop.get("greeting") == "hello" == fleet.get("greeting")
assert fence > 0
assert sum(each["name"] == "shop" for each in client.client_list()) > 1
""",
    "### memcached": """
assert items.get("greeting") == "hello" and secured.engine is engine
""",
    "## Coming from dogpile.cache": """
assert user(42) == {"id": 42} and type(region.backend).__name__ == "StampedeBackend"
assert user.get(42) == {"id": 42}
assert theirs.get("key") == "value" and cache.get("answer") == 42
region.actual_backend.cache.clear()
assert user.get(42) is NO_VALUE
""",
}


def server_of(heading: str) -> Any:
    return MemcachedServer() if heading == "### memcached" else RedisServer()


@pytest.mark.parametrize("heading", CHAPTERS)
def test_the_python_of_a_chapter_runs(tmp_path: Path, heading: str) -> None:
    """Who copies a chapter's code, and has its server, would meet an error."""
    pytest.importorskip(CHAPTERS[heading])
    server = server_of(heading)
    try:
        code = program(chapter(heading, "python"))
        code = re.sub(r"localhost:\d+", f"127.0.0.1:{server.port}", code).replace("port=6379", f"port={server.port}")
        (tmp_path / "README.py").write_text(code + CLAIMS_OF[heading])
        run(tmp_path, "README.py")
    finally:
        server.close()


def rights() -> list[str]:
    """The line that makes a user of Redis, as redis-cli is given it."""
    ((_, block),) = chapter("### Redis", "sh")
    program, *command = shlex.split(block.replace("\\\n", ""))
    assert program == "redis-cli"
    return command


def all_verbs(url: str) -> None:
    """Whatever an application may do, by two processes' caches; a right that is missing is an error."""
    options: dict[str, Any] = {"local": True, "early": 0, "on_engine_error": "raise"}
    with Cache(url, **options) as near, Cache(url, **options) as far:
        keys = [f"k{number}" for number in range(9)]  # of each shard, some
        assert near.get_or_compute_many(keys, lambda missing: dict.fromkeys(missing, 1)) == dict.fromkeys(keys, 1)
        for key in keys:

            def from_memory(key: str = key) -> bool:
                before = far.stats().hits
                assert asyncio.run(far.aget_or_compute(key, never)) == 1
                return far.get_or_compute(key, never) == 1 and far.stats().hits > before

            wait_until(from_memory)
            near.set(key, 2)
            wait_until(lambda key=key: far.get_or_compute(key, never) == 2)
        assert near.expire("k0") and near.invalidate("k1")
        assert near.get("k2") == near.peek("k3").value == 2  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError):
            near.get_or_compute("failing", lambda: 1 // 0, retry_after=1)
        near.clear()
        assert near.get_or_compute("k0", lambda: 3) == 3
        with near.lock("l", lease=0.6) as lock:
            assert not far.lock("l").acquire(0.8)
            assert lock.held


def never() -> Any:
    raise AssertionError("it is there")


@pytest.mark.parametrize("kind", ["one server", "cluster", "sentinels"])
def test_the_rights_are_enough(kind: str) -> None:
    """Who gives a user the rights of the README would miss one, in production."""
    pytest.importorskip("redis")
    made: Any = {"one server": RedisServer, "cluster": RedisCluster, "sentinels": lambda: Sentinels(1, 1)}[kind]()
    servers = {"cluster": "nodes", "sentinels": "replicas"}
    masters = [made.master] if kind == "sentinels" else getattr(made, servers.get(kind, ""), [made])
    try:
        for server in masters:
            assert server.cli(*rights()) == "OK"
        all_verbs(made.url.replace("://", "://shop:secret@"))
        for server in masters:
            assert server.cli("ACL", "LOG") == ""
    finally:
        made.close()


def test_keys_are_called_so() -> None:
    """Who looks with redis-cli would look for keys that are called otherwise."""
    pytest.importorskip("redis")
    from stampede.engines.redis.locks import _names as lock_names
    from stampede.engines.redis.verbs import _ALL, _RUN, _note, _scope_key
    from stampede.engines.redis.wire import names

    entry, _, generations, run, ended, lock = (named(cells[0]) for cells in rows("### Redis"))
    (entry_key,) = (key.replace("\\|", "|") for key in entry)
    _, _, key = entry_key.partition(":")
    assert names(key).entry.decode() == entry_key
    assert rows("### Redis")[1][0].startswith(f"`{names(key).lease.decode()}`")
    assert lock == [lock_names("nightly-report").lock.decode()]
    assert generations == [_ALL.decode(), _scope_key("shop:price").decode()]
    assert (run, ended) == ([_RUN.decode()], [_note(key.encode()).decode() for key in generations])


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-ttl"])
def test_what_is_evicted_first(policy: str) -> None:
    """The README would recommend the policy that throws out what is being computed."""
    pytest.importorskip("redis")
    server = RedisServer("--maxmemory-policy", policy, "--maxmemory-samples", "64")

    def keys(pattern: str) -> list[str]:
        return server.redis_cli("--scan", "--pattern", pattern).splitlines()

    def idle(key: str) -> int:
        return int(server.cli("OBJECT", "IDLETIME", key))

    with Cache(server.url) as cache:
        for number in range(20):
            cache.set(f"old {number}", b"x" * 10_000, ttl=600)
        begun, go_on = threading.Event(), threading.Event()

        def compute() -> str:
            begun.set()
            assert go_on.wait(PATIENCE)
            return "new"

        caller = threading.Thread(target=lambda: cache.get_or_compute("new", compute, lease=3))
        caller.start()
        assert begun.wait(PATIENCE)
        (lease,) = keys("{*}l")
        wait_until(lambda: min(map(idle, keys("{*}:*|old *"))) > idle(lease))  # it has been renewed
        used = int(server.cli("INFO", "memory").split("used_memory:")[1].split()[0])
        server.cli("CONFIG", "SET", "maxmemory", str(used - 50_000))
        wait_until(lambda: len(keys("{*}:*|old *")) < 20)
        server.cli("CONFIG", "SET", "maxmemory", "0")
        assert set(keys("{stampede}*")) == {"{stampede}g", "{stampede}g:", "{stampede}r"}
        go_on.set()
        caller.join(PATIENCE)
        assert (cache.get("new") == "new") == (policy == "volatile-lru")
    server.close()


def test_what_a_foreign_reader_gets() -> None:
    """The README would name other flags, or call a value what is a lease."""
    pytest.importorskip("pymemcache")
    server = MemcachedServer()
    with Cache(server.url) as cache:
        lease, value = (each.encode() for each in re.findall(r"flags\s(\d{5,})", section("### memcached")))

        name = f"s:{run_blocking(cache.engine.store.generation(''))}|k"  # type: ignore[union-attr]

        def seen() -> list[bytes]:
            """Flags and size of the item."""
            return server.say(f"get {name}\r\n".encode(), b"END\r\n").split(b"\r\n")[0].split()[2:]

        def compute() -> int:
            assert seen() == [b"0", b"0"]
            wait_until(lambda: seen()[0] == lease)
            return 1

        cache.get_or_compute("k", compute)
        assert seen()[0] == value
    server.close()


def test_a_tier_before_memcached_follows_within_a_second() -> None:
    """Nobody tells it of changes: it would believe in what it has for longer, or not at all."""
    pytest.importorskip("pymemcache")
    server = MemcachedServer()
    with Cache(server.url) as far, Cache(server.url, local=True) as near:
        far.set("k", 1)
        assert [near.get_or_compute("k", never) for _ in range(3)] == [1, 1, 1]
        assert near.stats().hits >= 1
        start = time.monotonic()
        far.set("k", 2)
        wait_until(lambda: near.get_or_compute("k", never) == 2)
        assert time.monotonic() - start < 1.5
        start = time.monotonic()
        far.clear()
        wait_until(lambda: near.get_or_compute("k", lambda: 3) == 3)
        assert time.monotonic() - start < 2.5
    server.close()


_CLOCKS = """
import sys, time
off = float(sys.argv[2])
real, monotonic = time.time, time.monotonic
time.time, time.monotonic = lambda: real() + off, lambda: monotonic() + abs(off)
from stampede import Cache
with Cache(sys.argv[1], early=0) as cache:
    if off > 0:
        cache.set("k", 1, ttl=30)
    assert cache.get_or_compute("k", lambda: 0) == 1
    assert 20 < cache.peek("k").fresh <= 30
"""


def test_memcached_counts_the_time_left(tmp_path: Path) -> None:
    """Promise 14: a machine whose clock is years off would find everything expired, or nothing ever."""
    pytest.importorskip("pymemcache")
    server = MemcachedServer()
    for off in ("1e8", "-1e8"):
        run(tmp_path, "-c", _CLOCKS, server.url, off)
    server.close()


def test_the_shell_lines_can_be_typed(tmp_path: Path) -> None:
    """Who types what the README says would hear of a missing target, extra or command."""
    (tmp_path / "stampede.toml").write_text(f'[caches.default]\nurl = "disk://{tmp_path}/cache"\n')
    with Cache(f"disk://{tmp_path}/cache") as cache:
        cache.set("KEY", "value")
    for _, block in blocks("sh"):
        for line in block.replace("\\\n", "").splitlines():
            for command in line.partition("#")[0].split("&&"):
                _type(command.split(), tmp_path)


def _type(words: list[str], home: Path) -> None:
    match words:
        case ["pip", "install", what]:
            _is_ours(what.strip("'\""))
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["stampede", "demo"]:
            size = ("--processes", "2", "--callers", "2", "--seconds", "0.05")
            assert "demo.html" in run(home, "-m", "stampede", "demo", *size)
            assert "<svg" in (home / "demo.html").read_text()
        case ["stampede", *arguments]:
            assert run(home, "-m", "stampede", *arguments)
        case ["git", "clone", _] | ["cd", "stampede"] | []:
            pass
        case ["redis-cli", "ACL", "SETUSER", *_]:
            pass  # test_the_rights_are_enough does
        case _:
            pytest.fail(f"nobody tries {words}")


def _is_ours(requirement: str) -> None:
    """The distribution and its extras, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extras = requirement.rstrip("]").partition("[")
    assert name == project["name"]
    assert {extra for extra in extras.split(",") if extra} <= project["optional-dependencies"].keys()


def test_pip_lines_in_the_text() -> None:
    """The pip line of an extra that isn't there installs nothing, with a warning nobody reads."""
    lines = re.findall(r"pip\s+install\s+'([^']+)'", README)
    assert lines
    for each in lines:
        _is_ours(each)


def test_the_command_s_other_verbs(tmp_path: Path) -> None:
    """The README would name verbs of the command that are not there."""
    block = next(text for _, text in blocks("sh") if "stampede get" in text)
    for verb in ("demo", "check", "get", "invalidate", "stats"):
        assert verb in block
        run(tmp_path, "-m", "stampede", verb, "--help")


# -- tables ---------------------------------------------------------------------------------------------------------


def options_table() -> dict[str, str]:
    """Each option and its default, as the README has them."""
    return {name: cells[1] for cells in rows("## Options") for name in named(cells[0])}


def test_all_options_are_in_the_table() -> None:
    """An option that nobody can find, or one that is none."""
    assert set(options_table()) == {*Options.__annotations__, *PolicyOptions.__annotations__, "cache"}


@pytest.mark.parametrize("name", list(PolicyOptions.__annotations__))
def test_defaults_are_as_the_table_says(name: str) -> None:
    """The README would promise another default than the code has."""
    said, default = options_table()[name].strip("`"), getattr(DEFAULT, name)
    if name == "max_hold":
        assert said == "60, or 10 x cost"
        assert (DEFAULT.hold_of(0.0), DEFAULT.hold_of(10.0)) == (60.0, 100.0)
    else:
        assert {"None": None, "False": False, "()": ()}.get(said, said) == default or float(said) == default


def test_options_are_taken_by_whom_the_table_names() -> None:
    """An option would be refused where the README says that it works."""
    taken: dict[str, Any] = {name: getattr(DEFAULT, name) for name in PolicyOptions.__annotations__}
    cached(**taken)(lambda: 1)
    with Cache(**{name: value for name, value in taken.items() if name not in ("cache_if", "raises")}) as cache:
        assert cache.get_or_compute("k", lambda: 1, **taken) == 1


def test_engines_of_this_release_are_in_the_table() -> None:
    """An engine that nobody can find, or one that this release does not have."""
    schemes = {scheme for cells in rows("## Choosing an engine") for scheme in re.findall(r"`([\w+]+)://", cells[0])}
    modules = {module for module, _ in stampede.engines._KNOWN.values() if _is_here(module)}
    assert {stampede.engines._KNOWN[scheme][0] for scheme in schemes} == modules


def _is_here(module: str) -> bool:
    return find_spec(module) is not None


def test_figures() -> None:
    """The README tells sizes and seconds that are the code's."""
    from stampede.breaker import Breaker
    from stampede.engines.disk import DiskEngine
    from stampede.engines.memory import MemoryEngine
    from stampede.outage import REFUGE_TTL

    def default(function: Any, name: str) -> Any:
        return inspect.signature(function).parameters[name].default

    assert "kept in memory for 5 seconds at most" in README and REFUGE_TTL == 5
    assert "asked again once a second" in README and default(Breaker, "pause") == 1
    assert "`?max_bytes=` (1 GiB)" in README and default(DiskEngine, "max_bytes") == 2**30
    assert "`?entries=10000`" in README and default(MemoryEngine, "entries") == 10_000


def test_twins() -> None:
    """The README says that each verb that does I/O has one."""
    verbs = {name for name in vars(Cache) if not name.startswith("_") and f"a{name}" in vars(Cache)}
    io = {"get_or_compute", "get_or_compute_many", "get", "get_many", "set", "set_many", "peek", "expire"}
    assert verbs == io | {"invalidate", "invalidate_many", "clear", "add", "update", "touch", "close"}


# -- what happens when ----------------------------------------------------------------------------------------------

TRIED: dict[str, tuple[str, str, str, str]] = {
    "the computing process is killed": (
        "fill::test_nothing_goes_wrong",
        "disk_processes::test_killed_holder",
        "redis_processes::test_a_killed_holder_holds_nobody_up",
        "memcached_faults::test_a_killed_holder_blocks_nobody_for_long",
    ),
    "it is frozen": (
        "keeper::test_a_frozen_holder_stores_nothing",
        "disk_processes::test_frozen_holder_never_fills_late processes::test_a_frozen_holder_stores_nothing_late",
        "redis_processes::test_a_frozen_holder_stores_nothing_late",
        "memcached_faults::test_a_frozen_holder_stores_nothing_late",
    ),
    "the computation outlasts its lease, or hangs": (
        "keeper::test_renewal_ends_after_max_hold",
        "processes::test_a_hung_holder_ends_with_max_hold processes::test_a_blocked_loop_keeps_its_lease",
        "redis_processes::test_a_killed_holder_holds_nobody_up redis_conformance::test_renew_moves_the_end",
        "memcached::test_three_leases_long_is_never_robbed memcached::test_a_blocked_loop_keeps_its_leases",
    ),
    "the computation fails": (
        "cached::test_stale_is_served_when_the_computation_fails",
        "processes::test_a_failure_is_told_to_waiters_elsewhere",
        "redis_conformance::test_verdict_answers_those_who_waited redis_conformance::test_a_rest_ends",
        "memcached::test_waiters_before_the_signature_hear_the_verdict memcached_conformance::test_a_rest_ends",
    ),
    "the key is invalidated during a computation": (
        "fill::test_nothing_goes_wrong",
        "processes::test_invalidation_wins_over_a_computation_elsewhere",
        "redis_processes::test_a_change_elsewhere_ends_a_computation redis_processes::test_random_interleavings",
        "memcached_faults::test_random_interleavings_of_whole_calls"
        " memcached_conformance::test_fill_after_invalidate_is_refused",
    ),
    "another process changes what is in a local tier": (
        "",
        "disk_coherence::test_no_reader_is_ever_behind processes::test_a_change_is_seen_by_hits_elsewhere",
        "redis::test_a_local_tier_follows redis::test_a_bump_is_pushed"
        " redis_generations::test_changes_go_to_a_generation_that_somebody_else_has_just_begun",
        "readme::test_a_tier_before_memcached_follows_within_a_second"
        " memcached::test_generations_are_asked_for_once_a_second",
    ),
    "the engine is down, hangs, or refuses us": (
        "outage::test_calls_go_on outage::test_a_dead_engine_is_asked_once_a_second outage::test_locks_are_never_open",
        "outage::test_a_directory_that_disappears disk_faults::test_locked_by_another_program",
        "redis_faults::test_an_engine_in_trouble_is_no_outage redis_faults::test_a_slow_engine_is_no_dead_one"
        " redis_faults::test_by_default_a_hung_engine_costs_a_second redis_faults::test_nobody_waits_longer_than_wait",
        "memcached_outage::test_an_engine_in_trouble_is_no_outage memcached_outage::test_a_slow_engine_is_no_dead_one"
        " memcached_faults::test_a_server_that_hangs_is_an_error_soon",
    ),
    "the engine is full": (
        "outage::test_what_a_full_engine_refuses_is_kept_for_a_moment_only",
        "disk_faults::test_bounded_by_bytes disk_faults::test_no_room",
        "redis_faults::test_an_engine_in_trouble_is_no_outage redis::test_a_full_server_ends_what_it_began"
        " redis_faults::test_what_was_computed_in_trouble_holds_for_a_while readme::test_what_is_evicted_first",
        "memcached_faults::test_a_full_server_forgets_and_lies_not memcached_faults::test_a_stub_is_evicted_too",
    ),
    "a value can't be kept": (
        "codec::test_max_bytes_holds_both_ways",
        "disk_faults::test_larger_than_the_bound",
        "",
        "memcached_outage::test_a_value_that_is_too_large_is_told_and_given",
    ),
    "one of several servers is down": (
        "outage::test_a_part_that_is_down_is_no_matter_of_the_other_parts",
        "",
        "redis_cluster::test_the_rest_of_a_cluster_goes_on redis_cluster::test_all_are_down_with_the_generations",
        "memcached_faults::test_the_rest_of_a_ring_goes_on"
        " memcached_faults::test_what_comes_back_with_its_values_is_asked_again",
    ),
    "another server takes over": (
        "",
        "",
        "redis_sentinel::test_a_failover_while_a_value_is_computed redis_sentinel::test_a_replica_is_left"
        " redis_cluster::test_a_replica_takes_over redis::test_a_replica_is_not_believed",
        "",
    ),
    "the engine forgets": (
        "",
        "disk_faults::test_removed_directory_is_made_again disk_faults::test_lease_of_a_removed_directory_is_lost"
        " disk_faults::test_damaged_database",
        "redis_faults::test_a_server_that_forgets_at_every_step redis_faults::test_a_lock_that_was_forgotten_is_lost"
        " redis_restart::test_a_snapshot_brings_nothing_back",
        "memcached_outage::test_a_restart_at_every_step memcached_faults::test_an_evicted_lease_is_lost"
        " memcached::test_a_lock_is_released_only_by_its_owner",
    ),
    "a connection breaks, or a reply is lost": (
        "outage::test_a_claim_whose_reply_is_lost_locks_nobody_out",
        "",
        "redis_faults::test_a_cut_at_every_byte redis_faults::test_half_a_reply_and_silence"
        " redis::test_losing_the_news_voids_all redis::test_waiters_are_woken_when_the_news_break",
        "memcached_faults::test_a_fill_cut_at_every_byte_says_what_it_did"
        " memcached::test_a_lost_reply_locks_out_for_a_moment_only",
    ),
    "the wall clock steps": (
        "promises_kept::test_time_left_counts_from_before_the_request",
        "disk_faults::test_steps_of_the_time_of_day disk_faults::test_reboot",
        "redis::test_clocks_are_never_compared redis_clock::test_a_dead_holders_lease_is_no_longer_than_it_was"
        " redis_clock::test_an_entry_is_kept_no_longer_than_it_was_given",
        "readme::test_memcached_counts_the_time_left",
    ),
    "a deploy changes a type": ("codec_types::test_a_deploy_that_changes_a_type_is_a_miss", "", "", ""),
    "bytes in the engine are damaged or hostile": (
        "codec_hostile::test_msgspec_bodies_refuse_what_is_not_of_the_type signing::test_nobody_lengthens_a_life",
        "promises_kept::test_bytes_that_are_not_believed_are_a_miss_and_an_event",
        "redis::test_what_is_no_entry_is_a_miss",
        "memcached::test_foreign_bytes_are_a_miss",
    ),
    "a caller is cancelled": (
        "flight::test_a_cancelled_waiter_disturbs_nobody"
        " flight::test_a_computation_without_callers_is_cancelled_and_its_lease_released",
        "cache::test_a_cancelled_crowd_leaves_nothing",
        "redis_processes::test_storms_of_cancellations",
        "memcached_faults::test_a_cancelled_task_leaves_the_others_replies_alone",
    ),
    "a time limit interrupts": (
        "time_limits::test_while_a_value_is_read interrupts::test_a_call_that_is_interrupted",
        "time_limits::test_while_a_value_is_written interrupts::test_a_call_that_is_interrupted",
        "interrupts::test_a_call_that_is_interrupted",
        "interrupts::test_a_call_that_is_interrupted",
    ),
    "a process forks": (
        "fork::test_a_fork_inside_a_computation",
        "disk_processes::test_both_sides_of_a_fork_go_on processes::test_a_child_leaves_its_parents_lease_alone",
        "redis_processes::test_both_sides_of_a_fork_go_on redis_processes::test_a_child_leaves_its_parents_lease_alone",
        "memcached::test_a_forked_child_has_connections_of_its_own",
    ),
    "a computation asks for its own key": (
        "cached::test_recursion_is_an_error flight::test_two_computations_that_ask_for_each_other",
        "",
        "",
        "",
    ),
    "several greenlets of a thread ask for one key": (
        "greenlets::test_plain_greenlets greenlets::test_gevent",
        "",
        "",
        "",
    ),
}
"""For each row of "What happens when": tests without an engine or for every one; of disk; of Redis; of memcached."""


def test_what_happens_when_was_tried() -> None:
    """The README would promise what was tried nowhere, or elsewhere than it says."""
    promised = [cells[0] for cells in rows("## What happens when")]
    assert promised == list(TRIED)
    said = {cells[0]: tuple(cells[1:]) for cells in rows("## What happens when", 1)}
    assert said == {when: tuple(map(_files, cells)) for when, cells in TRIED.items()}


def _files(tests: str) -> str:
    return ", ".join(f"`{each}`" for each in dict.fromkeys(test.partition("::")[0] for test in tests.split())) or "-"


@pytest.mark.parametrize("test", sorted({test for row in TRIED.values() for cell in row for test in cell.split()}))
def test_a_test_of_what_happens_is_there(test: str) -> None:
    """The README would send its reader to a test that was renamed, or removed."""
    file, _, name = test.partition("::")
    texts = [(ROOT / "tests" / f"test_{file}.py").read_text()]
    if file.endswith("_conformance"):
        texts = [each.read_text() for each in (ROOT / "stampede" / "testing" / "conformance").glob("*.py")]
    assert any(re.search(rf"^\s*(async )?def {name}\(", text, re.MULTILINE) for text in texts)


# -- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)", README))))
def test_links_lead_somewhere(link: str) -> None:
    """A reader would be sent to a file that is not there."""
    assert link.startswith("https://") or (ROOT / link).exists()


def test_what_the_text_names_of_the_package_is_there() -> None:
    """A name in the text that can't be imported, or an event or error that is called otherwise."""
    for name in re.findall(r"`stampede((?:\.\w+)+)`", README):
        assert _leads_somewhere("stampede" + name), name
    for name in re.findall(r"`([A-Z]\w+(?:Error|Failed|Timeout|Lost|Computation))`", README):
        assert hasattr(stampede, name), name


def _leads_somewhere(dotted: str) -> bool:
    found: Any = stampede
    for part in dotted.split(".")[1:]:
        path = f"{found.__name__}.{part}"
        if not hasattr(found, part) and find_spec(path) is not None:
            __import__(path)
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("signing_key, ours", [(None, 118), ("k" * 32, 154)])
def test_the_bytes_of_an_entry(signing_key: str | None, ours: int) -> None:
    """Who plans a server's memory by the README would plan too little."""
    for heading in ("### Redis", "### memcached"):
        assert "118 bytes of ours, or 154 with a" in " ".join(section(heading).split())
    value = "x" * 100
    redis, memcached = RedisServer(), MemcachedServer()
    try:
        for server in (redis, memcached):
            with Cache(server.url, codec="json", signing_key=signing_key) as cache:
                cache.set("k", value)
        longest = max(int(redis.cli("STRLEN", key)) for key in redis.cli("KEYS", "*").split())
        assert longest == ours + len(json.dumps(value))
        dumped = memcached.say(b"lru_crawler metadump all\r\n", b"END\r\n").decode()
        (item,) = [unquote(name) for name in re.findall(r"key=(s%3A\S+)", dumped)]
        assert memcached.say(f"mg {item} s\r\n".encode()).split()[1] == b"s%d" % (ours + len(json.dumps(value)))
    finally:
        redis.close()
        memcached.close()
