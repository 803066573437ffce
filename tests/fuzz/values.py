"""Random expressions of every dtype over special values, against NumPy with bounds for each function."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fuzz.reference import BFLOAT16, COMPARISONS, Inexact, Reference, Value, compared
from fuzz.running import Invalid, Outcome

import penstock as ps
from penstock import Device
from penstock.tensor.core import realize_together

FLOATS = ("float16", "bfloat16", "float32", "float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *SIGNED, *UNSIGNED, "bool", "complex64", "complex128")
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 67, 129)  # around the widths of vectors
INTEGERS = (0, 1, 2, 3, 7, 8, 100, 127, 128, 255, 256, 1 << 15, (1 << 16) - 1, 1 << 23, (1 << 24) + 1)
INTEGERS += ((1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64)
NUMBERS = (0.0, 1.0, 0.5, 1.5, 2.0, 3.0, 20.0, 88.7, 104.0, 1e-8, 1e-40, 1e-45, 5e-324, 1e30, 3.4e38, 1e300)
NUMBERS += (2.0**23, 2.0**24 + 1, 2.0**31, 2.0**53 + 1, 65504.0, 1e5, np.pi / 2, np.inf, np.nan)

# Functions of a tensor, by the kinds of dtype that they take.
ONE = {
    "biufc": "",
    "biu": "bitwise_invert",
    "b": "logical_not",
    "iufc": "abs conj negative positive real sign square isfinite isinf isnan",
    "iuf": "ceil floor round trunc",
    "f": "signbit exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh reciprocal erf erfc",
    "c": "imag",
    "biu ": "exp log sin sqrt tanh",  # which make float32 of them
}
TWO = {
    "biufc": "add multiply equal not_equal",
    "iufc": "subtract",
    "biuf": "greater greater_equal less less_equal maximum minimum",
    "iuf": "floor_divide remainder",
    "f": "divide atan2 hypot pow copysign nextafter logaddexp",
    "biu": "bitwise_and bitwise_or bitwise_xor",
    "b": "logical_and logical_or logical_xor",
}

OWN = "relu sigmoid silu"


def leaf(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Values of a dtype: half of them special, at any place, the rest of ordinary size."""
    choice = np.random.default_rng(seed)
    kind = np.dtype(BFLOAT16 if dtype == "bfloat16" else dtype)
    if dtype == "bool":
        return choice.random(shape) < 0.5
    if dtype.startswith("complex"):
        return (choice.normal(size=shape) + 1j * choice.normal(size=shape)).astype(kind)
    special = choice.random(shape) < choice.choice([0.1, 0.5])
    signs = choice.choice([-1, 1], shape)
    if kind.kind in "iu":
        ends = np.iinfo(kind)
        fitting = [n for n in (*INTEGERS, *(-n for n in INTEGERS), ends.min) if ends.min <= n <= ends.max]
        ordinary = choice.integers(max(ends.min, -9), 10, shape).astype(kind)
        return np.where(special, np.array(fitting, kind)[choice.integers(len(fitting), size=shape)], ordinary)
    with np.errstate(over="ignore"):
        special_values = np.array(NUMBERS)[choice.integers(len(NUMBERS), size=shape)]
        scale = choice.choice([1.0, 1.0, 10.0, 1e3])
        return np.where(special, special_values * signs, choice.normal(size=shape) * scale).astype(kind)


class Wrong(Exception):
    """A result of a line differs from NumPy's."""


class ValueFuzzer:
    """Programs of expressions; `read` lines compare one value with NumPy's."""

    def __init__(self, device: Device, length: int = 14) -> None:
        self.device = device
        self.length = length
        denormal = ps.asarray(np.full(3, 1e-40, np.float32), device=device)
        self.flushes = not bool(np.all((denormal * 2).numpy()))  # WGSL permits it

    def grow(self, seed: int) -> Outcome:
        writer = Writer(Run(self), random.Random(seed))
        outcome = Outcome(writer.lines)
        try:
            while len(writer.lines) < self.length:
                writer.step()
            used = set(re.findall(r"v\d+", " ".join(line.split(" = ")[-1] for line in writer.lines)))
            writer.add(f"read({', '.join(name for name in writer.run.values if name not in used)})")
        except Wrong as error:
            outcome.wrong = str(error)
        return outcome

    def run(self, lines: Sequence[str]) -> str | None:
        run = Run(self)
        for line in lines:
            wrong = run.line(line)
            if wrong is not None:
                return wrong
        return None


