"""Flask-Caching's tests of its decorators, its jinja extension and its verbs, over `stampede.contrib.flask_caching`.

Its tests of other backends of its own are not run: those of Redis, memcached, files, and null."""

from suites import Suite

THEIRS = "of a backend of Flask-Caching's own, by its settings or private attributes"
SERIALIZER = "the serializer is ours, and what is stored is inside our envelope"

SUITE = Suite(
    distribution="Flask-Caching==2.5.1",
    command=[
        "-P", "-m", "pytest", "-q", "--junitxml={report}", "-p", "no:cacheprovider", "-p", "no:django", "-n", "4",
        "-p", "over_stampede", "-c", "/dev/null", "--rootdir={sources}", "tests", "--ignore=tests/test_init.py",
        "-k", "not TestRedis and not TestMemcachedCache and not TestFileSystemCache and not TestNullCache",
    ],
    servers=["redis"],
    left_out={
        r"test_purge|test_deprecated_ignore_errors|redis_cache_backend|multi_apps|test_cache_unlink\[": THEIRS,
        r"keeps_the_cachelib_serializer|uses_cachelib_serializer|stored_in_the_configured_format": SERIALIZER,
        r"test_memoize_uses_public_methods": "a new version is made in one step, so there is no set_many",
    },
)  # fmt: skip
