"""For the reference: examples in docstrings are code, and what type checkers see of a function's verbs is explained."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # up to an empty line

FACES = ["api.typing", "api.typing_many"]
TOLD = ["api.cached.Cached", "api.many.CachedMany"]
"""What stands behind the faces, and says what each verb does."""


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Markdown would take `>>>` for quotations."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for face in (face for module in FACES for face in pkg[module].classes.values()):
            _show_overloads(face)
            for told in (pkg[name] for name in TOLD):
                _explain(face, told)


def _show_overloads(face: griffe.Class) -> None:
    """They are shown with what implements them, which a protocol hasn't."""
    for name, overloads in face.overloads.items():
        if overloads and name not in face.members:
            face.set_member(name, overloads[-1])
            overloads[-1].overloads = list(overloads[:-1])


def _explain(face: griffe.Class, told: griffe.Class) -> None:
    for name, verb in face.functions.items():
        if verb.docstring is None and name in told.functions and told[name].docstring is not None:
            verb.docstring = griffe.Docstring(told[name].docstring.value, parent=verb)
