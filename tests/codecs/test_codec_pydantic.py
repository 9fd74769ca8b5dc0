"""pydantic models come back equal under every codec, or are refused with the true reason."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID, uuid4

import pydantic
import pytest
from pydantic import AliasPath, BaseModel, ConfigDict, Field, HttpUrl, PostgresDsn, PrivateAttr, SecretBytes, SecretStr
from pydantic.alias_generators import to_camel

from stampede import CodecError
from stampede.codecs import make_codec
from stampede.codecs.equality import alike
from stampede.model.entry import Entry

T = TypeVar("T")


class Item(BaseModel):
    name: str
    price: float | None = None
    tax: float = 10.5


class Page(BaseModel, Generic[T]):
    items: list[T]
    by_name: dict[str, T] = {}
    total: int = 0


class Made(BaseModel):
    id: UUID = Field(default_factory=uuid4)
    text: str = ""


class Items(pydantic.RootModel[list[Item]]): ...


class Open(BaseModel, extra="allow"):
    n: int = 1


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)
    first_name: str
    the_page: Page[Item] | None = None


class Aliases(BaseModel):
    read: int = Field(validation_alias="Read")
    written: int = Field(1, serialization_alias="Written")
    deep: int = Field(validation_alias=AliasPath("a", "b"))


class Cat(BaseModel):
    kind: Literal["cat"] = Field("cat", alias="Kind")


class Dog(BaseModel):
    kind: Literal["dog"] = Field("dog", alias="Kind")


class Pet(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Strict(BaseModel, strict=True):
    day: date
    both: tuple[int, ...] = ()


class Link(BaseModel):
    url: HttpUrl


class Excluded(BaseModel):
    a: int
    hidden: str = Field(exclude=True)


class Private(BaseModel):
    a: int
    _seen: int = PrivateAttr(default=3)


class Secret(BaseModel):
    secret: SecretStr
    token: SecretBytes = SecretBytes(b"\xff")
    database: PostgresDsn | None = None


class Louder(BaseModel):
    text: str

    @pydantic.field_validator("text")
    @classmethod
    def louder(cls, text: str) -> str:
        return text + "!"


class Raw(BaseModel):
    raw: bytes


def private() -> Private:
    made = Private(a=1)
    made._seen = 9
    return made


def through(codec: Any, value: Any) -> Any:
    return codec.decode("k", codec.encode("k", Entry(value, b"12345678"))).value


def every_set(value: Any) -> Any:
    """The dumps that depend on which fields were set."""
    adapter: Any = pydantic.TypeAdapter(Any)
    return [adapter.dump_python(value, **{how: True}) for how in ("exclude_unset", "exclude_defaults", "by_alias")]


@pytest.mark.parametrize("name", ["sealed", "msgpack", "json"])
@pytest.mark.parametrize(
    "returns, value",
    [
        (Item, Item(name="foo")),
        (Item, Item(name="foo", tax=10.5)),
        (list[Item], [Item(name="foo"), Item(name="bar", price=None)]),
        (Page[Item], Page[Item](items=[Item(name="foo"), Item(name="b", tax=1)], by_name={"a": Item(name="a")})),
        (Made, Made()),
        (Made, Made(id=UUID(int=1))),
        (Items, Items([Item(name="foo")])),
        (Open, Open(more=2)),
        (Camel, Camel(firstName="x")),
        (Camel, Camel(firstName="x", thePage=Page[Item](items=[Item(name="foo")]))),
        (Aliases, Aliases(Read=1, a={"b": 2})),
        (Pet, Pet(pet=Dog(Kind="dog"))),
        (Pet, Pet(pet=Dog())),
        (Strict, Strict(day=date(2026, 1, 1), both=(1, 2))),
        (Link, Link(url="https://example.org/a?b=%20c")),
    ],
)
def test_a_model_comes_back_equal(name: str, returns: Any, value: Any) -> None:
    """A model comes back equal, also with aliases. The default codec also keeps which fields were set."""
    again = through(make_codec(name, returns=returns), value)
    assert alike(again, value)
    if name == "sealed":
        assert every_set(again) == every_set(value)


@pytest.mark.parametrize("name", ["msgpack", "json"])
@pytest.mark.parametrize(
    "value, why",
    [
        (Excluded(a=1, hidden="h"), "hidden\n  Field required"),
        (private(), r"Private,? would come back from .* incomplete or changed"),
        (Secret(secret="s"), r"its .*\.secret\._secret_value, of type str, would come back"),
        (Louder(text="a"), r"its .*\.text, of type str, would come back from .* changed"),
        (Raw(raw=b"\xff"), "pydantic can't write this Raw .*utf-8"),
    ],
)
def test_what_pydantic_changes_is_refused_for_that_reason(name: str, value: Any, why: str) -> None:
    """A model that pydantic would change is refused with that reason. The advice, codec='sealed', works."""
    for given, returns in ((value, type(value)), ([value], list[type(value)])):  # type: ignore[misc]
        with pytest.raises(CodecError, match=why) as refused:
            make_codec(name, returns=returns).encode("k", Entry(given, b"12345678"))
        assert "use codec='sealed'" in str(refused.value)
        assert alike(through(make_codec(returns=returns), given), given)


@dataclass
class Site:
    url: HttpUrl
    secret: SecretStr
    mirrors: list[PostgresDsn]


@pytest.mark.parametrize("name", ["sealed", "msgpack", "json"])
def test_a_dataclass_may_hold_urls_and_secrets(name: str) -> None:
    """A dataclass with URLs and secrets of pydantic comes back under every codec."""
    site = Site(HttpUrl("http://a.b/c"), SecretStr("s"), [PostgresDsn("postgres://a:b@c,d:5/e")])
    again = through(make_codec(name, returns=Site), site)
    assert alike(again, site) and again.secret.get_secret_value() == "s"


def test_urls_and_secrets_need_no_trust() -> None:
    """The default codec stores URLs and secrets of pydantic without trust=."""
    secret = Secret(secret="s", database="postgres://a:b@c,d:5/e")
    again = through(make_codec(returns=Secret), secret)
    assert alike(again, secret) and again.secret.get_secret_value() == "s" and again.database == secret.database
    assert through(make_codec(returns=HttpUrl), HttpUrl("http://a.b/c")) == HttpUrl("http://a.b/c")
