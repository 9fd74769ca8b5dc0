"""pydantic's own types on the wire: URLs, and secrets, which are stored as what they hide."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from stampede.codec.values import Shape, expect
from stampede.errors import CodecError

__all__ = ["plain_shape"]


def plain_shape(kind: Any, tag: str) -> Shape | None:
    """The shape of a URL's type, or of a secret's; None for another one."""
    return _shape(kind, tag)


@lru_cache(1024)
def _shape(kind: Any, tag: str) -> Shape | None:
    core, networks = sys.modules.get("pydantic_core"), sys.modules.get("pydantic.networks")
    if core is not None and (kind in (core.Url, core.MultiHostUrl) or _is_url(kind, networks)):
        return _url(kind, tag)
    types = sys.modules.get("pydantic.types")
    if types is not None and issubclass(kind, (types.SecretStr, types.SecretBytes)):
        return _secret(kind, tag, bytes if issubclass(kind, types.SecretBytes) else str)
    return None


def _is_url(kind: Any, networks: Any) -> bool:
    bases = [getattr(networks, name, None) for name in ("_BaseUrl", "_BaseMultiHostUrl")]  # as in 2.10 to 2.14
    return issubclass(kind, tuple(base for base in bases if base is not None)) and kind not in bases


def _url(kind: Any, tag: str) -> Shape:
    def rebuild(*args: Any) -> Any:
        expect(args, str)
        return kind(*args)

    def lower(value: Any) -> tuple[Any, ...]:
        text = str(value)
        if getattr(value, "__dict__", {}).keys() - {"_url"} or kind(text) != value:
            raise CodecError(f"a {kind.__qualname__} that its text {text!r} does not make again: return str(it)")
        return tag, text

    return Shape(tag, kind, lower, rebuild)


def _secret(kind: Any, tag: str, inner: type) -> Shape:
    def rebuild(*args: Any) -> Any:
        expect(args, inner)
        return kind(*args)

    def lower(value: Any) -> tuple[Any, ...]:
        if extra := value.__dict__.keys() - {"_secret_value"}:
            raise CodecError(f"a {kind.__qualname__} has an attribute {min(extra)!r} of its own, which would be lost")
        return tag, value.get_secret_value()

    return Shape(tag, kind, lower, rebuild)
