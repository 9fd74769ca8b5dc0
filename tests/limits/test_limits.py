"""The limits of every engine, compared with the pure window: what each stores and replies after each request."""

from __future__ import annotations

import asyncio
import fcntl
import json
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from stampede import EngineError, Limiter, Lock
from stampede.cli.command import main
from stampede.engines import open_engine
from stampede.engines.cells import Cell, CellEngine, wire
from stampede.engines.file import limits as file_limits
from stampede.engines.kit import boot_clock
from stampede.engines.kit.naming import name_of
from stampede.engines.paired import Paired
from stampede.model.limit_window import NOTHING, Booking, Window, bytes_of, give_back, micros, penalize, take, window_of
from stampede.model.ports import Engine, Limits, Rate, Usage
from stampede.runtime.colour import run_blocking
from stampede.testing.cells import MemoryCell

T = TypeVar("T")


class Backdoor:
    """An engine, with direct access to what it has stored for a limit."""

    clock: Callable[[], float] = staticmethod(time.time)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def close(self) -> None:
        self.engine.close()

    def read(self, name: str) -> bytes | None:
        raise NotImplementedError

    def write(self, name: str, data: bytes) -> None:
        raise NotImplementedError


class InFiles(Backdoor):
    clock = staticmethod(boot_clock.clock)

    def _path(self, name: str) -> Path:
        limits: Any = self.engine.blocking.limits
        return limits._path(name)  # type: ignore[no-any-return]

    def read(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._path(name).read_bytes().partition(b"\n")[0]
        return None

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        new = path.with_name("new")
        new.write_bytes(data + b"\n" + name.encode() + b"\n")
        new.replace(path)  # atomically: unused files may be removed at any time


class OnDisk(Backdoor):
    clock = staticmethod(boot_clock.clock)

    def _ask(self, sql: str, *args: Any) -> Any:
        engine: Any = self.engine
        with engine._rows.database.writing() as write:
            return write.execute(sql, args).fetchone()

    def read(self, name: str) -> bytes | None:
        with suppress(EngineError):
            row = self._ask("SELECT starts FROM limits WHERE name = ?", name.encode())
            return None if row is None else row[0]  # type: ignore[no-any-return]
        return None

    def write(self, name: str, data: bytes) -> None:
        self._ask("UPDATE limits SET starts = ? WHERE name = ?", data, name.encode())


class InCells(Backdoor):
    """Access through the cell, behind the engine's back. The engine has to notice that its own copy is outdated."""

    def __init__(self, engine: Engine, cell: Cell) -> None:
        super().__init__(engine)
        self.cell = cell

    def _seen(self, name: str) -> Any:
        its = name_of(name, b"w").decode()
        return its, self.cell.read([its])[0]

    def read(self, name: str) -> bytes | None:
        its, seen = self._seen(name)
        found = wire.opened(its, seen.data)
        return None if found is None else bytes(found[0])[1:]

    def write(self, name: str, data: bytes) -> None:
        its, seen = self._seen(name)
        self.cell.swap(its, seen.version, wire.sealed(its, b"\0" + data, 0.0), 60.0)


class InRedis(Backdoor):
    def __init__(self, engine: Engine, client: Any) -> None:
        super().__init__(engine)
        self.client = client

    def close(self) -> None:
        super().close()
        self.client.close()

    @staticmethod
    def _key(name: str) -> bytes:
        from stampede.engines.redis import limits

        return limits._key(name)

    def read(self, name: str) -> bytes | None:
        return self.client.get(self._key(name))  # type: ignore[no-any-return]

    def write(self, name: str, data: bytes) -> None:
        self.client.set(self._key(name), data)


class InMemcached(Backdoor):
    def __init__(self, engine: Engine, client: Any) -> None:
        super().__init__(engine)
        self.client = client

    def close(self) -> None:
        super().close()
        self.client.close()

    def read(self, name: str) -> bytes | None:
        return self.client.get(name_of(name, b"w"))  # type: ignore[no-any-return]

    def write(self, name: str, data: bytes) -> None:
        self.client.set(name_of(name, b"w"), data, noreply=False)


class InPostgres(Backdoor):
    def __init__(self, engine: Engine, connection: Any) -> None:
        super().__init__(engine)
        self.connection = connection

    def close(self) -> None:
        super().close()
        self.connection.close()

    def read(self, name: str) -> bytes | None:
        from stampede.engines.postgres.limits import window_of_row

        row = self.connection.execute("SELECT * FROM stampede.limits_now(NULL)").fetchone()
        return None if row is None else bytes_of(window_of_row(row))

    def write(self, name: str, data: bytes) -> None:
        window = window_of(data)
        firsts, lasts, costs = map(list, zip(*window.booked, strict=True))
        self.connection.execute(
            "UPDATE stampede.limits SET until = %s, rest = %s, seen = %s, firsts = %s, lasts = %s, costs = %s",
            [window.until, window.rest, window.seen, firsts, lasts, costs],
        )


def _file(tmp_path: Path) -> Backdoor:
    return InFiles(open_engine(f"file://{tmp_path}"))


def _disk(tmp_path: Path) -> Backdoor:
    return OnDisk(open_engine(f"disk://{tmp_path}"))


def _cells(tmp_path: Path) -> Backdoor:
    cell = MemoryCell()
    return InCells(CellEngine(cell), cell)


def _paired(tmp_path: Path) -> Backdoor:
    door = _cells(tmp_path)
    door.engine = Paired(door.engine, open_engine("memory://"))
    return door


def _redis(tmp_path: Path) -> Backdoor:
    redis = pytest.importorskip("redis")
    from servers import shared_redis

    server = shared_redis()
    server.cli("FLUSHALL")
    return InRedis(open_engine(server.url), redis.Redis.from_url(server.url))


def _cluster(tmp_path: Path) -> Backdoor:
    redis = pytest.importorskip("redis")
    from servers import shared_cluster

    cluster = shared_cluster()
    cluster.flush()
    port = cluster.nodes[0].port
    return InRedis(open_engine(cluster.url), redis.RedisCluster("127.0.0.1", port))


def _memcached(tmp_path: Path) -> Backdoor:
    base = pytest.importorskip("pymemcache.client.base")
    from memcached_server import shared_memcached

    server = shared_memcached()
    client = base.Client(("127.0.0.1", server.port))
    client.flush_all(noreply=False)
    return InMemcached(open_engine(server.url), client)


def _postgres(tmp_path: Path) -> Backdoor:
    psycopg = pytest.importorskip("psycopg")
    from postgres_server import shared_postgres

    server = shared_postgres()
    server.prepare()
    connection = psycopg.connect(server.url_of(), autocommit=True)
    connection.execute("DELETE FROM stampede.limits")
    return InPostgres(open_engine(server.url_of()), connection)


DOORS: dict[str, Callable[[Path], Backdoor]] = {
    "file": _file,
    "disk": _disk,
    "cells": _cells,
    "paired": _paired,
    "redis": _redis,
    "cluster": _cluster,
    "memcached": _memcached,
    "postgres": _postgres,
}
MARKS = {"cells": None, "cluster": "redis"}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    mark = MARKS.get(name, name)
    return [] if mark is None else [getattr(pytest.mark, mark)]


@pytest.fixture(params=[pytest.param(name, marks=_marks(name)) for name in DOORS])
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backdoor]:
    door = DOORS[request.param](tmp_path)
    yield door
    door.close()


