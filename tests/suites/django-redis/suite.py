"""django-redis' own tests of its backend and of sessions, over ours on Redis."""

from suites import Suite

SUITE = Suite(
    distribution="django-redis==7.0.0",
    command=["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "setup_django_redis", "--noconftest",
             "-c", "{here}/pytest.ini", "--rootdir={here}", "--junitxml={report}",
             "tests/test_backend.py", "tests/test_session.py"],
    path=["{here}"],
    servers=["redis"],
    left_out={
        r"test_(h(set|del|len|keys|exists|ash_\w+)|s(add|card|diff\w*|inter|ismember|move|pop\w*|randmember\w*|rem"
        r"|scan\w*|mismember|union\w*)|interstore)$": "raw commands for hashes and sets: use redis-py",
        r"test_(setnx|setnx_timeout|timeout_parameter_as_positional_argument|timeout_negative)$": "nx=True: use add",
        r"test_delete_many(_generator)?$": "delete_many returns nothing, as in Django",
        r"test_incr_ignore_check": "ignore_key_check=: use update of the cache behind the backend",
        r"test_delete_pattern$": "only a prefix and one * are patterns",
        r"test_(delete_pattern_with_\w+|close_with_signal_parameter|set_call_empty_pipeline|close_client)$": (
            "replaces private parts of django-redis by mocks"
        ),
        r"test_(pexpire\w*|expire_at)$": "there is expire only",
        r"test_lock": "locks are ours: another signature, and no key of the cache",
        r"test_iter_keys_itersize": "itersize= is not supported: pages have the size that the engine prefers",
        r"test_primary_replica": "LOCATION is one URL: redis+sentinel:// and redis+cluster:// know replicas",
    },
)  # fmt: skip
