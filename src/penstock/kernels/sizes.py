"""Kernels whose sizes are arguments: one compiled kernel for many shapes.

A kernel is written for one shape, with its sizes, strides and offsets as integers in the text, of which a
compiler makes the best. Texts that differ in such integers only are a family. A group of operations gets
kernels of its own for its first shapes. For those after them, the integers in which the texts of a family
differ become arguments, and no compiler is called. All operations on values keep their order, so the results
are the same, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from penstock.kernels.chaining import Call
from penstock.kernels.lone import Launch
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource, digest
from penstock.lru import LRU

L = TypeVar("L", bound=Launch | Call)

MOST_WRITTEN_OUT = 2  # shapes of one group of operations that get kernels of their own
_MOST_FAMILIES = 1024
_MOST_KNOWN = 32  # texts of a family that are remembered without need
_LARGEST = 2**31 - 1  # what an argument can be; larger integers stay in the text

_ARRAY = r"\b(?!return\b|else\b|do\b)[A-Za-z_]\w*\s+\w+\[[^;]*;"  # a declaration
_LITERALS = r"0[xX]\w+|(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?\w*|\d+[eE][+-]?\d+\w*"
# Integers, and before them whatever has digits that are no integer, or none that may be an argument: strings
# of assembler, lengths of arrays, labels of a switch, names, floating-point and hexadecimal literals.
_C = re.compile(
    rf'"(?:[^"\\]|\\.)*"|#[^\n]*|{_ARRAY}|__attribute__[^;]*|case\s+\w+|GROUP\(.\)|[A-Za-z_]\w*'
    rf"|{_LITERALS}|(?P<value>\d+)(?P<suffix>[uUlL]*)"
)
_WGSL = re.compile(
    rf"array<[^>]*>|\bconst\b[^;]*;|case\s+\w+|[A-Za-z_@]\w*"
    rf"|{_LITERALS}|\d+l?[fh]|(?P<value>\d+)(?P<suffix>l?[iu]|)"
)
_C_CASTS = {"": "{}", "u": "((uint){})", "l": "((long){})", "ul": "((ulong){})", "lu": "((ulong){})"}
_WGSL_CASTS = {"": "{}", "i": "{}", "u": "u32({})", "li": "i64({})", "lu": "u64({})"}


@dataclass(frozen=True)
class _Parted:
    """A kernel's text, taken apart at its integers."""

    before: str  # up to the kernel's name
    pieces: tuple[str, ...]  # what stands around the integers
    values: tuple[int, ...]
    suffixes: tuple[str, ...]


@dataclass
class _Family:
    """Texts that are equal but for their integers."""

    # The integers of texts, of those that tell more than the ones before: which integers differ, and which
    # are equal to one another.
    known: list[tuple[int, ...]] = field(default_factory=list)
    # The names and texts of those without arguments, by their integers.
    written_out: dict[tuple[int, ...], tuple[str, str]] = field(default_factory=dict)
    argument: tuple[int | None, ...] = ()  # for each integer, the argument that it is, if any
    name: str = ""
    text: str = ""  # with arguments; empty before there is one

    def fits(self, values: tuple[int, ...]) -> bool:
        """Whether the text with arguments can say these integers."""
        given: dict[int, int] = {}
        return bool(self.text) and all(
            value == usual if number is None else given.setdefault(number, value) == value
            for value, usual, number in zip(values, self.known[0], self.argument, strict=True)
        )

    def arguments_with(self, values: tuple[int, ...]) -> tuple[int | None, ...]:
        """Which integers have to be arguments so that the text can say these too."""
        columns = list(zip(*self.known, values, strict=True))
        differing = dict.fromkeys(column for column in columns if len(set(column)) > 1)
        numbers = {column: number for number, column in enumerate(differing)}
        return tuple(numbers.get(column) for column in columns)


