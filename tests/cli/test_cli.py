"""The command line: each command runs as its own process, on a directory that this process uses too."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest

from stampede import Cache
from stampede.cli.check import _notes
from stampede.cli.keys import _json
from stampede.engines.cells import CellEngine
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
from stampede.model.entry import Entry
from stampede.testing.cells import MemoryCell

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"

SETTINGS = """
[caches.default]
url = "disk://{home}/cache"
namespace = "shop"

[caches.here]
url = "memory://"
"""

SHOP = """
from dataclasses import dataclass
from stampede import cached

@dataclass
class Price:
    amount: int

@cached(ttl=600)
def report(customer: int) -> dict[str, int]:
    return {"customer": customer}

@cached(ttl=600, tags=["prices", "product:{product}"])
def price(product: int) -> Price:
    return Price(product)

@cached(ttl=600, raises=LookupError)
def missing(product: int) -> int:
    raise LookupError("no such product", product)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with settings and a module, in which the commands run."""
    (tmp_path / "stampede.toml").write_text(SETTINGS.format(home=tmp_path))
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.fixture
def cache(home: Path) -> Iterator[Cache]:
    """The default cache of those settings, in this process."""
    with Cache(f"disk://{home}/cache", namespace="shop") as cache:
        yield cache


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(home / "tmp"), "COLUMNS": "120"}


def stampede(home: Path, *arguments: str, code: int = 0) -> str:
    """Runs a command, checks its exit code, and returns its output."""
    done = forked.python("-m", "stampede", *arguments, cwd=home, env=environment(home))
    return judged(done.returncode, done.stdout, done.stderr, code)


def judged(ended: int | None, out: str, err: str, code: int) -> str:
    assert ended == code, out + err
    assert "Traceback" not in err
    assert bool(err) <= (code > 0), err
    return err if code == 2 else out + err


def started(home: Path, *arguments: str) -> str:
    """Runs a command as users do, with all the processes that it starts, and returns its output."""
    words = [sys.executable, "-m", "stampede", *arguments]
    done = subprocess.run(words, cwd=home, env=environment(home), capture_output=True, text=True, timeout=60)
    return judged(done.returncode, done.stdout, done.stderr, 0)


def python(home: Path, program: str) -> str:
    """Runs a program beside the shop module and returns what it prints."""
    done = forked.python("-c", program, cwd=home, env=environment(home))
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required: COMMAND"),
        (["gett"], "invalid choice: 'gett'"),
        (["get"], "required: KEY"),
        (["invalidate"], "one of the arguments KEY --tag is required"),
        (["invalidate", "k", "--tag", "t"], "argument --tag: not allowed with argument KEY"),
        (["invalidate", "--tag", "t", "--cache", "default", "k"], "not allowed with argument"),
        (["invalidate", "--tag", "t", "--function", "shop:price"], "--function is for KEY"),
        (["invalidate", "--tag", "t", "--tag", ""], "--tag has '': a tag is a string of 1 to 256 characters"),
        (["keys", "--tag", ""], "--tag has '': a tag is a string of 1 to 256 characters"),
        (["invalidate", "--tag", "t", "--cache", "here"], "stampede: memory:// lives inside each process"),
        (["check", "--settings", "nothing.toml"], "stampede: nothing.toml: there is no such file"),
        (["check", "--cache", "defualt"], "there is no [caches.defualt]: did you mean 'default'?"),
        (["get", "k", "--cache", "here"], "stampede: memory:// lives inside each process"),
        (["stats", "--cache", "here"], "stampede: memory:// lives inside each process"),
        (["get", "k", "--function", "shop:nothing"], "stampede: --function shop:nothing: it can't be imported"),
        (
            ["get", "k", "--function", "shop:Price"],
            "stampede: --function shop:Price: it is not a function under @cached",
        ),
        (["get", "k", "--function", "nowhere"], "stampede: --function nowhere: it can't be imported"),
    ],
)
def test_wrong_arguments_are_named(home: Path, arguments: list[str], message: str) -> None:
    """A wrong argument causes a message that names it, and no traceback."""
    assert message in stampede(home, *arguments, code=2)


def test_an_error_is_one_line(home: Path) -> None:
    """An error in the settings is one line, even if it quotes text with line breaks."""
    (home / "stampede.toml").write_text('[caches.default]\nurl = "disk:///a"\nttll = "1\\n2"\n')
    assert stampede(home, "check", code=2).count("\n") == 1


def test_version(home: Path) -> None:
    """`stampede --version` prints the installed release."""
    assert re.fullmatch(r"stampede \d+\.\d+\S*\n", started(home, "--version"))


def test_one_of_several_caches_must_be_named(home: Path) -> None:
    """If there are several caches and no default, a command asks for --cache instead of using a memory cache."""
    (home / "stampede.toml").write_text('[caches.a]\nurl = "disk:///a"\n[caches.b]\nurl = "disk:///b"\n')
    assert "--cache takes a, b" in stampede(home, "get", "k", code=2)


def test_the_only_cache_need_not_be_named(home: Path) -> None:
    """If the settings have only one cache, a command uses it without --cache."""
    (home / "stampede.toml").write_text(f'[caches.reports]\nurl = "disk://{home}/cache"\n')
    assert "no value is stored" in stampede(home, "get", "k", code=1)


# -- check ----------------------------------------------------------------------------------------------------------


def test_check_tells_settings_engines_and_limits(home: Path) -> None:
    """`stampede check` shows the settings file, each engine, and which processes share each cache."""
    said = stampede(home, "check")
    assert f"settings: {home / 'stampede.toml'}" in said
    assert re.search(r"default: engine disk://\S+, median ping [\d.]+ (µs|ms), local tier none, codec sealed", said)
    assert "here: this process only" in said
    assert "default: shared by the processes of this machine" in said


@pytest.mark.parametrize("command, code", [("check", 0), ("stats", 0), ("keys", 1)])
def test_a_cache_may_name_an_origin(home: Path, command: str, code: int) -> None:
    """Commands accept a cache that names an origin, and do not report that [origins.db] is missing."""
    settings = f'[caches.default]\nurl = "disk://{home}/cache"\norigin = "db"\n\n[origins.db]\nconcurrency = 8\n'
    (home / "stampede.toml").write_text(settings)
    assert "origins" not in stampede(home, command, code=code)


def test_check_without_settings(tmp_path: Path) -> None:
    """Without a settings file, `stampede check` says that it found none, and names the engine in use."""
    (tmp_path / "tmp").mkdir()
    said = stampede(tmp_path, "check")
    assert "no settings: neither $STAMPEDE_SETTINGS nor ./stampede.toml" in said
    assert "default: engine memory://" in said


def test_check_goes_on_beyond_an_engine_out_of_reach(home: Path) -> None:
    """`stampede check` fails if an engine can't be used, and still checks the other caches."""
    (home / "file").write_text("")
    with (home / "stampede.toml").open("a") as file:
        file.write(f'[caches.bad]\nurl = "disk://{home}/file/cache"\n[caches.later]\nurl = "zmq://localhost:1"\n')
    said = stampede(home, "check", code=1)
    assert "bad: can't be used: can't use" in said
    assert "later: can't be used: zmq:// " in said
    assert "here: this process only" in said
    assert stampede(home, "check", "--cache", "default")


