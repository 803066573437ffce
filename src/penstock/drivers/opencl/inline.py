"""Small kernels that the calling thread runs itself, on PoCL's device without threads.

A launch on PoCL's threads takes ten microseconds of the calling thread, and as many of theirs, mostly to wake
each other. PoCL's other device runs a kernel inside the call that enqueues it. Both are in one context, use
the same memory, and get the same code from the same compiler, so a kernel computes the same bits on both. But
PoCL compiles for each of them: a thread does it, for programs whose kernels all had little to do, often.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter, sleep
from typing import Any

import pyopencl as cl

from penstock.drivers.driver import Args, Event, Grid, Kernel
from penstock.drivers.opencl.natives import open_queue, typed_kernel
from penstock.errors import CompileError

_MOST_WORK = 1 << 20  # operations and bytes of a launch that may be tried: more than quick ones have
_OFTEN = 64  # launches of every kernel of a program before it is compiled
_QUIET_SECONDS = 1.0  # since somebody waited for the compiler, who may need it again
_PAUSE_SECONDS = 0.05
_TRIALS = 16  # launches after which it is known whether they are quick; the least time of them counts
_QUICK_SECONDS = 10e-6  # that a launch may take: less than threads take beside the work itself
_MOST_WAITING = 64  # programs
_enqueue_kernel: Any = cl.enqueue_nd_range_kernel  # see `driver`


class InlineDevice:
    """The device whose kernels run in the calling thread, and the thread that compiles for it."""

    def __init__(self, context: cl.Context, native: cl.Device) -> None:
        self._context, self.native = context, native
        self.queue = self.open_queue(timed=False)
        self._wanted: deque[InlineProgram] = deque(maxlen=_MOST_WAITING)
        self._thread = ThreadPoolExecutor(1, "penstock, inline kernels")
        self._lock = threading.Lock()
        self._awake = False  # whether a step is under way, or will be
        self._is_closed = False
        self._last_compiled = perf_counter()

    def open_queue(self, timed: bool) -> cl.CommandQueue:
        """Let kernels run on a new queue."""
        self.queue = open_queue(self._context, self.native, timed)
        return self.queue

    def compile(self, program: InlineProgram) -> None:
        """Compile a program in the thread, or load it, which is done first."""
        if program.is_kept:
            self._wanted.appendleft(program)
        else:
            self._wanted.append(program)
        self._wake()

    def note_compiled(self) -> None:
        """Tell that something was compiled, or loaded, that somebody waits for."""
        self._last_compiled = perf_counter()

    def close(self) -> None:
        """Begin no further compilation."""
        self._is_closed = True

    def _wake(self) -> None:
        with self._lock:
            if not self._awake and self._wanted and not self._is_closed:
                self._awake = True  # before: the step may end at once
                with suppress(RuntimeError):  # the interpreter ends
                    self._thread.submit(self._step)

    def _step(self) -> None:
        """Compile one program, or wait. A step is short, because the interpreter waits for it at exit."""
        if not self._wanted[0].is_kept and perf_counter() - self._last_compiled < _QUIET_SECONDS:
            sleep(_PAUSE_SECONDS)
        else:
            self._wanted.popleft().build()
        self._awake = False
        self._wake()


class InlineProgram:
    """A program that is compiled for the calling thread once all its kernels were launched often."""

    def __init__(
        self, device: InlineDevice, kernels: Iterable[str], build: Callable[[], cl.Program], is_kept: bool
    ) -> None:
        """`is_kept`: whether it was compiled before, so that `build` only loads it."""
        self.device, self._build, self.is_kept = device, build, is_kept
        self._launches = dict.fromkeys(kernels, 0)  # small ones of kernels that were not launched often
        self.native: cl.Program | None = None  # once it is compiled

    def note(self, kernel: str) -> None:
        """Count a small launch of a kernel."""
        count = self._launches.get(kernel)
        if count is None:
            return
        self._launches[kernel] = count + 1
        if self.is_kept or count + 1 >= _OFTEN:
            del self._launches[kernel]
            if not self._launches:
                self.device.compile(self)

    def build(self) -> None:
        """Compile it now. What cannot be compiled stays with the threads' device."""
        with suppress(CompileError):
            self.native = self._build()


class InlineLaunch:
    """A launch of few operations, which the calling thread runs if that turns out to be quick."""

    __slots__ = ("_args", "_grid", "_group", "_kernel", "_native", "_program", "_trials")

    def __init__(self, program: InlineProgram, kernel: Kernel, grid: Grid, group: Grid, args: Args) -> None:
        """`args`: those that are set until others are; none if all are given to each run."""
        self._program, self._kernel, self._grid, self._group = program, kernel, grid, group
        self._args: list[Any] | None = [*args]  # until there is a native kernel that has them
        self._native: Any = None
        self._trials = _TRIALS

    def is_ready(self) -> bool:
        """Whether it is compiled, and quick as far as is known. Asked once before each launch."""
        if self._native is not None:
            return True
        if self._args is None:
            return False  # it was not quick
        if self._program.native is None:
            self._program.note(self._kernel.name)
            return False
        native = typed_kernel(self._program.native, self._kernel)
        if self._args:
            native.set_args(*self._args)
        self._native, self._args = native, None
        return True

    def set_arg(self, position: int, arg: Any) -> None:
        """Change an argument for the runs from now on."""
        if self._native is not None:
            self._native.set_arg(position, arg)
        elif self._args is not None:
            self._args[position] = arg

    def run(self, args: Args | None = None) -> Event:
        """Run the kernel, after `is_ready`; its event, which is done. `args`: all of them, if given."""
        native = self._native
        if args is not None:
            native.set_args(*args)
        queue = self._program.device.queue
        if not self._trials:
            return _enqueue_kernel(queue, native, self._grid, self._group, None, None, True, False)
        start = perf_counter()
        event = _enqueue_kernel(queue, native, self._grid, self._group, None, None, True, False)
        self._trials -= 1
        if perf_counter() - start < _QUICK_SECONDS:
            self._trials = 0
        elif not self._trials:
            self._native = None
        return event


def inline_launch(
    program: InlineProgram | None, kernel: Kernel, grid: Grid, group: Grid, args: Args = ()
) -> InlineLaunch | None:
    """What runs a launch in the calling thread; None if it has much to do, or nobody knows how much."""
    cost = kernel.cost
    if program is None or cost is None or cost.operations + cost.nbytes > _MOST_WORK:
        return None
    return InlineLaunch(program, kernel, grid, group, args)
