"""For the reference: examples in docstrings are code, and methods of protocols that have overloads only are shown."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # up to an empty line


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Markdown would take `>>>` for quotations."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Overloads are shown with what implements them, which a protocol hasn't."""
        for name, overloads in cls.overloads.items():
            if name not in cls.members and overloads:
                cls.set_member(name, overloads[-1])
                overloads[-1].overloads = list(overloads[:-1])
