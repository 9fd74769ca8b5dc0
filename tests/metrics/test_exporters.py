"""Prometheus and OpenTelemetry, the real packages and a real server: what they show of caches, locks and limits."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from herd import PATIENCE, Herd, until
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from pages import DOCS, Page
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import generate_latest
from prometheus_server import PrometheusServer
from servers import need

from stampede import Cache, LimitTimeout, LockLost, OriginFull
from stampede.metrics import OpenTelemetryObserver, PrometheusObserver
from stampede.metrics.table import METRICS
from stampede.settings import cache_settings

_numbers = iter(range(10**9))


def new_cache(url: str = "memory://", label: str = "", **options: Any) -> Cache:
    """Return a cache whose label no other test uses, because metrics belong to the whole process."""
    settings = cache_settings({"url": url, "early": 0, **options}, "")
    return Cache.of(replace(settings, name=label or f"cache {next(_numbers)}"))


class Scrape:
    """The samples that a registry gives to Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        PrometheusObserver(self.registry)

    def __call__(self, name: str, cache: Cache, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"stampede_{name}", {"cache": cache.label, **labels})


@pytest.fixture
def scrape() -> Scrape:
    return Scrape()


# -- what is measured ---------------------------------------------------------------------------------------------


def test_local_hits_count(scrape: Scrape) -> None:
    """Hits in memory are counted, although they emit no events. Most calls are such hits."""
    with new_cache() as cache:
        call = cache.cached(named)
        for _ in range(10):
            call(1)
        function = call.key(1).partition(":(")[0]
        assert scrape("requests_total", cache, function=function, tier="local", outcome="hit") == 9
        assert scrape("requests_total", cache, function=function, tier="origin", outcome="computed") == 1
        assert scrape("computations_total", cache, function=function, why="missing") == 1


def named(number: int) -> int:
    return number


def test_hits_on_the_engine(scrape: Scrape, tmp_path: Path) -> None:
    with new_cache(f"disk://{tmp_path}") as cache:
        for _ in range(3):
            cache.get_or_compute("k", lambda: 1)
        assert scrape("requests_total", cache, function="", tier="engine", outcome="hit") == 2


@pytest.mark.parametrize("options", [{}, {"local": True}, {"local": False}], ids=["memory", "local tier", "engine"])
def test_seconds_that_the_origin_was_spared(scrape: Scrape, tmp_path: Path, options: dict[str, Any]) -> None:
    """Each hit saves the time that its entry took to compute. The sum remains when the entry is replaced."""
    pause = threading.Event()
    with new_cache(f"disk://{tmp_path}" if options else "memory://", **options) as cache:
        saved = 0.0
        for hits in (3, 2):
            cache.get_or_compute("k", lambda: pause.wait(0.01))
            for _ in range(hits):
                cache.get_or_compute("k", lambda: None)
            entry = cache.peek("k")
            assert entry is not None and entry.cost >= 0.01
            saved += hits * entry.cost
            cache.invalidate("k")
        assert cache.stats().saved_seconds == pytest.approx(saved)
        assert scrape("origin_saved_seconds_total", cache, function="") == pytest.approx(saved)


def test_waits_and_costs_are_histograms(scrape: Scrape) -> None:
    """Waits and computations are histograms. A caller that waits for another one's computation saves time, too."""
    with new_cache() as cache:
        begun, end = threading.Event(), threading.Event()

        def compute() -> int:
            begun.set()
            return end.wait(10)

        first = threading.Thread(target=cache.get_or_compute, args=("k", compute))
        first.start()
        assert begun.wait(10)
        second = threading.Thread(target=cache.get_or_compute, args=("k", compute))
        second.start()
        until(lambda: any(flight.callers > 1 for flight in cache._core.flights._flights.values()))
        end.set()
        first.join()
        second.join()
        assert scrape("requests_total", cache, function="", tier="origin", outcome="waited") == 1
        assert scrape("wait_seconds_bucket", cache, function="", le="+Inf") == 1
        assert scrape("wait_seconds_count", cache, function="") == 1
        assert scrape("wait_seconds_sum", cache, function="") == pytest.approx(cache.stats().waited_seconds)
        assert scrape("computation_seconds_count", cache, function="") == 1
        assert scrape("computation_seconds_sum", cache, function="") == pytest.approx(cache.stats().cost_total)
        assert scrape("origin_saved_seconds_total", cache, function="") == pytest.approx(cache.stats().cost_total)