class Run:
    """A program: its tensors, and NumPy's arrays beside them."""

    def __init__(self, fuzzer: ValueFuzzer) -> None:
        self.fuzzer = fuzzer
        self.tensors: dict[str, Any] = {}
        self.values: dict[str, Value] = {}

    def line(self, line: str) -> str | None:
        """Run a line, `name = expression` or `read(name)`; the difference, if any."""
        if line.startswith("read("):
            names = line.removeprefix("read(").removesuffix(")").split(", ")
            names = [name for name in names if name in self.values]  # of which some were taken away
            if not names:
                raise Invalid
            return self._read(names)
        name, text = line.split(" = ", 1)
        try:
            with np.errstate(all="ignore"):
                value = eval(text, {"ps": Reference(), "leaf": lambda *a: Value(leaf(*a))}, self.values)
        except (Inexact, NameError):
            raise Invalid from None
        on_device = {"ps": ps, "leaf": lambda *a: ps.asarray(leaf(*a), device=self.fuzzer.device)}
        try:
            self.tensors[name] = eval(text, on_device, self.tensors)
        except Exception as error:
            return f"{line}: {type(error).__name__}: {error}"
        if self.fuzzer.flushes:
            value.free = _denormal(value) if value.free is None else value.free | _denormal(value)
        self.values[name] = value
        return None

    def _read(self, names: Sequence[str]) -> str | None:
        """Compute these in one run, and compare them; then the model takes the computed values."""
        try:
            realize_together([self.tensors[name] for name in names])
            result = [self.tensors[name].numpy() for name in names]
        except Exception as error:
            return f"read({', '.join(names)}): {type(error).__name__}: {error}"
        for name, array in zip(names, result, strict=True):
            wrong = compared(self.values[name], array)
            if wrong is not None:
                return f"{name}: {wrong}"
            self.values[name] = Value(array)
        return None


def _denormal(value: Value) -> Any:
    if value.array.dtype.kind != "f":
        return np.zeros(value.array.shape, bool)
    return np.abs(value.array.astype(np.float64)) < 1.2e-38


