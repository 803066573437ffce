"""A matrix product with an epilogue: the template with the group's elementwise work on its items."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.fusion.index import Coords, Index, Variables, flat, variable
from penstock.fusion.views import Digits, base, digits_index, matrix_variables
from penstock.graph.linear import LINEAR
from penstock.graph.node import Node
from penstock.graph.panels import PANELS
from penstock.graph.quantization import bits_of, on_tensor_cores
from penstock.graph.shaping import CONCAT
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import call
from penstock.kernels.lowering.emitter import Emitter
from penstock.kernels.lowering.loop_nest import overwritable
from penstock.kernels.lowering.row_prologue import RowPrologue
from penstock.kernels.lowering.values import LanesImpossible, Value, computed_dtype
from penstock.kernels.templates.launches import Lowering, one_launch
from penstock.kernels.templates.linear_tiles import LinearProblem, divided, linear_tiles
from penstock.kernels.templates.matmul import BATCH, Epilogue, Matrix, Problem, offset
from penstock.kernels.templates.matmul_cpu import cpu_matmul, order_of
from penstock.kernels.templates.matmul_gpu import gpu_matmul, gpu_width
from penstock.kernels.templates.matmul_tiling import LANES
from penstock.kernels.templates.packed_cpu import cpu_packed
from penstock.kernels.templates.packed_matmul import PACKED_FEATURES, PackedProblem, gpu_packed
from penstock.kernels.templates.packed_ring import divided as divided_packed
from penstock.kernels.templates.packed_ring import packed_ring
from penstock.kernels.templates.packed_tiles import MOST_ROWS, Epilogues, tensor_packed


def matmul_group(
    group: Group, product: Node, capabilities: Capabilities, name: str, varied: bool, shared: bool
) -> Lowering:
    """The kernel of a matmul group; `varied`: a kernel for many sizes; `shared`: one of few for all sizes."""
    vectors = capabilities.vector_width > 1
    epilogue = _Epilogue(group, product, vectors)
    kernel = epilogue.kernel
    k = KernelBuilder(name, capabilities, kernel.outputs, kernel.inputs, kernel.scalars)
    problem = _problem(k, group, product, varied, shared)
    width = epilogue.possible(LANES if vectors else gpu_width(problem, capabilities, kernel.outputs))
    build = cpu_matmul if vectors else gpu_matmul
    source = build(k, problem, capabilities, epilogue.statements, width)
    names = {side.memory.name for side in (problem.left, problem.right)}
    operands = {at for at, memory in enumerate(k.inputs) if memory.name in names}
    over = overwritable(group, epilogue.loads, epilogue.stores)
    may_alias = tuple(tuple(at for at in inputs if at not in operands) for inputs in over)
    return replace(one_launch(source, may_alias), order=problem.order)


def cpu_order(group: Group, product: Node, capabilities: Capabilities) -> tuple[int, ...]:
    """In which order a CPU's kernel of a group adds up the sums of a product; see `Problem`."""
    inputs = [str(node.dtype) for node in group.inputs]
    k = KernelBuilder("", capabilities, [], inputs, [])
    return order_of(_problem(k, group, product), capabilities)


def _problem(
    k: KernelBuilder, group: Group, product: Node, varied: bool = False, shared: bool = False
) -> Problem:
    left, right = (_matrix(k, group, side, product) for side in product.inputs)
    return Problem(
        batch=math.prod(product.shape[:-2]),
        rows=product.shape[-2],
        columns=product.shape[-1],
        inner=product.inputs[0].shape[-1],
        left=left,
        right=right,
        varied=varied,
        shared=shared,
        order=product.attributes.get("order", ()),
    )


