"""cachelib's mixins for tests of caches, and its tests of `SimpleCache`, over `stampede.contrib.cachelib`."""

from suites import Suite

SUITE = Suite(
    distribution="cachelib==0.17.0",
    command=[
        "-P", "-m", "pytest", "-q", "--junitxml={report}", "-p", "no:cacheprovider", "-p", "no:django", "-n", "4",
        "-c", "/dev/null", "--rootdir={here}", "--confcutdir={here}", "{here}/over_stampede.py",
    ],
    inside="tests",
    servers=["redis"],
    left_out={
        r"inc_is_consistent\[.*StampedeCache": "each cache has a serializer of its own, and its class has none",
        r"threshold|test_prune": "the memory engine's room is entries= of its URL, and it evicts by use",
        r"no_data_corruption|preserves_valid_shared_values": "reads SimpleCache's private _cache",
    },
)  # fmt: skip
