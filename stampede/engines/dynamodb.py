"""The DynamoDB engine: cells are items of a table, and every write is conditional."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from math import ceil, inf, isinf
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from stampede.engines.cells import Cell, Faster, Seen, Version
from stampede.engines.kit.url import Kind, flag, number, options_of, parts_of, safe_url, text
from stampede.errors import EngineError, OptionError
from stampede.runtime.chance import uniform

__all__ = ["DynamoCell", "check_url", "from_url"]

_TEXTS = "region_name endpoint_url profile_name aws_access_key_id aws_secret_access_key aws_session_token"
OPTIONS: dict[str, Kind] = {"create": flag, "timeout": number, **dict.fromkeys(_TEXTS.split(), text)}

TOMBSTONE = 3600.0  # seconds for which the version of a removed item remains, so that the next one has a higher one
BUSY = {"ProvisionedThroughputExceededException", "ThrottlingException", "RequestLimitExceeded"}
MAKING = 20  # seconds for which a question waits while its table is created


class DynamoCell(Cell):
    """Items of one table. A missing table is created, with payment per request. Other options go to boto3. `timeout` is
    the limit in seconds for a connection attempt, and also for an answer."""

    ends = grows = ages = tells = True
    longest = 400_000  # bytes of an item, with the names of its attributes
    at_once = 100
    _opening = threading.Lock()  # sessions are not thread-safe

    def __init__(self, table: str, create: bool = True, timeout: float = 3.0, **options: Any) -> None:
        self._table, self._create = table, create
        self._made: Any = None
        self._endpoint, self._options = options.pop("endpoint_url", None), options
        # boto3 must not retry: a swap that is sent again would be refused because of its own first write.
        once: Any = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 64}
        self._config = Config(connect_timeout=timeout, read_timeout=timeout, **once)

    def read(self, names: Sequence[str]) -> list[Seen]:
        if len(names) == 1:
            return [self._seen(self._ask("get_item", Key=_key(names[0]), ConsistentRead=True).get("Item"))]
        found, table, again = dict[str, Any](), self._table, pauses()
        rest: Any = {table: {"Keys": [*map(_key, names)], "ConsistentRead": True}}
        while rest:
            some = self._ask("batch_get_item", RequestItems=rest)
            found.update((item["name"]["S"], item) for item in some["Responses"].get(table, ()))
            rest = some.get("UnprocessedKeys")
            if rest and not next(again, False):
                raise EngineError(
                    f"the table {table!r} answers only part of a batch: raise its capacity, or ask for fewer keys"
                )
        return [self._seen(found.get(name)) for name in names]

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        if version is None and data is None:
            return None
        now = self._now()[1]  # the latest time it can be, so that no lease seems older than it is
        new = max(int(now * 1e6), version + 1 if type(version) is int and version < 1 << 62 else 0)
        item = {**_key(name), "version": {"N": str(new)}, "written": {"N": str(int(now * 1e6))}}
        if data is not None:
            item["data"] = {"B": data}
        if (left := ttl if data is not None else TOMBSTONE) < 1e9:
            item["ends"] = {"N": str(ceil(now + left))}
        terms: dict[str, Any] = {"ConditionExpression": "attribute_not_exists(version)"}
        if version is not None:
            terms["ConditionExpression"] = "version = :seen"
            terms["ExpressionAttributeValues"] = {":seen": {"N": str(version)} if type(version) is int else version}
        try:
            self._ask("put_item", Item=item, ReturnValuesOnConditionCheckFailure="ALL_OLD", **terms)
        except ClientError as refused:
            if _code(refused) != "ConditionalCheckFailedException":
                raise
            there = refused.response.get("Item")  # not every implementation of this protocol returns it
            return Faster(self._seen(there) if there else None)
        return new

    def _seen(self, item: Mapping[str, Any] | None) -> Seen:
        """Return what an item holds. It may be anything: other programs can write there, too."""
        if not item or "version" not in item:
            return Seen(None)
        data = item["data"].get("B", b"") if "data" in item else None
        written, version = _number(item.get("written")), _number(item["version"])
        age = None if written is None else max(self._now()[0] - written / 1e6, 0.0)
        return Seen(data, item["version"] if version is None else version, age)

    def _now(self) -> tuple[float, float]:
        """Return the seconds since 1970 by the service's clock, at least and at most."""
        clock = _clock(self._client().meta.endpoint_url)
        if isinf(clock.lead[1]):
            self._ask("get_item", Key=_key("ping"))
        return time.monotonic() + clock.lead[0], time.monotonic() + clock.lead[1]

    def _client(self) -> Any:
        if self._made is None:
            with self._opening:
                new = _session(**self._options).client("dynamodb", endpoint_url=self._endpoint, config=self._config)
            self._made = new
        return self._made

    def _ask(self, verb: str, **terms: Any) -> Any:
        """Return the answer to a request. A missing table is created; a throttled request is repeated for a while."""
        if verb != "batch_get_item":
            terms["TableName"] = self._table
        again = pauses()
        while True:
            try:
                return self._call(verb, **terms)
            except ClientError as refused:  # nothing was written
                if _code(refused) == "ResourceNotFoundException" and self._create:
                    break
                if _code(refused) not in BUSY or not next(again, False):
                    raise
        self._make()
        return self._call(verb, **terms)

    def _call(self, verb: str, **terms: Any) -> Any:
        client, sent, answer = self._client(), time.monotonic(), None
        try:
            answer = getattr(client, verb)(**terms)
        except ClientError as refused:
            answer = refused.response
            raise
        finally:
            if answer is not None and "date" in (headers := answer["ResponseMetadata"]["HTTPHeaders"]):
                _clock(client.meta.endpoint_url).observe(headers["date"], sent)
        return answer

    def _make(self) -> None:
        name = {"TableName": self._table}
        key = {"KeySchema": [{"AttributeName": "name", "KeyType": "HASH"}], "BillingMode": "PAY_PER_REQUEST"}
        kind = [{"AttributeName": "name", "AttributeType": "S"}]
        try:
            self._call("create_table", **name, **key, AttributeDefinitions=kind)
        except ClientError as refused:
            if _code(refused) != "ResourceInUseException":  # another process creates it
                raise
        self._client().get_waiter("table_exists").wait(**name, WaiterConfig={"Delay": 1, "MaxAttempts": MAKING})
        with suppress(ClientError):  # it is enabled already; or this isn't DynamoDB, and keeps items that have expired
            ends = {"Enabled": True, "AttributeName": "ends"}
            self._call("update_time_to_live", **name, TimeToLiveSpecification=ends)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def start_again(self) -> None:
        self._made, DynamoCell._opening = None, threading.Lock()


