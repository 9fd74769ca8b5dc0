"""Whole HTTP responses, cached in front of an ASGI application: Starlette, FastAPI, Quart, Django. See `ResponseCache`.

It needs no framework, and works as a shared cache by RFC 9111."""

from stampede.contrib.asgi.middleware import ResponseCache
from stampede.contrib.asgi.route import cached_response

__all__ = ["ResponseCache", "cached_response"]