@pytest.fixture
def ask(colour: str, door: Backdoor) -> Iterator[Callable[[Callable[[Limits], Awaitable[T]]], T]]:
    """Call the limits of the engine in one colour."""
    limits, alimits = door.engine.blocking.limits, door.engine.suspending.limits
    assert limits is not None and alimits is not None
    if colour == "sync":
        yield lambda question: run_blocking(question(limits))  # type: ignore[arg-type]
        return
    with asyncio.Runner() as runner:

        async def asked(question: Callable[[Limits], Awaitable[T]]) -> T:
            return await question(alimits)

        yield lambda question: runner.run(asked(question))


def test_it_decides_as_the_window_does(door: Backdoor, ask: Any) -> None:
    """Each engine decides like the window in a random history of bookings, penalties, clock steps and other rates."""
    dice, name = Random(5), "a limit: ü"
    rates = [Rate(5, 4.0), Rate(3, 2.0), Rate(40, 50.0)]
    mine: list[tuple[int, int]] = []
    exchanged = 0
    for _ in range(150):
        before = window_of(door.read(name))
        rate, cost = dice.choice(rates), dice.randint(1, 3)
        per = micros(rate.per)
        what = dice.random()
        if what < 0.15 and before.booked:  # as if time had passed, or clocks had been ahead
            by = micros(dice.choice([0.5, 2.5, 7.5, 60.0, -0.5, -5.0]))
            before, mine = _moved(before, by), [(at - by, its) for at, its in mine]
            door.write(name, bytes_of(before))
        early = micros(door.clock())
        if what < 0.8:
            ahead = dice.choice([-1.0, 0.0, 1.5, 150.0])
            was = 0
            if mine and dice.random() < 0.4:
                was, cost = mine.pop(dice.randrange(len(mine)))
            reply = ask(lambda limits: limits.take(name, rate, cost, ahead, was))
            late = micros(door.clock())
            after = window_of(door.read(name))
            exchanged += was > 0
            if reply.booked:
                mine.append((reply.at, cost))
                expected, delay, at = take(before, after.seen, rate.most, per, cost, micros(ahead), was)
                assert (after, reply.at) == (said(expected), at)
                assert micros(reply.delay) == delay
            else:
                assert after == said(
                    take(before, after.seen, rate.most, per, cost, -1 if ahead < 0 else micros(ahead), was)[0]
                )
                delays = [take(before, now, rate.most, per, cost, -1, was)[1] for now in (late, early)]
                assert delays[0] <= micros(reply.delay) <= delays[1] or before.seen - early > 990_000
                assert micros(reply.delay) > ahead * 1_000_000
        elif what < 0.9 and mine:
            at, its = mine.pop(dice.randrange(len(mine)))
            ask(lambda limits: limits.give_back(name, rate, its, at))
            assert window_of(door.read(name)) == said(give_back(before, at, its))
        elif what < 0.95:
            ask(lambda limits: limits.penalize(name, rate, 1.0))
            after = window_of(door.read(name))
            assert after == said(penalize(before, after.seen, rate.most, per, 1_000_000))
        else:
            used = ask(lambda limits: limits.used(name))
            assert isinstance(used, Usage) and (used.rate is None) == (before == NOTHING)
    assert exchanged > 20


