"""From a group to its kernels, and how they are launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.fusion.costs import MOST_ITEMS
from penstock.fusion.groups import Group
from penstock.fusion.kinds import GroupKind
from penstock.fusion.products import LIBRARY_DTYPES, by_library
from penstock.graph.attention import has_kernel
from penstock.graph.dtypes import bfloat16, float16, float32, float64, int32, int64, uint32, uint64
from penstock.graph.elementwise import FULL
from penstock.graph.linear import LINEAR
from penstock.graph.node import Array, Kind, Node
from penstock.graph.paged_attention import PROMPT_ATTENTION, has_step_kernel
from penstock.graph.reference import computed
from penstock.kernels.attention.kernels import attention_kernels
from penstock.kernels.convolution.kernels import convolution_kernels
from penstock.kernels.dialects import dialect_of
from penstock.kernels.library.cublaslt import library_launch
from penstock.kernels.lowering.fused import LOOPS, lower
from penstock.kernels.lowering.values import computed_dtype
from penstock.kernels.matmul_group import linear_group, matmul_group, packed_group
from penstock.kernels.paged_group import paged_group
from penstock.kernels.raw_source import raw_source
from penstock.kernels.source import ALIGNMENT, C_TYPES, KernelSource
from penstock.kernels.strided_copy import strided_copy
from penstock.kernels.templates.choose import template_launches
from penstock.kernels.templates.launches import Lowering as Lowering
from penstock.kernels.templates.launches import one_launch

_CPU_PRODUCTS = (int32, uint32, int64, uint64, float64)  # besides those of every device


def without_sizes(structure: tuple[Any, ...]) -> tuple[Any, ...]:
    """A structure with ranks for shapes: equal for groups that differ in their sizes only."""
    kind, leaves, inside, outputs = structure
    return (
        kind,
        tuple((len(shape), dtype) for shape, dtype in leaves),
        tuple((name, parents, len(shape), dtype) for name, parents, shape, dtype, _ in inside),
        outputs,
    )


def without_shape(group: Group) -> tuple[Any, ...] | None:
    """What kernels of elementwise work depend on, apart from the shape; None for other work.

    All values have as many items, more than one, in the same order.
    """
    size = group.outputs[0].size
    if size < 2 or any(node.size != size for node in group.inputs):
        return None
    numbers: dict[Node, int] = {node: at for at, node in enumerate(group.inputs)}
    inside: list[tuple[Any, ...]] = []
    for node in group.nodes:
        primitive = node.primitive
        if primitive.same_bytes:
            numbers[node] = numbers[node.inputs[0]]
            continue
        if (primitive is not FULL and primitive.kind is not Kind.ELEMENTWISE) or node.size != size:
            return None
        numbers[node] = len(numbers)
        inside.append((primitive.name, *(numbers[parent] for parent in node.inputs), str(node.dtype)))
        if primitive is not FULL:
            inside.append(tuple(x for name, x in node.attributes.items() if name not in primitive.constants))
    dtypes = tuple(str(node.dtype) for node in group.inputs)
    return dtypes, tuple(inside), tuple(numbers[node] for node in group.outputs)


def constants(group: Group) -> list[tuple[Node, str]]:
    """The scalar arguments of a group's kernel, in the order of its parameters: node and attribute."""
    # The outputs of a user's kernel have the same attributes.
    nodes = group.nodes[:1] if group.kind.reads_whole else group.nodes
    return [(node, name) for node in nodes for name in node.primitive.constants]


def constant(node: Node, name: str) -> Any:
    """The value of a scalar argument."""
    return np.asarray(node.attributes[name]).astype(node.dtype).item()


def fusible(node: Node, capabilities: Capabilities) -> bool:
    """Whether a device has kernels in which the node can be fused with others."""
    if not capabilities.compiles:
        return False
    primitive, kind = node.primitive, node.primitive.kind
    if kind is Kind.OPAQUE:
        return True  # with the other outputs of its kernel
    if kind is Kind.CONVOLUTION:
        return True  # it was made where there is a kernel
    values = (node, *node.inputs)
    if not all(_has(str(value.dtype), capabilities) and 0 < value.size < MOST_ITEMS for value in values):
        return False
    if not dialect_of(capabilities).has_short_loops(node, capabilities):
        return False
    if primitive.is_free or primitive.reads_elsewhere or kind is Kind.REDUCTION:
        return True
    if kind is Kind.CONTRACTION:
        if primitive.few_rows:
            return True
        others = LIBRARY_DTYPES if capabilities.matmul_library else ()
        on_cpu = (bfloat16, *_CPU_PRODUCTS) if capabilities.vector_width > 1 else ()
        return node.dtype in (float32, float16, *others, *on_cpu)
    if kind is Kind.ATTENTION:
        return primitive is PROMPT_ATTENTION or has_kernel(node, capabilities)
    if kind is Kind.PAGED_STEP:
        return has_step_kernel(capabilities)
    if kind is not Kind.ELEMENTWISE or node.dtype in primitive.no_kernel:
        return False
    result, of = computed_dtype(node), computed_dtype(node.inputs[-1])
    vectors, inputs = capabilities.vector_width > 1, len(node.inputs)
    return dialect_of(capabilities).has_operation(primitive.name, result, of, inputs, vectors)


