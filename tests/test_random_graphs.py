"""Random graphs as programs on every kind of device, in poisoned memory, against NumPy node by node."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, WEBGPU_KINDS, opencl_threads

from penstock import Device
from penstock.compiler import passes
from penstock.drivers.driver import Capabilities
from penstock.drivers.opencl import opencl_capabilities
from penstock.execution import realize
from penstock.execution.executable import Executable
from penstock.execution.structure import Structure
from penstock.graph import contraction, creating, elementwise, reducing, shaping
from penstock.graph.node import Node, leaf, topological
from penstock.graph.random import random_bits
from penstock.graph.windows import windows
from penstock.kernels import concatenation, lower
from penstock.kernels.lowering import fused

FLOATS = ("float32", "float32", "float32", "float16", "float64")
WHOLES = ("int32", "int32", "int64", "uint32", "uint64", "int8", "uint8", "int16", "uint16")
# The maximal error of a step of a computation, when no value exceeds 1.
ROUNDING = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}
Shape = tuple[int, ...]


class Grower:
    """Grows a random graph. The same seed gives the same structure, whatever the values and constants are.

    Fractions stay between -1 and 1 and errors do not grow, because every step is scaled accordingly. What
    jumps (comparisons, sorting) is done only to values that every device computes to the last bit.
    """

    def __init__(self, seed: int, values: int, to_leaf: Callable[[np.ndarray], Node]) -> None:
        self.choice = random.Random(seed)
        self.values = np.random.default_rng(values)
        self.offset = values % 7
        self.to_leaf = to_leaf
        self.leaves: list[tuple[Node, np.ndarray]] = []
        self.nodes: list[Node] = []
        self.error: dict[Node, float] = {}  # how far a value may be off; 0: not at all
        self.constants = 0
        longest = self.choice.choice((9, 9, 9, 67))
        self.shape = tuple(self.choice.randint(1, 9) for _ in range(self.choice.randint(0, 3)))
        self.shape = (*self.shape, self.choice.randint(1, longest))
        for _ in range(3):
            self.keep(self.leaf(self.shape, self.choice.choice(FLOATS)), 0)
        self.keep(self.leaf(self.shape, self.choice.choice(WHOLES)), 0)

    # Values

    def leaf(self, shape: Shape, dtype: str) -> Node:
        if dtype == "bool":
            array = self.values.random(shape) < 0.5
        elif dtype.startswith("float"):
            array = self.values.uniform(-1, 1, shape).astype(dtype)
        else:
            array = self.values.integers(0 if dtype[0] == "u" else -9, 9, shape).astype(dtype)
        node = self.to_leaf(np.asarray(array))
        self.leaves.append((node, np.asarray(array)))
        return self.known(node, 0)

    def number(self, like: Node) -> Node:
        """A constant; all of them differ, so that they are as many whatever their values are."""
        self.constants += 1
        if like.dtype == bool:
            return self.known(elementwise.like(like, bool(self.choice.getrandbits(1))), 0)
        if like.dtype.kind == "f":
            value: Any = (self.constants % 120 * 8 + self.offset + 1) / 1009
        else:
            value = self.constants % 13 * 8 + self.offset + 17
        return self.known(elementwise.like(like, value), 0)

    def scaled(self, x: Node, factor: float) -> Node:
        """Times a constant that is the same in every run."""
        return elementwise.multiply(x, elementwise.like(x, factor))

    def known(self, node: Node, error: float) -> Node:
        self.error[node] = error
        return node

    def keep(self, node: Node, error: float) -> Node:
        self.nodes.append(self.known(node, error))
        return node

    def after(self, node: Node, *sources: Node) -> Node:
        """Keep a node with one rounding more than its sources."""
        rounding = ROUNDING.get(str(node.dtype), 0)
        return self.keep(node, max(self.error[source] for source in sources) + 4 * rounding)

    def same(self, node: Node, *sources: Node) -> Node:
        """Keep a node that holds items of its sources, or is computed exactly."""
        return self.keep(node, max((self.error[source] for source in sources), default=0))

    # Choosing

    def one_of(self, names: str) -> str:
        return self.choice.choice(names.split())

    def some(self, kinds: str = "biuf", exact: bool = False) -> Node:
        """One of the nodes, usually a late node."""
        result = [
            node for node in self.nodes if node.dtype.kind in kinds and not (exact and self.error[node] > 0)
        ]
        if not result:
            return self.keep(self.leaf(self.shape, {"b": "bool", "f": "float32"}.get(kinds, "int32")), 0)
        return self.choice.choice(result[-8:] if self.choice.random() < 0.7 else result)

    def fitted(self, x: Node, like: Node) -> Node:
        """Some of the values of `x` in the shape and dtype of another node."""
        error = self.error[x]
        if x.dtype != like.dtype:
            x = self.cast(x, like.dtype)
            error = max(error, self.error[x])
        if x.size == like.size:
            x = shaping.reshape(x, like.shape)
        elif all(n in (1, m) for n, m in zip(reversed(x.shape), reversed(like.shape), strict=False)) and (
            x.ndim <= like.ndim
        ):
            padded = (1,) * (like.ndim - x.ndim) + x.shape
            x = reducing.expand(shaping.reshape(x, padded), like.shape)
        else:
            item = shaping.slice_(x, tuple((self.choice.randrange(n), 1, 1) for n in x.shape))
            x = reducing.expand(shaping.reshape(item, (1,) * like.ndim), like.shape)
        return self.known(x, error)

    def cast(self, x: Node, dtype: np.dtype[Any]) -> Node:
        error = self.error[x]
        if x.dtype.kind == "f" and dtype.kind in "iu":
            whole = np.dtype(np.int32)  # what is nearer to 0 than 1 becomes 0, however far it is off
            halved = elementwise.cast(self.scaled(x, 0.5), whole)
            return self.known(elementwise.cast(elementwise.add(halved, self.number(halved)), dtype), 0)
        if x.dtype.kind in "iu" and dtype.kind == "f":
            small = elementwise.remainder(x, elementwise.like(x, 8))
            return self.known(self.scaled(elementwise.cast(small, dtype), 0.125), 0)
        if x.dtype.kind == "f" and dtype.kind == "b" and error:
            return self.leaf(x.shape, "bool")
        rounding = ROUNDING.get(str(dtype), 0) if dtype.kind == "f" else 0
        narrower = dtype.kind == "f" and x.dtype.kind == "f" and dtype.itemsize < x.dtype.itemsize
        return self.known(elementwise.cast(x, dtype), error + rounding if narrower or error else error)

    def axes(self, x: Node) -> tuple[int, ...]:
        count = self.choice.randint(1, x.ndim)
        if self.choice.random() < 0.5:
            return tuple(range(x.ndim - count, x.ndim))
        return tuple(sorted(self.choice.sample(range(x.ndim), count)))

    # Steps

    def grow(self) -> None:
        steps: Sequence[tuple[Callable[[], Any], int]] = (
            (self.unary, 6),
            (self.binary, 8),
            (self.whole, 4),
            (self.truth, 2),
            (self.select, 2),
            (self.change_dtype, 2),
            (self.reduce, 5),
            (self.softmax, 1),
            (self.view, 6),
            (self.pad, 2),
            (self.concat, 2),
            (self.matmul, 2),
            (self.look_up, 1),
            (self.scatter, 1),
            (self.scan, 1),
            (self.extreme, 1),
            (self.sequence, 1),
            (self.bits, 1),
            (self.new_leaf, 1),
        )
        kinds, weights = zip(*steps, strict=True)
        self.choice.choices(kinds, weights)[0]()

    def unary(self) -> None:
        x = self.some("f")
        name = self.one_of("negative abs tanh sin cos exp sqrt atan expm1 divide log1p stop")
        unit = elementwise.like(x, 1)
        if name in ("negative", "abs", "stop"):
            self.same(Node(elementwise.PRIMITIVES[name], (x,), {}), x)
        elif name == "exp":
            self.after(elementwise.exp(elementwise.subtract(x, unit)), x)
        elif name == "sqrt":
            self.after(self.scaled(elementwise.sqrt(elementwise.add(unit, elementwise.abs_(x))), 0.5), x)
        elif name == "expm1":
            self.after(self.scaled(elementwise.expm1(x), 0.25), x)
        elif name == "log1p":
            self.after(elementwise.log1p(elementwise.abs_(x)), x)
        elif name == "divide":
            above = elementwise.add(elementwise.abs_(x), unit)
            self.after(self.scaled(elementwise.divide(unit, above), 0.5), x)
        else:
            self.after(Node(elementwise.PRIMITIVES[name], (x,), {}), x)

    def binary(self) -> None:
        x = self.some("f")
        y = self.number(x) if self.choice.random() < 0.3 else self.fitted(self.some("f"), x)
        name = self.one_of("add subtract multiply maximum minimum divide atan2 hypot")
        if name in ("maximum", "minimum"):
            self.same(getattr(elementwise, name)(x, y), x, y)
        elif name == "divide":
            above = elementwise.add(elementwise.abs_(y), elementwise.like(y, 2))
            self.after(elementwise.divide(x, above), x, y)
        elif name == "atan2":
            above = elementwise.add(elementwise.abs_(y), elementwise.like(y, 2))
            self.after(elementwise.atan2(x, above), x, y)
        elif name == "hypot":
            above = elementwise.add(y, elementwise.like(y, 3))
            self.after(self.scaled(elementwise.hypot(x, above), 0.2), x, y)
        else:
            self.after(self.scaled(getattr(elementwise, name)(x, y), 0.5), x, y)

    def whole(self) -> None:
        x = self.some("iu")
        y = self.number(x) if self.choice.random() < 0.4 else self.fitted(self.some("iu"), x)
        names = (
            "add subtract multiply maximum minimum bitwise_and bitwise_or bitwise_xor remainder floor_divide"
        )
        name = self.choice.choice([*names.split(), "negative", "bitwise_invert", "abs", "sign", "shift"])
        if name == "shift":
            small = elementwise.bitwise_and(y, elementwise.like(y, 7))
            move = self.choice.choice((elementwise.bitwise_left_shift, elementwise.bitwise_right_shift))
            self.same(move(x, small))
        elif name in names.split():
            self.same(Node(elementwise.PRIMITIVES[name], (x, y), {}))
        else:
            self.same(Node(elementwise.PRIMITIVES[name], (x,), {}))

    def truth(self) -> None:
        if self.choice.random() < 0.4:
            x = self.some("b")
            y = self.fitted(self.some("b"), x)
            name = self.one_of("logical_and logical_or logical_xor equal not_equal logical_not")
            self.same(Node(elementwise.PRIMITIVES[name], (x,) if name == "logical_not" else (x, y), {}))
            return
        x = self.some("iuf", exact=True)
        y = self.fitted(self.some("iuf", exact=True), x)
        if self.error[y]:
            y = self.number(x)
        name = self.one_of("equal not_equal less less_equal greater greater_equal")
        self.same(Node(elementwise.PRIMITIVES[name], (x, y), {}))

    def select(self) -> None:
        x = self.some()
        condition = self.some("b")
        y = self.number(x) if self.choice.random() < 0.3 else self.fitted(self.some(x.dtype.kind), x)
        self.same(elementwise.where(self.fitted(condition, self.truth_like(x)), x, y), x, y)

    def truth_like(self, x: Node) -> Node:
        return elementwise.full(x.shape, np.dtype(bool), False)

    def change_dtype(self) -> None:
        x = self.some()
        dtype = np.dtype(self.choice.choice((*FLOATS, *WHOLES, "bool")))
        self.nodes.append(self.cast(x, dtype))

    def reduce(self) -> None:
        x = self.some()
        if not x.ndim:
            return
        axes = self.axes(x)
        count = math.prod(x.shape[axis] for axis in axes)
        if x.dtype == bool:
            result = self.same(self.choice.choice((reducing.any_, reducing.all_))(x, axes), x)
        elif self.choice.random() < 0.4:
            result = self.same(self.choice.choice((reducing.max_, reducing.min_))(x, axes), x)
        elif x.dtype.kind in "iu":
            result = self.same(self.choice.choice((reducing.sum_, reducing.prod))(x, axes), x)
        elif self.choice.random() < 0.2:
            result = self.after(self.scaled(reducing.prod(x, axes), 1 / count), x)
        else:
            result = self.after(self.scaled(reducing.sum_(x, axes), 1 / count), x)
        if self.choice.random() < 0.5:
            self.same(reducing.restore(result, x, axes), result)

    def softmax(self) -> None:
        x = self.some("f")
        if not x.ndim:
            return
        axes = self.axes(x)
        top = reducing.restore(reducing.max_(x, axes), x, axes)
        powers = elementwise.exp(elementwise.subtract(x, top))
        total = reducing.restore(reducing.sum_(powers, axes), x, axes)
        self.after(self.scaled(elementwise.divide(powers, total), 0.5), x)

    def view(self) -> None:
        x = self.some()
        name = self.choice.choice(("reshape", "permute", "slice", "expand", "windows"))
        if name == "reshape":
            self.same(shaping.reshape(x, self.other_shape(x.size)), x)
        elif name == "permute":
            self.same(shaping.permute(x, tuple(self.choice.sample(range(x.ndim), x.ndim))), x)
        elif name == "slice":
            self.same(shaping.slice_(x, self.slices(x.shape)), x)
        elif name == "windows":
            if x.size <= 500 and 0 < x.ndim < 4:
                axis = self.choice.randrange(x.ndim)
                size = self.choice.randint(1, min(4, x.shape[axis]))
                dilation = self.choice.randint(1, max(1, (x.shape[axis] - 1) // max(1, size - 1)))
                self.same(windows(x, axis, size, self.choice.randint(1, 3), min(dilation, 3)), x)
        elif x.size <= 500:
            wide = tuple(n if n > 1 else self.choice.randint(1, 5) for n in x.shape)
            if x.ndim < 4 and self.choice.random() < 0.5:
                at = self.choice.randint(0, x.ndim)
                x = self.known(shaping.reshape(x, (*x.shape[:at], 1, *x.shape[at:])), self.error[x])
                wide = (*wide[:at], self.choice.randint(1, 5), *wide[at:])
            self.same(reducing.expand(x, wide), x)

    def slices(self, shape: Shape) -> tuple[tuple[int, int, int], ...]:
        parts = []
        for length in shape:
            step = self.choice.choice((1, 1, 1, -1, 2, -2, 3))
            count = self.choice.randint(1, -(-length // abs(step)))
            reach = (count - 1) * abs(step)
            start = self.choice.randint(0, length - 1 - reach)
            parts.append((start + (reach if step < 0 else 0), count, step))
        return tuple(parts)

    def other_shape(self, size: int) -> Shape:
        shape: list[int] = []
        while size > 1:
            divisors = [d for d in range(2, size + 1) if size % d == 0]
            shape.append(self.choice.choice((size, self.choice.choice(divisors))))
            size //= shape[-1]
            if len(shape) == 3:
                shape.append(size)
                break
        if len(shape) < 4:
            shape.insert(self.choice.randint(0, len(shape)), 1)
        return tuple(shape)

    def pad(self) -> None:
        x = self.some()
        if x.size > 300:
            return
        shape, parts = [], []
        for count in x.shape:
            step = self.choice.choice((1, 1, 1, -1, 2, -2))
            first, last = self.choice.choice(((0, 0), (0, 1), (1, 0), (2, 3), (8, 8)))
            reach = (count - 1) * abs(step)
            shape.append(first + reach + 1 + last)
            parts.append((first + (reach if step < 0 else 0), count, step))
        self.same(shaping.pad(x, tuple(parts), tuple(shape)), x)

    def concat(self) -> None:
        x = self.some()
        if not x.ndim or x.size > 300:
            return
        parts = [x, self.fitted(self.some(x.dtype.kind), x)]
        axis = self.choice.randrange(x.ndim)
        if self.choice.random() < 0.5:
            slices = [(0, n, 1) for n in x.shape]
            slices[axis] = (0, self.choice.randint(1, x.shape[axis]), 1)
            parts.append(self.known(shaping.slice_(parts[1], tuple(slices)), self.error[parts[1]]))
        self.choice.shuffle(parts)
        self.same(shaping.concat(parts, axis), *parts)

    def matmul(self) -> None:
        x = self.some("f")
        if x.ndim < 2 or x.size > 1000:
            return
        inner = x.shape[-1]
        if self.choice.random() < 0.5:
            order = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
            other = self.known(shaping.permute(x, order), self.error[x])
        elif self.choice.random() < 0.5:
            flat_ = self.leaf((inner, self.choice.randint(1, 9)), str(x.dtype))
            other = reducing.expand(
                shaping.reshape(flat_, (1,) * (x.ndim - 2) + flat_.shape), (*x.shape[:-2], *flat_.shape)
            )
            self.known(other, 0)
        else:
            other = self.leaf((*x.shape[:-2], inner, self.choice.randint(1, 20)), str(x.dtype))
        product = self.scaled(contraction.matmul(x, other), 1 / inner)
        self.after(product, x, other)

    def look_up(self) -> None:
        x, index = self.some(), self.some("iu")
        if not x.ndim or index.size * x.size > 2000:
            return
        index = elementwise.remainder(index, elementwise.like(index, min(x.shape[0], 9)))
        self.same(contraction.gather(x, index), x)

    def scatter(self) -> None:
        x, index = self.some("f"), self.some("iu")
        if not x.ndim:
            return
        length = self.choice.randint(1, 9)
        rows = self.fitted(index, elementwise.full(x.shape[:1], index.dtype, 0))
        rows = elementwise.remainder(rows, elementwise.like(rows, length))
        self.after(self.scaled(contraction.scatter_add(x, rows, length), 1 / x.shape[0]), x)

    def scan(self) -> None:
        x = self.some("iuf")
        if not x.ndim:
            return
        axis = self.choice.randrange(x.ndim)
        reverse = self.choice.random() < 0.5
        result = self.choice.choice((reducing.cumulative_sum, reducing.cumulative_prod))(x, axis, reverse)
        if x.dtype.kind == "f":
            if self.choice.random() < 0.3:
                result = reducing.linear_recurrence(x, x, axis, reverse)
            self.after(self.scaled(result, 1 / x.shape[axis]), x)
        else:
            self.same(result)

    def extreme(self) -> None:
        x = self.some("iuf", exact=True)
        if not x.ndim:
            return
        axis = self.choice.randrange(x.ndim)
        self.same(self.choice.choice((reducing.argmax, reducing.argmin))(x, axis))
        if self.choice.random() < 0.3:
            self.same(reducing.argsort(x, axis, self.choice.random() < 0.5))

    def sequence(self) -> None:
        self.constants += 1
        count = self.choice.randint(1, 20)
        start, step = self.constants % 120 * 8 + self.offset, 3 + self.offset
        if self.choice.random() < 0.5:
            self.keep(creating.sequence(2000 + start, 1000 + step, count, np.dtype(np.int32)), 0)
        else:
            self.keep(creating.sequence(start / 1013, -step / 1019, count, np.dtype(np.float32)), 1e-6)

    def bits(self) -> None:
        state = self.to_leaf(self.values.integers(0, 1 << 32, 4, dtype=np.uint32))
        shape = tuple(self.choice.randint(1, 5) for _ in range(self.choice.randint(1, 3)))
        self.same(random_bits(state, shape))

    def new_leaf(self) -> None:
        shape = self.choice.choice((self.shape, self.shape[-1:], (*self.shape[:-1], 1)))
        self.nodes.append(self.leaf(shape, self.choice.choice((*FLOATS, *WHOLES, "bool"))))


def grown(
    seed: int, size: int, values: int, to_leaf: Callable[[np.ndarray], Node]
) -> tuple[Grower, list[Node]]:
    """A random graph, and some of its nodes to compute: the last, and some in the middle."""
    grower = Grower(seed, values, to_leaf)
    while len(topological(grower.nodes)) < size:
        grower.grow()
    new = [node for node in grower.nodes if node.value is None]
    wanted = new[-4:] + [new[grower.choice.randrange(len(new))] for _ in range(2)]
    return grower, list(dict.fromkeys(wanted))


def meaning(wanted: Sequence[Node]) -> list[np.ndarray]:
    """The values node by node, by NumPy."""
    values: dict[Node, np.ndarray] = {}
    for node in topological(wanted):
        inputs = [values[parent] for parent in node.inputs]
        values[node] = node.value if node.value is not None else lower.computed(node, inputs)
    return [values[node] for node in wanted]


def check(device: Device, seed: int, size: int) -> None:
    """A graph as a program, run again with other values and constants."""
    programs = realize.executables(device)
    built = len(programs._programs)
    for values in range(2):
        _, plain = grown(seed, size, values, lambda array: leaf(array, array.shape, array.dtype))
        expected = meaning(plain)
        grower, wanted = grown(
            seed, size, values, lambda array: leaf(device.upload(array), array.shape, array.dtype)
        )
        structure = Structure(wanted)
        result = programs.known(structure)
        assert result is not None
        inputs = [node.value for node in structure.inputs]
        results = result.run(inputs, structure.constants())
        compare(device, grower, wanted, expected, results, f"seed {seed}, values {values}")
        for node, array in grower.leaves:
            np.testing.assert_array_equal(device.download(node.value, node.dtype, node.shape).wait(), array)
        over = overwriting(result, len(wanted), len(inputs), random.Random(values))
        results = result.run(inputs, structure.constants(), over)
        compare(device, grower, wanted, expected, results, f"seed {seed}, values {values}, over {over}")
    assert len(programs._programs) == built + 1, "one structure, one program"


def overwriting(result: Executable, results: int, inputs: int, choice: random.Random) -> dict[int, int]:
    """Results that are written over inputs, as many as may be; none over the same input as another."""
    over: dict[int, int] = {}
    for at in choice.sample(range(results), results):
        free = [k for k in range(inputs) if k not in over.values() and result.may_overwrite(at, k)]
        if free:
            over[at] = choice.choice(free)
    return over


def compare(
    device: Device,
    grower: Grower,
    wanted: Sequence[Node],
    expected: Sequence[np.ndarray],
    results: Sequence[Any],
    where: str,
) -> None:
    for node, right, buffer in zip(wanted, expected, results, strict=True):
        result = device.download(buffer, node.dtype, node.shape).wait()
        if grower.error[node] == 0:
            np.testing.assert_array_equal(result, right, err_msg=f"{where}: {node}")
        else:
            tolerance = grower.error[node]
            np.testing.assert_allclose(
                result.astype(np.float64),
                right.astype(np.float64),
                rtol=0,
                atol=tolerance,
                err_msg=f"{where}: {node}",
            )


# Devices

CPU = opencl_capabilities(NATIVE)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory of a program is filled with NaN, so that reads before the first write show."""
    scratch, empty = Device.scratch, Device.empty

    def filled(device: Device, buffer: Any) -> Any:
        if buffer.nbytes:
            device.upload(np.full(buffer.nbytes, 0xFF, np.uint8), buffer)
        return buffer

    monkeypatch.setattr(
        Device, "scratch", lambda self, *sizes: [filled(self, arena) for arena in scratch(self, *sizes)]
    )
    monkeypatch.setattr(Device, "empty", lambda self, nbytes: filled(self, empty(self, nbytes)))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Device]]:
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    monkeypatch.setattr(fused, "_BUSY", 0)  # threads of a GPU have several items, even of small values
    poison(monkeypatch)
    made: list[Device] = []

    def device(kind: str) -> Device:
        if kind == "host-groups":  # groups as OpenCL has them, each computed by NumPy

            def fusible(node: Node, capabilities: Capabilities) -> bool:
                return lower.fusible(node, CPU)

            monkeypatch.setattr(passes, "fusible", fusible)
        if kind == "opencl-launches":  # every kernel by itself, however small
            monkeypatch.setattr(concatenation, "_SMALL", 0)
        others = {"host-groups": DRIVERS["host"], "opencl-launches": DRIVERS["opencl-device"]}
        driver = {**DRIVERS, **others, "opencl-threads": opencl_threads}[kind]
        made.append(Device.over(driver()))
        return made[-1]

    yield device
    for item in made:
        item.close()


@pytest.mark.parametrize("kind", ["host", "host-late", "host-far", "host-groups"])
@pytest.mark.parametrize("size", [20, 80, 300])
def test_on_the_host(make: Callable[[str], Device], kind: str, size: int) -> None:
    device = make(kind)
    for seed in range(600 // size):
        check(device, seed, size)


@pytest.mark.slow("2")
@pytest.mark.parametrize(
    "kind", ["opencl-device", "opencl-launches", "opencl-threads", *CUDA_KINDS, *WEBGPU_KINDS]
)
@pytest.mark.parametrize("seed", range(3))
def test_with_kernels(make: Callable[[str], Device], kind: str, seed: int) -> None:
    check(make(kind), 1000 + seed, 60)