def said(window: Window) -> Window:
    """Return the window as it is after it was written and read: what has ended is forgotten."""
    return window_of(bytes_of(window))


def _moved(window: Window, by: int) -> Window:
    """Return the window as if all its requests had been made so much earlier."""
    booked = tuple(Booking(each.first - by, each.last - by, each.cost) for each in window.booked)
    return window._replace(
        until=max(window.until, window.seen) - by,
        rest=max(window.rest, window.seen) - by,
        seen=window.seen - by,
        booked=booked,
    )


def test_it_lists_what_is_used(door: Backdoor, ask: Any) -> None:
    """Engines that can list their limits list all of them, for `stampede limits`."""
    for number, name in enumerate(["a b", "ü"]):
        ask(lambda limits: limits.take(name, Rate(5, 60.0), number + 1, 0.0))
    assert (listed := ask(lambda limits: limits.listed())) is None or listed == [
        ("a b", Usage(Rate(5, 60.0), 1, 0, 0.0)),
        ("ü", Usage(Rate(5, 60.0), 2, 0, 0.0)),
    ]


@pytest.mark.redis
def test_numbers_that_are_none_are_nothing_to_redis_either() -> None:
    """Redis ignores a stored window with a wrong number. An infinite one would block the limit for ever."""
    redis = pytest.importorskip("redis")
    from servers import shared_redis

    server = shared_redis()
    right = [b"1", b"2", b"60000000", b"60100000", b"60100000", b"0", b"%d" % micros(time.time()), b"0", b"0", b"2"]
    with redis.Redis.from_url(server.url) as client:
        for place, number in product(range(1, 10), [b"9e99", b"inf", b"nan", b"0x10", b"9" * 20]):
            numbers, name = [*right[:place], number, *right[place + 1 :]], f"{place} {number!r}"
            client.set(InRedis._key(name), b" ".join(numbers))
            ours = Limiter(name, max=2, per=60, on=server.url)
            assert ours.try_acquire() and ours.try_acquire() and not ours.try_acquire(), name
            assert ours.used()[:3] == (Rate(2, 60.0), 2, 0), name


