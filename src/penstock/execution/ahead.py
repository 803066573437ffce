"""Kernels that a thread compiles before they are needed, and keeps on disk.

Kernels of expressions come first; single operations compute these meanwhile, see `cache`. While no program is
being built, the kernels of a list of single operations follow, once for a device. A kernel takes sizes as
arguments once two shapes are known, so every operation is lowered for two shapes. Single operations that an
expression lacked are added to the list. The next process continues where this process ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from itertools import chain, product
from time import perf_counter, sleep

from penstock.compiler.pipeline import compile_graph
from penstock.compiler.target import Target
from penstock.errors import PenstockError
from penstock.execution.ahead_gpu import LIST, gpu_operations
from penstock.execution.sources import kernel_sources
from penstock.graph import elementwise as ops
from penstock.graph import random
from penstock.graph.contraction import gather, matmul
from penstock.graph.dtypes import bool_, float16, float32, int32, int64
from penstock.graph.elementwise import PRIMITIVES, cast, full, like
from penstock.graph.node import DType, Node, Shape, placeholder, topological
from penstock.graph.reducing import argmax, expand, max_, min_, prod, sum_
from penstock.graph.reference import constant_key
from penstock.graph.shaping import concat, permute, slice_, slice_at
from penstock.kernels.cache import KernelCache
from penstock.kernels.source import KernelSource, digest
from penstock.runtime import Device

# Two shapes whose rows end with a partial vector, and two whose rows do not.
_SHAPES = (((101, 103), (211, 307)), ((104, 96), (168, 320)))
# A pair of lengths for each way to reduce a row: short and long rows, with and without a remainder after the
# last 32 and the last 8 items.
_ROWS = ((3, 5), (16, 40), (19, 45), (128, 256), (104, 208), (99, 165), (107, 213))
_ROW_COUNTS = 101, 5000  # reduced by a single task, and shared by several
# Rows, steps and columns of products: one, few, and more than tiles, spans of sums or all cores take at once.
_PRODUCTS = (1, 2, 3, 6, 77, 1031), (1, 3, 7, 19, 700, 3001), (1, 2, 3, 7, 77, 1031)
_SQUARES = (1, 2, 3, 4, 5, 7, 8, 12, 32, 40, 77, 300, 1031), (1, 3, 7, 19, 700, 3001)  # rows and steps
# Rows and columns of sums: with and without a remainder after four rows, a block of sums, and a vector.
_COLUMNS = (
    (2, 3, 8, 45, 100, 256, 300, 301, 512, 784, 1000, 1023, 1540, 2048),
    (2, 7, 16, 31, 40, 64, 99, 100, 256, 515, 2048),
)
_UNARY = (
    *("negative", "abs", "sign", "floor", "ceil", "round", "exp", "expm1", "log", "log1p", "sqrt"),
    *("sin", "cos", "tanh", "isnan", "isfinite"),
)
_BINARY = ("add", "subtract", "multiply", "divide", "pow", "maximum", "minimum")
_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_OF_NUMBERS = ("subtract", "multiply", "divide", "equal")  # which gradients have of two constants
_CASTS = ((float32, float16), (float16, float32), (int64, float32), (int32, float32))
_SIZES = _SHAPES, _ROWS, _PRODUCTS, _SQUARES, _COLUMNS
_LIST = _SIZES, _UNARY, _BINARY, _COMPARISONS, _OF_NUMBERS, _CASTS, 1  # counts what else changed in the list
_QUIET_SECONDS = 1.0  # since somebody built a program, or the device had work
_PAUSE_SECONDS = 0.05
_MOST_WAITING = 64  # kernels that were missing for expressions
_END = object()


def operations(rows: int, columns: int) -> Iterator[Node]:
    """The operations, on matrices of this shape, vectors, and single values.

    Not among them: transposes, whose kernels differ in more than sizes.
    """
    shape = rows, columns

    def array(shape: Shape = shape, dtype: DType = float32) -> Node:
        return placeholder(shape, dtype)

    x, y, truths = array(), array(), array(dtype=bool_)
    for value in (x, array(())):
        yield from _elementwise(value, array(value.shape))
    yield ops.multiply(x, x)
    yield ops.where(truths, x, y)
    yield ops.where(truths, x, like(x, 2.5))
    yield ops.where(truths, like(x, 2.5), x)
    yield ops.logical_not(truths)
    yield ops.logical_and(truths, array(dtype=bool_))
    yield cast(truths, float32)
    for given, wanted in _CASTS:
        yield cast(array(dtype=given), wanted)
    yield argmax(x, 1)
    yield expand(array((1, columns)), shape)
    yield expand(array((rows, 1)), shape)
    yield expand(array((1, 1)), shape)
    yield slice_(x, ((0, 1, 1), (0, columns, 1)))
    yield slice_(x, ((3, 1, 1), (0, columns, 1)))
    yield slice_(x, ((2, rows - 5, 1), (1, columns - 4, 1)))
    yield slice_at(x, [full((), int32, 3)], ((0, 1, 1), (0, columns, 1)), (0,))
    yield slice_at(x, [full((), int32, 3)], ((0, rows, 1), (0, 1, 1)), (1,))
    yield concat([x, y], 0)
    yield concat([x, y], 1)
    yield gather(x, array((rows + 1,), int64))
    state = array((4,), random.WORD)
    yield random.uniform(random.random_bits(state, (*shape, random.UNIFORM_WORDS[float32])), float32)
    yield random.normal(random.random_bits(state, (*shape, random.NORMAL_WORDS[float32])), float32)


def reductions(rows: int, columns: int) -> Iterator[Node]:
    """The reductions of rows with so many items, and of whole arrays."""
    parts = 8 if rows % 2 else 6  # of a long array, which is first reduced in rows of that kind
    for reduce in (sum_, max_, min_, prod):
        yield reduce(placeholder((rows, columns), float32), (1,))
        yield reduce(placeholder((columns,), float32), (0,))
        yield reduce(placeholder((parts * (2048 + columns),), float32), (0,))


def products(rows: int, steps: int, columns: int) -> Iterator[Node]:
    """Products of two matrices, of which one may be transposed."""
    left, right = placeholder((rows, steps), float32), placeholder((steps, columns), float32)
    yield matmul(left, right)
    yield matmul(left, permute(placeholder((columns, steps), float32), (1, 0)))
    yield matmul(permute(placeholder((steps, rows), float32), (1, 0)), right)


def squares(rows: int, steps: int) -> Iterator[Node]:
    """Products of a matrix and its transpose."""
    left, right = placeholder((rows, steps), float32), placeholder((steps, rows), float32)
    yield matmul(left, permute(left, (1, 0)))
    yield matmul(permute(right, (1, 0)), right)


def _elementwise(x: Node, y: Node) -> Iterator[Node]:
    for name in _UNARY:
        yield _apply(name, x)
    for name in (*_BINARY, *_COMPARISONS):
        yield _apply(name, x, y)
        yield _apply(name, x, like(x, 2.5))
    for name in _BINARY:
        yield _apply(name, like(x, 2.5), x)
    for name in _OF_NUMBERS:
        yield _apply(name, like(x, 2.5), like(x, 1.5))


def _apply(name: str, *inputs: Node) -> Node:
    return Node(PRIMITIVES[name], inputs, {})


def _cpu_sums() -> Iterator[Sequence[Node]]:
    """Reductions and products."""
    for pair in _ROWS:
        yield from zip(*map(reductions, _ROW_COUNTS, pair), strict=True)
    yield [sum_(placeholder(shape, float32), (0,)) for shape in product(*_COLUMNS)]
    yield [node for sizes in product(*_PRODUCTS) for node in products(*sizes)]
    yield [node for sizes in product(*_SQUARES) for node in squares(*sizes)]


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
        shapes = _SHAPES[:1] if gpu else _SHAPES
        alike = chain(
            *(zip(operations(*first), operations(*second), strict=True) for first, second in shapes),
            *([gpu_operations()] if gpu else [_cpu_sums()]),
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
    listed = LIST if can.vector_width == 1 else _LIST
    return digest(f"{version('penstock')} {can.api} {can.description} {listed}")
