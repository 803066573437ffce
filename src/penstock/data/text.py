"""Sources of text: files and folders of the user, or the sources of the running Python.

A `Text` is read in pieces of about a MiB, any number of times. Errors of its files are noted in `skipped`,
and do not end the reading.
"""

from __future__ import annotations

import io
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from penstock.config import parse_bytes
from penstock.data.errors import DataError
from penstock.files import open_regular
from penstock.formatting import format_bytes

_SUFFIXES = re.compile(
    r"\.(txt|text|md|markdown|rst|org|tex|html?|xml|srt|log|csv|tsv|jsonl?|toml|ya?ml|ini|cfg|pyi?|c|h|cc|cpp|hpp"
    r"|cu|cl|rs|go|java|kt|scala|m?js|jsx|tsx?|css|rb|pl|php|lua|sh|sql|r|jl|hs|ml|swift|cs|f90)",
    re.IGNORECASE,
)
_NOT_SOURCES = frozenset(["site-packages", "dist-packages", "test", "tests", "__pycache__"])
LARGE = 16 << 20  # bytes of a text beyond which training does not wait until it is tokenized
_PIECE = 1 << 20  # bytes read at once
_SNIFFED = 8 << 10  # bytes that are searched for a zero, the sign of a binary file
# No tokenizer here merges across the start of white space, so a cut there changes no token.
_CUT = re.compile(rb"[!-~](?=[ \n])")
_CUT_SEARCHED = 4 << 10  # bytes at the end of a piece in which white space is searched
MARK = "\N{BYTE ORDER MARK}"  # some editors begin files with it; it is no text
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


# Shows a pass over a text while its context lasts: with a name and the bytes of the text, it gives a function
# that is called with the bytes of each piece that is done.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def silent(name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A Progress that shows nothing."""
    return nullcontext(lambda nbytes: None)


