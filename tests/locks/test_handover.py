"""The end of a lock: extended, handed over, looked at, and forced by a person."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import python
from herd import until

from stampede import Bulkhead, EngineError, Lock, LockLost, LockTimeout, OptionError, try_lock
from stampede.__main__ import main
from stampede.leases.keeper import Hold, Keeper, keeper
from stampede.locks.holding import Holding, holds_of
from stampede.locks.lock import token_of
from stampede.runtime.colour import run_blocking

BRIEF = 0.2
"""The seconds of a lease that ends during the test."""


@pytest.fixture(params=["memory", "disk", "redis", "postgres", "zmq"])
def on(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an engine whose locks can be handed over."""
    if request.param == "redis":
        pytest.importorskip("redis")
        yield request.getfixturevalue("server").url
    elif request.param == "postgres":
        pytest.importorskip("psycopg")
        from postgres_server import shared_postgres

        shared_postgres().prepare()
        yield shared_postgres().postgres_url
    elif request.param == "zmq":
        pytest.importorskip("zmq")
        from broker_server import BrokerThread

        broker = BrokerThread()
        yield broker.url
        broker.stop()
    else:
        yield f"{request.param}://" + ("" if request.param == "memory" else str(tmp_path))


@pytest.fixture
def ask(colour: str) -> Iterator[Any]:
    """Call a method of a lock, in one colour."""
    if colour == "sync":
        yield lambda lock, verb, *terms: getattr(lock, verb)(*terms)
        return
    with asyncio.Runner() as runner:

        async def asked(lock: Lock | Holding, verb: str, *terms: Any) -> Any:
            return await getattr(lock, "a" + verb)(*terms)

        yield lambda lock, verb, *terms: runner.run(asked(lock, verb, *terms))


def left(holding: Holding) -> float:
    """Return the seconds until its lease ends, as its engine says."""
    ((_, seconds),) = run_blocking(holds_of(holding.access.engine).holder(holding.name))
    return seconds


# -- extend, remaining, locked ------------------------------------------------------------------------------------


def test_its_end_is_put_off(on: str) -> None:
    """`extend` lets a lease end later, so that a holder that will be frozen, or exceeds `max_hold`, keeps its lock."""
    with Lock("l", on=on, lease=5, max_hold=0, wait=0) as lock:
        assert 0 < lock.remaining <= 5
        lock.extend("1m")
        assert lock.held and not lock.lost and 50 < lock.remaining <= 60
        assert 50 < left(lock) <= 60  # by the engine's clock, too
        lock.extend(0)  # this shortens no lease
        assert lock.remaining > 50
    assert lock.remaining == 0
    with pytest.raises(LockLost, match="is not held"):
        lock.extend(1)


def test_of_what_is_lost_no_end_is_put_off(on: str, ask: Any) -> None:
    """A lost lock can't be extended or released: another caller may be inside."""
    lock = Lock("l", on=on, lease=BRIEF, max_hold=0)
    holding = ask(lock, "acquire")
    time.sleep(2 * BRIEF)
    with pytest.raises(LockLost):
        ask(holding, "extend", 60)
    assert not ask(lock, "locked")
    with pytest.raises(LockLost):
        ask(holding, "release")


@pytest.mark.parametrize("wrong", [-1, float("inf"), float("nan"), "soon"])
def test_no_such_end(wrong: Any) -> None:
    """`extend` refuses wrong durations. With an infinite one the lock would never be free again."""
    with Lock("l", on="memory://") as lock:
        with pytest.raises(OptionError):
            lock.extend(wrong)
        assert lock.remaining <= 30


