"""Observers: what is counted, logged and exported. None of them can break a call."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from stampede import Cache, cached, events, get_cache
from stampede.errors import EngineError, OptionError
from stampede.metrics import Counters, Observers, Stats, log_events
from stampede.testing import isolated

ERROR = ValueError("no such customer")
DOWN = EngineError("refused")
DAY: list[events.Event] = [
    events.Found("f", "f(1)"),
    events.Computed("f", "f(1)", "missing", 0.25, True),
    events.Computed("f", "f(1)", "early", 0.5, False),
    events.Computed("g", "g(1)", "missing", 2.0, True),
    events.Failed("f", "f(2)", "missing", 0.25, ERROR),
    events.Waited("f", "f(1)", 0.125),
    events.Waited("f", "f(1)", 0.25),
    events.Served("f", "f(1)", "computing"),
    events.LeaseLost("f", "f(1)"),
    events.Unkept("f", "f(1)", "12 MB is more than max_bytes"),
    events.BadBytes("f", "f(1)", "truncated"),
    events.Invalidated("f", "f(1)", "invalidate"),
    events.Postponed("f", "f(1)", "invalidate", EngineError("no connection")),
    events.Untold("", "", "redis://x", "ERR syntax error"),
    events.EngineDown("", "", "disk:///x", DOWN),
    events.EngineUp("", "", "disk:///x", 3.0),
]
KINDS = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)}


def test_the_day_holds_every_kind_of_event() -> None:
    """`DAY` contains every kind of event. The tests below rely on that."""
    assert {type(event) for event in DAY} == KINDS - {events.Event}


# -- counters ---------------------------------------------------------------------------------------------------


def counted(day: list[events.Event] = DAY) -> Counters:
    counters = Counters()
    for event in day:
        counters(event)
    return counters


def test_counts_by_scope() -> None:
    """Each event is counted once, in its scope."""
    assert counted().of("f") == Stats(
        found=1,
        waits=2,
        waited_seconds=0.375,
        served={"computing": 1},
        computed={"missing": 1, "early": 1},
        failed=1,
        cost_total=1.0,
        cost_max=0.5,
        lease_lost=1,
        unkept=1,
        bad_bytes=1,
        invalidated=1,
        postponed=1,
        waited_within={0.25: 2},
        cost_within={0.25: 2, 0.5: 1},
    )
    assert counted().of("g") == Stats(computed={"missing": 1}, cost_total=2.0, cost_max=2.0, cost_within={2.5: 1})
    assert counted().of("nobody") == Stats()
    assert counted().scopes() == ["", "f", "g"]


def test_the_total_adds_up() -> None:
    """The total adds up all scopes, and takes the largest `cost_max`. Events without a scope count, too."""
    total = counted().total()
    assert (total.computed, total.computations, total.failed) == ({"missing": 2, "early": 1}, 4, 1)
    assert (total.cost_total, total.cost_max, total.engine_downs) == (3.0, 2.0, 1)


def test_the_ratio() -> None:
    """The ratio: 8 hits, 1 found and 1 served are 10 of 16 answers."""
    assert Stats().ratio == 0.0
    assert Stats(hits=8, found=1, served={"failed": 1}, waits=2, computed={"missing": 3}, failed=1).ratio == 10 / 16


def test_every_event_is_counted() -> None:
    """Every kind of event changes the counters. Otherwise it would be visible nowhere."""
    for event in DAY:
        assert counted([event]).total() != Stats(), event


def test_no_count_is_lost_between_threads() -> None:
    """No count is lost if two threads count in a new scope at the same time."""
    counters, start = Counters(), threading.Barrier(4)

    def count() -> None:
        start.wait(10)
        for number in range(10_000):
            counters(events.Waited(f"f{number}", "k", 1.0))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counters.total() == Stats(waits=40_000, waited_seconds=40_000.0, waited_within={1.0: 40_000})


def test_a_fork_while_somebody_counts() -> None:
    """A child that is forked while a thread holds the lock of the counters can count. It must not hang."""
    program = """
import os, signal, threading
from stampede.runtime import process_lock
from stampede.events import Found
from stampede.metrics import Counters
counters, counting, done = Counters(), threading.Event(), threading.Event()
def count():
    with process_lock.lock:
        counting.set()
        done.wait()
thread = threading.Thread(target=count)
thread.start()
counting.wait()
child = os.fork()
if child == 0:
    signal.alarm(10)  # a hang ends with this signal's exit code
    counters(Found("f", "k"))
    os._exit(counters.total().found)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
thread.join()
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=30)
    assert (run.stdout, run.stderr) == ("1\n", "")


def test_stats_are_values() -> None:
    """`Stats` that were read do not change when the next event comes."""
    counters = counted()
    before = counters.of("f")
    copy = {field.name: getattr(before, field.name) for field in fields(before)}
    counters(DAY[1])
    assert before == Stats(**copy)
    assert counters.of("f").computed["missing"] == 2
    assert before.computed["missing"] == 1


# -- the hub ----------------------------------------------------------------------------------------------------


