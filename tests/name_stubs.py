"""Declarations for type checkers, from the table of names: `python tests/name_stubs.py` writes them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock import names
from penstock.tensor.spelling import keywords_of

SOURCES = Path(__file__).parents[1] / "src" / "penstock"
HEADER = '''# ruff: noqa
# fmt: off
"""{about} `python tests/name_stubs.py` writes this file from the table in `penstock.names`."""

import builtins
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from penstock.graph.node import DType
from penstock.runtime import Device
from penstock.tensor.core import Scalar, Tensor
from penstock.tensor.creation import Where
from penstock.tensor.operands import Array
from penstock.tensor.ordering import Histogram, Ordered
from penstock.tensor.random import Generator

Axis = builtins.int | Sequence[builtins.int] | None
_Sizes = builtins.int | Sequence[builtins.int]
'''
# Results whose type depends on how it was asked for. The first parameter is left out.
_DEVIATION = [
    "dim: Axis | bool = None, unbiased: bool | None = None, keepdim: bool | None = None, *, "
    "correction: float | None = None, axis: Axis = None, keepdims: bool = False -> Tensor",
]
_EXTREME = [
    "*, axis: Axis = None, keepdims: bool = False -> Tensor",
    "dim: int, keepdim: bool = False -> Ordered",
    "dim: Tensor | npt.NDArray[Any] -> Tensor",
]
_ORDER = "descending: bool = False, stable: bool = True"
OVERLOADS: dict[str, list[str]] = {
    "max": _EXTREME,
    "min": _EXTREME,
    "var": _DEVIATION,
    "std": _DEVIATION,
    "median": ["-> Tensor", "dim: int, keepdim: bool = False -> Ordered"],
    "function sort": [f"*, axis: int = -1, {_ORDER} -> Tensor", f"dim: int, {_ORDER} -> Ordered"],
    "method sort": [f"dim: int = -1, {_ORDER} -> Ordered", f"*, axis: int, {_ORDER} -> Tensor"],
    "function nonzero": ["-> tuple[Tensor, ...]", "*, as_tuple: bool -> Any"],
    "function where": ["x1: Any, x2: Any -> Tensor", "-> tuple[Tensor, ...]"],
    "function randint": [
        f"{first}*, dtype: DType | None = None, device: Where = None, generator: Generator | None = None, "
        f"requires_grad: bool = False -> Tensor"
        for first in ("high: int, shape: _Sizes, ", "shape: _Sizes, ")
    ],
    "method to": [
        "dtype: DType | type | np.dtype[Any], *, copy: bool = False, non_blocking: bool = False -> Tensor",
        "device: Device | str, dtype: DType | None = None, *, copy: bool = False, "
        "non_blocking: bool = False -> Tensor",
        "other: Tensor, *, copy: bool = False, non_blocking: bool = False -> Tensor",
        "*, dtype: DType | None = None, device: Where = None, copy: bool = False, "
        "non_blocking: bool = False -> Tensor",
    ],
}

LEAD = {"where": "condition: Any, /", "randint": "low: builtins.int"}


def builtin(text: str) -> str:
    """Python's own types by their full names: `float`, `int` and `bool` are methods, too."""
    text = re.sub(r"\brandom\.Generator\b", "Generator", text)
    return re.sub(r"(?<![\w.])(int|float|bool|complex|tuple|list|str|type)\b(?!:)", r"builtins.\1", text)


def annotation(given: Any) -> str:
    if given is inspect.Parameter.empty:
        return "Any"
    return builtin(given if isinstance(given, str) else getattr(given, "__name__", str(given)))


def default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    return (
        f" = {parameter.default!r}" if isinstance(parameter.default, (int, float, str, bool)) else " = None"
    )


def declared(parameter: inspect.Parameter, name: str = "") -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    return f"{stars}{name or parameter.name}: {annotation(parameter.annotation)}{default(parameter)}"


def signature(function: Callable[..., Any], first: str, loose: bool, made: bool, torch: bool) -> str:
    """The parameters, in one of the two spellings."""
    own = inspect.signature(function)
    parameters = list(own.parameters.values())
    spelled = {name: other for other, name in keywords_of(function).items()} if torch else {}
    lead = [] if loose and made else parameters[:1]
    parts = [first] if first else [declared(parameter, spelled.get(parameter.name, "")) for parameter in lead]
    only = bool(lead) and lead[0].kind is inspect.Parameter.POSITIONAL_ONLY and not first
    rest = parameters[1:]
    named = loose  # whether what follows is given by name
    if loose:
        parts.append("*sizes: builtins.int | Sequence[builtins.int]")
        rest = [parameter for parameter in rest if parameter.kind is parameter.KEYWORD_ONLY]
    for parameter in rest:
        if only and parameter.kind is not parameter.POSITIONAL_ONLY:
            parts.append("/")
            only = False
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            parts.append("*")
        named = named or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parts.append(declared(parameter, spelled.get(parameter.name, "")))
    parts += ["/"] if only else []
    if made:
        parts += (
            ["requires_grad: builtins.bool = False"]
            if named
            else ["*", "requires_grad: builtins.bool = False"]
        )
    return f"({', '.join(parts)}) -> {annotation(own.return_annotation)}: ..."


def lines(kind: str, table: dict[str, Callable[..., Any]]) -> Iterator[str]:
    first = "self" if kind == "method" else ""
    for name in sorted(table):
        function = table[name]
        special = OVERLOADS.get(f"{kind} {name}") or OVERLOADS.get(name)
        if special is None:
            loose = name in (names.LOOSE if first else names.LOOSE_FUNCTIONS)
            made = not first and name in names.MADE
            ways = [signature(function, first, loose, made, torch) for torch in (False, True)]
            for text in dict.fromkeys(ways):
                if ways[0] != ways[1]:
                    yield "@overload"
                yield f"def {name}{text}"
            continue
        lead = "self" if first else LEAD.get(name, "x: Tensor, /")
        for overloaded in special:
            given, _, result = overloaded.rpartition("-> ")
            if len(special) > 1:
                yield "@overload"
            given = f", {given.strip()}" if given.strip() else ""
            yield f"def {name}({lead}{builtin(given)}) -> {builtin(result)}: ..."


def stubs() -> dict[Path, str]:
    """The text of each file."""
    functions = HEADER.format(about="The functions of the namespace.")
    functions += "\n" + "\n".join(lines("function", names.FUNCTIONS)) + "\n\n__all__ = [\n"
    functions += "".join(f"    {name!r},\n" for name in sorted(names.FUNCTIONS)) + "]\n"
    methods = HEADER.format(about="The methods of tensors.") + "\nclass Methods:\n"
    methods += "".join(f"    {line}\n" for line in lines("method", names.METHODS))
    return {SOURCES / "functions.pyi": functions, SOURCES / "tensor" / "methods.pyi": methods}


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
        print(path.relative_to(SOURCES.parent), file=sys.stderr)
