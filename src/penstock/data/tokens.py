"""Tokens on disk: a text is tokenized once and then memory-mapped, so that its size does not matter."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from penstock.cache import CacheFolder
from penstock.config import cache_folder
from penstock.data.batches import ChunkBatches, TextBatches
from penstock.data.chunks import DividedText
from penstock.data.errors import DataError
from penstock.data.files import reason
from penstock.data.growing import GrowingTokens
from penstock.data.text import LARGE, Progress, Text, no_text, pieces, silent, size_of
from penstock.data.token_files import SUFFIX, Tokens, TokenWriter, forget_old, mapped_tokens, token_dtype
from penstock.data.tokenizer import Tokenizer
from penstock.data.tokenizing import Job
from penstock.formatting import format_bytes

_MOST_IN_MEMORY = 4 << 30  # bytes of text whose tokens are kept in memory if there is no cache
_MOST_VALIDATION = 2 << 20  # bytes of a large text whose tokens validate
_CHUNKS = "chunks-"  # begins the key of a large text


class TokenStore:
    """The tokens of a text: `train` and `validation`, read-only memory-mapped arrays.

    Of a large text, `train` is `GrowingTokens`, which are made while the first of them are used. `batches`
    gives batches of either.

    >>> import tempfile
    >>> bytes_of = ps.data.ByteTokenizer()
    >>> store = ps.data.TokenStore.open("some text", bytes_of, cache=tempfile.mkdtemp())
    >>> len(store.train), len(store.validation)
    (8, 1)
    """

    def __init__(
        self,
        key: str,
        path: Path | None,
        train: Tokens | GrowingTokens,
        validation: Tokens,
        tokenizer: Tokenizer,
    ) -> None:
        self.key = key  # of the text and the tokenizer
        self.path = path  # of the file; None if the tokens are in memory or in chunks
        self.vocab_size = tokenizer.vocab_size
        self.train, self.validation = train, validation

    @classmethod
    def open(
        cls,
        text: str | Text,
        tokenizer: Tokenizer,
        validation: float = 0.1,
        cache: str | os.PathLike[str] | None = None,
        progress: Progress = silent,
        begun: str | None = None,
    ) -> TokenStore:
        """The tokens of `text`, from the cache folder if they were made before.

        The last part of them, the fraction `validation`, is kept for validation. The key of a cached file is
        a hash of the text and the tokenizer; a damaged file is made anew. If the user's own cache folder
        cannot be written, the tokens are kept in memory, with a warning. Raises DataError if the text is
        empty, or if a folder that was given cannot be written; then nothing is left behind. `progress` is
        called for each pass over the text.

        A text of files of more than 16 MiB is tokenized in chunks by other processes, while the tokens that
        are there are used. Its key is a hash of its files' paths, sizes and times; the fraction `validation`
        is of its bytes, and of it at most 2 MiB are used, at even distances. `begun` is the key that a run
        began with, which is resumed in its own way.
        """
        if not 0 <= validation < 1:
            raise DataError(f"validation is a fraction from 0 to less than 1, and {validation} was given")
        given = None if cache is None else Path(cache)
        folder = CacheFolder(cache_folder(), "tokens") if given is None else CacheFolder(given, private=False)
        if isinstance(text, Text) and text.nbytes > LARGE and (begun or _CHUNKS).startswith(_CHUNKS):
            return cls._in_chunks(text, tokenizer, validation, folder, given, progress)
        key, path, tokens = _whole(text, tokenizer, folder, given, progress)
        split = int(len(tokens) * (1 - validation))
        return cls(key, path, tokens[:split], tokens[split:], tokenizer)

    @classmethod
    def _in_chunks(
        cls,
        text: Text,
        tokenizer: Tokenizer,
        validation: float,
        folder: CacheFolder,
        given: Path | None,
        progress: Progress,
    ) -> TokenStore:
        """The tokens of a large text, which processes begin to make."""
        temporary = None
        try:
            folder.prepare()
        except OSError as error:
            if given is not None:
                why = reason(error, folder.path)
                raise DataError(f"{folder.path} could not be written: {why}") from error
            folder.warn(error)
            temporary = TemporaryDirectory(prefix="penstock-")
            folder = CacheFolder(Path(temporary.name), private=False)
        divided = DividedText(text)
        split = divided.split(1 - validation)
        key = divided.key(tokenizer.to_json(), validation)
        root, part, private = folder.place
        job = Job(
            key, tokenizer.to_json(), tokenizer.vocab_size, str(root), part, private, divided.chunks(split)
        )
        forget_old(folder.path, [job.name(number) for number in range(len(job.chunks))])
        train = GrowingTokens(job, temporary)
        with progress("tokenizing the beginning", 0):
            if job.tokens(0) is None:  # sooner than a process has started
                job.make(0, job.chunks[0], tokenizer)
            kept = divided.sample(_MOST_VALIDATION, split)
            tokens = _encoded(kept, tokenizer, token_dtype(tokenizer.vocab_size))
        return cls(_CHUNKS + key, None, train, tokens, tokenizer)

    def batches(self, batch: int, context: int, seed: int, start: int = 0) -> TextBatches | ChunkBatches:
        """Batches of the tokens to train on: `TextBatches`, or `ChunkBatches` of a large text."""
        if isinstance(self.train, GrowingTokens):
            return ChunkBatches(self.train, batch, context, seed, start)
        return TextBatches(self.train, batch, context, seed, start)

    @property
    def replaced(self) -> int:
        """Of a large text: how many sequences that are not UTF-8 became U+FFFD so far."""
        return self.train.replaced if isinstance(self.train, GrowingTokens) else 0

    def close(self) -> None:
        """End the processes that tokenize a large text; the next wait for its tokens starts them anew."""
        if isinstance(self.train, GrowingTokens):
            self.train.close()

    def summary(self) -> str:
        """How many tokens there are, as far as that is known."""
        kinds = f"tokens of {self.vocab_size:,} kinds"
        if isinstance(self.train, GrowingTokens):
            return f"{kinds}, made while training goes on"
        return f"{len(self.train) + len(self.validation):,} {kinds}"

    def __len__(self) -> int:
        """How many tokens there are, those of validation included. Waits until all are made."""
        return len(self.train) + len(self.validation)


def _whole(
    text: str | Text, tokenizer: Tokenizer, folder: CacheFolder, given: Path | None, progress: Progress
) -> tuple[str, Path | None, Tokens]:
    """All tokens of a text with their key, and the path of their file unless they are in memory."""
    key = _Key(tokenizer)
    with progress("reading the text", size_of(text)) as advance:
        for piece in pieces(text):
            advance(key.add(piece))
    if not key.pieces:
        raise no_text(text)
    name = key.digest().hex() + SUFFIX
    path = folder.path / name
    item = token_dtype(tokenizer.vocab_size)
    tokens = mapped_tokens(folder, name, key.digest(), item)
    if tokens is None:
        try:
            with progress("tokenizing the text", size_of(text)) as advance:
                stored = _write(folder, name, text, tokenizer, item, advance)
            tokens = mapped_tokens(folder, name, stored, item)
        except OSError as error:
            if given is not None:
                raise DataError(f"{path} could not be written: {reason(error, path)}") from error
            folder.warn(error)
    if tokens is None:
        return path.stem, None, _in_memory(text, tokenizer, item)
    with suppress(OSError):
        os.utime(path)
    forget_old(path.parent, [path.name])
    return path.stem, path, tokens


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
    key = _Key(tokenizer)
    with folder.writing(name) as file:
        writer = TokenWriter(file, item)
        for piece in pieces(text):
            nbytes = key.add(piece)
            writer.add(tokenizer.encode(piece))
            advance(nbytes)
        if not writer.count:
            raise no_text(text)
        writer.finish(key.digest())
    return key.digest()


def _in_memory(text: str | Text, tokenizer: Tokenizer, item: np.dtype[Any]) -> Tokens:
    if isinstance(text, Text) and text.nbytes > _MOST_IN_MEMORY:
        raise DataError(
            f"there is no cache folder for the tokens of {format_bytes(text.nbytes)} of text, which are too "
            f"many for memory; make room in {cache_folder()}"
        )
    tokens = _encoded(text, tokenizer, item)
    if not len(tokens):
        raise no_text(text)
    return tokens


def _encoded(text: str | Text, tokenizer: Tokenizer, item: np.dtype[Any]) -> Tokens:
    encoded = [tokenizer.encode(piece).astype(item) for piece in pieces(text)]
    tokens: Tokens = np.concatenate(encoded) if encoded else np.empty(0, item)
    tokens.flags.writeable = False
    return tokens
