"""Buffers: ranges of device memory that return to the pool when they are no longer referenced."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.drivers.driver import Driver, Event, Memory
from penstock.errors import BufferInUse


class Usage:
    """The last command that touched an allocation; shared by all present and later buffers in it.

    Each command that touches the memory waits for the previous command, or is in the same queue. So when the
    last command is done, all others are.
    """

    __slots__ = ("batch", "event", "inherited", "viewers", "writer")

    def __init__(self) -> None:
        self.batch: Any = None  # the stream's batch with the command, or None
        self.event: Event | None = None
        self.inherited: Event | None = None  # the last use by an earlier buffer in this memory
        self.viewers = 0  # open host views
        self.writer = False  # whether any of them may write

    @property
    def in_order(self) -> bool:
        """Whether the next kernel follows the last use without a wait, as kernels share a queue."""
        return self.event is None or (self.batch is not None and self.batch.queue.runs_kernels)

    @property
    def own_event(self) -> Event | None:
        """The last use by this buffer, whose failure makes its contents invalid; None if there was none."""
        return None if self.event is self.inherited else self.event

    def forget(self) -> None:
        """Note that the last command is done."""
        self.batch = self.event = self.inherited = None


class Source(Protocol):
    """Where the memory of buffers comes from, and goes to."""

    def give(self, owner: Any, nbytes: int, unused: bool = False) -> None:
        """Set `owner.memory`."""
        ...

    def release(self, memory: Memory) -> None:
        """Take memory back, which commands may still use."""
        ...


class Buffer:
    """Device memory of `nbytes` bytes. It returns to its pool when nothing refers to it.

    It may be dropped while commands use it: the memory knows its last use, and the next user waits for it.

    >>> ps.default_device().empty(16).nbytes
    16
    """

    __slots__ = (
        "__weakref__", "_home", "_parent",
        "driver", "hosted", "memory", "native", "nbytes", "offset", "place", "shared", "usage",
    )  # fmt: skip

    memory: Memory

    driver: Driver
    nbytes: int
    native: Any  # the argument that a kernel takes
    offset: int
    place: tuple[int, int]
    usage: Usage
    shared: bool  # whether several values share it, so that it must not be overwritten
    hosted: bool  # whether it is pinned memory of the host for state, which no kernel takes
    _home: Source | None
    _parent: Buffer | None

    @property
    def whole(self) -> Buffer:
        """The buffer that this buffer is a part of, at the top; itself if it is no part."""
        return self if self._parent is None else self._parent.whole

    def view(self, offset: int, nbytes: int) -> Buffer:
        """The bytes from `offset` on as another buffer, without a copy; it keeps this buffer alive."""
        part = self.part(offset, nbytes)
        part.shared = self.shared = True
        return part

    def part(self, offset: int, nbytes: int) -> Buffer:
        """Like `view`, for bytes that nothing else uses: a value there may be overwritten."""
        alignment = self.driver.capabilities.offset_alignment
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not inside {self!r}")
        if (self.offset + offset) % alignment:
            raise ValueError(
                f"a view on {self.driver.name} starts at a multiple of {alignment}, not at {offset}"
            )
        part = Buffer.__new__(Buffer)
        part.driver, part.memory, part.usage = self.driver, self.memory, self.usage
        part.offset, part.nbytes = self.offset + offset, nbytes
        part.place = (self.memory.serial, part.offset)
        part.native = self.driver.view(self.memory, part.offset, max(nbytes, 1))
        part._home, part._parent = None, self
        part.shared, part.hosted = self.shared, self.hosted
        return part

    def lend(self) -> None:
        """Give the memory back to the pool; this buffer and its parts are not to be used until `regain`."""
        home, self._home = self._home, None
        if home is not None:
            home.release(self.memory)

    def regain(self, other: Buffer) -> bool:
        """Have the memory of another buffer, which loses it, if that is the memory that was lent."""
        if other.memory is not self.memory or self._home is not None:
            return False
        self._home, other._home = other._home, None
        return True

    def refuse_if_viewed(self, reads_only: bool) -> None:
        """Raise BufferInUse if the host has a view that conflicts with this use."""
        if self.usage.viewers and (self.usage.writer or not reads_only):
            raise BufferInUse(f"{self!r} is open in a host view; leave the view's with block first")

    def __del__(self) -> None:
        try:
            home, memory = self._home, self.memory
        except AttributeError:  # __init__ or part() failed, or there was no memory
            return
        if home is not None:
            home.release(memory)

    def __repr__(self) -> str:
        return f"<Buffer of {self.nbytes} bytes on {self.driver.name}>"


_new = Buffer.__new__


def new_buffer(driver: Driver, nbytes: int, home: Source, unused: bool = False) -> Buffer:
    """A buffer in memory that `home` gives and takes back. Raises OutOfDeviceMemory.

    `unused`: no pending command should still use the memory. A function, since Python takes twice the time to
    call a class.
    """
    buffer = _new(Buffer)
    buffer.driver = driver
    buffer.nbytes = nbytes
    buffer._home = home
    buffer._parent = None
    home.give(buffer, nbytes, unused)  # it is noted in this object at once, so that an interrupt leaks none
    memory = buffer.memory
    buffer.native = memory.native
    buffer.offset = 0
    buffer.place = memory.place
    usage = memory.usage
    if usage is None:
        usage = memory.usage = Usage()
    else:
        usage.inherited = usage.event
    buffer.usage = usage
    buffer.shared = buffer.hosted = False
    return buffer
