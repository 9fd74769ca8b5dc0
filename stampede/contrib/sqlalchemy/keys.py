"""Statements as keys: two statements have the same key if SQLAlchemy compiles and loads them alike, their parameters
are the same, and they go to the same database."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, Table
from sqlalchemy.orm import Mapper, MapperProperty
from sqlalchemy.sql.operators import custom_op
from sqlalchemy.types import TypeEngine

from stampede.errors import KeyingError
from stampede.keys import canonical
from stampede.keys.identity import code_text

__all__ = ["key_of", "shape_of"]


def shape_of(statement: Any, parameters: Any = None) -> tuple[str, list[Any]]:
    """Return the statement's text without the values of its parameters, and these values."""
    # SQLAlchemy's key of compiled statements also tells the mapped classes and the loader options. The SQL does not: it
    # has no trace of `selectinload`. SQLAlchemy's own example of a cache calls this method, too.
    found = statement._generate_cache_key()
    if found is None:
        raise KeyingError(
            "SQLAlchemy has no key for this statement: does it use a column type without `cache_ok = True`? Give the "
            "type this attribute, or leave out FromCache"
        )
    given = parameters or {}
    values = [given.get(bind.key, bind.effective_value) for bind in found.bindparams]
    return _whole(found.key), values


def key_of(
    statement: Any, facts: object, bind: Engine, connection: Mapping[str, Any], execution_options: Mapping[str, Any]
) -> str:
    """Return the key of a statement that is run on this engine. `facts` is its shape, and all that its result depends
    on beside the database. `connection` is the execution options of the connection."""
    schemas = [each.get("schema_translate_map") for each in (connection, execution_options)]
    whole = (_database(bind), schemas, execution_options.get("identity_token"), facts)
    digest = blake2b(canonical(whole).encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
    names = [str(each["name"]) for each in getattr(statement, "column_descriptions", ())]
    return f"select:{','.join(names)[:80]}:{digest}"  # the names are for people who read the key


def _database(bind: Engine) -> str:
    """Return the database's URL. A database in this process's memory is told by its engine."""
    url = bind.url
    if url.get_backend_name() == "sqlite" and (
        not url.database or ":memory:" in url.database or "mode=memory" in str(url)
    ):
        return _in_memory.setdefault(bind, uuid4().hex)
    return url.render_as_string(hide_password=True)


_in_memory: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()


@lru_cache(1024)
def _whole(key: Any) -> str:
    return _text(key)


def _text(part: Any) -> str:
    """Return a part of SQLAlchemy's key as a text that is the same in every process."""
    if isinstance(part, tuple) and part and isinstance(part[0], type) and issubclass(part[0], TypeEngine):
        return f"({','.join([_text(part[0]), *sorted(map(_text, part[1:]))])})"  # its options come from a set
    if isinstance(part, (tuple, list)):
        return f"({','.join(map(_text, part))})"
    if isinstance(part, Mapping):
        return f"{{{','.join(f'{_text(name)}:{_text(value)}' for name, value in part.items())}}}"
    if isinstance(part, str):
        return repr(str(part))  # a quoted_name, too
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Mapper):
        return f"<{part.class_.__module__}:{part.class_.__qualname__} of {_text(part.local_table)}>"
    if isinstance(part, MapperProperty):
        return f"<{_text(part.parent)}.{part.key}>"
    if isinstance(part, (type, BuiltinFunctionType, FunctionType)):
        return f"<{part.__module__}:{part.__qualname__}>"
    if isinstance(part, custom_op):
        return f"<{_text(part._hash_key())}>"
    if isinstance(part, CodeType):  # a lambda in with_loader_criteria, or lambda_stmt
        return code_text(part)
    return canonical(part)


@lru_cache(1024)
def _table(table: Table) -> str:
    """Return the table's name and columns: a deploy that changes their types makes other keys."""
    return f"<{table.fullname} {', '.join(f'{each.name} {each.type!r}' for each in table.columns)}>"