class Writer:
    """Chooses the lines of a program."""

    def __init__(self, run: Run, choice: random.Random) -> None:
        self.run = run
        self.choice = choice
        self.lines: list[str] = []
        axes = choice.choice([1, 1, 2, 3])
        sizes = [choice.choice(LENGTHS[:6]) for _ in range(axes - 1)]
        self.shape = (*sizes, choice.choice(LENGTHS))
        self.dtypes = choice.sample(sorted(set(DTYPES)), 3)
        for dtype in self.dtypes:
            self.leaf(dtype)

    def add(self, line: str) -> None:
        self.lines.append(line)
        wrong = self.run.line(line)
        if wrong is not None:
            raise Wrong(wrong)

    def make(self, text: str) -> None:
        self.add(f"v{len(self.lines)} = {text}")

    def leaf(self, dtype: str, shape: tuple[int, ...] | None = None) -> str:
        name = f"v{len(self.lines)}"
        self.make(f"leaf({dtype!r}, {self.shape if shape is None else shape}, {self.choice.getrandbits(30)})")
        return name

    def step(self) -> None:
        """One more line, with those that have to be before it."""
        steps: list[Callable[[], None]] = [
            *[self.unary] * 6,
            *[self.two] * 6,
            *[self.with_number] * 3,
            *[self.cast] * 3,
            *[self.reduce] * 3,
            self.own,
            self.shift,
            self.power,
            self.select,
            *[self.move] * 2,
            self.index,
            self.product,
            self.order,
        ]
        self.choice.choice(steps)()

    # Operands

    def some(self, kinds: str, *, exact: bool = True) -> str:
        """A value of some kind of dtype; if there is none, a line that makes it is added."""
        values = self.run.values
        names = [n for n, v in values.items() if kind(v) in kinds and 0 < v.array.size < 5000]
        if not names:
            dtypes = [d for d in DTYPES if kind_of(d) in kinds]
            return self.leaf(self.choice.choice(dtypes))
        name = self.choice.choice(names[-4:] if self.choice.random() < 0.6 else names)
        if exact and not values[name].exact:
            self.add(f"read({name})")
        return name

    def beside(self, name: str) -> str:
        """An operand for another value: usually of its dtype, in a shape that broadcasts to its shape."""
        value = self.run.values[name]
        dtype, shape = value.array.dtype.name, value.array.shape
        fitting = [
            n
            for n, v in self.run.values.items()
            if v.array.dtype == value.array.dtype and v.array.shape == shape and v.exact
        ]
        if fitting and self.choice.random() < 0.6:
            return self.choice.choice(fitting)
        if self.choice.random() < 0.3:
            shape = tuple(self.choice.choice([1, n]) for n in shape)
        if self.choice.random() < 0.2 and value.array.dtype.kind in "iuf":
            same = [d for d in DTYPES if kind_of(d) == kind(value) and promotes(d, dtype)]
            dtype = self.choice.choice(same)
        return self.leaf(dtype, shape)

    def number(self, value: Value, comparing: bool) -> str:
        """A Python number for a value; outside the range of its dtype only in comparisons."""
        which = kind(value)
        if which == "b":
            return str(self.choice.random() < 0.5)
        if which in "iu":
            ends = np.iinfo(value.array.dtype)
            numbers = (*INTEGERS, *(-n for n in INTEGERS))
            return str(self.choice.choice([n for n in numbers if comparing or ends.min <= n <= ends.max]))
        number = self.choice.choice(NUMBERS) * self.choice.choice([-1, 1])
        number = number if np.isfinite(number) else self.choice.choice([0.1, -2.0])
        return repr(float(number))

    # Lines

    def unary(self) -> None:
        kinds, names = self.choice.choice([pair for pair in ONE.items() if pair[1]])
        x = self.some(kinds)
        self.make(f"ps.{self.choice.choice(names.split())}({x})")

    def two(self) -> None:
        kinds, names = self.choice.choice(list(TWO.items()))
        x = self.some(kinds)
        self.make(f"ps.{self.choice.choice(names.split())}({x}, {self.beside(x)})")

    def with_number(self) -> None:
        name = self.choice.choice(["add", "multiply", "maximum", "minimum", *COMPARISONS, *COMPARISONS])
        x = self.some("iuf")
        number = self.number(self.run.values[x], name in COMPARISONS)
        self.make(f"ps.{name}({x}, {number})")

    def cast(self) -> None:
        dtype = self.choice.choice(DTYPES)
        x = self.some("biufc" if dtype.startswith("complex") else "biuf")
        self.make(f"ps.astype({x}, ps.{dtype})")

    def own(self) -> None:
        self.make(f"ps.nn.functional.{self.choice.choice(OWN.split())}({self.some('f')})")

    def shift(self) -> None:
        x = self.some("iu")
        bits = 8 * self.run.values[x].array.dtype.itemsize
        amount = self.leaf(self.run.values[x].array.dtype.name, self.run.values[x].array.shape)
        way = self.choice.choice(["left", "right"])
        self.make(f"ps.bitwise_{way}_shift({x}, ps.remainder({amount}, {bits + 3}))")

    def power(self) -> None:
        x = self.some("iu")
        self.make(f"ps.pow({x}, {self.choice.randint(0, 5)})")

    def select(self) -> None:
        x = self.some("biuf")
        condition = self.leaf("bool", self.run.values[x].array.shape)
        if self.choice.random() < 0.5 and kind(self.run.values[x]) in "iuf":
            low, high = sorted(self.choice.sample([0, 1, 2, 7, 100], 2))
            self.make(f"ps.clip({x}, {low}, {high})")
        else:
            self.make(f"ps.where({condition}, {x}, {self.beside(x)})")

    def reduce(self) -> None:
        kinds, name = self.choice.choice(
            [
                ("iuf", "sum"),
                ("iuf", "sum"),
                ("f", "mean"),
                ("iu", "prod"),
                ("biuf", "all"),
                ("biuf", "any"),
                ("iuf", "max"),
                ("iuf", "min"),
                ("iuf", "argmax"),
                ("iuf", "argmin"),
                ("biuf", "count_nonzero"),
            ]
        )
        x = self.some(kinds)
        axis = self.choice.choice([None, *range(self.run.values[x].array.ndim)])
        self.make(f"ps.{name}({x}, axis={axis})")

    def order(self) -> None:
        x = self.some("iuf")
        if not self.run.values[x].array.ndim:
            return
        axis = self.choice.randrange(self.run.values[x].array.ndim)
        name = self.choice.choice(["sort", "argsort", "cumulative_sum"])
        if name == "cumulative_sum" and kind(self.run.values[x]) == "f":
            name = "sort"
        self.make(f"ps.{name}({x}, axis={axis})")

    def move(self) -> None:
        x = self.some("biuf", exact=False)
        shape = self.run.values[x].array.shape
        axes = list(range(len(shape)))
        self.choice.shuffle(axes)
        texts = [f"ps.flip({x})", f"ps.roll({x}, {self.choice.randint(-9, 9)})", f"ps.reshape({x}, (-1,))"]
        texts += [f"ps.permute_dims({x}, {tuple(axes)})", f"ps.broadcast_to({x}, {(2, *shape)})"]
        self.make(self.choice.choice(texts))

    def index(self) -> None:
        x = self.some("biuf", exact=False)
        shape = self.run.values[x].array.shape
        if not shape:
            return
        start, step = self.choice.randint(0, 2), self.choice.choice([1, 2, -1])
        mask = self.leaf("bool", shape)
        at = self.choice.randrange(-shape[0], shape[0])
        ids = f"ps.remainder({self.leaf('uint8', (7,))}, {min(shape[0], 255)})"
        key = self.choice.choice([f"{start}::{step}", f"..., ::{step}", f"{at}", f"{mask}", ids])
        self.make(f"{x}[{key}]")

    def product(self) -> None:
        dtype = self.choice.choice([d for d in DTYPES if kind_of(d) in "iuf"])
        rows, inner, columns = (self.choice.choice(LENGTHS[:13]) for _ in range(3))
        a, b = self.leaf(dtype, (rows, inner)), self.leaf(dtype, (inner, columns))
        self.make(f"ps.matmul({a}, {b})")


def kind(value: Value) -> str:
    return kind_of(value.array.dtype.name)


def kind_of(dtype: str) -> str:
    return "f" if dtype == "bfloat16" else np.dtype(dtype).kind


def promotes(first: str, second: str) -> bool:
    try:
        ps.result_type(getattr(ps, first), getattr(ps, second))
    except TypeError:
        return False
    return True
