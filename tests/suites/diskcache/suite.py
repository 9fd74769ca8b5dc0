"""diskcache's tests of its cache, its fan-out and its recipes, over `stampede.contrib.diskcache`."""

from suites import Suite

RESET = "settings are given to Cache(...) and do not change later: `reset` and the attributes of settings are left out"
POLICIES = "there is one policy of eviction, by size, and it cannot be chosen"
EXPIRED = "expired entries are gone at once: they are not listed, counted or removed by a call"
FAULTS = "replaces private parts of diskcache by mocks, or damages its file cache.db"
QUEUE = "push, pull, peek and peekitem are left out: a cache may evict any entry, so it is no queue"
ORDER = "the order in which entries were stored is not kept"
FILES = "values are in the database: there is no file to open by its name, and no folder for it"
DISK = "Disk and its settings are left out: codec= has their place"
SHARDS = "there are no shards, and a writer that waits for too long raises Timeout"
INDEX = "a tag needs no index, and has none"

SUITE = Suite(
    distribution="diskcache==5.6.3",
    command=[
        "-P", "-m", "pytest", "-q", "--junitxml={report}", "-p", "no:cacheprovider", "-p", "no:django",
        "-c", "/dev/null", "--rootdir={sources}",
        "--deselect", "tests/test_core.py::test_pragmas",  # of RESET; it passes if its threads fail
        "tests/test_core.py", "tests/test_fanout.py", "tests/test_recipes.py",
    ],
    path=["{here}/shim"],
    left_out={
        r"test_core\.test_init$|test_fanout\.test_init$|test_get_expired_slow_path|test_lru_incr": RESET,
        r"test_least_|test_custom_eviction_policy|test_cull_|test_size_limit_": POLICIES,
        r"test_expire_rows|test_expire$|test_iter_expire": EXPIRED,
        r"test_pragma_error|test_close_error|test_core\.test_\w+_timeout|_ioerror|test_get_keyerror4": FAULTS,
        r"test_check$|test_integrity_check": FAULTS,
        r"test_push_|test_peekitem_extras": QUEUE,
        r"test_core\.test_iter$|test_reversed": ORDER,
        r"test_set_twice|test_path|test_cleanup_dirs|test_disk_write_os_error": FILES,
        r"test_init_disk|test_disk_reset|test_custom_disk|test_custom_filename_disk": DISK,
        r"test_fanout\.test_\w+_timeout|test_volume": SHARDS,
        r"test_tag_index": INDEX,
        r"test_getsetdel": "an open file is a key there, as keys are pickled: here a key is made of its value",
    },
)  # fmt: skip
