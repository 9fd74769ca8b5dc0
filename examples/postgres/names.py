"""A view that checks whether a name is free and takes it, atomically: the lock is released by the same commit.

pip install 'stampede-guard[postgres]' sqlalchemy starlette uvicorn
export SHOP_POSTGRES=postgres://user@host/shop
stampede postgres init $SHOP_POSTGRES
uvicorn --app-dir examples/postgres --workers 4 names:app

curl -X PUT localhost:8000/names/Bob        # 201
curl -X PUT localhost:8000/names/bob        # 409, also if both requests come at once
"""

import os
import sys

from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stampede import Lock
from stampede.contrib.postgres import on_commit

URL = os.environ.get("SHOP_POSTGRES") or sys.exit("export SHOP_POSTGRES=postgres://user@host/shop")
engine = create_engine("postgresql+psycopg://" + URL.partition("://")[2])  # the lock's own database


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "example_users"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


def take(name: str) -> bool:
    """Take a name, and return true. Return false if it is taken, in upper or lower case."""
    with Session(engine) as session, session.begin():
        connection = session.connection().connection.driver_connection
        with Lock(f"name:{name.lower()}", on=URL, wait=5, release_via=on_commit(connection)):
            if session.scalar(select(User).where(func.lower(User.name) == name.lower())):
                return False
            session.add(User(name=name))
            return True  # the lock is released by the commit, so the next request sees the row


def put(request: Request) -> Response:
    name = request.path_params["name"]
    return JSONResponse({"name": name}, 201 if take(name) else 409)


Base.metadata.create_all(engine)
app = Starlette(routes=[Route("/names/{name}", put, methods=["PUT"])])
