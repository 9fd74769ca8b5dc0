"""Settings: what a file means, and which error a wrong file gets."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from math import inf
from pathlib import Path
from typing import Any

import pytest

from stampede.errors import OptionError, SettingsError
from stampede.settings import (
    CacheSettings,
    LocalSettings,
    OriginSettings,
    RateSetting,
    Settings,
    cache_settings,
    discover,
    from_mapping,
    load,
    safe_url,
)
from stampede.settings.options import DEFAULT, duration

EXAMPLE = Path(__file__).parents[2] / "examples" / "settings" / "stampede.toml"


def default(environ: Mapping[str, str] | None = None, **table: Any) -> CacheSettings:
    return from_mapping({"caches": {"default": table}}, "stampede.toml", environ or {}).cache("default")


def refusal(environ: Mapping[str, str] | None = None, **table: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        default(environ, **table)
    return str(caught.value)


def written(directory: Path, text: str | bytes, name: str = "stampede.toml") -> Path:
    path = directory / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# -- what a file means ------------------------------------------------------------------------------------------


def test_a_whole_file(tmp_path: Path) -> None:
    """Each setting of a file is read into its own field. A mistake here changes how a fleet caches."""
    path = written(
        tmp_path,
        """
        [caches.default]
        url = "disk:///var/cache/shop"
        ttl = "10m"
        stale = "1h30m"
        early = 1.5
        background = true
        lease = 5
        max_hold = "2m"
        wait = "500ms"
        patience = "200ms"
        deadline = 2
        retry_after = 2.5
        jitter = 0.1
        local = { entries = 500, ttl = "1s" }
        namespace = "shop"
        codec = "msgpack"
        trust = ["shop.models.Price"]
        signing_key = ["new", "old"]
        compress = true
        max_bytes = "1MiB"
        on_engine_error = "raise"

        [caches.reports]
        url = "memory://"
        locks = "file:///run/locks"

        [origins.orders-db]
        concurrency = 8
        rate = "100/1s"
        when_full = "stale"
        """,
    )
    settings = load(path, {})
    assert settings.source == str(path)
    assert settings.caches["default"] == CacheSettings(
        url="disk:///var/cache/shop",
        local=LocalSettings(500, 1.0),
        namespace="shop",
        codec="msgpack",
        trust=("shop.models.Price",),
        signing_key=(b"new", b"old"),
        compress=4096,
        max_bytes=2**20,
        on_engine_error="raise",
        policy=DEFAULT.with_options(
            ttl=600,
            stale=5400,
            early=1.5,
            background=True,
            lease=5,
            max_hold=120,
            wait=0.5,
            patience=0.2,
            deadline=2,
            retry_after=2.5,
            jitter=0.1,
        ),
    )
    assert settings.caches["reports"] == CacheSettings(locks="file:///run/locks")
    assert settings.origins == {"orders-db": OriginSettings(8, RateSetting(100, 1.0), "stale")}


def test_the_example_is_one_that_works() -> None:
    """The example file, which readers copy, loads as it is."""
    settings = load(EXAMPLE, {"SHOP_SIGNING_KEY": "k"})
    assert settings.cache("default").url == "disk:///var/tmp/shop-cache"
    assert settings.cache("reports").signing_key == (b"k",)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    """No setting is mandatory, and a cache that is not described is in memory."""
    settings = load(written(tmp_path, ""), {})
    assert settings == Settings({}, {}, str(tmp_path / "stampede.toml"))
    assert settings.cache("default") == CacheSettings(url="memory://", policy=DEFAULT)


@pytest.mark.parametrize(
    "text, meant",
    [
        ("500ms", 0.5), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("1w 2d", 777_600), ("90", 90),
        ("1m500ms", 60.5), (".5s", 0.5), (" 2 s ", 2), ("0s", 0), ("forever", inf), (7, 7),
        (timedelta(minutes=1), timedelta(minutes=1)),
    ],
)  # fmt: skip
def test_durations(text: Any, meant: Any) -> None:
    """Each unit is read correctly. If `m` were read as `ms`, a duration would be wrong by a factor of 60,000."""
    assert duration("ttl", text) == meant


@pytest.mark.parametrize(
    "text", ["", " ", "m", "10x", "-5s", "1m1h", "10m10m", "1,5s", "5 minutes", "1e3", "nan", "ten"]
)
def test_no_durations(text: str) -> None:
    """A text that is not clearly a duration is refused."""
    with pytest.raises(OptionError, match="ttl is"):
        duration("ttl", text)


def test_forever() -> None:
    """TOML has no null. So `forever` means what None means in Python, and neither means the default."""
    assert default(ttl="forever").policy.ttl == inf
    assert default(ttl=None).policy.ttl == inf
    assert default(wait="forever").policy.wait is None
    assert "max_hold is 'forever': it must be a finite number" in refusal(max_hold="forever")


@pytest.mark.parametrize(
    "given, meant",
    [(True, LocalSettings()), (False, False), ("false", False), (None, None), ({}, LocalSettings()),
     ({"entries": 5}, LocalSettings(5)), ({"ttl": "2s"}, LocalSettings(ttl=2.0)), (LocalSettings(3), LocalSettings(3))],
)  # fmt: skip
def test_local(given: Any, meant: Any) -> None:
    """`false` and a missing setting differ: only a missing one leaves the choice to the engine."""
    assert default(local=given).local == meant


@pytest.mark.parametrize(
    "given, meant", [(True, 4096), (False, None), (None, None), (100, 100), ("64KiB", 65536), ("2kB", 2000)]
)
def test_compress(given: Any, meant: int | None) -> None:
    """`compress = false` does not mean a size of 0, and `true` does not mean a size of 1."""
    assert default(compress=given).compress == meant


@pytest.mark.parametrize(
    "text, rate", [("100/1s", RateSetting(100, 1)), ("5/s", RateSetting(5, 1)), ("1 / 10m", RateSetting(1, 600))]
)
def test_rates(text: str, rate: RateSetting) -> None:
    """A rate is a number of calls and a duration. The meaning of this form must not change."""
    settings = from_mapping({"origins": {"db": {"rate": text}}})
    assert settings.origins["db"].rate == rate


def test_code_may_give_what_a_file_cannot() -> None:
    """`configure` takes the same settings with Python's own values: classes, bytes, timedeltas, functions."""
    settings = default(
        trust=[Decimal], signing_key=b"k", ttl=timedelta(minutes=1), cache_if=bool, raises=(KeyError, OSError)
    )
    assert (settings.trust, settings.signing_key, settings.policy.ttl) == ((Decimal,), (b"k",), 60.0)
    assert (settings.policy.cache_if, settings.policy.raises) == (bool, (KeyError, OSError))
    assert "raises holds [<class 'KeyError'>]: give an exception class, or a tuple" in refusal(raises=[KeyError])
    assert default(raises=KeyError, ttl=len).policy == DEFAULT.with_options(raises=KeyError, ttl=len)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    """A byte order mark is ignored. Some editors write one, and it is invisible."""
    assert (
        load(written(tmp_path, b'\xef\xbb\xbf[caches.default]\nurl = "null://"\n'), {}).cache("default").url
        == "null://"
    )


