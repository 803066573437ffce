"""Symbolic indices: affine functions of loop variables, and what views make of them.

The coordinates of an item are an `Index` for each axis. A view maps its coordinates to those of its input;
for reshapes that means divisions. If a division is not exact, `SplitNeeded` asks for a loop variable to be
split in two so that it is; if that is impossible, quotient and remainder become variables that the kernel
computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.graph.checkpoint import BARRIER
from penstock.graph.node import Node, Shape
from penstock.graph.panels import PANELS
from penstock.graph.reducing import EXPAND
from penstock.graph.shaping import PERMUTE, RESHAPE, SLICE
from penstock.graph.windows import WINDOWS


@dataclass(frozen=True)
class Index:
    """A constant plus variables times their factors, sorted by name and without zero factors."""

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    def __add__(self, other: Index) -> Index:
        total = dict(self.terms)
        for name, factor in other.terms:
            total[name] = total.get(name, 0) + factor
        return _index(total, self.constant + other.constant)

    def __mul__(self, factor: int) -> Index:
        return _index({name: old * factor for name, old in self.terms}, self.constant * factor)

    def factor(self, name: str) -> int:
        """The factor of a variable."""
        return dict(self.terms).get(name, 0)

    def replaced(self, values: Mapping[str, Index]) -> Index:
        """With indices substituted for some variables."""
        total = Index((), self.constant)
        for name, factor in self.terms:
            total += values.get(name, Index(((name, 1),))) * factor
        return total

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{name} * {factor}" for name, factor in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        text = " + ".join(parts)
        return text if len(parts) == 1 and "*" not in text else f"({text})"


Coords = tuple[Index, ...]
ZERO = Index()


def variable(name: str) -> Index:
    """The index that is just a variable."""
    return Index(((name, 1),))


def _index(terms: dict[str, int], constant: int) -> Index:
    return Index(tuple(sorted((name, factor) for name, factor in terms.items() if factor)), constant)


class SplitNeeded(Exception):
    """A variable has to be split in two, the inner of length `inner`, for an index to stay affine."""

    def __init__(self, name: str, inner: int) -> None:
        super().__init__(name, inner)
        self.name = name
        self.inner = inner


class Variables:
    """The loop variables with their lengths, and the variables that a kernel computes from them."""

    def __init__(self, lengths: Mapping[str, int], splittable: bool = True) -> None:
        self._splittable = frozenset(lengths if splittable else ())
        self.lengths = dict(lengths)  # a variable runs from 0 to its length, exclusive
        self.computed: dict[str, tuple[Index, str, int]] = {}  # name -> dividend, "/" or "%", divisor
        self._names: dict[tuple[Index, str, int], str] = {}

    def bounds(self, index: Index) -> tuple[int, int]:
        """The least and the largest value of an index."""
        low = high = index.constant
        for name, factor in index.terms:
            most = factor * (self.lengths[name] - 1)
            low, high = low + min(most, 0), high + max(most, 0)
        return low, high

    def divide(self, index: Index, divisor: int) -> tuple[Index, Index]:
        """Quotient and remainder of an index that is not negative."""
        if divisor == 1:
            return index, ZERO
        even = _index({n: f for n, f in index.terms if f % divisor == 0}, 0)
        rest = _index({n: f for n, f in index.terms if f % divisor}, index.constant)
        low, high = self.bounds(rest)
        whole = low // divisor
        if high // divisor == whole:  # the rest never carries
            quotient = Index(tuple((n, f // divisor) for n, f in even.terms), whole)
            return quotient, rest + Index((), -whole * divisor)
        for name, factor in rest.terms:
            inner = divisor // factor if factor > 0 and divisor % factor == 0 else 0
            length = self.lengths[name]
            if name in self._splittable and 1 < inner < length and length % inner == 0:
                raise SplitNeeded(name, inner)
        return self._name(index, "/", divisor), self._name(index, "%", divisor)

    def recombined(self, index: Index) -> Index:
        """The same index, with the dividend in place of a quotient and remainder that add up to it.

        A reshape divides a flat index, and flattening the result multiplies it again.
        """
        for name, factor in index.terms:
            whole, operation, divisor = self.computed.get(name, (index, "", 0))
            quotient = self._names.get((whole, "/", divisor))
            if operation == "%" and quotient is not None and index.factor(quotient) == factor * divisor:
                rest = {other: times for other, times in index.terms if other not in (name, quotient)}
                return self.recombined(_index(rest, index.constant) + whole * factor)
        return index

    def _name(self, index: Index, operation: str, divisor: int) -> Index:
        key = (index, operation, divisor)
        if key not in self._names:
            name = self._names[key] = f"q{len(self._names)}"
            self.computed[name] = key
            high = self.bounds(index)[1]
            self.lengths[name] = high // divisor + 1 if operation == "/" else min(divisor, high + 1)
        return variable(self._names[key])


def flat(coords: Coords, shape: Shape) -> Index:
    """The flat row-major index of coordinates."""
    total, stride = ZERO, 1
    for index, length in zip(reversed(coords), reversed(shape), strict=True):
        total += index * stride
        stride *= length
    return total


def unflatten(number: Index, shape: Shape, variables: Variables) -> Coords:
    """The coordinates of an item, given its flat row-major index."""
    result: list[Index] = []
    for axis in range(len(shape) - 1, -1, -1):
        if axis == 0 or math.prod(shape[:axis]) == 1:
            result.append(number)
            result += [ZERO] * axis
            break
        number, remainder = variables.divide(number, shape[axis])
        result.append(remainder)
    return tuple(reversed(result))


def source_coords(view: Node, coords: Coords, variables: Variables) -> Coords:
    """The coordinates in a view's input of the item at the view's coordinates."""
    source = view.inputs[0]
    if view.primitive is BARRIER:
        return coords
    if view.primitive is RESHAPE:
        return _reshaped(view.shape, source.shape, coords, variables)
    if view.primitive is PERMUTE:
        axes = view.attributes["axes"]
        return tuple(coords[axes.index(axis)] for axis in range(source.ndim))
    if view.primitive is EXPAND:
        return tuple(ZERO if n == 1 else index for index, n in zip(coords, source.shape, strict=True))
    if view.primitive is PANELS:
        panel, inside = variables.divide(coords[1], source.shape[2])
        return panel, coords[0], inside
    if view.primitive is WINDOWS:
        axis, stride, dilation = (view.attributes[name] for name in ("axis", "stride", "dilation"))
        inside = coords[axis] * stride + coords[axis + 1] * dilation
        return (*coords[:axis], inside, *coords[axis + 2 :])
    assert view.primitive is SLICE
    parts = zip(coords, view.attributes["slices"], strict=True)
    return tuple(index * step + Index((), start) for index, (start, _, step) in parts)


def _reshaped(shape: Shape, source: Shape, coords: Coords, variables: Variables) -> Coords:
    """The coordinates in the input of a reshape. Only axes that it changes are flattened and divided."""
    result: list[Index] = []
    i = j = 0
    while j < len(source):
        if source[j] == 1:
            result.append(ZERO)
            j += 1
            continue
        first_i, first_j = i, j
        mine, theirs = 1, source[j]
        j += 1
        while mine != theirs:
            if mine < theirs:
                mine *= shape[i]
                i += 1
            else:
                theirs *= source[j]
                j += 1
        number = flat(coords[first_i:i], shape[first_i:i])
        result += unflatten(number, source[first_j:j], variables)
    return tuple(result)
