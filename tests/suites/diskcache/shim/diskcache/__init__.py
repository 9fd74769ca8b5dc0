"""What diskcache's own tests import as `diskcache`: our adapter, and the constants that the tests name."""

from stampede.contrib.diskcache import *  # noqa: F403

DEFAULT_SETTINGS: dict[str, object] = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "least-recently-stored",
    "size_limit": 1 << 30,
    "cull_limit": 10,
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 1 << 13,
    "sqlite_journal_mode": "wal",
    "sqlite_mmap_size": 1 << 26,
    "sqlite_synchronous": 1,
    "disk_min_file_size": 1 << 15,
    "disk_pickle_protocol": 5,
}
EVICTION_POLICY: dict[str, object] = {}
UNKNOWN = None


class Disk:
    """The base class of classes in the tests, which our `Cache` refuses."""

    def __init__(self, directory: str) -> None:
        self._directory = directory


class JSONDisk(Disk):
    """Named by a test, and refused."""


class EmptyDirWarning(UserWarning):
    """Named by a filter of warnings."""