def test_one_cache_from_code() -> None:
    """`Cache(...)` takes the same names as a file. Its errors are the same, and name `Cache()` as the place."""
    assert cache_settings({"url": "null://", "ttl": 5}, "Cache():") == default(url="null://", ttl=5)
    with pytest.raises(SettingsError, match=r"^Cache\(\): ttll: there is no such setting: did you mean 'ttl'"):
        cache_settings({"ttll": 5}, "Cache():")


# -- ${NAME} ----------------------------------------------------------------------------------------------------


def test_variables_fill_in() -> None:
    """Variables are replaced in any string, also in nested ones, and where a number is expected."""
    environ = {"HOST": "db", "N": "7", "TTL": "90", "KEY": "s3cret", "BG": "true"}
    settings = default(
        environ,
        url="redis://${HOST}:63${N}9/0",
        local={"entries": "${N}"},
        ttl="${TTL}",
        background="${BG}",
        early="${N}",
        signing_key=["${KEY}"],
    )
    assert settings.url == "redis://db:6379/0"
    assert settings.local == LocalSettings(7)
    assert (settings.policy.ttl, settings.policy.background, settings.policy.early) == (90.0, True, 7.0)
    assert settings.signing_key == (b"s3cret",)


def test_variables_are_filled_in_once() -> None:
    """A variable's value is not searched for variables, and `$${` gives a plain `${`."""
    assert default({"A": "${B}"}, namespace="${A}").namespace == "${B}"
    assert default({"B": "b"}, namespace="$${B}|$$|$B|${B}").namespace == "${B}|$$|$B|b"


