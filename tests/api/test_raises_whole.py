"""Errors that `raises` names come back with their arguments, attributes and notes, or they are not stored."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from stampede import Cache, CodecError
from stampede.codecs import make_codec
from stampede.model.entry import Entry
from stampede.model.result import own_copy

KEY, ID = "k", b"12345678"


@pytest.fixture(params=["memory", "sealed", "msgpack", "json"])
def cache(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Cache]:
    """A cache that stores objects as they are, and one cache for each codec."""
    if request.param == "memory":
        made = Cache()
    else:
        made = Cache(f"disk://{tmp_path}", codec=request.param, local=False)
    with made:
        yield made


class Refused(Exception):
    """Takes only keywords, and has none of them in `args`."""

    def __init__(self, *, status: int, headers: dict[str, str] | None = None) -> None:
        self.status = status
        self.headers = headers or {"made": "anew"}


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Disk(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(28, "no room", path)
        self.path = path


class Odd(Exception):
    """Cannot be created from its `args` alone."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Odd:
        if not kwargs:
            raise TypeError("only with a secret")
        return super().__new__(cls, *args)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args)


class Growing(Exception):
    """Its attribute changes each time that it is set."""

    __slots__ = ("code",)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value + getattr(self, "code", 0) + 1)


def grown() -> Growing:
    error = Growing("a")
    error.code = 3
    return error


def noted(error: Exception) -> Exception:
    error.add_note("seen by the proxy")
    return error


def twice(cache: Cache, error: Exception) -> list[Any]:
    """Return the errors of the first and the second caller, and the number of computations."""
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise error

    got: list[Any] = []
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            cache.get_or_compute(KEY, fails, raises=type(error))
        got.append(raised.value)
    return [*got, len(calls)]


ERRORS = [
    HTTPException(401, headers={"WWW-Authenticate": "Bearer"}),
    HTTPException(status_code=404, detail="no such page"),
    Refused(status=403), Refused(status=401, headers={"a": "b"}),
    noted(KeyError("a")), noted(Refused(status=1)), FileNotFoundError(2, "no such file", "/x"), LookupError("a", 1),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}{len(vars(error))}")
def test_all_that_it_holds_comes_back(cache: Cache, error: Exception) -> None:
    """A stored error comes back with all its data. Otherwise, a 401 could lack the header that tells how to log in."""
    first, second, calls = twice(cache, error)
    in_bytes = isinstance(error, UnicodeDecodeError) and cache.settings.codec == "json"  # JSON has no bytes
    assert calls == 1 + in_bytes and (second is not error or in_bytes)
    assert type(second) is type(first) and second.args == error.args and vars(second) == vars(error)
    assert str(second) == str(error)
    for name in ("code", "errno", "filename", "reason"):
        assert getattr(second, name, None) == getattr(error, name, None)


def test_a_note_is_added_for_oneself_only(cache: Cache) -> None:
    """A note that one caller adds to its error is not shown to later callers."""
    _, second, _ = twice(cache, noted(Refused(status=1)))
    second.add_note("mine")
    assert twice(cache, Refused(status=1))[0].__notes__ == ["seen by the proxy"]


@pytest.mark.parametrize(
    "error", [Odd("a", secret=1), grown(), Slotted(3), Disk("x")], ids=lambda error: type(error).__name__
)
def test_what_can_not_be_made_again_is_not_kept(
    cache: Cache, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """An error that cannot be created again with all its data is not stored."""
    with caplog.at_level(logging.DEBUG, "stampede"):
        first, second, calls = twice(cache, error)
    assert calls == 2 and first.args == second.args == error.args
    assert "would lose some of its data" in caplog.text
    assert cache.stats().unkept == 2


def test_a_class_that_its_name_does_not_lead_to_is_not_kept(cache: Cache) -> None:
    """An error is not stored if the name of its class leads to another class. That class would be raised instead."""
    namesakes = [type("Namesake", (Refused,), {}) for _ in range(2)]
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise namesakes[1](status=1)

    for _ in range(2):
        with pytest.raises(namesakes[1]):
            cache.get_or_compute(KEY, fails, raises=Refused)
    assert len(calls) == 2


def test_followers_have_all_of_it_too() -> None:
    """A follower's copy of an error has all its data. A note on the copy does not change the original."""
    error = Refused(status=3)
    twin = own_copy(noted(error))
    assert isinstance(twin, Refused) and twin is not error and (twin.status, twin.args) == (3, error.args)
    twin.add_note("mine")
    assert error.__notes__ == ["seen by the proxy"]
    group = ExceptionGroup("two", [ValueError(1), KeyError(2)])
    same = own_copy(group)
    assert isinstance(same, ExceptionGroup) and same is not group and same.exceptions == group.exceptions


@pytest.mark.parametrize(
    "value",
    [5, ("a",), ("a", [1]), (1, ()), ("a", (), 5), ("a", (), {"state": 5}), ("a", (), {"slots": {"b": 2}}),
     ("a", (), {"state": {1: 2}}), ("a", (), {}, 1)],
    ids=repr,
)  # fmt: skip
def test_an_exception_that_is_none_is_a_miss(value: Any) -> None:
    """Stored bytes that describe no valid error are refused. Otherwise, hostile bytes could raise any error."""
    codec = make_codec()
    blob = codec.encode(KEY, Entry(value, ID, raised=True))
    with pytest.raises(CodecError):
        codec.decode(KEY, blob)
