"""Runs programs as `python` does, each in its own process, but without the time for start and imports.

The processes are forked off a server that has the imports and has done nothing else. Tests of an interpreter's imports,
hash seed or standard input must start a real interpreter.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from multiprocessing import process
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import ModuleType
from typing import Any

from disk_world import AFRESH, ready

__all__ = ["python"]

TESTS = str(Path(__file__).parents[1])
FIRST = process.current_process()
"""The main process, as multiprocessing sees it. The fork server imports this module, so it is not a child."""


def python(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] = os.environ, timeout: float = 60
) -> CompletedProcess[str]:
    """Run a program, and return its output and exit code. The words are `-W error` (optional), then `-c TEXT`,
    `-m NAME` or a path, then the program's arguments."""
    arguments = [str(each) for each in words]
    with tempfile.TemporaryDirectory(prefix="forked-") as place:
        streams = [f"{place}/{name}" for name in ("stdout", "stderr")]
        ready()
        program = AFRESH.Process(target=_run, args=(arguments, str(cwd or Path.cwd()), dict(env), streams))
        program.start()
        program.join(timeout)
        code = program.exitcode
        if code is None:
            program.kill()
            program.join()
        program.close()
        out, err = (Path(each).read_text("utf-8", "replace") for each in streams)
    if code is None:
        raise TimeoutExpired(arguments, timeout, out, err)
    return CompletedProcess(arguments, code, out, err)


def _run(arguments: list[str], cwd: str, env: dict[str, str], streams: list[str]) -> None:
    """The main function of the process."""
    code = 1
    try:
        gc.freeze()  # collections would copy the parent's memory
        _begin(cwd, env, streams)
        code = _code_of(arguments)
        _end()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _begin(cwd: str, env: dict[str, str], streams: list[str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(streams, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    encoding = env.get("PYTHONIOENCODING", "utf-8")
    said: Any = sys
    said.stdout.reconfigure(encoding=encoding, errors="strict", line_buffering=False)
    said.stderr.reconfigure(encoding=encoding, errors="backslashreplace", line_buffering=True)
    tempfile.tempdir = None
    library = [sys.prefix, sys.base_prefix, str(Path(TESTS).parent)]
    ours = [each for each in sys.path if each.startswith(tuple(library)) and not each.startswith(TESTS)]
    sys.path[:] = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *ours]
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(TESTS):
            del sys.modules[name]
    # multiprocessing must treat this process as the main process.
    multiprocessing.set_start_method(None, force=True)
    alone: Any = process
    alone._current_process, alone._parent_process = FIRST, None


def _code_of(arguments: Sequence[str]) -> int:
    """Run the program to its last line, and return its exit code."""
    words = [*arguments]
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        del words[:2]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec"), _main().__dict__)
        else:
            sys.argv = words
            path = os.path.abspath(words[0])
            sys.path.insert(0, os.path.dirname(path))
            main = _main(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _main(**variables: object) -> ModuleType:
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, **variables)
    return main


def _end() -> None:
    """End like an interpreter: wait for threads, call exit functions, and drop the objects of the program."""
    ends: Any = threading
    ends._shutdown()
    ends = atexit
    ends._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
