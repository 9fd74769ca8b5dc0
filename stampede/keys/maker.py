"""Key makers: functions, generated from a signature, that take the arguments of a call and return its key."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from hashlib import blake2b
from inspect import iscoroutinefunction
from string import Formatter
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

from stampede.errors import KeyingError, OptionError
from stampede.keys.canonical import canonical, name_of, remedies
from stampede.keys.compose import quoted
from stampede.keys.models import is_frozen
from stampede.keys.parameters import Kind, Parameter, Parameters, fields_in, names_in
from stampede.runtime.definitions import signature_of
from stampede.settings.options import checked_tags, nearest

__all__ = ["arguments_named", "in_namespace_of", "key_maker", "tags_of_call", "ttl_of_call"]

LONGEST = 200
"""The most characters of a key's arguments that are written out. Longer ones are hashed, never cut."""

KeyMaker: TypeAlias = Callable[..., str]


def key_maker(
    fn: Callable[..., object],
    *,
    prefix: str,
    ignore: Collection[str] = (),
    key: Callable[..., object] | str | None = None,
    bound: bool = False,
) -> KeyMaker:
    """Return a function, generated from `fn`'s signature, that takes the arguments of a call and returns its key. The
    key is `prefix`, unchanged, and then the arguments: `(42,year=2026)`. With `bound` the first is self or cls. If
    `key` is a function, its result follows the prefix: a str unchanged, anything else canonical in parentheses. If
    `key` is a format string, it is filled in as by `str.format`, so `"{a}"` makes the same key of 1 and "1". If a
    field's text contains the character that ends the field, that is written as `%3A`: no other arguments have this
    key."""
    parameters = Parameters(fn, ignore)
    if key is None:
        return _by_arguments(parameters, prefix, bound)
    if isinstance(key, str):
        return _by_format(parameters, prefix, key, bound)
    return _by_function(prefix, key)


# -- by the arguments -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """How one keyed parameter is written in the key."""

    parameter: Parameter
    label: str  # what precedes its text: nothing, its name, or its stars
    write: Callable[[Any], str]
    opaque_default: bool  # its default has no text, such as a sentinel: it is written as `<default>`


def _by_arguments(parameters: Parameters, prefix: str, bound: bool) -> KeyMaker:
    parts = _parts(parameters, bound)
    code = Code(parameters)
    texts = [parameters.fresh_name(f"_t{number}") for number in range(len(parts))]
    shown = ",".join(f"{part.label}{{{text}}}" for part, text in zip(parts, texts, strict=True))
    lines = [f"        {text} = {_expression(part, code)}" for part, text in zip(parts, texts, strict=True)]
    values = "".join(f"{part.parameter.name}, " for part in parts)
    key = parameters.fresh_name("_key")
    careful = partial(_carefully, parameters.qualname, prefix, parts)
    return code.function(
        [
            "    try:",
            *lines,
            f"        {key} = f'{{{code.name(prefix, '_prefix')}}}({shown})'",
            # ValueError: an int with more digits than Python prints
            f"    except ({code.name(KeyingError)}, {code.name(ValueError)}):",
            f"        {key} = {code.name(careful)}(({values}))",
            f"    if {code.name(len)}({key}) > {LONGEST + len(prefix)}:",
            f"        return {code.name(partial(_hashed, prefix))}({key})",
            f"    return {key}",
        ]
    )


def _parts(parameters: Parameters, bound: bool) -> list[_Part]:
    parts = []
    named = False  # a parameter after an ignored one is written with its name
    for number, parameter in enumerate(parameters.all):
        if parameter.ignored:
            named = True
            continue
        write = _self_text if bound and number == 0 and parameter.kind is not Kind.VAR_POSITIONAL else canonical
        if parameter.kind is Kind.VAR_KEYWORD and parameters.ignored:
            write = partial(_without, parameters.ignored)
        parts.append(_Part(parameter, _label(parameter, named), write, _has_opaque_default(parameter)))
    return parts


