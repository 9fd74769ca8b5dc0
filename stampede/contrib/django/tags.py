"""Models that invalidate tags: after `save`, `delete`, changes of many-to-many relations, and bulk changes."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from django.apps import apps
from django.core.cache import caches
from django.db import models, transaction
from django.db.models.signals import m2m_changed, post_delete, post_save, pre_save

from stampede.api.registry import all_caches
from stampede.contrib.django.backend import StampedeCache
from stampede.errors import OptionError
from stampede.settings.options import LONGEST_TAG

__all__ = ["TaggedManager", "TaggedQuerySet", "invalidate_tags", "tagged", "tagged_models"]

MOST_KEYS = 500
"""The most keys in one query. Databases have a maximum of their own."""

_templates: dict[type[models.Model], list[str]] = {}


def tagged(model: type[models.Model], *templates: str) -> None:
    """Invalidate tags whenever rows of a model change: at the commit, in all caches. Call it in `AppConfig.ready`.

    A template is a format string over the columns of a row, such as "user:{pk}" or "shop:{shop_id}", or a plain name.
    If a column changes, the tags of its old and of its new value are invalidated; the old one costs a query, unless the
    templates name only `pk`. `update` and `bulk_create` send no signals: give the model a `TaggedManager`, which
    invalidates after these, too.

        tagged(User, "user:{pk}", "users")
    """
    columns = {field.attname for field in model._meta.concrete_fields}
    for template in templates:
        for name in _names(template):
            if name != "pk" and name not in columns:
                raise OptionError(f"the tag {template!r} names {name!r}, which is no column of {model.__name__}")
    _templates.setdefault(model, []).extend(templates)
    for each in apps.get_models():
        if issubclass(each, model):  # proxies and children send their own signals
            pre_save.connect(_before_save, sender=each, dispatch_uid="stampede")
            post_save.connect(_after_change, sender=each, dispatch_uid="stampede")
            post_delete.connect(_after_change, sender=each, dispatch_uid="stampede")
            for relation in each._meta.get_fields():
                if relation.many_to_many:
                    through = getattr(relation, "through", None) or relation.remote_field.through
                    m2m_changed.connect(_after_relation, sender=through, dispatch_uid="stampede")


def tagged_models() -> list[type[models.Model]]:
    """Return the models that have tags."""
    return list(_templates)


def invalidate_tags(*tags: str, using: str | None = None) -> None:
    """Invalidate tags at the commit of the transaction, or now if there is none: in every `StampedeCache` of `CACHES`,
    and in all caches of stampede's own settings. If a server can't be reached, this is repeated until it can be."""
    if tags:
        via = partial(transaction.on_commit, using=using)
        backends = [each.stampede for each in caches.all() if isinstance(each, StampedeCache)]
        for cache in [*dict.fromkeys(backends), *all_caches()]:
            cache.invalidate_tags(*tags, via=via, on_error="later")


def _names(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def _templates_of(model: type[models.Model]) -> list[str]:
    return [template for each in model.__mro__ for template in _templates.get(each, ())]


def _columns(model: type[models.Model]) -> set[str]:
    """Return the columns that the templates name, other than the primary key."""
    return {name for template in _templates_of(model) for name in _names(template)} - {"pk"}


def _tags(model: type[models.Model], value: Callable[[str], Any]) -> set[str]:
    """Return the tags of a row, of which `value` returns a column."""
    found = [template.format_map({name: value(name) for name in _names(template)}) for template in _templates_of(model)]
    return {tag for tag in found if len(tag) <= LONGEST_TAG}  # no value can carry a longer one


def _value(row: models.Model, name: str) -> Any:
    """Return the value of a column as the database would return it: a UUID, where the row has its text."""
    field = row._meta.pk if name == "pk" else row._meta.get_field(name)
    value = getattr(row, name)
    return value if hasattr(value, "resolve_expression") else field.to_python(value)


def _rows(rows: models.QuerySet[Any]) -> list[dict[str, Any]]:
    """Return the primary keys of these rows and the columns that the templates name, as they are stored now."""
    return list(rows.order_by().values("pk", *_columns(rows.model)))


def _tags_of_rows(model: type[models.Model], rows: Iterable[dict[str, Any]]) -> set[str]:
    return {tag for row in rows for tag in _tags(model, row.__getitem__)}


def _before_save(sender: Any, instance: models.Model, raw: bool, using: str, **_: Any) -> None:
    old: set[str] = set()
    # A new object may have the primary key of a stored row, unless Django has made that key.
    made = instance._state.adding and instance._meta.pk.has_default() and not raw
    if _columns(sender) and instance.pk is not None and not made:
        old = _tags_of_rows(sender, _rows(sender._base_manager.using(using).filter(pk=instance.pk)))
    instance._stampede_tags = old


def _after_change(sender: Any, instance: models.Model, using: str, **_: Any) -> None:
    old = vars(instance).pop("_stampede_tags", ())
    invalidate_tags(*{*old, *_tags(sender, partial(_value, instance))}, using=using)


def _after_relation(instance: models.Model, action: str, model: Any, pk_set: Any, using: str, **_: Any) -> None:
    if action.startswith("post_"):
        others = _tags_of_rows(model, _rows(model._base_manager.using(using).filter(pk__in=pk_set or ())))
        invalidate_tags(*{*others, *_tags(type(instance), partial(_value, instance))}, using=using)


class TaggedQuerySet(models.QuerySet):  # type: ignore[misc]
    """A queryset whose bulk changes invalidate the tags of `tagged`, too: `update`, `bulk_update`, `bulk_create`."""

    def update(self, **values: Any) -> int:
        self._for_write = True  # rows of the primary database, not of a replica
        if not _templates_of(self.model):
            return int(super().update(**values))
        rows = _rows(self)
        count: int = super().update(**values)
        if _columns(self.model) & {self.model._meta.get_field(name).attname for name in values if name != "pk"}:
            keys, manager = [row["pk"] for row in rows], self.model._base_manager.using(self.db)
            for at in range(0, len(keys), MOST_KEYS):
                rows += _rows(manager.filter(pk__in=keys[at : at + MOST_KEYS]))
        invalidate_tags(*_tags_of_rows(self.model, rows), using=self.db)
        return count

    update.alters_data = True  # type: ignore[attr-defined]

    def bulk_create(self, objs: Iterable[Any], *args: Any, **options: Any) -> list[Any]:
        made: list[Any] = super().bulk_create(objs, *args, **options)
        invalidate_tags(*{tag for row in made for tag in _tags(self.model, partial(_value, row))}, using=self.db)
        return made

    bulk_create.alters_data = True  # type: ignore[attr-defined]


TaggedManager = models.Manager.from_queryset(TaggedQuerySet, "TaggedManager")
"""The manager of `TaggedQuerySet`: `objects = TaggedManager()`."""
