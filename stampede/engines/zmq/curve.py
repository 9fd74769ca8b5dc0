"""CURVE: key pairs in files, the sockets of clients, and the check of a client's key."""

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
"""Milliseconds between the first two attempts to connect. The pause doubles each time, up to ten times as long."""

ANSWER = 1 << 24
"""Longest message from a broker, in bytes."""

SERVER, CLIENT, CLIENTS = "server", "client", "clients"


class Pair(NamedTuple):
    """The public and the secret key of one side."""

    public: bytes
    secret: bytes


class ClientKeys(NamedTuple):
    """The keys that a client needs: its own pair, and the broker's public key."""

    own: Pair
    server: bytes


def make_keys(directory: Path) -> list[Path]:
    """Write new keys for a broker and for its clients, and return their files. Raise OptionError if a file exists. Only
    this user can read the files of secret keys."""
    made = []
    for name, public in ((SERVER, directory), (CLIENT, directory / CLIENTS)):
        pair = Pair(*zmq.curve_keypair())
        public.mkdir(parents=True, exist_ok=True)
        secret_file, public_file = directory / f"{name}.key_secret", public / f"{name}.key"
        for path in (secret_file, public_file):
            if path.exists():
                raise OptionError(f"{path} is there already: give a new directory, or remove the file")
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
    """Return the broker's own key pair from its directory."""
    return _pair(directory / f"{SERVER}.key_secret")


def client_keys(directory: Path) -> ClientKeys:
    """Return a client's keys from a directory with `server.key` and `client.key_secret`."""
    return ClientKeys(_pair(directory / f"{CLIENT}.key_secret"), _loaded(directory / f"{SERVER}.key")[0])


def _pair(path: Path) -> Pair:
    public, secret = _loaded(path)
    if secret is None:
        raise OptionError(f"{path} has no secret key in it: use the file that stampede serve --make-keys made")
    return Pair(public, secret)


def _loaded(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = auth.load_certificate(path)
        return public, secret
    except (OSError, ValueError) as error:
        raise OptionError(
            f"the key in {path} can't be read: {error}: stampede serve --make-keys makes new keys"
        ) from error


def client_socket(context: zmq.Context[Any], id: bytes, keys: ClientKeys | None) -> zmq.Socket[Any]:
    """Return a new socket for a connection to one broker."""
    made: zmq.Socket[Any] = context.socket(zmq.DEALER)
    made.linger = 0
    made.routing_id = id
    made.immediate = True  # without a connection, don't queue: we send later, and only what is still wanted
    made.reconnect_ivl, made.reconnect_ivl_max = AGAIN, 10 * AGAIN
    made.ipv6 = True
    made.maxmsgsize = ANSWER
    if keys is not None:
        made.curve_serverkey = keys.server
        made.curve_publickey, made.curve_secretkey = keys.own
    return made


class Doorman:
    """Lets a client connect if its public key is in the directory of clients, which is read again each time."""

    def __init__(self, context: zmq.Context[Any], directory: Path) -> None:
        self.clients = directory / CLIENTS
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        if not self._allowed():
            raise OptionError(f"{self.clients} has no client key in it: stampede serve --make-keys makes one")

    def answer(self) -> None:
        """Answer all clients that ask to connect."""
        with suppress(zmq.Again):
            while True:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
                number = request[1] if len(request) > 1 else b""
                key = request[6] if len(request) > 6 and request[5] == b"CURVE" and len(request[6]) == 32 else None
                allowed = key is not None and z85.encode(key) in self._allowed()
                status = [b"200", b"OK"] if allowed else [b"400", b"this key is not among those of the clients"]
                self.socket.send_multipart([b"1.0", number, *status, b"", b""])

    def _allowed(self) -> set[bytes]:
        found = set()
        for path in self.clients.glob("*.key"):
            with suppress(OptionError):
                found.add(_loaded(path)[0])
        return found
