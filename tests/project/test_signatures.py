"""The signatures of the public API, as `help()`, an editor or a notebook shows them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import stampede
from stampede import Cache, cached, configure
from stampede.api.binding import CODEC_OPTIONS, FUNCTION_OPTIONS, KEY_OPTIONS
from stampede.api.typing import CacheOptions, FunctionOptions, LockOptions, MoreOptions, Options, PolicyOptions
from stampede.api.typing_many import ManyOptions
from stampede.settings.checks import CACHE
from stampede.settings.options import OPTIONS
from stampede.testing import isolated

POLICY = set(OPTIONS)
CODED = {"namespace", "codec", "trust", "signing_key", "compress", "max_bytes"}
LOCK = {"lease", "wait", "max_hold", "release_via", "shared", "token"}
BULKHEAD = {"concurrency", "lease", "wait", "max_hold"}


def test_what_checkers_see_is_what_there_is() -> None:
    """Type checkers know exactly the options that work."""
    assert set(PolicyOptions.__annotations__) == POLICY
    assert set(MoreOptions.__annotations__) == POLICY - {"ttl"}
    assert set(Options.__annotations__) == {*POLICY, *KEY_OPTIONS, *CODEC_OPTIONS}
    assert set(FunctionOptions.__annotations__) == {*Options.__annotations__, *FUNCTION_OPTIONS}
    assert set(CacheOptions.__annotations__) == {*CACHE} - {"url", "locks"}
    assert set(LockOptions.__annotations__) == LOCK


FACES: list[tuple[Callable[..., Any], set[str]]] = [
    (cached, set(FunctionOptions.__annotations__) | {"cache"}),
    (cached.many, set(ManyOptions.__annotations__) | {"cache"}),
    (Cache().cached, set(FunctionOptions.__annotations__)),
    (Cache().cached.many, set(ManyOptions.__annotations__)),
    (Cache, {*CACHE, "engine", "observers", "origins"}),
    (configure, {*CACHE, "caches", "observers", "origins"}),
    (isolated, {*CACHE, "caches", "observers", "origins", "clock"}),
    *[(getattr(Cache(), twin + verb), POLICY) for twin in ("", "a") for verb in ("get_or_compute", "set", "touch",
        "get_or_compute_many", "set_many", "add", "update")],
    (stampede.cache_without_dogpiling, POLICY),
    (Cache().lock, LOCK),
    (stampede.Lock, LOCK | {"on"}),
    (stampede.try_lock, LOCK - {"wait"} | {"on"}),
    (stampede.once, {"every", "on", "retry_after", "lease", "max_hold"}),
    (Cache().bulkhead, BULKHEAD),
    (stampede.Bulkhead, BULKHEAD | {"on"}),
]  # fmt: skip


def test_options_are_shown() -> None:
    """Every option is shown by name. A signature with `**options` would hide them."""
    arguments = {"url", "function", "settings", "key", "keys", "value", "values", "name", "default", "in_place"}
    for face, options in FACES:
        shown = inspect.signature(face).parameters
        assert not [each for each in shown.values() if each.kind is each.VAR_KEYWORD], face
        assert options <= set(shown), face
        assert set(shown) - options <= arguments, face
        assert all(shown[name].annotation for name in options & set(shown)), face


def test_help_tells_of_cached(capsys: pytest.CaptureFixture[str]) -> None:
    """help() describes `cached` as a function with options, although it is an object."""
    help(cached)
    told = capsys.readouterr().out
    assert "function cached" in told and re.search("stale: '?Seconds'?", told)  # quoted before Python 3.14
