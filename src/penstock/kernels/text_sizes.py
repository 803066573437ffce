"""The integers in the text of a template that prints itself: the matrix product of a CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.kernels.source import KernelSource

_LARGEST = 2**31 - 1  # what an argument can be; larger integers stay in the text
_ARRAY = r"\b(?!return\b|else\b|do\b)[A-Za-z_]\w*\s+\w+\[[^;]*;"  # a declaration
_LITERALS = r"0[xX]\w+|(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?\w*|\d+[eE][+-]?\d+\w*"
# Integers, and before them whatever has digits that are no integer, or none that may be an argument: strings
# of assembler, lengths of arrays, labels of a switch, names, floating-point and hexadecimal literals.
_C = re.compile(
    rf'"(?:[^"\\]|\\.)*"|#[^\n]*|{_ARRAY}|__attribute__[^;]*|case\s+\w+|GROUP\(.\)|[A-Za-z_]\w*'
    rf"|{_LITERALS}|(?P<value>\d+)(?P<suffix>[uUlL]*)"
)
_CASTS = {"": "{}", "u": "((uint){})", "l": "((long){})", "ul": "((ulong){})", "lu": "((ulong){})"}


class TextIntegers:
    """A kernel's text, taken apart at its integers."""

    def __init__(self, source: KernelSource) -> None:
        self._name = source.name
        before, opening, text = source.text.partition(f"KERNEL {source.name}(")
        pieces, values, suffixes, end = [], [], [], 0
        for match in _C.finditer(text):
            if match["value"] is not None and int(match["value"]) <= _LARGEST:
                pieces.append(text[end : match.start()])
                values.append(int(match["value"]))
                suffixes.append(match["suffix"].lower())
                end = match.end()
        self._before, self._pieces, self._suffixes = before + opening, [*pieces, text[end:]], suffixes
        self.values = tuple(values)
        self.key = " ".join(("0".join((self._before, *self._pieces)).replace(source.name, ""), *suffixes))

    def as_arguments(self, argument: Sequence[int | None], count: int, name: str) -> str:
        """The text with arguments for integers, which are parameters after the places of buffers."""
        parts = [self._pieces[0]]
        for value, suffix, number, piece in zip(
            self.values, self._suffixes, argument, self._pieces[1:], strict=True
        ):
            parts += [f"{value}{suffix}" if number is None else _CASTS[suffix].format(f"size{number}"), piece]
        parameters = [f"int size{number}" for number in range(count)]
        opening, brace, body = "".join(parts).partition("{")
        end = [match.end() for match in re.finditer(r"int \w+_place", opening)][-1]
        text = f"{self._before}{', '.join([opening[:end], *parameters])}{opening[end:]}{brace}{body}"
        return text.replace(self._name, name)
