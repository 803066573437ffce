"""The cache on disk: folders that only the user can write, with files that can be recreated.

A folder that cannot be written, or that other users could have written to, is not used, and a single warning
says so.
"""

from __future__ import annotations

import errno
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from penstock.errors import PenstockWarning
from penstock.files import atomic_file, open_regular, remove_leftovers

_PRIVATE = 0o700
_WRITABLE_BY_OTHERS = 0o022
_warned: set[tuple[str, str]] = set()
_cleaned: set[str] = set()


class CacheFolder:
    """A folder of the cache. Files of other users are never read."""

    def __init__(self, root: Path, part: str = "", private: bool = True) -> None:
        """`part`: a folder inside the root, or the root itself. An existing folder may be shared."""
        self._root, self._part = root, part
        self._private = private
        self.path = root / part

    @property
    def place(self) -> tuple[Path, str, bool]:
        """The arguments that give this folder, for another process."""
        return self._root, self._part, self._private

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; an OSError if it is missing, or belongs to another user."""
        self._check()
        self._clean()
        file = open_regular(self.path / name, follow=not self._private)
        if self._private and not _owned(os.fstat(file.fileno())):
            file.close()
            raise PermissionError(errno.EPERM, "it belongs to another user", str(self.path / name))
        return file

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it cannot be used."""
        try:
            with self.open(name) as file:
                return file.read()
        except OSError:
            return None

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """A file to write, as by `atomic_file`; raises OSError if it cannot be written."""
        self.prepare()
        with atomic_file(self.path / name) as file:
            yield file

    def prepare(self) -> None:
        """Create the folder if it is missing; raises OSError if no files can be written to it."""
        for folder in (self._root, self.path):
            folder.mkdir(_PRIVATE, parents=True, exist_ok=True)
        self._check()
        self._clean()
        if not os.access(self.path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))

    def write(self, name: str, content: bytes) -> bool:
        """Write a file; whether that succeeded. The first failure is reported by a warning."""
        try:
            with self.writing(name) as file:
                file.write(content)
        except OSError as error:
            self.warn(error)
            return False
        return True

    def warn(self, error: OSError) -> None:
        """Warn that the folder cannot be written, once in a process."""
        reason = error.strerror or str(error)
        if (str(self._root), reason) not in _warned:
            _warned.add((str(self._root), reason))
            warnings.warn(
                f"the cache folder {self.path} cannot be used ({reason}); going on without it",
                PenstockWarning,
                stacklevel=2,
            )

    def _check(self) -> None:
        """Check that the folders belong to the user, and make them private; raises OSError if they do not."""
        for folder in dict.fromkeys((self._root, self.path)) if self._private else ():
            about = os.stat(folder)
            reason = "" if _owned(about) else "it belongs to another user"
            if not reason and os.name == "posix" and stat.S_IMODE(about.st_mode) & ~_PRIVATE:
                with suppress(OSError):  # a read-only file system may not let it
                    os.chmod(folder, _PRIVATE)
                if stat.S_IMODE(os.stat(folder).st_mode) & _WRITABLE_BY_OTHERS:
                    reason = "other users may write to it"
            if reason:
                error = PermissionError(errno.EPERM, reason, str(folder))
                self.warn(error)
                raise error

    def _clean(self) -> None:
        if str(self.path) not in _cleaned:
            _cleaned.add(str(self.path))
            remove_leftovers(self.path)


def _owned(about: os.stat_result) -> bool:
    return os.name != "posix" or about.st_uid == os.geteuid()
