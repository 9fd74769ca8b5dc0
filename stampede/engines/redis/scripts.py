"""The scripts: one .lua file for each verb, called by its hash."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeAlias
from weakref import WeakSet

from stampede.engines.kit.replies import OutOfStep
from stampede.model.ports import Hears

__all__ = ["OF_COMMANDS", "Command", "Script", "Scripts", "is_damage", "is_passing"]

_CALLS = (b"EVALSHA", b"EVAL")
_COUNTS = [b"%d" % number for number in range(11)]
_NONE = type(None)

_KINDS: dict[str, frozenset[Any] | None] = {
    "claim": frozenset((int, int, entry, *more) for entry in (bytes, _NONE) for more in ((), (bytes,), (bytes, int))),
    "get": frozenset([_NONE, (int,), (int, bytes)]),
    "acquire": frozenset([(int, int), (int, bytes, int, int)]),
    "generation": frozenset([(bytes, bytes), (bytes, bytes, bytes, bytes)]),
    "holder": None,
    "limit": frozenset([(int, int, int), (int, bytes)]),
}
"""Types of the parts of each script's reply. A reply with others is out of step. Scripts that are not listed answer
with a number."""

OF_COMMANDS = {
    b"GET": frozenset([bytes, _NONE]),
    b"GETEX": frozenset([bytes, _NONE]),
    b"PTTL": frozenset([int]),
    b"ASKING": frozenset([bytes]),
    b"CLIENT": frozenset([bytes]),
}
"""Types of the replies to plain commands."""

Command: TypeAlias = tuple[bytes, ...]
"""A command as it is sent, with numbers as text. A script is called by its hash; `Scripts.with_text` replaces the hash
by the script's text."""


class Script:
    """One verb on the server."""

    __slots__ = ("first", "hash", "source")

    def __init__(self, source: bytes, first: Sequence[bytes] = ()) -> None:
        self.source = source
        self.first = first  # extra arguments when it is sent as text
        self.hash = sha1(source, usedforsecurity=False).hexdigest().encode()

    def __call__(self, keys: Sequence[bytes], *args: bytes) -> Command:
        return (b"EVALSHA", self.hash, _COUNTS[len(keys)], *keys, *args)


class Scripts:
    """All verbs. With `sharded`, herds are woken by the channels of a cluster's shard."""

    def __init__(self, *, sharded: bool = False) -> None:
        from redis.exceptions import ConnectionError, ReadOnlyError

        self._useless = ConnectionError, ReadOnlyError
        folder = files(__package__) / "lua"
        entry, lock = ((folder / name).read_bytes() for name in ("entry.lua", "lock.lua"))
        if sharded:
            entry, lock = (source.replace(b"'PUBLISH'", b"'SPUBLISH'") for source in (entry, lock))
            lock = lock.replace(b"'NUMSUB'", b"'SHARDNUMSUB'")
        lease = (folder / "lease.lua").read_bytes()
        self.sharded = sharded
        self._by_hash: dict[bytes, Script] = {}
        self._kinds: dict[bytes, frozenset[Any] | None] = {**OF_COMMANDS}  # also by a script's hash and by its text

        def load(name: str, *, before: bytes = entry, first: Sequence[bytes] = ()) -> Script:
            source = before + (folder / f"{name}.lua").read_bytes().replace(b"\n-- lease\n", b"\n" + lease)
            script = Script(source, first)
            self._by_hash[script.hash] = script
            self._kinds[script.hash] = self._kinds[source] = _KINDS.get(name, frozenset([int]))
            return script

        self.claim, self.fill = load("claim"), load("fill")
        self.abandon, self.prolong = load("abandon"), load("prolong")
        self.get, self.set, self.replace = load("get"), load("set"), load("replace")
        self.expire, self.invalidate = load("expire"), load("invalidate")
        # A server forgets its scripts only when it ends, or when they are flushed. So the first call of a script after
        # a restart is sent as text, with "first".
        self.generation, self.bump = load("generation", first=[b"first"]), load("bump")
        self.soften = load("soften")
        self.acquire, self.release = load("acquire", before=entry + lock), load("release", before=entry + lock)
        self.renew, self.standing = load("renew", before=entry + lock), load("standing", before=entry + lock)
        self.holder = load("holder", before=entry + lock)
        self.limit = load("limit", before=b"")
        self.audience: WeakSet[Hears] = WeakSet()
        self.fence = 0  # the highest fence that this process has seen there
        self.refuses = False

    def refused(self, server: str, how: str) -> None:
        """Note that a server does not report changes. The other servers of a cluster will not, either."""
        if not self.refuses:
            self.refuses = True
            self.untold(server, how)

    def untold(self, server: str, how: str) -> None:
        """Warn that a server does not report changes."""
        for hears in list(self.audience):
            hears.untold(server, how)

    def with_text(self, command: Command) -> Command:
        """Return the call with the script's text, for a server that does not know it after a flush, restart or
        failover."""
        if command[0] != b"EVALSHA":
            return command
        script = self._by_hash[command[1]]
        return (b"EVAL", script.source, *command[2:], *script.first)

    def check(self, command: Command, reply: Any) -> None:
        """Raise OutOfStep if this cannot be the reply to this command. (A refusal can reply to any.) Raise
        ConnectionError for a refusal of everything: a new connection may find the current master, or log in."""
        kinds = self._kinds.get(command[1] if command[0] in _CALLS else command[0])
        if kinds is not None and (tuple(map(type, reply)) if type(reply) is list else type(reply)) in kinds:
            return
        if isinstance(reply, Exception):
            if isinstance(reply, self._useless) or str(reply).startswith("Protocol error"):
                raise ConnectionError(str(reply)) from reply
        elif kinds is not None:
            raise OutOfStep(f"unexpected reply to {command[0].decode()}: {str(reply)[:80]}")

    def again(self, commands: Sequence[Command], replies: Sequence[Any], tried: int) -> dict[int, Command]:
        """Return the commands to send once more, by number: the server does not know a script, or is several
        servers."""
        found: dict[int, Command] = {}
        sent: set[bytes] = set()  # scripts that are being sent
        for number, (command, reply) in enumerate(zip(commands, replies, strict=True)):
            if isinstance(reply, Exception) and is_passing(reply):
                # A script that was just sent and is unknown again: these are several servers, and each knows only what
                # it was sent.
                known = _FORGOTTEN not in str(reply) or (command[1] in sent and not tried)
                found[number] = command if known else self.with_text(command)
                sent.add(command[1])
        return found


def is_passing(refusal: BaseException) -> bool:
    """Return whether another try may succeed: with the script's text, or on another of several servers behind one
    address."""
    return _FORGOTTEN in str(refusal) or "non local key" in str(refusal)


def is_damage(refusal: BaseException) -> bool:
    """Return whether the refusal is about the value of one key. Others are about the server, or this user's rights."""
    return "WRONGTYPE" in str(refusal) or _LUA.search(str(refusal)) is not None


_FORGOTTEN = "No matching script"

_LUA = re.compile(r"(?<!@)user_script:\d+: ")
"""Matches Lua's own error over a value that a script found. Errors of the server are behind `@user_script:`."""
