"""The codecs: encode and decode with sealed, msgpack and plain pickle, interleaved in one process.

taskset -c 0 python benchmarks/codec.py
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from stampede.codecs import make_codec
from stampede.model.entry import Entry, new_id


@dataclass
class Row:
    id: int
    name: str
    price: float
    active: bool
    group: int


def _row(i: int) -> dict[str, Any]:
    return {"id": i, "name": f"name {i}", "price": i * 1.5, "active": True, "group": i % 7}


SMALL: dict[str, Any] = _row(1)
DICTS = [_row(i) for i in range(9000)]
ROWS = [Row(**row) for row in DICTS]
CASES: list[tuple[str, Any, Any, int]] = [
    ("small dict", SMALL, dict[str, int | str | float | bool], 2000),
    ("9,000 dicts", DICTS, list[dict[str, int | str | float | bool]], 1),
    ("9,000 dataclasses", ROWS, list[Row], 1),
]
ROUNDS = 31


def _seconds(run: Callable[[], object], times: int) -> float:
    start = perf_counter()
    for _ in range(times):
        run()
    return (perf_counter() - start) / times


def _runs(value: Any, returns: Any) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    entry = Entry(value, new_id(), 0.1, 0.1, 60.0, 60.0, 60.0)
    runs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    body = pickle.dumps(value, 5)
    runs["pickle, bare"] = (lambda: pickle.dumps(value, 5), lambda: pickle.loads(body))
    key = "bench.rows:(1,)"
    for name, options in (
        ("sealed", {}),
        ("sealed, signed", {"signing_key": "k" * 32}),
        ("msgpack", {"name": "msgpack"}),
        ("json", {"name": "json"}),
        ("pickle, signed", {"name": "pickle", "signing_key": "k" * 32}),
    ):
        codec = make_codec(returns=returns, **options)  # type: ignore[arg-type]
        blob = codec.encode(key, entry)
        assert codec.decode(key, blob).value == value
        runs[name] = (
            lambda codec=codec: codec.encode(key, entry),  # type: ignore[misc]
            lambda codec=codec, blob=blob: codec.decode(key, blob),  # type: ignore[misc]
        )
    return runs


def main() -> None:
    print("| value | codec | encode µs | decode µs | encode / pickle | decode / pickle |")
    print("|---|---|--:|--:|--:|--:|")
    for title, value, returns, times in CASES:
        runs = _runs(value, returns)
        seen: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
        for _ in range(ROUNDS):
            for name, both in runs.items():
                for run, into in zip(both, seen[name], strict=True):
                    into.append(_seconds(run, times) * 1e6)
        floor = [median(part) for part in seen["pickle, bare"]]
        for name, parts in seen.items():
            encode, decode = map(median, parts)
            ratios = f"{encode / floor[0]:.2f} | {decode / floor[1]:.2f}"
            print(f"| {title} | {name} | {encode:,.1f} | {decode:,.1f} | {ratios} |")


if __name__ == "__main__":
    main()
