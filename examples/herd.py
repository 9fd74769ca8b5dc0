"""Fifty threads ask for one cold key: one computes, and wakes the others when the value is there."""

import threading
import time

from stampede import cached

THREADS = 50
computations = 0


def slow_query(product: int) -> int:
    global computations
    computations += 1
    time.sleep(0.2)
    return product * 2


def stampede_of(function) -> None:
    """Call `function` from all threads at the same moment."""
    global computations
    computations = 0
    start = threading.Barrier(THREADS)
    threads = [threading.Thread(target=lambda: (start.wait(), function(7))) for _ in range(THREADS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{computations:3} computations, {time.monotonic() - began:.2f} s")


if __name__ == "__main__":
    print("without stampede:", end=" ")
    stampede_of(slow_query)
    print("with stampede:   ", end=" ")
    stampede_of(cached(ttl=60)(slow_query))
