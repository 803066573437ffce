"""The interface that every driver implements, and the plain records that pass through it.

The contract, on which the layers above rely:

- A queue runs its commands in the order in which they were recorded. Two queues are ordered only by events.
- Recording never waits for the device. A recorded command may start at once, but is certain to run only after
  the next `flush`, so the queue of an event has to be flushed before anything waits for the event.
- Commands that follow one another on a queue may have one event, which is done when the last of them is.
- A command that fails completes its event: `is_done` returns True, and `failures` gives the reason.
- The caller keeps memory that a command touches allocated until the event of the command is done.
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
Waits = list[Event] | None  # events that a command waits for, besides the commands before it on its queue
Args = Sequence[Any]  # native arguments of a kernel
Launcher = Callable[[Queue, Args, Waits], Event | None]  # None: it is done
# Text in the driver's language, or functions by name: of arrays on the host, library launches on CUDA.
Source = str | Mapping[str, Callable[..., None]]

at_end: list[Callable[[], None]] = []  # called when the process ends, after all devices are closed
Grid = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do. The layers above decide by these, never by a device's name."""

    description: str  # the device's name, for display
    vendor: str
    api: str  # programming interface and version, such as "OpenCL 3.0 PoCL"
    kind: Literal["gpu", "cpu", "accelerator", "host"]
    language: Literal["opencl", "cuda", "wgsl", "numpy"]  # what `compile` takes
    total_bytes: int
    max_allocation_bytes: int
    offset_alignment: int  # bytes; offsets of views into a buffer are multiples of it
    shared_memory: bool  # host and device share memory, so `map` needs no copy
    compute_units: int
    max_group_size: int
    local_bytes: int  # shared memory of a workgroup
    # How many float32 values a vector register holds. It also decides which kernels a device gets: more than
    # 1 means those for CPUs, with few threads that each do much; 1 means those for GPUs.
    vector_width: int
    float16: bool
    float64: bool
    matmul_library: bool = False  # `compile` takes matrix products as launches of a library
    tensor_cores: bool = False  # kernels may use CUDA's instructions for tiles of float16 and bfloat16
    clusters: bool = False  # workgroups may read each other's local memory
    int64: bool = True  # kernels may use 64-bit integers
    max_buffers: int = 1 << 16  # arguments of a kernel
    binding_bytes: int = 1 << 62  # the most of a buffer that an argument binds; larger buffers take several
    rounds_quotients: bool = False  # real quotients and square roots are rounded to nearest, as by NumPy
    tf32: bool = False  # the library may round float32 to 10 bits of fraction before it multiplies
    # Its memory is not the host's, and a program may copy to pinned memory and back beside its kernels.
    offloads: bool = False
    kernel_counters: bool = False  # a CPU's kernels may have integers that all of their launches share
    cache_bytes: int = 0  # of a CPU's last-level cache; 0: none, or it is not known

    @property
    def compiles(self) -> bool:
        """Whether the device runs kernels that are compiled from text; else it runs functions of NumPy."""
        return self.language != "numpy"

    @property
    def contracts(self) -> bool:
        """Whether the compiler may contract a product and a sum to a fused multiply-add, as on GPUs."""
        return self.compiles and self.vector_width == 1

    @property
    def register_arrays(self) -> bool:
        """Whether a thread of a GPU keeps arrays in registers, so that kernels can hold many accumulators."""
        return self.vector_width == 1 and self.language in ("opencl", "cuda")

    @property
    def max_arena_bytes(self) -> int:
        """The largest allocation that takes a single binding; beyond that, each access selects a binding."""
        return min(self.max_allocation_bytes, self.binding_bytes)

    def bindings(self, nbytes: int) -> int:
        """How many bindings an allocation of so many bytes takes."""
        return max(1, -(-nbytes // self.binding_bytes))


# With which the body of a generated CUDA kernel begins: it waits by itself for those that it depends on.
BEGIN_EARLY = " BEGIN_EARLY;"
# The same where it does so before it reads anything.
WAIT_FIRST = f"{BEGIN_EARLY} WAIT_FOR_EARLIER;"
# With which a text for CUDA begins whose products and sums are rounded one by one.
NO_CONTRACTION = "// Nothing is contracted.\n"


# Before integers of OpenCL that a kernel has to itself. A text with them is a later version of the language.
KERNEL_COUNTERS = "static __global"


class LibraryLaunch(Protocol):
    """A library's launch in place of a kernel: it enqueues itself, given native arguments."""

    def prepare(self, driver: Driver) -> None:
        """Called once, when it is compiled: it may allocate, measure and free."""
        ...

    def __call__(self, queue: int, *args: Any) -> None:
        """Enqueue the work on a native queue. It must not wait or allocate, since it may be captured."""
        ...


_serials = itertools.count()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Memory:
    """An allocation of a driver."""

    native: Any  # the argument that a kernel takes
    nbytes: int
    host: Bytes | None  # the same bytes as an array, if they are always mapped on the host
    pinned: bool = False  # host memory that the device can access
    serial: int = field(default_factory=_serials.__next__)  # unique among all allocations of the process
    parts: Any = None  # native objects for parts of it, if the driver keeps any
    # Set by the pool: the bytes that were requested, since when it is idle, and its last use.
    asked: int = field(init=False)
    idle_since: float = 0.0
    usage: Any = None
    place: tuple[int, int] = field(init=False)  # where a buffer lies: in which allocation, and its offset

    def __post_init__(self) -> None:
        self.asked = self.nbytes
        self.place = (self.serial, 0)

    @property
    def is_freed(self) -> bool:
        """Whether it was freed."""
        return self.native is None and self.host is None


@dataclass(frozen=True, slots=True)
class Cost:
    """What a launch of a kernel computes and moves, as a profile shows it."""

    operations: int  # arithmetic operations; a matrix product has two for each pair of items
    read_bytes: int
    written_bytes: int
    shapes: str  # of inputs and outputs, for display
    product: str = ""  # the dtype of the matrices that it multiplies; empty if it multiplies none
    attends: bool = False  # whether these products are those of attention

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


class Kernel:
    """A compiled kernel and the types of its parameters: `"float32*"` is a buffer, `"int32"` a scalar."""

    __slots__ = ("buffer_slots", "cost", "dtypes", "early", "name", "native", "signature")

    def __init__(self, name: str, signature: Sequence[str], native: Any) -> None:
        self.name = name
        self.signature = tuple(signature)
        self.native = native
        self.dtypes = parameter_dtypes(name, signature)
        self.buffer_slots = tuple(i for i, kind in enumerate(signature) if kind.endswith("*"))
        self.cost: Cost | None = None  # of a launch, if it is known
        self.early = True  # whether a launch may begin before others have ended, if it waits by itself

    def __repr__(self) -> str:
        return f"<Kernel {self.name}({', '.join(self.signature)})>"


def parameter_dtypes(name: str, signature: Sequence[str]) -> list[np.dtype[Any]]:
    """The NumPy dtype of each parameter, or a ValueError that names the parameter that has none."""
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
    """Raise CompileError if the numbers of parameters of a kernel and its signature differ."""
    if count != len(signature):
        raise CompileError(
            f"kernel {name!r} has {count} parameters, and the signature ({', '.join(signature)}) has "
            f"{len(signature)}"
        )


class Handles:
    """Which native objects of a driver are open, by `id`, and whether they may be used."""

    __slots__ = ("abandoned", "open")

    def __init__(self) -> None:
        self.open: set[int] = set()  # its operations are atomic, because finalizers take no lock
        self.abandoned = False  # in the child of a fork


class Driver(ABC):
    """An opened device. Any thread may call it; the layer above orders the calls for a queue."""

    name: str
    capabilities: Capabilities
    compute: Queue  # kernels
    incoming: Queue  # copies from the host, which need not wait for kernels
    outgoing: Queue  # copies to the host and on the device, which usually wait for kernels
    # Up to so many launches, to set all arguments at each run costs less than to compare and change them.
    few_launches: int = 1
    graphs: bool = False  # whether `capture` is implemented
    reaches_pinned: bool = False  # whether kernels take pinned memory as arguments
    times: bool = False  # whether commands can be timed
    launch_seconds: float = 20e-6  # what a launch with little to do takes on a CPU, in all its threads
    rates: Any = None  # what a file says of a device that is not there (StepRates); others are measured

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self.name = name
        self.capabilities = capabilities
        self._allocations: set[Memory] = set()  # not freed; its operations are atomic and need no lock

    # Memory

    @abstractmethod
    def allocate(self, nbytes: int, pinned: bool = False) -> Memory:
        """Device memory, or host memory that the device can access (`pinned`). Raises OutOfDeviceMemory."""

    @abstractmethod
    def free(self, memory: Memory) -> None:
        """Free `memory`. No pending command may touch it."""

    @abstractmethod
    def view(self, memory: Memory, offset: int, nbytes: int) -> Any:
        """A part of `memory` as a kernel argument; `offset` is a multiple of `offset_alignment`."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated and not freed, counted independently of the layers above."""
        return sum(memory.nbytes for memory in self._allocations.copy())

    def _no_memory(self, nbytes: int, reason: str) -> OutOfDeviceMemory:
        """The error of an allocation that the device refused."""
        largest = self.capabilities.max_allocation_bytes
        hint = f"; an allocation may have at most {largest} bytes there" if nbytes > largest else ""
        return OutOfDeviceMemory(f"{self.name} has no {nbytes} bytes ({reason}){hint}", asked=nbytes)

    @staticmethod
    def _host_bytes(nbytes: int) -> Bytes:
        """Memory of the host. Raises OutOfDeviceMemory."""
        try:
            return np.empty(nbytes, np.uint8)
        except (MemoryError, ValueError) as error:
            raise OutOfDeviceMemory(f"the host has no {nbytes} bytes: {error}", asked=nbytes) from None

    @abstractmethod
    def native_handles(self) -> int:
        """How many native objects are open, by the driver's own count."""

    # Kernels

    @abstractmethod
    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        """All kernels that `signatures` names, from one source. Raises CompileError."""

    def compile_ahead(
        self, source: str, signatures: Mapping[str, Sequence[str]], groups: Mapping[str, Grid]
    ) -> None:
        """Compile kernels for later launches of workgroups of these sizes, by name.

        `has_compiled` is True then, if they are kept on disk.
        """
        self.compile(source, signatures)

    @property
    def keeps_compiled(self) -> bool:
        """Whether compiled kernels are kept on disk, by this driver or by the system."""
        return False

    def has_compiled(self, source: str) -> bool:
        """Whether the compiled kernels of a source are on disk."""
        return False

    def launch(
        self, queue: Queue, kernel: Kernel, grid: Grid, group: Grid, args: Args, waits: Waits
    ) -> Event:
        """Record a launch of `grid` workgroups of `group` threads each. `args` are native."""
        events: list[Event] = []
        self.replay(queue, (self.bind(kernel, grid, group, args),), waits, events)
        return events[0]

    def launcher(self, kernel: Kernel, grid: Grid, group: Grid) -> Launcher:
        """What does the same with any arguments, again and again."""
        return lambda queue, args, waits: self.launch(queue, kernel, grid, group, args, waits)

    def launch_inline(self) -> bool:
        """From now on, let the calling thread run small kernels, if the device can; whether it can.

        A thread compiles them for it. They are complete when their launch returns, and in order with others.
        """
        return False

    @abstractmethod
    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Args) -> Any:
        """A launch with its arguments, which `replay` can record any number of times."""

    @abstractmethod
    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        """Change a native argument of a bound launch. What was recorded before keeps the old value."""

    @abstractmethod
    def replay(self, queue: Queue, bound: Sequence[Any], waits: Waits, events: list[Event]) -> None:
        """Record bound launches in order, the first after `waits`, and append the event of each to `events`.

        If a launch is refused, the error is raised after the events of the launches before it were appended.
        """

    def capture(self, bound: Sequence[Any], after: Sequence[Sequence[int]]) -> Any:
        """A graph of bound launches, which `replay` takes like a launch. Each was replayed before.

        `rebind` of a launch changes the graph. `after` lists the launches that each launch depends on. Among
        the launches may be copies, from `bind_copy`.
        """
        raise NotImplementedError(f"{self.name} has no graphs")

    def bind_copy(self, target: Any, source: Any, nbytes: int, to_device: bool) -> Any:
        """A copy for `capture`, between device and pinned memory, each as a kernel takes it (`view`).

        `to_device`: the source is the pinned memory, else the target is.
        `rebind` changes the target at position 0, and the source at position 1.
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
        """Record a copy from offset `start` of `source` to offset `to` of `target`; they must not overlap."""

    def foreign(self, queue: Queue, work: Callable[[int], None], waits: Waits) -> Event:
        """Record commands that another library puts into the stream whose number it is given."""
        raise DeviceError(f"{self.name} takes no commands of other libraries")

    def map(self, memory: Memory, offset: int, nbytes: int, writable: bool) -> Bytes:
        """The bytes of shared memory as an array. No pending command may touch them."""
        raise DeviceError(f"{self.name} has memory of its own, which the host cannot map")

    def unmap(self, memory: Memory, mapped: Bytes) -> Event | None:
        """End a `map`. If there is an event, it is of a queue that the driver has flushed."""
        raise DeviceError(f"{self.name} has memory of its own, which the host cannot map")

    # Order and completion

    @abstractmethod
    def flush(self, queue: Queue) -> None:
        """Submit everything that was recorded, so that it runs without further calls."""

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Whether the command has finished or failed. Never waits."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Wait until the command has finished or failed."""

    @abstractmethod
    def failures(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        """Position and reason of each event whose command has failed."""

    # Times

    def time_commands(self, on: bool) -> None:
        """Start or stop timing commands. Nothing is pending.

        The queues may be new objects afterwards. The commands of a graph are not timed separately.
        """
        if on:
            raise NotImplementedError(f"{self.name} does not tell when commands ran")

    def ran(self, event: Event) -> tuple[float, float] | None:
        """Start and end of a finished command, in seconds of the host's `perf_counter`.

        None if it failed, or was recorded while commands were not timed.
        """
        return None

    # Life cycle

    @abstractmethod
    def close(self) -> None:
        """Finish all work. Native objects are released with their last reference. Safe to call twice."""

    @abstractmethod
    def abandon(self) -> None:
        """In the child of a fork: never use the native objects any more, not even to release them."""
