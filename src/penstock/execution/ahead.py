"""Kernels that a thread compiles before they are needed, and keeps on disk.

Kernels of expressions come first; single operations compute these meanwhile, see `cache`. While no program is
being built, the kernels of a list of single operations follow, once for a device. A kernel takes sizes as
arguments once two shapes are known, so every operation is lowered for two shapes. Single operations that an
expression lacked are added to the list. The next process continues where this process ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from itertools import chain
from time import perf_counter, sleep

from penstock.compiler.pipeline import compile_graph
from penstock.compiler.target import Target
from penstock.errors import PenstockError
from penstock.execution import ahead_cpu, ahead_gpu, ahead_operations
from penstock.execution.ahead_operations import integers, operations
from penstock.execution.sources import kernel_sources
from penstock.graph.node import Node, topological
from penstock.graph.reference import constant_key
from penstock.kernels.cache import KernelCache
from penstock.kernels.source import KernelSource, digest
from penstock.runtime import Device

# Two shapes of each kind: long rows and short ones that end with a partial vector, and the same without.
SHAPES = (
    ((101, 203), (211, 307)),
    ((112, 96), (176, 320)),
    ((101, 103), (211, 107)),
    ((104, 88), (168, 104)),
)
_QUIET_SECONDS = 1.0  # since somebody built a program, or the device had work
_PAUSE_SECONDS = 0.05
_MOST_WAITING = 64  # kernels that were missing for expressions
_END = object()


class Ahead:
    """Compiles kernels of a device in a thread, a few at a time; those of expressions come first."""

    def __init__(self, device: Device, kernels: KernelCache, last_built: Callable[[], float]) -> None:
        """`last_built`: the time at which a program was last built."""
        self._device, self._kernels, self._last_built = device, kernels, last_built
        self._wanted: deque[tuple[Future[None], Callable[[], None]]] = deque()  # of expressions
        self._missing: deque[KernelSource] = deque(maxlen=_MOST_WAITING)  # of single operations
        self._work: Iterator[None] | None = None if self._is_done() else self._listed()
        self._thread = ThreadPoolExecutor(1, f"penstock {device.name}, ahead")
        self._lock = threading.Lock()
        self._awake = False  # whether a step is under way, or will be
        self._seen: object = None  # what was recorded when a step last looked,
        self._last_used = perf_counter()  # and when the device last had work
        self._wake()

    def compile(self, build: Callable[[], None]) -> Future[None]:
        """Have the kernels of an expression compiled to disk, unless the future is cancelled before."""
        future: Future[None] = Future()
        self._wanted.append((future, build))
        self._wake()
        return future

    def add(self, sources: Iterable[KernelSource]) -> None:
        """Compile these single operations too: they were missing for an expression."""
        self._missing += [source for source in sources if source.alone]
        self._wake()

    def _is_done(self) -> bool:
        """Whether an earlier process compiled the list."""
        return self._kernels.kept.get("ahead") == _edition(self._device)

    def _wake(self) -> None:
        with self._lock:
            if self._awake or not (self._wanted or self._missing or self._work):
                return
            self._awake = True  # before: the step may end at once
            with suppress(RuntimeError):  # the interpreter ends
                self._thread.submit(self._step)

    def _step(self) -> None:
        """Compile a few kernels. A step is short, because the interpreter waits for it at exit."""
        if self._device.stream.unavailable:
            return
        if self._wanted:
            self._compile_wanted()
        elif not self._is_quiet():
            sleep(_PAUSE_SECONDS)
        else:
            with suppress(PenstockError):  # what cannot be compiled now is compiled when it is needed
                self._compile_next()
        self._awake = False
        self._wake()

    def _is_quiet(self) -> bool:
        """Whether nobody has built a program for a while, nor given the device work.

        Lowering takes Python's lock from whoever launches, and compilers take the cores of a CPU: a step of
        tokens would take several times as long.
        """
        now, queue = perf_counter(), self._device.stream.compute
        batch = queue.opened
        seen = batch, len(batch.events)
        with self._device.stream.lock:
            last = queue.last_submitted
        if seen != self._seen or (last is not None and not self._device.driver.is_done(last)):
            self._seen, self._last_used = seen, now
        return now - max(self._last_built(), self._last_used) >= _QUIET_SECONDS

    def _compile_wanted(self) -> None:
        future, build = self._wanted.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            build()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _compile_next(self) -> None:
        if self._missing:
            self._kernels.compile_ahead([self._missing.popleft()])
        elif self._work is not None and next(self._work, _END) is _END:
            self._work = None

    def _listed(self) -> Iterator[None]:
        gpu = self._device.capabilities.vector_width == 1
        shapes = SHAPES[:1] if gpu else SHAPES
        alike = chain(
            *(zip(operations(*first), operations(*second), strict=True) for first, second in shapes),
            *(zip(integers(*first), integers(*second), strict=True) for first, second in shapes),
            ahead_gpu.gpu_operations() if gpu else ahead_cpu.cpu_operations(),
        )
        for nodes in alike:
            for node in nodes:  # first, so that kernels take all sizes that differ
                with self._device.running:
                    self._sources(node)
                yield
            for node in nodes:
                with self._device.running:
                    shared = [source for source in self._sources(node) if source.alone]
                    missing = self._kernels.missing(shared)
                yield
                for source in missing:
                    self._kernels.compile_ahead([source])
                    yield
        self._kernels.kept.put("ahead", _edition(self._device))

    def _sources(self, node: Node) -> list[KernelSource]:
        nodes = topological([node])
        inputs = [leaf for leaf in nodes if leaf.value is not None]
        names = [constant_key(part, name) for part in nodes for name in part.primitive.constants]
        kernels = self._kernels
        target = Target(
            self._device.name, self._device.capabilities, kernels.lowering, apart=kernels.shared_lowering
        )
        schedule = compile_graph([node], inputs, {name: at for at, name in enumerate(names)}, target)
        return kernel_sources(schedule, self._device, self._kernels)


def _edition(device: Device) -> str:
    can = device.capabilities
    listed = SHAPES, ahead_operations.LIST, (ahead_gpu if can.vector_width == 1 else ahead_cpu).LIST
    return digest(f"{version('penstock')} {can.api} {can.description} {listed}")
