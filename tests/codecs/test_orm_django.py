"""Django's models as values: the fields that were loaded, what was annotated, selected and prefetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("django")

import django_project  # noqa: F401  (the settings come first)
from django.core.files.base import ContentFile
from django.db import connection, models
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject, cached_property
from django.utils.translation import gettext_lazy

from stampede import CodecError, KeyingError, cached
from stampede.codecs import make_codec
from stampede.model.entry import Entry
from stampede.testing import isolated

KEY, ID = "k", b"12345678"


class Author(models.Model):
    name = models.CharField(max_length=20)
    biography = models.TextField(default="long")
    portrait = models.FileField(default="faces/a.png")

    class Meta:
        app_label = "shop"

    @cached_property
    def initial(self) -> str:
        return self.name[0]


class Profile(models.Model):
    author = models.OneToOneField(Author, on_delete=models.CASCADE)
    city = models.CharField(max_length=20)

    class Meta:
        app_label = "shop"


class Tag(models.Model):
    name = models.CharField(max_length=20)

    class Meta:
        app_label = "shop"


class Book(models.Model):
    title = models.CharField(max_length=20)
    author = models.ForeignKey(Author, on_delete=models.CASCADE, related_name="books")
    tags = models.ManyToManyField(Tag)
    price = models.DecimalField(max_digits=6, decimal_places=2, default="9.50")

    class Meta:
        app_label = "shop"


class Novel(Book):
    pages = models.IntegerField(default=100)

    class Meta:
        app_label = "shop"


MODELS = [Author, Profile, Tag, Book, Novel]


@pytest.fixture(scope="module", autouse=True)
def _tables() -> Iterator[None]:
    with connection.schema_editor() as schema:
        for model in MODELS:
            schema.create_model(model)
    ann = Author.objects.create(id=1, name="ann")
    Profile.objects.create(author=ann, city="Rome")
    red = Tag.objects.create(name="red")
    for title in ("one", "two"):
        Book.objects.create(title=title, author=ann).tags.add(red)
    yield
    connection.close()


@pytest.fixture(autouse=True)
def _caches() -> Iterator[None]:
    with isolated(url="memory://?codec=sealed"):
        yield


def there_and_back(value: Any, **options: Any) -> Any:
    made = make_codec(**options)
    return made.decode(KEY, made.encode(KEY, Entry(value, ID))).value


def asked(count: int = 0) -> Any:
    """Checks that the block sends this number of queries to the database."""
    captured = CaptureQueriesContext(connection)

    class Block:
        def __enter__(self) -> None:
            captured.__enter__()

        def __exit__(self, *args: Any) -> None:
            captured.__exit__(*args)
            assert len(captured) == count, [each["sql"] for each in captured]

    return Block()


def test_a_model_that_is_annotated_is_a_value() -> None:
    """A model that the return annotation names is computed once and stored."""

    @cached
    def author(author_id: int) -> Author:
        return Author.objects.get(pk=author_id)

    first = author(1)
    with asked(0):
        again = author(1)
        assert first == again and first is not again and type(again) is Author
        assert (again.name, again.biography, again.portrait.name) == ("ann", "long", "faces/a.png")
        assert not again._state.adding and again._state.db == "default"
    with asked(1):
        assert {each.title for each in again.books.all()} == {"one", "two"}
    with asked(1):
        again.save()  # an UPDATE, and no INSERT
    assert Author.objects.count() == 1


def test_what_was_deferred_stays_deferred() -> None:
    """A field that the query deferred is not stored, and remains deferred."""

    @cached
    def authors() -> list[Author]:
        return list(Author.objects.defer("biography"))

    for _ in range(2):
        (ann,) = authors()
        assert ann.get_deferred_fields() == {"biography"}
        with asked(1):
            assert ann.biography == "long"


def test_what_was_selected_and_prefetched_comes_along() -> None:
    """Related objects that the query loaded are stored too, so a hit sends no queries for them."""

    @cached
    def authors() -> list[Author]:
        return list(Author.objects.select_related("profile").prefetch_related("books__tags"))

    @cached
    def books() -> list[Book]:
        return list(Book.objects.select_related("author__profile").order_by("title"))

    @cached
    def tags() -> list[Tag]:
        found = models.Prefetch("book_set", Book.objects.order_by("-title"), to_attr="newest")
        return list(Tag.objects.prefetch_related("book_set", found))

    for _ in range(2):
        (ann,), (one, two), (red,) = authors(), books(), tags()
        with asked(0):
            assert [each.title for each in ann.books.all()] == ["one", "two"] and ann.profile.city == "Rome"
            assert all(each.author is ann for each in ann.books.all()) and ann.profile.author is ann
            assert [each.name for each in ann.books.all()[0].tags.all()] == ["red"]
            assert one.author == two.author and one.author.profile.city == "Rome"
            assert len(red.book_set.all()) == 2 and [each.title for each in red.newest] == ["two", "one"]
        with asked(1):
            assert [each.title for each in ann.books.filter(title="two")] == ["two"]
    assert authors.stats().computations == books.stats().computations == tags.stats().computations == 1


def test_what_was_annotated_comes_along() -> None:
    """Annotations of a query, such as `author.count`, are stored with the model."""

    @cached
    def author() -> Author:
        found = Author.objects.annotate(count=models.Count("books")).get()
        assert found.initial == "a"
        return found

    for _ in range(2):
        assert author().count == 2 and author().initial == "a"
    assert author.stats().computations == 1


def test_a_model_of_two_tables() -> None:
    """A model that inherits from another one comes back with the fields of both tables."""
    novel = Novel.objects.create(title="three", author_id=1)
    try:
        read = there_and_back(Novel.objects.get(), returns=Novel)
        assert read == novel and (read.title, read.pages) == ("three", 100)
        assert there_and_back([novel], trust=[Novel]) == [novel]
        assert there_and_back([novel], name="pickle", signing_key=b"k") == [novel]
    finally:
        novel.delete()


REFUSED = {
    "not annotated": (r"trust=\[Author\], or in the return annotation", lambda: Author.objects.get(), {}),
    "not saved": ("save it first", lambda: Author(name="new"), {"returns": Author}),
    "a query": (r"return list\(it\)", lambda: Author.objects.all(), {"returns": Author}),
    "a manager": (r"return list\(it\.all\(\)\)", lambda: Author.objects, {"returns": Author}),
    "a lazy object": ("return that one", lambda: SimpleLazyObject(lambda: Author.objects.get()), {"returns": Author}),
    "a lazy text": (r"return str\(it\)", lambda: gettext_lazy("price"), {}),
    "a new file": ("save it first", lambda: with_file(Author.objects.get()), {"returns": Author}),
    "by msgpack": ("use codec='sealed'", lambda: Author.objects.get(), {"name": "msgpack", "returns": Author}),
    "by json": ("use codec='sealed'", lambda: Author.objects.get(), {"name": "json", "returns": Author}),
}


def with_file(author: Author) -> Author:
    author.portrait = ContentFile(b"x", name="b.png")
    assert author.portrait.name == "b.png"
    return author


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_what_works(what: str) -> None:
    """Values that can't be stored, such as unsaved models and queries, are refused with advice."""
    advice, make, options = REFUSED[what]
    with pytest.raises(CodecError, match=advice):
        there_and_back(make(), **options)


