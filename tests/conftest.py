"""What every test starts from: no settings of the developer's, and the same examples in every run."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# A shell that runs us in the background has Ctrl-C ignored, and so it would be in all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Derandomized, so that a run that is green here is green elsewhere; HYPOTHESIS_PROFILE=explore looks for more.
settings.register_profile("stampede", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "stampede"))


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAMPEDE_SETTINGS", "STAMPEDE_DISABLED"):
        monkeypatch.delenv(name, raising=False)
