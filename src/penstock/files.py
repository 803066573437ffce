"""Files: written atomically, and read only if they are regular files of a reasonable size."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

UNFINISHED = ".part"  # the suffix of files while they are written
_MOST_BYTES = 256 << 20  # of a file that is read as a whole
MOST_OF_A_TRACE = 4 << 30
_LEFTOVER = re.compile(
    r".+\.(\d+)-[0-9a-f]{8}\.part|tmp[a-z0-9_]{8}\.json"
)  # older versions wrote the second
_DEAD_SECONDS = 600  # after which an unfinished file whose process has ended is removed
_OLD_SECONDS = 24 * 3600  # after which any unfinished file is: its process may be on another machine


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write. It gets its name at the end of the block, and is removed if the block raises.

    Raises OSError if it cannot be written. A file of that name stays until the end of the block.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def open_regular(path: Path, follow: bool = True) -> BinaryIO:
    """Open a file for reading; an OSError if it is no regular file, without waiting for a writer.

    With `follow=False`, a symbolic link is refused too.
    """
    flags = (
        os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    )
    handle = os.open(path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def require_regular(path: Path) -> None:
    """Raise what `open_regular` would raise, for files that a library opens."""
    open_regular(path).close()


def read_bytes(path: Path, most: int = _MOST_BYTES, follow: bool = True) -> bytes:
    """The content of a regular file; an OSError if it is not regular, or has more than `most` bytes."""
    with open_regular(path, follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"Larger than {most >> 20} MiB", str(path))
    return content


def read_text(path: Path, most: int = _MOST_BYTES) -> str:
    """The content of a regular file as text; a ValueError if it is not UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def parse_json(text: str) -> Any:
    """The value of a JSON text; a ValueError if it is not valid, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The value of a TOML text; a ValueError if it is not valid, or nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of dead processes from a folder, but not those of running processes."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            match = _LEFTOVER.fullmatch(entry.name)
            if match is None:
                continue
            with suppress(OSError):  # another process may have removed it
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                owner = int(match[1]) if match[1] else None
                dead = owner is not None and age > _DEAD_SECONDS and not _alive(owner)
                if dead or age > _OLD_SECONDS:
                    os.unlink(entry.path)


def _alive(process: int) -> bool:
    if sys.platform == "win32":
        return True  # os.kill would end the process; the file is removed after a day
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # a process of another user
    return True
