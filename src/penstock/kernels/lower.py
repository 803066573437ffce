"""From a group to what is compiled for it: source in the device's language, and how it is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.fusion import costs
from penstock.fusion.groups import Group
from penstock.fusion.products import LIBRARY_DTYPES, by_library
from penstock.graph.attention import has_kernel
from penstock.graph.dtypes import float16, float32
from penstock.graph.elementwise import FULL
from penstock.graph.node import Array, Kind, Node
from penstock.graph.reference import computed
from penstock.kernels.attention.kernels import attention_kernels
from penstock.kernels.dialects import dialect_of
from penstock.kernels.library.cublaslt import WORKSPACE, LibraryLaunch, library_problem
from penstock.kernels.lowering.fused import lower
from penstock.kernels.lowering.scopes import computed_dtype
from penstock.kernels.matmul_group import matmul_group
from penstock.kernels.raw_source import raw_source
from penstock.kernels.source import ALIGNMENT, C_TYPES, KernelSource
from penstock.kernels.templates.choose import template_launches
from penstock.kernels.templates.launches import Launch


@dataclass(frozen=True)
class Lowering:
    """The launches of a group: their buffers are numbers in [*outputs, *inputs, *scratch]."""

    launches: tuple[Launch, ...]
    scratch: tuple[int, ...]  # bytes
    may_alias: tuple[tuple[int, ...], ...]  # for each output: numbers of inputs that it may be written over
    function: Callable[..., None] | None = None  # instead of text: on the host, or of a library


def without_sizes(structure: tuple[Any, ...]) -> tuple[Any, ...]:
    """A structure with the number of axes for shapes: equal for groups that differ in their sizes only."""
    kind, leaves, inside, outputs = structure
    return (
        kind,
        tuple((len(shape), dtype) for shape, dtype in leaves),
        tuple((name, parents, len(shape), dtype) for name, parents, shape, dtype, _ in inside),
        outputs,
    )


def constants(group: Group) -> list[tuple[Node, str]]:
    """The scalar arguments of a group's kernel, in the order of its parameters: node and attribute."""
    nodes = group.nodes[:1] if group.kind == "raw" else group.nodes  # the outputs of one launch have the same
    return [(node, name) for node in nodes for name in node.primitive.constants]


def constant(node: Node, name: str) -> Any:
    """The value of a scalar argument."""
    return np.asarray(node.attributes[name]).astype(node.dtype).item()


def fusible(node: Node, capabilities: Capabilities) -> bool:
    """Whether a kernel on a device with these capabilities can hold the node beside others."""
    if not capabilities.compiles:
        return False
    primitive, kind = node.primitive, node.primitive.kind
    if kind is Kind.OPAQUE:
        return True  # for itself, with the other outputs of its kernel
    values = (node, *node.inputs)
    if not all(_has(str(one.dtype), capabilities) and 0 < one.size < costs.MOST_ITEMS for one in values):
        return False
    if not dialect_of(capabilities).has_short_loops(node, capabilities):
        return False
    if primitive.is_free or primitive.reads_elsewhere or kind is Kind.REDUCTION:
        return True
    if kind is Kind.CONTRACTION:
        others = LIBRARY_DTYPES if capabilities.matmul_library else ()
        return node.dtype in (float32, float16, *others)
    if kind is Kind.ATTENTION:
        return has_kernel(node, capabilities)
    if kind is not Kind.ELEMENTWISE or node.dtype in primitive.no_kernel:
        return False
    result, of = computed_dtype(node), computed_dtype(node.inputs[-1])
    return dialect_of(capabilities).has_operation(primitive.name, result, of, len(node.inputs))


def _has(dtype: str, capabilities: Capabilities) -> bool:
    if dtype in ("int64", "uint64"):
        return capabilities.int64
    return dtype in C_TYPES and (dtype != "float64" or capabilities.float64)