def test_it_is_full_for_all_who_reach_it(door: Backdoor, ask: Any) -> None:
    """A `Limiter` and a direct request to the engine count in the same limit, with their costs."""
    ours = Limiter("x", max=3, per=60, on=door.engine)
    assert ours.try_acquire(cost=2)
    assert ask(lambda limits: limits.take("x", Rate(3, 60.0), 1, 0.0)).booked
    assert not ours.try_acquire()


@pytest.mark.parametrize("name", ["ü" * 40_000, "x" + "ü" * 40_000, "damaged"], ids=["even", "odd", "damaged"])
def test_a_file_whose_name_is_cut_or_damaged_is_a_limit_like_any_other(tmp_path: Path, name: str) -> None:
    """If a name is cut inside a character, or damaged, the limit works and does not break the list of the others."""
    door, other = InFiles(open_engine(f"file://{tmp_path}")), Rate(5, 60.0)
    ours = Limiter(name, max=2, per=60, on=door.engine)
    assert ours.try_acquire()
    if name == "damaged":
        path = door._path(name)
        path.write_bytes(path.read_bytes().replace(b"mag", b"\xc3ag"))
    assert ours.used().used == 1
    assert ours.try_acquire() and not ours.try_acquire()
    limits = door.engine.blocking.limits
    assert limits is not None
    assert run_blocking(limits.take("other", other, 1, 0.0)).booked
    assert {"other"} <= {each for each, _ in run_blocking(limits.listed()) or ()}
    door.close()


def test_a_name_of_several_lines_is_listed_as_it_is(tmp_path: Path) -> None:
    """A name with line breaks is listed in full. Otherwise it would look like another name."""
    names = ["x\ny", "x", "\\n", "\n\\", "\\\\n"]
    for name in names:
        assert Limiter(name, max=3, per=60, on=f"file://{tmp_path}").try_acquire()
    engine = open_engine(f"file://{tmp_path}")
    assert engine.blocking.limits is not None
    listed = run_blocking(engine.blocking.limits.listed())
    assert listed is not None and [name for name, _ in listed] == sorted(names)
    engine.close()


def test_a_file_that_somebody_keeps_blocks_no_loop(tmp_path: Path) -> None:
    """While another process holds a limit's file, the other tasks of an event loop run."""
    ours = Limiter("x", max=3, per=60, on=f"file://{tmp_path}")
    assert ours.try_acquire()
    (file,) = tmp_path.glob("limit-*")

    async def beside() -> bool:
        with file.open("rb") as kept:
            fcntl.flock(kept, fcntl.LOCK_EX)
            asked = asyncio.create_task(ours.atry_acquire())
            for _ in range(20):  # a blocked loop would not run this
                await asyncio.sleep(0.001)
            assert not asked.done()
        return await asked

    assert asyncio.run(beside())


