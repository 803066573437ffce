"""Kernels of single operations, compiled before anybody needs them: once for a device, and kept on disk.

They compute an expression that is new while its own kernels are compiled; see `cache`. A kernel takes sizes
as arguments once two shapes are known, so every operation is written for two. What was missing for an
expression is added. A thread compiles when nothing else is being built. It goes on in the next process where
this one ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from time import perf_counter, sleep

from penstock.compiler.pipeline import compile_graph
from penstock.compiler.target import Target
from penstock.errors import PenstockError
from penstock.execution.executable import kernel_sources
from penstock.graph import elementwise as ops
from penstock.graph.contraction import gather
from penstock.graph.dtypes import bool_, float16, float32, int32, int64
from penstock.graph.elementwise import PRIMITIVES, cast, like
from penstock.graph.node import DType, Node, Shape, placeholder, topological
from penstock.graph.reducing import argmax, expand, max_, min_, prod, sum_
from penstock.graph.reference import number_key
from penstock.graph.shaping import concat, slice_
from penstock.kernels.cache import KernelCache
from penstock.kernels.source import KernelSource, digest
from penstock.runtime import Device

# Two shapes with items that are left after the last vector of a row, and two without.
_SHAPES = (((101, 103), (211, 307)), ((104, 96), (168, 320)))
_UNARY = (
    *("negative", "abs", "sign", "floor", "ceil", "round", "exp", "expm1", "log", "log1p", "sqrt"),
    *("sin", "cos", "tanh", "isnan", "isfinite"),
)
_BINARY = ("add", "subtract", "multiply", "divide", "pow", "maximum", "minimum")
_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_CASTS = ((float32, float16), (float16, float32), (int64, float32), (int32, float32))
_QUIET_SECONDS = 1.0  # since somebody built a program
_PAUSE_SECONDS = 0.05
_MOST_WAITING = 64  # kernels that were missing for expressions
_END = object()


def operations(rows: int, columns: int) -> Iterator[Node]:
    """The operations, on matrices of this shape, vectors, and single values.

    Not among them: sums of columns, transposes and products, whose kernels differ in more than sizes.
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
    for reduce in (sum_, max_, min_, prod):
        yield reduce(x, (1,))
        for times in (8, 6, 1):  # all of an array, a long one in parts
            yield reduce(array((times * rows * columns,)), (0,))
        for count in (columns // 2, 2 + columns % 4):  # the parts
            yield reduce(array((count,)), (0,))
    yield argmax(x, 1)
    yield expand(array((1, columns)), shape)
    yield expand(array((rows, 1)), shape)
    yield expand(array((1, 1)), shape)
    yield slice_(x, ((0, 1, 1), (0, columns, 1)))
    yield slice_(x, ((3, 1, 1), (0, columns, 1)))
    yield slice_(x, ((2, rows - 5, 1), (1, columns - 4, 1)))
    yield concat([x, y], 0)
    yield concat([x, y], 1)
    yield gather(x, array((rows + 1,), int64))


def _elementwise(x: Node, y: Node) -> Iterator[Node]:
    for name in _UNARY:
        yield _apply(name, x)
    for name in (*_BINARY, *_COMPARISONS):
        yield _apply(name, x, y)
        yield _apply(name, x, like(x, 2.5))
    for name in _BINARY:
        yield _apply(name, like(x, 2.5), x)


def _apply(name: str, *inputs: Node) -> Node:
    return Node(PRIMITIVES[name], inputs, {})


class Ahead:
    """Compiles the kernels of single operations of a device, a kernel at a time."""

    def __init__(self, device: Device, kernels: KernelCache, last_built: Callable[[], float]) -> None:
        """`last_built`: when somebody built a program last."""
        self._device, self._kernels, self._last_built = device, kernels, last_built
        self._missing: deque[KernelSource] = deque(maxlen=_MOST_WAITING)
        self._work: Iterator[None] | None = None if self._is_done() else self._listed()
        self._thread = ThreadPoolExecutor(1, f"penstock {device.name}, ahead")
        if self._work is not None:
            self._submit()

    def add(self, sources: Iterable[KernelSource]) -> None:
        """Compile these too: they were missing for an expression."""
        idle = self._work is None and not self._missing
        self._missing += [source for source in sources if source.alone]
        if idle and self._missing:
            self._submit()

    def _is_done(self) -> bool:
        """Whether an earlier process compiled the list."""
        return self._kernels.kept.get("ahead") == _edition(self._device)

    def _submit(self) -> None:
        with suppress(RuntimeError):  # the interpreter ends
            self._thread.submit(self._step)

    def _step(self) -> None:
        """Compile the next kernel. Each is a piece of work of its own, as the interpreter waits for that."""
        if self._device.stream.unavailable:
            return
        if perf_counter() - self._last_built() < _QUIET_SECONDS:
            sleep(_PAUSE_SECONDS)
        else:
            with suppress(PenstockError):  # what cannot be compiled now is compiled when it is needed
                self._compile_next()
        if self._work is not None or self._missing:
            self._submit()

    def _compile_next(self) -> None:
        if self._missing:
            self._kernels.compile_ahead(self._missing.popleft())
        elif self._work is not None and next(self._work, _END) is _END:
            self._work = None

    def _listed(self) -> Iterator[None]:
        for first, second in _SHAPES:
            for known, node in zip(operations(*first), operations(*second), strict=True):
                with self._device.running:
                    self._sources(known)
                    missing = self._kernels.missing(
                        [source for source in self._sources(node) if source.alone]
                    )
                yield
                for source in missing:
                    self._kernels.compile_ahead(source)
                    yield
        self._kernels.kept.put("ahead", _edition(self._device))

    def _sources(self, node: Node) -> list[KernelSource]:
        nodes = topological([node])
        inputs = [leaf for leaf in nodes if leaf.value is not None]
        names = [number_key(part, name) for part in nodes for name in part.primitive.constants]
        target = Target(
            self._device.name, self._device.capabilities, self._kernels.shared_lowering, fuses=False
        )
        schedule = compile_graph([node], inputs, {name: at for at, name in enumerate(names)}, target)
        return kernel_sources(schedule, self._device, self._kernels)


def _edition(device: Device) -> str:
    can = device.capabilities
    return digest(f"{version('penstock')} {can.api} {can.description}")