def test_a_missing_variable_is_named() -> None:
    """A missing variable is an error that names it. An empty password would be noticed in production only."""
    text = refusal(url="redis://:${REDIS_PASSWORD}@h")
    assert text.startswith("stampede.toml: [caches.default] url: ")
    assert "'REDIS_PASSWORD'" in text


# -- errors of wrong files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table, message",
    [
        ({"ttll": 5}, "ttll: there is no such setting: did you mean 'ttl'?"),
        ({"ttl": -1}, "ttl is -1: it must be at least 0"),
        ({"ttl": float("nan")}, "ttl is nan: it must be at least 0"),
        ({"ttl": True}, "ttl is True: give seconds"),
        ({"ttl": "soon"}, "ttl is 'soon': give seconds, or a text"),
        ({"ttl": [1]}, "ttl is [1]: give seconds"),
        ({"wait": -0.1}, "wait is -0.1: it must be at least 0"),
        ({"lease": 0}, "lease is 0: it must be more than 0"),
        ({"jitter": 1}, "jitter is 1: give a fraction"),
        ({"background": "yes"}, "background is 'yes': give True or False"),
        ({"cache_if": "bool"}, "cache_if takes a function, which a file can't hold: give it to @cached"),
        ({"raises": ["KeyError"]}, "raises takes classes, which a file can't hold: give it to @cached"),
        ({"url": 5}, "url is of type int: give a string"),
        ({"url": ""}, "url is '', without a scheme"),
        ({"url": "localhost:6379"}, "url is 'localhost:6379', without a scheme"),
        ({"url": "redis:localhost"}, "url is 'redis:localhost', without a scheme"),
        ({"url": "redis://h\n"}, "url holds a line break"),
        ({"locks": "/run/locks"}, "locks is '/run/locks', without a scheme"),
        ({"local": 5}, "local is 5: give true, false or { entries"),
        ({"local": {"entires": 5}}, "local.entires: there is no such setting: did you mean 'entries'?"),
        ({"local": {"entries": 0}}, "local.entries is 0: give a whole number, at least 1"),
        ({"local": {"ttl": -1}}, "local.ttl is -1: it must be at least 0"),
        ({"codec": "msgpak"}, "codec is 'msgpak': did you mean 'msgpack'?"),
        ({"codec": "yaml"}, "codec is 'yaml': give one of 'sealed', 'msgpack', 'json', 'pickle'"),
        ({"codec": "pickle"}, "codec is 'pickle', which executes what it reads: give a signing_key"),
        ({"trust": "shop.Price"}, "trust is of type str: give a list of dotted names"),
        ({"trust": ["Price"]}, "trust holds 'Price': give dotted names"),
        ({"compress": 0}, "compress is 0: give a number of bytes"),
        ({"max_bytes": "1 furlong"}, "max_bytes is '1 furlong': give a number of bytes"),
        ({"on_engine_error": "rise"}, "on_engine_error is 'rise': did you mean 'raise'?"),
    ],
)
def test_wrong_settings(table: dict[str, Any], message: str) -> None:
    """A wrong setting is refused at once, and the error names the file, the table and the key."""
    text = refusal(**table)
    assert text.startswith("stampede.toml: [caches.default] " + message), text


