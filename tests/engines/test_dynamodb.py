"""The cells of a DynamoDB table: which requests are sent, the service's clock, and the messages for users."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from email.utils import formatdate
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto")

from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError
from dynamodb_server import shared_dynalite, shared_moto

from stampede import Cache, EngineError, events
from stampede.engines import dynamodb, open_engine
from stampede.engines.cells import Faster, Seen
from stampede.engines.dynamodb import DynamoCell, ServiceClock
from stampede.errors import OptionError
from stampede.testing import FakeClock


@pytest.fixture(params=["moto", "dynalite"])
def cell(request: pytest.FixtureRequest) -> Iterator[DynamoCell]:
    if request.param == "moto":
        shared_moto().empty()
    server = shared_moto() if request.param == "moto" else shared_dynalite()
    url = server.url.replace("/cache", f"/{request.node.originalname[:60]}")
    made = dynamodb.from_url(f"{url}&timeout=20")  # on a busy machine, moto needs seconds for a hundred keys
    yield made
    made.close()


def asked_of(cell: DynamoCell, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the requests that are sent from now on."""
    asked: list[str] = []
    call = cell._call

    def counted(verb: str, **terms: Any) -> Any:
        asked.append(verb)
        return call(verb, **terms)

    monkeypatch.setattr(cell, "_call", counted)
    return asked


def test_the_plain_verbs(cell: DynamoCell) -> None:
    """Values come back as they were written. A swap that comes too late does not overwrite what is stored."""
    assert cell.read(["a"]) == [Seen(None)]
    first = cell.swap("a", None, b"\x00\xff", 60)
    assert cell.read(["A", "a", "b"])[1][:2] == (b"\x00\xff", first)
    assert isinstance(cell.swap("a", None, b"late", 60), Faster)
    second = cell.swap("a", first, b"2", inf)
    assert isinstance(cell.swap("a", first, b"late", 60), Faster)
    (seen,) = cell.read(["a"])
    assert seen.data == b"2"
    assert seen.age is not None
    assert 0 <= seen.age < 5
    cell.swap("a", second, None, 60)
    (gone,) = cell.read(["a"])
    assert gone.data is None
    third = cell.swap("a", gone.version, b"3", 60)
    assert first < second < gone.version < third
    assert [seen.data for seen in cell.read([*map(str, range(99)), "a"])] == [None] * 99 + [b"3"]