GOOD: list[Any] = ["layout", "default", {"id": 1}, {}, {}, {}]


@pytest.mark.parametrize(
    "place, part",
    [
        (0, 0), (1, "elsewhere"), (1, []), (2, {"id": 1, "save": 2}), (2, []), (3, {"save": 1}),
        (3, {"_state": 1}), (3, {"__class__": 1}), (3, {1: 2}), (4, []), (5, {"objects": []}), (5, {"nothing": []}),
        (5, {"books": (Tag(id=1),)}), (5, {"biography": []}), (5, {"profile": []}),
    ],
)  # fmt: skip
def test_hostile_bytes_are_a_miss(place: int, part: Any) -> None:
    """Hostile bytes are refused: they can't replace a method, or send a query to another database."""
    from stampede.codecs.django import facts_of, row_shape

    shape = row_shape(Author, "t")
    parts = [facts_of(Author).layout, *GOOD[1:]]
    assert shape.rebuild(*parts) == Author.objects.get()
    parts[place] = part
    with CaptureQueriesContext(connection) as asked, pytest.raises(Exception):  # noqa: B017  made a CodecError above
        shape.rebuild(*parts)
    assert not asked.captured_queries


def test_a_row_is_no_key_and_the_refusal_says_what_is() -> None:
    """A model is refused as an argument. The advice is its primary key, and not ignore=, which would mix up owners."""

    @cached
    def cart(owner: Any) -> int:
        return 1

    for owner in [Author.objects.get(), SimpleLazyObject(lambda: Author.objects.get())]:
        with pytest.raises(KeyingError, match=r"'owner'.*pass its primary key") as refused:
            cart(owner)
        assert "ignore" not in str(refused.value)
    with pytest.raises(KeyingError, match="ignore="):
        cart(object())
