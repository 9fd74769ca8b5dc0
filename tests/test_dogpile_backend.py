"""dogpile.cache's published suites over our backend, on real engines; and what its regions have of us besides."""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import pytest

pytest.importorskip("dogpile.cache")
pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from dogpile.testing.fixtures import (
    _GenericBackendFixture,
    _GenericBackendTestSuite,
    _GenericMutexTestSuite,
    _GenericSerializerTestSuite,
)
from memcached_server import shared_memcached
from servers import shared_redis


class _Memory:
    backend = "stampede"

    @classmethod
    def url(cls) -> str:
        return "memory://"

    @classmethod
    def setup_class(cls) -> None:
        cls.config_args = {"arguments": {"url": cls.url()}}  # type: ignore[attr-defined]
        super().setup_class()  # type: ignore[misc]


class _Disk(_Memory):
    _place: ClassVar[Any]

    @classmethod
    def url(cls) -> str:
        cls._place = tempfile.TemporaryDirectory(prefix="stampede-")
        return f"disk://{cls._place.name}"

    @classmethod
    def teardown_class(cls) -> None:
        cls._place.cleanup()


class _Redis(_Memory):
    @classmethod
    def url(cls) -> str:
        return shared_redis().url


class _Memcached(_Memory):
    @classmethod
    def url(cls) -> str:
        return shared_memcached().url


class TestMemory(_Memory, _GenericBackendTestSuite, _GenericMutexTestSuite):
    pass


class TestMemorySerializer(_Memory, _GenericSerializerTestSuite, _GenericBackendFixture):
    pass


class TestDisk(_Disk, _GenericBackendTestSuite, _GenericMutexTestSuite):
    pass


class TestDiskSerializer(_Disk, _GenericSerializerTestSuite, _GenericBackendFixture):
    pass


class TestRedis(_Redis, _GenericBackendTestSuite, _GenericMutexTestSuite):
    pass


class TestRedisSerializer(_Redis, _GenericSerializerTestSuite, _GenericBackendFixture):
    pass


class TestMemcached(_Memcached, _GenericBackendTestSuite, _GenericMutexTestSuite):
    pass


class TestMemcachedSerializer(_Memcached, _GenericSerializerTestSuite, _GenericBackendFixture):
    pass
