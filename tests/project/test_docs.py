"""The README and the pages of docs/: their code runs without a change, and their links lead somewhere."""

from __future__ import annotations

import builtins
import os
import re
import runpy
import shlex
import tomllib
from code import InteractiveConsole
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked import python
from memcached_server import shared_memcached
from pages import DOCS, PAGES, README, ROOT, Block, Page
from servers import shared_redis

import stampede.engines
from stampede import Cache
from stampede.engines import open_engine
from stampede.errors import MissingExtra
from stampede.settings import load

HOME = "https://stampede-guard.readthedocs.io/en/latest/"
"""The address under which the pages of docs/ are published."""
SOURCE = "https://github.com/stampede-guard/stampede/"
"""The address of the repository."""
ALERTS = ROOT / "examples" / "operations" / "alerts.yml"
"""Its alerts have names that look like names of errors."""

EXTRAS = {"redis", "pymemcache", "dogpile", "cachetools", "prometheus_client", "starlette", "pandas", "numpy"}
EXTRAS |= {"django", "fastapi", "flask", "flask_session", "httpx", "sqlalchemy", "celery", "rq", "dramatiq"}
"""The modules, besides the standard library and stampede, that a page may import. Tests skip a page without them."""


def each_with(language: str) -> pytest.MarkDecorator:
    """Run a test for each page that has blocks in this language."""
    pages = [pytest.param(page, id=name) for name, page in PAGES.items() if page.blocks(language)]
    return pytest.mark.parametrize("page", pages)


def environment(home: Path) -> dict[str, str]:
    """Return an environment in which programs read and write their files in `home` only."""
    return os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home), "COLUMNS": "120"}


def run(home: Path, *command: str, code: int = 0) -> str:
    done = python(*command, cwd=home, env=environment(home))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_every_block_is_of_a_language_that_is_tested_here() -> None:
    """Each block has a language that is tested here. Otherwise its code would not be tested."""
    for page in PAGES.values():
        fences = [line for line in page.text.splitlines() if line.lstrip().startswith("```")]
        assert len(fences) == 2 * len(page.blocks("python", "sh", "sql", "toml", "text", "promql")), page.name


def test_the_tutorial_can_be_pasted_into_a_prompt() -> None:
    """The prompts of Python 3.11 and 3.12 end a class or a function at its first blank line."""
    refused: list[str] = []

    class Prompt(InteractiveConsole):
        def runcode(self, code: object) -> None: ...

        def showsyntaxerror(self, *_: object, **__: object) -> None:
            refused.append("\n".join(self.buffer))

    for block in PAGES["tutorial.md"].blocks("python"):
        prompt = Prompt()
        for line in [*block.text.splitlines(), ""]:
            prompt.push(line)
    assert refused == []


def test_pictures_of_the_readme_come_from_the_site() -> None:
    """The home page takes the README's pictures from its own site. The other site may be unreachable."""
    hook = runpy.run_path(str(DOCS / "site.py"))["on_page_content"]
    pictures = re.findall(r"!\[[^]]*\]\((\S+)\)", README.text)
    assert pictures
    for picture in pictures:
        (local,) = re.findall(r'src="(.*)"', hook(f'<img src="{picture}">'))
        assert (DOCS / local).is_file()


# -- Python ---------------------------------------------------------------------------------------------------------

