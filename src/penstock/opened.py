"""The parts of an opened device: driver, memory, stream and transfers; and refusals to open one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from penstock.config import Settings
from penstock.drivers.driver import Driver
from penstock.errors import DeviceUnavailable
from penstock.memory.buffer import Buffer, new_buffer
from penstock.memory.ledger import DeviceMemory
from penstock.memory.pool import BufferPool
from penstock.memory.resource import Limit, Raw
from penstock.memory.trace import Log, Trace
from penstock.stream.queue import FlushPolicy
from penstock.stream.stream import Stream
from penstock.stream.transfer import Transfers


class StateOwner(Protocol):
    """What has state that programs use now and then, such as an optimizer."""

    def state_nodes(self) -> Sequence[Any]:
        """The nodes that hold it."""
        ...

    def move_to_host(self, but: Collection[Any]) -> bool:
        """Move what lies on the device to the host, but for some nodes; whether there was any."""
        ...


class Layers:
    """The parts of an opened device, connected with each other."""

    def __init__(self, driver: Driver, settings: Settings) -> None:
        self.driver = driver
        if settings.compile_ahead:
            driver.launch_inline()
        self.limit = Limit(Raw(driver), settings.memory_limit)
        bounds = {
            "capacity": settings.pool_capacity,
            "max_bytes": settings.pool_bytes or driver.capabilities.total_bytes // 4,
            "idle_seconds": settings.pool_seconds,
        }
        pace = {"is_done": driver.is_done, "wait": driver.wait}
        self.pool = BufferPool(self.limit, **bounds, **pace)  # type: ignore[arg-type]
        self.pinned = BufferPool(Raw(driver, pinned=True), **bounds)  # type: ignore[arg-type]
        # Host memory that kernels can access, for a few bytes that the host reads often.
        self.visible = BufferPool(Raw(driver, pinned=True), **bounds, **pace)  # type: ignore[arg-type]
        self.trace = Trace(self.pool)
        self.traced = settings.trace_memory  # whether the user has set it
        self.source: Trace | BufferPool = self.pool  # where memory comes from
        self.choose_source()
        policy = FlushPolicy(settings.max_commands, settings.max_bytes, settings.max_in_flight)
        self.stream = Stream(driver, self.pool, policy)
        self.transfers = Transfers(driver, self.stream, self.pinned, settings.staging_bytes)
        self.scratch: list[Buffer] = []
        self.host_scratch: Buffer | None = None  # pinned, for values that programs move to the host
        self.hosts_state = False  # whether any state was ever at the host
        self.checks_indices = settings.check_indices
        self.closed = False

    def host_memory(self, nbytes: int) -> Buffer:
        """Pinned host memory for values that programs move there; programs share it, like the arenas."""
        buffer = self.host_scratch
        if buffer is None or buffer.nbytes < nbytes:
            self.host_scratch = None  # first, so that both need not be allocated together
            buffer = self.host_scratch = new_buffer(self.driver, nbytes, self.visible)
        return buffer

    def hosted(self, nbytes: int) -> Buffer:
        """Pinned memory of the host for state that lies there between the runs of programs."""
        buffer = new_buffer(self.driver, nbytes, self.visible)
        buffer.hosted = self.hosts_state = True
        return buffer

    def memory_stats(self) -> DeviceMemory:
        """The memory now, in bytes."""
        pool = self.pool.stats()
        return DeviceMemory(
            live_bytes=pool.live_bytes,
            planned_bytes=sum(arena.nbytes for arena in list(self.scratch)),
            pooled_bytes=pool.pooled_bytes,
            staging_bytes=self.pinned.stats().total_memory + self.visible.stats().total_memory,
            peak_bytes=pool.peak_bytes,
            driver_bytes=self.driver.allocated_bytes,
            limit_bytes=self.limit.limit_bytes,
            pool=pool,
        )

    def choose_source(self) -> None:
        """Allocate through the trace only if tracing is on or there are listeners."""
        self.source = self.trace if self.traced or self.trace.logs else self.pool

    def tell_of_memory(self, logs: tuple[Log, ...]) -> None:
        """Set the listeners that are notified of every block."""
        self.trace.logs = logs
        self.choose_source()


def forked(name: str) -> str:
    """The reason why a device cannot be used in a forked child."""
    return (
        f"{name} was found before this process was forked and cannot be used in it; start processes with "
        f"multiprocessing's 'spawn' method, look for devices only in the child, or use the device 'host'"
    )


def refuse(why: str) -> Callable[[], Driver]:
    """A function that raises DeviceUnavailable instead of opening a driver."""

    def open_driver() -> Driver:
        raise DeviceUnavailable(why)

    return open_driver
