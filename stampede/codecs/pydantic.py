"""pydantic on the wire: its URLs and secrets; for msgspec also its models, by the names of their fields."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import Any

from stampede.codecs.stdlib import Shape, plain
from stampede.errors import CodecError

__all__ = ["model_of", "plain_shape", "tree_of_model"]


def tree_of_model(value: Any) -> Any:
    """Return a model as values of JSON's types, which `model_of` takes."""
    try:
        return value.model_dump(mode="json", round_trip=True, by_alias=False)
    except ValueError as error:  # PydanticSerializationError is one
        kind = type(value).__qualname__
        raise CodecError(
            f"pydantic can't write this {kind} ({error}): use codec='sealed', which can store it"
        ) from error


def model_of(kind: Any, tree: Any) -> Any:
    """Return the model that `tree_of_model` was given, validated."""
    if kind.model_config.get("strict"):  # a strict model accepts a date's text only from JSON
        return kind.model_validate_json(json.dumps(tree), by_alias=False, by_name=True)
    return kind.model_validate(tree, by_alias=False, by_name=True)


# -- URLs and secrets -------------------------------------------------------------------------------------------------


@lru_cache(1024)
def plain_shape(kind: Any, tag: str) -> Shape | None:
    """Return the shape of a type of URLs or secrets; None for any other type."""
    networks, types = sys.modules.get("pydantic.networks"), sys.modules.get("pydantic.types")
    if networks is not None and issubclass(kind, (networks.AnyUrl, getattr(networks, "_BaseMultiHostUrl", ()))):
        return _url(kind, tag)
    if types is not None and issubclass(kind, (types.SecretStr, types.SecretBytes)):
        inner = bytes if issubclass(kind, types.SecretBytes) else str
        return plain(tag, kind, lambda value: (value.get_secret_value(),), inner)
    return None


def _url(kind: Any, tag: str) -> Shape:
    def lower(value: Any) -> tuple[Any, ...]:
        text = str(value)
        if kind(text) != value:
            raise CodecError(
                f"a {kind.__qualname__} whose text {text!r} does not make an equal one can't be stored: return str(it)"
            )
        return (text,)

    return plain(tag, kind, lower, str)
