"""Passes over the IR of a kernel: replacing nodes, and turning integers into arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from penstock.kernels import ir
from penstock.kernels.dialects.patterns import COMBINE

_INTEGERS = ("int32", "uint32", "int64", "uint64")
_LARGEST = 2**31 - 1  # of an argument; larger integers stay constants
_FIELDS: dict[type, tuple[str, ...]] = {}  # by type of node
_NOT_PRINTED: dict[type, tuple[str, ...]] = {
    ir.For: ("trips",),
    ir.KernelIR: ("grid", "group", "resident", "cluster", "block"),
}


def rewritten(tree: Any, change: Callable[[Any], Any], skipped: tuple[type, ...] = ()) -> Any:
    """A tree of statements and expressions, with the nodes and names in it replaced by what `change` returns.

    Where it returns None, the parts of the node are rewritten. Nodes of the types `skipped` stay.
    """
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([rewritten(part, change, skipped) for part in tree])
    if (new := change(tree)) is not None:
        return new
    names = _fields(kind)
    if not names or isinstance(tree, skipped):
        return tree
    changes = {}
    for name in names:
        part = getattr(tree, name)
        if (new := rewritten(part, change, skipped)) is not part:
            changes[name] = new
    return replace(tree, **changes) if changes else tree


def divided(
    statements: Sequence[ir.Statement], unknown: Collection[str]
) -> tuple[list[ir.Statement], list[ir.Statement]]:
    """Values that do not depend on unknown variables, and all other statements."""
    blocked = set(unknown)
    ready: list[ir.Statement] = []
    later: list[ir.Statement] = []
    for statement in statements:
        if isinstance(statement, ir.Let) and blocked.isdisjoint(names_in(statement.value)):
            ready.append(statement)
        else:
            later.append(statement)
            blocked.add(getattr(statement, "name", ""))
    return ready, later


def names_in(tree: Any) -> set[str]:
    """All names in a tree: of variables, of arrays, and of operations."""
    names: set[str] = set()
    stack = [tree]
    while stack:
        part = stack.pop()
        kind = type(part)
        if kind is str:
            names.add(part)
        elif kind is list or kind is tuple:
            stack += part
        else:
            stack += [getattr(part, name) for name in _fields(kind)]
    return names


def with_plain_names(kernel: ir.KernelIR) -> ir.KernelIR:
    """A kernel whose loop variables and integers are numbered, so that names do not depend on axes."""
    names: dict[str, str] = {}

    def visit(tree: Any) -> None:
        if type(tree) is list or type(tree) is tuple:
            for part in tree:
                visit(part)
        elif isinstance(tree, ir.Statement):
            # Operations have some of the names, too.
            if isinstance(tree, ir.For | ir.Let) and tree.name not in COMBINE:
                names.setdefault(tree.name, f"i{len(names)}_")
            for name in _fields(type(tree)):
                visit(getattr(tree, name))

    visit(kernel.body)
    body = rewritten(kernel.body, lambda tree: names.get(tree) if isinstance(tree, str) else None)
    return replace(kernel, body=body)


class Integers:
    """The integers among the constants of a kernel, each of which might be an argument."""

    def __init__(self, kernel: ir.KernelIR, fixed: tuple[type, ...]) -> None:
        """`fixed`: statements whose constants cannot become arguments."""
        self._kernel, self._fixed = kernel, fixed
        parts: list[str] = []  # everything else
        values: list[int] = []
        stack: list[Any] = [kernel]
        while stack:
            tree = stack.pop()
            kind = type(tree)
            if kind is str:
                parts.append(tree)
            elif kind is ir.Type:
                parts.append(f"{tree.dtype}*{tree.width}")
            elif kind is list or kind is tuple:
                parts.append(f"[{len(tree)}")
                stack += tree[::-1]
            elif kind is ir.Const and _is_integer(tree):
                parts.append(tree.type.dtype)
                values.append(tree.value)
            elif kind is ir.Function:
                parts.append(f"{tree.name} {tree.linkage}")
            elif not (names := _fields(kind)) or kind in fixed:
                parts.append(repr(tree))
            else:
                parts.append(kind.__name__)
                stack += [getattr(tree, name) for name in names[::-1]]
        self.values = tuple(values)
        self.key = " ".join(parts)  # equal for kernels that differ in these integers only

    def as_arguments(self, argument: Sequence[int | None], count: int) -> ir.KernelIR:
        """The kernel with arguments, by their indices, for integers; they are its first scalars."""
        arguments = iter(argument)

        def change(tree: Any) -> ir.Expr | None:
            if not _is_integer(tree):
                return None
            number = next(arguments)
            return tree if number is None else ir.Var(f"size{number}").cast(tree.type.dtype)

        body = rewritten(self._kernel.body, change, self._fixed)
        return replace(self._kernel, body=body, sizes=count)


def _is_integer(tree: Any) -> bool:
    return isinstance(tree, ir.Const) and tree.type.dtype in _INTEGERS and -_LARGEST <= tree.value <= _LARGEST


def _fields(kind: type) -> tuple[str, ...]:
    """The fields that the text of a node depends on; none for leaves."""
    if kind not in _FIELDS:
        node: Any = kind if is_dataclass(kind) and kind is not ir.Type else None
        names = [field.name for field in fields(node)] if node is not None else []
        _FIELDS[kind] = tuple(name for name in names if name not in _NOT_PRINTED.get(kind, ()))
    return _FIELDS[kind]
