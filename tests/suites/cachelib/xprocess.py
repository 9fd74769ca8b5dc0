"""In place of pytest-xprocess: the tests that start its servers are left out."""


class ProcessStarter:
    """Starts nothing."""
