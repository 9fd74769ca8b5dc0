"""The decorator for one route: its responses may be stored, although they have no `Cache-Control`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from stampede.keys import tags_of_call
from stampede.keys.parameters import Parameters
from stampede.settings.options import Seconds, checked_tags, seconds

__all__ = ["ROUTE_TERMS", "RouteTerms", "cached_response", "route_terms"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class RouteTerms:
    """What the middleware's options and the route's decorator say about one response."""

    ttl: float | None
    stale: float
    tags: list[str] = field(default_factory=list)


ROUTE_TERMS = "stampede.route_terms"
"""The key of the scope where a `ResponseCache` that is inside another one finds the terms of the response."""

route_terms: ContextVar[RouteTerms | None] = ContextVar("stampede_route_terms", default=None)


def cached_response(
    ttl: Seconds, *, stale: Seconds = 0, tags: Iterable[str] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate one route, so that its whole response is stored for `ttl` seconds and its herds are computed once.

    The application needs the middleware `ResponseCache`, which stores the response. `stale` is the time beyond `ttl`
    in which the old response is served while a new one is computed, and if the route fails. `tags` may name arguments
    of the function, as in `"report:{region}"`.

    A response that has its own times in `Cache-Control` or `Expires` is stored for those. Place the decorator directly
    above the function, below `@app.get`.

    >>> from stampede.contrib.asgi import cached_response
    >>> @cached_response(ttl="1m", tags=["report:{region}"])
    ... async def report(region: str) -> dict[str, str]:
    ...     return {"region": region}
    """
    fresh, beyond, names = seconds("ttl", ttl), seconds("stale", stale), checked_tags("tags", tags)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        tags_of_call(names, Parameters(function))  # raises if a tag names what is no parameter

        def apply(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            terms = route_terms.get()
            if terms is not None:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                terms.ttl, terms.stale = fresh, beyond
                terms.tags += [name.format_map(bound.arguments) for name in names]

        @functools.wraps(function)
        async def suspending(*args: P.args, **kwargs: P.kwargs) -> Any:
            apply(args, kwargs)
            return await function(*args, **kwargs)  # type: ignore[misc]

        @functools.wraps(function)
        def blocking(*args: P.args, **kwargs: P.kwargs) -> T:
            apply(args, kwargs)
            return function(*args, **kwargs)

        return suspending if inspect.iscoroutinefunction(function) else blocking  # type: ignore[return-value]

    return decorate
