"""What dataclasses, attrs, pydantic and msgspec know about their instances, without importing any of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields
from functools import cached_property
from types import MemberDescriptorType
from typing import Any


def attributes(value: Any) -> dict[str, object] | None:
    """The fields of a model's instance by name; None if its class is no model."""
    cls = type(value)
    if hasattr(cls, "__dataclass_fields__"):
        return _filled(value, [field.name for field in fields(cls)], extras(value))
    if hasattr(cls, "__attrs_attrs__"):
        return _filled(value, [field.name for field in cls.__attrs_attrs__], extras(value))
    if hasattr(cls, "__struct_fields__"):
        return _filled(value, cls.__struct_fields__, {})
    if _is_pydantic(cls):
        return _filled(value, list(cls.__pydantic_fields__), value.__pydantic_extra__ or {})
    return None


def is_frozen(value: Any) -> bool:
    """The value is a model's instance that doesn't change."""
    cls: Any = type(value)
    if hasattr(cls, "__dataclass_fields__"):
        return bool(cls.__dataclass_params__.frozen) and not extras(value)
    if hasattr(cls, "__attrs_attrs__"):
        return bool(cls.__setattr__.__name__ == "_frozen_setattrs") and not extras(value)
    if hasattr(cls, "__struct_fields__"):
        return bool(cls.__struct_config__.frozen)
    return _is_pydantic(cls) and bool(cls.model_config.get("frozen"))


def beside(value: Any, base: type) -> dict[str, object]:
    """The attributes that an instance has beside its base class's, in `__dict__` or in slots; a cached property is none."""
    cls = type(value)
    state = dict(getattr(value, "__dict__", ()))
    for derived in cls.__mro__[: cls.__mro__.index(base)]:
        slots = [name for name, member in vars(derived).items() if isinstance(member, MemberDescriptorType)]
        state |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {name: state[name] for name in sorted(state) if not isinstance(getattr(cls, name, None), cached_property)}


def extras(value: Any) -> dict[str, object]:
    """What an undecorated subclass of a dataclass or attrs class holds beside the fields: nothing freezes that."""
    for base in type(value).__mro__:
        if "__dataclass_fields__" in vars(base) or "__attrs_attrs__" in vars(base):
            return {} if base is type(value) else beside(value, base)
    return {}


def _is_pydantic(cls: Any) -> bool:
    pydantic = sys.modules.get("pydantic.main")
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def _filled(value: Any, names: Iterable[str], more: dict[str, object]) -> dict[str, object]:
    """The fields that are set, in the class's order, then the others by name."""
    filled = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return filled | {name: more[name] for name in sorted(more) if name not in filled}
