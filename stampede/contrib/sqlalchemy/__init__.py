"""SQLAlchemy in a cache: objects detached from the session that loaded them, and whole statements of the ORM.

@cached(ttl=600, ignore=["session"])
@detached
def user(session: Session, user_id: int) -> User | None:
    return session.get(User, user_id)

mine = merge(session, user(session, 42))  # to load its relationships, or to change it

StatementCache(Cache("redis://...", trust=["shop.models"])).listen(Session)
session.scalars(select(User).where(User.name == "bob").options(FromCache(ttl=600)))"""

from stampede.contrib.sqlalchemy.detached import detach, detached, merge
from stampede.contrib.sqlalchemy.options import FromCache
from stampede.contrib.sqlalchemy.statements import StatementCache

__all__ = ["FromCache", "StatementCache", "detach", "detached", "merge"]