def test_files_of_limits_that_are_over_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of unused limits are removed. Otherwise limits per user would leave a file for every user, for ever."""
    on = f"file://{tmp_path}"
    for number in range(20):
        assert Limiter(f"user:{number}", max=1, per=60, on=on).try_acquire()
    assert Limiter("day", max=1, per=86_400, on=on).try_acquire()
    engine = open_engine(on)
    limits = engine.blocking.limits
    assert limits is not None
    assert len(run_blocking(limits.listed()) or ()) == 21
    real = file_limits.clock
    kept = max(tmp_path.iterdir(), key=lambda file: file.read_bytes().endswith(b"\nuser:7"))
    monkeypatch.setattr(file_limits, "SWEPT", 1.0)
    monkeypatch.setattr(file_limits, "clock", lambda: real() + 3600)
    with kept.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # like a process that uses it
        run_blocking(limits.take("new", Rate(1, 60.0), 1, 0.0))
        assert len(list(tmp_path.iterdir())) == 3
        assert kept.exists()
    assert [name for name, _ in run_blocking(limits.listed()) or ()] == ["day", "new"]
    assert not kept.exists()
    assert not Limiter("day", max=1, per=86_400, on=on).try_acquire()
    engine.close()


def test_a_file_that_is_removed_as_it_is_made_counts_all_starts(tmp_path: Path) -> None:
    """A file that is removed while it is made loses no start. Two files of one name would allow twice as many."""
    engine = open_engine(f"file://{tmp_path}")
    limits = engine.blocking.limits
    assert isinstance(limits, file_limits.LimitFiles)
    ended = threading.Event()

    def remove() -> None:
        while not ended.is_set():
            limits._living()

    def start(name: str, granted: list[bool]) -> None:
        for _ in range(3):
            granted.append(run_blocking(limits.take(name, Rate(5, 60.0), 1, 0.0)).booked)

    remover = threading.Thread(target=remove)
    remover.start()
    for number in range(20):
        granted: list[bool] = []
        crowd = [threading.Thread(target=start, args=(f"l{number}", granted)) for _ in range(4)]
        for each in crowd:
            each.start()
        for each in crowd:
            each.join()
        assert granted.count(True) == 5
    ended.set()
    remover.join()
    engine.close()


def test_a_full_disk_forgets_no_start(tmp_path: Path) -> None:
    """If the disk is full, the old window remains. A window that is half written would forget its starts."""
    door, rate = InFiles(open_engine(f"file://{tmp_path}")), Rate(1, 60.0)
    limits = door.engine.blocking.limits
    assert limits is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in range(3):
        assert run_blocking(limits.take("x", rate, 1, 600.0)).booked
    before = door.read("x")
    assert before is not None
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 8, hard))  # like a disk with that much room
    try:
        with pytest.raises(EngineError, match="can't keep limits"):
            run_blocking(limits.take("x", rate, 1, 600.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert door.read("x") == before
    assert run_blocking(limits.used("x"))[1:3] == (1, 2)
    door.close()


@pytest.mark.redis
@pytest.mark.parametrize("verb", ["limits", "locks"])
def test_a_key_whose_name_is_no_text_hides_no_others(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If the name of a key on a shared server is not text, the command shows the others, without a traceback."""
    redis = pytest.importorskip("redis")
    from servers import shared_redis

    server = shared_redis()
    server.cli("FLUSHALL")
    with redis.Redis.from_url(server.url) as client, Lock("ours", on=server.url):
        assert Limiter("ours", max=5, per=60, on=server.url).try_acquire()
        for key in [*client.scan_iter()]:
            if key.endswith(b"ours"):
                client.set(key.replace(b"ours", b"\xfftheirs"), client.get(key) or b"")
        assert main([verb, server.url]) == 0
    assert "ours" in capsys.readouterr().out


def test_the_command_shows_what_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`stampede limits` shows how much of each limit is used. Control characters in names are escaped."""
    url = f"file://{tmp_path}"
    assert main(["limits", url]) == 0
    ours, other = (Limiter(name, max=5, per=60, on=url) for name in ("git\x1bhub", "mails"))
    ours.acquire(cost=3)
    other.penalize("3h")
    assert main(["limits", url]) == 0
    shown = capsys.readouterr().out
    assert "git\\x1bhub" in shown and "5 per 60 s" in shown and "3.0 h" in shown
    assert main(["limits", "--json", url]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "name": "git\x1bhub", "max": 5, "per": 60.0, "used": 3, "ahead": 0, "penalized": 0.0, "on": url,
    }  # fmt: skip
