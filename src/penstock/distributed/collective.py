"""Collectives of tensors, as parts of a jitted function or on their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from penstock.collectives.communicator import Communicator
from penstock.collectives.engine import Operation
from penstock.collectives.world import communicator
from penstock.errors import SettingError
from penstock.graph import collectives as graph
from penstock.graph.node import Node
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, realize_together, record
from penstock.tensor.manipulation import reshape


class Chain:
    """Collectives in the order that all ranks start them in; in a jitted function there is one of them."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._last: Node | None = None  # the token of the last

    def after_capture(self) -> None:
        """See `Capture.part`."""

    def before_replay(self) -> None:
        """See `Capture.part`."""

    def after_failure(self) -> None:
        """See `Capture.part`."""

    def apply_all(self, operation: Operation, rows: Sequence[Tensor]) -> list[Tensor]:
        """The results of a collective on several rows.

        Outside of jit they are exchanged now, in the order of the program's lines, like those of other ranks.
        """
        if not self.group.exchanges:
            return list(rows)
        results = self._all(operation, rows)
        if capture.get() is None:
            realize_together(results)
            self._last = None  # it has run, and would run again with the next
        return results

    def fetch(self, row: Tensor) -> Tensor:
        """The rows of all ranks, joined in time for their use; inside a jitted function."""
        return self._apply("fetch", row) if self.group.exchanges else row

    def _all(self, operation: Operation, rows: Sequence[Tensor]) -> list[Tensor]:
        """An engine that moves memory of the device knows no sums along a tree: kernels compute them."""
        if not self.group.engine.on_device or operation not in ("tree_reduce", "tree_scatter"):
            return [self._apply(operation, row) for row in rows]
        size = self.group.size
        moved = [self._apply("all_to_all", row) for row in rows]
        parts = [_tree(reshape(row, (size, -1)), 0, size) for row in moved]
        return parts if operation == "tree_scatter" else [self._apply("all_gather", part) for part in parts]

    def _apply(self, operation: Operation | Literal["fetch"], row: Tensor) -> Tensor:
        """The result of a collective on a row, which is a row too."""
        if row.device.dispatcher is not None:
            raise SettingError("ranks need a device each, and auto stands for several; name a device")
        result, self._last = graph.collective(operation, row.detach()._node, self.group, self._last)
        return record(result, row.detach())


def _tree(rows: Tensor, start: int, count: int) -> Tensor:
    """The sum of some rows: that of the first half and that of the second."""
    if count == 1:
        return rows[start]
    half = count // 2
    return _tree(rows, start, half) + _tree(rows, start + half, half)


def chain() -> Chain:
    """The chain of the function that is captured, or a new one."""
    group = communicator()
    capturing = capture.get()
    return Chain(group) if capturing is None else capturing.part((Chain, group), lambda: Chain(group))


def _applied(operation: Operation, x: Tensor) -> Tensor:
    if x.requires_grad:
        raise SettingError(f"no gradient passes {operation}; use detach() on what it exchanges")
    return chain().apply_all(operation, [reshape(x, (-1,))])[0]


def all_reduce(x: Tensor) -> Tensor:
    """The sum over all ranks, in the engine's order.

    >>> ps.distributed.all_reduce(ps.ones(2)).tolist()
    [1.0, 1.0]
    """
    return reshape(_applied("all_reduce", x), x.shape)


def reduce_scatter(x: Tensor) -> Tensor:
    """This rank's part, along the first axis, of the sum over all ranks.

    >>> ps.distributed.reduce_scatter(ps.ones(2)).tolist()
    [1.0, 1.0]
    """
    count = communicator().size
    length = _length(x, "reduce_scatter")
    if length % count:
        raise SettingError(f"reduce_scatter divides axis 0 of {length} items among {count} ranks")
    return reshape(_applied("reduce_scatter", x), (length // count, *x.shape[1:]))


def all_gather(x: Tensor) -> Tensor:
    """The tensors of all ranks, joined along the first axis.

    >>> ps.distributed.all_gather(ps.ones(2)).tolist()
    [1.0, 1.0]
    """
    length = _length(x, "all_gather")
    return reshape(_applied("all_gather", x), (length * communicator().size, *x.shape[1:]))


def broadcast(x: Tensor) -> Tensor:
    """The tensor of rank 0.

    >>> ps.distributed.broadcast(ps.ones(2)).tolist()
    [1.0, 1.0]
    """
    return reshape(_applied("broadcast", x), x.shape)


def _length(x: Any, name: str) -> int:
    if not x.shape:
        raise SettingError(f"{name} takes a tensor with an axis; reshape it to (1,)")
    return int(x.shape[0])