class Slow:
    """A port whose first renewal is under way until `goes_on` is set."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.begun, self.goes_on = threading.Event(), threading.Event()

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        self.asked.append(lease)
        self.begun.set()
        return self.goes_on.wait(10)


def test_a_renewal_under_way_undoes_nothing() -> None:
    """An extension waits for a renewal that is under way. Otherwise the renewal could reach the engine after it."""
    mine, port = Keeper(), Slow()
    with Hold(mine, port, "k", b"t", 3.0, 60.0, lambda: None) as hold:
        mine.look_at(hold, time.monotonic())  # as if a third of its lease had passed
        assert port.begun.wait(10)
        assert not hold.begin()
        port.goes_on.set()
        while not hold.begin():
            time.sleep(0.001)
        hold.ends = hold.least = time.monotonic() + 60  # it is extended
        hold.again(time.monotonic())
        while len(port.asked) < 2:
            time.sleep(0.001)
        assert port.asked[0] == 3.0 and 50 < port.asked[1] < 61
        assert hold.ends > time.monotonic() + 50


def test_anybody_can_ask(on: str, ask: Any) -> None:
    """`locked` tells any caller whether a lock is taken, without taking it."""
    lock, other = Lock("l", on=on), Lock("l", on=on)
    assert not ask(other, "locked")
    assert ask(lock, "acquire")
    assert ask(other, "locked") and ask(lock, "locked") and not other.held
    ask(lock, "release")
    assert not ask(other, "locked")


def test_a_file_s_lock_can_be_asked_too(tmp_path: Path) -> None:
    """`locked` also works for locks of files. A killed process holds none."""
    url = f"file://{tmp_path}"
    assert not Lock("l", on=url).locked()
    with Lock("l", on=url):
        assert Lock("l", on=url).locked()
    assert not Lock("l", on=url).locked()
    program = "import os, sys, stampede; stampede.Lock('l', on=sys.argv[1]).acquire(); os._exit(0)"
    subprocess.run([sys.executable, "-c", program, url], check=True)
    assert not Lock("l", on=url).locked()


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_bulkhead_is_locked_when_it_is_full(scheme: str, tmp_path: Path) -> None:
    """A bulkhead is locked only if all its places are taken."""
    bulkhead = Bulkhead("b", concurrency=2, on=f"{scheme}://" + ("" if scheme == "memory" else str(tmp_path)))
    with bulkhead as place:
        assert not bulkhead.locked()
        with bulkhead as other:
            assert bulkhead.locked()
            other.extend(60)
        with pytest.raises(OptionError, match="a place in a bulkhead can't be handed"):
            place.detach()
    assert not bulkhead.locked()


# -- handed over --------------------------------------------------------------------------------------------------


def test_it_goes_from_hand_to_hand(on: str, ask: Any) -> None:
    """A lock can be handed over by its token, for example from a request to a job."""
    lock = Lock("l", on=on, lease=5, wait=0)
    mine = ask(lock, "acquire")
    fence = mine.fence
    token = ask(mine, "detach", 60)
    assert not mine.held and not mine.lost and lock.token is None
    assert 50 < left(mine) <= 60
    assert not Lock("l", on=on).acquire(wait=0)  # not with another token
    its = Lock("l", on=on, wait=0, token=token.hex())
    assert ask(its, "acquire") and its.token == token
    assert fence is not None and its.fence is not None and its.fence >= fence
    ask(its, "release")
    assert not ask(lock, "locked")
    with pytest.raises(LockLost):
        ask(mine, "detach")


def test_a_block_that_hands_over_gives_nothing_back(on: str) -> None:
    """The end of a block that has detached its lock releases nothing and raises nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Lock("l", on=on) as lock:
            token = lock.detach()
        del lock
        gc.collect()
    assert Lock("l", on=on).locked()
    with Lock("l", on=on, token=token) as lock:
        assert lock.held
    assert not Lock("l", on=on).locked()


HANDS_OVER = """
import os, sys
from stampede import Lock
lock = Lock("l", on=sys.argv[1], lease=5)
held = lock.acquire()
print(held.detach(60).hex(), flush=True)
if sys.argv[2] == "killed":
    os._exit(0)
"""


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_it_outlives_its_process(end: str, on: str) -> None:
    """A lock that was detached outlives its process, however that ended."""
    if on == "memory://":
        pytest.skip("its locks are one process's")
    done = python("-c", HANDS_OVER, on, end)
    assert done.returncode == 0, done.stderr
    time.sleep(1.2 if on.startswith("zmq") else 0.1)  # the broker sees a death within a second
    other = Lock("l", on=on)
    assert other.locked() and not other.acquire(wait=0)
    with Lock("l", on=on, token=done.stdout.strip(), wait=0):
        assert not other.acquire(wait=0)
    assert other.acquire(wait=0)
    other.release()


