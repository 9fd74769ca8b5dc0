"""Marks each test with its engines and the servers that it may start, found in its names, parameters and code.

`pytest -m redis` uses these marks, and so does `make quick`, which starts no server. If a test's parameters name
engines, they decide; otherwise the code of the test and its fixtures decides. A test that starts a server without the
mark fails: it then needs its own `@pytest.mark.redis`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]

ENGINES = {
    "memory": "the memory engine",
    "disk": "the disk engine",
    "file": "locks of files",
    "null": "the engine that keeps nothing",
    "paired": "values of one engine under the locks of another",
    "redis": "Redis, or Valkey, of whatever kind",
    "cluster": "several Redis servers that share all keys",
    "sentinel": "a Redis server that others stand in for",
    "memcached": "memcached",
    "sql": "any SQL database",
    "mariadb": "MariaDB, by the engine for any SQL database",
    "postgres": "PostgreSQL, by its own engine and by the one for any SQL database",
    "dynamodb": "DynamoDB, as moto and dynalite play it",
    "zmq": "our broker, `stampede serve`",
    "etcd": "etcd, alone or three members together",
    "zookeeper": "ZooKeeper, alone or three servers together",
    "dogpile": "dogpile.cache, on our engines or below them",
    "prometheus": "a Prometheus server, which scrapes our metrics",
}
SERVERS = {"redis", "memcached", "mariadb", "postgres", "dynamodb", "zmq", "etcd", "zookeeper", "prometheus"}
"""Marks of tests that start a server."""

SLOW = {
    "test_benchmarks.py",
    "test_cell_engines.py",
    "test_chaos.py",
    "test_cli.py",
    "test_deadlines.py",
    "test_disk_conformance.py",
    "test_disk_faults.py",
    "test_disk_processes.py",
    "test_examples.py",
    "test_examples_django.py",
    "test_examples_flask.py",
    "test_examples_fastapi.py",
    "test_examples_postgres.py",
    "test_examples_web.py",
    "test_exclusion.py",
    "test_file_lock.py",
    "test_fork.py",
    "test_greenlets.py",
    "test_histories.py",
    "test_hung_origins.py",
    "test_keeper.py",
    "test_keys_properties.py",
    "test_layers.py",
    "test_interpreter_end.py",
    "test_postgres_failover.py",
    "test_postgres_processes.py",
    "test_processes.py",
    "test_promises.py",
    "test_random_signals.py",
    "test_sql_conformance.py",
    "test_sqlalchemy_histories.py",
    "test_thread_signals.py",
    "test_tls.py",
    "test_typing.py",
    "test_what_failures_leave.py",
    "test_wheel.py",
    "test_limit_window.py",
    "test_zmq_faults.py",
    "test_adaptive.py::test_an_origin_that_is_well_has_nearly_all_of_its_room",
    "test_adaptive.py::test_one_that_is_saturated_is_given_about_what_it_bears",
    "test_attacks.py::test_a_finalizer_or_signal_may_call_at_every_line_of_ours",
    "test_batch.py::test_many_gives_what_calls_would",
    "test_cached.py::test_a_parameter_may_have_any_name",
    "test_cached.py::test_recursion_that_is_too_deep_leaves_nothing_behind",
    "test_cell_engine.py::test_a_record_comes_back_as_it_was",
    "test_cells.py::TestCellsAsync",
    "test_cells.py::TestCellsInAStorm",
    "test_cells.py::TestFileCell",
    "test_cells.py::TestHistoriesOfCells",
    "test_cells.py::TestHistoriesOfCellsAsync",
    "test_cells.py::TestHistoriesOfCellsThatEnd",
    "test_cells.py::TestMemoryCell",
    "test_cells.py::TestMuteMemoryCell",
    "test_cells.py::TestWatchedMemoryCell",
    "test_codec.py::test_msgspec_gives_back_what_it_was_given_or_refuses",
    "test_codec.py::test_sealed_gives_back_what_it_was_given",
    "test_codec_alike.py::test_what_comes_back_is_what_went_in",
    "test_codec_hostile.py::test_depth_does_not_end_the_process",
    "test_codec_hostile.py::test_hostile_bytes_are_refused_and_change_nothing",
    "test_codec_types.py::test_a_fingerprint_is_the_same_everywhere",
    "test_damaged_bytes.py::test_in_a_table",
    "test_deadlines.py::test_who_computes_for_himself_alone_has_a_deadline_too",
    "test_demo.py::test_an_interrupted_demo_leaves_nothing",
    "test_demo.py::test_the_demo_leaves_a_page_and_nothing_else",
    "test_demo.py::test_wrong_arguments_are_named",
    "test_disk_coherence.py::test_no_reader_is_ever_behind",
    "test_docs.py::test_the_command_s_verbs",
    "test_docs.py::test_the_python_runs",
    "test_docs.py::test_the_shell_lines_can_be_typed",
    "test_docs_facts.py::test_the_pictures_are_of_today",
    "test_dogpile_backend.py::test_threaded_dogpile",
    "test_dogpile_backend.py::test_threaded_get_multi",
    "test_dogpile_region.py::test_an_interpreter_with_a_region_ends_quietly",
    "test_dogpile_region.py::test_threaded_dogpile",
    "test_dogpile_region.py::test_threaded_get_multi",
    "test_dogpile_region.py::test_without_dogpile_its_pip_line_is_told",
    "test_exporters.py::test_several_processes",
    "test_fill.py::test_nothing_goes_wrong",
    "test_fill.py::test_one_fault_at_every_point",
    "test_fill.py::test_options_that_nobody_has_thought_of_together",
    "test_fill.py::test_the_explorer_sees_a_broken_algorithm",
    "test_fill.py::test_two_faults_among_many",
    "test_generations.py::test_a_value_that_arrives_while_another_thread_begins_a_generation",
    "test_handover.py::test_it_outlives_its_process",
    "test_keys.py::test_texts_are_the_same_in_another_process",
    "test_keys.py::test_texts_are_the_same_in_other_versions_of_python",
    "test_keys_maker.py::test_a_format_string_makes_no_key_of_two",
    "test_local.py::test_any_order_of_writes",
    "test_lock.py::test_a_held_lock_is_renewed",
    "test_lock.py::test_a_killed_holder_frees_the_lock",
    "test_lock.py::test_a_killed_holder_frees_the_lock_for_tasks",
    "test_memory.py::test_no_value_outlives_its_invalidation",
    "test_once.py::test_a_killed_process_is_replaced",
    "test_once.py::test_two_crons_that_are_apart",
    "test_raises_whole.py::test_all_that_it_holds_comes_back",
    "test_registry.py::test_configure_again_and_again_while_threads_call",
    "test_registry.py::test_disabled_by_the_environment",
    "test_registry.py::test_importing_reads_no_settings",
    "test_registry.py::test_the_environment_beats_the_file_and_configure_beats_both",
    "test_lock_queue.py::test_the_rule_holds",
    "test_shared_locks.py::test_a_place_ends_with_its_holder",
    "test_sqlalchemy_statements.py::test_keys_are_the_same_in_every_process",
    "test_sqlalchemy_statements.py::test_without_greenlet",
    "test_whose_value.py::test_a_captured_application_is_walked_through_once",
    "test_whose_value.py::test_a_fingerprint_is_the_same_in_every_process",
    "test_whose_value.py::test_a_module_that_is_run_by_its_name",
    "test_whose_value.py::test_a_name_that_tells_is_all_that_tells",
    "test_whose_value.py::test_an_application_factory_whose_objects_differ_between_processes",
    "test_whose_value.py::test_an_edited_script",
    "test_whose_value.py::test_what_is_captured_is_told_by_what_it_holds",
}
"""Files, classes and functions that use processes or faults, or take seconds: `make quick` skips them."""

FIRST = {
    "test_docs.py::test_the_python_runs[engines.md]",
    "test_typing.py::test_checkers_agree[mypy]",
    "test_typing.py::test_checkers_agree[pyright]",
    "test_whose_value.py::test_what_is_captured_is_told_by_what_it_holds",
    "test_chaos.py",
    "test_fork.py",
    "test_wheel.py",
}
"""Tests that run first. Some take ten seconds: at the end, other workers would wait for them. Others fork, which takes
longer the more tests the process has run."""

_SAME = {"sentinels": "sentinel", "redis+cluster": "cluster", "redis+sentinel": "sentinel", "valkey": "redis"}
_STARTS = {
    "RedisServer": "redis", "SteppedServer": "redis", "RedisCluster": "redis", "Sentinels": "redis",
    "shared_redis": "redis", "shared_cluster": "redis", "shared_sentinels": "redis",
    "MemcachedServer": "memcached", "shared_memcached": "memcached",
    "MariadbServer": "mariadb", "shared_mariadb": "mariadb",
    "PostgresServer": "postgres", "shared_postgres": "postgres", "PgBouncer": "postgres",
    "BrokerThread": "zmq", "BrokerProcess": "zmq",
    "MotoServer": "dynamodb", "shared_moto": "dynamodb", "Dynalite": "dynamodb", "shared_dynalite": "dynamodb",
    "EtcdServer": "etcd", "EtcdCluster": "etcd", "shared_etcd": "etcd",
    "ZooKeeperServer": "zookeeper", "ZooKeeperEnsemble": "zookeeper", "shared_zookeeper": "zookeeper",
    "PrometheusServer": "prometheus",
}  # fmt: skip
"""Names that start a server, from any caller."""

now: set[str] | None = None
"""The marks of the running test; None: no test runs."""


def starts(server: str) -> None:
    """Note that a server of this kind is used. The running test fails if it does not have the mark."""
    if now is not None and server not in now:
        pytest.fail(f"it uses a {server} server: mark it with @pytest.mark.{server}")


def mark(item: pytest.Item) -> None:
    """Add the marks of a test before it runs."""
    own = {each.name for each in item.iter_markers()}
    known = item.path, getattr(item, "cls", None), item.name.partition("[")[0], *_engines_of(item, own)
    found = _marks.get(known)
    if found is None:
        found = _marks[known] = {*_found(item, *known[-2:])}
    for name in found - own:
        item.add_marker(name)


_marks: dict[tuple[Any, ...], set[str]] = {}
"""Computed marks. All parameter sets of a test that name the same engines share them, which saves two thirds."""


def _engines_of(item: pytest.Item, own: set[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The engines that its parameters name, and the engines of its own marks."""
    return frozenset(_known(_parameters(item))), frozenset(own & ENGINES.keys())


