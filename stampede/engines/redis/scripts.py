"""The scripts: one readable .lua file for each verb, called by its hash."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeAlias
from weakref import WeakSet

from stampede.engines.kit.replies import OutOfStep
from stampede.engines.redis.shapes import COMMANDS, SCRIPTS, is_number
from stampede.engines.redis.wire import all_of
from stampede.ports import Hears

__all__ = ["REMEDIES", "Command", "Script", "Scripts", "is_damage", "is_passing"]

_CALLS = (b"EVALSHA", b"EVAL")
_COUNTS = [b"%d" % number for number in range(11)]

REMEDIES = 3
"""So many of them for one command: somebody may damage its keys faster than they can be mended."""

Command: TypeAlias = tuple[bytes, ...]
"""A command as it is sent, numbers as text. A call of a script names it by its hash; `Scripts.with_text` is the same
with its text."""


class Script:
    """One verb on the server."""

    __slots__ = ("_hash", "first", "source")

    def __init__(self, source: bytes, first: Sequence[bytes] = ()) -> None:
        self.source = source
        self.first = first  # what it is told beside its arguments where it is sent as a text
        self._hash = sha1(source, usedforsecurity=False).hexdigest().encode()

    @property
    def hash(self) -> bytes:
        return self._hash

    def __call__(self, keys: Sequence[bytes], *args: bytes) -> Command:
        return (b"EVALSHA", self._hash, _COUNTS[len(keys)], *keys, *args)


class Scripts:
    """All verbs. With `sharded`, the herd is told by the channels of a cluster's shard."""

    def __init__(self, *, sharded: bool = False) -> None:
        from redis.exceptions import ReadOnlyError

        self._readonly = ReadOnlyError
        folder = files(__package__) / "lua"
        entry, lock = ((folder / name).read_bytes() for name in ("entry.lua", "lock.lua"))
        if sharded:
            entry, lock = (source.replace(b"'PUBLISH'", b"'SPUBLISH'") for source in (entry, lock))
            lock = lock.replace(b"'NUMSUB'", b"'SHARDNUMSUB'")
        parts = {name: (folder / f"{name.decode()}.lua").read_bytes() for name in (b"lease", b"told")}
        self.sharded = sharded
        self._by_hash: dict[bytes, Script] = {}
        self._shapes = COMMANDS.copy()  # of replies: by command, by a script's hash and by its text

        def load(name: str, *, before: bytes = entry, first: Sequence[bytes] = ()) -> Script:
            source = before + _PART.sub(lambda its: parts[its[1]], (folder / f"{name}.lua").read_bytes())
            script = Script(source, first)
            self._by_hash[script.hash] = script
            self._shapes[script.hash] = self._shapes[source] = SCRIPTS.get(name, is_number)
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
        self.mend = load("mend")
        self.limit = load("limit", before=b"")
        self.audience: WeakSet[Hears] = WeakSet()
        self.fence = 0  # the highest that this process has seen there
        self._refused = False

    def refused(self, server: str, how: str) -> None:
        """Its server doesn't tell of changes as we would like it to; the others of a cluster won't, either."""
        if not self._refused:
            self._refused = True
            self.untold(server, how)

    def untold(self, server: str, how: str) -> None:
        """Tell people that a server doesn't tell of changes."""
        for hears in list(self.audience):
            hears.untold(server, how)

    def with_text(self, command: Command) -> Command:
        """The call with the script's text, for a server that doesn't know it: flushed, restarted, failed over."""
        script = self._by_hash[command[1]]
        return (b"EVAL", script.source, *command[2:], *script.first)

    def check(self, command: Command, reply: Any) -> None:
        """OutOfStep if that can't be the reply to this command. (A refusal can, to any.) ConnectionError if it refuses
        all: a new connection may find the server that is the master now, or log in."""
        shape = self._shapes.get(command[1] if command[0] in _CALLS else command[0])
        if shape is not None and shape(reply):
            return
        if isinstance(reply, Exception):
            if isinstance(reply, self._readonly) or str(reply).startswith("Protocol error"):
                raise ConnectionError(str(reply)) from reply
        elif shape is not None:
            raise OutOfStep(f"that is no reply to {command[0].decode()}: {str(reply)[:80]}")

    def remedies(self, commands: list[Command], replies: Sequence[Any], tried: int = 0) -> dict[int, list[Command]]:
        """What to send where the server could not do as it was told, for a reason that can be mended, by the command's
        number; the last reply of each is the command's, and the last command is the one to be judged by it.
        `tried`: so often before.
        """
        found: dict[int, list[Command]] = {}
        told: set[bytes] = set()  # scripts that are being sent
        for number, reply in enumerate(replies):
            if isinstance(reply, Exception):
                command = commands[number]
                if command[0] == b"EVALSHA" and _is_unknown(reply):
                    # Who forgets at once is many servers, each of which knows the scripts that it was sent itself.
                    found[number] = [command if command[1] in told and not tried else self.with_text(command)]
                    told.add(command[1])
                elif is_passing(reply):
                    found[number] = [command]
                elif is_damage(reply):
                    found[number] = self._mending(command, reply)
                else:
                    continue
                commands[number] = found[number][-1]
        return found

    def _mending(self, command: Command, reply: Exception) -> list[Command]:
        """A key of the wrong type (a list where a string belongs) is damage to what it stands for, and to nothing else:
        it is removed."""
        keys = keys_of(command)
        for hears in list(self.audience):
            hears.damaged(_TAG.sub("", keys[0].decode("utf-8", "replace")), str(reply))
        return [self.with_text(self.mend(keys)), command]


def is_passing(refusal: BaseException) -> bool:
    """Whether the next try may find the server of one mind: a service that looks like one server, and grows."""
    return "non local key" in str(refusal) or "No matching script" in str(refusal)


def is_damage(refusal: BaseException) -> bool:
    """Whether it is about what one key holds. All other refusals are about the server, or what we may do there."""
    return "WRONGTYPE" in str(refusal) or _LUA.search(str(refusal)) is not None


_PART = re.compile(rb"^-- (lease|told)\b.*$", re.MULTILINE)
"""The place of `lease.lua`, or `told.lua`, in a script."""

_TAG = re.compile(r"^\{\w+\}:")
_LUA = re.compile(r"(?<!@)user_script:\d+: ")
"""A script has stumbled over what it found: not the server's error (behind `@user_script:`), but Lua's own."""


def keys_of(command: Command) -> Sequence[bytes]:
    """The keys that a command names."""
    if command[0] in _CALLS:
        keys: Sequence[bytes] = command[3 : 3 + int(command[2])]
        # A claim may name its entry alone.
        return all_of(keys[0]) if len(keys) == 1 and keys[0][25:27] == b"}:" else keys
    return command[1:2]


def _is_unknown(reply: Exception) -> bool:
    from redis.exceptions import NoScriptError

    return isinstance(reply, NoScriptError)
