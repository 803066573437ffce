"""Files that are written atomically."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from penstock.data.errors import DataError
from penstock.files import atomic_file
from penstock.formatting import format_bytes


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, as by `atomic_file`, with its parent folders; a DataError says why it fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} could not be written: {reason(error, path)}") from error


def reason(error: OSError, path: Path) -> str:
    """A message that says why a file could not be written."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error.strerror or str(error)
    with suppress(OSError):
        free = shutil.disk_usage(path.parent).free
        return f"the disk is full ({format_bytes(free)} free); make room, or choose another folder"
    return "the disk is full; make room, or choose another folder"
