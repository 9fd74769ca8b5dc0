"""Locks: the cost of an uncontended lock, and the time to hand one over to a waiter, compared with the peers.

    python benchmarks/locks.py [--quick] [--engines redis,zmq] [--rounds 15] [--samples 100] [--before DIRECTORY]
    python benchmarks/locks.py --engines etcd3,zookeeper3  # three members each

Uncontended: the servers on one core, one thread that acquires and releases on another, all in turns. A proxy between
them counts round trips: each question after an answer begins a new one. A ping is one round trip of the engine,
measured in the same turns.

Hand-over: two processes, each with its own client, and nothing is pinned. One has the lock, the other waits for it.
Some hundredths of a second later, the first one releases it. Measured is the time until the other's `acquire` returns,
by a clock that both share. For comparison, in the same turns, a message through a pipe between them: the share of the
machine.

`--before`: only the uncontended lock on Redis, by the stampede in another directory (a worktree of an older commit) and
by this one, in turns, each in its own process.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from _measure import interleaved, machine, pin, table
from _redis import percentile

from stampede import Lock
from stampede.engines import open_engine

HERE = Path(__file__).parent
CORES = sorted(os.sched_getaffinity(0))
ENGINES = ("memory", "file", "disk", "redis", "memcached", "postgres", "etcd", "zookeeper", "zmq")
MORE = ("etcd3", "zookeeper3")  # three members each, by --engines
POLL = ("memcached",)  # whose waiters look again; all others are told
LEASE = 30.0
NO_LOCK = "none", "a message through a pipe"


class Pair(NamedTuple):
    """The functions of one way to lock."""

    take: Callable[[], object]
    give: Callable[[], object]
    ping: Callable[[], float] | None = None  # seconds of the engine's own round trip


# -- the ways -----------------------------------------------------------------------------------------------------


def ours(url: str) -> Pair:
    engine = open_engine(url)
    lock = Lock("bench", lease=LEASE, on=engine)
    return Pair(lock.acquire, lock.release, engine.ping)


def standard(url: str) -> Pair:
    lock = threading.Lock()
    return Pair(lock.acquire, lock.release)


def of_diskcache(url: str) -> Pair:
    """Return the lock of diskcache, whose waiters poll a thousand times per second."""
    from diskcache import Cache
    from diskcache import Lock as DiskLock

    lock = DiskLock(Cache(f"{urlsplit(url).path}.diskcache"), "bench", expire=LEASE)
    return Pair(lock.acquire, lock.release)


def redis_py(url: str) -> Pair:
    import redis

    lock = redis.Redis.from_url(url).lock("bench redis-py", timeout=LEASE)
    return Pair(lock.acquire, lock.release)


def python_redis_lock(url: str) -> Pair:
    import redis
    import redis_lock

    lock = redis_lock.Lock(redis.Redis.from_url(url), "bench redis_lock", expire=int(LEASE))
    return Pair(lock.acquire, lock.release)


def pottery(url: str) -> Pair:
    import redis
    from pottery import Redlock

    lock = Redlock(key="bench pottery", masters={redis.Redis.from_url(url)}, auto_release_time=LEASE)
    return Pair(lock.acquire, lock.release)


def added(url: str) -> Pair:
    """Return the usual recipe: `add`, again after 10 ms; and `delete`, which may delete another holder's lock."""
    from pymemcache import Client

    where = urlsplit(url)
    client = Client((where.hostname, where.port), no_delay=True)

    def take() -> None:
        while not client.add("bench-add", b"1", expire=int(LEASE), noreply=False):
            time.sleep(0.01)

    return Pair(take, partial(client.delete, "bench-add", noreply=False))


def advisory(url: str) -> Pair:
    import psycopg

    link = psycopg.connect(url, autocommit=True, prepare_threshold=0)
    return Pair(
        lambda: link.execute("SELECT pg_advisory_lock(%s)", [77]),
        lambda: link.execute("SELECT pg_advisory_unlock(%s)", [77]),
    )


def kazoo(url: str) -> Pair:
    from kazoo.client import KazooClient

    logging.getLogger("kazoo").setLevel(logging.CRITICAL)  # its servers end before it does
    client = KazooClient(urlsplit(url).netloc)
    client.start()
    lock = client.Lock("/bench/kazoo")
    return Pair(lock.acquire, lock.release)


PEERS: dict[str, dict[str, Callable[[str], Pair]]] = {
    "memory": {"threading.Lock": standard},
    "disk": {"diskcache's Lock": of_diskcache},
    "redis": {"redis-py's Lock": redis_py, "python-redis-lock": python_redis_lock, "pottery's Redlock": pottery},
    "memcached": {"pymemcache, add and delete": added},
    "postgres": {"pg_advisory_lock": advisory},
    "zookeeper": {"kazoo's recipe": kazoo},
    "zookeeper3": {"kazoo's recipe": kazoo},
}


