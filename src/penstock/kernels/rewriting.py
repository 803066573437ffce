"""Passes over the IR of a kernel: replacing expressions, and finding the integers in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from penstock.kernels import ir

_INTEGERS = ("int32", "uint32", "int64", "uint64")
_LARGEST = 2**31 - 1  # what an argument can be; larger integers stay constants
_FIELDS: dict[type, tuple[str, ...]] = {}  # of each kind of node
_NOT_PRINTED: dict[type, tuple[str, ...]] = {ir.For: ("trips",), ir.KernelIR: ("grid", "group", "resident")}


def rewritten(tree: Any, change: Callable[[ir.Expr], ir.Expr | None], skipped: tuple[type, ...] = ()) -> Any:
    """Statements or an expression, with what `change` makes of the expressions in them.

    Where it makes None, the parts of the expression are rewritten. Nodes of the types `skipped` stay.
    """
    if isinstance(tree, list | tuple):
        return type(tree)(rewritten(part, change, skipped) for part in tree)
    if isinstance(tree, ir.Expr) and (new := change(tree)) is not None:
        return new
    names = _fields(type(tree))
    if not names or isinstance(tree, skipped):
        return tree
    return replace(tree, **{name: rewritten(getattr(tree, name), change, skipped) for name in names})


def with_plain_names(kernel: ir.KernelIR) -> ir.KernelIR:
    """A kernel whose loops and counts are named in their order, whatever axes the shapes have."""
    names: dict[str, str] = {}

    def visit(tree: Any) -> None:
        if isinstance(tree, list | tuple):
            for part in tree:
                visit(part)
        elif isinstance(tree, ir.Statement):
            if isinstance(tree, ir.For | ir.Let):
                names.setdefault(tree.name, f"i{len(names)}_")
            for name in _fields(type(tree)):
                visit(getattr(tree, name))

    visit(kernel.body)
    return replace(kernel, body=_renamed(kernel.body, names))


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    if isinstance(tree, str):
        return names.get(tree, tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_renamed(part, names) for part in tree)
    if not (fields := _fields(type(tree))):
        return tree
    return replace(tree, **{name: _renamed(getattr(tree, name), names) for name in fields})


class Integers:
    """The integers among the constants of a kernel, each of which might be an argument."""

    def __init__(self, kernel: ir.KernelIR, fixed: tuple[type, ...]) -> None:
        """`fixed`: statements whose constants can be no arguments."""
        self._kernel, self._fixed = kernel, fixed
        self._parts: list[str] = []
        self._values: list[int] = []
        self._visit(kernel)
        self.values = tuple(self._values)
        self.key = " ".join(self._parts)  # equal for kernels that differ in these integers only

    def as_arguments(self, argument: Sequence[int | None], count: int) -> ir.KernelIR:
        """The kernel with arguments for integers, by their numbers; they are its first scalars."""
        arguments = iter(argument)

        def change(expr: ir.Expr) -> ir.Expr | None:
            if not _is_integer(expr):
                return None
            number = next(arguments)
            return expr if number is None else ir.Var(f"size{number}").cast(expr.type.dtype)

        body = rewritten(self._kernel.body, change, self._fixed)
        return replace(self._kernel, body=body, sizes=count)

    def _visit(self, tree: Any) -> None:
        """Note the integers in a tree, and what else there is."""
        kind = type(tree)
        if kind is str:
            self._parts.append(tree)
        elif kind is ir.Type:
            self._parts.append(f"{tree.dtype}*{tree.width}")
        elif kind is list or kind is tuple:
            self._parts.append(f"[{len(tree)}")
            for part in tree:
                self._visit(part)
        elif kind is ir.Const and _is_integer(tree):
            self._parts.append(tree.type.dtype)
            self._values.append(tree.value)
        elif kind is ir.Function:
            self._parts.append(f"{tree.name} {tree.linkage}")
        elif not (names := _fields(kind)) or kind in self._fixed:
            self._parts.append(repr(tree))
        else:
            self._parts.append(kind.__name__)
            for name in names:
                self._visit(getattr(tree, name))


def _is_integer(tree: Any) -> bool:
    return isinstance(tree, ir.Const) and tree.type.dtype in _INTEGERS and -_LARGEST <= tree.value <= _LARGEST


def _fields(kind: type) -> tuple[str, ...]:
    """The fields of a node that its text depends on; none of what has no parts."""
    if kind not in _FIELDS:
        node: Any = kind if is_dataclass(kind) and kind is not ir.Type else None
        names = [field.name for field in fields(node)] if node is not None else []
        _FIELDS[kind] = tuple(name for name in names if name not in _NOT_PRINTED.get(kind, ()))
    return _FIELDS[kind]
