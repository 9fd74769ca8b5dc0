"""Fields of dataclasses, attrs classes, pydantic models and msgspec structs, read without importing these packages."""

from __future__ import annotations

import sys
from dataclasses import fields
from functools import cached_property
from types import MemberDescriptorType
from typing import Any


def attributes(value: Any) -> dict[str, object] | None:
    """Return the fields of a model's instance by name; None if its class is not a model."""
    names = field_names(type(value))
    if names is None:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | extras(value)


def field_names(cls: Any) -> list[str] | None:
    """Return the names of a model's fields; None if the class is not a model."""
    if hasattr(cls, "__dataclass_fields__"):
        return [field.name for field in fields(cls)]
    if hasattr(cls, "__attrs_attrs__"):
        return [field.name for field in cls.__attrs_attrs__]
    if hasattr(cls, "__struct_fields__"):
        return list(cls.__struct_fields__)
    return list(cls.__pydantic_fields__) if is_pydantic(cls) else None


def is_frozen(value: Any) -> bool:
    """Return whether the value is an immutable instance of a model."""
    cls: Any = type(value)
    if hasattr(cls, "__dataclass_fields__"):
        return bool(cls.__dataclass_params__.frozen) and not extras(value)
    if hasattr(cls, "__attrs_attrs__"):
        return bool(cls.__setattr__.__name__ == "_frozen_setattrs") and not extras(value)
    if hasattr(cls, "__struct_fields__"):
        return bool(cls.__struct_config__.frozen)
    return is_pydantic(cls) and bool(cls.model_config.get("frozen"))


def is_row(cls: Any) -> bool:
    """Return whether the class's instances are rows of a database, or proxies of one, as Django's `request.user` is."""
    return (
        hasattr(cls, "__mapper__")
        or (hasattr(cls, "_meta") and hasattr(cls, "_default_manager"))
        or (cls.__module__, cls.__name__) == ("django.utils.functional", "SimpleLazyObject")
    )


def added_attributes(value: Any, base: type) -> dict[str, object]:
    """Return the attributes that an instance has in addition to its base class's, without cached properties."""
    cls = type(value)
    state = dict(getattr(value, "__dict__", ()))
    for derived in cls.__mro__[: cls.__mro__.index(base)]:
        slots = [name for name, member in vars(derived).items() if isinstance(member, MemberDescriptorType)]
        state |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {name: state[name] for name in sorted(state) if not isinstance(getattr(cls, name, None), cached_property)}


def extras(value: Any) -> dict[str, object]:
    """Return what a model's instance has besides its fields: pydantic's extras, or additions of a plain subclass."""
    cls: Any = type(value)
    if is_pydantic(cls):
        more = value.__pydantic_extra__ or {}
        return {name: more[name] for name in sorted(more)}
    model = next((base for base in cls.__mro__ if vars(base).keys() & _MARKS), cls)
    if model is cls:
        return {}
    names = field_names(model) or ()
    return {name: part for name, part in added_attributes(value, model).items() if name not in names}


def private_attributes(value: Any) -> dict[object, object]:
    """Return a pydantic model's private attributes, which are part of its identity, too."""
    private = value.__pydantic_private__ if is_pydantic(type(value)) else None
    undefined = getattr(sys.modules.get("pydantic_core"), "PydanticUndefined", None)
    return {name: part for name, part in (private or {}).items() if part is not undefined}


_MARKS = frozenset({"__dataclass_fields__", "__attrs_attrs__"})


def is_pydantic(cls: Any) -> bool:
    return hasattr(cls, "__pydantic_fields_set__")
