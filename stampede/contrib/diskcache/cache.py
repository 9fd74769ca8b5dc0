"""diskcache's `Cache` and `FanoutCache`, on `stampede.Cache("disk:///...")`: no bytes of the directory run code."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from stampede.api.cache import Cache as StampedeCache
from stampede.contrib.diskcache.keys import key_of, text_of
from stampede.engines.disk import DiskEngine
from stampede.errors import OptionError, StampedeError
from stampede.settings.options import LONGEST

__all__ = ["ENOVAL", "Cache", "FanoutCache", "Unsupported", "memoized"]

SELF = TypeVar("SELF", bound="Cache")
F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("stampede")

SIZE_LIMIT = 1 << 30
TIMEOUT = 60.0
SHORTEST = 1.0
"""The least seconds for which a writer waits for its turn. FanoutCache's users give milliseconds for each shard."""

PAGE = 500
"""How many entries `evict` reads at once."""

_WITHOUT_EFFECT = frozenset({"statistics", "tag_index", "disk_min_file_size", "disk_pickle_protocol"})


class _NoValue:
    def __repr__(self) -> str:
        return "ENOVAL"


ENOVAL: Any = _NoValue()
"""A default that no stored value equals."""


class Unsupported(StampedeError, NotImplementedError):
    """A method of diskcache that is left out. The message says what to use instead.

    >>> from stampede.contrib.diskcache import Cache
    >>> with Cache() as cache:
    ...     cache.transact()
    Traceback (most recent call last):
    stampede.contrib.diskcache.cache.Unsupported: transact is left out: update(key, function) changes one entry ...
    """


def _left_out(verb: str, instead: str) -> Any:
    def refuse(self: Cache, *args: Any, **options: Any) -> NoReturn:
        raise Unsupported(f"{verb} is left out: {instead}")

    refuse.__name__ = verb
    refuse.__doc__ = f"Raise Unsupported: {instead}."
    return refuse


