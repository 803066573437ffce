"""A matrix product with what is done to each of its items: the template with the group's own epilogue."""

from __future__ import annotations

import math

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.fusion.index import Index, Variables, flat, variable
from penstock.fusion.views import base, matrix_variables, operand_index
from penstock.graph.node import Node
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.ir.expressions import Const, Expr, Type, Var
from penstock.kernels.ir.statements import KernelIR, Let, Statement, Store
from penstock.kernels.lowering.emitter import Emitter, LanesImpossible, Value
from penstock.kernels.lowering.loop_nest import overwritable
from penstock.kernels.templates.launches import Lowering, one_launch
from penstock.kernels.templates.matmul import BATCH, Matrix, Problem
from penstock.kernels.templates.matmul_cpu import cpu_matmul, cpu_width
from penstock.kernels.templates.matmul_gpu import gpu_matmul, gpu_width


def matmul_group(
    group: Group, product: Node, capabilities: Capabilities, name: str, varied: bool
) -> Lowering:
    """The kernel of a matmul group; `varied`: it should serve many sizes."""
    vectors = capabilities.vector_width > 1
    epilogue = _Epilogue(group, product, vectors)
    kernel = epilogue.kernel
    k = KernelBuilder(name, capabilities, kernel.outputs, kernel.inputs, kernel.scalars)
    sides = [_matrix(k, group, side, product) for side in product.inputs]
    problem = Problem(
        batch=math.prod(product.shape[:-2]),
        rows=product.shape[-2],
        columns=product.shape[-1],
        inner=product.inputs[0].shape[-1],
        left=sides[0][1],
        right=sides[1][1],
        varied=varied,
    )
    build, widest = (cpu_matmul, cpu_width) if vectors else (gpu_matmul, gpu_width)
    width = epilogue.possible(widest(problem, capabilities, kernel.outputs))
    source = build(k, problem, capabilities, epilogue.statements, width)
    operands = {group.inputs.index(node) for node, _ in sides}
    over = overwritable(group, epilogue.loads, epilogue.stores)
    return one_launch(source, tuple(tuple(at for at in inputs if at not in operands) for inputs in over))


def _matrix(k: KernelBuilder, group: Group, operand: Node, product: Node) -> tuple[Node, Matrix]:
    """What an operand looks at, and how it lies there."""
    node, index = operand_index(operand, group.inputs) or (base(operand), _contiguous(operand))
    lengths = product.shape[:-2]
    begin: Expr = Const(index.constant)
    for axis, length in enumerate(lengths):
        factor = index.factor(f"b{axis}")
        if factor and length > 1:
            begin = begin + BATCH // math.prod(lengths[axis + 1 :]) % length * factor
    memory = k.inputs[group.inputs.index(node)]
    return node, Matrix(memory, begin, row_stride=index.factor("i"), column_stride=index.factor("j"))


def _contiguous(node: Node) -> Index:
    return flat(tuple(map(variable, matrix_variables(node.ndim))), node.shape)


class _Epilogue:
    """What is done to items of the product, wherever the template has some at hand."""

    def __init__(self, group: Group, product: Node, vectors: bool) -> None:
        self._group = group
        self._product = product
        self._vectors = vectors
        self.kernel: KernelIR = Emitter(group, Variables({})).kernel
        self.loads: dict[int, set[tuple[int, Index]]] = {}
        self.stores: dict[int, tuple[int, Index]] = {}

    def possible(self, width: int) -> int:
        """How many neighbours can be computed at a time: `width`, or one."""
        try:
            self.statements(Const(0), Const(0), Var("product", Type("float32", width)))
        except LanesImpossible:
            return 1
        return width

    def statements(self, row: Expr, column: Expr, product: Var) -> list[Statement]:
        """The statements for neighbouring items of the product."""
        shape, width = self._product.shape, product.type.width
        names = matrix_variables(len(shape))
        variables = Variables(dict(zip(names, shape, strict=True)), splittable=False)
        emitter = Emitter(self._group, variables, self._vectors)
        emitter.depth_of = dict.fromkeys(names, 1)
        emitter.lanes, emitter.lane_steps = width, {"j": 1} if width > 1 else {}
        emitter.given[self._product] = Value(product, 1)
        counts: list[Statement] = [Let("i", row), Let("j", column)]
        for axis, length in enumerate(shape[:-2]):
            counts.append(Let(f"b{axis}", BATCH // math.prod(shape[axis + 1 : -2]) % length))
        place = tuple(map(variable, names))
        number = flat(place, shape)
        values = []
        for node in self._group.outputs:
            value = emitter.value(node, place) if node.shape == shape else emitter.at_number(node, number)
            values.append(emitter.widened(value, width))
        index, _, _ = emitter.index(number)
        aligned = 1 if self._vectors else emitter.aligned(number)
        body = [*emitter.bodies[0], *emitter.bodies[1]]
        for output, (node, value) in enumerate(zip(self._group.outputs, values, strict=True)):
            body.append(Store(value.var, f"out{output}", str(node.dtype), index, aligned, width))
            self.stores[output] = (0, number)
        for at_input, indices in emitter.loads.items():
            self.loads.setdefault(at_input, set()).update(indices)
        return [*counts, *body]
