"""Kernels whose sizes are arguments: a compiled kernel for many shapes.

A kernel is built for a shape, with its sizes, strides and offsets as constants of the IR, which a compiler
can optimise. Kernels that differ in such integers only are a family. The first shapes of a group of
operations get kernels of their own. For later shapes, the integers in which the kernels of a family differ
become arguments, and no compiler is called. On a CPU, small kernels for later shapes have the loops that any
length needs, or lengths with different remainders would have different kernels. The order of operations does
not change, so the results have the same bits.

The families of single operations, which programs share, are kept on disk: the next process has their
arguments from there, and so the kernels that were compiled before.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from penstock.kernels.concatenation import Call
from penstock.kernels.dialects.dialect import DialectBody
from penstock.kernels.rewriting import Integers, with_plain_names
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource, digest
from penstock.kernels.templates.launches import Launch
from penstock.lru import LRU
from penstock.tuning_cache import TuningCache

L = TypeVar("L", bound=Launch | Call)

MOST_WRITTEN_OUT = 2  # shapes of a group of operations that get kernels of their own
_MOST_FAMILIES = 1024
_MOST_KNOWN = 32  # kernels of a family with constants that are remembered


@dataclass
class _Family:
    """Kernels that differ in their integers only."""

    # The integers of the kernels that show which integers differ, and which are always equal.
    known: list[tuple[int, ...]] = field(default_factory=list)
    # The names and bodies of kernels without arguments, by their integers.
    constant: dict[tuple[int, ...], tuple[str, DialectBody]] = field(default_factory=dict)
    argument: tuple[int | None, ...] = ()  # for each integer, the index of its argument, if any
    name: str = ""
    body: DialectBody | None = None  # of the kernel with arguments

    def fits(self, values: tuple[int, ...]) -> bool:
        """Whether the kernel with arguments can have these integers."""
        given: dict[int, int] = {}
        return any(number is not None for number in self.argument) and all(
            value == usual if number is None else given.setdefault(number, value) == value
            for value, usual, number in zip(values, self.known[0], self.argument, strict=True)
        )

    def arguments_with(self, values: tuple[int, ...]) -> tuple[int | None, ...]:
        """Which integers have to be arguments so that the kernel can have these integers too."""
        columns = list(zip(*self.known, values, strict=True))
        differing = dict.fromkeys(column for column in columns if len(set(column)) > 1)
        arguments = {column: argument for argument, column in enumerate(differing)}
        return tuple(arguments.get(column) for column in columns)

    def take_in(self, values: tuple[int, ...], signature: Sequence[str]) -> bool:
        """Extend the kernel with arguments to these integers; False if it would have too many parameters."""
        argument = self.arguments_with(values)
        count = len(set(argument) - {None})
        if _parameter_bytes(signature) + 4 * count > MOST_PARAMETER_BYTES:
            return False
        self.known.append(values)
        self.argument, self.body = argument, None
        return True


class Sizes:
    """The families of a device's kernels."""

    def __init__(self, kept: TuningCache | None = None) -> None:
        """`kept`: the families of kernels that programs share, across processes."""
        self._kept = kept
        self._families = LRU[Hashable, _Family](_MOST_FAMILIES)
        self._shapes = LRU[Hashable, list[Hashable]](_MOST_FAMILIES)
        # Held while a family may change, and not for longer: who waits for it may have to launch something.
        self._lock = threading.Lock()
        self.learned = 0  # how often a family of shared kernels has got to know new integers

    def shapes_before(self, structure: Hashable, key: Hashable) -> int:
        """How many shapes of a structure came before this shape; at most `MOST_WRITTEN_OUT`."""
        with self._lock:
            shapes = self._shapes.use(structure)
            if shapes is None:
                shapes = self._shapes[structure] = []
            if key not in shapes and len(shapes) < MOST_WRITTEN_OUT:
                shapes.append(key)
            return shapes.index(key) if key in shapes else MOST_WRITTEN_OUT

    def launch(self, launch: L, varied: bool) -> L:
        """A launch; if shapes are `varied`, of a kernel with sizes as arguments, where there is a family."""
        source, leading = self._varied(launch.source, varied)
        return replace(launch, source=source, scalars=(*leading, *launch.scalars))

    def shared(self, launch: L) -> L:
        """A launch of a kernel that programs share, with sizes as arguments after its second shape."""
        source = launch.source
        if not isinstance(source.body, DialectBody):
            return launch
        body = replace(source.body, kernel=with_plain_names(source.body.kernel))
        source, integers = replace(source, body=body, alone=True), _integers(body)
        key = "shared", *_family_key(source, integers)
        with self._lock:
            family, values = self._family(key), integers.values
            if not family.known and self._kept is not None:
                family.known = _parsed(self._kept.get(digest(repr(key))), len(values))
                if family.known:
                    family.argument = family.arguments_with(family.known[0])
            new = not family.fits(values) and values not in family.known
            if new and family.take_in(values, source.signature):
                self.learned += 1
                if self._kept is not None:
                    self._kept.put(digest(repr(key)), json.dumps(family.known))
            if not family.fits(values):  # the first shape of all
                return replace(launch, source=replace(source, name=_name(source, integers, values)))
            source, sizes = self._with_arguments(family, source, integers)
            return replace(launch, source=source, scalars=(*sizes, *launch.scalars))

    def learn(self, source: KernelSource) -> None:
        """Add a kernel to its family, so that the next kernel shows what differs."""
        if isinstance(source.body, DialectBody):
            integers = _integers(source.body)
            with self._lock:
                self._family(_family_key(source, integers)).known.append(integers.values)

    def _varied(self, source: KernelSource, varied: bool) -> tuple[KernelSource, tuple[int, ...]]:
        """A kernel that takes sizes as its first scalars, and the sizes; none where all stay constants."""
        if not isinstance(source.body, DialectBody):  # opaque text
            return source, ()
        integers = _integers(source.body)
        key, values = _family_key(source, integers), integers.values
        with self._lock:
            family = self._family(key)
            if values in family.constant:
                name, constant = family.constant[values]
                return replace(source, name=name, body=constant), ()
            if not varied or not family.known:
                if len(family.known) < _MOST_KNOWN:
                    family.constant[values] = source.name, source.body
                    family.known.append(values)
                return source, ()
            if not family.fits(values) and not family.take_in(values, source.signature):
                return source, ()
            return self._with_arguments(family, source, integers)

    def _with_arguments(
        self, family: _Family, source: KernelSource, integers: Integers
    ) -> tuple[KernelSource, tuple[int, ...]]:
        """The kernel of a family that fits, and its sizes."""
        assert isinstance(source.body, DialectBody)
        values = integers.values
        if family.body is None:
            usual = [
                None if number is not None else value
                for value, number in zip(values, family.argument, strict=True)
            ]
            family.name = _name(source, integers, (usual, family.argument))
            count = len(set(family.argument) - {None})
            family.body = replace(source.body, kernel=integers.as_arguments(family.argument, count))
        given = dict(zip(family.argument, values, strict=True))
        sizes = tuple(given[number] for number in sorted(number for number in given if number is not None))
        scalars = ("int32",) * len(sizes) + source.scalars
        name, body = family.name, family.body
        return replace(source, name=name, body=body, scalars=scalars, sizes=len(sizes)), sizes

    def _family(self, key: Hashable) -> _Family:
        family = self._families.use(key)
        if family is None:
            family = self._families[key] = _Family()
        return family


def _name(source: KernelSource, integers: Integers, rest: object) -> str:
    """A name by the family of a kernel and what else its text depends on, the same in every process."""
    return f"{source.name.rpartition('_')[0]}_{digest(repr((_family_key(source, integers), rest)))}"


def _family_key(source: KernelSource, integers: Integers) -> tuple[Hashable, ...]:
    return digest(integers.key), source.signature, source.group, source.resident, source.cluster


def _integers(body: DialectBody) -> Integers:
    return Integers(body.kernel, body.dialect.fixed_nodes)


def _parameter_bytes(signature: Sequence[str]) -> int:
    return sum(8 if kind.endswith(("*", "64")) else 4 for kind in signature)


def _parsed(text: str | None, count: int) -> list[tuple[int, ...]]:
    """The integers of kernels from a file; none where the file is damaged."""
    try:
        known = [tuple(map(int, values)) for values in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []
    return known if all(len(values) == count for values in known) else []
