"""The tree of errors: each is also of the builtin family that a Python user expects."""

from __future__ import annotations

__all__ = [
    "Absent",
    "CodecError",
    "ComputationFailed",
    "EngineClosed",
    "EngineError",
    "KeyingError",
    "LockLost",
    "LockTimeout",
    "MissingExtra",
    "OptionError",
    "RecursiveComputation",
    "SettingsError",
    "StampedeError",
    "TooLarge",
    "WaitTimeout",
]


class StampedeError(Exception):
    """Whatever this library raises by itself."""


class OptionError(StampedeError, ValueError):
    """An option that can't be: its name, its value and the remedy are in the message."""


class SettingsError(OptionError):
    """A settings file, or an argument of `configure`, that can't be used."""


class MissingExtra(StampedeError, ImportError):
    """An engine or codec whose package is not installed; the message holds its pip line."""


class KeyingError(StampedeError, TypeError):
    """An argument that has no stable identity; the message names the parameter."""


class CodecError(StampedeError, TypeError):
    """A value that the codec can't hold, or bytes that it doesn't believe."""


class TooLarge(CodecError):
    """A value above `max_bytes` or the engine's own limit: it goes to its callers, and is not stored."""


class EngineError(StampedeError, ConnectionError):
    """The engine can't be asked: it is down, hung, full, or refuses us."""

    partial = False  # True: so it is with a part of its keys, as one of several servers is down; others may be asked
    interrupted = False  # True: this process has broken the connection itself, which says nothing of the engine
    refused = False  # True: it has answered, and takes nothing new, as it is full; others may invalidate what it has


class EngineClosed(EngineError):
    """The engine was closed here, for good: nothing is served in its place, and who waited for it waits no more."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: the engine was closed")


class WaitTimeout(StampedeError, TimeoutError):
    """Somebody else computes, and `wait` ran out."""


class Absent(StampedeError, KeyError):
    """A function of many ids (`@cached.many`) has nothing for the one that was asked for."""

    __str__ = Exception.__str__  # a KeyError's is its repr


class LockTimeout(StampedeError, TimeoutError):
    """Somebody else holds the lock, and `wait` ran out."""


class LockLost(StampedeError, RuntimeError):
    """The lock ended before its block did: somebody else may have been inside."""


WAY_OUT = "ask for another, or call the function itself, as its __wrapped__"


class RecursiveComputation(StampedeError, RecursionError):
    """A computation asked for its own key."""


class ComputationFailed(StampedeError, RuntimeError):
    """The computation failed in another call, a moment ago or elsewhere; `type_name` and `message` tell how."""

    def __init__(self, key: str, type_name: str, message: str) -> None:
        super().__init__(key, type_name, message)
        self.key = key
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        text = f"computing {self.key!r} failed in another call: {self.type_name}: {self.message}"
        if not self.type_name or self.type_name.startswith("stampede."):
            return text
        name = self.type_name.removeprefix("builtins.")
        return f"{text} (where that is an answer, and no fault, say raises={name}: then every caller gets it as itself)"