def _label(parameter: Parameter, named: bool) -> str:
    if parameter.kind is Kind.VAR_POSITIONAL:
        return "*"
    if parameter.kind is Kind.VAR_KEYWORD:
        return "**"
    return f"{parameter.name}=" if named or parameter.kind is Kind.KEYWORD_ONLY else ""


def _has_opaque_default(parameter: Parameter) -> bool:
    if not parameter.has_default or hasattr(type(parameter.default), "__stampede_key__"):
        return False  # the user's method may have an answer by the time of a call
    try:
        canonical(parameter.default)
    except KeyingError:
        return True
    return False


def _without(ignored: frozenset[str], kwargs: dict[str, object]) -> str:
    return canonical({name: value for name, value in kwargs.items() if name not in ignored})


def _expression(part: _Part, code: Code) -> str:
    """Return the source of one parameter's text. Ints, None, bools and common strings are written inline."""
    name = part.parameter.name
    text = f"{code.name(part.write)}({name})"
    if part.write is canonical and part.label not in ("*", "**"):
        kind = code.parameters.fresh_name("_kind")
        words = " or ".join(f"{kind} is {code.name(each)}" for each in (int, bool, NoneType))
        quoted = f"f\"'{{{name}}}'\" if {kind} is {code.name(str)} and {name}.isalnum()"
        text = (
            f"{name} if ({words.replace(kind, f'({kind} := {code.name(type)}({name}))', 1)}) else {quoted} else {text}"
        )
    if part.opaque_default:
        text = f"'<default>' if {name} is {part.parameter.default_name} else {text}"
    return text


def _carefully(qualname: str, prefix: str, parts: list[_Part], values: tuple[object, ...]) -> str:
    """Return the key, or raise a KeyingError that names the parameter."""
    texts = []
    for part, value in zip(parts, values, strict=True):
        try:
            is_default = part.opaque_default and value is part.parameter.default
            texts.append(part.label + ("<default>" if is_default else part.write(value)))
        except KeyingError as error:
            raise KeyingError(f"{qualname}: parameter {part.parameter.name!r}: {error}") from error
    return f"{prefix}({','.join(texts)})"


def _hashed(prefix: str, key: str) -> str:
    digest = blake2b(key[len(prefix) :].encode("utf-8", "surrogatepass"), digest_size=20)
    return f"{prefix}#{digest.hexdigest()}"


def _self_text(value: Any) -> str:
    """Return the text of self or cls. Raise KeyingError if it could change without the cache noticing."""
    cls = type(value)
    if hasattr(cls, "__stampede_key__") or issubclass(cls, (type, Enum, tuple)) or is_frozen(value):
        return canonical(value)
    raise KeyingError(
        f"{name_of(cls)} is mutable, or has no stable identity: give it a `__stampede_key__` method,"
        ' make it a frozen dataclass or model, or leave it out with `ignore={"self"}`'
    )


# -- by the user's `key=` -------------------------------------------------------------------------------------


def _by_function(prefix: str, key: Any) -> KeyMaker:
    if not callable(key) or iscoroutinefunction(key):
        raise OptionError(f"key is {key!r}: give a plain function of the arguments, or a format string")

    def by_function(*args: Any, **kwargs: Any) -> str:
        result = key(*args, **kwargs)
        return prefix + (result if type(result) is str else f"({canonical(result)})")

    return by_function


def _by_format(parameters: Parameters, prefix: str, template: str, bound: bool) -> KeyMaker:
    code = Code(parameters)
    fields, names = fields_in(template), sorted(names_in(template))
    for name in names:
        if name not in parameters.names:
            hint = nearest(name, parameters.names) if parameters.names else "it has no parameters"
            raise OptionError(
                f"key {template!r} names {name!r}, which is not a parameter of {parameters.qualname}: {hint}"
            )
    if not names:
        _check_shared(template, parameters, bound)
    bare = [name for name in names if name in fields]
    fill = partial(_fill, parameters.qualname, prefix, template, _pieces(template), bare)
    passed = ", ".join(f"{name}={name}" for name in names)
    return code.function([f"    return {code.name(fill)}({passed})"])


