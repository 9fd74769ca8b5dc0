"""What HTTP says about storing a response: what http-tests/cache-tests requires, and the edges of parsing."""

from __future__ import annotations

import time
from email.utils import formatdate

from stampede.contrib.asgi.policy import Answer, Terms, directives, is_not_modified, terms_of, variant_of, vary_of

NOW = 1_790_000_000.0


def terms(*headers: tuple[str, str], status: int = 200, ttl: float | None = None) -> Terms | None:
    coded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return terms_of(status, coded, NOW, authorized=False, ttl=ttl, stale=0)


def fresh(*headers: tuple[str, str]) -> float:
    """Return for how many seconds a response with these headers is stored as fresh; 0 if it is not stored."""
    found = terms(*headers)
    return 0 if found is None else found.fresh


CONTROLS: list[tuple[str, float]] = [
    ("max-age=3600", 3600),
    ("Max-aGe=3600", 3600),
    ("max-age=003600", 3600),
    ('max-age="3600"', 3600),
    ("foobar, max-age=3600", 3600),
    ("max-age=3600, max-age=0", 3600),
    ("max-age=0, max-age=3600", 0),
    ("max-age=2147483648", 2**31),
    ("max-age=99999999999999999999", 2**31),
    ("max-age=" + "9" * 5000, 2**31),
    ("max-age=" + "0" * 5000 + "60", 60),
    ("max-age=-1", 0),
    ("max-age='3600'", 0),
    ("max-age=3600.5", 0),
    ("max-age=a100", 0),
    ("max-age", 0),
    ("max-age=", 0),
    ("s-maxage=", 0),
    ('extension="max-age=3600"', 0),
    ('extension="max-age=3600", max-age=1', 1),
    ('max-age=1, extension="max-age=3600"', 1),
    ("extension='max-age=3600', max-age=1", 1),
    ("s-maxage=60, max-age=1", 60),
    ("max-age=1, s-maxage=60", 60),
    ("max-age=60, no-store", 0),
    ("max-age=60, NO-STORE", 0),
    ("max-age=60, private", 0),
    ('max-age=60, private="a, b"', 0),
    ("max-age=60, no-cache", 0),
    ("max-age=60; private", 0),
    ("max-age=60 private", 0),
    ("max-age=60;no-store", 0),
    ("max-age=60;", 60),
    ('max-age=60, private="a', 0),
    ("", 0),
    (",,,", 0),
]


def test_cache_control() -> None:
    for control, seconds in CONTROLS:
        assert fresh(("Cache-Control", control)) == seconds, control


