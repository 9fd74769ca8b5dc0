"""cachelib's mixins, and its tests of `SimpleCache`, over `StampedeCache` on several engines."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from delete_many_with_prefix import DeleteManyWithPrefixTests
from test_simple_cache import SillySerializer
from test_simple_cache import TestSimpleCache as SimpleCacheTests

from stampede.contrib.cachelib import StampedeCache

KEY = "0123456789abcdef0123456789abcdef"


class WithSerializer(StampedeCache):
    """A cache whose class has a serializer, as users of cachelib write it."""

    serializer = SillySerializer()


@pytest.mark.parametrize("kind", [StampedeCache, WithSerializer])
@pytest.mark.parametrize("engine", ["memory", "disk", "redis", "unsigned"])
class TestStampedeCache(SimpleCacheTests, DeleteManyWithPrefixTests):
    @pytest.fixture(autouse=True)
    def cache_factory(self, kind: type[StampedeCache], engine: str, tmp_path: Path) -> None:
        urls = {"memory": "memory://", "redis": os.environ["REDIS_URL"]}
        key = None if engine == "unsigned" else KEY

        def make(self: Any, key_prefix: str = "", **options: Any) -> StampedeCache:
            namespace = key_prefix + uuid.uuid4().hex
            return kind(urls.get(engine, f"disk://{tmp_path}/engine"), namespace=namespace, signing_key=key, **options)

        method: Callable[..., StampedeCache] = make
        type(self).cache_factory = method
