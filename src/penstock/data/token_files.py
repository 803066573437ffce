"""Files of tokens: a header with a key and a checksum, then the tokens, which are memory-mapped."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.cache import CacheFolder

Tokens = npt.NDArray[np.unsignedinteger[Any]]

SUFFIX = ".tokens"
_HEADER = struct.Struct("<16sQQ32sQ")  # magic, bytes per token, tokens, key, checksum of the tokens
_MAGIC = b"penstock tokens2"
_TEXTS_KEPT = 16
_BYTES_KEPT = 16 << 30  # in files of texts other than that in use


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype in which tokens are stored."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenWriter:
    """Writes tokens piece by piece; `finish` writes the header."""

    def __init__(self, file: BinaryIO, item: np.dtype[Any]) -> None:
        self._file, self._item = file, item
        self._checksum = 0
        self.count = 0
        file.write(bytes(_HEADER.size))

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Append tokens."""
        stored = ids.astype(self._item)
        self.count += len(stored)
        self._checksum = zlib.crc32(stored.data, self._checksum)
        self._file.write(stored.data)

    def finish(self, key: bytes) -> None:
        """Write the header, with the key of what the tokens were made of."""
        self._file.seek(0)
        self._file.write(_HEADER.pack(_MAGIC, self._item.itemsize, self.count, key, self._checksum))


def mapped_tokens(folder: CacheFolder, name: str, key: bytes, item: np.dtype[Any]) -> Tokens | None:
    """The tokens in a file; None if it is missing, or damaged, or its key is another.

    All of it is read once for the checksum, which is less than was read of the text to compute its key.
    """
    try:
        with folder.open(name) as file:
            magic, itemsize, count, stored_key, checksum = _HEADER.unpack(file.read(_HEADER.size))
            whole = os.fstat(file.fileno()).st_size == _HEADER.size + count * itemsize
            if (magic, itemsize, stored_key) == (_MAGIC, item.itemsize, key) and count and whole:
                tokens = np.asarray(np.memmap(file, item, "r", _HEADER.size, (count,)))
                if zlib.crc32(tokens.data) == checksum:
                    return tokens
    except (OSError, struct.error):
        pass
    return None


def forget_old(folder: Path, used: Iterable[str]) -> None:
    """Limit the size of a folder: the files of the least recently used texts are removed.

    `used` are the names of the files in use. Files of chunks of the same text have its key before a dash.
    """
    kept = set(used)
    texts: dict[str, list[os.DirEntry[str]]] = {}
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.endswith(SUFFIX) and entry.name not in kept:
                texts.setdefault(entry.name.removesuffix(SUFFIX).split("-")[0], []).append(entry)
    others = []
    for entries in texts.values():
        with suppress(OSError):  # another process may have removed a file
            states = [entry.stat() for entry in entries]
            size = sum(state.st_size for state in states)
            others.append((max(state.st_mtime for state in states), size, [entry.path for entry in entries]))
    total = 0
    for number, (_, size, paths) in enumerate(sorted(others, reverse=True), start=1):
        total += size
        if number >= _TEXTS_KEPT or total > _BYTES_KEPT:
            for path in paths:
                with suppress(OSError):  # another process may have removed it, or have it open on Windows
                    os.unlink(path)
