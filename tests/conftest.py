"""Every test starts without the developer's settings, and each run uses the same examples."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import marks
import pytest
from hypothesis import settings
from proxy import Proxy
from servers import PATIENCE, RedisServer, in_memory, shared_redis, to_empty
from watchdog import CONTROLLER, Signs, Watchdog

gc.disable()  # until all tests are collected: nothing can be freed before

# A shell that runs pytest in the background ignores Ctrl-C, and all processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Derandomized, so that a run that is green here is green elsewhere; HYPOTHESIS_PROFILE=explore looks for more.
settings.register_profile("stampede", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "stampede"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stampede", "which of those that `-m` and `-k` choose")
    group.addoption("--quick", action="store_true", help="those that start no server and are done in a moment")
    group.addoption("--half", choices=["wide", "alone"], help="those that are marked `alone`, or the others")
    group.addoption("--stuck-after", type=float, default=200, metavar="SECONDS", help="end a worker that gives no sign")


def pytest_configure(config: pytest.Config) -> None:
    if signs := getattr(config, "workerinput", {}).get("signs"):
        config.pluginmanager.register(Signs(Path(signs), config.workerinput["workerid"]))  # type: ignore[attr-defined]
    for name, what in marks.ENGINES.items():
        config.addinivalue_line("markers", f"{name}: it is about {what}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which no test would run is not imported: its import takes longer than some tests."""
    if config.getoption("quick") and marks.is_never_quick(collection_path):
        return True
    return True if config.getoption("half") == "alone" and marks.is_never_alone(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Threads that earlier tests have left may draw random numbers during an example.
    random = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
    for item in items:
        marks.mark(item)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(random)
    half, quick = config.getoption("half"), config.getoption("quick")
    left = {item for item in items if quick and not marks.is_quick(item)}
    if half:
        left |= {item for item in items if (half == "alone") != (item.get_closest_marker("alone") is not None)}
    if left:
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: not marks.comes_first(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The marks of a test are known while it and its fixtures run: they say what it may start."""
    marks.now = {each.name for each in item.iter_markers()}
    try:
        return (yield)
    finally:
        marks.now = None
        if nextitem is not None and nextitem.path != item.path:
            _keep_what_is_there()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def _keep_what_is_there() -> None:
    """The objects that exist now are frozen. Otherwise each of the hundreds of garbage collections in later tests would
    visit them again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """A process that hangs at its exit prints its threads and is ended. No timeout of a test applies there."""
    ends = getattr(config, "workerinput", {}).get("ends")
    if ends is None:
        faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
    else:  # a worker: it waits for the others, and is ended if its own exit takes ten seconds
        mark = Path(ends, config.workerinput["workerid"])  # type: ignore[attr-defined]
        mark.touch()
        atexit.register(mark.unlink)
        threading.Thread(target=_watch_the_end, daemon=True).start()


def _watch_the_end() -> None:
    threading.main_thread().join()
    faulthandler.dump_traceback_later(8, file=sys.__stderr__)


# -- several workers: `pytest -n auto`, as `make test` runs it ---------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Tests wait for more than half of their time, so five workers keep two processors busy. Quick tests hardly wait,
    and each additional worker has to import and collect all tests. If other programs are busy, there are fewer workers:
    otherwise servers that are well would often take longer than the time limits of tests."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = processors if config.getoption("quick") else 5 * processors // 2
    return min(max(most - _busy(), processors), 8)


def _busy() -> int:
    """Return how many threads of other programs run all the time; 0 if the system does not tell."""
    seen: list[int] = []
    for _ in range(5):
        with suppress(OSError, ValueError):
            seen.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)  # we run, too
        time.sleep(0.05)
    return max(min(seen, default=0), 0)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["ends"] = str(_ends())
    node.workerinput["signs"] = str(_watchdog(node.config).place)


@cache
def _watchdog(config: pytest.Config) -> Watchdog:
    dog = Watchdog(config.getoption("stuck_after"))
    config.add_cleanup(dog.close)
    config.pluginmanager.register(Signs(dog.place, CONTROLLER))
    return dog


died: list[str] = []
"""Workers that were killed, or crashed."""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        died.append(node.gateway.id)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if died:
        which = f"{' and '.join(died)} died in the test that failed"
        terminalreporter.write_line(f"{which}: nothing was begun after that, and what is not told of has not run")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """A worker that was ended because it hung at its exit is reported."""
    if _ends.cache_info().currsize:
        hung = sorted(mark.name for mark in _ends().iterdir())
        shutil.rmtree(_ends())
        if hung:
            pytest.exit(f"these hung at their exit: {', '.join(hung)}", returncode=1)


@cache
def _ends() -> Path:
    """The directory where each worker leaves a mark between its last test and its exit."""
    return Path(tempfile.mkdtemp(prefix="stampede-ends-"))


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAMPEDE_SETTINGS", "STAMPEDE_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def default_timeouts() -> None:
    """For tests of the time-outs that Redis and memcached have by default."""


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other tests, a server that is well may take longer than that. Tests of servers that hang name a time-out."""
    if marks.now is None or "default_timeouts" in request.fixturenames:
        return
    if "redis" in marks.now:
        from stampede.engines.redis.clients import DEFAULTS

        for name in ("socket_timeout", "socket_connect_timeout"):
            monkeypatch.setitem(DEFAULTS, name, PATIENCE)
    if "memcached" in marks.now:
        from stampede.engines.memcached.servers import _DEFAULTS

        for name in ("timeout", "connect_timeout"):
            monkeypatch.setitem(_DEFAULTS, name, PATIENCE)


@pytest.fixture(autouse=True)
def _told_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are logged once for each function are logged again in each test."""
    monkeypatch.setattr("stampede.metrics.log._due", {})


@pytest.fixture(autouse=True)
def _empty_servers() -> Iterator[None]:
    """The servers that a test used are emptied after it, so a test never finds data of an earlier one."""
    yield
    while to_empty:
        to_empty.popitem()[1]()


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory in memory, if the machine has one: tests that write thousands of files then wait for no disk."""
    with tempfile.TemporaryDirectory(prefix="stampede-", dir=in_memory(32 << 20)) as path:
        yield Path(path)


@pytest.fixture
def server() -> RedisServer:
    """The session's server, emptied."""
    shared = shared_redis()
    shared.cli("FLUSHALL")
    return shared


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """A server that the test may stop, freeze and configure."""
    with closing(RedisServer()) as mine:
        yield mine


@pytest.fixture
def colour(request: pytest.FixtureRequest) -> str:
    """Whether the test calls the sync or the async side: drawn from its name, so it is always the same for this test.

    Above the ports both colours run the same code. Half of the tests run it in each of them; a test whose code differs
    by colour has `colour` as a parameter, and runs in both."""
    return ("sync", "async")[zlib.crc32(request.node.name.encode()) % 2]


@pytest.fixture
def proxies() -> list[Proxy]:
    """The proxies of a test."""
    return []


@pytest.fixture
def face(request: pytest.FixtureRequest, proxies: list[Proxy]) -> Callable[..., Any]:
    """Makes faces of the class in the test's file. At the end the proxies are healed, and then the faces are closed."""

    def made(*args: Any, **options: Any) -> Any:
        face = request.module.Face(*args, **options)
        request.addfinalizer(face.close)
        request.addfinalizer(lambda: [proxy.heal() for proxy in proxies])
        return face

    return made


@pytest.fixture
def before(request: pytest.FixtureRequest, proxies: list[Proxy]) -> Callable[[Any], Proxy]:
    """Makes a proxy in front of a server, and closes it at the end."""

    def made(server: Any) -> Proxy:
        proxy = Proxy(server.port)
        request.addfinalizer(proxy.close)
        proxies.append(proxy)
        return proxy

    return made
