"""The interface that every driver fills in, and the plain records that pass through it.

The contract, on which the layers above rely:

- A queue runs its commands in the order in which they were recorded. Two queues are ordered only by events.
- Recording never waits for the device. A recorded command may start at once or at the next `flush`; it is
  certain to run only after one, so nothing waits for an event whose queue was not flushed since.
- A command that fails completes its event. `is_done` then says True, and `wait` and `failures` tell why.
- Memory that a command touches must stay allocated until that command's event is done: the caller's duty.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import CompileError, DeviceError, OutOfDeviceMemory

Bytes = npt.NDArray[np.uint8]
Queue = Any  # a driver's own object
Event = Any  # a driver's own object
Waits = list[Event] | None  # what a command starts after, besides what comes before it on its queue
Args = Sequence[Any]  # of a kernel, as the driver takes them
# Text in the driver's language, or functions by name: of arrays on the host, library launches on CUDA.
Source = str | Mapping[str, Callable[..., None]]
Grid = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do. Layers above decide by these, never by a device's name."""

    description: str  # the device's name for people
    vendor: str
    api: str  # programming interface and version, such as "OpenCL 3.0 PoCL"
    kind: Literal["gpu", "cpu", "accelerator", "host"]
    language: Literal["opencl", "cuda", "wgsl", "numpy"]  # what `compile` takes
    total_bytes: int
    max_allocation_bytes: int
    offset_alignment: int  # bytes; where a view into a buffer may begin
    shared_memory: bool  # host and device see the same memory: `map` costs no copy
    compute_units: int
    max_group_size: int
    local_bytes: int  # memory that the threads of one group share
    # How many float32 values a vector of one thread holds. It also tells which kernels a device gets: more
    # than 1 means those for a CPU, where few threads do much; 1 means those for a GPU.
    vector_width: int
    float16: bool
    float64: bool
    matmul_library: bool = False  # `compile` takes matrix products as launches of a library
    tensor_cores: bool = False  # kernels may have CUDA's instructions for tiles of float16 and bfloat16
    int64: bool = True  # kernels may have integers of 64 bits
    max_buffers: int = 1 << 16  # that one kernel may take
    binding_bytes: int = 1 << 62  # that each of them may have; a larger memory takes several
    tf32: bool = False  # that library may round float32 to 10 bits of fraction before it multiplies

    @property
    def compiles(self) -> bool:
        """Whether the device runs kernels that are compiled from text; else it runs functions of NumPy."""
        return self.language != "numpy"

    @property
    def contracts(self) -> bool:
        """Whether a compiler may round a product and a sum after it once, as those of GPUs do."""
        return self.compiles and self.vector_width == 1

    @property
    def register_arrays(self) -> bool:
        """Whether a thread of a GPU keeps arrays in registers, so that a kernel can add to many sums."""
        return self.vector_width == 1 and self.language in ("opencl", "cuda")

    @property
    def max_arena_bytes(self) -> int:
        """The largest memory that takes one binding: in larger ones, every access chooses a binding."""
        return min(self.max_allocation_bytes, self.binding_bytes)

    def bindings(self, nbytes: int) -> int:
        """How many of a kernel's buffers a memory of so many bytes takes."""
        return max(1, -(-nbytes // self.binding_bytes))


class LibraryLaunch(Protocol):
    """Work of a library in place of a kernel: it enqueues itself, given native arguments."""

    def prepare(self, driver: Driver) -> None:
        """Called once, when it is compiled: it may allocate, measure and free."""
        ...

    def __call__(self, queue: int, *args: Any) -> None:
        """Enqueue the work on a native queue. Nothing may wait or allocate: it may become part of a graph."""
        ...


_serials = itertools.count()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Memory:
    """One allocation of a driver."""

    native: Any  # what a kernel takes as argument
    nbytes: int
    host: Bytes | None  # the same bytes as an array, where the host can always see them
    pinned: bool = False  # memory of the host that the device can reach by itself
    serial: int = field(default_factory=_serials.__next__)  # which allocation it is, of all that there were
    parts: Any = None  # native objects for parts of it, where a driver keeps any
    # The pool's notes: how much was asked for, since when nobody holds it, and who used it last.
    asked: int = field(init=False)
    idle_since: float = 0.0
    usage: Any = None

    def __post_init__(self) -> None:
        self.asked = self.nbytes

    @property
    def is_freed(self) -> bool:
        """Whether its driver took it back."""
        return self.native is None and self.host is None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one launch of a kernel computes and moves, as a profile shows it."""

    operations: int  # of arithmetic; a product of matrices has two for each pair of items
    read_bytes: int
    written_bytes: int
    shapes: str  # of what goes in and comes out, for people
    product: str = ""  # the dtype of the matrices that it multiplies; empty where it multiplies none

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


class Kernel:
    """A compiled kernel and the types of its parameters: `"float32*"` is a buffer, `"int32"` a scalar."""

    __slots__ = ("buffer_slots", "cost", "dtypes", "name", "native", "signature")

    def __init__(self, name: str, signature: Sequence[str], native: Any) -> None:
        self.name = name
        self.signature = tuple(signature)
        self.native = native
        self.dtypes = parameter_dtypes(name, signature)
        self.buffer_slots = tuple(i for i, kind in enumerate(signature) if kind.endswith("*"))
        self.cost: Cost | None = None  # of a launch, where that is known

    def __repr__(self) -> str:
        return f"<Kernel {self.name}({', '.join(self.signature)})>"


def parameter_dtypes(name: str, signature: Sequence[str]) -> list[np.dtype[Any]]:
    """The NumPy dtype of each parameter, or a ValueError that names the one that has none."""
    dtypes = []
    for position, kind in enumerate(signature):
        try:
            dtypes.append(np.dtype(kind.removesuffix("*")))
        except TypeError:
            raise ValueError(
                f"kernel {name!r}, parameter {position}: {kind!r} is no type; write a NumPy dtype such as "
                f"'int32' for a scalar and 'float32*' for a buffer"
            ) from None
    return dtypes


def check_parameter_count(name: str, count: int, signature: Sequence[str]) -> None:
    """Raise CompileError where a kernel has not as many parameters as its signature."""
    if count != len(signature):
        raise CompileError(
            f"kernel {name!r} has {count} parameters, and the signature ({', '.join(signature)}) has "
            f"{len(signature)}"
        )


class Life:
    """Which native objects of a driver are open, by `id`, and whether they may be touched."""

    __slots__ = ("abandoned", "open")

    def __init__(self) -> None:
        self.open: set[int] = set()  # every step on it is atomic: finalisers take no lock
        self.abandoned = False  # after a fork


class Driver(ABC):
    """One opened device. All calls may come from any thread; the layer above orders those on one queue."""

    name: str
    capabilities: Capabilities
    compute: Queue  # kernels
    incoming: Queue  # copies from the host, which need not wait for kernels
    outgoing: Queue  # copies to the host and on the device, which mostly do
    graphs: bool = False  # whether `capture` makes one launch of many
    reaches_pinned: bool = False  # whether kernels take pinned memory like any other
    times: bool = False  # whether `ran` tells when commands ran

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self.name = name
        self.capabilities = capabilities
        self._allocations: set[Memory] = set()  # not freed; every step on it is atomic and needs no lock

    # Memory

    @abstractmethod
    def allocate(self, nbytes: int, pinned: bool = False) -> Memory:
        """Device memory, or host memory that the device reaches (`pinned`). Raises OutOfDeviceMemory."""

    @abstractmethod
    def free(self, memory: Memory) -> None:
        """Give `memory` back. No command may still touch it."""

    @abstractmethod
    def view(self, memory: Memory, offset: int, nbytes: int) -> Any:
        """A part of `memory` as a kernel argument; `offset` is a multiple of `offset_alignment`."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated and not freed, counted apart from the layers above."""
        return sum(memory.nbytes for memory in self._allocations.copy())

    def _no_memory(self, nbytes: int, reason: str) -> OutOfDeviceMemory:
        """The error of an allocation that the device refused."""
        largest = self.capabilities.max_allocation_bytes
        hint = f"; one allocation may have {largest} bytes there" if nbytes > largest else ""
        return OutOfDeviceMemory(f"{self.name} has no {nbytes} bytes ({reason}){hint}", asked=nbytes)

    @abstractmethod
    def native_handles(self) -> int:
        """How many native objects are open, as the driver's own bookkeeping knows it."""

    # Kernels

    @abstractmethod
    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        """All kernels that `signatures` names, from one source. Raises CompileError."""

    def compile_ahead(self, source: str, signatures: Mapping[str, Sequence[str]]) -> None:
        """Compile kernels that nobody needs yet, so that `has_compiled` tells of them."""
        self.compile(source, signatures)

    @property
    def keeps_compiled(self) -> bool:
        """Whether kernels that were compiled are kept on disk."""
        return False

    def has_compiled(self, source: str) -> bool:
        """Whether kernels of a source come from the disk, where an earlier process put them."""
        return False

    def launch(
        self, queue: Queue, kernel: Kernel, grid: Grid, group: Grid, args: Args, waits: Waits
    ) -> Event:
        """Record `grid` groups of `group` threads each. `args` are native."""
        events: list[Event] = []
        self.replay(queue, (self.bind(kernel, grid, group, args),), waits, events)
        return events[0]

    @abstractmethod
    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Args) -> Any:
        """A launch with its arguments set once, to be recorded any number of times with `replay`."""

    @abstractmethod
    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        """Change one native argument of a bound launch. What was recorded before keeps the old one."""

    @abstractmethod
    def replay(self, queue: Queue, bound: Sequence[Any], waits: Waits, events: list[Event]) -> None:
        """Record bound launches in order, the first after `waits`, and append the event of each to `events`.

        Where one is refused, the events of those before it are in the list, and the error is raised.
        """

    def capture(self, bound: Sequence[Any], after: Sequence[Sequence[int]]) -> Any:
        """A graph of bound launches, each replayed before, for `replay`. `rebind` of a launch changes it.

        `after` lists, for each launch, those that must have ended; others may run at the same time.
        """
        raise NotImplementedError(f"{self.name} has no graphs")

    # Copies

    @abstractmethod
    def write(self, queue: Queue, memory: Memory, offset: int, source: Bytes, waits: Waits) -> Event:
        """Record a copy of `source`, which must stay unchanged until the event, into `memory`."""

    @abstractmethod
    def read(self, queue: Queue, target: Bytes, memory: Memory, offset: int, waits: Waits) -> Event:
        """Record a copy from `memory` into `target`."""

    @abstractmethod
    def copy(
        self, queue: Queue, target: Memory, to: int, source: Memory, start: int, nbytes: int, waits: Waits
    ) -> Event:
        """Record a copy between two allocations, `start` to `to`, or two parts of one that do not overlap."""

    def map(self, memory: Memory, offset: int, nbytes: int, writable: bool) -> Bytes:
        """Shared memory only: the bytes themselves. No unfinished command may touch them."""
        raise DeviceError(f"{self.name} has memory of its own, which the host cannot map")

    def unmap(self, memory: Memory, mapped: Bytes) -> Event | None:
        """End a `map`. The event, where there is one, is of a queue of the driver's own, and flushed."""
        raise DeviceError(f"{self.name} has memory of its own, which the host cannot map")

    # Order and completion

    @abstractmethod
    def flush(self, queue: Queue) -> None:
        """See to it that everything recorded will run without further calls."""

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Whether the command has finished, well or not. Never waits."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Return when the command has finished, well or not."""

    @abstractmethod
    def failures(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        """Position and reason of each finished event whose command failed."""

    # Times

    def time_commands(self, on: bool) -> None:
        """Start to note when commands run, or stop it. Nothing is pending.

        The queues may be new objects afterwards. The commands of a graph have no times of their own.
        """
        if on:
            raise NotImplementedError(f"{self.name} does not tell when commands ran")

    def ran(self, event: Event) -> tuple[float, float] | None:
        """When a finished command began and ended, in seconds of the host's `perf_counter`.

        None of one that failed, or was recorded while nothing was noted.
        """
        return None

    # Life cycle

    @abstractmethod
    def close(self) -> None:
        """Finish all work. Native objects go with the last reference to them. Safe to call twice."""

    @abstractmethod
    def abandon(self) -> None:
        """After a fork, in the child: never touch the native objects again, not even to release them."""