@pytest.mark.parametrize(
    "mapping, message",
    [
        ({"cache": {}}, "stampede.toml: cache: there is no such table: did you mean 'caches'?"),
        (
            {"url": "null://"},
            "stampede.toml: url: there is no such table: it is a setting of one cache: write it under",
        ),
        ({"caches": {"url": "null://"}}, "stampede.toml: [caches] url: it is a setting of one cache: write it under"),
        ({"caches": 5}, "stampede.toml: caches: it is a table of tables: write [caches.default]"),
        ({"origins": {"db": {"rate": "fast"}}}, "stampede.toml: [origins.db] rate is 'fast': give a number of"),
        ({"origins": {"db": {"rate": "5/0s"}}}, "stampede.toml: [origins.db] rate is '5/0s': give a number of"),
        ({"origins": {"db": {"rate": "100"}}}, "stampede.toml: [origins.db] rate is '100': give a number of"),
        ({"origins": {"db": {"concurrency": 0}}}, "stampede.toml: [origins.db] concurrency is 0: give a whole number"),
        ({"origins": {"db": {"when_full": []}}}, "stampede.toml: [origins.db] when_full is of type list: give one of"),
        ({"origins": {"db": {"url": "a://"}}}, "stampede.toml: [origins.db] url: there is no such setting: there are"),
    ],
)
def test_wrong_tables(mapping: dict[str, Any], message: str) -> None:
    """A setting in the wrong table is refused. Otherwise it would be ignored."""
    with pytest.raises(SettingsError) as caught:
        from_mapping(mapping, "stampede.toml", {})
    assert str(caught.value).startswith(message)


def test_a_wrong_setting_is_a_value_error_with_its_reason() -> None:
    """A wrong setting raises a ValueError. Its cause is the check's own error."""
    with pytest.raises(ValueError, match="ttl") as caught:
        default(ttl=-1)
    assert isinstance(caught.value.__cause__, OptionError)


def test_a_cache_that_is_not_there() -> None:
    """A misspelt name is an error, and does not become an empty cache of that name."""
    settings = from_mapping({"caches": {"reports": {}}}, "stampede.toml", {})
    with pytest.raises(SettingsError, match=r"stampede.toml: there is no \[caches.report\]: did you mean 'reports'"):
        settings.cache("report")
    with pytest.raises(SettingsError, match=r"there are default, reports$"):
        settings.cache("x")
    with pytest.raises(SettingsError, match=r"there are default$"):
        from_mapping({"caches": {"default": {}}}, "stampede.toml", {}).cache("x")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[caches.default]\nttl = \n", "it isn't TOML: Invalid value (at line 2"),
        (b"[caches.default]\nurl = 'caf\xe9://'\n", "it isn't UTF-8 (byte 27 is 0xe9)"),
        (b"a = " + b"[" * 100_000, "it isn't TOML: "),
        (b"a = " + b"1" * 5000, "it isn't TOML: "),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    """A broken file of any kind raises a SettingsError, which names the file and keeps its cause."""
    path = written(tmp_path, content)
    with pytest.raises(SettingsError) as caught:
        load(path, {})
    assert str(caught.value).startswith(f"{path}: {message}")
    assert caught.value.__cause__ is not None