def test_what_fails_or_is_not_stored(scrape: Scrape) -> None:
    with new_cache(retry_after=0) as cache:
        with pytest.raises(ZeroDivisionError):
            cache.get_or_compute("k", lambda: 1 // 0)
        cache.get_or_compute("k", lambda: 1, cache_if=lambda value: False)
        cache.set("k", 1, ttl=60, stale=60)
        cache.expire("k")
        assert cache.get_or_compute("k", lambda: 1 // 0) == 1
        assert scrape("requests_total", cache, function="", tier="origin", outcome="failed") == 2
        assert scrape("requests_total", cache, function="", tier="engine", outcome="stale") == 1
        assert scrape("stale_served_total", cache, function="", why="failed") == 1
        assert scrape("unkept_values_total", cache, function="") == 1
        assert scrape("invalidations_total", cache, function="") == 2


def test_locks(scrape: Scrape, tmp_path: Path) -> None:
    """Locks are counted by engine, and not by name, because there may be a lock for each order."""
    with Cache(f"disk://{tmp_path}") as cache:

        def sample(name: str, **labels: str) -> float | None:
            return scrape.registry.get_sample_value(f"stampede_{name}", {"engine": cache.engine.called, **labels})

        lock = cache.lock("nobody's lock 66")
        with lock, cache.bulkhead("reports", concurrency=2):
            assert sample("locks_held") == 2
            assert not cache.lock("nobody's lock 66").acquire(wait=0)
        assert sample("locks_held") == 0
        assert sample("lock_wait_seconds_count", outcome="taken") == 2
        assert sample("lock_wait_seconds_count", outcome="refused") == 1
        holding = cache.lock("short", lease=0.05, max_hold=0.01).acquire()
        until(lambda: holding.lost)
        assert sample("locks_held") == 0
        with pytest.raises(LockLost):
            holding.release()
        assert sample("locks_lost_total") == 1
        assert b"lock 66" not in generate_latest(scrape.registry)


def test_limits(scrape: Scrape, tmp_path: Path) -> None:
    """Limits are counted by engine, and not by name, because there may be a limit for each user."""
    with Cache(f"disk://{tmp_path}") as cache:
        limiter = cache.limiter("mails of bob", max=1, per=60)
        assert limiter.try_acquire()
        assert not limiter.try_acquire()
        with pytest.raises(LimitTimeout):
            cache.limiter("mails of bob", max=1, per=60, wait=0).__enter__()

        def count(outcome: str) -> float | None:
            labels = {"engine": cache.engine.called, "outcome": outcome}
            return scrape.registry.get_sample_value("stampede_limit_wait_seconds_count", labels)

        assert (count("started"), count("refused")) == (1, 2)
        assert b"bob" not in generate_latest(scrape.registry)


@pytest.mark.parametrize("many", [False, True])
def test_origins(scrape: Scrape, many: bool) -> None:
    """Each process reports the places that it uses in an origin, so that PromQL can add them up."""
    origin = f"a database {many}"

    def sample(name: str, **labels: str) -> float | None:
        return scrape.registry.get_sample_value(f"stampede_origin_{name}", {"origin": origin, **labels})

    def compute(keys: Any = None) -> Any:
        seen.append(sample("places_used"))
        if len(seen) == 1:
            with pytest.raises(OriginFull):
                call("another", compute)
        return dict.fromkeys(keys or (), 1)

    seen: list[float | None] = []
    with Cache("memory://", origins={origin: {"concurrency": 1, "when_full": "raise"}}, ttl=None) as cache:

        def call(key: str, function: Any) -> Any:
            if many:
                return cache.get_or_compute_many([key], function, origin=origin)
            return cache.get_or_compute(key, function, origin=origin)

        call("k", lambda *keys: Herd(lambda: compute(*keys)).join()[0])
    assert seen == [1]
    assert sample("places_used") == 0
    assert (sample("wait_seconds_count", outcome="entered"), sample("wait_seconds_count", outcome="full")) == (1, 1)


def test_no_counter_falls(scrape: Scrape) -> None:
    """A counter does not fall when a cache is made again: Prometheus would see a restart, and show a peak."""
    for expected in (1, 2):
        cache = new_cache(label="made again and again")
        cache.get_or_compute("k", lambda: 1)
        cache.get_or_compute("k", lambda: 1)
        assert scrape("requests_total", cache, function="", tier="local", outcome="hit") == expected
        del cache
        gc.collect()


def test_two_caches_of_one_name_are_one(scrape: Scrape) -> None:
    """Two caches of one name make one sample. Two samples with the same labels would make the scrape invalid."""
    with new_cache(label="twins") as one, new_cache(label="twins") as other:
        for cache in (one, other):
            cache.get_or_compute("k", lambda: 1)
        assert scrape("requests_total", one, function="", tier="origin", outcome="computed") == 2
        assert scrape("engine_up", one, engine="memory://") == 1


def test_no_label_is_a_key(scrape: Scrape) -> None:
    """No label contains a key: Prometheus can't handle so many different labels."""
    with new_cache() as cache:
        cache.get_or_compute("a key", lambda: 1)
        cache.cached(named)(12345678)
        text = generate_latest(scrape.registry)
    assert b"a key" not in text and b"12345678" not in text


# -- Prometheus ---------------------------------------------------------------------------------------------------


def test_promtool_is_content(scrape: Scrape) -> None:
    """Names, units and help texts follow the conventions of Prometheus."""
    with new_cache() as cache:
        cache.get_or_compute("k", lambda: 1)
        text = generate_latest(scrape.registry)
    for metric in METRICS:
        assert f"# TYPE stampede_{metric.name} {metric.kind}".encode() in text
    run = subprocess.run([need("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=30)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


def test_a_registry_takes_it_twice() -> None:
    """An observer may be made twice for one registry, because settings may be read again."""
    registry = CollectorRegistry()
    for namespace in ("stampede", "stampede", "other"):
        PrometheusObserver(registry, namespace)
    assert len(list(registry.collect())) == 2 * len(METRICS)


class Prometheus:
    """A real server that scrapes this process."""

    def __init__(self) -> None:
        self._scrapes, registry = threading.Semaphore(0), CollectorRegistry()
        PrometheusObserver(registry)
        registry.register(self)  # type: ignore[arg-type]
        self._http, self._thread = start_http_server(0, "127.0.0.1", registry)
        self._server = PrometheusServer(self._http.server_port)

    def collect(self) -> tuple[()]:
        """Count a scrape, without any metrics."""
        self._scrapes.release()
        return ()

    def __call__(self, expression: str, cache: str) -> float:
        """Return the value of an expression for a cache."""
        question = urllib.parse.urlencode({"query": expression})
        address = f"http://127.0.0.1:{self._server.port}/api/v1/query?{question}"
        with urllib.request.urlopen(address, timeout=20) as reply:
            result = json.loads(reply.read())["data"]["result"]
        return sum(float(each["value"][1]) for each in result if each["metric"]["cache"] == cache)

    def until(self, condition: Callable[[], object]) -> None:
        """Check a condition at each scrape, twice a second. The samples of a scrape are visible at the next one."""
        for _ in range(60):
            if condition():
                return
            assert self._scrapes.acquire(timeout=PATIENCE)
        pytest.fail("it never came")

    def close(self) -> None:
        self._server.close()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    with closing(Prometheus()) as server:
        yield server


@pytest.mark.alone  # a scrape has half a second, and takes longer the more caches the process has had
@pytest.mark.prometheus
def test_a_real_prometheus_draws_the_hit_ratio(prometheus: Prometheus) -> None:
    """The expressions of docs/guides/observing.md work in a real Prometheus."""
    (block,) = Page(DOCS / "guides" / "observing.md").blocks("promql")
    ratio, saved, slow = block.text.split("\n\n")
    with new_cache(label="scraped") as cache:
        cache.get_or_compute("k", lambda: 1)
        prometheus.until(lambda: prometheus('stampede_requests_total{outcome="computed"}', "scraped") == 1)
        for _ in range(30):
            cache.get_or_compute("k", lambda: 1)
        cache.get_or_compute("another", lambda: 1)
        prometheus.until(lambda: prometheus(ratio, "scraped") == pytest.approx(30 / 31, abs=0.05))
        assert prometheus(saved, "scraped") > 0
        assert 0 < prometheus(slow, "scraped") < 60


PROCESSES = """
import os, sys
from prometheus_client import CollectorRegistry, multiprocess
from stampede import Cache, LimitTimeout, LockLost, OriginFull
from stampede.metrics import PrometheusObserver, prometheus

prometheus.PERIOD = 0.01
cache = Cache("memory://")

def calls(count):
    for _ in range(count):
        cache.get_or_compute("k", lambda: 1)

PrometheusObserver()
calls(2)  # one computation and one hit, which are the parent's
children = []
for _ in range(2):
    if not (child := os.fork()):
        calls(10)
        sys.exit()  # at which the metrics are written at the latest
    children.append(child)
for child in children:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
prometheus._files[0].write()
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
for name, labels in (
    ("requests_total", {"function": "", "tier": "local", "outcome": "hit"}),
    ("computation_seconds_count", {"function": ""}),
    ("computation_seconds_bucket", {"function": "", "le": "+Inf"}),
    ("engine_up", {"engine": "memory://"}),
):
    print(registry.get_sample_value(f"stampede_{name}", {"cache": "memory://", **labels}))
"""


def test_several_processes(tmp_path: Path) -> None:
    """A scrape of one gunicorn worker reports all workers. Calls from before the fork count once."""
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", PROCESSES]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (run.stdout.split(), run.stderr) == (["21.0", "1.0", "1.0", "1.0"], "")


# -- OpenTelemetry ------------------------------------------------------------------------------------------------


def test_opentelemetry() -> None:
    """OpenTelemetry gets the same names, without the endings that an exporter to Prometheus appends."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    meter = provider.get_meter("test")
    for _ in range(2):  # settings may be read again
        OpenTelemetryObserver(meter)

    def value(name: str, cache: Cache, **labels: str) -> tuple[str, float] | None:
        data: Any = reader.get_metrics_data()
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                if metric.name == f"stampede.{name}" and dict(point.attributes) == {"cache": cache.label, **labels}:
                    return metric.unit, getattr(point, "sum", getattr(point, "value", None))
        return None

    with new_cache() as cache:
        for calls in (2, 3):
            cache.get_or_compute("k", lambda: 1)
            cache.get_or_compute("k", lambda: 1)
            assert value("requests", cache, function="", tier="local", outcome="hit") == ("", 2 * calls - 3)
        assert value("origin_saved", cache, function="") == ("s", pytest.approx(cache.stats().saved_seconds))
        assert value("computation", cache, function="") == ("s", pytest.approx(cache.stats().cost_total))
        assert value("engine_up", cache, engine="memory://") == ("", 1)
    provider.shutdown()
