"""`stampede serve`: run a broker until a signal stops it."""

from __future__ import annotations

import resource
import signal
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from stampede.cli.show import long, say
from stampede.engines.kit.url import addresses_of
from stampede.engines.zmq.curve import make_keys
from stampede.engines.zmq.machine import Capacity
from stampede.engines.zmq.server import PORT, Broker
from stampede.errors import OptionError

__all__ = ["serve"]


def _make(directory: Path) -> int:
    """Make new keys, and print how to use them."""
    try:
        made = make_keys(directory)
    except OSError as error:
        raise OptionError(f"can't make keys in {directory}: {error}") from error
    for path in made:
        say(f"made {path}")
    say(f"the broker: stampede serve --bind 0.0.0.0:{PORT} --keys {directory}")
    say("clients, with copies of server.key and client.key_secret: zmq://HOST?keys=DIRECTORY")
    return 0


def serve(options: Namespace) -> int:
    """Serve until SIGTERM or SIGINT; or make keys."""
    if options.make_keys is not None:
        return _make(options.make_keys)
    limits = Capacity(options.longest, options.max_clients, options.max_locks, options.max_queue, options.max_limits)
    _have_descriptors()
    bind, peers = _whole(options.bind or ["127.0.0.1"]), _whole(options.peer)
    places = {"keys": options.keys, "memory": options.memory, "peers": peers}
    broker = Broker(bind, limits=limits, quiet=options.grace, **places)
    before = [(each, signal.signal(each, lambda *_: broker.stop())) for each in (signal.SIGTERM, signal.SIGINT)]
    try:
        for address in bind:
            say(f"serves zmq://{address}")
        if broker.quiet > 0:
            say(f"grants only what clients hold already, for {long(broker.quiet)}")
            if options.memory is None:
                say("(a new broker needs no grace: --memory FILE remembers that; --grace 0s is for the first start)")
        broker.run()
    finally:
        for each, handler in before:
            signal.signal(each, handler)
    say("ended")
    return 0


def _have_descriptors() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _whole(some: list[str]) -> list[str]:
    """Return these addresses, each with a port."""
    return [str(address) for each in some for address in addresses_of(f"zmq://{each}", PORT)]
