"""Passes over the IR of a kernel: replacing expressions, and finding the integers in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

from penstock.kernels.ir import Const, Expr, For, Function, KernelIR, Statement, Type, Var

_INTEGERS = ("int32", "uint32", "int64", "uint64")
_LARGEST = 2**31 - 1  # what an argument can be; larger integers stay constants
_NOT_PRINTED: dict[type, tuple[str, ...]] = {For: ("trips",), KernelIR: ("grid", "group", "resident")}


def rewritten(tree: Any, change: Callable[[Expr], Expr | None], skipped: tuple[type, ...] = ()) -> Any:
    """Statements or an expression, with what `change` makes of the expressions in them.

    Where it makes None, the parts of the expression are rewritten. Nodes of the types `skipped` stay.
    """
    if isinstance(tree, list | tuple):
        return type(tree)(rewritten(part, change, skipped) for part in tree)
    if not is_dataclass(tree) or isinstance(tree, (Type, *skipped)):
        return tree
    if isinstance(tree, Expr) and (new := change(tree)) is not None:
        return new
    kind: Any = type(tree)
    return kind(*(rewritten(getattr(tree, field.name), change, skipped) for field in fields(tree)))


def statement_count(body: Sequence[Statement]) -> int:
    """How many statements there are, with those inside others."""
    inside = (getattr(statement, part, []) for statement in body for part in ("body", "otherwise"))
    return len(body) + sum(map(statement_count, inside))


class Integers:
    """The integers among the constants of a kernel, each of which might be an argument."""

    def __init__(self, kernel: KernelIR, fixed: tuple[type, ...]) -> None:
        """`fixed`: statements whose constants can be no arguments."""
        self._kernel, self._fixed = kernel, fixed
        parts: list[str] = []
        self.values = tuple(self._found(kernel, parts))
        self.key = " ".join(parts)  # equal for kernels that differ in these integers only

    def as_arguments(self, argument: Sequence[int | None], count: int) -> KernelIR:
        """The kernel with arguments for integers, by their numbers; they are its first scalars."""
        numbers = iter(argument)

        def change(expr: Expr) -> Expr | None:
            if not _is_integer(expr):
                return None
            number = next(numbers)
            return expr if number is None else Var(f"size{number}").cast(expr.type.dtype)

        body = rewritten(self._kernel.body, change, self._fixed)
        return replace(self._kernel, body=body, sizes=count)

    def _found(self, tree: Any, parts: list[str]) -> Iterator[int]:
        """The integers in a tree; what else there is goes to `parts`."""
        if isinstance(tree, list | tuple):
            parts.append(f"[{len(tree)}")
            for part in tree:
                yield from self._found(part, parts)
        elif _is_integer(tree):
            parts.append(tree.type.dtype)
            yield tree.value
        elif isinstance(tree, Function):
            parts.append(f"{tree.name} {tree.linkage}")
        elif not is_dataclass(tree) or isinstance(tree, (Type, *self._fixed)):
            parts.append(repr(tree))
        else:
            parts.append(type(tree).__name__)
            kind: Any = type(tree)
            for name in _printed(kind):
                yield from self._found(getattr(tree, name), parts)


def _is_integer(tree: Any) -> bool:
    return isinstance(tree, Const) and tree.type.dtype in _INTEGERS and -_LARGEST <= tree.value <= _LARGEST


@cache
def _printed(kind: type) -> tuple[str, ...]:
    """The fields of a node that its text depends on."""
    return tuple(field.name for field in fields(kind) if field.name not in _NOT_PRINTED.get(kind, ()))
