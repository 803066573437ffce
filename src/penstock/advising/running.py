"""Runs a script or a module of the user under a profile in this process."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import SettingError
from penstock.profiling.profiles import Profile

_PYTHON = re.compile(r"python[\d.]*(\.exe)?$")


def profiled(command: Sequence[str]) -> tuple[Profile, int]:
    """A finished profile of `script.py args`, `-m module args`, or either after `python`; its exit status."""
    words = list(command)
    if words and _PYTHON.match(os.path.basename(words[0])):
        words = words[1:]
    if not words or (words[0].startswith("-") and words[0] != "-m") or words == ["-m"]:
        raise SettingError(
            f"what to run is a script with its arguments, or -m MODULE, and {' '.join(command)!r} was given"
        )
    module = words[0] == "-m"
    name, arguments = (words[1], words[2:]) if module else (words[0], words[1:])
    if not module and not Path(name).is_file():
        raise SettingError(f"there is no script {name!r}")
    folder = os.getcwd() if module else str(Path(name).resolve().parent)
    profile = Profile()
    with _as_main([name, *arguments], folder), profile:
        status, _held = _run(name, module)  # its variables are kept until the profile ends
    return profile, status


def _run(name: str, module: bool) -> tuple[int, dict[str, Any]]:
    """The exit status of a program, and its variables."""
    try:
        if module:
            return 0, runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0, runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None), {}


@contextmanager
def _as_main(arguments: list[str], folder: str) -> Iterator[None]:
    """The environment of a program that Python runs as a script."""
    before = sys.argv, sys.path
    sys.argv, sys.path = arguments, [folder, *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