def test_a_long_cache_control_takes_little_time() -> None:
    """Clients send it. A regular expression that goes back at each character would need minutes."""
    for piece in (" ", "a,", "a ", 'a="', 'a="\\",', '\\"', "=", ";"):
        control = "a," + piece * (60_000 // len(piece)) + ",max-age=60"
        begin = time.thread_time()
        directives([(b"cache-control", control.encode())])
        assert time.thread_time() - begin < 2, piece


def test_cache_control_on_several_lines() -> None:
    assert fresh(("cache-control", "foo"), ("cache-control", "max-age=60")) == 60
    assert fresh(("cache-control", "max-age=60"), ("cache-control", "no-store")) == 0


AGES = {
    "30": 30, "0": 60, "60": 0, "2147483647": 0, "99999999999": 0, "a": 60, "-7": 60, "7.0": 60,
    "30, 0": 30, "0, 30": 60, "30;foo=1": 60,
}  # fmt: skip


def test_age() -> None:
    """What is no number is ignored, and of several values the first one counts."""
    assert {age: fresh(("cache-control", "max-age=60"), ("age", age)) for age in AGES} == AGES


DATES = {
    "Thu, 01 Jan 2099 00:00:00 GMT": True,
    "Thu, 01 Jan 2099 00:00:00 gmt": True,
    "Thursday, 01-Jan-60 00:00:00 GMT": True,
    "Thu Jan  1 00:00:00 2099": True,
    "Sun, 21 Nov 2286 04:46:39 GMT": True,
    "Thu, 01 Jan 1998 00:00:00 GMT": False,
    "Thu, 01 Jan 2099 00:00:00 UTC": False,
    "Thu, 01 Jan 2099 00:00:00 AEST": False,
    "Thu, 01 Jan 99 00:00:00 GMT": False,
    "Thu 01 Jan 2099 00:00:00 GMT": False,
    "Thu,  01  Jan  2099 00:00:00 GMT": False,
    "Thu, 01-Jan-2099 00:00:00 GMT": False,
    "Thu, 01 Jan 2099 00.00.00 GMT": False,
    "Thu, 01 Jan 2099 0:00:00 GMT": False,
    "Thu, 41 Jan 2099 00:00:00 GMT": False,
    "0": False,
    "": False,
}


def test_expires() -> None:
    """A date in another form counts as past."""
    assert {date: fresh(("expires", date)) > 0 for date in DATES} == DATES


def test_expires_counts_from_the_date() -> None:
    """The clocks of the origin and of the cache may differ."""
    date, end = formatdate(NOW - 1000, usegmt=True), formatdate(NOW - 900, usegmt=True)
    assert fresh(("expires", end), ("date", date)) == 100
    assert fresh(("expires", end)) == 0
    assert fresh(("expires", end), ("date", date), ("age", "40")) == 60
    assert fresh(("expires", formatdate(NOW + 60, usegmt=True))) == 60
    assert fresh(("expires", end), ("expires", end), ("date", date)) == 0
    assert fresh(("expires", end), ("date", date), ("cache-control", "max-age=5")) == 5


def test_vary_star() -> None:
    for vary in ("*", "*, *", ", *", "*, foo", "foo, *"):
        assert fresh(("cache-control", "max-age=60"), ("vary", vary)) == 0, vary


def test_vary_names() -> None:
    assert vary_of([(b"Vary", b"Foo, BAR"), (b"vary", b" baz,,foo")]) == (b"bar", b"baz", b"foo")


def test_variants() -> None:
    """Lists such as `Accept-Language` are compared without blanks and case; other headers byte by byte."""

    def of(*headers: tuple[bytes, bytes]) -> str:
        return variant_of(headers, [b"accept", b"foo"])

    assert of((b"accept", b"a, B")) == of((b"accept", b"A"), (b"accept", b"b")) == of((b"accept", b"a,b"), (b"x", b"y"))
    different = [(), ((b"accept", b"a"),), ((b"foo", b"a"),), ((b"foo", b"A"),), ((b"foo", b"a "),), ((b"foo", b""),)]
    assert len({of(*each) for each in different[:-1]}) == 5


def test_stale_times() -> None:
    control = "max-age=60, stale-while-revalidate=10, stale-if-error=20"
    assert terms(("cache-control", control)) == Terms(60, 10, 20)
    assert terms(("cache-control", control), ("etag", '"x"')) == Terms(60, 10, 20, 300)
    for strict in ("must-revalidate", "proxy-revalidate"):
        assert terms(("cache-control", f"{control}, {strict}")) == Terms(60)


def test_a_status_with_times_of_its_own() -> None:
    statuses = [200, 203, 204, 299, 301, 302, 307, 404, 410, 499, 500, 503, 599]
    for status in statuses:
        assert terms(("cache-control", "max-age=60"), status=status) == Terms(60), status
    assert [each for each in statuses if terms(status=each, ttl=5) is not None] == [200, 203, 204, 301]


def test_a_status_that_is_no_whole_response() -> None:
    for status in (101, 206, 304):
        assert terms(("cache-control", "max-age=60"), status=status, ttl=5) is None, status


ETAGS = [
    ('"a"', '"a"', True),
    ('W/"a"', '"a"', True),
    ('"a"', 'W/"a"', True),
    ('"a"', '"b", "a"', True),
    ('"a"', '"b","a" , "c"', True),
    ('"a,b"', '"a,b"', True),
    ('"a"', '"b"', False),
    ('"a"', "a", False),
    ('"a"', "*", True),
    ("a", "a", False),
    ('"\xfc"', '"\xfc"', True),
]


def test_if_none_match() -> None:
    for etag, asked, same in ETAGS:
        answer = Answer(200, ((b"etag", etag.encode("latin-1")),), b"", NOW, 0, (1, 0, 0, 0), (), "")
        assert is_not_modified([(b"if-none-match", asked.encode("latin-1"))], answer) == same, (etag, asked)


def test_directives_of_a_request() -> None:
    assert directives([(b"cache-control", b"no-cache, max-stale, max-age=0")]) == {
        "no-cache": None,
        "max-stale": None,
        "max-age": "0",
    }