def test_check_tells_that_no_cache_is_the_default_one(home: Path) -> None:
    """If no cache is the default one, `stampede check` says so and suggests the misspelt name."""
    (home / "stampede.toml").write_text('[caches.defualt]\nurl = "memory://"\n')
    assert "there is no [caches.default], only 'defualt': is 'defualt' meant?" in stampede(home, "check")


def test_a_mix_that_keeps_less_says_so() -> None:
    """`stampede check` says that a local tier does not hear of changes, and for how long it may serve old values."""
    pair = Paired(MemoryEngine(sealed=True), MemoryEngine())
    with Cache(engine=pair, local={"entries": 10, "ttl": 3}) as cache:
        assert "the local tier is not told of changes: for 3 s it may serve" in "\n".join(_notes(cache))


@pytest.mark.parametrize("ages", [True, False])
def test_a_store_that_knows_no_time_says_so(ages: bool) -> None:
    """`stampede check` warns if a store has no clock: values may be served too long if a machine's clock is wrong."""
    for engine in (CellEngine(MemoryCell(ages=ages)), Paired(CellEngine(MemoryCell(ages=ages)), MemoryEngine())):
        with Cache(engine=engine) as cache:
            assert ("it has no clock" in "\n".join(_notes(cache))) is not ages


# -- get and invalidate ---------------------------------------------------------------------------------------------


