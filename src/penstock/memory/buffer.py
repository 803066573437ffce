"""What users hold: a range of device memory that goes back to the pool by itself."""

from __future__ import annotations

from typing import Any

from penstock.drivers.driver import Driver, Event, Memory
from penstock.errors import BufferInUse
from penstock.memory.resource import Resource


class Usage:
    """Which command touched a memory last. All buffers that lie there share one, one after another too.

    Each command that touches the memory waits for the last one unless both are in one queue, so the last is
    all that has to be known: it is done only when all the others are.
    """

    __slots__ = ("batch", "event", "inherited", "viewers", "writer")

    def __init__(self) -> None:
        self.batch: Any = None  # the stream's batch that the command is in; None when it is in none
        self.event: Event | None = None
        self.inherited: Event | None = None  # the last use by a buffer that was here before
        self.viewers = 0  # open host views
        self.writer = False  # whether one of them may write

    @property
    def in_order(self) -> bool:
        """Whether the next kernel comes after the last use without waiting: that is a kernel, too."""
        return self.event is None or (self.batch is not None and self.batch.queue.runs_kernels)

    @property
    def own_event(self) -> Event | None:
        """The last use by this buffer, whose failure is one of what it holds; None if there was none."""
        return None if self.event is self.inherited else self.event

    def forget(self) -> None:
        """The last command is done."""
        self.batch = self.event = self.inherited = None


class Buffer:
    """Device memory of `nbytes` bytes. It returns to its pool when nothing refers to it any more.

    Dropping one at once is safe: its memory knows its last use, and whoever gets it next comes after that.
    """

    __slots__ = (
        "__weakref__", "_home", "_parent",
        "driver", "memory", "native", "nbytes", "offset", "place", "shared", "usage",
    )  # fmt: skip

    memory: Memory

    def __init__(self, driver: Driver, nbytes: int, home: Resource) -> None:
        """A buffer without memory, to which a pool gives some; `attach` then makes it usable."""
        self.driver = driver
        self.nbytes = nbytes
        self._home: Resource | None = home
        self._parent: Buffer | None = None

    def attach(self) -> Buffer:
        """Make the buffer usable, once it has its memory; itself."""
        memory = self.memory
        self.native = memory.native
        self.offset = 0
        self.place = (memory.serial, 0)  # where it lies, of all memory that there ever was
        usage = memory.usage
        if usage is None:
            usage = memory.usage = Usage()
        else:
            usage.inherited = usage.event
        self.usage: Usage = usage
        self.shared = False  # whether several values lie here, so that none may be written over
        return self

    @property
    def whole(self) -> Buffer:
        """The buffer of all the memory that this one is a part of; itself where it is no part."""
        return self if self._parent is None else self._parent.whole

    def view(self, offset: int, nbytes: int) -> Buffer:
        """The bytes from `offset` on as a buffer of its own; no copy, and this one stays alive with it."""
        part = self.part(offset, nbytes)
        part.shared = self.shared = True
        return part

    def part(self, offset: int, nbytes: int) -> Buffer:
        """The same as `view`, for bytes that nothing else will use: a value there may be written over."""
        alignment = self.driver.capabilities.offset_alignment
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not inside {self!r}")
        if (self.offset + offset) % alignment:
            raise ValueError(
                f"a view on {self.driver.name} begins at a multiple of {alignment}, not at {offset}"
            )
        part = Buffer.__new__(Buffer)
        part.driver, part.memory, part.usage = self.driver, self.memory, self.usage
        part.offset, part.nbytes = self.offset + offset, nbytes
        part.place = (self.memory.serial, part.offset)
        part.native = self.driver.view(self.memory, part.offset, max(nbytes, 1))
        part._home, part._parent = None, self
        part.shared = self.shared
        return part

    def refuse_if_viewed(self, reads_only: bool) -> None:
        """Raise BufferInUse if the host has a view that the use in question would disturb."""
        if self.usage.viewers and (self.usage.writer or not reads_only):
            raise BufferInUse(f"{self!r} is open in a host view; leave the view's with block first")

    def __del__(self) -> None:
        # The attributes are missing where __init__ or view() failed, or no memory was to be had.
        home, memory = getattr(self, "_home", None), getattr(self, "memory", None)
        if home is not None and memory is not None:
            usage = memory.usage
            if usage is not None and usage.batch is not None and not usage.batch.events:
                usage.forget()  # the batch is done: idle memory must not keep native events
            home.release(memory)

    def __repr__(self) -> str:
        return f"<Buffer of {self.nbytes} bytes on {self.driver.name}>"
