"""The scripts: one readable .lua file for each verb, called by its hash."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeAlias

__all__ = ["Command", "Script", "Scripts"]

Command: TypeAlias = tuple[Any, ...]
"""A command as it is sent. A call of a script names it by its hash; `Scripts.whole` is the same with its text."""


class Script:
    """One verb on the server."""

    __slots__ = ("_hash", "source")

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._hash = sha1(source, usedforsecurity=False).hexdigest().encode()

    @property
    def hash(self) -> bytes:
        return self._hash

    def __call__(self, keys: Sequence[bytes], *args: Any) -> Command:
        return (b"EVALSHA", self._hash, len(keys), *keys, *args)


class Scripts:
    """All verbs. With `sharded`, the herd is told by the channels of a cluster's shard."""

    def __init__(self, *, sharded: bool = False) -> None:
        folder = files(__package__) / "lua"
        entry = (folder / "entry.lua").read_bytes()
        if sharded:
            entry = entry.replace(b"'PUBLISH'", b"'SPUBLISH'")
        self._by_hash: dict[bytes, Script] = {}

        def load(name: str) -> Script:
            script = Script(entry + (folder / f"{name}.lua").read_bytes())
            self._by_hash[script.hash] = script
            return script

        self.claim, self.fill, self.abandon, self.renew = load("claim"), load("fill"), load("abandon"), load("renew")
        self.get, self.set, self.replace = load("get"), load("set"), load("replace")
        self.expire, self.invalidate, self.generation = load("expire"), load("invalidate"), load("generation")
        self.acquire, self.release, self.standing = load("acquire"), load("release"), load("standing")

    def whole(self, command: Command) -> Command:
        """The call with the script's text, for a server that doesn't know it: flushed, restarted, failed over."""
        return (b"EVAL", self._by_hash[command[1]].source, *command[2:])