def test_no_file_and_a_directory(tmp_path: Path) -> None:
    """A missing file and a directory raise a SettingsError, too, which keeps its cause."""
    with pytest.raises(SettingsError, match="there is no such file") as caught:
        load(tmp_path / "nowhere.toml", {})
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(SettingsError, match="it is a directory") as caught:
        load(tmp_path, {})
    assert isinstance(caught.value.__cause__, IsADirectoryError)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that exists and cannot be read is an error. Only a missing file means that there are no settings."""
    (tmp_path / "stampede.toml").symlink_to("stampede.toml")
    with pytest.raises(SettingsError, match="it can't be read: Too many levels of symbolic links"):
        discover({}, tmp_path)


# -- where files are found --------------------------------------------------------------------------------------


def test_the_variable_beats_the_file_beats_nothing(tmp_path: Path) -> None:
    """The file that the variable names wins over the file in the directory. Without both there are no settings."""
    assert discover({}, tmp_path) is None
    written(tmp_path, '[caches.default]\nnamespace = "here"\n')
    other = written(tmp_path, '[caches.default]\nnamespace = "named"\n', "other.toml")

    def namespace(environ: dict[str, str]) -> str:
        settings = discover(environ, tmp_path)
        assert settings is not None
        return settings.cache("default").namespace

    assert namespace({}) == "here"
    assert namespace({"STAMPEDE_SETTINGS": ""}) == "here"
    assert namespace({"STAMPEDE_SETTINGS": str(other)}) == "named"
    assert namespace({"STAMPEDE_SETTINGS": "other.toml"}) == "named"


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    """If the file that the variable names is missing, this is an error, and no other file is used."""
    written(tmp_path, "")
    with pytest.raises(SettingsError, match=r"^\$STAMPEDE_SETTINGS: .*gone.toml: there is no such file") as caught:
        discover({"STAMPEDE_SETTINGS": "gone.toml"}, tmp_path)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_wrong_file_is_an_error_also_when_it_was_only_found(tmp_path: Path) -> None:
    """A broken ./stampede.toml is an error. Only a missing one means that there are no settings."""
    (tmp_path / "stampede.toml").mkdir()
    with pytest.raises(SettingsError, match="it is a directory"):
        discover({}, tmp_path)


# -- secrets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, shown",
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:s3cret@localhost/0", "redis://:***@localhost/0"),
        ("redis://bob:s3cret@h1,h2/0?socket_timeout=1", "redis://bob:***@h1,h2/0?socket_timeout=1"),
        ("redis://bob:s3/cret@host/0", "redis://bob:***@host/0"),
        ("redis://bob:s3@cret@host/0", "redis://bob:***@host/0"),
        ("redis://h/0?a=1&password=s3cret&b=2", "redis://h/0?a=1&password=***&b=2"),
        ("postgres:///db?sslpassword=s3cret", "postgres:///db?sslpassword=***"),
        ("postgres:///db?listen=host%3Dh%20password%3Ds3cret", "postgres:///db?listen=***"),
        ("unix://:s3cret@/run/redis.sock", "unix://:***@/run/redis.sock"),
        ("disk:///var/cache/a@b", "disk:///var/cache/a@b"),
        ("bob:s3cret@host", "bob:***@host"),
    ],
)
def test_urls_without_secrets(url: str, shown: str) -> None:
    """URLs are printed without their secrets, because the text may end up in logs."""
    assert safe_url(url) == shown


def test_no_secret_in_a_repr() -> None:
    """The repr of settings has no secrets, because it may end up in tracebacks and crash reports."""
    settings = default(url="redis://u:s3cret@h", locks="redis://u:s3cret@h", signing_key=["s3cret", b"s3cret"])
    assert "s3cret" not in repr(from_mapping({}, "x")) + repr(settings) + str(settings) + f"{settings}"
    assert "redis://u:***@h" in repr(settings)
    assert "signing_key=<2 of them>" in repr(settings)


@pytest.mark.parametrize(
    "table",
    [
        {"url": "u:s3cret@h"},
        {"locks": "u:s3cret@h"},
        {"url": ["redis://u:s3cret@h"]},
        {"signing_key": {"k": "s3cret"}},
        {"signing_key": ["s3cret", 5]},
        {"signing_key": ["s3cret", ""]},
        {"signing_keys": ["s3cret"]},
        {"url": "redis://u:s3cret@h\n"},
    ],
)
def test_no_secret_in_an_error(table: dict[str, Any]) -> None:
    """An error does not quote a wrong setting that may be a secret."""
    assert "s3cret" not in refusal(**table)