# Checks of what the comments in a page's code say, if the code itself does not check it.
CLAIMS = {
    "README.md": """
assert report(42) == {"customer": 42, "year": 2026}
assert report.key(42) == report.key(42, year=2026)
assert exchange_rate.stats().computations == 1
""",
    "guides/functions.md": """
assert price.many([("tea",), ("salt",)]) == [9.5, 9.5]
assert "price" in price.key("tea") and isinstance(price.key("tea"), str)
kept = price.peek("tea")
assert kept.value == 9.5 and kept.cost >= 0 and 0 < kept.fresh <= 600 < kept.keep <= 600 + 3600
price.set(8.0, "tea")
assert price("tea") == 8.0
assert price.refresh("tea") == 9.5
price.expire("tea")
assert price.peek("tea").fresh <= 0 < price.peek("tea").keep
postponed = []
price.invalidate("tea", via=postponed.append)
assert price.peek("tea") is not None
postponed[0]()
assert price.peek("tea") is None
assert "Shop.turnover" in shop.turnover.key("2026-11-21")
assert shop.turnover.peek("2026-11-21") is None
""",
    "guides/locks.md": """
assert not lock.held
""",
    "how-to/django.md": """
from django.core.management import call_command
call_command("migrate", run_syncdb=True, verbosity=0)
assert titles() == [] == titles()
call_command("test", verbosity=0)  # which ends the process where one fails
""",
    "how-to/django-cache.md": """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "bookshop.settings"
import django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("check", fail_level="WARNING")
call_command("migrate", run_syncdb=True, verbosity=0)
from bookshop.models import Author, Book
ann = Author.objects.create(name="ann")
url, client = f"/authors/{ann.pk}/", Client()
assert client.get(url).content == b""
Book.objects.bulk_create([Book(title="one", author=ann), Book(title="two", author=ann)])
assert client.get(url).content == b"one, two"
assert "Age" in client.get(url)
Book.objects.filter(title="two").update(title="three")
assert client.get(url).content == b"one, three"
assert [client.get("/visit/").content for _ in range(2)] == [b"1", b"2"]
call_command("stampede", "check")
""",
    "how-to/orm.md": """
assert user.stats().computations == 2
assert not any(each.stats().unkept for each in (user, user_of, account, accounts, greeting, users))
""",
    "how-to/sqlalchemy.md": """
assert [*cache.keys()] and cache.stats().computations >= 5
""",
    "engines/redis.md": """
assert shop.get("greeting") == "hello" == fleet.get("greeting")
assert fence > 0
assert sum(each["name"] == "shop" for each in client.client_list()) > 1
""",
    "engines/memcached.md": """
assert items.get("greeting") == "hello" and secured.engine is engine
""",
    "engines/sql.md": """
assert reports.get("greeting") == "hello" and shop.get_or_compute("k", lambda: 1) == 1
""",
    "migration/dogpile.md": """
assert user(42) == {"id": 42} and type(region.backend).__name__ == "StampedeBackend"
assert user.get(42) == {"id": 42}
assert theirs.get("key") == "value"
region.actual_backend.cache.clear()
assert user.get(42) is NO_VALUE
""",
}


def program(page: Page, blocks: list[Block], claims: str = "") -> str:
    """Join blocks to one program that keeps the page's line numbers, and uses the servers of the tests."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.first - 1 - len(lines))
        lines += block.text.splitlines()
    text = "\n".join(lines) + claims
    if "localhost:6379" in text:
        text = text.replace("localhost:6379", f"127.0.0.1:{shared_redis().port}")
        text = text.replace("port=6379", f"port={shared_redis().port}")
    if "localhost:11211" in text:
        text = text.replace("localhost:11211", f"127.0.0.1:{shared_memcached().port}")
    return text


@each_with("python")
def test_the_python_runs(page: Page, tmp_path: Path) -> None:
    """A page's code runs without an error if it is copied from top to bottom."""
    blocks = page.blocks("python")
    for name in re.findall(r"^(?:import|from) (\w+)", "".join(block.text for block in blocks), re.MULTILINE):
        if name in EXTRAS:
            pytest.importorskip(name)
    for block in blocks:
        if block.title is not None:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(program(page, [block]))
    name = page.path.stem + "_page.py"
    untitled = [block for block in blocks if block.title is None]
    (tmp_path / name).write_text(program(page, untitled, CLAIMS.get(page.name, "")))
    run(tmp_path, "-W", "error", name)
    tests = [block.title for block in blocks if block.title and Path(block.title).name.startswith("test_")]
    if tests:
        chosen = ["-k", "Cell or Async"] if page.name == "engines.md" else []  # one colour of its suites
        run(tmp_path, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *tests)


