"""A device as users see it: a driver, its memory and its stream in one object."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future as Result
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.config import Settings, parse_bytes
from penstock.drivers.driver import Capabilities, Driver, Kernel, Source
from penstock.errors import DeviceUnavailable, OutOfDeviceMemory
from penstock.formatting import format_bytes
from penstock.lru import LRU
from penstock.memory.buffer import Buffer
from penstock.memory.ledger import DeviceMemory, register, unregister
from penstock.memory.pool import BufferPool
from penstock.memory.resource import Limit, Raw
from penstock.memory.trace import Block, Log, Trace
from penstock.stream.future import Future
from penstock.stream.hostview import HostView
from penstock.stream.queue import FlushPolicy
from penstock.stream.stream import Stream
from penstock.stream.transfer import Transfers
from penstock.stream.watching import Watched

_MOST_SUBGRAPHS = 512
_MUCH_IDLE = 64 << 20  # bytes, worth waiting to give back

T = TypeVar("T")
W = TypeVar("W")
in_use: weakref.WeakSet[Device] = weakref.WeakSet()  # opened, for the exit and for forks
when_opened: list[Callable[[Device], None]] = []  # called with every device that is opened from then on


class Layers:
    """What a device consists of once it is in use, wired together."""

    def __init__(self, driver: Driver, settings: Settings) -> None:
        self.driver = driver
        self.limit = Limit(Raw(driver), settings.memory_limit)
        bounds = {
            "capacity": settings.pool_capacity,
            "max_bytes": settings.pool_bytes or driver.capabilities.total_bytes // 4,
            "idle_seconds": settings.pool_seconds,
        }
        pace = {"is_done": driver.is_done, "wait": driver.wait}
        self.pool = BufferPool(self.limit, **bounds, **pace)  # type: ignore[arg-type]
        self.pinned = BufferPool(Raw(driver, pinned=True), **bounds)  # type: ignore[arg-type]
        # Memory of the host that kernels reach, for a few bytes that the host looks at often.
        self.visible = BufferPool(Raw(driver, pinned=True), **bounds, **pace)  # type: ignore[arg-type]
        self.trace = Trace(self.pool)
        self.traced = settings.trace_memory  # whether the user asked for it
        self.source: Trace | BufferPool = self.pool  # where memory comes from
        self.choose_source()
        policy = FlushPolicy(settings.max_commands, settings.max_bytes, settings.max_in_flight)
        self.stream = Stream(driver, self.pool, policy)
        self.transfers = Transfers(driver, self.stream, self.pinned, settings.staging_bytes)
        self.scratch: list[Buffer] = []
        self.checks_indices = settings.check_indices
        self.closed = False

    def choose_source(self) -> None:
        """Take memory through the trace only where tracing is on or somebody listens."""
        self.source = self.trace if self.traced or self.trace.logs else self.pool

    def tell_of_memory(self, logs: tuple[Log, ...]) -> None:
        """Set who is told of every block."""
        self.trace.logs = logs
        self.choose_source()


class Device:
    """A GPU, a CPU, or the host. It is opened when it is first used."""

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        open_driver: Callable[[], Driver],
        settings: Settings | None = None,
    ) -> None:
        self.name = name
        if capabilities.matmul_library:
            tf32 = (settings or Settings.from_environment()).tf32
            capabilities = replace(capabilities, tf32=tf32)
        self.capabilities = capabilities
        self._open_driver = open_driver
        self._settings = settings
        self.running = threading.RLock()  # held while something is computed, or a program recorded
        self.executables: Any = None  # what `penstock.execution.realize` keeps for this device
        self.subgraphs = LRU[Hashable, Any](_MOST_SUBGRAPHS)  # what was recorded for it, and is called again
        # Pending nodes of parameters that were changed in place, which are computed with the next value.
        self.updated: dict[int, weakref.ref[Any]] = {}
        self.dispatcher: Any = None  # what places programs, where this one stands for several devices
        self._lock = threading.RLock()
        self._opened: Layers | None = None
        self._background: ThreadPoolExecutor | None = None  # builds what nobody waits for yet

    @classmethod
    def over(cls, driver: Driver, settings: Settings | None = None) -> Device:
        """A device on a driver that was opened by hand."""
        return cls(driver.name, driver.capabilities, lambda: driver, settings)

    def __repr__(self) -> str:
        return f"<Device {self.name}: {self.capabilities.description}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Device:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)

    @property
    def settings(self) -> Settings:
        """Those that it was made with, else what the environment says."""
        return self._settings or Settings.from_environment()

    @cached_property
    def reuses_graphs(self) -> bool:
        """Whether gradients, updates and functions that were recorded before are called."""
        return self.settings.reuse_graphs

    def another_driver(self) -> Driver:
        """Open the device once more; where the driver was given by hand, that driver."""
        return self._open_driver()

    # Its parts

    @property
    def members(self) -> tuple[Device, ...]:
        """The devices that compute: itself, or those that it stands for."""
        return (self,)

    def holds(self, buffer: Buffer) -> bool:
        """Whether a buffer is of this device."""
        return self._opened is not None and buffer.driver is self._opened.driver

    @property
    def pool(self) -> BufferPool:
        """The pool of its memory."""
        return self.layers().pool

    @property
    def stream(self) -> Stream:
        """Its commands: `launch`, `commit`, `sync`, `pending`, and the ledger of waits."""
        return self.layers().stream

    @property
    def runs_programs(self) -> bool:
        """Whether what is computed here is a program of this device, which no profile wants to be told of."""
        return self.dispatcher is None and not self.layers().stream.recorders

    @property
    def driver(self) -> Driver:
        """The driver below."""
        return self.layers().driver

    @property
    def checks_indices(self) -> bool:
        """Whether indices that are out of range are refused."""
        return self.layers().checks_indices

    @property
    def watches(self) -> bool:
        """Whether there is something to judge when the host next reads."""
        return self._opened is not None and bool(self._opened.transfers.watching)

    def watch(self, watched: Watched) -> None:
        """Judge a small result, which a command has just been recorded for, when the host next reads."""
        self.layers().transfers.watching.add(watched)

    # Memory

    def empty(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes` bytes with any content. Raises OutOfDeviceMemory, after trying everything."""
        if nbytes < 0:
            raise ValueError(f"a buffer cannot have {nbytes} bytes")
        return self._new(nbytes)

    def _new(self, nbytes: int, unused: bool = False) -> Buffer:
        """A buffer for a kernel to write; `unused`: for the host, which should wait for no command there."""
        opened = self._opened or self.layers()
        if opened.stream.unavailable:
            opened.stream.check_available()
        source = opened.source
        buffer = Buffer(opened.driver, nbytes, source)  # first, so that an interrupt loses no memory
        try:
            source.give(buffer, nbytes, unused)
        except OutOfDeviceMemory:
            self._make_room(opened)
            try:
                source.give(buffer, nbytes, unused)
            except OutOfDeviceMemory as error:
                raise self._out_of_memory(opened, nbytes, error) from None
        return buffer.attach()

    def visible(self, nbytes: int) -> Buffer:
        """A small buffer that the host can look into without a command, where the device has such memory."""
        opened = self.layers()
        if not opened.driver.reaches_pinned:
            return self.empty(nbytes)
        opened.stream.check_available()
        buffer = Buffer(opened.driver, nbytes, opened.visible)
        opened.visible.give(buffer, nbytes)
        return buffer.attach()

    def scratch(self, sizes: Sequence[int]) -> list[Buffer]:
        """Arenas for the temporaries of programs, which share them because they run one after another."""
        opened = self.layers()
        there = opened.scratch
        if len(there) < len(sizes) or any(arena.nbytes < nbytes for arena, nbytes in zip(there, sizes)):  # noqa: B905
            had = [arena.nbytes for arena in there]
            there.clear()  # first, so that a limit need not hold both
            for at, nbytes in enumerate(sizes):
                there.append(self.empty(max([nbytes, *had[at : at + 1]])))
        return there[: len(sizes)]

    @property
    def limit_bytes(self) -> int | None:
        """The most that may be taken from the driver, live and idle together; None: what the driver gives.

        A request that fits always succeeds and one that does not always fails. A limit under what is live
        takes effect on the next requests.
        """
        return self.layers().limit.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit: int | str | None) -> None:
        opened = self.layers()
        opened.limit.limit_bytes = limit_bytes = None if limit is None else parse_bytes(limit)
        if limit_bytes is not None:
            opened.pool.shrink_to_fit(max(limit_bytes - opened.pool.stats().live_bytes, 0))

    def memory_stats(self) -> DeviceMemory:
        """Its memory now, in bytes."""
        opened = self.layers()
        pool = opened.pool.stats()
        return DeviceMemory(
            live_bytes=pool.live_bytes,
            planned_bytes=sum(arena.nbytes for arena in list(opened.scratch)),
            pooled_bytes=pool.pooled_bytes,
            staging_bytes=opened.pinned.stats().total_memory + opened.visible.stats().total_memory,
            peak_bytes=pool.peak_bytes,
            driver_bytes=opened.driver.allocated_bytes,
            limit_bytes=opened.limit.limit_bytes,
            pool=pool,
        )

    def host_bytes(self) -> int:
        """How much of its memory lies in the machine's own: all where it is shared, else the staging."""
        stats = self.memory_stats()
        return stats.driver_bytes if self.capabilities.shared_memory else stats.staging_bytes

    def trim(self) -> int:
        """Give idle memory back to the driver; how many bytes."""
        opened = self.layers()
        if opened.stream.unavailable:
            return 0  # a closed device keeps nothing idle, and an inherited one must not be touched
        opened.scratch = []
        return opened.pool.clear() + opened.pinned.clear() + opened.visible.clear()

    def release_idle(self) -> None:
        """Wait for pending commands, and give idle memory back where there is much."""
        opened = self.layers()
        if opened.pool.stats().pooled_bytes > _MUCH_IDLE:
            opened.stream.drain("idle memory given back")
            self.trim()

    def trace_memory(self, on: bool = True) -> None:
        """Remember, from now on, which line of the user's code holds which memory; or stop it."""
        opened = self.layers()
        opened.traced = on
        opened.choose_source()

    def memory_owners(self, most: int = 10) -> list[tuple[str, int]]:
        """The lines of the user's code that hold the most, with their bytes; empty unless tracing is on."""
        opened = self.layers()
        return opened.trace.owners(most) if opened.source is opened.trace else []

    def memory_blocks(self) -> tuple[list[Block], list[tuple[int, int]]]:
        """What was traced and is live, and what is idle: which allocation each block is, and its bytes."""
        opened = self.layers()
        return opened.trace.blocks(), opened.pool.idle()

    def log_memory(self, log: Log) -> None:
        """Tell `log`, from now on, of every block that is handed out or comes back."""
        opened = self.layers()
        with self._lock:
            opened.tell_of_memory((*opened.trace.logs, log))

    def unlog_memory(self, log: Log) -> None:
        """End what `log_memory` began."""
        opened = self.layers()
        with self._lock:
            opened.tell_of_memory(tuple(other for other in opened.trace.logs if other is not log))

    # Kernels and copies

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        """Kernels by name, from one source in the device's language. Raises CompileError with the log.

        A signature lists the parameters: `"float32*"` for a buffer, `"int32"` for a scalar.
        """
        opened = self.layers()
        opened.stream.check_available()
        return opened.driver.compile(source, signatures)

    def upload(self, array: npt.ArrayLike, into: Buffer | None = None, offset: int = 0) -> Buffer:
        """Copy `array` to the device without waiting for it: into a new buffer, or into a given one."""
        array = np.asarray(array)
        buffer = self._new(array.nbytes, unused=True) if into is None else self._own(into)
        self.layers().transfers.upload(buffer, array, offset)
        return buffer

    def download(
        self,
        buffer: Buffer,
        dtype: npt.DTypeLike = np.uint8,
        shape: Sequence[int] | None = None,
        offset: int = 0,
    ) -> Future[npt.NDArray[Any]]:
        """What `buffer` holds after the commands recorded so far, as a future array."""
        shape = self._shape(buffer, dtype, shape, offset)
        return self.layers().transfers.download(self._own(buffer), dtype, shape, offset)

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
        """Wait until nothing is pending. Raises the first failure of the work that was."""
        if self._opened:
            self._opened.stream.sync()
            self._opened.transfers.watching.look()

    def cleanup(self) -> None:
        """Wait for what is pending and give back everything idle. The device stays usable."""
        opened = self._opened
        if opened is None or opened.stream.unavailable:
            return
        opened.stream.drain("cleanup")
        opened.stream.release_graphs()
        opened.transfers.release_staging()
        self.trim()
        self.sync()  # raises what failed, once all is clean

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
            self._background.shutdown()  # what it builds, it ends; what comes after that is refused
        opened.transfers.watching.clear()
        opened.stream.release_graphs()
        opened.transfers.release_staging()
        opened.scratch = []
        for pool in (opened.pool, opened.pinned, opened.visible):
            pool.capacity = 0  # what still comes back goes on to the driver
            pool.clear()
        opened.driver.close()
        opened.closed = True  # not before: a call that was interrupted is made again, at exit too
        opened.stream.raise_error()

    def layers(self) -> Layers:
        """What the device consists of; it is opened where it was not."""
        if self._opened is None:
            with self._lock:
                opens = self._opened is None
                if self._opened is None:
                    opened = Layers(self._open_driver(), self.settings)
                    in_use.add(self)  # first: exit must know every device that is open
                    register(self)
                    self._opened = opened
            for tell in list(when_opened) if opens else ():  # without the lock, which they may want
                tell(self)
        return self._opened

    def _own(self, buffer: Buffer) -> Buffer:
        if buffer.driver is not self.layers().driver:
            raise ValueError(f"{buffer!r} cannot be used on {self.name}")
        return buffer

    def _shape(
        self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int] | None, offset: int
    ) -> tuple[int, ...]:
        """The shape asked for; by default all the items that the buffer holds from `offset` on."""
        return ((buffer.nbytes - offset) // np.dtype(dtype).itemsize,) if shape is None else tuple(shape)

    def _make_room(self, opened: Layers) -> None:
        gc.collect()  # buffers in reference cycles that nobody can reach
        opened.stream.drain("out of memory")
        opened.transfers.release_staging()
        opened.scratch = []
        opened.pinned.clear()

    def _out_of_memory(self, opened: Layers, nbytes: int, cause: OutOfDeviceMemory) -> OutOfDeviceMemory:
        stats = self.memory_stats()
        total = self.capabilities.total_bytes if stats.limit_bytes is None else stats.limit_bytes
        free = max(total - stats.live_bytes, 0)
        owners = self.memory_owners()
        lines = [
            f"{self.name} cannot give {nbytes} bytes ({format_bytes(nbytes)}): "
            f"{format_bytes(stats.live_bytes)} live, {format_bytes(stats.pooled_bytes)} pooled, "
            f"{format_bytes(free)} free of {format_bytes(total)}"
            f"{'' if stats.limit_bytes is None else ', the limit set for it'}. {cause}."
        ]
        if opened.source is not opened.trace:
            lines.append(f"Set PENSTOCK_TRACE_MEMORY=1 to see which lines hold what is live on {self.name}.")
        lines += [f"{format_bytes(held):>12}  {site}" for site, held in owners]
        return OutOfDeviceMemory(
            "\n".join(lines),
            asked=nbytes,
            live=stats.live_bytes,
            pooled=stats.pooled_bytes,
            free=free,
            owners=owners,
        )

    def in_background(self, work: Callable[[], Future[T]]) -> Future[T]:
        """Run `work` on the device's background thread; a future of what its own future gives."""
        self.stream.check_available()
        return Future.of_work(work, self.submit)

    def submit(self, work: Callable[[], W]) -> Result[W]:
        """Run `work` on the device's background thread, in order.

        The thread ends what it was given before the interpreter closes the devices.
        """
        with self._lock:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, f"penstock {self.name}")
            return self._background.submit(work)

    def abandon(self) -> None:
        """In a forked child: refuse everything, and touch neither native objects nor inherited locks."""
        self._background = None  # whose thread is the parent's
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


def forked(name: str) -> str:
    """Why a device cannot be used in a forked child."""
    return (
        f"{name} was found before this process was forked and cannot be used in it; start processes with "
        f"multiprocessing's 'spawn' method, look for devices only in the child, or use the device 'host'"
    )


def refuse(why: str) -> Callable[[], Driver]:
    """A function in place of one that opens a driver: it raises DeviceUnavailable."""

    def open_driver() -> Driver:
        raise DeviceUnavailable(why)

    return open_driver


_find: Callable[[str], Device]


def unpickle_with(find: Callable[[str], Device]) -> None:
    """Say how `pickle` finds the device of a name: in the registry, which is built on this module."""
    global _find
    _find = find


def _named(name: str) -> Device:
    """The device of a name, for `pickle`."""
    return _find(name)