def test_who_comes_too_late_is_told_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that comes too late returns what is stored. Otherwise, each lost claim would cost one more request."""
    shared_moto().empty()
    cell = dynamodb.from_url(shared_moto().url)
    version = cell.swap("a", None, b"1", 60)
    asked = asked_of(cell, monkeypatch)
    late = cell.swap("a", None, b"2", 60)
    assert asked == ["put_item"]
    assert isinstance(late, Faster)
    assert late.seen is not None
    assert late.seen[:2] == (b"1", version)


def test_a_hit_is_one_read_and_a_miss_two_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """DynamoDB charges for each request: a hit costs one read, and a miss two writes."""
    monkeypatch.setattr("stampede.engines.kit.generations.KNOWN", 600.0)  # the generation is read once
    shared_moto().empty()
    cell = dynamodb.from_url(shared_moto().url)
    with Cache(cell, early=0) as cache:
        cache.get_or_compute("k", lambda: 1)  # makes the table, and reads the generation
        asked = asked_of(cell, monkeypatch)
        cache.get_or_compute("l", lambda: 1)
        assert asked == ["put_item", "put_item"]
        for _ in range(30):  # until it expects a hit
            cache.get_or_compute("k", lambda: 2)
        asked.clear()
        assert cache.get_or_compute("k", lambda: 2) == 1
        assert asked == ["get_item"]
        asked.clear()
        cache.get_or_compute("m", lambda: 1)
        assert asked == ["get_item", "put_item", "put_item"]


def test_what_ends_is_told_to_the_table(cell: DynamoCell) -> None:
    """The table is told when an item ends, and deletes it later. Otherwise, the table would grow for ever."""
    if not cell._create or cell._client().meta.endpoint_url != f"http://127.0.0.1:{shared_moto().port}":
        pytest.skip("dynalite knows no time to live")
    now = cell._now()[0]
    cell.swap("a", None, b"1", 60.5)
    cell.swap("b", None, b"1", inf)
    told = cell._call("describe_time_to_live", TableName=cell._table)["TimeToLiveDescription"]
    assert (told["TimeToLiveStatus"], told["AttributeName"]) == ("ENABLED", "ends")
    ends = [cell._ask("get_item", Key={"name": {"S": name}})["Item"].get("ends") for name in "ab"]
    assert ends[1] is None
    assert 60 < float(ends[0]["N"]) - now < 63 + cell._now()[0] - now


def test_a_value_that_an_item_has_no_room_for_is_not_kept() -> None:
    """A value that is too large for an item is not stored. The error does not count as an outage of the table."""
    shared_moto().empty()
    told: list[Any] = []
    with Cache(f"{shared_moto().url}&timeout=20", observers=[told.append]) as cache:
        large = b"1" * 400_000
        assert cache.get_or_compute("k", lambda: large) == large
        assert cache.get_or_compute("l", lambda: large[:398_000]) == cache.get("l")
        assert cache.stats().engine_downs == 0
    assert [each.key for each in told if isinstance(each, events.Unkept)] == ["k"]


def test_a_table_that_may_not_be_made_is_missed() -> None:
    """With create=false, a missing table is an error. Otherwise, a table with the wrong settings would be made."""
    shared_moto().empty()
    cell = dynamodb.from_url(f"{shared_moto().url}&create=false")
    with Cache(cell, on_engine_error="raise") as cache, pytest.raises(EngineError, match="ResourceNotFound"):
        cache.get("k")


def test_the_clock_is_told_by_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's clock is known from the dates in its replies, to within 0.1 seconds, without wall clocks."""
    clock, now, ahead = ServiceClock(), [1000.0], 1_790_000_000.25
    monkeypatch.setattr(dynamodb, "time", SimpleNamespace(monotonic=lambda: now[0]))  # of this module alone
    for step in range(60):
        sent = now[0]
        now[0] += 0.01
        clock.observe(formatdate(int(now[0] + ahead), usegmt=True), sent)
        least, most, _ = clock.lead
        assert least <= ahead <= most
        assert most - least <= (1.02 if step == 0 else 1.0 + 0.02)
        now[0] += 0.137
    assert most - least < 0.1
    ahead += 100.0  # the clock was set
    clock.observe(formatdate(int(now[0] + ahead), usegmt=True), now[0])
    assert clock.lead[0] <= ahead <= clock.lead[1]


@pytest.mark.parametrize(
    "url, table, endpoint, region",
    [
        ("dynamodb://eu-central-1/cache", "cache", None, "eu-central-1"),
        ("dynamodb:///cache", "cache", None, None),
        ("dynamodb:///cache?region_name=eu-west-1", "cache", None, "eu-west-1"),
        ("dynamodb://localhost:8000/cache", "cache", "http://localhost:8000", "us-east-1"),
        ("dynamodb:///cache?endpoint_url=https://here", "cache", "https://here", None),
    ],
)
def test_urls(url: str, table: str, endpoint: str | None, region: str | None) -> None:
    """The table, the endpoint and the region are those that the URL names."""
    cell = dynamodb.from_url(url)
    assert (cell._table, cell._endpoint, cell._options.get("region_name")) == (table, endpoint, region)


@pytest.mark.parametrize(
    "url, told",
    [
        ("dynamodb://eu-central-1", "names no table"),
        ("dynamodb://eu-central-1/a/b", "names no table"),
        ("dynamodb:///cache?regoin_name=x", "did you mean 'region_name'"),
        ("dynamodb:///cache?timeout=soon", "timeout"),
    ],
)
def test_a_wrong_url_is_told_the_right_one(url: str, told: str) -> None:
    """A mistake in a URL is refused when the engine is opened. The error says what would be right."""
    with pytest.raises(OptionError, match=told):
        open_engine(url)


