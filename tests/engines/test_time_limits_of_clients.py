"""Time limits for clients that have none: if a request takes too long, its connection is closed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from herd import Herd

from stampede.engines.kit.hang_up import HangUp

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A client's connection, and the server's end of it."""
    client, server = socket.socketpair()
    client.settimeout(20)
    server.settimeout(20)
    with client, server:
        yield client, server


def test_who_waits_too_long_is_hung_up(pair: Pair) -> None:
    """If a server does not reply in time, the connection is closed. Otherwise, its caller would wait for ever."""
    overdue, began = HangUp(0.1), time.monotonic()
    with overdue.asking(pair[0]):
        assert pair[0].recv(1) == b""
    assert 0.1 <= time.monotonic() - began < 10
    assert pair[1].recv(1) == b""


def test_each_has_its_own_time(pair: Pair) -> None:
    """Each request has its own time limit, whenever it begins."""
    overdue, late = HangUp(0.3), socket.socketpair()

    def asks(client: socket.socket) -> float:
        began = time.monotonic()
        with overdue.asking(client):
            client.recv(1)
        return time.monotonic() - began

    first = Herd(lambda: asks(pair[0]))
    time.sleep(0.1)
    second = Herd(lambda: asks(late[0]))
    assert all(0.3 <= took < 10 for took in first.join() + second.join())
    for each in late:
        each.close()


def test_who_was_answered_is_left_alone(pair: Pair) -> None:
    """After the reply, the connection is not closed: its number may belong to something else by then."""
    overdue = HangUp(5.0)
    with overdue.asking(pair[0]):
        pass
    overdue.look(time.monotonic() + 9)
    pair[1].sendall(b"x")
    assert pair[0].recv(1) == b"x"


def test_a_forked_child_hangs_up_on_nobody(pair: Pair) -> None:
    """A forked child does not close the connections on which its parent waits."""
    overdue = HangUp(5.0)
    with overdue.asking(pair[0]):
        pid = os.fork()
        if not pid:
            overdue.look(time.monotonic() + 9)
            os._exit(0)
        os.waitpid(pid, 0)
        pair[1].sendall(b"x")
        assert pair[0].recv(1) == b"x"


def test_what_has_no_connection_to_show_is_asked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without a socket, such as a file of sqlite3, is used without a time limit, and starts no thread."""
    monkeypatch.setattr("stampede.engines.kit.hang_up.watch", None)

    class Gone:
        def fileno(self) -> int:
            raise ValueError("it is closed")

    overdue = HangUp(0.1)
    for client in (object(), Gone()):
        entered: list[Any] = []
        with overdue.asking(client):
            entered.append(client)
        assert entered
