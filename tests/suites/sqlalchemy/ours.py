"""What the example's programs import from its `caching_query.py` and `environment.py`, made of our adapter."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from sqlalchemy import create_engine, event, select
from sqlalchemy.orm import Query, declarative_base, scoped_session, sessionmaker
from sqlalchemy.orm.interfaces import UserDefinedOption

from stampede import Cache
from stampede.contrib import sqlalchemy as adapter

PACKAGE = "examples.dogpile_caching"
environment: Environment
"""That of the program that was started last."""


class FromCache(adapter.FromCache):
    """Their option names a region, and may add a text to the key. Here there is one cache."""

    def __init__(self, region: str = "default", cache_key: str | None = None) -> None:
        super().__init__()


class RelationshipCache(UserDefinedOption):
    """Their option goes with a statement to the objects that it loads. Ours belongs to the relationship."""

    def __init__(self, relationship: Any, region: str = "default", cache_key: str | None = None) -> None:
        super().__init__()
        self.relationship = relationship
        environment.lazy_loads(relationship)

    def and_(self, other: RelationshipCache) -> RelationshipCache:
        return self


class Environment:
    """One start of an example's program: the modules that it imports from, and the SQL that has run."""

    def __init__(self, folder: Path, url: str) -> None:
        global environment
        environment = self
        self.asked: list[str] = []
        self.sessions = scoped_session(sessionmaker())
        self.database = create_engine(f"sqlite:///{folder}/demo.db")
        self.sessions.configure(bind=self.database)
        self._is_new = not (folder / "demo.db").exists()
        self._relationships: list[Any] = []  # those of `model.py`, which the cache imports
        self.statements: adapter.StatementCache | None = None
        self._replace_modules(str(folder))
        self.cache = Cache(url, ttl=3600, namespace=folder.name, trust=[f"{PACKAGE}.model"])
        self.statements = adapter.StatementCache(self.cache)
        self.statements.listen(self.sessions)
        self.lazy_loads(*self._relationships)
        event.listen(self.database, "before_cursor_execute", lambda *args: self.asked.append(args[2]))

    def _replace_modules(self, root: str) -> None:
        for name in [each for each in sys.modules if each.startswith(PACKAGE)]:
            del sys.modules[name]
        known = {"Base": declarative_base(), "Session": self.sessions, "bootstrap": self._bootstrap}
        for name, content in {
            "caching_query": {"FromCache": FromCache, "RelationshipCache": RelationshipCache},
            "environment": {**known, "cache": self, "regions": {}, "root": root},
        }.items():
            module = sys.modules[f"{PACKAGE}.{name}"] = ModuleType(name)
            vars(module).update(content)

    def lazy_loads(self, *relationships: Any) -> None:
        if self.statements is None:
            self._relationships += relationships
        else:
            self.statements.lazy_loads(*relationships, option=adapter.FromCache())

    def _bootstrap(self) -> None:
        if self._is_new:
            from examples.dogpile_caching import fixture_data

            fixture_data.install()

    def invalidate(self, statement: Any, parameters: Any, option: UserDefinedOption) -> None:
        """Remove a statement's result, as `ORMCache.invalidate` of the example does."""
        assert self.statements is not None
        if isinstance(option, RelationshipCache):
            self.statements.invalidate(option.relationship.property.mapper)
        else:
            self.cache.invalidate(self.key(statement))

    def key(self, statement: Any) -> str:
        if isinstance(statement, Query):
            statement = select(*[each["entity"] for each in statement.column_descriptions])
        assert self.statements is not None
        return self.statements.key(self.sessions(), statement)

    def close(self) -> None:
        self.sessions.remove()
        self.database.dispose()
        self.cache.close()
