"""A large text in chunks: parts of its files, known before anything of them is read.

Chunks end where a cut changes no token, so the tokens of all chunks are the tokens of the text.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from penstock.data.errors import DataError
from penstock.data.text import MARK, Text, cut_position, decoded, pieces_of
from penstock.files import open_regular

_FIRST = 1 << 20  # bytes of the first chunk; each is twice as long as that before it,
_LONGEST = 64 << 20  # up to this
_SAMPLED = 64 << 10  # bytes of each part of a sample


@dataclass(frozen=True)
class Part:
    """Some bytes of a file."""

    path: str
    start: int
    stop: int
    size: int  # of the file when the text was divided
    modified: int  # the file's time then, in nanoseconds
    separated: bool  # whether a line break comes before it, as between two files

    def read(self) -> Iterator[tuple[str, int]]:
        """Its text in pieces, each with how many undecodable sequences of it became U+FFFD.

        A DataError says if the file is not what it was.
        """
        try:
            with open_regular(Path(self.path)) as file:
                self._check(file.fileno())
                file.seek(self.start)
                for number, data in enumerate(pieces_of(file, self.stop)):
                    piece, replaced = decoded(data)
                    if not number and not self.start:
                        piece = ("\n" if self.separated else "") + piece.removeprefix(MARK)
                    yield piece, replaced
                self._check(file.fileno())
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _check(self, file: int) -> None:
        now = os.fstat(file)
        if now.st_size < self.size:
            raise DataError(f"{self.path} shrank from {self.size} to {now.st_size} bytes {_CHANGED}")
        if now.st_mtime_ns != self.modified:
            raise DataError(f"{self.path} was changed {_CHANGED}")


_CHANGED = "while it was tokenized, so its tokens are no longer those of the text; train on a copy of it"
Chunk = tuple[Part, ...]


class DividedText:
    """The files of a large text as a row of bytes that can be cut anywhere."""

    def __init__(self, text: Text) -> None:
        self._files: list[tuple[str, int, int, int]] = []  # path, first byte in the row, size, time
        self.nbytes = 0
        for path, size in text.sizes.items():
            try:
                modified = os.stat(path).st_mtime_ns
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
            self._files.append((str(path), self.nbytes, size, modified))
            self.nbytes += size

    def key(self, tokenizer: str, validation: float) -> str:
        """A key of the tokens: of the files' paths, sizes and times, and of a tokenizer's JSON."""
        digest = blake2b(repr((tokenizer, validation)).encode(errors="surrogatepass"), digest_size=32)
        for path, _, size, modified in self._files:
            digest.update(repr((os.path.abspath(path), size, modified)).encode(errors="surrogatepass"))
        return digest.hexdigest()

    def split(self, fraction: float) -> int:
        """The place in the row of bytes before which a fraction of it lies, at a good cut."""
        return self._cut(int(self.nbytes * fraction))

    def chunks(self, end: int) -> list[Chunk]:
        """The text up to a place, in chunks."""
        result, start, length = [], 0, _FIRST
        while start < end:
            stop = end if end - start <= length else self._cut(start + length)
            result.append(self._parts(start, stop))
            start, length = stop, min(2 * length, _LONGEST)
        return result

    def sample(self, most: int, start: int = 0) -> str:
        """The text from a place on, or if that is more than `most` bytes, parts of it at even distances."""
        end = self.nbytes
        if end - start <= most:
            places = [(start, end)]
        else:
            count = most // _SAMPLED
            begins = [start + (end - start - _SAMPLED) * number // (count - 1) for number in range(count)]
            places = [(max(self._cut(begin), start), self._cut(begin + _SAMPLED)) for begin in begins]
        parts = [part for place in places for part in self._parts(*place)]
        return "".join(piece for part in parts for piece, _ in part.read())

    def _parts(self, start: int, stop: int) -> Chunk:
        return tuple(
            Part(path, max(start - first, 0), min(stop - first, size), size, modified, 0 < first >= start)
            for path, first, size, modified in self._files[self._index(start) : self._index(stop - 1) + 1]
        )

    def _cut(self, place: int) -> int:
        """A place at or shortly before another that is good to cut: between files, or before white space."""
        path, first, size, _ = self._files[self._index(place)]
        if first < place < first + size:
            with suppress(OSError), open_regular(Path(path)) as file:  # an error comes when it is read
                return first + cut_position(file, place - first)
        return place

    def _index(self, place: int) -> int:
        """The number of the file that has the byte at a place, or the last."""
        return bisect_right(self._files, place, key=lambda file: file[1]) - 1
