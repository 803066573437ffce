"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from penstock.config import format_bytes
from penstock.data.errors import DataError

UNFINISHED = ".part"  # how the names of files end while they are written


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write. It gets its name when the block ends well, and is removed when it does not."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise DataError(f"{path} could not be written: {_reason(error, path)}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _reason(error: OSError, path: Path) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error.strerror or str(error)
    with suppress(OSError):
        free = shutil.disk_usage(path.parent).free
        return f"the disk is full ({format_bytes(free)} free); make room, or choose another folder"
    return "the disk is full; make room, or choose another folder"
