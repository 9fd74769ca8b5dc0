"""Caches are configured in a file, and functions refer to them by name. `stampede check` reads the same file."""

import os
from pathlib import Path

import stampede


@stampede.cached
def product(number: int) -> str:
    return f"product {number}"


@stampede.cached(cache="sessions", ttl=60)  # options given here take precedence over the file
def session(user: str) -> str:
    return f"session of {user}"


if __name__ == "__main__":
    os.environ.setdefault("SHOP_SIGNING_KEY", "in production, from a vault")
    stampede.configure(Path(__file__).with_name("stampede.toml"))  # or STAMPEDE_SETTINGS, or ./stampede.toml
    print(product(7), "in", product.cache)
    print(session("bob"), "in", session.cache)
    for function in (product, session):
        policy = function.cache.policy
        print(f"{function.__name__}: the cache's ttl is {policy.ttl:g} s, its stale {policy.stale:g} s")

    try:
        stampede.configure(caches={"default": {"urll": "memory://"}})
    except stampede.SettingsError as error:
        print(error)
