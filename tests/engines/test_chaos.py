"""A short chaos run on some engines. `make soak` is the long run. See `chaos/__init__.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from chaos.engines import ENGINES
from chaos.report import story
from chaos.round import SHORT, Outcome, played

pytestmark = [
    pytest.mark.redis,  # all rounds run at the same time, whichever engine is selected
    pytest.mark.postgres,
    pytest.mark.skipif(sys.platform != "linux", reason="its processes are looked at in /proc"),
]

NAMES = "cluster", "disk", "postgres"  # `make soak` runs on all engines

AT_ONCE = 3
"""How many rounds run at the same time. A round mostly waits until the effects of its faults are noticed."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Outcome]]]:
    """One round for each selected engine, some of them at the same time."""
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(_round, name) for name in names}


def _round(name: str) -> Outcome:
    world = ENGINES[name]()
    try:
        return played(world, seed=1, number=0, size=SHORT)
    finally:
        world.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_round(name: str, outcomes: dict[str, Future[Outcome]]) -> None:
    """Several faults at once, and what they leave behind, break no promise."""
    outcome = outcomes[name].result()
    begin = min(call.began for call in outcome.history.calls.values())
    told = ["\n".join(story(finding, outcome.history, begin)) for finding in outcome.findings]
    assert not told, "\n".join(told)
    assert len(outcome.history.faults) > 0
    assert len(outcome.history.calls) > 100