def test_a_raising_observer_breaks_nothing(log: pytest.LogCaptureFixture) -> None:
    """An observer that raises breaks no call and no other observer. It is logged once, not at every call."""

    def broken(event: events.Event) -> None:
        raise OSError("no metrics today")

    seen: list[events.Event] = []
    hub = Observers([broken, seen.append, broken])
    hub.emit(DAY[0])
    hub.emit(DAY[1])
    assert seen == DAY[:2]
    assert [record.levelname for record in log.records] == ["ERROR", "ERROR"]  # one for each broken observer
    assert "no metrics today" in log.text
    assert "broken" in log.text


def test_ctrl_c_in_an_observer_is_no_error_of_its() -> None:
    """KeyboardInterrupt is not an error of the observer in which it arrives. It reaches the program."""

    def interrupted(event: events.Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([interrupted]).emit(DAY[0])


def test_an_observer_that_causes_events() -> None:
    """An observer that causes events is not called for them, so it does not call itself for ever. Others are called."""
    seen: list[events.Event] = []

    def curious(event: events.Event) -> None:
        hub.emit(DAY[1])

    hub = Observers([curious, seen.append])
    hub.emit(DAY[0])
    hub.emit(DAY[0])
    assert seen == [DAY[1], DAY[0], DAY[1], DAY[0]]


def test_what_is_no_observer_is_refused() -> None:
    """Wrong observers are refused, such as an `async def`, which would be called but never run."""

    async def later(event: events.Event) -> None: ...

    class Later:
        async def __call__(self, event: events.Event) -> None: ...

    for wrong in (later, Later(), 5):
        with pytest.raises(OptionError, match="observers holds"):
            Observers([wrong])  # type: ignore[list-item]
    assert list(Observers([log_events])) == [log_events]
    assert len(Observers()) == 0


# -- log lines --------------------------------------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """The lines that this thread logs. Threads of earlier tests may log, too."""
    monkeypatch.setattr("stampede.metrics.log._due", {})
    mine = threading.get_ident()

    def is_mine(record: logging.LogRecord) -> bool:
        return record.thread == mine

    caplog.handler.addFilter(is_mine)
    with caplog.at_level(logging.DEBUG, "stampede"):
        yield caplog
    caplog.handler.removeFilter(is_mine)


def test_log_lines(log: pytest.LogCaptureFixture) -> None:
    """Each event makes a log line with a fixed text and level, because operators search for them."""
    for event in DAY:
        log_events(event)
    assert [(record.name, record.levelname, record.getMessage()) for record in log.records] == [
        ("stampede", "DEBUG", "found 'f(1)'"),
        ("stampede", "DEBUG", "computed 'f(1)' in 0.250 s: missing"),
        ("stampede", "DEBUG", "computed 'f(1)' in 0.500 s: early; not stored"),
        ("stampede", "DEBUG", "computed 'g(1)' in 2.000 s: missing"),
        ("stampede", "WARNING", "computing 'f(2)' failed after 0.250 s (missing): ValueError: no such customer"
         " (more like this in the next 10 s are not written)"),
        ("stampede", "DEBUG", "waited 0.125 s for 'f(1)', which another caller computed"),
        ("stampede", "DEBUG", "waited 0.250 s for 'f(1)', which another caller computed"),
        ("stampede", "DEBUG", "served 'f(1)' as it was stored: computing"),
        ("stampede", "WARNING", "the value of 'f(1)' was only returned, not stored: "
         "the key was invalidated or set, or its lease ended"
         " (more like this in the next 10 s are not written)"),
        ("stampede", "ERROR", "'f(1)' was returned, but not stored: 12 MB is more than max_bytes"
         " (more like this in the next 600 s are not written)"),
        ("stampede", "WARNING", "the stored entry of 'f(1)' was refused, and its value is computed again: truncated"
         " (more like this in the next 10 s are not written)"),
        ("stampede", "DEBUG", "invalidate: 'f(1)'"),
        (
            "stampede",
            "WARNING",
            "invalidate of 'f(1)' could not be made, and is repeated until it can: EngineError: no connection "
            "(more like this in the next 10 s are not written)",
        ),
        ("stampede", "WARNING", "redis://x does not announce changes to this process: ERR syntax error"),
        ("stampede", "WARNING", "disk:///x is down, calls go on without it: EngineError: refused"),
        ("stampede", "WARNING", "disk:///x is back after 3.0 s"),
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["memory://", "memory://?codec=sealed", "disk"])
def test_what_takes_longer_than_max_hold_is_told_what_to_do(
    url: str, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """If a computation takes longer than `max_hold`, one warning names the option. The value is not stored."""
    with Cache(f"disk://{tmp_path}" if url == "disk" else url, early=0) as cache:
        computed = [cache.get_or_compute("k", lambda: time.sleep(0.2), lease=0.05, max_hold=0.05) for _ in range(2)]
    assert computed == [None, None] and cache.stats().lease_lost == 2
    told = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "max_hold, which is 0.05 s" in told[0] and "max_hold=..." in told[0]


def test_a_refusing_cache_if_is_no_warning(log: pytest.LogCaptureFixture) -> None:
    """A value that `cache_if` refused is logged at DEBUG only: the user asked for it, perhaps at every call."""
    log_events(events.Unkept("f", "f(1)", "cache_if refused it", wanted=True))
    assert [record.levelname for record in log.records] == ["DEBUG"]


def test_a_flood_is_one_line(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many similar faults make one warning. The rest is logged at DEBUG, so that other faults remain visible."""
    now = 1000.0
    monkeypatch.setattr("stampede.metrics.log.monotonic", lambda: now)
    damaged, failing = events.BadBytes("f", "f(1)", "truncated"), events.Failed("f", "f(1)", "missing", 0.1, OSError())
    for _ in range(145):
        for event in (damaged, failing, events.Unkept("f", "f(1)", "a lock can't be stored")):
            log_events(event)
    log_events(events.BadBytes("g", "g(1)", "truncated"))
    told = [record.getMessage() for record in log.records if record.levelname != "DEBUG"]
    assert len(told) == 4  # each says that there may be more
    assert [line.partition("more like this in the next ")[2][:4] for line in told] == ["10 s", "10 s", "600 ", "10 s"]
    assert len(log.records) == 3 * 145 + 1  # the others at DEBUG
    now += 10.5
    log_events(damaged)
    assert log.records[-1].levelname == "WARNING"
    log_events(damaged)
    assert log.records[-1].levelname == "DEBUG"


def test_one_cache_s_fault_hides_no_other_s(log: pytest.LogCaptureFixture) -> None:
    """A fault in one cache does not suppress the log line of another cache, though both use the scope ""."""
    with isolated(caches={name: {"url": "memory://?codec=sealed", "strict": False} for name in "ab"}):
        for name in ("a", "b", "b"):
            get_cache(name).get_or_compute("k", threading.Lock)
    told = [record.getMessage() for record in log.records if record.levelname == "ERROR"]
    assert [line.partition(" was returned")[0] for line in told] == ["cache 'a': 'k'", "cache 'b': 'k'"]


@pytest.mark.parametrize(
    "event",
    [
        events.BadBytes("", "k", "truncated"),
        events.Failed("", "k", "missing", 0.1, OSError()),
        events.Unkept("", "k", "a lock can't be stored"),
        events.Untold("", "", "redis://x", "ERR"),
    ],
)
def test_a_line_names_its_cache_once(event: events.Event, log: pytest.LogCaptureFixture) -> None:
    """A log line names the cache if it has a name, so that an operator of many caches knows which one it is."""
    log_events(event, cache="shop", named=True)
    log_events(event, cache="redis://x", named=False)
    lines = [record.getMessage() for record in log.records]
    assert lines[0] == f"cache 'shop': {lines[1]}"


def test_a_recursion_that_is_too_deep_is_told_once(log: pytest.LogCaptureFixture) -> None:
    """A recursion that is too deep makes one warning, and not one for each level."""

    @cached(ttl=None)
    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    with pytest.raises(RecursionError):
        depth(2000)
    warnings = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert len([each for each in warnings if "RecursionError" in each]) == 1


def test_keys_can_be_left_out(log: pytest.LogCaptureFixture) -> None:
    """With keys=False, neither keys nor messages of errors are logged: they may contain personal data."""
    for event in DAY:
        partial(log_events, keys=False)(event)
    assert len(log.records) == len(DAY)
    everything = log.text + "".join(repr(vars(record)) for record in log.records)
    assert "(1)" not in everything
    assert "customer" not in everything
    assert "computing f failed after 0.250 s (missing): ValueError" in log.text


def test_a_key_cannot_forge_a_line(log: pytest.LogCaptureFixture) -> None:
    """A line break in a key is escaped: strangers choose parts of keys, and must not forge log lines."""
    log_events(events.Found("", "k\nWARNING all is lost"))
    assert log.records[0].getMessage() == r"found 'k\nWARNING all is lost'"


def test_records_hold_fields(log: pytest.LogCaptureFixture) -> None:
    """Log records have fields, so that a JSON log need not parse the text."""
    log_events(DAY[1])
    found = {name: value for name, value in vars(log.records[0]).items() if name.startswith("stampede.")}
    assert found == {"stampede.event": "Computed", "stampede.scope": "f", "stampede.key": "f(1)"}


# -- observers of foreign packages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, extra", [("PrometheusObserver", "prometheus"), ("OpenTelemetryObserver", "opentelemetry")]
)
def test_a_missing_extra_prints_its_pip_line(name: str, extra: str) -> None:
    """If an optional package is not installed, the error shows the `pip install` command."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import stampede.metrics as metrics\n"
        "from stampede.errors import MissingExtra\n"
        f"try: metrics.{name}()\n"
        "except MissingExtra as exc: print(exc)\n"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=30)
    assert f"pip install 'stampede-guard[{extra}]'" in run.stdout, run.stderr
