"""Four processes share values and computations in one directory, without a server."""

import os
import sys
import tempfile
import time
from multiprocessing import get_context

import stampede


@stampede.cached(ttl=600)
def report(customer: int) -> dict[str, int]:
    time.sleep(0.3)  # the expensive query
    return {"customer": customer, "computed_by": os.getpid()}


def worker(directory: str, results) -> None:
    stampede.configure(url=f"disk://{directory}", local=True)  # in production: a stampede.toml
    results.put((os.getpid(), report(42), report.stats().computations))


def main(directory: str) -> None:
    processes = get_context("spawn")
    results = processes.Queue()
    workers = [processes.Process(target=worker, args=(directory, results)) for _ in range(4)]
    for each in workers:
        each.start()
    answers = [results.get(timeout=60) for _ in workers]
    for each in workers:
        each.join()
    for pid, value, computations in answers:
        print(f"process {pid} got {value}" + (" and computed it" if computations else ""))
    print(f"computations: {sum(computations for _, _, computations in answers)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(directory)
