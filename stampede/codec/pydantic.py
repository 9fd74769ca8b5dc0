"""pydantic on the wire: its URLs and secrets, and under msgspec its models.

Models go by the names of their fields, whatever their aliases, and with which of them were given. A secret is stored as
what it hides. pydantic itself is imported by who has such values.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import date, datetime
from decimal import Decimal
from functools import cache, lru_cache
from types import NoneType
from typing import Any
from uuid import UUID

from stampede.codec.values import Shape, lost, plain
from stampede.errors import CodecError

__all__ = ["model_of", "plain_shape", "tree_of_model"]

UNSET = "__unset__"
"""Beside the fields of a model: of each model in it, those fields that nobody had given. Not there if all were."""

VALUE = "__value__"  # the tree of a model that is no object, as that of a RootModel, where UNSET stands beside it


def tree_of_model(value: Any) -> Any:
    """Return the model in JSON's words, as `model_of` takes it."""
    try:
        tree = value.model_dump(mode="json", round_trip=True, by_alias=not _by_name())
    except ValueError as error:  # PydanticSerializationError is one
        kind = type(value).__qualname__
        raise CodecError(f"pydantic can't write this {kind} ({error}): use codec='sealed', which keeps it") from error
    unset = [_unset(model) for model in _models(value)]
    if not any(unset):
        return tree
    return {**(tree if type(tree) is dict else {VALUE: tree}), UNSET: unset}


def model_of(kind: Any, tree: Any) -> Any:
    """Return the model again: validated, and with the same fields given."""
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


@cache
def _by_name() -> bool:  # since pydantic 2.11
    return "by_name" in inspect.signature(importlib.import_module("pydantic").BaseModel.model_validate).parameters


def _unset(model: Any) -> list[str]:
    return [name for name in type(model).__pydantic_fields__ if name not in model.__pydantic_fields_set__]


_LEAVES = frozenset({NoneType, bool, int, float, str, bytes, datetime, date, UUID, Decimal})


def _models(value: Any) -> Iterator[Any]:
    """Yield the models in a value, in an order that comes back; not those in sets, which have none."""
    todo = [value]
    for each in todo:  # which grows meanwhile
        kind: Any = type(each)
        if hasattr(kind, "__pydantic_fields_set__"):
            yield each
            held, extra = each.__dict__, each.__pydantic_extra__ or {}
            inside: Iterable[Any] = [*map(held.get, kind.__pydantic_fields__), *extra.values()]
        elif kind is dict:
            inside = each.values()
        elif isinstance(each, (list, tuple, deque)):
            inside = each
        else:
            inside = [getattr(each, name, None) for name in getattr(kind, "__dataclass_fields__", ())]
        todo += [part for part in inside if type(part) not in _LEAVES]


# -- URLs and secrets -------------------------------------------------------------------------------------------------


@lru_cache(1024)
def plain_shape(kind: Any, tag: str) -> Shape | None:
    """Return the shape of a URL's type, or of a secret's; None for any other."""
    core, types = sys.modules.get("pydantic_core"), sys.modules.get("pydantic.types")
    if core is not None and (kind in (core.Url, core.MultiHostUrl) or _is_url(kind)):
        return _url(kind, tag)
    if types is not None and issubclass(kind, (types.SecretStr, types.SecretBytes)):
        return _secret(kind, tag, bytes if issubclass(kind, types.SecretBytes) else str)
    return None


def _is_url(kind: Any) -> bool:
    networks = sys.modules.get("pydantic.networks")
    bases = [getattr(networks, name, None) for name in ("_BaseUrl", "_BaseMultiHostUrl")]  # as in 2.10 to 2.14
    return issubclass(kind, tuple(base for base in bases if base is not None)) and kind not in bases


def _url(kind: Any, tag: str) -> Shape:
    def lower(value: Any) -> tuple[Any, ...]:
        text = str(value)
        if getattr(value, "__dict__", {}).keys() - {"_url"} or kind(text) != value:
            raise CodecError(f"a {kind.__qualname__} that its text {text!r} does not make again: return str(it)")
        return (text,)

    return plain(tag, kind, lower, str)


def _secret(kind: Any, tag: str, inner: type) -> Shape:
    def lower(value: Any) -> tuple[Any, ...]:
        if more := value.__dict__.keys() - {"_secret_value"}:
            raise lost(kind.__qualname__, more)
        return (value.get_secret_value(),)

    return plain(tag, kind, lower, inner)
