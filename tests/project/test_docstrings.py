"""Every public name has a docstring with an example, and every example runs, in a memory cache of its own."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import stampede
import stampede.testing
from stampede import Cache, Entry, Lock, errors, get_cache, try_lock
from stampede.api.cached import VERBS, Cached
from stampede.api.many import CachedMany
from stampede.api.method import Bound
from stampede.metrics import Stats
from stampede.testing import isolated

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NOT_SHOWN = {"of", "scope", "stats_of"}  # internal names of a cache


def public() -> Iterator[tuple[str, Any]]:
    for name in stampede.__all__:
        yield name, getattr(stampede, name)
    for name in errors.__all__:
        if name[0].isupper() and name not in stampede.__all__:
            yield f"errors.{name}", getattr(errors, name)
    for kind in (Cache, Lock, try_lock, Entry, Stats):
        for name in dir(kind):
            if not name.startswith("_") and name not in NOT_SHOWN and callable(getattr(kind, name)):
                yield f"{kind.__name__}.{name}", getattr(kind, name)
    for name in VERBS:
        yield f"function.{name}", getattr(Cached, name)
        yield f"method.{name}", getattr(Bound, name)
    for name in ("set_many", "invalidate_many"):
        yield f"function of many.{name}", getattr(CachedMany, name)
    yield "cached.many", stampede.cached.many
    for name in stampede.testing.__all__:
        yield f"testing.{name}", getattr(stampede.testing, name)


def dogpile() -> Iterator[tuple[str, Any]]:
    module = pytest.importorskip("dogpile.cache") and pytest.importorskip("stampede.contrib.dogpile")
    for name in module.__all__:
        yield f"contrib.dogpile.{name}", getattr(module, name)


def is_twin(name: str) -> bool:
    """Return whether this is the async twin of a verb. The docstring of the verb has the example."""
    kind, _, verb = name.rpartition(".")
    return kind in ("Cache", "Lock", "try_lock") and verb.startswith("a") and verb[1:] in dir(Cache) + dir(Lock)


def examples_run(name: str, what: Any, **around: Any) -> None:
    text = inspect.getdoc(what) or ""
    assert text, f"{name} has no docstring"
    if is_twin(name):
        return
    assert ">>> " in text, f"{name}: its docstring shows no example"
    told: list[str] = []
    with isolated():
        known = {each: getattr(stampede, each) for each in stampede.__all__}
        known |= {"stampede": stampede, "asyncio": asyncio, "cache": get_cache(), "__name__": "shop"} | around
        test = doctest.DocTestParser().get_doctest(text, known, name, None, None)
        outcome = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=told.append)
    assert not outcome.failed, "".join(told)


def test_every_public_name_has_an_example_that_runs() -> None:
    """Every public name has an example that runs, so that help() shows how to use it."""
    for name, what in public():
        examples_run(name, what)


def test_so_have_those_of_dogpile() -> None:
    """Every public name of `stampede.contrib.dogpile` has an example that runs."""
    for name, what in dogpile():
        examples_run(name, what)


@pytest.mark.parametrize("name", ["cachelib", "flask_caching", "key_value"])
def test_so_have_those_of_caches_of_frameworks(name: str) -> None:
    """Every public name of these adapters has an example that runs."""
    pytest.importorskip("key_value.aio" if name == "key_value" else name)
    module = importlib.import_module(f"stampede.contrib.{name}")
    for each in module.__all__:
        examples_run(f"contrib.{name}.{each}", getattr(module, each))


def test_so_have_those_of_sqlalchemy() -> None:
    """Every public name of `stampede.contrib.sqlalchemy` has an example that runs."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    orm: Any = pytest.importorskip("sqlalchemy.orm")
    from stampede.contrib import sqlalchemy as ours

    Base = orm.declarative_base()
    column, number = orm.mapped_column, sqlalchemy.Integer
    columns = {"id": column(number, primary_key=True), "name": column(sqlalchemy.Text)}
    Team = type("Team", (Base,), {"__tablename__": "team", "__module__": __name__, **columns})
    columns = {"id": column(number, primary_key=True), "name": column(sqlalchemy.Text)}
    columns["team_id"] = column(sqlalchemy.ForeignKey("team.id"))
    team = orm.relationship(Team)
    User = type("User", (Base,), {"__tablename__": "user", "__module__": __name__, "team": team, **columns})
    database = sqlalchemy.create_engine("sqlite://", poolclass=sqlalchemy.StaticPool)
    Base.metadata.create_all(database)
    with orm.Session(database) as session:
        session.add(User(id=1, name="bob", team=Team(id=1, name="red")))
        session.commit()
    around = {name: getattr(ours, name) for name in ours.__all__}
    around |= {"Cache": Cache, "User": User, "Session": orm.Session, "database": database, "select": sqlalchemy.select}
    around["sessionmaker"] = orm.sessionmaker
    verbs = {f"StatementCache.{name}" for name in vars(ours.StatementCache) if not name.startswith("_")}
    for name in {*ours.__all__, *verbs}:
        sessions = orm.sessionmaker(database)
        statements = ours.StatementCache(Cache())
        statements.listen(sessions)
        kind, _, verb = name.partition(".")
        with sessions() as session:
            what = getattr(around[kind], verb) if verb else around[kind]
            examples_run(f"contrib.sqlalchemy.{name}", what, session=session, statements=statements, **around)
    database.dispose()
