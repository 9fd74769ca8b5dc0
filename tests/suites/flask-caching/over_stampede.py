"""A plugin of pytest: Flask-Caching's tests get our `Cache`, and our backend in place of `SimpleCache`. Each test runs
over each of several engines."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import cachelib.simple
import flask_caching
import flask_caching.backends
import flask_caching.backends.simplecache
import pytest

import stampede
from stampede.contrib.flask_caching import Cache, StampedeCache
from stampede.engines.memory import MemoryEngine

KEY = "0123456789abcdef0123456789abcdef"


class OverStampede(StampedeCache):
    """The backend, with the arguments of `SimpleCache`."""

    url = ""  # of the test that is running

    def __init__(self, threshold: int = 500, **options: Any) -> None:
        if not self.url.startswith("memory"):
            super().__init__(self.url, namespace=uuid.uuid4().hex, signing_key=KEY, **options)
            return
        super().__init__(**options)
        engine = MemoryEngine(sealed=True, clock=lambda: cachelib.simple.time())  # the clock that the tests move
        self.cache = stampede.Cache(engine=engine, signing_key=KEY)

    @classmethod
    def factory(cls, app: Any, config: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> OverStampede:
        return cls(*args, **kwargs)


flask_caching.Cache = Cache  # type: ignore[misc]
flask_caching.backends.SimpleCache = OverStampede  # type: ignore[misc]
flask_caching.backends.simplecache.SimpleCache = OverStampede  # type: ignore[misc]


@pytest.fixture(autouse=True, params=["memory", "disk", "redis"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if request.param != "memory" and "clock" in request.fixturenames:
        pytest.skip("moves the clock of the cache, which only memory:// lets tests do")
    urls = {"memory": "memory://", "disk": f"disk://{tmp_path}/engine", "redis": os.environ["REDIS_URL"]}
    OverStampede.url = urls[request.param]
