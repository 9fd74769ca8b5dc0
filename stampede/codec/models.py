"""pydantic models under msgspec: by the names of their fields, whatever their aliases, and which of them were given."""

from __future__ import annotations

import importlib
import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import date, datetime
from decimal import Decimal
from functools import cache, lru_cache
from itertools import islice
from types import NoneType
from typing import Any
from uuid import UUID

from stampede.codec.alike import alike
from stampede.codec.annotations import is_pydantic
from stampede.errors import CodecError

__all__ = ["model_of", "tree_of_model", "why_not"]

UNSET = "__unset__"
"""Beside the fields of a model: of each model in it, those fields that nobody had given. Not there if all were."""

MOST = 1000
"""Models that are looked at to say why a value is refused: it may hold itself."""

VALUE = "__value__"  # the tree of a model that is no object, as that of a RootModel, where UNSET stands beside it


def tree_of_model(value: Any) -> Any:
    """The model in JSON's words, as `model_of` takes it."""
    try:
        tree = value.model_dump(mode="json", round_trip=True, by_alias=not _by_name())
    except Exception as error:  # a model has serializers of its own
        raise CodecError(f"{_why_not_dumped(value, error)}: use codec='sealed', which keeps it") from error
    unset = [_unset(model) for model in _models(value)]
    if not any(unset):
        return tree
    return {**(tree if type(tree) is dict else {VALUE: tree}), UNSET: unset}


def model_of(kind: Any, tree: Any) -> Any:
    """The model again: validated, and with the same fields given."""
    unset = tree.pop(UNSET, None) if type(tree) is dict else None
    if unset is not None and tree.keys() == {VALUE}:
        tree = tree[VALUE]
    how = {"by_alias": False, "by_name": True} if _by_name() else {}
    if kind.model_config.get("strict"):  # such a model takes a date's text from JSON only
        made = kind.model_validate_json(importlib.import_module("msgspec.json").encode(tree), **how)
    else:
        made = kind.model_validate(tree, **how)
    if unset is not None:
        for model, names in zip(_models(made), unset, strict=True):
            if names:  # all were given that have been read
                model.__pydantic_fields_set__.difference_update(names)
    return made


def why_not(value: Any, read: Any = None) -> tuple[Any, str] | None:
    """The model in this value that pydantic leaves something out of, or reads as another one, and what; or None."""
    for model in islice(_models(value), MOST):
        if why := _why_not(model):
            return model, why
    changed = _changed(value, read)
    return None if changed is None else (value, changed)


@cache
def _by_name() -> bool:
    """Whether this pydantic can be told to take names (since 2.11)."""
    return "by_name" in inspect.signature(importlib.import_module("pydantic").BaseModel.model_validate).parameters


def _unset(model: Any) -> list[str]:
    return [name for name in type(model).__pydantic_fields__ if name not in model.__pydantic_fields_set__]


def _models(value: Any) -> Iterator[Any]:
    """The models in a value, in an order that comes back; not those in sets, which have none."""
    todo = [value]
    for each in todo:  # which grows meanwhile
        kind: Any = type(each)
        names = _fields(kind)
        if names is not None:
            yield each
            held = each.__dict__
            inside: Iterable[Any] = [held.get(name) for name in names]
            if each.__pydantic_extra__:
                inside = [*inside, *each.__pydantic_extra__.values()]
        elif kind is dict:
            inside = each.values()
        elif isinstance(each, (list, tuple, deque)):
            inside = each
        else:
            inside = [getattr(each, name, None) for name in getattr(kind, "__dataclass_fields__", ())]
        todo += [part for part in inside if type(part) not in _LEAVES]


_LEAVES = frozenset({NoneType, bool, int, float, str, bytes, datetime, date, UUID, Decimal})


@lru_cache(1024)
def _fields(kind: Any) -> tuple[str, ...] | None:
    """The names of a model's fields; None of what is none."""
    return tuple(kind.__pydantic_fields__) if is_pydantic(kind) else None


def _why_not_dumped(value: Any, error: Exception) -> str:
    for model in islice(_models(value), MOST):
        for name, part in vars(model).items():
            if isinstance(part, bytes):
                try:
                    part.decode()
                except UnicodeDecodeError:
                    return f"{_named(model)}.{name} is bytes that are no UTF-8, which pydantic has no JSON word for"
    return f"pydantic can't write this {_named(value)} ({error})"


def _why_not(model: Any) -> str | None:
    for name, field in type(model).__pydantic_fields__.items():
        if field.exclude:
            return f"pydantic leaves out {_named(model)}.{name}, which is Field(exclude=True)"
        if hasattr(model.__dict__.get(name), "get_secret_value"):
            return f"pydantic writes {_named(model)}.{name}, a {type(model.__dict__[name]).__name__}, as stars"
    for name in model.__pydantic_private__ or ():
        return f"pydantic leaves out the private attribute {name!r} of a {_named(model)}"
    return None


def _changed(value: Any, read: Any) -> str | None:
    if not is_pydantic(type(value)) or type(read) is not type(value):
        return None
    for name, part in value.__dict__.items():
        other = read.__dict__.get(name)
        if not alike(part, other):
            return _changed(part, other) or (
                f"{_named(value)}.{name} comes back as another, by a validator or a serializer of it: {other!r:.60}"
            )
    return None


def _named(model: Any) -> str:
    return type(model).__qualname__