class Text:
    """Files of text, in order. Iterating reads them piece by piece, with a line break between two files.

    >>> text = ps.data.python_sources("64KiB")
    >>> text.nbytes == sum(text.sizes.values())
    True
    """

    def __init__(self, files: Mapping[Path, int], skipped: Mapping[Path, str] | None = None) -> None:
        self._sizes = dict(files)
        self.skipped = dict(skipped or {})  # why a file is not, or not completely, used
        self.replaced: dict[Path, int] = {}  # how many undecodable sequences of a file became U+FFFD

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order in which they are read."""
        return tuple(self._sizes)

    @property
    def sizes(self) -> dict[Path, int]:
        """The files and how many bytes each had when they were listed."""
        return dict(self._sizes)

    @property
    def nbytes(self) -> int:
        """Their total size when they were listed."""
        return sum(self._sizes.values())

    def __iter__(self) -> Iterator[str]:
        read = ""
        for path in self._sizes:
            between = "\n" if read else ""
            for piece in self._pieces(path):
                read = between + piece
                yield read
                between = ""

    def read(self) -> str:
        """The whole text."""
        return "".join(self)

    def summary(self) -> str:
        """A description of what is used, what is not and why."""
        lines = [f"{len(self._sizes)} files, {format_bytes(self.nbytes)}"]
        if self.replaced:
            number = sum(self.replaced.values())
            lines.append(
                f"not UTF-8, and replaced by U+FFFD: {number} places in {_some(map(str, self.replaced))}"
            )
        if self.skipped:
            lines.append(f"skipped: {_some(f'{path} ({why})' for path, why in self.skipped.items())}")
        return "\n".join(lines)

    def _pieces(self, path: Path) -> Iterator[str]:
        self.skipped.pop(path, None)
        self.replaced.pop(path, None)
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._sizes[path]:
                    self.skipped[path] = f"shrank from {self._sizes[path]} to {size} bytes"
                    return
                for number, data in enumerate(pieces_of(file, size)):
                    piece, wrong = decoded(data)
                    if wrong:
                        self.replaced[path] = self.replaced.get(path, 0) + wrong
                    yield piece if number else piece.removeprefix(MARK)
                if file.tell() < size:
                    self.skipped[path] = f"shrank while it was read; its first {file.tell()} bytes are used"
        except FileNotFoundError:
            self.skipped[path] = "vanished"
        except OSError as error:
            self.skipped[path] = _reason(error)


def find_text(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Text:
    """The text of a file, of a folder and the folders in it, or of a list of both.

    Of a folder, files with the suffixes of text and of source code are used, in a fixed mixed order, so that
    the end of the text is like the rest. Hidden files are left out. Empty, binary and unreadable files are
    skipped, and listed in `Text.skipped`. Raises DataError if a path does not exist or nothing is left.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "a.txt")
    >>> _ = path.write_text("the text")
    >>> ps.data.find_text(path).read()
    'the text'
    """
    given = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    skipped: dict[Path, str] = {}
    candidates: dict[Path, None] = {}
    for path in given:
        if os.path.isdir(path):
            inside = [file for file in _walk(path, skipped) if _SUFFIXES.fullmatch(file.suffix)]
            candidates |= dict.fromkeys(_mixed(inside, path))
        elif os.path.lexists(path):
            candidates[path] = None
        else:
            raise DataError(f"there is no file or folder {path}")
    sizes = {}
    for path in candidates:
        size, why = _examine(path)
        if why:
            skipped[path] = why
        else:
            sizes[path] = size
    text = Text(sizes, skipped)
    if not sizes:
        raise no_text(text, _some(map(str, given)) if given else "an empty list of paths")
    return text


def python_sources(limit: int | str = "8MiB") -> Text:
    """Text that every machine has: the sources of Python's standard library, without its tests.

    Whole files in a fixed, mixed order, until the next file would exceed `limit` bytes.

    >>> ps.data.python_sources("64KiB").nbytes <= 64 << 10
    True
    """
    folder = Path(sysconfig.get_path("stdlib"))
    skipped: dict[Path, str] = {}
    sources = [path for path in _walk(folder, skipped, _NOT_SOURCES) if path.suffix == ".py"]
    sizes: dict[Path, int] = {}
    left = parse_bytes(limit)
    for path in _mixed(sources, folder):
        size, why = _examine(path)
        if why:
            continue  # an empty __init__.py is nothing to report
        if size > left:
            break
        sizes[path] = size
        left -= size
    if not sizes:
        raise no_text(Text({}, skipped), f"{folder} within {format_bytes(parse_bytes(limit))}")
    return Text(sizes, skipped)


def pieces(text: str | Text) -> Iterator[str]:
    """A string or a Text in pieces that are cut by the same rules."""
    if isinstance(text, Text):
        yield from text
    else:
        data = text.encode(errors="replace")  # a lone surrogate becomes a question mark
        for piece in pieces_of(io.BytesIO(data), len(data)):
            yield piece.decode()


def size_of(text: str | Text) -> int:
    """About how many bytes a text has."""
    return text.nbytes if isinstance(text, Text) else len(text)


def no_text(text: str | Text, where: str = "") -> DataError:
    """The error for empty text; it names the files and why each was not used."""
    if isinstance(text, str):
        return DataError("the text is empty")
    reasons = _some(f"{path} ({why})" for path, why in text.skipped.items())
    where = where or _some(map(str, text.files))
    return DataError(f"there is no text in {where}" + (f"; skipped: {reasons}" if reasons else ""))


def _walk(folder: Path, skipped: dict[Path, str], left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        skipped[Path(error.filename or folder)] = _reason(error)

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _mixed(paths: Iterable[Path], folder: Path) -> list[Path]:
    """A mixed order that depends on the names only."""

    def key(path: Path) -> bytes:
        return blake2b(path.relative_to(folder).as_posix().encode(errors="surrogateescape")).digest()

    return sorted(paths, key=key)


def _examine(path: Path) -> tuple[int, str]:
    """A file's size, and why it cannot be used, if so."""
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            return 0, "not a regular file"
        if not info.st_size:
            return 0, "empty"
        with open_regular(path) as file:
            return info.st_size, "binary" if b"\0" in file.read(_SNIFFED) else ""
    except OSError as error:
        return 0, _reason(error)


def pieces_of(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The bytes from here to `end`, cut where that changes no token; fewer if the file ends before."""
    left, rest = end - file.tell(), b""
    while left and (block := file.read(min(_PIECE, left))):
        left = end - file.tell()
        data = rest + block
        cut = _cut(data) if left else len(data)
        rest = data[cut:]
        if cut:
            yield data[:cut]
    if rest:
        yield rest


def _cut(data: bytes) -> int:
    """Where to end a piece: before white space, or at least between two characters."""
    start = max(len(data) - _CUT_SEARCHED, 0)
    cuts = [match.end() for match in _CUT.finditer(data, start)]
    if cuts:
        return cuts[-1]
    cut = len(data) - 1
    while cut > 0 and len(data) - cut < 4 and 0x80 <= data[cut] < 0xC0:
        cut -= 1
    return cut


def cut_position(file: BinaryIO, place: int) -> int:
    """A place at or shortly before another where a cut changes no token."""
    start = max(place - _CUT_SEARCHED, 0)
    file.seek(start)
    return start + _cut(file.read(place - start))


def decoded(data: bytes) -> tuple[str, int]:
    """The characters, and how many of them replace what is not UTF-8."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return text, text.count(_REPLACEMENT) - data.count(_REPLACEMENT.encode())


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _some(items: Iterable[str], most: int = 5) -> str:
    listed = list(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
