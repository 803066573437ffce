"""Collectives: arrays that ranks exchange. Each is a node that starts it, and one that waits for its result.

Whatever does not need the result is computed between the two. The value of the first is a token. It is an
input of the next collective too, so that every rank starts them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import prod
from typing import Any, Literal

import numpy as np

from penstock.collectives.communicator import Communicator, Given, Job, Source
from penstock.collectives.engine import DeviceRow, Operation, result_shape
from penstock.graph.dtypes import int32
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape

_numbers = count()
_jobs: dict[int, Job] = {}  # of collectives that the reference has started, by token


def _started(*inputs: Node, group: Communicator) -> tuple[Shape, DType]:
    return (), int32


def _row(operation: Operation, when: Literal["start", "fetch"] = "start") -> Primitive:
    def reference(x: Array, *token: Array, group: Communicator) -> Array:
        number = next(_numbers) % (1 << 31)
        _jobs[number] = group.submit(operation, Given(x.copy()))  # its memory may be used for others soon
        return np.array(number, np.int32)

    return Primitive(
        operation,
        Kind.HOST,
        _started,
        reference,
        stop_gradient=True,
        as_stored=True,
        collective=when,
    )


_OPERATIONS: tuple[Operation, ...] = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "tree_reduce",
    "tree_scatter",
)
_ROWS = {name: _row(name) for name in _OPERATIONS}
_FETCH = _row("all_gather", "fetch")
WAIT = Primitive(
    "wait",
    Kind.HOST,
    lambda token, shape, dtype: (shape, dtype),
    lambda token, shape, dtype: _jobs.pop(int(token)).wait().reshape(shape),
    stop_gradient=True,
    as_stored=True,
    collective="wait",
)


def collective(
    operation: Operation | Literal["fetch"], row: Node, group: Communicator, after: Node | None
) -> tuple[Node, Node]:
    """The result of a collective on a row, and the token that the next takes as `after`.

    A fetch is an all-gather that waits for its turn, so that few results are there at a time.
    """
    primitive = _FETCH if operation == "fetch" else _ROWS[operation]
    shape = result_shape("all_gather" if operation == "fetch" else operation, group.size, row.size)
    token = Node(primitive, (row,) if after is None else (row, after), {"group": group})
    return Node(WAIT, (token,), {"shape": shape, "dtype": row.dtype}), token


def started(node: Node, source: Source) -> Job:
    """Start the collective of a node on an array that the device may still compute."""
    group: Any = node.attributes["group"]
    return group.submit(node.primitive.name, source)  # type: ignore[no-any-return]


def moves_on_device(node: Node) -> bool:
    """Whether the engine of a collective moves memory of the device."""
    group: Any = node.attributes["group"]
    return bool(group.engine.on_device)


def result_bytes(node: Node) -> int:
    """The bytes of the result of a collective."""
    (row, *_), group = node.inputs, node.attributes["group"]
    name: Any = node.primitive.name
    return prod(result_shape(name, group.size, row.size)) * row.dtype.itemsize


def launcher(node: Node) -> Callable[[int, int, int], None]:
    """What puts a collective into a stream, from the addresses of target and source and that stream."""
    (row, *_), group = node.inputs, node.attributes["group"]
    name: Any = node.primitive.name
    dtype = str(row.dtype) if name in ("all_reduce", "reduce_scatter") else "uint8"
    sent, received = row.nbytes, result_bytes(node)

    def launch(target: int, source: int, stream: int) -> None:
        group.count(name, sent)
        group.engine.launch(name, DeviceRow(source, sent, dtype), DeviceRow(target, received, dtype), stream)

    return launch