def _found(item: pytest.Item, given: frozenset[str], own: frozenset[str]) -> Iterator[str]:
    found = {*given, *own, *_known(_words(item))}
    if not given - {"paired"}:  # the names do not say which engines
        found |= _led_to(item)
    if found & {"cluster", "sentinel"}:
        found.add("redis")
    if found & {"mariadb", "postgres"}:
        found.add("sql")
    yield from found
    if _is_of_libraries(item, found):
        yield "libraries"
    file, kind = item.path.name, getattr(item, "cls", None)
    if SLOW & {file, f"{file}::{item.name.partition('[')[0]}", f"{file}::{kind and kind.__name__}"}:
        yield "slow"


_OF_LIBRARIES = (
    "test_cli",
    "test_codec",
    "test_conformance",
    "test_exporters",
    "test_memory",
    "test_metrics",
    "test_tls",
)


def _is_of_libraries(item: pytest.Item, found: set[str]) -> bool:
    return bool(found & {*SERVERS, "sql", "dogpile"}) or item.path.stem.startswith(_OF_LIBRARIES)


def is_never_quick(path: Path) -> bool:
    """Whether the whole file is slow, or its name says that it needs a server."""
    return path.name in SLOW or bool(SERVERS & {*path.stem.split("_")[1:2]})


