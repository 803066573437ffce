"""The templates of the primitives that do not fuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALF_PRECISION, float64, int64, uint64
from penstock.graph.node import Kind, Node
from penstock.kernels.library.cublaslt import joined_launch
from penstock.kernels.source import C_TYPES
from penstock.kernels.templates.extreme import extreme
from penstock.kernels.templates.launches import Lowering
from penstock.kernels.templates.paged_attention import paged_attention
from penstock.kernels.templates.scan import scan
from penstock.kernels.templates.scatter import scatter
from penstock.kernels.templates.sort import sort
from penstock.kernels.templates.update import update


@dataclass(frozen=True)
class _Template:
    """What builds the kernels of a kind of primitive, and the values that it supports besides the usual."""

    build: Callable[[Node, Capabilities], Lowering | None]
    half_precision: bool = False
    reads_words: bool = False  # 64-bit integers, even on devices without them


_TEMPLATES = {
    Kind.SCAN: _Template(scan),
    Kind.ARG_REDUCTION: _Template(extreme, half_precision=True),
    Kind.SORT: _Template(sort, reads_words=True),
    Kind.SCATTER: _Template(scatter, half_precision=True),
    Kind.PAGED_ATTENTION: _Template(paged_attention, half_precision=True),
    Kind.UPDATE: _Template(update, half_precision=True),
    Kind.PRODUCTS: _Template(lambda node, capabilities: joined_launch(node), half_precision=True),
}
_MOST_ITEMS = 1 << 30  # so that no index overflows an int32, even padded or a step further


def template_launches(node: Node, capabilities: Capabilities) -> Lowering | None:
    """The launches that compute `node`; None where there are no kernels for it.

    All values are contiguous in row-major order. The output may hold anything before.
    """
    template = _TEMPLATES.get(node.primitive.kind)
    values = (node, *node.inputs)
    if template is None or not all(0 < value.size < _MOST_ITEMS for value in values):
        return None
    if not all(_has_type(value, node, template, capabilities) for value in values):
        return None
    lowering = template.build(node, capabilities)
    return lowering if lowering is None or _takes_few(lowering, values, capabilities) else None


def _takes_few(lowering: Lowering, values: Sequence[Node], capabilities: Capabilities) -> bool:
    """Whether scratch buffers and the number of a launch's buffers are within the device's limits."""
    sizes = [*(value.nbytes for value in values), *lowering.scratch]
    taken = [sum(capabilities.bindings(sizes[at]) for at in launch.buffers) for launch in lowering.launches]
    largest = max(lowering.scratch, default=0)
    return largest <= capabilities.max_allocation_bytes and max(taken) <= capabilities.max_buffers


def _has_type(value: Node, node: Node, template: _Template, capabilities: Capabilities) -> bool:
    if value.dtype == float64:
        return capabilities.float64
    if value.dtype in (int64, uint64) and value is node.inputs[0] and not template.reads_words:
        return capabilities.int64  # indices are always read as words
    return str(value.dtype) in C_TYPES and (template.half_precision or value.dtype not in HALF_PRECISION)
