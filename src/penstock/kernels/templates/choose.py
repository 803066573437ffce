"""Kernels of the primitives that do not fuse: which module writes each of them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Kind, Node
from penstock.kernels.source import C_TYPES
from penstock.kernels.templates.extreme import extreme
from penstock.kernels.templates.launches import Lowering
from penstock.kernels.templates.scan import scan
from penstock.kernels.templates.scatter import scatter
from penstock.kernels.templates.sort import sort

_TEMPLATES = {
    Kind.SCAN: scan,
    Kind.ARG_REDUCTION: extreme,
    Kind.SORT: sort,
    Kind.SCATTER: scatter,
}
_LONG = ("int64", "uint64")
_MOST_ITEMS = 1 << 30  # so that no place in a kernel leaves an int, even one padded or a step further


def template_launches(node: Node, capabilities: Capabilities) -> Lowering | None:
    """The launches that compute `node` from its inputs' values; None where there are no kernels for it.

    All values are contiguous in row-major order. The output may hold anything before.
    """
    write = _TEMPLATES.get(node.primitive.kind)
    values = (node, *node.inputs)
    if write is None or not all(0 < value.size < _MOST_ITEMS for value in values):
        return None
    if not all(_has_type(value, node, capabilities) for value in values):
        return None
    launches = write(node, capabilities)
    return launches if launches is None or _takes_few(launches, values, capabilities) else None


def _takes_few(launches: Lowering, values: Sequence[Node], capabilities: Capabilities) -> bool:
    """Whether there can be memories so large, and no launch takes more of them than a kernel may."""
    sizes = [*(value.nbytes for value in values), *launches.scratch]
    taken = [sum(capabilities.bindings(sizes[at]) for at in launch.buffers) for launch in launches.launches]
    return max(launches.scratch, default=0) <= capabilities.max_allocation_bytes and (
        max(taken) <= capabilities.max_buffers
    )


def _has_type(value: Node, node: Node, capabilities: Capabilities) -> bool:
    dtype = str(value.dtype)
    if dtype == "float64":
        return capabilities.float64
    if dtype in _LONG and value is node.inputs[0] and node.primitive.kind is not Kind.SORT:
        return capabilities.int64  # indices, and keys of a sort, are taken as words
    return dtype in C_TYPES and (value.dtype not in HALF_PRECISION or node.primitive.kind is Kind.SCATTER)