def test_get_prints_a_value_and_its_facts(home: Path, cache: Cache) -> None:
    """`stampede get` prints a value, its age, and how long it is fresh and kept."""
    cache.set("k", {"a": (1, None)}, ttl=600, stale=60)
    value, facts = stampede(home, "get", "k").splitlines()
    assert value == "{'a': (1, None)}"
    assert re.search(r"stored \d+\.\d s ago, fresh for (9\.\d|10\.0) min, kept for (10\.\d|11\.0) min$", facts)


def test_get_of_a_stale_value(home: Path, cache: Cache) -> None:
    """`stampede get` shows that a value is stale."""
    cache.set("k", 1, ttl=600, stale=600)
    cache.expire("k")
    assert re.search(r"\n +stale since \d+.\d s, kept for", stampede(home, "get", "k"))


def test_get_of_nothing(home: Path, cache: Cache) -> None:
    """`stampede get` distinguishes a stored None from a missing value, also by its exit code."""
    cache.set("k", None)
    assert stampede(home, "get", "k").startswith("None\n")
    assert "no value is stored under 'l'" in stampede(home, "get", "l", code=1)


def test_get_json_of_a_dataclass() -> None:
    """`stampede get --json` can print dataclasses."""

    @dataclass
    class Price:
        net: int

    assert json.loads(_json("k", Entry([Price(1)], b"12345678"), None))["value"] == [{"net": 1}]


def test_get_json(home: Path, cache: Cache) -> None:
    """`stampede get --json` prints JSON for programs, and refuses a value that JSON can't represent."""
    cache.set("k", ["ü", 1], ttl=None)
    told = json.loads(stampede(home, "get", "k", "--json"))
    assert told["value"] == ["ü", 1] and told["fresh"] is None and told["found"] is True
    for value in ({1, 2}, float("nan")):
        cache.set("k", value)
        assert "can't be written as JSON" in stampede(home, "get", "k", "--json", code=2)
    assert json.loads(stampede(home, "get", "l", "--json", code=1)) == {"key": "l", "found": False}


def test_get_says_who_computes(home: Path, cache: Cache) -> None:
    """`stampede get` names the process that computes the value, with and without --json."""
    told = []

    def look() -> None:
        told.append(stampede(home, "get", "k", code=1))
        told.append(stampede(home, "get", "k", "--json", code=1))

    cache.get_or_compute("k", look)
    assert f"computed now by {socket.gethostname()}:{os.getpid()}, its lease ends in " in told[0]
    assert json.loads(told[1])["holder"]["pid"] == os.getpid()
    assert "computed" not in stampede(home, "get", "k")


def test_keys_are_listed(home: Path, cache: Cache) -> None:
    """`stampede keys` lists the stored keys, or those that begin with a prefix."""
    cache.set_many({"user:1": 1, "user:2": 2, "other": 3})
    assert sorted(stampede(home, "keys", "user:").split()) == ["user:1", "user:2"]
    assert sorted(stampede(home, "keys").split()) == ["other", "user:1", "user:2"]
    assert sorted(json.loads(stampede(home, "keys", "user:", "--json"))) == ["user:1", "user:2"]


def test_keys_that_are_none_say_where_they_were_looked_for(home: Path) -> None:
    """If no key matches, `stampede keys` says where it looked. The name of a function finds the function's keys."""
    python(home, "import shop; [shop.report(n) for n in range(3)]; print(shop.report.key(1))")
    said = stampede(home, "keys", code=1)
    assert f"no key of cache 'default' (disk://{home}/cache) is its own" in said
    assert "no key of cache 'default' " in (missed := stampede(home, "keys", "us", code=1)) and "with 'us'" in missed
    assert "name the cache: --cache NAME" in stampede(home, "keys", "shop:elsewhere", code=1)
    assert "no key of cache 'default' " in stampede(home, "keys", "us", "--json", code=1)
    assert sorted(stampede(home, "keys", "shop:report").split()) == [f"shop/shop:report:({n})" for n in range(3)]
    assert sorted(stampede(home, "keys", "shop/shop:report").split()) == [f"shop/shop:report:({n})" for n in range(3)]
    assert stampede(home, "keys", "--json", code=1).startswith("[]\n")


