"""The device: a driver, its memory and its stream in one object."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future as Result
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.config import Settings, parse_bytes
from penstock.drivers.driver import Capabilities, Driver, Kernel, Source
from penstock.errors import OutOfDeviceMemory
from penstock.living import Living
from penstock.lru import LRU
from penstock.memory.buffer import Buffer, new_buffer
from penstock.memory.ledger import DeviceMemory, register, unregister
from penstock.memory.messages import out_of_memory, with_owners
from penstock.memory.pool import BufferPool
from penstock.memory.trace import Block, Log
from penstock.opened import Layers, StateOwner, forked, refuse
from penstock.stream.future import Future
from penstock.stream.hostview import HostView
from penstock.stream.stream import Stream
from penstock.stream.watching import Watched

_MOST_SUBGRAPHS = 1024
_MUCH_IDLE = 64 << 20  # bytes that are worth a wait to give back

T = TypeVar("T")
W = TypeVar("W")
in_use: Living[Device] = Living()  # opened devices, for exit and forks
when_opened: list[Callable[[Device], None]] = []  # called with every device when it is opened


class Device:
    """A GPU, a CPU, or the host. It is opened when it is first used.

    >>> ps.zeros(2, device=ps.use("host")).device.name
    'host'
    """

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        open_driver: Callable[[], Driver],
        settings: Settings | None = None,
    ) -> None:
        self.name = name
        if capabilities.matmul_library:
            capabilities = replace(capabilities, tf32=(settings or Settings.from_environment()).tf32)
        self.capabilities = capabilities
        self._open_driver = open_driver
        self._settings = settings
        self.running = threading.RLock()  # held while values are computed, or a program is recorded
        self.executables: Any = None  # the cache of `penstock.execution.realize`
        self.subgraphs = LRU[Hashable, Any](_MOST_SUBGRAPHS)  # recorded graphs that are reused
        self.examples = LRU[Hashable, Any](_MOST_SUBGRAPHS)  # of slices and the like, which may be many
        # Pending nodes of parameters that were changed in place; the next run computes them too.
        self.updated: dict[int, weakref.ref[Any]] = {}
        self.dispatcher: Any = None  # of `auto`: places programs on several devices
        self.state_owners = Living[StateOwner]()  # whose state may move to the host
        self.replaying = False  # whether a program is about to use state where it lies
        self._lock = threading.RLock()
        self._opened: Layers | None = None
        self._background: ThreadPoolExecutor | None = None  # compiles ahead

    @classmethod
    def over(cls, driver: Driver, settings: Settings | None = None) -> Device:
        """A device with a given driver."""
        return cls(driver.name, driver.capabilities, lambda: driver, settings)

    def __repr__(self) -> str:
        return f"<Device {self.name}: {self.capabilities.description}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Device:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)

    @property
    def settings(self) -> Settings:
        """The settings that it was created with, or those of the environment."""
        return self._settings or Settings.from_environment()

    @cached_property
    def reuses_graphs(self) -> bool:
        """Whether recorded gradients, updates and functions are reused."""
        return self.settings.reuse_graphs

    def another_driver(self) -> Driver:
        """Open another driver of the device; the same driver if it was given."""
        return self._open_driver()

    # Parts

    @property
    def members(self) -> tuple[Device, ...]:
        """The devices that compute: itself, or for `auto` several."""
        return (self,)

    def holds(self, buffer: Buffer) -> bool:
        """Whether a buffer belongs to this device."""
        return self._opened is not None and buffer.driver is self._opened.driver

    @property
    def pool(self) -> BufferPool:
        """The pool of its memory."""
        return self.layers().pool

    @property
    def stream(self) -> Stream:
        """Its stream of commands: `launch`, `commit`, `sync`, `pending`, and the ledger of waits."""
        return self.layers().stream

    @property
    def runs_programs(self) -> bool:
        """Whether runs are programs of this device itself, and no profile records them."""
        return self.dispatcher is None and not (self._opened or self.layers()).stream.recorders

    @property
    def driver(self) -> Driver:
        """The driver."""
        return self.layers().driver

    @property
    def checks_indices(self) -> bool:
        """Whether indices out of range raise."""
        return self.layers().checks_indices

    @property
    def watches(self) -> bool:
        """Whether there are results to check when the host next reads a value."""
        return self._opened is not None and bool(self._opened.transfers.watching)

    def watch(self, watched: Watched) -> None:
        """Check a small result of a recorded command when the host next reads a value."""
        self.layers().transfers.watching.add(watched)

    # Memory

    def empty(self, nbytes: int, unused: bool = False) -> Buffer:
        """A buffer of `nbytes` bytes with any content. Raises OutOfDeviceMemory if freeing does not help.

        `unused`: for the host to fill, so that no earlier command should still use the memory.
        """
        if nbytes < 0:
            raise ValueError(f"a buffer cannot have {nbytes} bytes")
        return self._new(nbytes, unused)

    def _new(self, nbytes: int, unused: bool = False, spills: bool = False) -> Buffer:
        """See `empty`; `spills`: if there is no other way, state moves to the host, or it is made there."""
        opened = self._opened or self.layers()
        if opened.stream.unavailable:
            opened.stream.check_available()
        try:
            return new_buffer(opened.driver, nbytes, opened.source, unused)
        except OutOfDeviceMemory:
            self._make_room(opened)
        try:
            return new_buffer(opened.driver, nbytes, opened.source, unused)
        except OutOfDeviceMemory as error:
            if spills and self.capabilities.offloads:
                return self._new(nbytes, unused, spills) if self.spill() else opened.hosted(nbytes)
            raise self._out_of_memory(opened, nbytes, error) from None

    def spill(self, but: Collection[Any] = ()) -> bool:
        """Have state but some move to the host, unless a program is about to use it; whether any did."""
        with self.running:
            moved = [not self.replaying and owner.move_to_host(but) for owner in list(self.state_owners)]
        return any(moved)

    def visible(self, nbytes: int) -> Buffer:
        """A small buffer that the host can read without a command, if the device has such memory."""
        opened = self.layers()
        if not opened.driver.reaches_pinned:
            return self._new(nbytes, spills=True)
        opened.stream.check_available()
        return new_buffer(opened.driver, nbytes, opened.visible)

    def scratch(self, sizes: Sequence[int], beside: int = 0) -> list[Buffer]:
        """Arenas for temporaries; programs share them because they run in sequence.

        Under a limit, larger arenas of another program are freed if `beside` more bytes would not fit.
        """
        opened = self.layers()
        arenas = opened.scratch
        limit = opened.limit.limit_bytes
        larger = limit is not None and sum(arena.nbytes for arena in arenas) > sum(sizes)
        if limit is not None and larger and opened.pool.balance()[0] + beside > limit:
            arenas.clear()
        if len(arenas) < len(sizes) or any(arena.nbytes < nbytes for arena, nbytes in zip(arenas, sizes)):  # noqa: B905
            earlier = [arena.nbytes for arena in arenas]
            arenas.clear()  # first, so that both need not fit into a limit
            for at, nbytes in enumerate(sizes):
                arenas.append(self.empty(max([nbytes, *earlier[at : at + 1]])))
        return arenas[: len(sizes)]

    @cached_property
    def link_cost(self) -> float | None:
        """The bytes that kernels could move while a byte is copied to the host or back, measured once.

        None if moving values to the host saves no memory.
        """
        return _measure_link(self) if self.capabilities.offloads else None

    @property
    def limit_bytes(self) -> int | None:
        """The maximum of live and idle bytes from the driver; None is no limit.

        A request that fits always succeeds, and a request that does not fit always fails. A limit below the
        live bytes takes effect on the next requests.
        """
        return self.layers().limit.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit: int | str | None) -> None:
        limit_bytes = self.layers().limit.limit_bytes = None if limit is None else parse_bytes(limit)
        if limit_bytes is not None:
            self.keep_within(limit_bytes)

    def keep_within(self, limit_bytes: int) -> None:
        """Give idle memory back while more than `limit_bytes` are taken."""
        opened = self.layers()
        live, idle = opened.pool.balance()
        if live + idle > limit_bytes and not opened.stream.unavailable:
            opened.scratch = []
            opened.pool.shrink_to_fit(max(limit_bytes - opened.pool.balance()[0], 0))

    def held_bytes(self) -> int:
        """The live bytes without the arenas, whose size depends on the program."""
        opened = self.layers()
        arenas = sum(arena.memory.nbytes for arena in list(opened.scratch))
        return opened.pool.balance()[0] - arenas

    def make_room(self) -> None:
        """Finish pending work, and free arenas, staging and unreachable buffers."""
        self._make_room(self.layers())

    def memory_stats(self) -> DeviceMemory:
        """Its present memory, in bytes."""
        return self.layers().memory_stats()

    def host_bytes(self) -> int:
        """The bytes of its memory in the machine's memory: all if that is shared, else the staging."""
        stats = self.memory_stats()
        return stats.driver_bytes if self.capabilities.shared_memory else stats.staging_bytes

    def trim(self) -> int:
        """Give idle memory back to the driver; returns the bytes."""
        opened = self.layers()
        if opened.stream.unavailable:
            return 0  # a closed device keeps nothing idle, and an inherited one must not be touched
        opened.scratch, opened.host_scratch = [], None
        return opened.pool.clear() + opened.pinned.clear() + opened.visible.clear()

    def release_idle(self) -> None:
        """If much memory is idle, wait for pending commands and give it back."""
        opened = self.layers()
        if opened.pool.stats().pooled_bytes > _MUCH_IDLE:
            opened.stream.drain("idle memory given back")
            self.trim()

    def trace_memory(self, on: bool = True) -> None:
        """Start, or stop, to record which line of the user's code allocates which memory."""
        opened = self.layers()
        opened.traced = on
        opened.choose_source()

    def memory_owners(self, most: int = 10) -> list[tuple[str, int]]:
        """The lines of the user's code that hold the most, with their bytes; empty unless tracing is on."""
        opened = self.layers()
        return opened.trace.owners(most) if opened.source is opened.trace else []

    def memory_blocks(self) -> tuple[list[Block], list[tuple[int, int]]]:
        """Live blocks that were traced, and idle blocks as (serial of the allocation, bytes)."""
        opened = self.layers()
        return opened.trace.blocks(), opened.pool.idle()

    def log_memory(self, log: Log) -> None:
        """Notify `log` of every allocation and release from now on."""
        opened = self.layers()
        with self._lock:
            opened.tell_of_memory((*opened.trace.logs, log))

    def unlog_memory(self, log: Log) -> None:
        """Stop to notify `log`."""
        opened = self.layers()
        with self._lock:
            opened.tell_of_memory(tuple(other for other in opened.trace.logs if other is not log))

    # Kernels and copies

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        """Kernels by name, from a source in the device's language. Raises CompileError with the log.

        A signature lists the parameters: `"float32*"` for a buffer, `"int32"` for a scalar.
        """
        opened = self.layers()
        opened.stream.check_available()
        return opened.driver.compile(source, signatures)

    def upload(self, array: npt.ArrayLike, into: Buffer | None = None, offset: int = 0) -> Buffer:
        """Copy `array` to the device without waiting for it: into a new buffer, or into a given buffer."""
        array, transfers = np.asarray(array), self.layers().transfers
        if into is not None:
            transfers.upload(self._own(into), array, offset)
            return into
        buffer = self._new(array.nbytes, unused=True, spills=True)
        if offset or not transfers.filled(buffer, array):
            transfers.upload(buffer, array, offset)
        return buffer

    def download(
        self,
        buffer: Buffer,
        dtype: npt.DTypeLike = np.uint8,
        shape: Sequence[int] | None = None,
        offset: int = 0,
    ) -> Future[npt.NDArray[Any]]:
        """The content of `buffer` after the commands recorded so far, as a future array."""
        shape = self._shape(buffer, dtype, shape, offset)
        return self.layers().transfers.download(self._own(buffer), dtype, shape, offset)

    def reading(self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int]) -> Future[npt.NDArray[Any]]:
        """Like `download`; without a copy if the host sees the memory, whose values may change later."""
        return self.layers().transfers.reading(self._own(buffer), dtype, shape)

    def copy(
        self,
        target: Buffer,
        source: Buffer,
        nbytes: int | None = None,
        *,
        target_offset: int = 0,
        source_offset: int = 0,
    ) -> None:
        """Copy on the device, without waiting; by default all of `source`."""
        nbytes = source.nbytes - source_offset if nbytes is None else nbytes
        transfers = self.layers().transfers
        transfers.copy(self._own(target), target_offset, self._own(source), source_offset, nbytes)

    def exchange(self, target: Buffer, source: Buffer, work: Callable[[int, int, int], None]) -> None:
        """Have another library fill `target` from `source`, beside the kernels; see `Transfers.exchange`."""
        self.layers().transfers.exchange(self._own(target), self._own(source), work)

    def view(
        self,
        buffer: Buffer,
        dtype: npt.DTypeLike = np.uint8,
        shape: Sequence[int] | None = None,
        offset: int = 0,
        *,
        writable: bool = False,
    ) -> HostView:
        """`buffer` as a NumPy array inside a `with` block, once the device is done with it."""
        shape = self._shape(buffer, dtype, shape, offset)
        return self.layers().transfers.view(self._own(buffer), dtype, shape, offset, writable)

    # Life cycle

    def sync(self) -> None:
        """Wait until nothing is pending. Raises the first failure of the pending work."""
        if self._opened:
            self._opened.stream.sync()
            self._opened.transfers.watching.look()

    def cleanup(self) -> None:
        """Wait for pending work, and give idle memory back. The device stays usable."""
        opened = self._opened
        if opened is None or opened.stream.unavailable:
            return
        opened.stream.drain("cleanup")
        opened.stream.release_graphs()
        opened.transfers.release_staging()
        self.trim()
        self.sync()  # raises a failure, after the cleanup

    def close(self) -> None:
        """Clean up and never use the device again. Safe to call twice."""
        why = f"{self.name} was closed"
        with self._lock:
            if self._opened is None:
                self._open_driver = refuse(why)
                return
        opened = self._opened
        if opened.stream.unavailable not in ("", why) or opened.closed:
            return
        opened.stream.close(why)
        if self._background is not None:
            self._background.shutdown()  # it finishes its present work, and later work is refused
        opened.transfers.watching.clear()
        opened.stream.release_graphs()
        opened.transfers.release_staging()
        opened.scratch, opened.host_scratch = [], None
        for pool in (opened.pool, opened.pinned, opened.visible):
            pool.capacity = 0  # buffers that are released later go to the driver
            pool.clear()
        opened.driver.close()
        opened.closed = True  # last: an interrupted call is repeated, at exit too
        opened.stream.raise_error()

    def layers(self) -> Layers:
        """The parts of the device, which is opened if necessary."""
        if self._opened is None:
            with self._lock:
                opens = self._opened is None
                if self._opened is None:
                    opened = Layers(self._open_driver(), self.settings)
                    in_use.add(self)  # first, so that exit knows every open device
                    register(self)
                    self._opened = opened
            for tell in list(when_opened) if opens else ():  # without the lock, which they may need
                tell(self)
        return self._opened

    def _own(self, buffer: Buffer) -> Buffer:
        if buffer.driver is not self.layers().driver:
            raise ValueError(f"{buffer!r} cannot be used on {self.name}")
        return buffer

    def _shape(
        self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int] | None, offset: int
    ) -> tuple[int, ...]:
        """The given shape; by default all items of the buffer from `offset` on."""
        return ((buffer.nbytes - offset) // np.dtype(dtype).itemsize,) if shape is None else tuple(shape)

    def _make_room(self, opened: Layers) -> None:
        gc.collect()  # buffers in unreachable reference cycles
        opened.stream.drain("out of memory")
        opened.transfers.release_staging()
        opened.scratch = []
        opened.pinned.clear()

    def _out_of_memory(self, opened: Layers, nbytes: int, cause: OutOfDeviceMemory) -> OutOfDeviceMemory:
        stats = self.memory_stats()
        total = self.capabilities.total_bytes if stats.limit_bytes is None else stats.limit_bytes
        traced = opened.source is opened.trace
        return out_of_memory(self.name, stats, total, nbytes, cause, self.memory_owners() if traced else None)

    def with_owners(self, error: OutOfDeviceMemory) -> OutOfDeviceMemory:
        """The error with the lines of the user's code that hold the most memory, if tracing is on."""
        return with_owners(error, self.memory_owners())

    def in_background(self, work: Callable[[], Future[T]]) -> Future[T]:
        """Run `work` on the device's background thread; a future of the value of its future."""
        self.stream.check_available()
        return Future.of_work(work, self.submit)

    def submit(self, work: Callable[[], W]) -> Result[W]:
        """Run `work` on the device's background thread, in order; it ends before devices are closed."""
        with self._lock:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, f"penstock {self.name}")
            return self._background.submit(work)

    def abandon(self) -> None:
        """In a forked child: refuse everything, and touch neither native objects nor inherited locks."""
        self._background = None  # its thread exists only in the parent
        assert self._opened is not None
        unregister(self)
        self._lock, self.running = threading.RLock(), threading.RLock()
        self._opened.stream.abandon(forked(self.name))
        self._opened.tell_of_memory(())
        self._opened.pool.abandon()
        self._opened.pinned.abandon()
        self._opened.visible.abandon()
        self._opened.transfers.watching.clear()
        self._opened.driver.abandon()


_measure_link: Callable[[Device], float | None]


def measure_link_with(measure: Callable[[Device], float | None]) -> None:
    """Set the function that measures `link_cost`, which needs tensors, which import this module."""
    global _measure_link
    _measure_link = measure


_find: Callable[[str], Device]


def unpickle_with(find: Callable[[str], Device]) -> None:
    """Set the function by which `pickle` finds a device: the registry imports this module."""
    global _find
    _find = find


def _named(name: str) -> Device:
    """The device of a name, for `pickle`."""
    return _find(name)
