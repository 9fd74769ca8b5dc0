"""Models of Django that invalidate tags: at the commit, for old and new values, also in bulk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("django")

import django_project  # noqa: F401
from django.core.cache import cache, caches
from django.db import connection, models, transaction
from django.test import override_settings
from test_django_backend import settings_of

from stampede import OptionError, cached
from stampede.contrib.django import TaggedManager, invalidate_tags, tagged
from stampede.contrib.django.checks import check_caches
from stampede.testing import isolated


class Shelf(models.Model):
    objects = TaggedManager()

    class Meta:
        app_label = "library"


class Word(models.Model):
    class Meta:
        app_label = "library"


class Volume(models.Model):
    shelf = models.ForeignKey(Shelf, on_delete=models.CASCADE)
    title = models.CharField(max_length=20, default="")
    words = models.ManyToManyField(Word)
    objects = TaggedManager()

    class Meta:
        app_label = "library"
        base_manager_name = "objects"


class Atlas(Volume):
    class Meta:
        app_label = "library"


class Thin(Volume):
    class Meta:
        app_label = "library"
        proxy = True


class Plain(models.Model):
    title = models.CharField(max_length=20, default="")

    class Meta:
        app_label = "library"


KINDS: list[type[models.Model]] = [Shelf, Word, Volume, Atlas, Plain]
tagged(Volume, "volume:{pk}", "shelf:{shelf_id}", "volumes")
tagged(Word, "word:{pk}")
tagged(Plain, "plain:{pk}")


@pytest.fixture(scope="module", autouse=True)
def _tables() -> Iterator[None]:
    with connection.schema_editor() as schema:
        for model in KINDS:
            schema.create_model(model)
    yield
    with connection.schema_editor() as schema:
        for model in reversed(KINDS):
            schema.delete_model(model)
    connection.close()


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    with override_settings(CACHES=settings_of("memory://")), isolated(url="memory://"):
        cache.clear()
        for model in (Volume, Word, Shelf, Plain):
            model.objects.all().delete()
        yield


NAMES = ["volumes", "volume:1", "volume:2", "shelf:1", "shelf:2", "word:1", "plain:1"]


def ended(change: Callable[[], object]) -> set[str]:
    """Return those of the tags that a change invalidates."""
    for name in NAMES:
        cache.set(name, 1, tags=[name])
    change()
    return {name for name in NAMES if cache.get(name) is None}


def volume(**values: Any) -> Volume:
    Shelf.objects.get_or_create(pk=1), Shelf.objects.get_or_create(pk=2)
    return Volume.objects.create(**{"pk": 1, "shelf_id": 1, **values})


def test_save_and_delete() -> None:
    """Each change of a row ends its tags. If a column changes, the tags of both values are ended."""
    Shelf.objects.create(pk=1), Shelf.objects.create(pk=2)
    book = Volume(pk=1, shelf_id=1)
    assert ended(book.save) == {"volumes", "volume:1", "shelf:1"}
    assert ended(book.save) == {"volumes", "volume:1", "shelf:1"}
    book.shelf_id = 2
    assert ended(book.save) == {"volumes", "volume:1", "shelf:1", "shelf:2"}
    assert ended(book.delete) == {"volumes", "volume:1", "shelf:2"}
    volume(), volume(pk=2, shelf_id=2)
    assert ended(Volume.objects.all().delete) == {"volumes", "volume:1", "volume:2", "shelf:1", "shelf:2"}


def test_a_new_object_of_a_stored_row() -> None:
    """An object that is made with the primary key of a stored row replaces that, so the old tags end, too."""
    volume()
    assert ended(Volume(pk=1, shelf_id=2).save) == {"volumes", "volume:1", "shelf:1", "shelf:2"}


def test_values_are_those_of_the_database() -> None:
    """A tag has the text of the stored value, even if the object has another one."""
    Shelf.objects.create(pk=1)
    assert ended(lambda: Volume.objects.create(pk="1", shelf_id="1")) == {"volumes", "volume:1", "shelf:1"}


def test_related_managers() -> None:
    """Related managers use the base manager, which `Meta.base_manager_name` names."""
    book = volume()
    changed = ended(lambda: Shelf.objects.get(pk=2).volume_set.add(book))
    assert changed == {"volumes", "volume:1", "shelf:1", "shelf:2"}


def test_a_cascade() -> None:
    """Rows that are deleted with another one end their tags."""
    volume()
    assert ended(Shelf.objects.get(pk=1).delete) == {"volumes", "volume:1", "shelf:1"}


def test_only_the_primary_key_costs_no_query() -> None:
    """A template that names only `pk` needs no old value."""
    row = Plain.objects.create(pk=1)
    with connection.execute_wrapper(counting := Counting()):
        assert ended(row.save) == {"plain:1"}
    assert counting.statements == ["UPDATE"]


class Counting:
    def __init__(self) -> None:
        self.statements: list[str] = []

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.statements.append(sql.split()[0])
        return execute(sql, params, many, context)


def test_bulk_changes() -> None:
    """`update`, `bulk_update` and `bulk_create` of a TaggedManager end the tags of all their rows."""
    volume()
    assert ended(lambda: Volume.objects.bulk_create([Volume(pk=2, shelf_id=2)])) == {"volumes", "volume:2", "shelf:2"}
    assert ended(lambda: Volume.objects.filter(pk=1).update(title="x")) == {"volumes", "volume:1", "shelf:1"}
    changed = ended(lambda: Volume.objects.filter(title="x").update(title="y", shelf=2))
    assert changed == {"volumes", "volume:1", "shelf:1", "shelf:2"}
    rows = [Volume(pk=1, title="z", shelf_id=1)]
    assert ended(lambda: Volume.objects.bulk_update(rows, ["shelf"])) == {"volumes", "volume:1", "shelf:1", "shelf:2"}
    assert ended(lambda: Volume.objects.filter(pk=9).update(title="x")) == set()
    assert ended(lambda: Shelf.objects.update()) == set()


def test_many_to_many() -> None:
    """A change of a relation ends the tags of the rows at both ends."""
    book, word = volume(), Word.objects.create(pk=1)
    assert ended(lambda: book.words.add(word)) == {"volumes", "volume:1", "shelf:1", "word:1"}
    assert ended(lambda: word.volume_set.remove(book)) == {"volumes", "volume:1", "shelf:1", "word:1"}
    book.words.add(word)
    assert ended(book.words.clear) == {"volumes", "volume:1", "shelf:1"}


def test_proxies_and_children() -> None:
    """A proxy or a child of the model ends the model's tags, too."""
    volume()
    assert ended(Thin.objects.get(pk=1).save) == {"volumes", "volume:1", "shelf:1"}
    assert ended(lambda: Atlas.objects.create(pk=2, shelf_id=2)) == {"volumes", "volume:2", "shelf:2"}


