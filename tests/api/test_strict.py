"""A value that can't be stored fails no request; with strict it is an error, so that development finds it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stampede import Cache, CodecError, TooLarge, cached, configure, events
from stampede.testing import isolated


class Session:
    """A value that no codec can store."""


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(params=["memory://", "disk://{}"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.param).format(tmp_path)


def colours(compute: Any, colour: str) -> Any:
    if colour == "sync":
        return compute

    async def of() -> Any:
        return compute()

    return of


def test_it_is_served_and_not_kept(tmp_path: Path, colour: str, caplog: pytest.LogCaptureFixture) -> None:
    """A value that can't be stored is still returned, logged once, and counted each time."""
    told: list[events.Event] = []
    cache = Cache(f"disk://{tmp_path}", observers=[told.append])
    made: list[Session] = []

    def compute() -> Session:
        made.append(Session())
        return made[-1]

    f = cache.cached(colours(compute, colour))
    with caplog.at_level(logging.ERROR, "stampede"):
        values = [run(f()) for _ in range(3)]
    assert values == made
    assert len(made) == 3
    assert [record.levelname for record in caplog.records if "Session" in record.getMessage()] == ["ERROR"]
    assert sum(isinstance(event, events.Unkept) for event in told) == cache.stats().unkept == 3


def test_strictly_it_is_an_error(url: str, colour: str) -> None:
    """In `isolated`, a value that can't be stored is an error, even on memory://, unless strict=False is set."""
    with isolated(url=url):
        f = cached(colours(lambda: Session(), colour))
        for _ in range(2):
            with pytest.raises(CodecError, match="Session"):
                run(f())
        with pytest.raises(CodecError):
            run(f.set(Session()))
        lenient = cached(strict=False)(colours(lambda: Session(), colour))
        assert isinstance(run(lenient()), Session)


def test_of_many_keys(url: str) -> None:
    """With strict, a batch fails if one value can't be stored. Without it, the caller gets all values."""
    with isolated(url=url):
        f = cached(lambda x: Session() if x == 1 else x)
        with pytest.raises(CodecError, match="Session"):
            f.many([(0,), (1,), (2,)])
        lenient = cached(strict=False)(lambda x: Session() if x == 1 else x)
        assert [type(value) for value in lenient.many([(0,), (1,), (2,)])] == [int, Session, int]


def test_what_is_too_large_is_an_error_too(url: str) -> None:
    """With strict, a value larger than max_bytes is an error, like a value that no codec can store."""
    with isolated(url=url), pytest.raises(TooLarge):
        cached(max_bytes=10)(lambda: b"x" * 1000)()


def test_strict_is_said_where_options_are(tmp_path: Path) -> None:
    """Settings can set strict for each cache. By default `configure` is not strict, and `isolated` is."""
    configure({"caches": {"default": {"strict": True, "url": f"disk://{tmp_path}"}}})
    with pytest.raises(CodecError):
        cached(lambda: Session())()
    configure(url=f"disk://{tmp_path}")
    assert isinstance(cached(lambda: Session())(), Session)
    with isolated(caches={"default": {"strict": False}, "other": {}}):
        assert isinstance(cached(lambda: Session())(), Session)
        with pytest.raises(CodecError):
            cached(cache="other")(lambda: Session())()


def run(answer: Any) -> Any:
    return asyncio.run(answer) if inspect.isawaitable(answer) else answer


def test_the_log_says_what_strict_does(tmp_path: Path, colour: str, caplog: pytest.LogCaptureFixture) -> None:
    """With strict, the log says that the value caused an error, and does not say that it was served."""
    f = Cache(f"disk://{tmp_path}", strict=True).cached(colours(lambda: Session(), colour))
    with caplog.at_level(logging.ERROR, "stampede"), pytest.raises(CodecError):
        run(f())
    (said,) = [each for each in caplog.messages if "Session" in each]
    assert "can't be stored, which is an error because of strict" in said and "served" not in said
