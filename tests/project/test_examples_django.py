"""The example of a Django site, started by its command and asked by many clients at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from herd import Herd, until

pytest.importorskip("django")
httpx = pytest.importorskip("httpx")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of the site, and the lines that it prints."""
    environment = os.environ | {"SHOP_PLACE": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(ROOT / "examples" / "django" / "shop.py"), "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        lines: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))  # type: ignore[union-attr]
        reader.start()
        try:
            until(lambda: re.search(r"http://[\d.:]+", "".join(lines)))
            found = re.search(r"http://[\d.:]+", "".join(lines))
            assert found is not None
            yield found[0], lines
        finally:
            process.terminate()
            reader.join()


def test_fifty_clients(site: tuple[str, list[str]]) -> None:
    """Fifty requests at once render each page once, and all get it; a new price ends the pages that show it."""
    url, lines = site
    get = partial(httpx.get, timeout=30, verify=False)  # without reading certificates fifty times
    get(f"{url}/books/1/")  # the server is up

    def rendered(path: str) -> int:
        return sum(line.strip() == f"rendered {path}" for line in lines)

    found = Herd(*[lambda: get(url)] * 50).join()
    assert {each.status_code for each in found} == {200}
    until(lambda: rendered("/"))  # what the site prints may come after its response
    assert rendered("/") == 1
    assert {each.headers["Cache-Control"] for each in found} == {"max-age=600"}
    assert sum("Age" not in each.headers for each in found) == 1  # the one that rendered it
    assert "9.50" in found[0].text
    assert httpx.post(f"{url}/books/1/price/", data={"price": "12"}, timeout=30).status_code == 204
    assert "12.00" in get(url).text
    assert get(f"{url}/books/1/").text == "12.00"
    until(lambda: (rendered("/"), rendered("/books/1/")) >= (2, 2))
    assert (rendered("/"), rendered("/books/1/")) == (2, 2)