def test_at_the_commit() -> None:
    """Tags are ended when the transaction commits, and not at all if it is rolled back."""
    Shelf.objects.create(pk=1)

    def change(commit: bool) -> None:
        with transaction.atomic():
            Volume.objects.create(pk=1, shelf_id=1)
            assert cache.get("volumes") == 1
            transaction.set_rollback(not commit)

    assert ended(lambda: change(False)) == set()
    assert ended(lambda: change(True)) == {"volumes", "volume:1", "shelf:1"}


def test_all_caches_are_told() -> None:
    """Tags end in every backend of ours in CACHES, and in the caches of stampede's own settings."""
    other = {"other": settings_of("memory://", OPTIONS={"namespace": "other"})["default"]}
    theirs = {"theirs": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}

    @cached(tags=["t"])
    def of_settings() -> int:
        return 1

    with override_settings(CACHES=settings_of("memory://") | other | theirs):
        of_settings()
        for each in ("default", "other"):
            caches[each].set("k", 1, tags=["t"])
        invalidate_tags("t")
        assert caches["default"].get("k") is None and caches["other"].get("k") is None
        assert of_settings.peek() is None
        invalidate_tags()


def test_a_server_that_is_down_breaks_no_commit() -> None:
    """The rows are committed, and no exception is raised; the invalidation is repeated."""
    with override_settings(CACHES=settings_of("redis://localhost:1")):
        Plain.objects.create(pk=1)
        assert Plain.objects.count() == 1
        assert caches["default"].stampede.postponed >= 1
        caches["default"].stampede.close()


def test_the_check_of_managers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`manage.py check` warns if related managers of a model with tags send no bulk changes through its manager."""
    assert check_caches() == [each for each in check_caches() if each.id != "stampede.W002"]
    monkeypatch.setattr(Volume._meta, "base_manager_name", None)
    monkeypatch.delitem(vars(Volume._meta), "base_manager", raising=False)
    (found,) = [each for each in check_caches() if each.id == "stampede.W002"]
    assert "library.Volume" in found.msg
    monkeypatch.delitem(vars(Volume._meta), "base_manager", raising=False)


def test_a_template_names_columns() -> None:
    """A template with another name is an error that names the template."""
    with pytest.raises(OptionError, match=r"'user:\{name\}' names 'name'"):
        tagged(Word, "user:{name}")
    with pytest.raises(OptionError, match="names ''"):
        tagged(Word, "user:{}")