class Sizes:
    """The families of the kernels of one device."""

    def __init__(self, language: str) -> None:
        self._wgsl = language == "wgsl"
        self._families = LRU[Hashable, _Family](_MOST_FAMILIES)
        self._shapes = LRU[Hashable, list[Hashable]](_MOST_FAMILIES)

    def shapes_before(self, structure: Hashable, key: Hashable) -> int:
        """How many shapes of a structure came before this one, by their keys; no more than matter."""
        shapes = self._shapes.use(structure)
        if shapes is None:
            shapes = self._shapes[structure] = []
        if key not in shapes and len(shapes) < MOST_WRITTEN_OUT:
            shapes.append(key)
        return shapes.index(key) if key in shapes else MOST_WRITTEN_OUT

    def launch(self, launch: L, varied: bool) -> L:
        """A launch; if shapes are `varied`, of a kernel with sizes as arguments, where those are known."""
        source, leading = self._with_arguments(launch.source, varied)
        return replace(launch, source=source, scalars=(*leading, *launch.scalars))

    def learn(self, source: KernelSource) -> None:
        """Take in a text that nobody asked for, so that the next of its family shows what differs."""
        if (parted := self._parted(source)) is not None:
            self._family(source, parted).known.append(parted.values)

    def _with_arguments(self, source: KernelSource, varied: bool) -> tuple[KernelSource, tuple[int, ...]]:
        """A kernel that takes sizes as its first scalars, and those; none where all stay in its text."""
        parted = self._parted(source)
        if parted is None:
            return source, ()
        family, values = self._family(source, parted), parted.values
        if values in family.written_out:
            name, text = family.written_out[values]
            return replace(source, name=name, text=text), ()
        if not varied or not family.known:
            if len(family.known) < _MOST_KNOWN:
                family.written_out[values] = source.name, source.text
                family.known.append(values)
            return source, ()
        if not family.fits(values):
            argument = family.arguments_with(values)
            count = len(set(argument) - {None})
            if _parameter_bytes(source.signature) + 4 * count > MOST_PARAMETER_BYTES:
                return source, ()
            family.known.append(values)
            family.argument = argument
            family.name = f"{source.name.rpartition('_')[0]}_{digest(repr((source.name, argument)))}"
            family.text = self._joined(source, parted, argument, count).replace(source.name, family.name)
        given = dict(zip(family.argument, values, strict=True))
        sizes = tuple(given[number] for number in sorted(number for number in given if number is not None))
        scalars = ("int32",) * len(sizes) + source.scalars
        name, text = family.name, family.text
        return replace(source, name=name, text=text, scalars=scalars, sizes=len(sizes)), sizes

    def _parted(self, source: KernelSource) -> _Parted | None:
        """A text taken apart; None for one that stays as it is."""
        before, opening, text = source.text.partition(f"{self._word} {source.name}(")
        if not text or source.complete or not source.placed:
            return None
        pieces, values, suffixes, end = [], [], [], 0
        for match in (_WGSL if self._wgsl else _C).finditer(text):
            if match["value"] is not None and int(match["value"]) <= _LARGEST:
                pieces.append(text[end : match.start()])
                values.append(int(match["value"]))
                suffixes.append(match["suffix"].lower())
                end = match.end()
        pieces.append(text[end:])
        return _Parted(f"{before}{opening}", tuple(pieces), tuple(values), tuple(suffixes))

    def _family(self, source: KernelSource, parted: _Parted) -> _Family:
        text = "0".join((parted.before, *parted.pieces)).replace(source.name, "")
        key = digest(text), parted.suffixes, source.signature, source.group, source.resident
        family = self._families.use(key)
        if family is None:
            family = self._families[key] = _Family()
        return family

    def _joined(
        self, source: KernelSource, parted: _Parted, argument: Sequence[int | None], count: int
    ) -> str:
        """The text with arguments for integers, which are parameters after the places of buffers."""
        casts = _WGSL_CASTS if self._wgsl else _C_CASTS
        parts = [parted.pieces[0]]
        for value, suffix, number, piece in zip(
            parted.values, parted.suffixes, argument, parted.pieces[1:], strict=True
        ):
            parts += [f"{value}{suffix}" if number is None else casts[suffix].format(f"size{number}"), piece]
        parameters = [f"size{number}: i32" if self._wgsl else f"int size{number}" for number in range(count)]
        opening, brace, body = "".join(parts).partition("{")
        places = r"\w+_place: i32" if self._wgsl else r"int \w+_place"
        end = [match.end() for match in re.finditer(places, opening)][-1]
        return f"{parted.before}{', '.join([opening[:end], *parameters])}{opening[end:]}{brace}{body}"

    @property
    def _word(self) -> str:
        return "kernel" if self._wgsl else "KERNEL"


def _parameter_bytes(signature: Sequence[str]) -> int:
    return sum(8 if kind.endswith(("*", "64")) else 4 for kind in signature)