def test_claims_are_of_pages() -> None:
    """Each claim belongs to a page. Otherwise the claims of a renamed page would not be tested any more."""
    assert CLAIMS.keys() <= PAGES.keys()


# -- settings, shell ------------------------------------------------------------------------------------------------


@each_with("toml")
def test_the_settings_can_be_read(page: Page, tmp_path: Path) -> None:
    """The settings that a page shows can be loaded."""
    for block in page.blocks("toml"):
        file = tmp_path / "stampede.toml"
        file.write_text(block.text)
        settings = load(file, {"HOME": str(tmp_path), "SHOP_PASSWORD": "secret"})
        assert settings.caches
        for each in settings.caches.values():
            if "redis" in stampede.engines.kit.url.scheme_of(each.url):
                pytest.importorskip("redis")
                open_engine(each.url).close()  # does not connect, but checks the options


@each_with("sh")
def test_the_shell_lines_can_be_typed(page: Page, tmp_path: Path) -> None:
    """Each target, extra and command in a page's shell lines exists."""
    (tmp_path / "stampede.toml").write_text(f'[caches.default]\nurl = "disk://{tmp_path}/cache"\n')
    with Cache(f"disk://{tmp_path}/cache") as cache:
        cache.set_many({"KEY": "value", "PREFIX:1": "value"})
    for block in page.blocks("sh"):
        for line in block.text.replace("\\\n", "").splitlines():
            for command in line.partition(" #")[0].split("&&"):
                _type(shlex.split(command), tmp_path)


def _type(words: list[str], home: Path) -> None:
    match words:
        case ["pip", "install", *what]:
            for each in what:
                _is_known(each)
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["stampede", "locks" | "postgres" | "diskcache" as command, *_]:
            assert run(home, "-m", "stampede", command, "--help")  # test_postgres_cli.py and others run it
        case ["stampede", *arguments]:
            assert run(home, "-m", "stampede", *arguments)
        case ["git", "clone", address] if SOURCE.startswith(address):
            pass
        case ["cd", "stampede"] | []:
            pass
        case ["redis-cli", "ACL", "SETUSER", *_]:
            pass  # test_docs_servers.py runs it
        case _:
            pytest.fail(f"nobody tries {words}")


