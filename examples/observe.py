"""Observability: counters, events and log lines. None of them ever contains a value."""

import logging
import sys

from stampede import Cache
from stampede.events import Computed, Event


def tell(event: Event) -> None:
    """An observer is a function of an event; all events are in stampede.events."""
    if isinstance(event, Computed):
        print(f"event: {event.key} took {event.cost:.3f} s, because: {event.why}")


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="log:   %(message)s")
    logging.getLogger("stampede").setLevel(logging.DEBUG)

    cache = Cache("memory://", observers=[tell])

    @cache.cached(ttl=600)
    def report(customer: int) -> str:
        if customer == 0:
            raise LookupError("there is no customer 0")
        return f"report of {customer}"

    for customer in (1, 1, 2, 1):
        report(customer)
    report.invalidate(1)
    report.refresh(2)
    try:
        report(0)
    except LookupError:
        pass
    stats = report.stats()
    print(f"hits {stats.hits}, computed {dict(stats.computed)}, failed {stats.failed}, ratio {stats.ratio:.2f}")
    cache.close()
