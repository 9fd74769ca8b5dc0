"""Check ten thousand random interleavings over four processes: `taskset -c 0,1 python benchmarks/redis_checker.py`.

This is a search, not a measurement; the tests do the same with fewer calls. The printed lag is how long other processes
served an invalidated value: it takes a moment to notify their local tiers and their waiters.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from interleaving import Plan, check, played
from servers import RedisServer


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--calls", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=int(time.time()))
    chosen = options.parse_args()
    server = RedisServer()
    callers, bad = 4, 0
    for local, lag in [(True, 0.25), (False, 0.05)]:
        server.cli("FLUSHALL")
        plans = [
            Plan(server.url, number, chosen.seed, local, callers, chosen.calls // (4 * callers), 0.003, clears=local)
            for number in range(4)
        ]
        found = check(*played(plans), lag)
        lags = sorted(1000 * lag for lag in found.lags) or [0.0]
        print(f"{'with' if local else 'without'} local tiers, seed {chosen.seed}: {found.calls} calls,", end=" ")
        print(
            f"{found.computations} computations; {len(found.old)} too old, {len(found.twice)} computed twice,", end=" "
        )
        print(f"{len(found.apart)} keys on which processes differ at the end;", end=" ")
        p99, most = lags[int(0.99 * len(lags))], lags[-1]
        print(f"{len(found.lags)} answers lagged, p99 {p99:.1f} ms, at most {most:.1f} ms")
        for line in [*found.old, *found.twice, *found.apart][:10]:
            print("   ", line)
        bad += len(found.old) + len(found.twice) + len(found.apart)
    server.close()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
