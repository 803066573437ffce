"""Tokens on disk: a text tokenised once, then mapped into memory, so that its size does not matter."""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import cache_folder
from penstock.data.errors import DataError
from penstock.data.files import UNFINISHED, written_whole
from penstock.data.text import Text, no_text, pieces
from penstock.data.tokenizer import Tokenizer

Tokens = npt.NDArray[np.unsignedinteger[Any]]

_HEADER = struct.Struct("<16sQQ32s")  # magic, bytes per token, tokens, key; all of it, so that size tells
_MAGIC = b"penstock tokens1"
_SUFFIX = ".tokens"
_FILES_KEPT = 16
_BYTES_KEPT = 16 << 30  # in files beyond the one in use
_ABANDONED = 24 * 3600  # seconds after which an unfinished file belongs to nobody


class TokenStore:
    """The tokens of a text in two read-only arrays, `train` and `validation`, which lie on disk."""

    def __init__(self, path: Path, tokens: Tokens, vocab_size: int, validation: float) -> None:
        self.path = path
        self.vocab_size = vocab_size
        split = int(len(tokens) * (1 - validation))
        self.train = tokens[:split]
        self.validation = tokens[split:]

    @classmethod
    def open(
        cls,
        text: str | Text,
        tokenizer: Tokenizer,
        validation: float = 0.1,
        cache: str | os.PathLike[str] | None = None,
    ) -> TokenStore:
        """The tokens of `text`, from the cache folder where they were made before.

        The last part of them, the fraction `validation`, is kept for validation. A cached file is found by
        what the text says and by the tokenizer; one that is damaged is made anew. Raises DataError where the
        text is empty, or where the file cannot be written; then nothing of it stays.
        """
        if not 0 <= validation < 1:
            raise DataError(f"validation is a fraction from 0 to less than 1, and {validation} was given")
        folder = Path(cache) if cache is not None else cache_folder() / "tokens"
        key = _Key(tokenizer)
        for piece in pieces(text):
            key.add(piece)
        if not key.pieces:
            raise no_text(text)
        path = folder / (key.digest().hex() + _SUFFIX)
        item = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        count = _count(path, key.digest(), item)
        if count is None:
            count = _write(path, text, tokenizer, item)
        with suppress(OSError):
            os.utime(path)
        _forget_old(path)
        tokens = np.asarray(np.memmap(path, item, "r", _HEADER.size, (count,)))
        return cls(path, tokens, tokenizer.vocab_size, validation)

    def __len__(self) -> int:
        return len(self.train) + len(self.validation)


class _Key:
    """Under which tokens are kept: a hash of the text, of where it is cut, and of the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = 0
        self._hash = blake2b(tokenizer.to_json().encode(), digest_size=32)

    def add(self, piece: str) -> None:
        data = piece.encode()
        self.pieces += 1
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.digest()


def _write(path: Path, text: str | Text, tokenizer: Tokenizer, item: np.dtype[Any]) -> int:
    """Write the file of a text's tokens; how many they are.

    The key in it is that of the text as it is now. If it changed since it was looked for, the file serves
    this time, and is seen to be foreign to its name the next time.
    """
    count = 0
    key = _Key(tokenizer)
    with written_whole(path) as file:
        file.write(bytes(_HEADER.size))
        for piece in pieces(text):
            key.add(piece)
            ids = tokenizer.encode(piece)
            count += len(ids)
            file.write(ids.astype(item).data)
        if not count:
            raise no_text(text)
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, item.itemsize, count, key.digest()))
    return count


def _count(path: Path, key: bytes, item: np.dtype[Any]) -> int | None:
    """How many tokens the file has, or None where it is missing, cut short or not what its name says."""
    try:
        with open(path, "rb") as file:
            magic, itemsize, count, found = _HEADER.unpack(file.read(_HEADER.size))
            size = os.fstat(file.fileno()).st_size
    except (OSError, struct.error):
        return None
    whole = size == _HEADER.size + count * itemsize
    fits = (magic, itemsize, found) == (_MAGIC, item.itemsize, key)
    return int(count) if count and whole and fits else None


def _forget_old(used: Path) -> None:
    """Keep the folder bounded: of the other files, those used last; and none that was left unfinished."""
    others = []
    with suppress(OSError):
        for entry in os.scandir(used.parent):
            if entry.name.endswith(_SUFFIX) and entry.name != used.name:
                others.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
            elif entry.name.endswith(UNFINISHED) and time.time() - entry.stat().st_mtime > _ABANDONED:
                os.unlink(entry.path)
    kept = 0
    for number, (_, size, path) in enumerate(sorted(others, reverse=True), start=1):
        kept += size
        if number >= _FILES_KEPT or kept > _BYTES_KEPT:
            with suppress(OSError):  # another process may have been faster, or have it open on Windows
                os.unlink(path)
