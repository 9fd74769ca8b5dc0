"""What outlives a broker: for how long its successor has to grant nothing. Of locks themselves nothing is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

from stampede.errors import OptionError

__all__ = ["Memory"]


class Memory:
    """A file that says how long a lease may stand that its last broker has granted. None was, if it isn't there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = json.loads(path.read_text())
            self.longest = float(known["longest"])
        except FileNotFoundError:
            self.longest = 0.0
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise OptionError(f"{path} is no memory of a broker: {error!r}: remove it, and give --grace") from error
        self.note(self.longest)  # or it is found out with the first lock that nothing can be written there

    def note(self, longest: float) -> None:
        """Before anything so long is granted: a broker may end in the next moment."""
        new = self._path.with_name(self._path.name + ".new")
        try:
            with new.open("w") as file:
                json.dump({"longest": longest}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            raise OptionError(f"{self._path} can't be written: {error}") from error
        self.longest = longest