def write(group: Group, capabilities: Capabilities, ending: str, varied: bool = False) -> Lowering | None:
    """What computes a group, in kernels with names of this ending; None where the device has none.

    `varied`: there are groups of many shapes that are otherwise equal, which the kernels should serve too.
    """
    name = f"{_name(group)}_{ending}"
    if not capabilities.compiles:
        return _host(group, name)
    buffers = tuple(range(len(group.outputs) + len(group.inputs)))
    if group.kind == "single":
        template = template_launches(group.nodes[0], capabilities)
        if template is None:
            return None
        return Lowering(_named(template.launches, ending), template.scratch, ((),))
    if group.kind == "raw":
        own = Launch(raw_source(group, capabilities, ending), buffers)
        return Lowering((own,), (), ((),) * len(group.outputs))
    if group.kind == "attention":
        several = attention_kernels(group, ending)
        return Lowering(several.launches, several.scratch, ((),) * len(group.outputs))
    if group.kind == "matmul":
        product = next(node for node in group.nodes if node.primitive.kind is Kind.CONTRACTION)
        if by_library(product, capabilities):
            return _library(group, product, capabilities, name)
        source, over = matmul_group(group, capabilities, name, varied)
    else:
        lowered = lower(group, capabilities)
        source, over = dialect_of(capabilities).render(lowered.form, name), lowered.may_alias
    return Lowering((Launch(source, buffers),), (), over)


def _library(group: Group, product: Node, capabilities: Capabilities, name: str) -> Lowering:
    """A product as the launch of a library, which takes a workspace besides."""
    problem, operands = library_problem(group, product, capabilities)
    nodes = (*group.outputs, *group.inputs)
    dtypes = (*(str(node.dtype) for node in nodes), "uint8")
    source = KernelSource(name, "", dtypes, (), (1,), (1,))
    places = {"out": 0, "workspace": len(nodes)}
    places |= {operand: nodes.index(node) for operand, node in operands.items()}
    launch = LibraryLaunch(problem, places, len(dtypes))
    return Lowering((Launch(source, tuple(range(len(dtypes)))),), (WORKSPACE,), ((),), launch)


def _name(group: Group) -> str:
    """A name that tells people what the kernel does."""
    silent = (node.primitive.kind is Kind.VIEW or node.primitive is FULL for node in group.nodes)
    named = [node.primitive.name for node, skip in zip(group.nodes, silent, strict=True) if not skip]
    return "_".join([group.kind, *dict.fromkeys(named)])[:48]


def _named(launches: tuple[Launch, ...], ending: str) -> tuple[Launch, ...]:
    """The same with names of their own."""
    return tuple(
        replace(launch, source=replace(launch.source, name=f"{launch.source.name}_{ending}"))
        for launch in launches
    )


def _host(group: Group, name: str) -> Lowering:
    """A group as a function of NumPy arrays, for the driver that runs such."""
    values = (*group.outputs, *group.inputs)
    scalars = tuple(str(node.dtype) for node, _ in constants(group))
    source = KernelSource(name, "", ("uint8",) * len(values), scalars, (1,), (1,))

    def run(*args: Any) -> None:
        memories, places, numbers = (
            args[: len(values)],
            args[len(values) :][: len(values)],
            args[2 * len(values) :],
        )
        arrays: list[Array] = []
        for node, memory, place in zip(values, memories, places, strict=True):
            part = memory[int(place) * ALIGNMENT :][: node.nbytes]
            arrays.append(part.view(node.dtype).reshape(node.shape))
        known = dict(zip(group.inputs, arrays[len(group.outputs) :], strict=True))
        given = dict(zip(constants(group), numbers, strict=True))
        for node in group.nodes:
            known[node] = computed(
                node,
                [known[parent] for parent in node.inputs],
                {name: given.get((node, name), value) for name, value in node.attributes.items()},
            )
        for node, array in zip(group.outputs, arrays, strict=False):
            array[...] = known[node]

    # One output is written after everything was read, and NumPy minds where a copy overlaps its source.
    over = tuple(range(len(group.inputs))) if len(group.outputs) == 1 else ()
    return Lowering((Launch(source, tuple(range(len(values)))),), (), (over,) * len(group.outputs), run)
