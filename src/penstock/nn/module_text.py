"""The text of a module: its layers by name, with their sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.tensor.core import Tensor

if TYPE_CHECKING:
    from penstock.nn.module import Module

_NUMBERED = re.compile(r"(.*?)(\d+)")


def text_of(module: Module, above: tuple[int, ...] = ()) -> str:
    """A line for each part, indented by depth; equal neighbours in a list are merged."""
    kind, extra = type(module).__name__, module.extra_repr()
    if id(module) in above:
        return f"{kind}(...)"  # it contains itself
    parts: list[tuple[str, str]] = []
    for name, part in module.named_members():
        if not isinstance(part, Tensor):
            parts.append((name, text_of(part, (*above, id(module)))))
        elif not extra:  # otherwise `extra` has the sizes
            parts.append((name, f"{part.dtype}{list(part.shape)}"))
    if not parts:
        return f"{kind}({extra})"
    lines = [extra] if extra else []
    lines += [f"({name}): {text}" for name, text in _merged(parts)]
    body = "\n".join(lines).replace("\n", "\n  ")
    return f"{kind}(\n  {body}\n)"


def _merged(parts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge neighbours with consecutive numbers as names and the same text: `0-5` and `6 x ...`."""
    merged: list[tuple[str, str]] = []
    start = 0
    while start < len(parts):
        end = start + 1
        while end < len(parts) and parts[end][1] == parts[start][1] and _follows(parts[end - 1], parts[end]):
            end += 1
        name, text = parts[start]
        if end - start > 1:
            last = _NUMBERED.fullmatch(parts[end - 1][0])
            assert last is not None
            name, text = f"{name}-{last[2]}", f"{end - start} x {text}"
        merged.append((name, text))
        start = end
    return merged


def _follows(before: tuple[str, str], after: tuple[str, str]) -> bool:
    first, second = _NUMBERED.fullmatch(before[0]), _NUMBERED.fullmatch(after[0])
    return bool(first and second and first[1] == second[1] and int(first[2]) + 1 == int(second[2]))
