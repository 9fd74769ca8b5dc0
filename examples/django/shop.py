"""A shop on Django: pages, fragments and queries from one cache, and tags that invalidate them when a price changes.

    python examples/django/shop.py

    curl -i localhost:8000/                           # rendered once, however many ask at the same time
    curl -i localhost:8000/                           # from the cache, with its Age
    curl -X POST -d price=12 localhost:8000/books/1/price/
    curl localhost:8000/                              # rendered again, with the new price

The cache is on disk, for all processes of this machine; SHOP_CACHE=redis://localhost:6379/0 shares it in a fleet."""

# ruff: noqa: E402  (Django is set up before models are imported)
from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import django
from django.conf import settings

PLACE = Path(os.environ.get("SHOP_PLACE", tempfile.gettempdir())) / "stampede-django"
PLACE.mkdir(parents=True, exist_ok=True)

settings.configure(
    SECRET_KEY="only for this example",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["stampede.contrib.django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": PLACE / "shop.sqlite3"}},
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
    CACHES={
        "default": {
            "BACKEND": "stampede.contrib.django.StampedeCache",
            "LOCATION": os.environ.get("SHOP_CACHE", f"disk://{PLACE}/cache"),
            "OPTIONS": {"namespace": "shop"},
        }
    },
)
django.setup()

from django.core.management import execute_from_command_line
from django.db import connection, models
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.template import Context, Template
from django.urls import path

from stampede import current
from stampede.contrib.django import TaggedManager, cache_page, tagged


class Book(models.Model):
    title = models.CharField(max_length=80)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    objects = TaggedManager()

    class Meta:
        app_label = "shop"
        base_manager_name = "objects"


tagged(Book, "book:{pk}", "books")

PAGE = Template("""{% load stampede %}
{% cached 600 books tags="books" %}
<ul>{% for book in books %}<li>{{ book.title }}: {{ book.price }}</li>{% endfor %}</ul>
{% endcached %}""")


@cache_page(600)
def overview(request: HttpRequest) -> HttpResponse:
    current().tag("books")
    time.sleep(0.2)  # stands for a slow query
    print("rendered", request.path, flush=True)
    return HttpResponse(PAGE.render(Context({"books": Book.objects.all()})))


@cache_page(600, tags=["book:{book_id}"])
def show(request: HttpRequest, book_id: int) -> HttpResponse:
    time.sleep(0.2)
    print("rendered", request.path, flush=True)
    return HttpResponse(str(get_object_or_404(Book, pk=book_id).price))


def set_price(request: HttpRequest, book_id: int) -> HttpResponse:
    Book.objects.filter(pk=book_id).update(price=request.POST["price"])
    return HttpResponse(status=204)


urlpatterns = [
    path("", overview),
    path("books/<int:book_id>/", show),
    path("books/<int:book_id>/price/", set_price),
]

if __name__ == "__main__":
    if "shop_book" not in connection.introspection.table_names():
        with connection.schema_editor() as schema:
            schema.create_model(Book)
        Book.objects.bulk_create([Book(title="one", price="9.50"), Book(title="two", price="1.50")])
    execute_from_command_line([sys.argv[0], "runserver", "--noreload", *sys.argv[1:]])
