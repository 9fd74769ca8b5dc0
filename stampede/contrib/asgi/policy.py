"""What HTTP says about storing and serving a response (RFC 9111), as pure functions of its headers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "Answer", "Headers", "Terms", "answer_of", "directives", "is_not_modified", "merged", "one", "seconds_of",
    "terms_of", "values", "variant_of", "vary_of", "without",
]  # fmt: skip

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

BY_DEFAULT = frozenset({200, 203, 204, 300, 301, 308})
"""The statuses that are stored for the default ttl. Others are stored if the response itself says for how long."""

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authentication-info", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""The headers of one connection. They are not stored."""

LONGEST = 2**31
"""The largest number of seconds in a header (RFC 9111, 1.2.2)."""

CONFIRM = 300.0
"""Seconds for which a response with a validator of the application is stored beyond its time, to be confirmed."""

_DIRECTIVE = re.compile(r'([^\s=,;"]+)\s*(?:=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,;"]*)))?')
"""A directive of `Cache-Control`. Some applications write `max-age=60; private`, and mean it."""
_DATE = re.compile(
    r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d (?i:GMT)"
    r"|\w{6,9}, \d\d-\w{3}-\d\d \d\d:\d\d:\d\d GMT"
    r"|\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}",
    re.ASCII,
)
"""The three forms of a date (RFC 9110, 5.6.7). What `email.utils` takes besides is no date."""
_TAG = re.compile(rb'(?:W/)?("[^"]*")')


class Terms(NamedTuple):
    """How a response may be stored. All times are in seconds."""

    fresh: float
    revalidate: float = 0.0  # beyond that: it is served while one request computes
    on_error: float = 0.0  # beyond `fresh`: it is served if the application fails
    confirm: float = 0.0  # beyond `fresh`: it is stored, so that the application may confirm it with a 304


class Answer(NamedTuple):
    """A complete response."""

    status: int
    headers: Headers
    body: bytes
    made: float  # when the application answered, by the clock of its machine
    age: int  # the `Age` that it had then
    terms: Sequence[float]  # `Terms`
    vary: Sequence[bytes]  # the request headers that it depends on
    variant: str  # a digest of their values

    def stored(self) -> list[Any]:
        """Return the value that is stored: lists, which all codecs know. `Answer(*value)` is the answer again."""
        status, headers, body, made, age, terms, vary, variant = self
        return [status, [list(header) for header in headers], body, made, age, list(terms), list(vary), variant]


# -- headers ------------------------------------------------------------------------------------------------------


def values(headers: Headers, name: bytes) -> list[bytes]:
    """Return the values of all headers of this name."""
    return [value for each, value in headers if each.lower() == name]


def one(headers: Headers, name: bytes) -> bytes | None:
    """Return the value of the first header of this name."""
    return next(iter(values(headers, name)), None)


