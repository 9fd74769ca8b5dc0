"""Django's own tests of cache backends, pages and sessions, over our backend in memory, on disk and on Redis."""

from suites import Suite

SUITE = Suite(
    distribution="Django==5.2.19",
    command=["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "setup_django", "-c", "{here}/pytest.ini",
             "--rootdir={here}", "--junitxml={report}", "{here}/published.py"],
    inside="tests",
    path=["{here}", "{sources}/tests", "{sources}"],
    servers=["redis"],
    left_out={
        r"test_(zero_)?cull$": "CULL_FREQUENCY is ignored: a full cache evicts one entry at a time, the least useful",
    },
)  # fmt: skip
