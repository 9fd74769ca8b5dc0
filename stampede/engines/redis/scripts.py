"""The scripts: one readable .lua file for each verb, called by its hash."""

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
"""Of which types the parts of a reply to a script are; a reply of others is out of step. All other scripts answer with
a number."""

OF_COMMANDS = {
    b"GET": frozenset([bytes, _NONE]),
    b"GETEX": frozenset([bytes, _NONE]),
    b"PTTL": frozenset([int]),
    b"ASKING": frozenset([bytes]),
    b"CLIENT": frozenset([bytes]),
}
"""The same of plain commands."""

Command: TypeAlias = tuple[bytes, ...]
"""A command as it is sent, numbers as text. A call of a script names it by its hash; `Scripts.with_text` is the same
with its text."""


class Script:
    """One verb on the server."""

    __slots__ = ("first", "hash", "source")

    def __init__(self, source: bytes, first: Sequence[bytes] = ()) -> None:
        self.source = source
        self.first = first  # what it is told beside its arguments where it is sent as a text
        self.hash = sha1(source, usedforsecurity=False).hexdigest().encode()

    def __call__(self, keys: Sequence[bytes], *args: bytes) -> Command:
        return (b"EVALSHA", self.hash, _COUNTS[len(keys)], *keys, *args)


class Scripts:
    """All verbs. With `sharded`, the herd is told by the channels of a cluster's shard."""

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
        self._kinds: dict[bytes, frozenset[Any] | None] = {**OF_COMMANDS}  # and by a script's hash, and by its text

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
        # A server forgets scripts when it ends, and nothing else of them is kept: the first call is one of a new run.
        self.generation, self.bump = load("generation", first=[b"first"]), load("bump")
        self.soften = load("soften")
        self.acquire, self.release = load("acquire", before=entry + lock), load("release", before=entry + lock)
        self.renew, self.standing = load("renew", before=entry + lock), load("standing", before=entry + lock)
        self.holder = load("holder", before=entry + lock)
        self.limit = load("limit", before=b"")
        self.audience: WeakSet[Hears] = WeakSet()
        self.fence = 0  # the highest that this process has seen there
        self.refuses = False

    def refused(self, server: str, how: str) -> None:
        """Its server doesn't tell of changes; the others of a cluster won't, either."""
        if not self.refuses:
            self.refuses = True
            self.untold(server, how)

    def untold(self, server: str, how: str) -> None:
        """Tell people that a server doesn't tell of changes."""
        for hears in list(self.audience):
            hears.untold(server, how)

    def with_text(self, command: Command) -> Command:
        """The call with the script's text, for a server that doesn't know it: flushed, restarted, failed over."""
        if command[0] != b"EVALSHA":
            return command
        script = self._by_hash[command[1]]
        return (b"EVAL", script.source, *command[2:], *script.first)

    def check(self, command: Command, reply: Any) -> None:
        """OutOfStep if that can't be the reply to this command. (A refusal can, to any.) ConnectionError if it refuses
        all: a new connection may find the server that is the master now, or log in."""
        kinds = self._kinds.get(command[1] if command[0] in _CALLS else command[0])
        if kinds is not None and (tuple(map(type, reply)) if type(reply) is list else type(reply)) in kinds:
            return
        if isinstance(reply, Exception):
            if isinstance(reply, self._useless) or str(reply).startswith("Protocol error"):
                raise ConnectionError(str(reply)) from reply
        elif kinds is not None:
            raise OutOfStep(f"that is no reply to {command[0].decode()}: {str(reply)[:80]}")

    def again(self, commands: Sequence[Command], replies: Sequence[Any], tried: int) -> dict[int, Command]:
        """What to send once more, by the commands' numbers: the server doesn't know a script, or isn't of one mind."""
        found: dict[int, Command] = {}
        told: set[bytes] = set()  # scripts that are being sent
        for number, (command, reply) in enumerate(zip(commands, replies, strict=True)):
            if isinstance(reply, Exception) and is_passing(reply):
                # Who forgets at once is many servers, each of which knows the scripts that it was sent itself.
                known = _FORGOTTEN not in str(reply) or (command[1] in told and not tried)
                found[number] = command if known else self.with_text(command)
                told.add(command[1])
        return found


def is_passing(refusal: BaseException) -> bool:
    """Whether the next try may be answered: the script is sent with it, or what looks like one server is many."""
    return _FORGOTTEN in str(refusal) or "non local key" in str(refusal)


def is_damage(refusal: BaseException) -> bool:
    """Whether it is about what one key holds. All other refusals are about the server, or what we may do there."""
    return "WRONGTYPE" in str(refusal) or _LUA.search(str(refusal)) is not None


_FORGOTTEN = "No matching script"

_LUA = re.compile(r"(?<!@)user_script:\d+: ")
"""A script has stumbled over what it found: not the server's error (behind `@user_script:`), but Lua's own."""