def _has(dtype: str, capabilities: Capabilities) -> bool:
    if dtype in ("int64", "uint64"):
        return capabilities.int64
    return dtype in C_TYPES and (dtype != "float64" or capabilities.float64)


def write(
    group: Group, capabilities: Capabilities, ending: str, varied: bool = False, shared: bool = False
) -> Lowering | None:
    """The kernels of a group, with an ending for their names; None where the device has none.

    `varied`: the kernels should also serve groups that differ in their shapes only. `shared`: there should be
    as few as possible, however long they take.
    """
    if group.nodes[0].primitive.collective:
        return None  # it waits for other ranks, and must not hold the device's queue meanwhile
    if not capabilities.compiles:
        return _host(group, _name(group, ending))
    if group.kind is GroupKind.MATMUL:
        return _matmul(group, capabilities, ending, varied, shared)
    if group.kind in LOOPS:
        return _loops(group, capabilities, ending, varied, shared)
    return _LOWERINGS[group.kind](group, capabilities, ending)


def _loops(group: Group, capabilities: Capabilities, ending: str, varied: bool, shared: bool) -> Lowering:
    if shared and (copy := strided_copy(group, capabilities, f"copy_{ending}")) is not None:
        return copy
    lowered = lower(group, capabilities, varied, shared)
    source = dialect_of(capabilities).render(lowered.kernel, _name(group, ending))
    return replace(one_launch(source, lowered.may_alias), order=lowered.order)


def _matmul(group: Group, capabilities: Capabilities, ending: str, varied: bool, shared: bool) -> Lowering:
    product = next(node for node in group.nodes if node.primitive.kind is Kind.CONTRACTION)
    if product.primitive is LINEAR:
        return linear_group(group, product, capabilities, _name(group, ending))
    if product.primitive.few_rows:
        return packed_group(group, product, capabilities, _name(group, ending))
    if by_library(product, capabilities):
        return library_launch(group, product, capabilities, _name(group, ending))
    return matmul_group(group, product, capabilities, _name(group, ending), varied, shared)


def _template(group: Group, capabilities: Capabilities, ending: str) -> Lowering | None:
    lowering = template_launches(group.nodes[0], capabilities)
    return None if lowering is None else lowering.named(ending)


_LOWERINGS: dict[GroupKind, Callable[[Group, Capabilities, str], Lowering | None]] = {
    GroupKind.CONVOLUTION: lambda group, can, ending: convolution_kernels(group, can),
    GroupKind.ATTENTION: lambda group, can, ending: attention_kernels(group),
    GroupKind.PAGED: lambda group, can, ending: paged_group(group, can).named(ending),
    GroupKind.RAW: lambda group, can, ending: one_launch(raw_source(group, can, ending)),
    GroupKind.SINGLE: _template,
}


def _name(group: Group, ending: str) -> str:
    """A name that says what the kernel does."""
    silent = (node.primitive.kind is Kind.VIEW or node.primitive is FULL for node in group.nodes)
    named = [node.primitive.name for node, skip in zip(group.nodes, silent, strict=True) if not skip]
    return f"{'_'.join([group.kind, *dict.fromkeys(named)])[:48]}_{ending}"


def _host(group: Group, name: str) -> Lowering:
    """A group as a function of NumPy arrays, for the host driver."""
    values = (*group.outputs, *group.inputs)
    dtypes = tuple(str(node.dtype) for node, _ in constants(group))
    source = KernelSource(name, "", ("uint8",) * len(values), dtypes, (1,), (1,))

    def run(*args: Any) -> None:
        count = len(values)
        memories, places, scalars = args[:count], args[count : 2 * count], args[2 * count :]
        arrays: list[Array] = []
        for node, memory, place in zip(values, memories, places, strict=True):
            part = memory[int(place) * ALIGNMENT :][: node.nbytes]
            arrays.append(part.view(node.dtype).reshape(node.shape))
        known = dict(zip(group.inputs, arrays[len(group.outputs) :], strict=True))
        given = dict(zip(constants(group), scalars, strict=True))
        for node in group.nodes:
            known[node] = computed(
                node,
                [known[parent] for parent in node.inputs],
                {name: given.get((node, name), value) for name, value in node.attributes.items()},
            )
        for node, array in zip(group.outputs, arrays, strict=False):
            array[...] = known[node]

    # A single output is written after everything was read, and NumPy handles overlapping copies.
    may_alias = (tuple(range(len(group.inputs))),) if len(group.outputs) == 1 else ()
    return replace(one_launch(source, may_alias), function=run)