def _is_known(requirement: str) -> None:
    """Check that pip installs stampede, with extras of pyproject.toml, or a package that one of the extras needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extras = requirement.rstrip("]").partition("[")
    if name == project["name"]:
        assert {extra for extra in extras.split(",") if extra} <= project["optional-dependencies"].keys()
    else:
        assert any(each.startswith(name) for extra in project["optional-dependencies"].values() for each in extra)


def test_pip_lines_in_the_text() -> None:
    """Each extra in the text exists. For an extra that does not exist, pip only prints a warning."""
    for page in PAGES.values():
        for each in re.findall(r"pip\s+install\s+'([^']+)'", page.prose()):
            _is_known(each)


def test_the_command_s_verbs(tmp_path: Path) -> None:
    """Each verb of the command that the page names exists."""
    (block,) = [block.text for block in PAGES["guides/observing.md"].blocks("sh") if "stampede get" in block.text]
    for verb in ("check", "get", "keys", "invalidate", "stats"):
        assert verb in block
        run(tmp_path, "-m", "stampede", verb, "--help")


# -- links and names ------------------------------------------------------------------------------------------------


def test_links_lead_somewhere() -> None:
    """Each link leads to a page, a heading or a file that exists."""
    assert [(page.name, link) for page in PAGES.values() for link in page.links() if _broken(page, link)] == []


def _broken(page: Page, link: str) -> bool:
    address, _, anchor = link.partition("#")
    target = _file(page, address)
    if target is None:
        return False
    return not target.exists() or (bool(anchor) and anchor not in Page(target).anchors())


def _file(page: Page, address: str) -> Path | None:
    """Return the file that an address leads to, or None if the address is of another site."""
    if address.startswith(HOME):
        name = address.removeprefix(HOME).rstrip("/")
        return next((file for file in (DOCS / f"{name}.md", DOCS / name / "index.md") if file.exists()), DOCS / "?")
    if address.startswith(SOURCE):
        return ROOT / re.sub(r"^(blob|tree)/main/|^issues$", "", address.removeprefix(SOURCE))
    if address.startswith("https://"):
        return None
    return page.path.parent / address if address else page.path


def test_the_readme_survives_elsewhere() -> None:
    """All links and pictures of the README are absolute, because relative ones do not work on PyPI."""
    assert README.links()
    assert all(link.startswith("https://") for link in README.links())
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README.text):
        path = picture.removeprefix("https://raw.githubusercontent.com/stampede-guard/stampede/main/")
        assert (ROOT / path).exists()


def test_a_readme_is_read_in_ten_minutes() -> None:
    """The README stays short. Otherwise it would become a second manual, and hide its first example."""
    assert len(README.text.splitlines()) <= 200


def test_pages_stay_within_the_docs() -> None:
    """A relative link leads to a file in docs/. With other relative links the pages cannot be built."""
    for page in PAGES.values():
        for link in page.links():
            if not link.startswith("https://"):
                assert DOCS in (page.path.parent / link).resolve().parents or link.startswith("#"), (page.name, link)


def test_what_the_text_names_of_the_package_is_there() -> None:
    """Each module, class, event and error that the text names exists under that name."""
    for page in PAGES.values():
        _names_what_is_there(page)


def _names_what_is_there(page: Page) -> None:
    code = "".join(block.text for block in page.blocks()) + ALERTS.read_text()
    for name in re.findall(r"`stampede((?:\.[A-Za-z_]\w*)+)`", page.text):
        assert name == ".toml" or _leads_somewhere("stampede" + name), (page.name, name)
    for name in re.findall(r"`([A-Z]\w+(?:Error|Failed|Timeout|Lost|Computation))`", page.prose()):
        assert hasattr(stampede, name) or hasattr(builtins, name) or name in code, (page.name, name)


def _leads_somewhere(dotted: str) -> bool:
    found: Any = stampede
    for part in dotted.split(".")[1:]:
        path = f"{found.__name__}.{part}"
        if not hasattr(found, part) and find_spec(path) is not None:
            try:
                import_module(path)
            except ImportError:
                return True  # it needs a package that isn't installed
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


LOCKS_AT = {
    "memory://": "memory://", "file://": "file://{}/f", "disk://": "disk://{}/d", "redis://": "redis://127.0.0.1:1",
    "postgres://": "postgres://a@127.0.0.1:1/b", "etcd://": "etcd://127.0.0.1:1", "zmq://": "zmq://127.0.0.1:1",
    "zookeeper://": "zookeeper://127.0.0.1:1", "memcached://": "memcached://127.0.0.1:1",
    "sql://": "sql+sqlite:///{}/s", "dynamodb://": "dynamodb://eu-west-1/table",
}  # fmt: skip


def test_the_table_of_locks_is_what_engines_declare(tmp_path: Path) -> None:
    """The table of locks says what each engine declares."""
    rows = re.findall(r"^\| (`\w+://`[^|]*) \|[^|]+\| (\w+) \| (\w+) \| (\w+) \|$", _guide("locks"), re.MULTILINE)
    told = {url: words for urls, *words in rows for url in re.findall(r"`(\w+://)`", urls)}
    assert told.keys() == LOCKS_AT.keys()
    for url, words in told.items():
        try:
            engine = open_engine(LOCKS_AT[url].format(tmp_path))
        except MissingExtra:
            continue
        declared = engine.breaks and engine.shared, engine.blocking.handover is not None, engine.rooms
        engine.close()
        assert words == ["yes" if each else "no" for each in declared], url


def _guide(name: str) -> str:
    return (DOCS / "guides" / f"{name}.md").read_text()
