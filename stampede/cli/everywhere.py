"""One question to every engine on which the locks and limits of these settings may be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from stampede.cli.address import engine_at
from stampede.errors import OptionError, StampedeError
from stampede.ports import Engine

__all__ = ["Answer", "Answers", "ask"]

T = TypeVar("T")


class Answer(NamedTuple, Generic[T]):
    url: str
    on: str  # the same for people
    told: T


class Answers(NamedTuple, Generic[T]):
    """Of those that could tell, and why others couldn't."""

    told: list[Answer[T]]
    troubles: list[StampedeError]

    def end(self, *, refusals: bool = True) -> int:
        """Say who didn't answer, also of those that never could. 1: one is out of reach, and may know more."""
        unreached = [each for each in self.troubles if not isinstance(each, OptionError)]
        for trouble in self.troubles if refusals else unreached:
            print(f"stampede: {' '.join(str(trouble).split())}", file=sys.stderr)
        return int(bool(unreached))

    @property
    def on(self) -> str:
        return " and ".join(each.on for each in self.told)


def ask(urls: Sequence[str], question: Callable[[Engine], T]) -> Answers[T]:
    """Each of them. The trouble of one hides no other's answer; that of one which was asked alone is raised."""
    answers = Answers[T]([], [])
    for url in urls:
        try:
            with engine_at(url) as engine:
                if not engine.shared:
                    called = engine.called
                    raise OptionError(
                        f"{called} lives inside each process: from here there is nothing of it to be seen"
                    )
                answers.told.append(Answer(url, engine.called, question(engine)))
        except StampedeError as trouble:
            answers.troubles.append(trouble)
    if not answers.told and len(answers.troubles) == 1:
        raise answers.troubles[0]
    return answers