_session = cache(boto3.Session)
_clock = cache(lambda address: ServiceClock())


def _key(name: str) -> dict[str, Any]:
    return {"name": {"S": name}}


def _number(attribute: Mapping[str, Any] | None) -> int | None:
    """Return the number in an attribute. None: it has none, so another program wrote the item."""
    text = (attribute or {}).get("N", "")
    return int(text) if text.isdecimal() else None


def _code(refused: ClientError) -> str:
    return str(refused.response["Error"]["Code"])


def _parsed(url: str, **options: Any) -> tuple[str, dict[str, Any]]:
    parts = parts_of(url)
    table, place = parts.path.strip("/"), {"region_name": parts.netloc} if parts.netloc else {}
    if "@" in parts.netloc:
        raise OptionError(f"{safe_url(url)!r} has a user: give aws_access_key_id= and the like in the query")
    if not table or "/" in table:
        raise OptionError(f"{safe_url(url)!r} names no table: give a URL such as 'dynamodb://eu-central-1/cache'")
    if ":" in parts.netloc:
        place = {"endpoint_url": f"http://{parts.netloc}", "region_name": "us-east-1"}
    return table, place | options_of(url, options, OPTIONS)


def from_url(url: str, **options: Any) -> DynamoCell:
    """Return a cell for `dynamodb://REGION/TABLE`, `dynamodb:///TABLE` if boto3 knows the region, or
    `dynamodb://HOST:PORT/TABLE`."""
    table, found = _parsed(url, **options)
    return DynamoCell(table, **found)


check_url = _parsed


DRIFT = 1e-4
"""Seconds by which two clocks may drift apart in one second."""


class ServiceClock:
    """An estimate of the service's clock from the dates of its answers. They are in whole seconds: each narrows it."""

    def __init__(self) -> None:
        self.lead = -inf, inf, 0.0  # the lead over our clock, at least and at most; when that was found

    def observe(self, date: str, sent: float) -> None:
        """Take the date of an answer to a request that was sent at `sent`."""
        received, said = time.monotonic(), parsedate_to_datetime(date).timestamp()
        drift = DRIFT * (received - self.lead[2])
        news, known = (said - received, said + 1.0 - sent), (self.lead[0] - drift, self.lead[1] + drift)
        both = max(news[0], known[0]), min(news[1], known[1])
        self.lead = *(both if both[0] <= both[1] else news), received  # no overlap: one of the two clocks was set


FIRST, MOST = 0.02, 1.0
"""Seconds of the first pause after a throttled request, and of all pauses together."""


def pauses() -> Iterator[bool]:
    """Pause and yield True, each time for longer, until the pauses would take too long together."""
    end, rest = time.monotonic() + MOST, FIRST
    while time.monotonic() + rest < end:
        time.sleep(uniform(rest / 2, rest))
        rest *= 2
        yield True
