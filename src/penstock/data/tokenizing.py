"""The process that tokenizes chunks of a text: `main`.

It reads a job as a line of JSON, writes a file for each chunk, and a line of JSON for each file: the chunk's
number and how much of it was not UTF-8. A line with an error is its last. It ends when its input is closed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from penstock.cache import CacheFolder
from penstock.data.chunks import Chunk, Part
from penstock.data.errors import DataError
from penstock.data.files import reason
from penstock.data.token_files import SUFFIX, Tokens, TokenWriter, mapped_tokens, token_dtype
from penstock.data.tokenizer import Tokenizer, tokenizer_from_json


@dataclass(frozen=True)
class Job:
    """Chunks, the tokenizer, and the folder for their tokens, which is the cache's or a folder of its own."""

    key: str
    tokenizer: str
    vocab_size: int
    root: str
    part: str
    private: bool
    chunks: Sequence[Chunk]

    def to_json(self, numbers: Sequence[int]) -> str:
        """A line for the process that tokenizes some of the chunks."""
        chunks = [[number, [asdict(part) for part in self.chunks[number]]] for number in numbers]
        return json.dumps({**self.__dict__, "chunks": chunks})

    @property
    def folder(self) -> CacheFolder:
        """The folder of the files."""
        return CacheFolder(Path(self.root), self.part, self.private)

    def name(self, number: int) -> str:
        """The name of a chunk's file."""
        return f"{self.key}-{number:05}{SUFFIX}"

    def tokens(self, number: int) -> Tokens | None:
        """The tokens of a chunk, from its file; None if that is missing or damaged."""
        item = token_dtype(self.vocab_size)
        return mapped_tokens(self.folder, self.name(number), self._chunk_key(number), item)

    def make(self, number: int, chunk: Chunk, tokenizer: Tokenizer) -> int:
        """Write the file of a chunk; how much of the chunk was not UTF-8."""
        total = 0
        path = self.folder.path / self.name(number)
        try:
            with self.folder.writing(self.name(number)) as file:
                writer = TokenWriter(file, token_dtype(self.vocab_size))
                for part in chunk:
                    for piece, replaced in part.read():
                        writer.add(tokenizer.encode(piece))
                        total += replaced
                writer.finish(self._chunk_key(number))
        except OSError as error:
            raise DataError(f"{path} could not be written: {reason(error, path)}") from error
        return total

    def _chunk_key(self, number: int) -> bytes:
        return blake2b(f"{self.key} {number}".encode(), digest_size=32).digest()


def main() -> None:
    """Do the job on the standard input."""
    given = json.loads(_line())
    threading.Thread(target=_end_with_input, daemon=True).start()
    chunks = {number: tuple(Part(**part) for part in parts) for number, parts in given["chunks"]}
    job = Job(**{**given, "chunks": ()})
    try:
        tokenizer = tokenizer_from_json(job.tokenizer)
        for number, chunk in chunks.items():
            replaced = 0 if job.tokens(number) is not None else job.make(number, chunk, tokenizer)
            _say({"chunk": number, "replaced": replaced})
    except DataError as error:
        _say({"error": str(error)})
    except Exception as error:
        _say({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.flush()
    os._exit(0)  # the thread waits for input, and would hold up the end of Python


def _line() -> bytes:
    data = bytearray()
    while not data.endswith(b"\n") and (more := os.read(0, 1 << 16)):
        data += more
    return bytes(data)


def _end_with_input() -> None:
    while os.read(0, 1 << 10):
        pass
    os._exit(1)  # the process that wanted the tokens is gone


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)
