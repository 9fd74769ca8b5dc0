"""Key pairs of CURVE, in files, the sockets of clients, and who is let in."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq import auth
from zmq.utils import z85

from stampede.errors import OptionError

__all__ = ["AGAIN", "ClientKeys", "Doorman", "Pair", "client_keys", "client_socket", "make_keys", "pair_of"]

AGAIN = 50
"""Milliseconds between two tries to connect, twice as many after each, up to ten times as many."""

ANSWER = 1 << 24
"""Bytes of what a broker says, at most."""

SERVER, CLIENT, CLIENTS = "server", "client", "clients"


class Pair(NamedTuple):
    """Both halves of one side's key."""

    public: bytes
    secret: bytes


class ClientKeys(NamedTuple):
    """What a client needs: its own, and the broker's public one."""

    own: Pair
    server: bytes


def make_keys(directory: Path) -> list[Path]:
    """New keys of a broker, and of its clients, in files: none that is there is overwritten. Secret ones can be read by
    this user alone."""
    made = []
    for name, public in ((SERVER, directory), (CLIENT, directory / CLIENTS)):
        pair = Pair(*zmq.curve_keypair())
        public.mkdir(parents=True, exist_ok=True)
        secret_file, public_file = directory / f"{name}.key_secret", public / f"{name}.key"
        for path in (secret_file, public_file):
            if path.exists():
                raise OptionError(f"{path} is there already: give a new directory, or remove it")
        secret = f'    secret-key = "{pair.secret.decode()}"\n'
        _write(secret_file, _ZPL.format(pair.public.decode()) + secret, 0o600)
        _write(public_file, _ZPL.format(pair.public.decode()), 0o644)
        made += [secret_file, public_file]
    return made


_ZPL = '# stampede serve\nmetadata\ncurve\n    public-key = "{}"\n'


def _write(path: Path, content: str, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(content)


def pair_of(directory: Path) -> Pair:
    """A broker's own."""
    return _pair(directory / f"{SERVER}.key_secret")


def client_keys(directory: Path) -> ClientKeys:
    """Of a directory with `server.key` and `client.key_secret` in it."""
    return ClientKeys(_pair(directory / f"{CLIENT}.key_secret"), _loaded(directory / f"{SERVER}.key")[0])


def _pair(path: Path) -> Pair:
    public, secret = _loaded(path)
    if secret is None:
        raise OptionError(f"{path} has no secret key in it")
    return Pair(public, secret)


def _loaded(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = auth.load_certificate(path)
        return public, secret
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{path} is no key that can be read: {error}: stampede serve --make-keys makes some"
        ) from error


def client_socket(context: zmq.Context[Any], id: bytes, keys: ClientKeys | None) -> zmq.Socket[Any]:
    """A socket for a connection to one broker."""
    made: zmq.Socket[Any] = context.socket(zmq.DEALER)
    made.linger = 0
    made.routing_id = id
    made.immediate = True  # what can't be said now is said later by us, who know what is still wanted
    made.reconnect_ivl, made.reconnect_ivl_max = AGAIN, 10 * AGAIN
    made.ipv6 = True
    made.maxmsgsize = ANSWER
    if keys is not None:
        made.curve_serverkey = keys.server
        made.curve_publickey, made.curve_secretkey = keys.own
    return made


class Doorman:
    """Says who may connect: whose public key lies in the directory of clients. It looks there anew for each."""

    def __init__(self, context: zmq.Context[Any], directory: Path) -> None:
        self.clients = directory / CLIENTS
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        if not self._allowed():
            raise OptionError(f"{self.clients} has no client's key in it: stampede serve --make-keys makes one")

    def answer(self) -> None:
        """All who stand at the door."""
        with suppress(zmq.Again):
            while True:
                asked = self.socket.recv_multipart(zmq.NOBLOCK)
                number = asked[1] if len(asked) > 1 else b""
                key = asked[6] if len(asked) > 6 and asked[5] == b"CURVE" and len(asked[6]) == 32 else None
                allowed = key is not None and z85.encode(key) in self._allowed()
                said = [b"200", b"OK"] if allowed else [b"400", b"this key is not among those of the clients"]
                self.socket.send_multipart([b"1.0", number, *said, b"", b""])

    def _allowed(self) -> set[bytes]:
        found = set()
        for path in self.clients.glob("*.key"):
            with suppress(OptionError):
                found.add(_loaded(path)[0])
        return found
