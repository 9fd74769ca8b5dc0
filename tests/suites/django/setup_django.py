"""A plugin for pytest that sets up Django, with a database in memory."""

from collections.abc import Iterator

import django
import pytest
from django.conf import settings
from django.test.utils import get_runner, setup_test_environment

settings.configure(
    SECRET_KEY="of the tests",
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3"}, "other": {"ENGINE": "django.db.backends.sqlite3"}},
    INSTALLED_APPS=[
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "django.contrib.sites",
        "django.contrib.sessions",
        "cache",
        "sessions_tests",
    ],
    CACHES={"default": {"BACKEND": "stampede.contrib.django.StampedeCache"}},
    SITE_ID=1,
    ROOT_URLCONF=[],
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
    USE_TZ=False,
    LANGUAGE_CODE="en",
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)


@pytest.fixture(scope="session", autouse=True)
def _databases() -> Iterator[None]:
    setup_test_environment()
    runner = get_runner(settings)(verbosity=0, interactive=False)
    made = runner.setup_databases()
    yield
    runner.teardown_databases(made)


django.setup()
