"""`@detached` between `@cached` and a function of a session keeps the types."""

from __future__ import annotations

from typing import assert_type

from sqlalchemy.orm import Session

from stampede import cached
from stampede.contrib.sqlalchemy import detach, detached, merge


class User:
    name: str


@cached(ttl=600, ignore=["session"])
@detached
def user(session: Session, user_id: int) -> User | None:
    return session.get(User, user_id)


@cached(ttl=600, ignore=["session"])
@detached
async def user_async(session: Session, user_id: int) -> User | None:
    return session.get(User, user_id)


async def main(session: Session) -> None:
    assert_type(user(session, 1), User | None)
    assert_type(await user_async(session, 1), User | None)
    assert_type(user.invalidate(1), bool)
    assert_type(merge(session, user(session, 1)), User | None)
    assert_type(detach([User()]), list[User])
