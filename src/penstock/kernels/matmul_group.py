"""A matrix product with what is done to each of its items: the template with the group's own ending."""

from __future__ import annotations

import math

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.fusion.index import Index, Variables, flat, unflatten, variable
from penstock.fusion.views import base, operand_index
from penstock.graph.contraction import MATMUL
from penstock.graph.node import Node
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.c_vectors import VectorPrinter
from penstock.kernels.dialects.wgsl_memory import WORD, Words, item_size, scalar_dtypes
from penstock.kernels.dialects.wgsl_printer import WgslPrinter, writes_parts
from penstock.kernels.ir import KernelIR, Let, Opaque, Statement, Store, Type, Var
from penstock.kernels.loop_nest import overwritable
from penstock.kernels.matmul_kernel import matmul_body
from penstock.kernels.matmul_problem import Operand, Problem
from penstock.kernels.scopes import LanesImpossible, Scopes, Value
from penstock.kernels.source import KernelSource, head
from penstock.kernels.wgsl_matmul import finished_lanes, wgsl_body


def matmul_group(
    group: Group, capabilities: Capabilities, name: str, varied: bool
) -> tuple[KernelSource, tuple[tuple[int, ...], ...]]:
    """The kernel of a matmul group, and which inputs each output may be written over.

    `varied`: it should serve many sizes.
    """
    product = next(node for node in group.nodes if node.primitive is MATMUL)
    left, right = product.inputs
    sides = [_operand(group, side, product) for side in (left, right)]
    problem = Problem(
        batch=math.prod(product.shape[:-2]),
        rows=product.shape[-2],
        columns=product.shape[-1],
        inner=left.shape[-1],
        left=sides[0][1],
        right=sides[1][1],
        varied=varied,
    )
    in_words = dialect_of(capabilities).word_access
    ending = _Ending(group, product, vectors=not in_words)
    source = (_in_wgsl if in_words else _in_c)(problem, capabilities, ending, name)
    operands = {group.inputs.index(node) for node, _ in sides}
    over = overwritable(group, ending.loads, ending.stores)
    return source, tuple(tuple(at for at in found if at not in operands) for found in over)


def _in_c(problem: Problem, capabilities: Capabilities, ending: _Ending, name: str) -> KernelSource:
    text, grid, threads = matmul_body(problem, capabilities, ending.finish)
    form = ending.form
    opening = head(name, *form.parameters)
    stored = tuple("uint8" if dtype == "bool" else dtype for dtype in form.scalars)
    return KernelSource(name, f"{opening}{text}\n}}\n", (*form.outputs, *form.inputs), stored, grid, threads)


def _in_wgsl(problem: Problem, capabilities: Capabilities, ending: _Ending, name: str) -> KernelSource:
    form = ending.form
    together = max(WORD // item_size(dtype) for dtype in (*form.outputs, "float32"))
    lanes = finished_lanes(problem, capabilities, together)
    try:
        trial = ending.body("mm_y", "mm_x", "mm_value", lanes)
    except LanesImpossible:
        lanes = 1
        trial = ending.body("mm_y", "mm_x", "mm_value", lanes)
    words = Words(writes_parts(trial))

    def finish(row: str, column: str, value: str, lanes: int) -> list[str]:
        return ["{", *WgslPrinter(words).statements(ending.body(row, column, value, lanes)), "}"]

    body = wgsl_body(problem, capabilities, finish, lanes, words)
    outputs, inputs, scalars = form.parameters
    opening = words.opening(name, [buffer for _, buffer in (*outputs, *inputs)], scalars).rstrip()
    lines = [*body.declared, opening, *(f"    {line}" for line in body.lines), "}"]
    text, passed = "\n".join(lines) + "\n", scalar_dtypes(form.scalars)
    return KernelSource(name, text, (*form.outputs, *form.inputs), passed, body.grid, body.group)


def _operand(group: Group, operand: Node, product: Node) -> tuple[Node, Operand]:
    """What an operand looks at, and how it lies there."""
    found = operand_index(operand, group.inputs)
    node, index, _ = found if found is not None else (base(operand), _contiguous(operand), None)
    lengths = product.shape[:-2]
    parts = [str(index.constant)] if index.constant else []
    for axis, length in enumerate(lengths):
        factor = index.factor(f"b{axis}")
        if factor and length > 1:
            parts.append(f"(batch / {math.prod(lengths[axis + 1 :])} % {length}) * {factor}")
    return node, Operand(
        name=f"in{group.inputs.index(node)}",
        dtype=str(operand.dtype),
        base=" + ".join(parts) or "0",
        row_stride=index.factor("i"),
        column_stride=index.factor("j"),
    )


def _contiguous(node: Node) -> Index:
    names = [*(f"b{axis}" for axis in range(node.ndim - 2)), "i", "j"]
    return flat(tuple(variable(name) for name in names), node.shape)


class _Ending:
    """Writes what is done to items of the product, wherever the template has some at hand."""

    def __init__(self, group: Group, product: Node, vectors: bool) -> None:
        self._group = group
        self._product = product
        self._vectors = vectors
        self.form: KernelIR = Scopes(group, Variables({})).form
        self.loads: dict[int, set[tuple[int, Index]]] = {}
        self.stores: dict[int, tuple[int, Index]] = {}

    def finish(self, row: str, column: str, value: str, lanes: int) -> list[str]:
        """The lines in C for `lanes` neighbouring items."""
        try:
            bodies = [self.body(row, column, value, lanes)]
        except LanesImpossible:
            bodies = [self.body(row, f"{column} + {k}", f"{value}.s{k:x}", 1) for k in range(lanes)]
        return [line for body in bodies for line in ("{", *VectorPrinter().statements(body), "}")]

    def body(self, row: str, column: str, value: str, lanes: int) -> list[Statement]:
        """The statements for `lanes` neighbouring items."""
        shape = self._product.shape
        names = [*(f"b{axis}" for axis in range(len(shape) - 2)), "i", "j"]
        variables = Variables(dict(zip(names, shape, strict=True)), splittable=False)
        scopes = Scopes(self._group, variables, self._vectors)
        scopes.depth_of = dict.fromkeys(names, 1)
        scopes.lanes, scopes.lane_steps = lanes, {"j": 1} if lanes > 1 else {}
        scopes.given[self._product] = Value(Var(value, Type("float32", lanes)), 1)
        counts: list[Statement] = [Let("i", Opaque(row)), Let("j", Opaque(column))]
        for axis, length in enumerate(shape[:-2]):
            counts.append(Let(f"b{axis}", Var("batch") // math.prod(shape[axis + 1 : -2]) % length))
        place = tuple(variable(name) for name in names)
        number = flat(place, shape)
        values = []
        for node in self._group.outputs:
            at = place if node.shape == shape else unflatten(number, node.shape, variables)
            values.append(scopes.widened(scopes.value(node, at), lanes))
        index, _, _ = scopes.index(number)
        aligned = 1 if self._vectors else scopes.aligned(number)
        body = [*scopes.bodies[0], *scopes.bodies[1]]
        for k, (node, one) in enumerate(zip(self._group.outputs, values, strict=True)):
            body.append(Store(one.var, f"out{k}", str(node.dtype), index, aligned, lanes))
            self.stores[k] = (0, number)
        for at_input, found in scopes.loads.items():
            self.loads.setdefault(at_input, set()).update(found)
        return [*counts, *body]
