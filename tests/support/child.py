"""Forked children of a test. Each runs one function and reports whether it succeeded."""

from __future__ import annotations

import faulthandler
import gc
import os
import time
import traceback
from collections.abc import Callable

import pytest
from herd import PATIENCE


class Child:
    """A forked child that runs one function. `join` fails the test if the function failed."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            return
        code = 1
        gc.freeze()  # a collection of the suite's objects would copy the parent's memory, page by page
        try:
            faulthandler.dump_traceback_later(PATIENCE / 2, exit=True, file=writing)  # if it hangs, print where
            work()
            code = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(code)

    def join(self) -> None:
        ended: list[int] = []

        def reap() -> None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                ended.append(os.waitstatus_to_exitcode(status))

        end = time.monotonic() + PATIENCE
        while not ended:
            reap()
            if time.monotonic() > end:
                os.kill(self.pid, 9)
                os.waitpid(self.pid, 0)
                pytest.fail("the child hangs")
            time.sleep(0.002)
        said = os.read(self._reading, 65536).decode()
        os.close(self._reading)
        assert ended == [0], said
