"""A signing key protects against an attacker who can read and write the data of the engine."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from stampede import Cache, events
from stampede.codecs import Codec, make_codec
from stampede.codecs.envelope import SKEW
from stampede.errors import CodecError
from stampede.model.entry import Entry
from stampede.model.ports import Engine
from stampede.runtime.colour import run_blocking as run

KEY, ID = "shop.report:(1,)", b"12345678"
SIGNED = make_codec(signing_key="k")


def _redis(_: Path) -> str:
    pytest.importorskip("redis")
    from servers import shared_redis

    shared_redis().cli("FLUSHALL")
    return shared_redis().url


def _memcached(_: Path) -> str:
    pytest.importorskip("pymemcache")
    from memcached_server import shared_memcached

    return shared_memcached().url


URLS: dict[str, Callable[[Path], str]] = {
    "memory": lambda _: "memory://?codec=sealed",
    "disk": lambda directory: f"disk://{directory}/c",
    "redis": _redis,
    "memcached": _memcached,
}


@pytest.fixture(params=list(URLS))
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    with Cache(URLS[request.param](tmp_path), signing_key="k", ttl=600, observers=[_seen.append]) as cache:
        _seen.clear()
        yield cache


_seen: list[events.Event] = []


def at(monkeypatch: pytest.MonkeyPatch, moment: float) -> None:
    monkeypatch.setattr("stampede.codecs.envelope._clock", lambda: moment)


def stored(cache: Cache, key: str = "k") -> Entry[bytes]:
    """The entry as the engine stores it."""
    (sealed,) = run(_store(cache).get([cache._root.prefix + key]))
    assert sealed is not None
    return sealed


def put_back(cache: Cache, sealed: Entry[bytes], key: str = "k", **changed: Any) -> None:
    """Writes an entry as an attacker without the signing key can."""
    run(_store(cache).set(cache._root.prefix + key, replace(sealed, **changed)))


def _store(cache: Cache) -> Any:
    engine: Engine = cache._root.core.engine
    return engine.blocking.store


def test_nobody_lengthens_a_life(cache: Cache) -> None:
    """An attacker can't lengthen the life of an entry by a change of the unsigned durations before the signed bytes."""
    cache.set("k", "old", ttl=5)
    sealed = stored(cache)
    put_back(cache, sealed, fresh=inf, keep=inf, ttl=inf)
    entry = cache.peek("k")
    assert entry is not None and entry.fresh <= 5 and entry.keep <= 5
    put_back(cache, sealed, fresh=2.0, keep=3.0)
    entry = cache.peek("k")
    assert entry is not None and entry.fresh <= 2 and entry.keep <= 3


def test_what_is_put_back_ends_with_its_time(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old entry that an attacker writes again still expires at its original time."""
    now = time.time()
    at(monkeypatch, now)
    cache.set("k", "old", ttl=5)
    sealed = stored(cache)
    cache.invalidate("k")
    put_back(cache, sealed)
    assert cache.get("k") == "old"  # the docs describe this limit
    at(monkeypatch, now + SKEW + 6)
    put_back(cache, sealed)
    assert cache.peek("k") is None
    assert cache.get_or_compute("k", lambda: "new") == "new" == cache.get("k")
    assert any(isinstance(event, events.BadBytes) for event in _seen)


def test_nothing_is_good_elsewhere(cache: Cache) -> None:
    """An entry is not valid under another key or in a newer generation."""
    cache.set("k", "mine")
    sealed = stored(cache)
    put_back(cache, sealed, key="other")
    assert cache.get("other") is None
    cache.clear()
    cache.set("k", "anew")
    put_back(cache, sealed)
    assert cache.get("k") is None


@pytest.mark.parametrize("codec", [SIGNED, make_codec("pickle", signing_key="k"), make_codec(signing_key=["k", "j"])])
def test_an_entry_grows_old_by_itself(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signed entry contains its time, so it expires by itself. Clocks that differ by at most SKEW cost no values."""
    at(monkeypatch, 1000.0)
    blob = codec.encode(KEY, Entry(1, ID, ttl=100.0, fresh=100.0, keep=200.0))
    for passed, fresh, keep in ((-50.0, 100.0, 200.0), (SKEW, 100.0, 200.0), (SKEW + 30, 70.0, 170.0)):
        at(monkeypatch, 1000.0 + passed)
        entry = codec.decode(KEY, blob)
        assert (entry.fresh, entry.keep) == (fresh, keep)
    at(monkeypatch, 1000.0 + SKEW + 200)
    with pytest.raises(CodecError, match="the entry has expired"):
        codec.decode(KEY, blob)
    for_ever = codec.encode(KEY, Entry(1, ID))
    at(monkeypatch, 1e12)
    assert codec.decode(KEY, for_ever).fresh == inf


def test_every_bit_is_signed() -> None:
    """A changed bit in any byte of an entry is noticed: in the time, a duration, a flag or the value."""
    blob = SIGNED.encode(KEY, Entry(["value"], ID, 1.0, 2.0, 60.0, 60.0, 90.0))
    for place in range(len(blob)):
        for bit in (1, 128):
            changed = bytearray(blob)
            changed[place] ^= bit
            with pytest.raises(CodecError):
                SIGNED.decode(KEY, bytes(changed))


def test_durations_that_are_no_numbers_are_the_end() -> None:
    """Durations that are NaN count as over, and do not make a value fresh again."""
    with Cache("memory://?codec=sealed", ttl=600) as cache:
        cache.set("k", 1)
        sealed = stored(cache)
        from stampede.algorithm.encoded import EncodedStore

        open_ = EncodedStore(_store(cache), make_codec(), lambda key, error: None).decoded
        entry = open_(cache._root.prefix + "k", replace(sealed, fresh=nan, keep=nan))
        assert entry is not None and not entry.fresh > 0 and not entry.keep > 0


# -- Redis' pushes --------------------------------------------------------------------------------------------------


def test_a_forged_message_brings_no_value() -> None:
    """A forged message in Redis does not give an older value to the waiters."""
    redis = pytest.importorskip("redis")
    from servers import shared_redis, wait_until

    from stampede.engines.redis.wire import names

    server = shared_redis()
    server.cli("FLUSHALL")
    with Cache(server.url, signing_key="k") as cache, Cache(server.url, signing_key="k") as other:
        cache.get_or_compute("k", lambda: "old")
        its = names(cache._root.prefix + "k")
        with redis.Redis(port=server.port) as client:
            head = bytearray(client.get(its.entry))
            cache.invalidate("k")
            computing, told = _Computation(cache), []
            waiter = Thread(target=lambda: told.append(other.get_or_compute("k", lambda: "second")))
            waiter.start()
            wait_until(lambda: client.pubsub_numsub(its.channel)[0][1] == 1)
            token = client.get(its.lease)[:8]
            head[2:10] = token  # a forged entry needs the token of the lease
            head[10:26] = struct.pack(">dd", 0.0, 0.0)
            client.publish(its.channel, token + struct.pack(">d", 60_000.0) + bytes(head))
            wait_until(lambda: other.stats().bad_bytes == 1)
            computing.end()
            waiter.join(20)
    assert told == ["new"]


class _Computation:
    """A computation that runs until `end` is called."""

    def __init__(self, cache: Cache) -> None:
        from threading import Event

        self._begun, self._end = Event(), Event()
        self._thread = Thread(target=lambda: cache.get_or_compute("k", self._compute))
        self._thread.start()
        assert self._begun.wait(20)

    def _compute(self) -> str:
        self._begun.set()
        assert self._end.wait(20)
        return "new"

    def end(self) -> None:
        self._end.set()
        self._thread.join(20)