def packed_group(group: Group, product: Node, capabilities: Capabilities, name: str) -> Lowering:
    """The kernel of a group whose products, of the same rows, unpack matrices."""
    vectors = capabilities.vector_width > 1
    epilogue = _Epilogue(group, product, vectors)
    kernel = epilogue.kernel
    k = KernelBuilder(name, capabilities, kernel.outputs, kernel.inputs, kernel.scalars)
    others = [node for node in group.nodes if node.primitive.few_rows and node is not product]
    operands = {base(operand) for node in (product, *others) for operand in node.inputs}
    places = {group.inputs.index(operand) for operand in operands if operand in group.inputs}
    if not vectors and on_tensor_cores(product, capabilities):
        row = base(product.inputs[0])
        prologue = RowPrologue(group, row)
        emit = None if row in group.inputs else prologue.emit
        problems = [_packed_problem(k, group, node) for node in (product, *others)]
        finish = epilogue.of_several(others)
        if product.shape[0] > MOST_ROWS:
            source = packed_ring(k, problems, divided_packed(problems, capabilities), finish)
        else:
            source = tensor_packed(k, problems, capabilities, finish, emit)
        places |= prologue.reads
    elif vectors:
        problem, width = _packed_problem(k, group, product), epilogue.possible(LANES)
        source = cpu_packed(k, problem, capabilities, epilogue.statements, width)
    else:
        for number, other in enumerate(others):  # whose results stay in local memory
            results = k.shared(f"results{number}", "float32", product.shape[0] * PACKED_FEATURES)
            with k.when(ir.TRUE):
                gpu_packed(k, _packed_problem(k, group, other), capabilities, _kept_in(k, results))
            k.barrier()
            epilogue.known[other] = results
        source = gpu_packed(k, _packed_problem(k, group, product), capabilities, epilogue.statements)
    over = overwritable(group, epilogue.loads, epilogue.stores)
    return one_launch(source, tuple(tuple(at for at in inputs if at not in places) for inputs in over))


def linear_group(group: Group, product: Node, capabilities: Capabilities, name: str) -> Lowering:
    """The kernel of a group whose products multiply few rows with matrices on tensor cores."""
    epilogue = _Epilogue(group, product, vectors=False)
    kernel = epilogue.kernel
    k = KernelBuilder(name, capabilities, kernel.outputs, kernel.inputs, kernel.scalars)
    products = [product, *(node for node in group.nodes if node.primitive is LINEAR and node is not product)]
    left, *matrices = (
        k.inputs[group.inputs.index(base(operand))]
        for operand in (product.inputs[0], *(node.inputs[1] for node in products))
    )
    (rows, inner), (columns, _) = (operand.shape for operand in product.inputs)
    problem = LinearProblem(left, matrices, rows, columns, inner)
    source = linear_tiles(k, problem, divided(problem, capabilities), epilogue.of_several(products[1:]))
    over = overwritable(group, epilogue.loads, epilogue.stores)
    places = {group.inputs.index(base(operand)) for node in products for operand in node.inputs}
    return one_launch(source, tuple(tuple(at for at in inputs if at not in places) for inputs in over))


def _packed_problem(k: KernelBuilder, group: Group, product: Node) -> PackedProblem:
    (rows, inner), words, scales = (operand.shape for operand in product.inputs)
    packed, factors = (k.inputs[group.inputs.index(base(operand))] for operand in product.inputs[1:])
    row = base(product.inputs[0])
    left = k.inputs[group.inputs.index(row)] if row in group.inputs else Memory("", str(row.dtype))
    return PackedProblem(
        left, packed, factors, rows, words[0], inner, bits_of(inner, words), inner // scales[1]
    )


def _kept_in(k: KernelBuilder, results: Memory) -> Epilogue:
    """Keeps the items of a product in local memory, where `_place_in` finds them."""

    def keep(row: ir.Expr, column: ir.Expr, product: ir.Var) -> list[ir.Statement]:
        return [ir.Store(product, results.name, results.dtype, _place_in(row, column))]

    return keep


def _place_in(row: ir.Expr, column: ir.Expr) -> ir.Expr:
    return row * PACKED_FEATURES + column % PACKED_FEATURES


