"""Compiled kernels on disk, which later processes load. The number of bytes and of files is bounded."""

from __future__ import annotations

import hashlib
import os
import warnings
from contextlib import suppress
from pathlib import Path

from penstock.cache import CacheFolder
from penstock.config import cache_folder
from penstock.errors import PenstockWarning

_MAX_FILES = 4096
_MAX_BYTES = 256 << 20
_CHECK_BYTES = 32  # of the digest before the code, which detects damaged files


class Binaries:
    """A cache of compiled code, by the text that it was compiled from. Errors of files are cache misses."""

    def __init__(
        self, folder: Path | None = None, max_files: int = _MAX_FILES, max_bytes: int = _MAX_BYTES
    ) -> None:
        self._folder = CacheFolder(folder) if folder else CacheFolder(cache_folder(), "kernels")
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._room = 0, 0  # files and bytes to write before the folder is listed again

    def get(self, key: str) -> bytes | None:
        """The code for a key, which contains everything that the code depends on."""
        name = _name(key)
        content = self._folder.read(name)
        if content is None:
            return None
        with suppress(OSError):
            os.utime(self._folder.path / name)  # the least recently used are removed first
        check, code = content[:_CHECK_BYTES], content[_CHECK_BYTES:]
        if hashlib.sha256(code).digest() == check:
            return code
        with suppress(OSError):
            (self._folder.path / name).unlink()
        warnings.warn(
            f"{self._folder.path / name} was damaged: its kernels are compiled again",
            PenstockWarning,
            stacklevel=2,
        )
        return None

    def has(self, key: str) -> bool:
        """Whether there is a file for a key; it is not read, and may be damaged."""
        return (self._folder.path / _name(key)).is_file()

    def put(self, key: str, code: bytes) -> None:
        """Write code to disk, atomically: another process reads all of it or nothing."""
        if self._folder.write(_name(key), hashlib.sha256(code).digest() + code):
            files, nbytes = self._room
            self._room = files - 1, nbytes - _CHECK_BYTES - len(code)
            if min(self._room) < 0:
                self._trim()

    def _trim(self) -> None:
        """If a bound is exceeded, remove the least recently used files down to three quarters of it."""
        files = []
        for path in self._folder.path.iterdir():
            with suppress(OSError):  # another process may have removed it
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        count, total = len(files), sum(size for _, size, _ in files)
        if count > self._max_files or total > self._max_bytes:
            for _, size, path in sorted(files):
                if count <= self._max_files * 3 // 4 and total <= self._max_bytes * 3 // 4:
                    break
                with suppress(OSError):
                    path.unlink()
                count, total = count - 1, total - size
        # Half of what is left, since other processes write here too.
        self._room = (self._max_files - count) // 2, (self._max_bytes - total) // 2


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}.bin"