class Cache:
    """A directory of values, shared by the processes of one machine, with the interface of `diskcache.Cache`.

    `directory` is made if it is missing; without one, a temporary directory is used. `size_limit` bounds the bytes on
    disk. `timeout` is how many seconds a writer waits for its turn, before `Timeout`. Other options are those of
    `stampede.Cache`, such as `trust`, `signing_key` and `local`. `eviction_policy="none"` and `cull_limit=0` mean that
    only the disk's own size is a bound. The settings `sqlite_*`, `disk_*`, `statistics` and `tag_index` are accepted
    and have no effect.

    Keys are exact, and are never pickled. Values are sealed: builtins, and types of the standard library or of
    `trust=`, are stored; a value of any other type raises CodecError.

    >>> from stampede.contrib.diskcache import Cache
    >>> with Cache() as cache:
    ...     cache["k"] = {"answer": 42}
    ...     cache["k"], "other" in cache, len(cache), list(cache)
    ({'answer': 42}, False, 1, ['k'])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        timeout: float = TIMEOUT,
        disk: None = None,
        *,
        size_limit: int = SIZE_LIMIT,
        eviction_policy: str = "least-recently-stored",
        cull_limit: int = 10,
        **options: Any,
    ) -> None:
        if disk is not None:
            raise OptionError(f"disk is {disk!r}: leave it out, or give codec='json', or a codec of your own")
        for name in [*options]:
            if name in _WITHOUT_EFFECT or name.startswith("sqlite_"):
                del options[name]
        given = tempfile.mkdtemp(prefix="stampede-") if directory is None else os.fspath(directory)
        self._directory = os.path.expandvars(os.path.expanduser(given))
        self._timeout = timeout
        self._size_limit = sys.maxsize if eviction_policy == "none" or cull_limit == 0 else int(size_limit)
        self._options = {"namespace": "diskcache", **options}
        self._lock = threading.RLock()
        self._opened: StampedeCache | None = None
        self._blocks = 0
        self._counts: list[int] | None = None
        os.makedirs(self._directory, 0o700, exist_ok=True)
        if Path(self._directory, "cache.db").exists():
            _log.warning(
                "%s holds data of diskcache, which are not read. To move them, run: stampede diskcache import %s "
                "disk://%s, and then remove cache.db and its folders",
                *[self._directory] * 2,
                os.path.abspath(self._directory),
            )
        _ = self.stampede  # wrong options raise now

    @property
    def stampede(self) -> StampedeCache:
        """The `stampede.Cache` below. Its keys are the texts of keys, and its values are lists of value and tag."""
        opened = self._opened
        if opened is None:
            with self._lock:
                opened = self._opened
                if opened is None:
                    engine = DiskEngine(
                        self._directory, max_bytes=self._size_limit, timeout=max(self._timeout, SHORTEST)
                    )
                    opened = self._opened = StampedeCache(engine=engine, **self._options)
        return opened

    @property
    def directory(self) -> str:
        """The directory of the files."""
        return self._directory

    @property
    def timeout(self) -> float:
        """How many seconds a writer waits for its turn."""
        return self._timeout

    @property
    def size_limit(self) -> int:
        """How many bytes the files may have."""
        return self._size_limit

    # -- one key ------------------------------------------------------------------------------------------------------

    def get(
        self,
        key: Any,
        default: Any = None,
        read: bool = False,
        expire_time: bool = False,
        tag: bool = False,
        retry: bool = False,
    ) -> Any:
        """Return the value, or `default`. With `read`, bytes are returned as a file.

        With `expire_time` and `tag`, return a tuple of the value, the time at which it expires (None: never), and its
        tag (None: it has none). `retry` has no effect.

        >>> from stampede.contrib.diskcache import Cache
        >>> with Cache() as cache:
        ...     cache.set("k", 1, tag="numbers")
        ...     cache.get("k", tag=True), cache.get("k", expire_time=True), cache.get("other", 0)
        True
        ((1, 'numbers'), (1, None), 0)
        """
        fresh = inf
        if expire_time:
            entry = self.stampede.peek(text_of(key))
            pair = None if entry is None or entry.fresh <= 0 else entry.value
            fresh = inf if entry is None else entry.fresh
        else:
            pair = self.stampede.get(text_of(key))
        self._count(pair is not None)
        value, its_tag = (default, None) if pair is None else pair
        if read and pair is not None and type(value) is bytes:
            value = io.BytesIO(value)
        return _answer(value, fresh, its_tag, expire_time, tag)

    def read(self, key: Any, retry: bool = False) -> Any:
        """Return the bytes of a key as a file. KeyError: there is no value."""
        return self._existing(key, self.get(key, ENOVAL, read=True))

    def __getitem__(self, key: Any) -> Any:
        return self._existing(key, self.get(key, ENOVAL))

    def __contains__(self, key: Any) -> bool:
        return self.stampede.get(text_of(key)) is not None

    def set(
        self,
        key: Any,
        value: Any,
        expire: float | None = None,
        read: bool = False,
        tag: Any = None,
        retry: bool = False,
    ) -> bool:
        """Store a value, for `expire` seconds (None: for ever), and return True. With `read`, the value is a file."""
        self.stampede.set(text_of(key), [_content(value, read), tag], ttl=_ttl(expire), tags=_tags(tag))
        return True

    def __setitem__(self, key: Any, value: Any) -> None:
        self.set(key, value)

    def add(
        self,
        key: Any,
        value: Any,
        expire: float | None = None,
        read: bool = False,
        tag: Any = None,
        retry: bool = False,
    ) -> bool:
        """Store a value unless there is one. Return whether it was stored."""
        pair = [_content(value, read), tag]
        return self.stampede.add(text_of(key), pair, ttl=_ttl(expire), tags=_tags(tag))

    def update(
        self,
        key: Any,
        function: Callable[[Any], Any],
        default: Any = None,
        expire: float | None = None,
        tag: Any = None,
    ) -> Any:
        """Store what `function` returns for the value, or for `default` if there is none, and return it.

        No concurrent change is lost. Use it instead of `get` and `set` of one key inside `transact`.

        >>> from stampede.contrib.diskcache import Cache
        >>> with Cache() as cache:
        ...     cache.update("seen", lambda seen: [*seen, "tea"], default=[])
        ['tea']
        """

        def change(pair: Any) -> Any:
            return [function(default if pair is None else pair[0]), tag]

        return self.stampede.update(text_of(key), change, ttl=_ttl(expire), tags=_tags(tag))[0]

    def incr(self, key: Any, delta: float = 1, default: float | None = 0, retry: bool = False) -> Any:
        """Add `delta` to the value, or to `default` if there is none, and return the sum. It expires as it did before.

        KeyError: there is no value, and `default` is None.

        >>> from stampede.contrib.diskcache import Cache
        >>> with Cache() as cache:
        ...     cache.incr("visits"), cache.incr("visits", 10), cache.decr("visits")
        (1, 11, 10)
        """

        def change(pair: Any) -> Any:
            value, tag = (default, None) if pair is None else pair
            if value is None:
                raise KeyError(key)
            return [value + delta, tag]

        return self.stampede.update(text_of(key), change, in_place=True, ttl=None)[0]

    def decr(self, key: Any, delta: float = 1, default: float | None = 0, retry: bool = False) -> Any:
        """Subtract `delta` from the value, as `incr` adds it."""
        return self.incr(key, -delta, default)

    def touch(self, key: Any, expire: float | None = None, retry: bool = False) -> bool:
        """Let the value expire `expire` seconds from now (None: never). Return whether there was one."""
        return self.stampede.touch(text_of(key), ttl=_ttl(expire))

    def pop(
        self, key: Any, default: Any = None, expire_time: bool = False, tag: bool = False, retry: bool = False
    ) -> Any:
        """Remove the value and return it, or `default`. Of concurrent callers, one gets it."""
        text = text_of(key)
        entry = self.stampede.peek(text) if expire_time else None

        def take(pair: Any) -> Any:
            if pair is None:
                raise KeyError(key)
            return pair

        try:
            value, its_tag = self.stampede.update(text, take, ttl=0)  # it expires in the step that reads it
        except KeyError:
            return _answer(default, inf, None, expire_time, tag)
        return _answer(value, inf if entry is None else entry.fresh, its_tag, expire_time, tag)

    def delete(self, key: Any, retry: bool = False) -> bool:
        """Remove the value. Return whether there was one."""
        return self.stampede.invalidate(text_of(key))

    def __delitem__(self, key: Any) -> None:
        if not self.delete(key):
            raise KeyError(key)

    # -- all keys -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the keys, in no particular order. They are read page by page."""
        return map(key_of, self._texts())

    def iterkeys(self, reverse: bool = False) -> Iterator[Any]:
        """Iterate over the keys, in no particular order. Unsupported: `reverse` is true."""
        if reverse:
            raise Unsupported("iterkeys(reverse=True) is left out: the keys have no order; sort them: sorted(cache)")
        return iter(self)

    def __len__(self) -> int:
        """Return how many keys there are. It lists them, which takes a second or two for a million."""
        return sum(1 for _ in self._texts())

    def __bool__(self) -> bool:
        """Return whether there is a key, without listing the others."""
        return next(self._texts(), None) is not None

    def evict(self, tag: Any, retry: bool = False) -> int:
        """Remove all values with this tag, and return the number of values. It reads all entries to find them.

        >>> from stampede.contrib.diskcache import Cache
        >>> with Cache() as cache:
        ...     for number in range(6):
        ...         cache[number] = number
        ...     cache.set("tea", 3, tag="drinks"), cache.evict("drinks"), len(cache)
        (True, 1, 6)
        """
        cache, tags = self.stampede, _tags(tag)
        if not tags:
            return 0
        texts, found = self._texts(), list[str]()
        while page := list(islice(texts, PAGE)):
            found += [text for text, pair in cache.get_many(page).items() if _tags(pair[1]) == tags]
        cache.invalidate_tags(*tags)  # also what is being computed, or was stored after it was listed
        cache.invalidate_many(found)
        return len(found)

    def clear(self, retry: bool = False) -> int:
        """Remove all values, and return their number."""
        count = len(self)
        self.stampede.clear()
        return count

    def expire(self, now: float | None = None, retry: bool = False) -> int:
        """Return 0: expired values do not count, and writers remove them."""
        return 0

    def cull(self, retry: bool = False) -> int:
        """Return 0: writers keep the directory within `size_limit`."""
        return 0

    def volume(self) -> int:
        """Return how many bytes the keys and values have. It adds them up."""
        (facts,) = self.stampede.engine.facts().values()
        return int(facts["bytes of keys and values"])

    def check(self, fix: bool = False, retry: bool = False) -> list[Any]:
        """Query the database, and return an empty list. If it is damaged, it is renamed, and a new one is begun.
        EngineError: it can't be used."""
        self.stampede.ping()
        return []

    # -- functions ----------------------------------------------------------------------------------------------------

    def memoize(
        self,
        name: str | None = None,
        typed: bool = False,
        expire: float | None = None,
        tag: Any = None,
        ignore: Collection[int | str] = (),
    ) -> Callable[[F], F]:
        """Decorate a function, `def` or `async def`, so that its results are stored. Concurrent calls compute once.

        `name` is used in the keys instead of the function's module and name. `ignore` has positions and names of
        arguments that are left out of the key. `typed` has no effect: `f(3)` and `f(3.0)` always differ. The function
        gets a `__cache_key__` with its parameters, which returns the key.

        >>> from stampede.contrib.diskcache import Cache
        >>> with Cache() as cache:
        ...     @cache.memoize(expire=60)
        ...     def price(item):
        ...         return len(item)
        ...     price("tea"), cache[price.__cache_key__("tea")]
        (3, 3)
        """
        return memoized(self, name, expire, tag, ignore)

    def stats(self, enable: bool = True, reset: bool = False) -> tuple[int, int]:
        """Return the hits and misses of this process. Counting begins with the first call of this method.

        >>> from stampede.contrib.diskcache import Cache
        >>> with Cache() as cache:
        ...     cache.stats(), cache.get("k"), cache.stats()
        ((0, 0), None, (0, 1))
        """
        misses, hits = self._counts or (0, 0)
        if reset or not enable:
            self._counts = None
        if enable and self._counts is None:
            self._counts = [0, 0]
        return hits, misses

    def _count(self, hit: bool) -> None:
        counts = self._counts
        if counts is not None:
            with self._lock:
                counts[hit] += 1

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files, for all threads of this process. The next call opens them again."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def __enter__(self: SELF) -> SELF:
        with self._lock:
            self._blocks += 1
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files at the end of the last block, as threads may have blocks of their own."""
        with self._lock:
            self._blocks -= 1
            last = not self._blocks
        if last:
            self.close()

    def __reduce__(self) -> Any:
        options = {"timeout": self._timeout, "size_limit": self._size_limit, **self._options}
        return functools.partial(type(self), **options), (self._directory,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._directory}>"

    def _texts(self) -> Iterator[str]:
        return self.stampede.keys()

    def _existing(self, key: Any, value: Any) -> Any:
        if value is ENOVAL:
            raise KeyError(key)
        return value

    # -- left out -----------------------------------------------------------------------------------------------------

    _queue = "a cache may evict any entry, so it is no queue: use queue.SimpleQueue, or a table of a database"
    transact = _left_out(
        "transact",
        "update(key, function) changes one entry in one step, incr and add do, too; for several entries, "
        "`with Lock(cache, name):` excludes other processes that do the same",
    )
    push = _left_out("push", _queue)
    pull = _left_out("pull", _queue)
    peek = _left_out("peek", _queue)
    peekitem = _left_out("peekitem", "the order in which entries were stored is not kept")
    __reversed__ = _left_out("reversed(cache)", "the order in which entries were stored is not kept")
    reset = _left_out("reset", "give the setting to Cache(...)")
    create_tag_index = _left_out("create_tag_index", "a tag needs no index")
    drop_tag_index = _left_out("drop_tag_index", "a tag needs no index")
    del _queue


class FanoutCache(Cache):
    """A `Cache` with the interface of `diskcache.FanoutCache`. It has one database: `shards` has no effect.

    `size_limit` is for all of it. A writer that has waited for `timeout` raises `Timeout`, where diskcache's returns
    as if there were no value.

    >>> from stampede.contrib.diskcache import FanoutCache
    >>> with FanoutCache(shards=4) as cache:
    ...     cache["k"] = 1
    ...     other = cache.cache("other")
    ...     "k" in cache, "k" in other
    (True, False)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        shards: int = 8,
        timeout: float = TIMEOUT,
        disk: None = None,
        **settings: Any,
    ) -> None:
        super().__init__(directory, timeout, disk, **settings)

    def cache(self, name: str, timeout: float = TIMEOUT, disk: None = None, **settings: Any) -> Cache:
        """Return a `Cache` of its own, in the folder `cache/NAME` of this one's directory."""
        return Cache(Path(self.directory, "cache", *name.split("/")), timeout, disk, **settings)

    deque = _left_out("deque", "a cache may evict any entry: use a table of a database")
    index = _left_out("index", "a cache may evict any entry: use a table of a database, or shelve")


