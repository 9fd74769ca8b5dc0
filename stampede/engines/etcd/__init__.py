"""The etcd engine: locks, made of transactions, leases and watches, and a store of small values.

gateway.py      requests to the members of a cluster, over HTTP
watches.py      watches of keys
leases.py       leases of the server, which are reused by later locks
names.py        the keys of locks and values, and the content of a lock's keys
queue.py        a lock's queue, as waiters of this process know it
lock_steps.py   the steps of a lock, and `Locks` in both colours
cell.py         values"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from stampede.engines.cells import CellEngine
from stampede.engines.etcd.cell import EtcdCell
from stampede.engines.etcd.gateway import Gateway
from stampede.engines.etcd.leases import Leases
from stampede.engines.etcd.lock_steps import EtcdLocks, EtcdLockSteps
from stampede.engines.etcd.names import EtcdNames
from stampede.engines.etcd.watches import Watches
from stampede.engines.kit.url import Address, Kind, addresses_of, duration, flag, options_of, parts_of, safe_url, text
from stampede.engines.kit.worker_threads import WorkerThreads, here
from stampede.errors import OptionError
from stampede.runtime.colour import BLOCKING, SUSPENDING

__all__ = ["EtcdEngine", "check_url", "from_url"]

OPTIONS: dict[str, Kind] = {"tls": flag, "ca": text, "cert": text, "key": text, "timeout": duration}

PORT = 2379

THREADS = 16
"""Requests of event loops that are under way at once."""


class EtcdEngine(CellEngine):
    """A cluster, by one or more of its members. All keys begin with `prefix`. Each waiter for a lock has a place in the
    lock's queue, and its process watches the queue."""

    fair = True
    pushes = True
    rooms = True

    def __init__(self, gateway: Gateway, prefix: str = "stampede/") -> None:
        self._gateway = gateway
        self._leases, self._watches, names = Leases(gateway), Watches(gateway), EtcdNames(prefix)
        self._steps = steps = EtcdLockSteps(gateway, self._leases, self._watches, names)
        super().__init__(EtcdCell(gateway, self._leases, self._watches, names), "etcd")
        locks = EtcdLocks(steps, gateway, here, BLOCKING)
        alocks = EtcdLocks(steps, gateway, WorkerThreads(THREADS).run, SUSPENDING)
        self.blocking = replace(self.blocking, locks=locks, holds=locks, handover=locks)
        self.suspending = replace(self.suspending, locks=alocks, holds=alocks, handover=alocks)

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        return self._gateway.facts()

    def close(self) -> None:
        self._gateway.close()
        self._watches.close()
        super().close()

    def _start_again(self) -> None:
        for each in (self._gateway, self._watches, self._leases, self._steps):
            each.start_again()
        super()._start_again()


def _parsed(url: str, **options: Any) -> tuple[list[Address], str, dict[str, Any]]:
    parts, found = parts_of(url), options_of(url, options, OPTIONS)
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    prefix = f"{unquote(parts.path).strip('/') or 'stampede'}/"
    files = {name: found[name] for name in ("ca", "cert", "key") if name in found}
    if "key" in files and "cert" not in files:
        raise OptionError(f"{safe_url(url)}: key= is the key of a certificate: give cert=, too")
    tls = files if found.get("tls", bool(files)) else None
    terms = {"tls": tls, "user": unquote(user), "password": unquote(password), "timeout": found.get("timeout", 1.0)}
    return addresses_of(url, PORT), prefix, terms


def _tls(files: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files.get("key"))
    except OSError as error:  # SSLError is one, too
        raise OptionError(f"etcd://: {' and '.join(files.values())} can't be used for TLS: {error}") from error
    return context


def from_url(url: str, **options: Any) -> EtcdEngine:
    """Open `etcd://user:password@host:2379,host:2379/prefix?ca=/etc/etcd/ca.pem`."""
    members, prefix, terms = _parsed(url, **options)
    if terms["tls"] is not None:
        terms["tls"] = _tls(terms["tls"])
    return EtcdEngine(Gateway(members, **terms), prefix)


check_url = _parsed