# -- other programs --------------------------------------------------------------------------------------------------

HOSTILE = [
    {"data": {"B": b"of another program"}},
    {"version": {"S": "1.0.0"}, "data": {"S": "text"}},
    {"version": {"N": "1.5"}, "data": {"B": b"x"}, "written": {"S": "yesterday"}},
    {"version": {"N": "9" * 38}, "data": {"NULL": True}, "written": {"N": "-1"}},
    {"version": {"N": "-7"}, "written": {"N": "9e37"}},
]


@pytest.mark.parametrize("item", HOSTILE, ids=range(len(HOSTILE)))
def test_what_others_write_concerns_its_key_alone(cell: DynamoCell, item: dict[str, Any]) -> None:
    """An item that another program wrote affects only its own key, and can be overwritten."""
    name, other = os.urandom(4).hex(), os.urandom(4).hex()  # dynalite keeps its items
    first = cell.swap(other, None, b"1", 60)
    cell._client().put_item(TableName=cell._table, Item={"name": {"S": name}, **item})
    there, beside = cell.read([name, other])
    assert beside.version == first
    assert there.data in (None, b"", b"x")
    assert isinstance(cell.swap(name, 1, b"late", 60), Faster)
    version = cell.swap(name, there.version, b"mine", 60)
    assert cell.read([name])[0][:2] == (b"mine", version)


class Refusal(io.BytesIO):
    """The body of a reply, in the form that botocore reads."""

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()


def refuse(cell: DynamoCell, times: int) -> list[str]:
    """Refuse this many requests on their way to the server, as too many. Return the list of those that were refused."""
    asked: list[str] = []

    def sent(request: Any, **_: Any) -> AWSResponse | None:
        if len(asked) >= times:
            return None
        asked.append(request.headers["X-Amz-Target"])
        told = b'{"__type": "com.amazonaws.dynamodb.v20120810#ProvisionedThroughputExceededException"}'
        return AWSResponse(request.url, 400, {"content-type": "application/x-amz-json-1.0"}, Refusal(told))

    cell._client().meta.events.register("before-send.dynamodb", sent)
    return asked


def test_who_asks_too_much_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy table is asked again, and does not count as down. Otherwise, each process would compute for itself."""
    shared_moto().empty()
    cell = dynamodb.from_url(shared_moto().url)
    version, clock = cell.swap("k", None, b"1", 60), FakeClock(time.monotonic())
    monkeypatch.setattr(dynamodb, "time", SimpleNamespace(monotonic=clock, sleep=clock.advance))
    assert len(refuse(cell, 2)) == 0
    assert cell.swap("k", version, b"2", 60) > version
    asked = refuse(cell, 2)
    assert cell.read(["k"])[0].data == b"2"
    assert len(asked) == 2
    asked = refuse(cell, 1000)
    began = clock()
    with pytest.raises(ClientError, match="ProvisionedThroughputExceeded"):
        cell.read(["k"])
    assert clock() - began < 5
    assert 3 <= len(asked) < 20
    cell.close()


def test_an_answer_in_parts_makes_nobody_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a busy table keeps returning unprocessed keys, the requests slow down, and then an EngineError is raised."""
    shared_moto().empty()
    cell, asked, clock = dynamodb.from_url(shared_moto().url), [], FakeClock(time.monotonic())
    cell.swap("k", None, b"1", 60)
    monkeypatch.setattr(dynamodb, "time", SimpleNamespace(monotonic=clock, sleep=clock.advance))

    def in_parts(verb: str, **terms: Any) -> Any:
        asked.append(verb)
        return {"Responses": {}, "UnprocessedKeys": terms["RequestItems"]}

    with monkeypatch.context() as patch:
        patch.setattr(cell, "_call", in_parts)
        with pytest.raises(EngineError, match="answers only part"):
            cell.read(["k", "l"])
    assert 3 <= len(asked) < 20
    assert cell.read(["k", "l"])[0].data == b"1"
    cell.close()