def ways(urls: dict[str, str]) -> dict[tuple[str, str], Pair]:
    """Return the ways by engine and name. A peer that doesn't work here is left out, with a message."""
    made = {}
    for place, url in urls.items():
        made[place, "stampede"] = ours(url)
        for name, make in PEERS.get(place, {}).items():
            try:
                made[place, name] = make(url)
                made[place, name].take()
                made[place, name].give()
            except Exception as why:
                made.pop((place, name), None)
                print(f"left out: {name} ({type(why).__name__}: {why})\n", file=sys.stderr)
    return made


# -- servers ------------------------------------------------------------------------------------------------------


@contextmanager
def servers(wanted: Sequence[str], cores: Sequence[int]) -> Iterator[dict[str, str]]:
    """Give the URLs of the engines. Servers are those of the tests, and run on these cores."""
    sys.path.append(str(HERE.parent / "tests" / "support"))
    os.sched_setaffinity(0, cores)
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        found: dict[str, str] = {}
        for place in wanted:
            if place in ("memory", "file", "disk"):
                found[place] = "memory://" if place == "memory" else f"{place}://{home}/{place}"
            else:
                server = _server(place)
                for each in server.members if place in MORE else [server]:
                    stack.callback(each.close)
                found[place] = server.postgres_url if place == "postgres" else server.url
        os.sched_setaffinity(0, CORES)
        yield found


def _server(place: str) -> Any:
    if place == "redis":
        from _redis import Server

        return Server()
    if place == "memcached":
        from memcached_server import MemcachedServer

        return MemcachedServer()
    if place == "postgres":
        from postgres_server import PostgresServer

        server = PostgresServer()
        server.prepare()
        return server
    if place == "etcd":
        from etcd_server import EtcdServer

        return EtcdServer()
    if place == "zookeeper":
        from zookeeper_server import ZooKeeperServer

        return ZooKeeperServer(tick=2000)
    if place == "etcd3":
        from etcd_server import EtcdCluster

        return EtcdCluster()
    if place == "zookeeper3":
        from zookeeper_server import ZooKeeperEnsemble

        return ZooKeeperEnsemble()
    from broker_server import BrokerProcess

    return BrokerProcess("--grace", "0s")


# -- uncontended --------------------------------------------------------------------------------------------------


class Trips:
    """A counter of round trips between a client and its server: each question after an answer begins a new one."""

    def __init__(self, url: str) -> None:
        from proxy import Proxy

        where = urlsplit(url)
        assert where.port is not None
        self._proxy = Proxy(where.port)
        self.url = url.replace(f":{where.port}", f":{self._proxy.port}", 1)
        self.count, self._answered = 0, True
        self._proxy.forge, self._proxy.alter = self._asked, self._told

    def _asked(self, data: bytes) -> bytes:
        self.count += self._answered
        self._answered = False
        return data

    def _told(self, data: bytes) -> bytes:
        self._answered = True
        return data


def counted(url: str, make: Callable[[str], Pair], pairs: int) -> float:
    """Return the round trips of a pair, from the quietest third of several runs: some contain a heartbeat."""
    trips = Trips(url)
    take, give, _ = make(trips.url)
    found = []
    for turn in range(6):
        before = trips.count
        for _ in range(pairs):
            take()
            give()
        if turn:
            found.append((trips.count - before) / pairs)
    return sorted(found)[1]


def uncontended(urls: dict[str, str], rounds: int, pairs: int) -> None:
    made = ways(urls)
    plain: dict[str, Callable[[], float]] = {}
    for (place, name), pair in made.items():
        plain[f"{place} {name}"] = partial(_each, pair, pairs)
        if pair.ping is not None:
            plain[f"{place} ping"] = partial(_pings, pair.ping, pairs)
    found = {name: 1e6 * seconds for name, seconds in interleaved(plain, rounds).items()}
    rows = []
    for place, name in made:
        make = ours if name == "stampede" else PEERS[place][name]
        trips = f"{counted(urls[place], make, 20):.2f}" if _has_one_server(urls[place]) else ""
        mine, ping = found[f"{place} {name}"], found[f"{place} ping"]
        against = "" if name == "stampede" else f"{mine / found[f'{place} stampede']:.2f}"
        rows.append(
            [
                f"{place}: {name}",
                trips,
                f"{mine:.0f}",
                f"{mine / ping:.1f}" if urlsplit(urls[place]).netloc else "",
                against,
            ]
        )
    print("## Uncontended: acquire and release\n")
    table(["", "round trips", "µs", "x ping", "x stampede"], rows)


def _has_one_server(url: str) -> bool:
    where = urlsplit(url).netloc
    return bool(where) and "," not in where


def _each(pair: Pair, number: int) -> float:
    take, give, _ = pair
    clock, spent = time.perf_counter, []
    for _ in range(number):
        began = clock()
        take()
        give()
        spent.append(clock() - began)
    return median(spent)


def _pings(ping: Callable[[], float], number: int) -> float:
    return median(ping() for _ in range(number))


# -- handed over --------------------------------------------------------------------------------------------------


