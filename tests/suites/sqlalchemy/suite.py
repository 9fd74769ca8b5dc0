"""SQLAlchemy's example of a cache for the ORM, `examples/dogpile_caching`, over `stampede.contrib.sqlalchemy`.

Its own `caching_query.py` and `environment.py` are replaced by `ours.py`. Its programs have no assertions, so
`examples_over_stampede.py` says how many statements reach the database."""

from suites import Suite

SUITE = Suite(
    distribution="sqlalchemy==2.1.9",
    command=[
        "-P", "-m", "pytest", "-q", "--junitxml={report}", "-p", "no:cacheprovider", "-p", "no:django",
        "-c", "/dev/null", "--rootdir={here}", "--confcutdir={here}", "{here}/examples_over_stampede.py",
    ],
    servers=["redis"],
    left_out={
        r"test_local_session_caching": "it writes a backend of dogpile.cache that shares a session's own objects; "
        "ours never leave their session, which finds them in its identity map",
    },
)  # fmt: skip
