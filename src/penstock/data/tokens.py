"""Tokens on disk: a text is tokenized once and then memory-mapped, so that its size does not matter."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.cache import CacheFolder
from penstock.config import cache_folder
from penstock.data.errors import DataError
from penstock.data.files import reason
from penstock.data.text import Progress, Text, no_text, pieces, silent, size_of
from penstock.data.tokenizer import Tokenizer
from penstock.formatting import format_bytes

Tokens = npt.NDArray[np.unsignedinteger[Any]]

_HEADER = struct.Struct("<16sQQ32sQ")  # magic, bytes per token, tokens, key, checksum of the tokens
_MAGIC = b"penstock tokens2"
_SUFFIX = ".tokens"
_FILES_KEPT = 16
_BYTES_KEPT = 16 << 30  # in files other than that in use
_MOST_IN_MEMORY = 4 << 30  # bytes of text whose tokens are kept in memory if there is no cache


class TokenStore:
    """The tokens of a text in two read-only memory-mapped arrays, `train` and `validation`."""

    def __init__(
        self, key: str, path: Path | None, tokens: Tokens, vocab_size: int, validation: float
    ) -> None:
        self.key = key  # of the text and the tokenizer
        self.path = path  # of the file; None if the cache cannot be used, and the tokens are in memory
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
        progress: Progress = silent,
    ) -> TokenStore:
        """The tokens of `text`, from the cache folder if they were made before.

        The last part of them, the fraction `validation`, is kept for validation. The key of a cached file is
        a hash of the text and the tokenizer; a damaged file is made anew. If the user's own cache folder
        cannot be written, the tokens are kept in memory, with a warning. Raises DataError if the text is
        empty, or if a folder that was given cannot be written; then nothing is left behind. `progress` is
        called for each pass over the text.
        """
        if not 0 <= validation < 1:
            raise DataError(f"validation is a fraction from 0 to less than 1, and {validation} was given")
        given = None if cache is None else Path(cache)
        folder = CacheFolder(cache_folder(), "tokens") if given is None else CacheFolder(given, private=False)
        key = _Key(tokenizer)
        with progress("reading the text", size_of(text)) as advance:
            for piece in pieces(text):
                advance(key.add(piece))
        if not key.pieces:
            raise no_text(text)
        name = key.digest().hex() + _SUFFIX
        path = folder.path / name
        item = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        tokens = _mapped(folder, name, key.digest(), item)
        if tokens is None:
            try:
                with progress("tokenizing the text", size_of(text)) as advance:
                    stored = _write(folder, name, text, tokenizer, item, advance)
                tokens = _mapped(folder, name, stored, item)
            except OSError as error:
                if given is not None:
                    why = reason(error, path)
                    raise DataError(f"{path} could not be written: {why}") from error
                folder.warn(error)
        if tokens is None:
            return cls(path.stem, None, _in_memory(text, tokenizer, item), tokenizer.vocab_size, validation)
        with suppress(OSError):
            os.utime(path)
        _forget_old(path)
        return cls(path.stem, path, tokens, tokenizer.vocab_size, validation)

    def __len__(self) -> int:
        return len(self.train) + len(self.validation)


class _Key:
    """The key of cached tokens: a hash of the text, of where it is cut, and of the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = 0
        self._hash = blake2b(tokenizer.to_json().encode(), digest_size=32)

    def add(self, piece: str) -> int:
        """Add a piece of the text; its size in bytes."""
        data = piece.encode()
        self.pieces += 1
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)
        return len(data)

    def digest(self) -> bytes:
        return self._hash.digest()


def _write(
    folder: CacheFolder,
    name: str,
    text: str | Text,
    tokenizer: Tokenizer,
    item: np.dtype[Any],
    advance: Callable[[int], None],
) -> bytes:
    """Write the file of a text's tokens; the key that it contains, which is that of the text as it is now.

    If the text changed since its key was computed, the file is used this time, but not the next time, since
    its key does not match its name.
    """
    count = checksum = 0
    key = _Key(tokenizer)
    with folder.writing(name) as file:
        file.write(bytes(_HEADER.size))
        for piece in pieces(text):
            nbytes = key.add(piece)
            ids = tokenizer.encode(piece).astype(item)
            count += len(ids)
            checksum = zlib.crc32(ids.data, checksum)
            file.write(ids.data)
            advance(nbytes)
        if not count:
            raise no_text(text)
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, item.itemsize, count, key.digest(), checksum))
    return key.digest()


def _mapped(folder: CacheFolder, name: str, key: bytes, item: np.dtype[Any]) -> Tokens | None:
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


def _in_memory(text: str | Text, tokenizer: Tokenizer, item: np.dtype[Any]) -> Tokens:
    if isinstance(text, Text) and text.nbytes > _MOST_IN_MEMORY:
        raise DataError(
            f"there is no cache folder for the tokens of {format_bytes(text.nbytes)} of text, which are too "
            f"many for memory; make room in {cache_folder()}"
        )
    encoded = [tokenizer.encode(piece).astype(item) for piece in pieces(text)]
    tokens: Tokens = np.concatenate(encoded) if encoded else np.empty(0, item)
    if not len(tokens):
        raise no_text(text)
    tokens.flags.writeable = False
    return tokens


def _forget_old(used: Path) -> None:
    """Limit the size of the folder: the least recently used files are removed."""
    others = []
    with suppress(OSError):
        for entry in os.scandir(used.parent):
            if entry.name.endswith(_SUFFIX) and entry.name != used.name:
                others.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    kept = 0
    for number, (_, size, path) in enumerate(sorted(others, reverse=True), start=1):
        kept += size
        if number >= _FILES_KEPT or kept > _BYTES_KEPT:
            with suppress(OSError):  # another process may have removed it, or have it open on Windows
                os.unlink(path)
