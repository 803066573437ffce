"""Estimates how long a graph takes on a device: the sum over its kernels, or over NumPy's steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.compiler.passes import fused
from penstock.execution.realize import executables
from penstock.fusion.groups import Group
from penstock.graph.dtypes import HALF_PRECISION, float32, float64
from penstock.graph.node import Kind, Node, topological
from penstock.graph.paged_attention import PROMPT_ATTENTION
from penstock.measuring.rates import Rates
from penstock.runtime import Device

_SLOW_PRODUCT = 32  # NumPy's own loop, for dtypes that its BLAS lacks, takes so many times as long
_READS_PART = (Kind.VIEW, Kind.GATHER)  # they read as much of their first input as they write


@dataclass(frozen=True)
class Price:
    """The seconds that a graph takes on a device, in total and for each group."""

    seconds: float
    groups: tuple[tuple[Group, float], ...]


def price(nodes: Sequence[Node], device: Device, rates: Rates, host: Rates) -> Price | None:
    """The price of computing nodes, without moving inputs; None if the device does not support them.

    `host` are the rates of NumPy, which computes what the device has no kernel for.
    """
    limits = device.capabilities
    if any(node.primitive.kind is Kind.OPAQUE for node in topological(nodes)) and not limits.compiles:
        return None
    groups = fused(nodes, limits)
    priced = tuple((group, _seconds(group, device, rates, host)) for group in groups)
    return Price(rates.program + sum(seconds for _, seconds in priced), priced)


def _seconds(group: Group, device: Device, rates: Rates, host: Rates) -> float:
    numpy = not device.capabilities.compiles
    if group.kind == "single" and not numpy and executables(device).kernels.lowering(group) is None:
        # NumPy computes it: the host waits for the device, and values are copied in both directions.
        read = sum(node.nbytes for node in group.inputs)
        there = rates.program + rates.moving_seconds(read)
        return there + _work(group, host, numpy=True) + rates.moving_seconds(group.outputs[0].nbytes)
    return rates.step + _work(group, rates, numpy)


def _work(group: Group, rates: Rates, numpy: bool) -> float:
    written = sum(node.nbytes for node in group.outputs)
    read = 0
    for node in group.inputs:
        partly = len(group.nodes) == 1 and group.nodes[0].primitive.kind in _READS_PART
        read += min(node.nbytes, written) if partly else node.nbytes
    seconds = rates.moving_seconds(read + written)
    for node in group.nodes:
        primitive = node.primitive
        if primitive.multiplies_matrices:
            seconds = max(seconds, _product_seconds(node, rates, numpy))
        elif primitive.weight:
            items = max(operand.size for operand in (node, *node.inputs))
            items = node.size if primitive.reads_elsewhere else items
            seconds += primitive.weight * items * rates.exponential
    return seconds


def _product_seconds(node: Node, rates: Rates, numpy: bool) -> float:
    if node.primitive.kind is Kind.CONVOLUTION or node.primitive is PROMPT_ATTENTION:
        return rates.product_seconds(float(node.primitive.operations_of(node)))
    if node.primitive.kind is Kind.ATTENTION:
        batch, queries, heads, width = node.inputs[0].shape
        return rates.product_seconds(4.0 * batch * heads * width * queries * node.inputs[1].shape[1])
    inner = node.inputs[0].shape[-1]
    each = 2.0 * math.prod(node.shape[-2:]) * inner
    count = max(math.prod(node.shape[:-2]), 1)
    if not each or not node.size:
        return 0.0
    if not numpy:
        return rates.product_seconds(each * count)  # the products of a batch run in parallel
    dtype = node.inputs[0].dtype
    slower = 1 if dtype is float32 or dtype in HALF_PRECISION else 2 if dtype is float64 else _SLOW_PRODUCT
    return count * slower * rates.product_seconds(each)