def is_never_alone(path: Path) -> bool:
    """Whether this is a test file without the text `mark.alone`."""
    return path.match("test_*.py") and "mark.alone" not in path.read_text()


def comes_first(item: pytest.Item) -> bool:
    return bool(FIRST & {item.path.name, f"{item.path.name}::{item.name}"})


def is_quick(item: pytest.Item) -> bool:
    """Whether the test is fast, needs no idle machine, and starts no server."""
    return not any(item.get_closest_marker(name) for name in ("alone", "slow", *SERVERS))


def _parameters(item: pytest.Item) -> list[str]:
    call = getattr(item, "callspec", None)
    return [] if call is None else str(call.id).lower().split("-")


def _words(item: pytest.Item) -> list[str]:
    """The words in the names of its file, class and function. In the last, words like `memory` may mean no engine."""
    kind = getattr(item, "cls", None)
    given = [item.path.stem, "" if kind is None else re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()]
    own = item.name.partition("[")[0].split("_")
    return "_".join(given).split("_") + [word for word in own if word not in ("memory", "file", "null", "disk")]


def _known(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        name = _SAME.get(word, word)
        if name in ENGINES:
            yield name


def _led_to(item: pytest.Item) -> frozenset[str]:
    """The servers that its function, its fixtures or the methods of its class start."""
    functions = [item.function] if isinstance(item, pytest.Function) else []
    info = getattr(item, "_fixtureinfo", None)
    if info is not None:
        for definitions in info.name2fixturedefs.values():
            functions += [each.func for each in definitions]
    return frozenset().union(_made_of(getattr(item, "cls", None)), *map(_reached, functions))


@cache
def _made_of(kind: type | None) -> frozenset[str]:
    """The servers that the methods of a suite start, apart from its tests."""
    found: set[str] = set()
    for base in getattr(kind, "__mro__", ()):
        found.update(
            *(_reached(getattr(each, "fget", each)) for name, each in vars(base).items() if name[:5] != "test_")
        )
    return frozenset(found)


def _reached(function: Any) -> frozenset[str]:
    if isinstance(function, MethodType):
        function = function.__func__
    function = getattr(function, "__wrapped__", function)
    return _from(function, frozenset()) if isinstance(function, FunctionType) and _is_ours(function) else frozenset()


@cache
def _from(function: FunctionType, above: frozenset[FunctionType]) -> frozenset[str]:
    """The servers that a function starts, by the names in its code, and in the functions and classes that it uses."""
    found: set[str] = set()
    for name in _names(function.__code__):
        if name in _STARTS:
            found.add(_STARTS[name])
        there = function.__globals__.get(name)
        for each in _functions(there):
            if each is not function and each not in above and _is_ours(each) and len(above) < 6:
                found |= _from(each, above | {function})
    return frozenset(found)


def _functions(there: Any) -> list[FunctionType]:
    if isinstance(there, FunctionType):
        return [there]
    if isinstance(there, type):
        return [each for each in vars(there).values() if isinstance(each, FunctionType)]
    return []


def _is_ours(function: FunctionType) -> bool:
    return _is_here(function.__code__.co_filename)


@cache
def _is_here(file: str) -> bool:
    path = Path(file)
    return TESTS in path.parents and path.parent.name != "chaos"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