class _Piece(NamedTuple):
    """A part of a format string: the text before a field, the field alone, and the character that ends its text."""

    before: str
    field: str
    end: str  # '' if nothing follows that could be read as a part of the field's text


def _pieces(template: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    before = ""
    for literal, field, spec, conversion in Formatter().parse(template):
        before += literal
        if field is None:
            continue
        if pieces:
            pieces[-1] = pieces[-1]._replace(end=before[:1])
            if not before and ":" not in pieces[-1].field:
                raise OptionError(
                    f"key {template!r} has two fields side by side, so different arguments can give the same key: put "
                    "a character between them, or give the first a width"
                )
        how = f"{'!' + conversion if conversion else ''}{':' + spec if spec else ''}"
        pieces.append(_Piece(before, f"{{{field}{how}}}", ""))
        before = ""
    return [*pieces, _Piece(before, "", "")]


def _within(text: str, end: str) -> str:
    # The percent sign is quoted, too: otherwise a text that contains "%3A" would be equal to one with a colon.
    return text.replace("%", "%25").replace(end, f"%{ord(end):02X}") if end and (end in text or "%" in text) else text


def _check_shared(template: str, parameters: Parameters, bound: bool) -> None:
    """Raise OptionError if a key without fields would be shared by calls with different arguments."""
    keyed = [p.name for p in parameters.keyed if not (bound and p.name in ("self", "cls"))]
    if keyed:
        raise OptionError(
            f"key {template!r} names none of the parameters of {parameters.qualname}, so all calls would share one "
            f"value. Name them, as in key='{parameters.qualname.rpartition('.')[2]}:{{{keyed[0]}}}' (no f before the "
            f"quotes). If one value for all calls is intended, use ignore={keyed!r}, or give a function as key="
        )


def _fill(qualname: str, prefix: str, template: str, pieces: list[_Piece], bare: list[str], /, **values: Any) -> str:
    for name in bare:
        kind = type(values[name])
        if _shows_address(kind):
            cls = name_of(kind)
            raise KeyingError(
                f"{qualname}: parameter {name!r}: the only text of {cls} is its memory address: {remedies(kind)}"
            )
    try:
        return prefix + "".join([before + _within(field.format(**values), end) for before, field, end in pieces])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise KeyingError(f"{qualname}: key {template!r} can't be filled in: {error}") from error


def _shows_address(cls: type) -> bool:
    return all(getattr(cls, name) is getattr(object, name) for name in ("__repr__", "__str__", "__format__"))


# -- generated code -------------------------------------------------------------------------------------------


class Code:
    """A function that is being generated, with its namespace. No name in it is that of a parameter."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._namespace: dict[str, Any] = parameters.defaults

    def name(self, thing: Any, name: str = "") -> str:
        """Put an object into the namespace, and return its name in the generated code."""
        fresh = self.parameters.fresh_name(name or "_" + getattr(thing, "func", thing).__name__.strip("_"))
        self._namespace[fresh] = thing
        return fresh

    def function(self, body: list[str]) -> Callable[..., Any]:
        """Compile a function with the original's signature. A wrong call raises the original's TypeError."""
        name = self.parameters.fresh_name("_make")
        source = "\n".join([f"def {name}({self.parameters.declaration()}):", *body])
        exec(compile(source, f"<key of {self.parameters.qualname}>", "exec"), self._namespace)
        made: Any = self._namespace[name]
        made.__name__ = made.__qualname__ = self.parameters.qualname
        return made  # type: ignore[no-any-return]


# -- options that are functions: they are given the arguments of the call that they name ---------------------


def arguments_named(option: str, function: Callable[..., Any], parameters: Parameters, *, after: int = 0) -> list[str]:
    """Return the names of the arguments that an option's function asks for, without its first `after` parameters.
    OptionError: a call has no such argument."""
    if iscoroutinefunction(function):
        raise OptionError(f"{option} is {function!r}: give a plain function")
    try:
        asked = list(signature_of(function).parameters.values())[after:]
    except (TypeError, ValueError):
        return []  # a builtin without a signature
    names = []
    for each in asked:
        if each.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD):
            continue
        if each.name in parameters.names and each.kind is not Kind.POSITIONAL_ONLY:
            names.append(each.name)
        elif each.default is Kind.empty:
            hint = nearest(each.name, parameters.names) if parameters.names else "it has no parameters"
            raise OptionError(
                f"{option} asks for {each.name!r}, which is not a parameter of {parameters.qualname}: {hint}"
            )
    return names


def ttl_of_call(ttl: Any, parameters: Parameters) -> tuple[Callable[..., Callable[[Any], Any]] | None, frozenset[str]]:
    """Return a function that makes, of a call's arguments, the ttl as a function of the value; and their names. The
    function is None if `ttl` asks for no arguments: it is a number, or a function of the value only."""
    names = arguments_named("ttl", ttl, parameters, after=1) if callable(ttl) else []
    if not names:
        return None, frozenset()
    code = Code(parameters)
    source = f"    return {code.name(partial, '_partial')}({code.name(ttl, '_ttl')}, {_passed(names)})"
    return code.function([source]), frozenset(names)


def tags_of_call(tags: Any, parameters: Parameters) -> tuple[Callable[..., tuple[str, ...]] | None, frozenset[str]]:
    """Return a function that makes, of a call's arguments, the tags of its value; and the names of the arguments.
    `tags` is a function of arguments, or a list of plain names and format strings. The function is None if they depend
    on no argument."""
    code = Code(parameters)
    if callable(tags):
        names = arguments_named("tags", tags, parameters)
        make: Callable[..., Any] = tags
    else:
        templates = checked_tags("tags", tags)
        fields: frozenset[str] = frozenset().union(*[names_in(each, "tags") for each in templates])
        names = sorted(fields)
        for name in names:
            if name not in parameters.names:
                hint = nearest(name, parameters.names) if parameters.names else "it has no parameters"
                raise OptionError(f"tags name {name!r}, which is not a parameter of {parameters.qualname}: {hint}")
        if not names:
            return None, frozenset()
        make = partial(_filled, parameters.qualname, templates)
    checked = partial(_checked_tags, parameters.qualname, make)
    return code.function([f"    return {code.name(checked, '_tags')}({_passed(names)})"]), frozenset(names)


def _filled(qualname: str, templates: Sequence[str], /, **values: Any) -> list[str]:
    try:
        return [template.format(**values) for template in templates]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise KeyingError(f"{qualname}: the tags {list(templates)} can't be filled in: {error}") from error


def _checked_tags(qualname: str, make: Callable[..., Any], /, **values: Any) -> tuple[str, ...]:
    return checked_tags(f"tags of {qualname}", make(**values))


def in_namespace_of(namespace: Callable[..., Any], parameters: Parameters, prefix: str, make: KeyMaker) -> KeyMaker:
    """Return a key maker like `make`, with the namespace that a function returns for the call's arguments."""
    names, code = arguments_named("namespace", namespace, parameters), Code(parameters)
    text, rest = code.name(partial(_text, parameters.qualname)), code.name(make, "_rest")
    own = f"{code.name(namespace, '_namespace')}({_passed(names)})"
    start = code.name(prefix, "_prefix")
    return code.function([f"    return f'{{{start}}}{{{text}({own})}}/{{{rest}({parameters.passing()})}}'"])


def _passed(names: list[str]) -> str:
    return ", ".join(f"{name}={name}" for name in names)


def _text(qualname: str, namespace: object) -> str:
    if not isinstance(namespace, (str, int)):
        raise KeyingError(
            f"{qualname}: the namespace function returned {namespace!r}: it must return a string or a number"
        )
    return quoted(str(namespace))