# -- memoize ----------------------------------------------------------------------------------------------------------


def memoized(
    cache: Cache,
    name: str | None,
    expire: float | None,
    tag: Any,
    ignore: Collection[Hashable],
    mark: tuple[str, ...] = (),
    **policy: Any,
) -> Callable[[F], F]:
    """Return the decorator of `memoize`. `mark` ends its keys, and `policy` is of `stampede.Cache.get_or_compute`."""
    if callable(name):
        raise TypeError("name is a function: write the parentheses, @cache.memoize()")
    policy |= {"ttl": _ttl(expire), "tags": _tags(tag)}

    def decorate(function: F) -> F:
        base = f"{function.__module__}.{function.__qualname__}" if name is None else name

        def key(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            counted = tuple(arg for position, arg in enumerate(args) if position not in ignore)
            named = [(word, kwargs[word]) for word in sorted(kwargs) if word not in ignore]
            # As diskcache makes it, with one addition: f(1, None, "a") and f(1, a=None) must be two keys.
            count = (len(counted),) if any(arg is None for arg in counted) else ()
            return (base, *counted, None, *(part for pair in named for part in pair), *count, *mark)

        @functools.wraps(function)
        def blocking(*args: Any, **kwargs: Any) -> Any:
            computed = False

            def compute() -> Any:
                nonlocal computed
                computed = True
                return [function(*args, **kwargs), tag]

            text = text_of(key(*args, **kwargs))
            value = cache.stampede.get_or_compute(text, compute, **policy)[0]
            cache._count(not computed)
            return value

        @functools.wraps(function)
        async def suspending(*args: Any, **kwargs: Any) -> Any:
            computed = False

            async def compute() -> Any:
                nonlocal computed
                computed = True
                return [await function(*args, **kwargs), tag]

            text = text_of(key(*args, **kwargs))
            value = (await cache.stampede.aget_or_compute(text, compute, **policy))[0]
            cache._count(not computed)
            return value

        wrapper: Any = suspending if inspect.iscoroutinefunction(function) else blocking
        wrapper.__cache_key__ = key
        return cast(F, wrapper)

    return decorate


# -- diskcache's arguments, and ours ----------------------------------------------------------------------------------


def _ttl(expire: float | None) -> float | None:
    return None if expire is None or expire > LONGEST else max(expire, 0.0)


def _tags(tag: Any) -> tuple[str, ...]:
    return () if tag is None else (text_of(tag),)


def _content(value: Any, read: bool) -> Any:
    return value.read() if read else value


def _answer(value: Any, fresh: float, its_tag: Any, expire_time: bool, tag: bool) -> Any:
    """Return the value, or a tuple of the value and what was asked for besides."""
    more = (*([None if fresh == inf else time.time() + fresh] if expire_time else []), *([its_tag] if tag else []))
    return (value, *more) if more else value
