"""Callers never wait for a refresh, and get stale values while the database is down."""

import logging
import threading
import time

from stampede import cached

database_is_up = True
refreshed = threading.Event()


@cached(ttl=600, stale=3600, background=True, retry_after=1)
def prices() -> list[float]:
    if not database_is_up:
        raise ConnectionError("the database is down")
    time.sleep(0.1)
    refreshed.set()
    return [9.5, 12.0]


def timed_call(what: str) -> None:
    began = time.monotonic()
    value = prices()
    print(f"{what}: {value} after {(time.monotonic() - began) * 1000:.0f} ms")


if __name__ == "__main__":
    logging.getLogger("stampede").addHandler(logging.NullHandler())  # hide the warning about the failure below
    timed_call("the first caller waits        ")
    refreshed.clear()

    prices.expire()  # as if the 600 seconds had passed
    timed_call("stale, refreshed in background")
    refreshed.wait(5)

    database_is_up = False
    prices.expire()
    for _ in range(3):
        timed_call("the database is down          ")
    print(f"served: {dict(prices.stats().served)}")
