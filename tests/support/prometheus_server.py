"""A real Prometheus for the tests: on a free loopback port, ended by its pid."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import urllib.request
from pathlib import Path

from server_process import PATIENCE, ServerProcess
from servers import in_memory, need

__all__ = ["PrometheusServer"]

CONFIGURATION = """
scrape_configs:
- job_name: tests
  scrape_interval: 500ms
  scrape_timeout: 500ms
  static_configs:
  - targets: ["127.0.0.1:{port}"]
"""


class PrometheusServer(ServerProcess):
    """Scrapes a port of this machine twice a second."""

    kind = "prometheus"

    def __init__(self, scraped: int) -> None:
        self._directory = tempfile.mkdtemp(prefix="stampede-prometheus-", dir=in_memory())
        Path(self._directory, "prometheus.yml").write_text(CONFIGURATION.format(port=scraped))
        atexit.register(shutil.rmtree, self._directory, ignore_errors=True)
        super().__init__()

    def command(self, port: int) -> list[str]:
        its = self._directory
        terms = {"config.file": f"{its}/prometheus.yml", "storage.tsdb.path": its, "log.level": "error"}
        terms["web.listen-address"] = f"127.0.0.1:{port}"
        return [need("prometheus"), *(f"--{name}={value}" for name, value in terms.items())]

    def _answers(self, port: int) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=PATIENCE) as told:
            return bool(told.status == 200)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)