def test_what_is_looked_at_is_named(home: Path) -> None:
    """If a value is missing, the message names the cache and its engine."""
    place = f"cache 'default' (disk://{home}/cache)"
    assert stampede(home, "get", "k", code=1) == f"no value is stored under 'k' in {place}\n"
    assert f"no value was stored under 'k' in {place}" in stampede(home, "invalidate", "k")


def test_observers_are_the_programs(home: Path) -> None:
    """If an observer can't be imported, `stampede check` reports it, and other commands still work."""
    settings = (home / "stampede.toml").read_text()
    (home / "stampede.toml").write_text(settings + '[observers]\nmine = "nowhere:on_event"\n')
    assert "no key of cache 'default'" in stampede(home, "keys", code=1)
    said = stampede(home, "check", code=1)  # the program's first call would raise it
    assert "[observers] can't be used" in said and "nowhere" in said
    assert "nowhere" in stampede(home, "check", "--json", code=1)


def test_json_for_programs(home: Path, cache: Cache) -> None:
    """`check --json` and `stats --json` print JSON, so that monitors need not parse tables."""
    cache.set("k", 1)
    said = json.loads(stampede(home, "check", "--json"))
    assert [(each["cache"], each["well"]) for each in said["caches"]] == [("default", True), ("here", True)]
    assert (said["caches"][0]["local"], said["caches"][0]["codec"]) == (None, "sealed")
    assert 0 < said["caches"][0]["ping"] < 10 and "this process only" in said["caches"][1]["notes"][0]
    said = json.loads(stampede(home, "stats", "--json"))
    facts = said[f"{home}/cache"]
    assert (facts["entries_fresh"], facts["entries_stale"], facts["leases_and_locks_standing"]) == (1, 0, 0)


def test_get_a_functions_value_by_its_key(home: Path) -> None:
    """`stampede get --function` finds the key that `report.key(42)` prints, also after `invalidate_all`."""
    key = python(home, "import shop; shop.report.invalidate_all(); shop.report(42); print(shop.report.key(42))").strip()
    assert stampede(home, "get", key, "--function", "shop:report").startswith("{'customer': 42}\n")


def test_get_a_value_of_a_type_of_its_own(home: Path) -> None:
    """`stampede get` reads a value of an application's class only with --function, which imports its module."""
    key = python(home, "import shop; shop.price(7); print(shop.price.key(7))").strip()
    said = stampede(home, "get", key)
    assert "can't be read here" in said and "--function MODULE:NAME" in said and "fresh for" in said
    assert stampede(home, "get", key, "--function", "shop:price").startswith("Price(amount=7)\n")
    assert "can't be read here" in stampede(home, "get", key, "--json", code=2)


def test_get_an_exception_that_is_an_answer(home: Path) -> None:
    """`stampede get` shows a stored exception as an exception, and not as a pair of a name and arguments."""
    program = (
        "import shop, contextlib\nwith contextlib.suppress(LookupError): shop.missing(1)\nprint(shop.missing.key(1))"
    )
    key = python(home, program).strip()
    assert stampede(home, "get", key, "--function", "shop:missing").startswith(
        "raises builtins.LookupError('no such product', 1)\n"
    )


