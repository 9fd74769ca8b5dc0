"""The cost of a key: ours, generated per signature; `inspect.signature(...).bind`; and cachetools' typedkey.

The two others do less: `bind` only fills in the defaults, and a typedkey ignores defaults, checks types only at the
top level, and is valid in one process only. Rounds are interleaved on one core. Medians are printed, as nanoseconds per
call and as multiples of ours.

    python benchmarks/keys.py [--quick]
"""

from __future__ import annotations

import argparse
import inspect
import os
import timeit
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median
from typing import Any

from cachetools.keys import typedkey

from stampede.keys import key_maker


def report(customer: Any, *, b: Any = 2, c: Any = 3) -> None: ...


SIGNATURE = inspect.signature(report)


def bound(*args: Any, **kwargs: Any) -> Any:
    """Return the arguments as `bind` completes them, the usual way to handle defaults and keywords."""
    arguments = SIGNATURE.bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.args, arguments.kwargs


WAYS: dict[str, Callable[..., Any]] = {
    "stampede": key_maker(report, prefix="shop:mod.report:"),
    "signature.bind": bound,
    "cachetools typedkey": typedkey,
}

MOMENT = datetime(2026, 7, 1, 12, 30)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "f(1)": ((1,), {}),
    "f(1, b=2, c=3)": ((1,), {"b": 2, "c": 3}),
    'f("customer42")': (("customer42",), {}),
    'f("bob@example.com")': (("bob@example.com",), {}),
    "f(datetime)": ((MOMENT,), {}),
    "f(datetime in UTC)": ((MOMENT.replace(tzinfo=UTC),), {}),
    "f((1, 2, 3))": (((1, 2, 3),), {}),
    "f(300 characters)": (("x" * 300,), {}),
}


def nanoseconds(way: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]], number: int) -> float:
    args, kwargs = call
    names = {f"a{i}": value for i, value in enumerate(args)} | {f"k_{name}": value for name, value in kwargs.items()}
    source = ", ".join([*[f"a{i}" for i in range(len(args))], *[f"{name}=k_{name}" for name in kwargs]])
    return timeit.timeit(f"way({source})", globals={"way": way, **names}, number=number) / number * 1e9


def measured(rounds: int, number: int) -> dict[str, dict[str, float]]:
    times: dict[str, dict[str, list[float]]] = {call: {way: [] for way in WAYS} for call in CALLS}
    for _ in range(rounds):
        for call, arguments in CALLS.items():
            for name, way in WAYS.items():
                times[call][name].append(nanoseconds(way, arguments, number))
    return {call: {way: median(samples) for way, samples in ways.items()} for call, ways in times.items()}


def generation(rounds: int) -> float:
    """Return the microseconds that it takes to make one function's key function."""
    return (
        median(timeit.repeat(lambda: key_maker(report, prefix="shop:mod.report:"), number=20, repeat=rounds)) / 20 * 1e6
    )


def table(results: dict[str, dict[str, float]]) -> str:
    lines = [f"| ns per key | {' | '.join(WAYS)} |", f"|---|{'---:|' * len(WAYS)}"]
    for call, ways in results.items():
        ours = ways["stampede"]
        cells = [f"{ns:,.0f}" if way == "stampede" else f"{ns:,.0f} ({ns / ours:.1f} x)" for way, ns in ways.items()]
        lines.append(f"| `{call}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a look, in a second")
    quick = parser.parse_args().quick
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(table(measured(rounds=5 if quick else 21, number=2_000 if quick else 20_000)))
    print(f"\nMaking a key function: {generation(5 if quick else 21):.0f} µs, once per decorated function.")


if __name__ == "__main__":
    main()
