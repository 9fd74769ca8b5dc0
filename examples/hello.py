"""One decorator for `def` and `async def`: of all concurrent callers, only one computes."""

import asyncio
import time

from stampede import cached


@cached(ttl=60)
def report(customer: int, *, year: int = 2026) -> dict[str, int]:
    print(f"computing the report of customer {customer}")
    time.sleep(0.1)  # the expensive query
    return {"customer": customer, "year": year}


@cached(ttl=60)
async def exchange_rate(currency: str) -> float:
    print(f"asking for the rate of {currency}")
    await asyncio.sleep(0.1)
    return 1.07


async def main() -> None:
    rates = await asyncio.gather(*(exchange_rate("EUR") for _ in range(1000)))
    print(f"{len(rates)} tasks got {set(rates)}, computed {exchange_rate.stats().computations} time")


if __name__ == "__main__":
    report(42)
    report(42, year=2026)  # the same key, since 2026 is the default: a hit
    print(f"reports computed: {report.stats().computations}, hits: {report.stats().hits}")
    asyncio.run(main())