def test_get_of_what_the_terminal_cannot_show(home: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stampede get` escapes characters that the terminal can't show."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    cache.set("k", "ü")
    assert stampede(home, "get", "k").startswith("'\\xfc'\n")


def test_invalidate(home: Path, cache: Cache) -> None:
    """`stampede invalidate` removes a value, also by a function's key, and says whether a value was stored."""
    cache.set("k", 1)
    assert stampede(home, "invalidate", "k").startswith("'k' was removed from cache 'default' ")
    assert cache.get("k") is None
    assert "no value was stored under 'k'" in stampede(home, "invalidate", "k")
    key = python(home, "import shop; shop.report(42); print(shop.report.key(42))").strip()
    assert "was removed" in stampede(home, "invalidate", key)
    assert stampede(home, "get", key, code=1)


def test_invalidate_reaches_a_computation_under_way(home: Path, cache: Cache) -> None:
    """`stampede invalidate` also prevents a running computation from storing its result."""
    with computing(cache, "k"):
        assert "a computation under way will not be stored" in stampede(home, "invalidate", "k")
    assert cache.get("k") is None


# -- tags -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "redis", "disk, signed"])
def tagged(request: pytest.FixtureRequest, home: Path) -> Iterator[Cache]:
    """The default cache of settings that name one of these engines."""
    engine, _, signed = request.param.partition(", ")
    url, key = f"disk://{home}/cache", "k" * 32 if signed else None
    if engine == "redis":
        pytest.importorskip("redis")
        from servers import shared_redis

        url = shared_redis().url
        shared_redis().cli("FLUSHALL")
    line = f'signing_key = "{key}"\n' if key else ""
    (home / "stampede.toml").write_text(f'[caches.default]\nurl = "{url}"\nnamespace = "shop"\n{line}')
    with Cache(url, namespace="shop", signing_key=key) as cache:
        yield cache


def test_invalidate_a_tag(home: Path, tagged: Cache) -> None:
    """`stampede invalidate --tag` removes all that carries one of the tags, of the cache itself and of functions."""
    tagged.set("a", 1, tags=["prices"])
    tagged.set("b", 2, tags=["more", "other"])
    tagged.set("c", 3, tags=["other"])
    python(home, "import shop; shop.price(7)")
    said = stampede(home, "invalidate", "--tag", "prices", "--tag", "more")
    assert said.startswith("what carries 'prices' or 'more' was removed from cache 'default' (")
    assert said.endswith("); what is being computed for it will not be stored\n")
    assert tagged.get_many(["a", "b", "c"]) == {"c": 3}
    assert python(home, "import shop; print(shop.price.peek(7))") == "None\n"


def test_invalidate_a_tag_reaches_a_computation_under_way(home: Path, tagged: Cache) -> None:
    """`stampede invalidate --tag` also prevents a running computation from storing its result."""
    with computing(tagged, "k", tags=["prices"]):
        stampede(home, "invalidate", "--tag", "prices")
    assert tagged.get("k") is None


def test_keys_of_a_tag(home: Path, tagged: Cache) -> None:
    """`stampede keys --tag` lists the keys whose value carries the tag, until the tag is invalidated. The values may be
    of a type that the command does not know."""
    tagged.set_many({"user:1": 1, "user:2": 2, "other": 3}, tags=["prices", "all"])
    tagged.set_many({"user:3": 3, "stale": 4}, tags=["all"], stale=600)
    tagged.set("plain", 5)
    assert sorted(stampede(home, "keys", "--tag", "prices").split()) == ["other", "user:1", "user:2"]
    assert sorted(stampede(home, "keys", "user:", "--tag", "all").split()) == ["user:1", "user:2", "user:3"]
    assert json.loads(stampede(home, "keys", "--tag", "prices", "oth", "--json")) == ["other"]
    python(home, "import shop; [shop.price(n) for n in range(3)]; shop.report(1)")
    three = [f"shop/shop:price:({n})" for n in range(3)]
    assert sorted(stampede(home, "keys", "--tag", "prices", "shop:price").split()) == three
    assert stampede(home, "keys", "--tag", "product:1", "shop:price").split() == three[1:2]
    tagged.expire_tags("all")
    assert "stale" in stampede(home, "keys", "--tag", "all").split()  # stale ones are listed, as without a tag
    tagged.invalidate_tags("prices")
    said = stampede(home, "keys", "--tag", "prices", code=1)
    assert "no key of cache 'default' (" in said and ") is its own and carries 'prices'. " in said
    assert sorted(stampede(home, "keys", "--tag", "all").split()) == ["stale", "user:3"]
    assert stampede(home, "keys", "--tag", "product:1", "shop:price", code=1)


def test_keys_of_a_tag_where_keys_cannot_be_listed(home: Path) -> None:
    """On an engine that can't list its keys, `stampede keys --tag` says so, as `stampede keys` does."""
    pytest.importorskip("pymemcache")
    from memcached_server import shared_memcached

    (home / "stampede.toml").write_text(f'[caches.default]\nurl = "{shared_memcached().url}"\n')
    assert "memcached:// cannot list its keys" in stampede(home, "keys", code=2)
    assert "memcached:// cannot list its keys" in stampede(home, "keys", "--tag", "prices", code=2)


# -- stats ----------------------------------------------------------------------------------------------------------


class computing:
    """A computation that runs until the end of the block."""

    def __init__(self, cache: Cache, key: str, **options: Any) -> None:
        self._began, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=cache.get_or_compute, args=(key, self._compute), kwargs=options)

    def _compute(self) -> str:
        self._began.set()
        self._end.wait(30)
        return "computed"

    def __enter__(self) -> None:
        self._thread.start()
        self._began.wait(30)

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


def test_stats_of_a_disk_cache(home: Path, cache: Cache) -> None:
    """`stampede stats` shows how full a disk cache is, and how many leases and locks it has."""
    cache.set("k", "v" * 1000)
    cache.set("l", 1, stale=600)
    cache.expire("l")
    with computing(cache, "slow"):
        said = stampede(home, "stats")
    assert re.search(r"entries, fresh +1\n", said) and re.search(r"entries, stale +1\n", said)
    assert re.search(r"bytes of keys and values +1,\d\d\d\n", said)
    assert re.search(r"leases and locks standing +1\n", said)
    assert re.search(r"leases and locks standing +0\n", stampede(home, "stats"))


@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_stats_of_redis(home: Path, kind: str) -> None:
    """`stampede stats` shows the keys and the memory of a Redis server, and what it does when it is full."""
    pytest.importorskip("redis")
    from servers import shared_cluster, shared_redis

    url = shared_redis().url if kind == "redis" else shared_cluster().url
    (home / "stampede.toml").write_text(f'[caches.default]\nurl = "{url}"\n')
    with Cache(url) as cache:
        cache.set("k", 1)
    said = stampede(home, "stats")
    assert len(re.findall(r"keys, also of others +\d+\n", said)) == (1 if kind == "redis" else 3)
    assert re.search(r"when full +noeviction\n", said) and re.search(r"memory +\d+.*\n", said)
    if kind == "redis":
        assert re.search(r"keys, also of others +[1-9]", said) and f"{url}" in said
    for facts in json.loads(stampede(home, "stats", "--json")).values():
        assert facts["keys_also_of_others"] >= 0 and facts["bytes_of_memory"] > 0 and facts["at_most"] is None


def test_check_tells_what_a_full_redis_does(home: Path) -> None:
    """`stampede check` warns of a Redis that evicts leases first, and fails if Redis is full and takes no writes."""
    pytest.importorskip("redis")
    from servers import RedisServer

    server = RedisServer("--maxmemory", "50mb", "--maxmemory-policy", "volatile-ttl")
    try:
        (home / "stampede.toml").write_text(f'[caches.default]\nurl = "{server.url}"\n')
        assert "maxmemory-policy volatile-ttl, which evicts leases and locks first: set volatile-lru" in stampede(
            home, "check"
        )
        server.cli("ACL", "SETUSER", "default", "-info")
        assert "maxmemory" not in stampede(home, "check")
        server.cli("ACL", "SETUSER", "default", "+info")
        server.cli("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1kb")
        assert re.search(r"is full \(.* of 1.00K\) and stores nothing new", stampede(home, "check", code=1))
        server.cli("CONFIG", "SET", "maxmemory", "50mb")
        assert "noeviction, which stores nothing new once it is full: set volatile-lru" in stampede(home, "check")
        server.cli("CONFIG", "SET", "maxmemory", "0")
        assert "maxmemory" not in stampede(home, "check")
    finally:
        server.close()


def test_stats_of_an_engine_that_is_not_asked(home: Path, tmp_path: Path) -> None:
    """For an engine without statistics, `stampede stats` refers to `get_cache().stats()`."""
    pytest.importorskip("pymemcache")
    from memcached_server import shared_memcached

    server = shared_memcached()
    (home / "stampede.toml").write_text(f'[caches.default]\nurl = "memcached://127.0.0.1:{server.port}"\n')
    assert "get_cache().stats()" in stampede(home, "stats", code=2)


def test_stats_of_an_engine_out_of_reach(home: Path) -> None:
    """If the engine can't be reached, `stampede stats` fails instead of printing zeros."""
    (home / "file").write_text("")
    (home / "stampede.toml").write_text(f'[caches.default]\nurl = "disk://{home}/file/cache"\n')
    assert "can't use" in stampede(home, "stats", code=2)
