"""A short chaos run on each engine; `make soak` is the long one. See `chaos/__init__.py`."""

from __future__ import annotations

import pytest
from chaos.engines import ENGINES
from chaos.report import story
from chaos.round import SHORT, played


@pytest.mark.parametrize("name", ["memory", "disk", "redis", "redis-clock", "cluster", "sentinel", "memcached"])
def test_a_round(name: str) -> None:
    """What no single fault breaks would be broken by several at once, and by what they leave behind."""
    world = ENGINES[name]()
    try:
        outcome = played(world, seed=1, number=0, size=SHORT)
    finally:
        world.close()
    begin = min(call.began for call in outcome.history.calls.values())
    told = ["\n".join(story(finding, outcome.history, begin)) for finding in outcome.findings]
    assert not told, "\n".join(told)
    assert len(outcome.history.faults) > 0
    assert len(outcome.history.calls) > 100