def handed_over(urls: dict[str, str], samples: int, seed: int) -> None:
    """Measure all ways in turns, so that a slow second of the machine affects all of them."""
    urls = {place: url for place, url in urls.items() if place != "memory"}  # two processes have no memory in common
    made, chance = {NO_LOCK: Pair(lambda: None, lambda: here.send(None)), **ways(urls)}, Random(seed)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    other = spawn.Process(target=waits, args=(there, urls), daemon=True)
    other.start()
    lags: dict[tuple[str, str], list[float]] = {way: [] for way in made}
    pings: dict[str, list[float]] = {place: [] for place, _ in made}
    for turn in range(samples + 1):
        for way, pair in made.items():
            pair.take()
            here.send(way)
            here.recv()
            time.sleep(chance.uniform(0.02, 0.06))  # it waits by then, and those who look now and then do so anywhen
            began = time.monotonic()
            pair.give()
            lag = here.recv() - began
            if turn:  # the first one has to connect
                lags[way].append(1000 * lag)
                if pair.ping is not None:
                    pings[way[0]].append(1000 * pair.ping())
    here.send(None)
    other.join(10)
    rows = []
    for (place, name), each in lags.items():
        ping = median(pings[place] or [0.0])
        polls = " (polls)" if name == "stampede" and place in POLL else ""
        figures = [percentile(each, part) for part in (0.5, 0.9, 0.99)]
        figures.append(figures[-1] - ping)
        rows.append([f"{place}: {name}{polls}", *(f"{figure:.2f}" for figure in (ping, *figures))])
    print(f"## From a release to the next holder, another process: ms, {samples} times\n")
    table(["", "ping", "median", "p90", "p99", "p99 beyond a ping"], rows)


def waits(pipe: Any, urls: dict[str, str]) -> None:
    """Wait for the lock, as the other process."""
    sys.path.append(str(HERE.parent / "tests" / "support"))
    made = {NO_LOCK: Pair(pipe.recv, lambda: None), **ways(urls)}
    while (way := pipe.recv()) is not None:
        pipe.send("about to")
        made[way].take()
        entered = time.monotonic()
        made[way].give()
        pipe.send(entered)


# -- before and now -----------------------------------------------------------------------------------------------


def before_and_now(directory: str, rounds: int, pairs: int) -> None:
    import redis

    with servers(["redis"], CORES[:1]) as urls, ExitStack() as stack:
        client = redis.Redis.from_url(urls["redis"])
        crew = {}
        for name, path in (("before", directory), ("now", str(HERE.parent))):
            words = [sys.executable, __file__, "--pairs-of", urls["redis"]]
            environment = {**os.environ, "PYTHONPATH": path}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = subprocess.Popen(words, env=environment, text=True, **pipes)  # type: ignore[call-overload]
            stack.callback(process.wait)
            stack.callback(process.stdin.close)
            crew[name] = process

        def spent() -> float:
            told: dict[str, float] = client.info("cpu")
            return told["used_cpu_sys_main_thread"] + told["used_cpu_user_main_thread"]

        def asked(name: str) -> tuple[float, float]:
            """Return the microseconds of a pair, and of the server's CPU for it."""
            process, cpu = crew[name], spent()
            process.stdin.write(f"{pairs}\n")
            process.stdin.flush()
            took = float(process.stdout.readline())
            return 1e6 * took, 1e6 * (spent() - cpu) / pairs

        found: dict[str, list[tuple[float, float]]] = {name: [] for name in crew}
        for turn in range(rounds + 1):
            for name in sorted(crew, reverse=bool(turn % 2)):
                found[name].append(asked(name))
    print(f"## Before and now, on Redis: {rounds} turns of {pairs} pairs\n")
    rows = []
    for number, what in enumerate(("µs a pair", "µs of the server's CPU")):
        old, new = ([each[number] for each in found[name][1:]] for name in ("before", "now"))
        ratios = [one / other for one, other in zip(new, old, strict=True)]
        shown = [percentile(ratios, part) for part in (0.25, 0.5, 0.75)]
        rows.append([what, f"{median(old):.1f}", f"{median(new):.1f}", *(f"{each:.3f}" for each in shown)])
    table(["", "before", "now", "ratio: a quarter below", "median", "a quarter above"], rows)


def pairs_of(url: str) -> None:
    """Measure pairs on request: the main function of a process of `before_and_now`."""
    pin(CORES[-1])
    pair = ours(url)
    for line in sys.stdin:
        gc.collect()
        print(_each(pair, int(line)), flush=True)


def peers_here() -> str:
    found = []
    for name in ("redis", "python-redis-lock", "pottery", "kazoo", "pymemcache", "psycopg", "diskcache"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--before", help="a directory with another stampede")
    parser.add_argument("--pairs-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds, pairs, samples = options.rounds, options.pairs, options.samples
    if options.quick:
        rounds, pairs, samples = 2, 20, 5
    if options.pairs_of:
        pairs_of(options.pairs_of)
    elif options.before:
        before_and_now(options.before, rounds, 10 * pairs)
    else:
        print(f"{machine()}; {peers_here()}\n")
        engines = options.engines.split(",")
        with servers(engines, CORES[:1]) as urls:
            pin(CORES[-1])
            uncontended(urls, rounds, pairs)
        with servers(engines, CORES) as urls:
            handed_over(urls, samples, options.seed)
