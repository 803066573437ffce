"""The folder of a run, which is locked by the process that uses it."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path

from penstock.errors import CheckpointError, PenstockError
from penstock.files import parse_json, remove_leftovers

LOCK_FILE = "run.lock"
_AT = 1 << 30  # the byte that is locked on Windows, where locked bytes cannot be read
_MOST_SAID = 4096  # bytes of the file


class RunInUse(PenstockError, RuntimeError):
    """Another process, or another trainer, uses the folder of a run."""


class RunFolder:
    """A folder that is locked until `release`, or until the process ends in any way."""

    def __init__(self, path: Path, numbered: bool = False) -> None:
        """Lock a folder, which is created if it is missing; RunInUse names the process that uses it.

        With `numbered`, a new folder is created, with a number after its name if that exists.
        """
        self._handle: int | None = None
        try:
            self.path, self._is_new = _made(path, numbered)
            self._handle = os.open(
                self.path / LOCK_FILE,
                os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0),
                0o644,
            )
        except OSError as error:
            raise CheckpointError(f"the folder {path} cannot be used: {error.strerror}") from None
        if not _lock(self._handle):
            holder = _said(self._handle)
            self.release()
            raise RunInUse(f"{self.path} is in use by {holder}; wait for its end, or take another folder")
        about = {"process": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # a full disk: the lock holds nevertheless
            os.ftruncate(self._handle, 0)
            os.write(self._handle, json.dumps(about).encode())
        for folder in (self.path, *self.path.glob("*/")):
            remove_leftovers(folder)

    def release(self) -> None:
        """Unlock it. Safe to call twice."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def remove_files(self, names: list[str]) -> None:
        """Remove files, and the folder if it was created for this run and is empty."""
        for name in [*names, LOCK_FILE]:
            with suppress(OSError):
                (self.path / name).unlink()
        if self._is_new:
            with suppress(OSError):
                self.path.rmdir()

    def __del__(self) -> None:
        self.release()


def _made(path: Path, numbered: bool) -> tuple[Path, bool]:
    """A folder, and whether it was just created. Creation is atomic, so a single process succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, candidate = 1, path
    while True:
        try:
            candidate.mkdir()
            return candidate, True
        except FileExistsError:
            if not numbered:
                if candidate.is_dir():
                    return candidate, False
                raise
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")


def _lock(handle: int) -> bool:
    """Lock an open file until it is closed or the process ends; False if another process has locked it."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(handle, _AT, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
        return True
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _said(handle: int) -> str:
    """The process that has a lock, according to the file."""
    try:
        os.lseek(handle, 0, os.SEEK_SET)
        about = parse_json(os.read(handle, _MOST_SAID).decode())
        return f"process {int(about['process'])} on {about['host']!s:.80}, since {about['since']!s:.40}"
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return "another process"
