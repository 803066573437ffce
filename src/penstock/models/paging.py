"""Pages of positions: which are free, which hold a prefix that later sequences can share, and who uses them.

A page that is full is known by a digest of all tokens up to its end. It stays known when nobody uses it any
more, until its memory is needed: then the page goes that was not used for the longest time.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.models.model import LanguageModel

PAGE = 16  # positions of a page


def pages_of(positions: int) -> int:
    """The pages that so many positions need."""
    return -(-positions // PAGE)


def page_bytes(model: LanguageModel) -> int:
    """The bytes of a page, of all layers of a model."""
    items = sum(2 * shape.heads * shape.head_size for shape in model.cache_shapes)
    return PAGE * items * model.head_weight.dtype.itemsize


def most_pages(model: LanguageModel) -> int:
    """How many pages there can be: a layer has fewer than 2**30 items, so that indices have 32 bits."""
    items = max(2 * shape.heads * shape.head_size for shape in model.cache_shapes) * PAGE
    return ((1 << 30) - 1) // items


def token_array(tokens: Sequence[int]) -> array[int]:
    """Token ids as an array; struct.error if any is no integer of 32 bits.

    By way of bytes: `array` and NumPy take four times as long for a list.
    """
    return array("i", struct.pack(f"{len(tokens)}i", *tokens))


def digests(tokens: Sequence[int], size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """For each page of `size` tokens that is full, a digest of all tokens up to its end.

    `known` are those of the first pages.
    """
    result = list(known)
    new = memoryview(array("i", tokens[len(result) * size :])).cast("B")
    nbytes = size * array("i").itemsize
    before = result[-1] if result else b""
    for start in range(0, len(new) - nbytes + 1, nbytes):
        page = hashlib.blake2b(before, digest_size=16)
        page.update(new[start : start + nbytes])
        before = page.digest()
        result.append(before)
    return result


class Pages:
    """The account of `count` pages, each used by any number of sequences."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))
        self._users = [0] * count
        self._known: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # known, the least recently used first

    @property
    def available(self) -> int:
        """How many pages can be taken."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """How many pages sequences use."""
        return self.count - self.available

    @property
    def kept(self) -> int:
        """How many pages nobody uses, and hold a prefix that is known."""
        return len(self._unused)

    def take(self, count: int) -> list[int]:
        """Pages for a sequence; there have to be so many."""
        assert count <= self.available
        for _ in range(count - len(self._free)):
            page, _ = self._unused.popitem(last=False)
            del self._known[self._digests.pop(page)]
            self._free.insert(0, page)
        pages = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        for page in pages:
            self._users[page] = 1
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """A sequence no longer uses these pages. Of those that nobody uses, the last are needed first."""
        for page in reversed(list(pages)):
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._digests:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def share(self, prefix: Iterable[bytes]) -> list[int]:
        """The pages of the longest beginning that is known, for a further sequence."""
        pages = []
        for digest in prefix:
            if digest not in self._known:
                break
            page = self._known[digest]
            self._unused.pop(page, None)
            self._users[page] += 1
            pages.append(page)
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """A page in use is full now; it is known by its digest, unless another page is already."""
        if digest not in self._known and page not in self._digests:
            self._known[digest] = page
            self._digests[page] = digest

    @property
    def knows_any(self) -> bool:
        """Whether there is a page with any digest."""
        return bool(self._known)

    def knows(self, digest: bytes) -> bool:
        """Whether there is a page with this digest."""
        return digest in self._known
