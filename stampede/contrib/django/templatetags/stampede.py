"""The template tag `cached`: Django's `cache`, rendered by one caller in all processes."""

from __future__ import annotations

from typing import Any

from django.core.cache import InvalidCacheBackendError, caches
from django.core.cache.utils import make_template_fragment_key
from django.template import Library, Node, TemplateSyntaxError

from stampede.contrib.django.backend import StampedeCache
from stampede.errors import OptionError
from stampede.settings.options import seconds

register = Library()


class _Fragment(Node):  # type: ignore[misc]
    def __init__(self, nodelist: Any, timeout: Any, name: str, vary_on: list[Any], options: dict[str, Any]) -> None:
        self.nodelist, self._timeout, self._name = nodelist, timeout, name
        self._vary_on, self._options = vary_on, options

    def render(self, context: Any) -> Any:
        timeout = self._timeout.resolve(context)
        try:
            ttl = None if timeout is None else seconds("timeout", timeout)
        except OptionError as error:
            raise TemplateSyntaxError(f"'cached': {error}") from None
        tags, using = self._tags(context), self._options.get("using")
        key = make_template_fragment_key(self._name, [each.resolve(context) for each in self._vary_on])
        backend = _cache(None if using is None else using.resolve(context))
        return backend.stampede.get_or_compute(
            backend.make_and_validate_key(key),
            lambda: self.nodelist.render(context),
            ttl=ttl,
            tags=tags,
            # In another thread, the template's context would be shared, and the language lost.
            background=False,
            patience=None,
            deadline=None,
        )

    def _tags(self, context: Any) -> list[str]:
        given = self._options.get("tags")
        if given is None:
            return []
        if isinstance(given.var, str):  # written in the template
            return str(given.resolve(context)).split()
        tags = given.resolve(context)
        found = [tags] if isinstance(tags, str) else list(tags) if isinstance(tags, (list, tuple, set)) else None
        if not found or "" in found:
            raise TemplateSyntaxError(f"the tags of 'cached' are {tags!r}: give a text, or a list of texts")
        return found


def _cache(alias: str | None) -> StampedeCache:
    try:
        found = caches[alias or "template_fragments"]
    except InvalidCacheBackendError:
        if alias:
            raise TemplateSyntaxError(f"the cache of 'cached' is {alias!r}, which CACHES does not have") from None
        found = caches["default"]
    if not isinstance(found, StampedeCache):
        raise TemplateSyntaxError("the cache of 'cached' is not a StampedeCache: use Django's 'cache' tag for it")
    return found


@register.tag("cached")  # type: ignore[untyped-decorator]
def cached(parser: Any, token: Any) -> Node:
    """Cache a part of a template, for each combination of values. It has the key of Django's `{% cache %}`.

        {% load stampede %}
        {% cached 600 sidebar request.user.pk tags="menu" %} ... {% endcached %}

    First the seconds, then a name, then values on which the part depends. `tags=` are names for `invalidate_tags`: a
    text in the template, with blanks between them, or a variable with one name or a list of names. `using=` is another
    cache of `CACHES`.
    """
    nodelist = parser.parse(("endcached",))
    parser.delete_first_token()
    _, *words = token.split_contents()
    options = {}
    while words and words[-1].startswith(("tags=", "using=")):
        name, _, value = words.pop().partition("=")
        options[name] = parser.compile_filter(value)
    if len(words) < 2:
        raise TemplateSyntaxError("'cached' needs a timeout and a name")
    timeout, name, *vary_on = words
    return _Fragment(nodelist, parser.compile_filter(timeout), name, list(map(parser.compile_filter, vary_on)), options)