def test_a_token_of_ones_own(on: str) -> None:
    """A user may choose a token, such as the number of a job. It is for one caller at a time."""
    lock = Lock("l", on=on, token="job 7", wait=0)
    holding = lock.acquire()
    told: list[str] = []

    def come() -> None:
        try:
            lock.acquire()  # otherwise two would be inside
        except OptionError as error:
            told.append(str(error))

    beside = threading.Thread(target=come)
    beside.start()
    beside.join()
    assert len(told) == 1 and "was made with token=, and is for one caller at a time" in told[0]
    holding.detach()
    with pytest.raises(LockTimeout), Lock("l", on=on, token="job 8", wait=0):
        pass
    with Lock("l", on=on, token="job 7", wait=0):
        pass
    with try_lock("l", on=on, token="job 8") as lock:
        assert lock


@pytest.mark.usefixtures("default_timeouts")
def test_nothing_late_takes_it_from_the_next_of_its_token(own: Any) -> None:
    """A release that its server reads late does not end a newer hold with the same token."""
    pytest.importorskip("redis")
    first = Lock("l", on=own.url, token="job 7", lease=30)
    assert first.acquire()
    own.freeze()
    with pytest.raises(EngineError):
        first.release()
    with pytest.raises(EngineError), Lock("l", on=own.url, token="job 7", wait=0):
        pass
    own.thaw()
    with Lock("l", on=own.url, token="job 7", wait=10) as again:
        assert again.held


def test_one_that_is_dropped_stands_for_who_has_its_token(on: str) -> None:
    """The keeper does not release a dropped lock if another object has taken it with the same token."""
    locks = [Lock("l", on=on, token="job 7")]
    hold = locks[0].acquire().hold
    assert hold is not None
    locks.clear()
    with Lock("l", on=on, token="job 7", wait=0):
        keeper.look_at(hold, time.monotonic())  # as if a third of its lease had passed
        until(lambda: hold.ended and not keeper._being_released)
        assert Lock("l", on=on).locked()


def test_tokens() -> None:
    """Equal tokens make equal bytes, and different tokens different bytes. Wrong tokens are refused."""
    assert token_of(None) is None
    assert token_of(b"12345678") == token_of("3132333435363738") == b"12345678"
    words = ["job 7", b"job 8", "x" * 16, "x" * 1000, "\ud800", "é", "12345678"]
    assert len({token_of(each) for each in words}) == len(words)
    assert {len(token_of(each) or b"") for each in words} == {8}
    for wrong in ("", b"", 7, ["a"]):
        with pytest.raises(OptionError, match="token is"):
            token_of(wrong)  # type: ignore[arg-type]


def test_where_it_can_t_be_handed_over_it_is_said(tmp_path: Path) -> None:
    """`detach` is refused if the lock ends with its process: a worker would find it free."""
    with Lock("l", on=f"file://{tmp_path}") as lock:
        with pytest.raises(OptionError, match="a lock of file:// ends with its holder"):
            lock.detach()
        assert lock.held


# -- the command --------------------------------------------------------------------------------------------------


def test_a_person_takes_it_away(capsys: pytest.CaptureFixture[str], server: Any) -> None:
    """`stampede locks --break` takes a lock away, and its holder learns that it is lost."""
    pytest.importorskip("redis")
    lock = Lock("nightly", on=server.url)
    hold = lock.acquire().hold
    assert hold is not None
    assert main(["locks", server.url]) == 0
    assert "nightly" in capsys.readouterr().out
    assert [each["name"] for each in _listed(server.url, capsys)] == ["nightly"]
    assert main(["locks", server.url, "--break", "nightly"]) == 0
    assert "the lock nightly was taken from 1 holder(s)" in capsys.readouterr().out
    with Lock("nightly", on=server.url, wait=5):
        keeper.look_at(hold, time.monotonic())  # as if a third of its lease had passed
        until(lambda: lock.lost)
        with pytest.raises(LockLost):
            lock.release()
    assert main(["locks", server.url, "--break", "nightly"]) == 1
    assert _listed(server.url, capsys) == []


def _listed(url: str, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert main(["locks", url, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_locks_of_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`stampede locks` lists locks of files with their processes. It can't break them: the kernel owns them."""
    url = f"file://{tmp_path}"
    with Lock("é nightly\n", on=url):
        (shown,) = _listed(url, capsys)
        assert (shown["name"], shown["pid"]) == ("é nightly\n", os.getpid())
        assert main(["locks", url]) == 0
        assert "é nightly\\n" in capsys.readouterr().out
        assert main(["locks", url, "--break", "é nightly\n"]) == 2
        assert "end that process" in capsys.readouterr().err
    assert _listed(url, capsys) == []
