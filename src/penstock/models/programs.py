"""The programs of a decoder: one for each bucket of sizes, and which takes a step until its own is built.

Building a program takes seconds where kernels are compiled, and all sequences would wait for it. So an engine
first builds a few programs that cover all others: with more rows, longer prompts, and everything computed
that a sequence may need. A step that needs another program is taken by the smallest that covers it, while a
thread compiles kernels, of one program at a time, and first of that which most steps needed. Only compilers
run in that thread: anything else would take Python's lock from the steps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.lru import LRU
from penstock.models.sampling import Needs
from penstock.tensor.jit import jit

_MOST = 128  # programs beside those that cover others; the least recently used is dropped


def bucket(number: int, least: int, most: int, factor: int = 2) -> int:
    """The smallest power of `factor` times `least` that is not below a number, but at most `most`."""
    size = least
    while size < number:
        size *= factor
    return min(size, most)


class Bucket(NamedTuple):
    """The sizes of a step."""

    rows: int
    length: int  # tokens of a prompt's part; 0: the token of the last step
    width: int  # pages of a row of the table
    fresh: bool  # all sequences start here
    needs: Needs

    def covers(self, other: Bucket) -> bool:
        """Whether a step of the other bucket can be computed in this one."""
        return (
            self.rows >= other.rows
            and bool(self.length) == bool(other.length)
            and self.length >= other.length
            and self.width >= other.width
            and (other.fresh or not self.fresh)
            and self.needs.cover(other.needs)
        )

    @property
    def work(self) -> tuple[int, ...]:
        """What decides which of several buckets costs the least."""
        return self.rows * max(self.length, 1), sum(self.needs), self.width, not self.fresh


def covering(slots: int, context: int, tokens: int, shortest: int, width: int) -> Iterator[Bucket]:
    """Buckets that cover all others with up to so many pages, of steps of up to so many `tokens`."""
    lengths = [min(shortest, context)]
    while lengths[-1] < min(tokens, context):
        lengths.append(bucket(lengths[-1] + 1, lengths[0], context))
    shapes: list[tuple[int, int]] = []
    rows = slots
    for length in lengths:
        rows = min(rows, bucket(max(tokens // length, 1) + 1, 1, slots * 2) // 2)
        shapes = [shape for shape in shapes if shape[0] > rows]
        shapes.append((rows, length))
    # Two shapes have a program together, of twice the tokens: each takes seconds until an engine is ready.
    together = [(shapes[at][0], shapes[at : at + 2][-1][1]) for at in range(0, len(shapes), 2)]
    everything = Needs(*[True] * len(Needs._fields))
    for rows, length in ((slots, 0), *together):
        yield Bucket(rows, length, width, False, everything)


class Programs:
    """Programs by their buckets."""

    def __init__(
        self, make: Callable[[Bucket], Any], compiling: Callable[[Any, Bucket], Callable[[], None]]
    ) -> None:
        """`make` gives the program of a bucket, which is built when it is first called.

        `compiling` plans a program, and gives a function that compiles its kernels, in any thread.
        """
        self._make, self._compiling = make, compiling
        self._covering: dict[Bucket, Any] = {}
        self._others = LRU[Bucket, Any](_MOST)
        self._missed = Counter[Bucket]()  # steps that another program took
        self._failed: set[Bucket] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._coming: tuple[Bucket, Any, Future[None]] | None = None  # whose kernels are being compiled

    def __len__(self) -> int:
        return len(self._covering) + len(self._others)

    def __iter__(self) -> Iterator[tuple[Bucket, Any]]:
        yield from (*self._covering.items(), *self._others.items())

    def cover(self, bucket: Bucket) -> Any:
        """The program of a bucket that may take the steps of others, from now on."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock programs")
        return self._covering.setdefault(bucket, self._make(bucket))

    def take(self, wanted: Bucket) -> tuple[Bucket, Any]:
        """The bucket in which a step is computed, and its program."""
        self._arrive()
        if self._thread is not None and wanted.length:
            # Draws of few rows cost a prompt next to nothing, and there are half as many programs to build.
            wanted = wanted._replace(needs=wanted.needs._replace(draws=True))
        program = self._covering.get(wanted) or self._others.use(wanted)
        if program is not None:
            return wanted, program
        able = [item for item in self if item[0].covers(wanted)] if self._thread is not None else []
        if not able:
            program = self._others[wanted] = self._make(wanted)
            return wanted, program
        if wanted not in self._failed:
            self._missed[wanted] += 1
        if self._coming is None and self._missed:
            self._begin(self._missed.most_common(1)[0][0])
        return min(able, key=lambda item: item[0].work)

    def _begin(self, wanted: Bucket) -> None:
        """Have the kernels of a program compiled."""
        del self._missed[wanted]
        program = self._make(wanted)
        assert self._thread is not None
        try:
            compiles = self._compiling(program, wanted)
        except PenstockError:  # of memory, perhaps; others cover it, and no step fails
            self._failed.add(wanted)
        else:
            self._coming = wanted, program, self._thread.submit(compiles)

    def _arrive(self) -> None:
        """Take a program whose kernels are compiled by now."""
        if self._coming is None or not self._coming[2].done():
            return
        wanted, program, compiled = self._coming
        self._coming = None
        del self._missed[wanted]  # by steps that were taken meanwhile
        if compiled.exception() is None:
            self._others[wanted] = program
        else:
            self._failed.add(wanted)

    def close(self) -> None:
        """Compile nothing more in the background."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = self._coming = None


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method as a function that does not keep its object, which may hold it, alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **fixed: Any) -> Any:
        bound = reference()
        assert bound is not None
        return bound(*args, **fixed)

    return call


def jitted(method: Callable[..., Any], **fixed: Any) -> Any:
    """A jitted method, which does not keep its object alive."""
    call = weakly(method)

    def run(*args: Any) -> Any:
        return call(*args, **fixed)

    return jit(run)
