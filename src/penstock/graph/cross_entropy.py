"""Cross-entropy, and a fused linear cross-entropy that never holds all logits at a time.

The logits of some rows are computed, used for the loss and its gradient, and freed before the next rows. How
many rows are computed together depends on the target, so the whole loss is recorded as a single primitive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.attention import softmax
from penstock.graph.checkpoint import BARRIER
from penstock.graph.contraction import gather, matmul
from penstock.graph.creating import sequence
from penstock.graph.custom_vjp import custom_vjp
from penstock.graph.dtypes import HALF_PRECISION, float32, int32, int64
from penstock.graph.elementwise import (
    add,
    cast,
    divide,
    equal,
    exp,
    full,
    like,
    log,
    multiply,
    positive,
    stop,
    subtract,
    where,
    widened,
)
from penstock.graph.gradient import gradients, gradients_of
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape, ShapeRule, Vjp
from penstock.graph.reducing import expand, max_, restore, sum_
from penstock.graph.reference import by_parts
from penstock.graph.shaping import permute, reshape, slice_axis

_ALL_ROWS = 1 << 30


def row_losses(logits: Node, labels: Node, kept: Node | None, smoothing: float) -> Node:
    """The loss of each row; 0 for rows that are not kept, whatever their logits are, even NaN."""
    rows, width = logits.shape
    stored = stop(logits)
    fixed = widened(stored)
    most = max_(fixed, (1,))
    shifted = subtract(fixed, restore(most, logits, (1,)))
    total = log(sum_(exp(shifted), (1,)))
    picked = widened(gather(reshape(stored, (rows * width,)), label_positions(labels, rows, width)))
    # On a GPU a kernel of its own looks up the labels' logits, before the gradient reuses their memory.
    picked = stop(Node(BARRIER, (stop(picked),), {"gpu_only": True}))
    loss = subtract(total, subtract(picked, most))
    if smoothing:
        mean = divide(sum_(shifted, (1,)), like(total, float(width)))
        even = multiply(subtract(total, mean), like(total, smoothing))
        loss = add(multiply(loss, like(loss, 1 - smoothing)), even)
    inputs = (logits, labels) if kept is None else (logits, labels, kept)
    result = Node(_ROW_LOSSES, (loss, *inputs), {"smoothing": smoothing})
    return result if kept is None else where(kept, result, like(result, 0))


def _row_losses_gradient(g: Node, n: Node) -> list[Node | None]:
    _, logits, labels, *kept = n.inputs
    smoothing, width = n.attributes["smoothing"], logits.shape[1]
    # In int32, since a vector register holds twice as many of them as of int64.
    classes = reshape(sequence(0, 1, width, int32), (1, width))
    chosen = equal(restore(cast(labels, int32), logits, (1,)), expand(classes, logits.shape))
    chances = softmax(widened(logits), 1)
    less = where(chosen, subtract(chances, like(chances, 1 - smoothing)), chances)
    less = subtract(less, like(less, smoothing / width)) if smoothing else less
    less = multiply(less, restore(g, logits, (1,)))
    if kept:
        less = where(restore(kept[0], logits, (1,)), less, like(less, 0))
    return [cast(less, logits.dtype), None, *(None for _ in kept)]


_ROW_LOSSES = custom_vjp("row_losses", _row_losses_gradient)


def label_positions(labels: Node, rows: int, width: int) -> Node:
    """The index of the logit of each row's label in the flattened logits."""
    dtype = int32 if rows * width <= np.iinfo(np.int32).max else int64
    first = sequence(0, 1, rows, dtype)
    return add(cast(labels, dtype), multiply(first, like(first, width)))


# Fused with a linear layer


def linear_cross_entropy(
    items: Node, weight: Node, labels: Node, kept: Node | None, smoothing: float
) -> Node:
    """The sum of the losses of rows whose logits are `items @ weight.T`."""
    inputs = (items, weight, labels) if kept is None else (items, weight, labels, kept)
    return Node(LINEAR_CROSS_ENTROPY, inputs, {"smoothing": smoothing})


def _shape(items: Node, *_: Node, smoothing: float) -> tuple[Shape, DType]:
    return (), float32 if items.dtype in HALF_PRECISION else items.dtype


def _gradient_shape(*inputs: Node, smoothing: float, of: int) -> tuple[Shape, DType]:
    return inputs[of].shape, inputs[of].dtype


def _in_parts(rows: int, items: Node, weight: Node, labels: Node, *kept: Node, smoothing: float) -> Node:
    """`linear_cross_entropy` made of other primitives, with the logits of so many rows at a time."""
    total = full((), float32 if items.dtype in HALF_PRECISION else items.dtype, 0)
    for start in range(0, items.shape[0], rows):
        count = min(rows, items.shape[0] - start)
        part, *own = (slice_axis(x, 0, start, count) for x in (items, labels, *kept))
        logits = matmul(part, permute(weight, (1, 0)))
        losses = row_losses(logits, own[0], own[1] if kept else None, smoothing)
        total = add(total, sum_(losses, (0,)))
    return total


def _gradient_in_parts(rows: int, *inputs: Node, smoothing: float, of: int) -> Node:
    operands = [positive(operand) for operand in inputs[:-1]]
    loss = _in_parts(rows, *operands, smoothing=smoothing)
    (part,) = gradients(loss, inputs[-1], [operands[of]], until=operands)
    return like(operands[of], 0) if part is None else part


def _rows_at_once(width: int, capabilities: Capabilities) -> int:
    """How many rows of logits are computed together.

    The weight's gradient is accumulated over the parts, so the fewer rows a part has, the more often it is
    read and written. The logits of a part have to fit into an allocation, and into a kernel's buffer.
    """
    cpu = capabilities.vector_width > 1
    rows = max(512, (1 << 20) // width) if cpu else max(8192, (1 << 26) // width)
    return max(1, min(rows, capabilities.max_arena_bytes // (4 * width)))


def _primitive(name: str, shape_rule: ShapeRule, in_parts: Callable[..., Node], vjp: Vjp) -> Primitive:
    def reference(*arrays: Array, **attributes: Any) -> Array:
        return by_parts(lambda *inputs: in_parts(_ALL_ROWS, *inputs, **attributes), *arrays)

    def decompose(node: Node, capabilities: Capabilities) -> Node:
        rows = _rows_at_once(node.inputs[1].shape[0], capabilities)
        return in_parts(rows, *node.inputs, **node.attributes)

    return Primitive(name, Kind.CONTRACTION, shape_rule, reference, vjp, decompose=decompose)


def _gradients(g: Node, n: Node) -> list[Node | None]:
    inputs = (*n.inputs, g)
    parts = [Node(LINEAR_CROSS_ENTROPY_GRADIENT, inputs, {**n.attributes, "of": of}) for of in (0, 1)]
    return [*parts, *(None for _ in n.inputs[2:])]


def _second_gradients(g: Node, n: Node) -> list[Node | None]:
    return gradients_of(lambda *own: _gradient_in_parts(_ALL_ROWS, *own, **n.attributes), n.inputs, g)


LINEAR_CROSS_ENTROPY = _primitive("linear_cross_entropy", _shape, _in_parts, _gradients)
LINEAR_CROSS_ENTROPY_GRADIENT = _primitive(
    "linear_cross_entropy_gradient", _gradient_shape, _gradient_in_parts, _second_gradients
)