def without(headers: Headers, names: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers that have none of these names."""
    left_out = frozenset(names)
    return [(name, value) for name, value in headers if name.lower() not in left_out]


def directives(headers: Headers) -> dict[str, str | None]:
    """Return the directives of `Cache-Control`, in lower case. The first one of a name counts."""
    found: dict[str, str | None] = {}
    for value in values(headers, b"cache-control"):
        for match in _DIRECTIVE.finditer(value.decode("latin-1")):
            name, quoted, plain = match.groups()
            found.setdefault(name.lower(), quoted if quoted is not None else plain)
    return found


def seconds_of(text: str | None) -> int | None:
    """Return the number of seconds that a directive gives, or None if its value is no number."""
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    return min(int(text.lstrip("0")[:11] or 0), LONGEST)  # int() raises for more than 4,300 digits


def vary_of(headers: Headers) -> tuple[bytes, ...]:
    """Return the names in `Vary`, in lower case and in order."""
    names = {name.strip().lower() for value in values(headers, b"vary") for name in value.split(b",")}
    return tuple(sorted(names - {b""}))


def variant_of(headers: Headers, names: Iterable[bytes]) -> str:
    """Return a digest of the values of these request headers."""
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        given = b",".join(values(headers, name))
        if name.startswith(b"accept"):  # a list, whose case and blanks mean nothing
            given = b",".join(part.strip() for part in given.lower().split(b","))
        digest.update(b"%d:%s%d:%s" % (len(name), name, len(given), given))
    return digest.hexdigest()


# -- what a response says -----------------------------------------------------------------------------------------


def terms_of(
    status: int, headers: Headers, now: float, *, authorized: bool, ttl: float | None, stale: float
) -> Terms | None:
    """Return how long a response to GET may be stored in a shared cache. None: it may not, or is not fresh.

    `authorized`: the request had an `Authorization`. `ttl` and `stale` are for a response that has no times."""
    control = directives(headers)
    if status < 200 or status in (206, 304) or control.keys() & {"no-store", "no-cache", "private"}:
        return None
    if values(headers, b"set-cookie") or b"*" in vary_of(headers):
        return None
    if authorized and not control.keys() & {"public", "s-maxage", "must-revalidate"}:
        return None
    lifetime = _lifetime(control, headers, now)
    if lifetime is None:
        events = (one(headers, b"content-type") or b"").startswith(b"text/event-stream")
        if ttl is None or status not in BY_DEFAULT or events:
            return None
        lifetime = ttl
    fresh = min(lifetime - _age(headers), LONGEST)
    if fresh <= 0:
        return None
    confirm = CONFIRM if values(headers, b"etag") or values(headers, b"last-modified") else 0.0
    if control.keys() & {"must-revalidate", "proxy-revalidate"}:
        return Terms(fresh, confirm=confirm)
    own = control.keys() & {"stale-while-revalidate", "stale-if-error", "s-maxage"}
    usual = 0.0 if own else stale
    revalidate = seconds_of(control.get("stale-while-revalidate"))
    on_error = seconds_of(control.get("stale-if-error"))
    return Terms(fresh, usual if revalidate is None else revalidate, usual if on_error is None else on_error, confirm)


def _lifetime(control: dict[str, str | None], headers: Headers, now: float) -> float | None:
    """Return for how many seconds a response is fresh, as it says itself. What is not understood counts as 0."""
    for name in ("s-maxage", "max-age"):
        if name in control:
            return seconds_of(control[name]) or 0
    expires = values(headers, b"expires")
    if not expires:
        return None
    end, date = _moment(b", ".join(expires)), _moment(one(headers, b"date") or b"")
    return 0 if end is None else end - (now if date is None else date)


def _age(headers: Headers) -> int:
    return seconds_of((one(headers, b"age") or b"").split(b",")[0].strip().decode("latin-1")) or 0


def _moment(text: bytes) -> float | None:
    written = text.decode("latin-1")
    try:
        return parsedate_to_datetime(written).replace(tzinfo=UTC).timestamp() if _DATE.fullmatch(written) else None
    except (ValueError, OverflowError):
        return None


# -- a stored response --------------------------------------------------------------------------------------------


def answer_of(status: int, headers: Headers, body: bytes, request: Headers, terms: Terms, now: float) -> Answer:
    """Return what is stored of a complete response. It gets an `ETag` from its bytes, unless it has one.

    It gets no `Last-Modified`: two responses of one second would have the same, and machines differ in their clocks."""
    named = {name.strip().lower() for value in values(headers, b"connection") for name in value.split(b",")}
    end_to_end = without(headers, {*HOP_BY_HOP, *named, b"age", b"content-length"})
    kept = [(name.lower(), value) for name, value in end_to_end]  # Django's are in upper case
    if status == 200 and one(kept, b"etag") is None:
        kept.append((b"etag", b'"%s"' % hashlib.blake2b(body, digest_size=16).hexdigest().encode()))
    if status != 204:
        kept.append((b"content-length", b"%d" % len(body)))
    names = vary_of(headers)
    times = terms.fresh, terms.revalidate, terms.on_error, terms.confirm
    return Answer(status, tuple(kept), body, now, _age(headers), times, names, variant_of(request, names))


def merged(before: Answer, headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a stored response, updated with those of a 304 (RFC 9111, 3.2)."""
    new = without(headers, {*HOP_BY_HOP, b"content-length", b"content-encoding", b"content-range", b"content-type"})
    return [*without(before.headers, {name.lower() for name, _ in new}), *new]


def is_not_modified(request: Headers, answer: Answer) -> bool:
    """Return whether the client has the response already: `If-None-Match`, or else `If-Modified-Since`."""
    wanted = values(request, b"if-none-match")
    if wanted:
        if b"*" in [value.strip() for value in wanted]:
            return True
        own = _TAG.search(one(answer.headers, b"etag") or b"")
        return own is not None and own[1] in _TAG.findall(b",".join(wanted))
    since = _moment(one(request, b"if-modified-since") or b"")
    changed = None if since is None else _moment(one(answer.headers, b"last-modified") or b"")
    return since is not None and changed is not None and changed <= since