def _matrix(k: KernelBuilder, group: Group, operand: Node, product: Node) -> Matrix:
    """The input that an operand is a view of, and its strides there."""
    in_place = digits_index(operand, group.inputs)
    node, (first, steps) = in_place or (base(operand), (0, _contiguous(operand)))
    lengths = product.shape[:-2]
    begin: ir.Expr = ir.Const(first)
    for axis, length in enumerate(lengths):
        step = steps[f"b{axis}"]
        if step and length > 1:
            begin = begin + offset(BATCH // math.prod(lengths[axis + 1 :]) % length, step)
    memory = k.inputs[group.inputs.index(node)]
    if node.dtype.kind == "i":
        memory = replace(memory, dtype=f"u{memory.dtype}")
    panel_width = operand.inputs[0].shape[-1] if operand.primitive is PANELS else 0
    return Matrix(memory, begin, steps["i"], steps["j"], panel_width)


def _contiguous(node: Node) -> dict[str, int | Digits]:
    names = matrix_variables(node.ndim)
    return {name: math.prod(node.shape[axis + 1 :]) for axis, name in enumerate(names)}


class _Epilogue:
    """The elementwise work on items of the product, wherever the template has computed some."""

    def __init__(self, group: Group, product: Node, vectors: bool) -> None:
        self._group = group
        self._product = product
        self._vectors = vectors
        self.kernel: ir.KernelIR = Emitter(group, Variables({})).kernel
        self.known: dict[Node, Memory] = {}  # other products, whose items are in local memory
        self._beside: dict[Node, ir.Var] = {}  # other products, whose items are in variables
        self.loads: dict[int, set[tuple[int, Index]]] = {}
        self.stores: dict[int, tuple[int, Index]] = {}

    def possible(self, width: int) -> int:
        """How many neighbours can be computed at a time: `width`, or 1."""
        try:
            kind = ir.Type(computed_dtype(self._product), width)
            self.statements(ir.Const(0), ir.Const(0), ir.Var("product", kind))
        except LanesImpossible:
            return 1
        return width

    def of_several(self, others: Sequence[Node]) -> Epilogues:
        """The same for a kernel that has the items of `others`, after that of the product, in variables."""

        def statements(row: ir.Expr, column: ir.Expr, items: Sequence[ir.Var]) -> list[ir.Statement]:
            self._beside = dict(zip(others, items[1:], strict=True))
            return self.statements(row, column, items[0])

        return statements

    def statements(self, row: ir.Expr, column: ir.Expr, product: ir.Var) -> list[ir.Statement]:
        """The statements for neighbouring items of the product."""
        shape, width = self._product.shape, product.type.width
        names = matrix_variables(len(shape))
        variables = Variables(dict(zip(names, shape, strict=True)), splittable=False)
        emitter = Emitter(self._group, variables, self._vectors)
        emitter.depth_of = dict.fromkeys(names, 1)
        emitter.lanes, emitter.lane_steps = width, {"j": 1} if width > 1 else {}
        kind = ir.Type(computed_dtype(self._product), width)
        item = product if product.type == kind else ir.Var("signed_product", kind)
        emitter.given[self._product] = Value(item, 1)
        emitter.given.update({node: Value(item, 1) for node, item in self._beside.items()})
        counts: list[ir.Statement] = [ir.Let("i", row), ir.Let("j", column)]
        if item is not product:
            counts.append(ir.Let(item.name, call("cast", product, dtype=kind.dtype)))
        for at, (other, results) in enumerate(self.known.items()):
            place = _place_in(ir.Var("i"), ir.Var("j"))
            read = ir.Load(results.type, results.name, results.dtype, place)
            counts.append(ir.Let(f"other{at}", read))
            emitter.given[other] = Value(ir.Var(f"other{at}", results.type), 1)
        for axis, length in enumerate(shape[:-2]):
            counts.append(ir.Let(f"b{axis}", BATCH // math.prod(shape[axis + 1 : -2]) % length))
        coords = tuple(map(variable, names))
        number = flat(coords, shape)
        stores: list[ir.Statement] = []
        for output, node in enumerate(self._group.outputs):
            for part, where in _stored(node, coords, number):
                value = emitter.value(part, coords) if part.shape == shape else emitter.at_number(part, where)
                var = emitter.widened(value, width).var
                index, _, _ = emitter.index(where)
                aligned = 1 if self._vectors else emitter.aligned(where)
                stores.append(ir.Store(var, f"out{output}", str(node.dtype), index, aligned, width))
                self.stores[output] = (0, where)
        body = [*emitter.bodies[0], *emitter.bodies[1], *stores]
        for at_input, indices in emitter.loads.items():
            self.loads.setdefault(at_input, set()).update(indices)
        return [*counts, *body]


def _stored(output: Node, coords: Coords, number: Index) -> Iterator[tuple[Node, Index]]:
    """What is stored of an output for an item of the product, and where: the parts of a concatenation."""
    if output.primitive is not CONCAT:
        yield output, number
        return
    axis, start = output.attributes["axis"], 0
    for part in output.inputs:
        moved = coords[axis] + Index((), start)
        yield part, flat((*coords[:axis], moved, *coords[axis + 1 :]), output.shape)
        start += part.shape[axis]
