"""The generation that an engine's readers use."""

from __future__ import annotations

from stampede.model.ports import Engine
from stampede.runtime.colour import run_blocking

__all__ = ["generation_of"]


def generation_of(engine: Engine, scope: str) -> str:
    """Return the generation that this process believes in, or else the current one, asked for now."""
    known = None if engine.recalls is None else engine.recalls.generation_at_hand(scope)
    if known is not None:
        return known
    assert engine.blocking.store is not None
    _, (generation,) = run_blocking(engine.blocking.store.look_too((), [scope]))
    return generation
