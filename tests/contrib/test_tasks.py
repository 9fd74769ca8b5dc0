"""The locks of tasks, which the adapters of task queues share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from stampede import Cache
from stampede.contrib.tasks import AlreadyRunning, OnceTasks


@pytest.fixture
def cache() -> Iterator[Cache]:
    with Cache() as cache:
        yield cache


def test_which_task_runs(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """A task that can't run yet is told whether it runs already, or an equal one that has lost its place in the queue.
    In the second case it must not be dropped as a message that was delivered twice."""
    tasks, impatient = OnceTasks(cache, lease=60), OnceTasks(cache, lease=0.1)  # which waits for a second
    tasks.enter("send:(42)", "first")
    with tasks.run("send:(42)", "first"):
        with pytest.raises(AlreadyRunning) as error:
            impatient.run("send:(42)", "first")
        assert error.value.twice
        tasks.leave("send:(42)", "first")  # as if its time in the queue were over
        tasks.enter("send:(42)", "second")
        with pytest.raises(AlreadyRunning) as error:
            impatient.run("send:(42)", "second")
        assert not error.value.twice
        caplog.set_level(logging.CRITICAL)  # the first one has lost its place, as it should
    with tasks.run("send:(42)", "second"):
        pass
    assert cache.peek("task:send:(42)") is cache.peek("task:send:(42) runs") is None
