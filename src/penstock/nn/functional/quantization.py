"""Weights as packed integers with a scale for each group of inputs, and products with them."""

from __future__ import annotations

import math

import numpy as np

from penstock.graph import quantization as graph
from penstock.tensor import dtypes
from penstock.tensor.arithmetic import maximum, minimum, where
from penstock.tensor.arithmetic import round as round_
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, from_numpy, record
from penstock.tensor.creation import zeros
from penstock.tensor.manipulation import astype, reshape
from penstock.tensor.padding import pad
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import min as min_
from penstock.tensor.reduction import sum as sum_


def quantized(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """A matrix (outputs, inputs) as packed integers, uint32, and scales of groups of inputs, in its dtype.

    The inputs are filled up with zeros to a multiple of `group`. What is largest in a group is kept, up to
    the rounding of the scale: as -8 times the scale for 4 bits, and as 127 or -127 times it for 8.

    >>> packed, scales = ps.nn.functional.quantized(ps.ones((2, 64)), bits=4, group=32)
    >>> packed.shape, scales.tolist()
    ((2, 8), [[-0.125, -0.125], [-0.125, -0.125]])
    """
    outputs, inputs = weight.shape
    groups, each, half = math.ceil(inputs / group), graph.WORD_BITS // bits, 1 << bits - 1
    exact = astype(weight, dtypes.promote(weight.dtype, dtypes.float32))
    filled = reshape(pad(exact, (0, groups * group - inputs)), (outputs, groups, group))
    most, least = max_(filled, axis=-1, keepdims=True), min_(filled, axis=-1, keepdims=True)
    extreme = where(most >= -least, most, least)
    scales = astype(extreme * (-1 / half) if bits == 4 else extreme * (1 / (half - 1)), weight.dtype)
    factors = astype(scales, exact.dtype)
    steps = round_(filled / where(factors == 0, 1.0, factors))
    numbers = maximum(minimum(steps, half - 1), -half) + half
    places = from_numpy(np.tile(2 ** np.array(graph.SHIFTS[bits], np.uint32), group // each), weight.device)
    parts = reshape(_integers(numbers, bits) * places, (outputs, -1, each))
    return sum_(parts, axis=-1, dtype=dtypes.uint32), reshape(scales, (outputs, groups))


def _integers(numbers: Tensor, bits: int) -> Tensor:
    """Integers from 0 to 2^bits - 1 in floats, as uint32. Kernels do not convert floats to integers."""
    result = zeros(numbers.shape, dtype=dtypes.uint32, device=numbers.device)
    for bit in reversed(range(bits)):
        is_set = numbers >= 2**bit
        numbers = where(is_set, numbers - 2**bit, numbers)
        result = result + astype(is_set, dtypes.uint32) * 2**bit
    return result


def dequantized(packed: Tensor, scales: Tensor, bits: int, inputs: int) -> Tensor:
    """The matrix (outputs, inputs) that packed integers and scales stand for, in the dtype of the scales.

    >>> packed, scales = ps.nn.functional.quantized(ps.ones((2, 64)), bits=4, group=32)
    >>> bool((ps.nn.functional.dequantized(packed, scales, 4, 64) == 1).all())
    True
    """
    node = graph.unpacked(packed._node, scales._node, _columns(packed, bits), scales._node.dtype)
    return record(node, packed, scales)[:, :inputs]


@composite
def quantized_linear(
    x: Tensor, packed: Tensor, scales: Tensor, bits: int, bias: Tensor | None = None
) -> Tensor:
    """`linear` with a weight as `quantized` gives it. Gradients pass to `x` and the bias, not to the weight.

    Up to 16 rows, or 32 on tensor cores, are multiplied with the packed integers; for more, the weight is
    unpacked to memory first.

    >>> packed, scales = ps.nn.functional.quantized(ps.ones((2, 64)), bits=8, group=32)
    >>> ps.nn.functional.quantized_linear(ps.ones((3, 64)), packed, scales, 8).tolist()
    [[64.0, 64.0], [64.0, 64.0], [64.0, 64.0]]
    """
    if scales.requires_grad:
        raise TypeError(
            "a quantized weight is not trained: integers have no gradient. Train what is added to the "
            "layer's result, such as an adapter, or quantize after training"
        )
    inputs, columns = x.shape[-1], _columns(packed, bits)
    dtype = dtypes.promote(x.dtype, scales.dtype)
    rows = reshape(astype(x, dtype), (-1, inputs))
    if inputs < columns:
        rows = pad(rows, (0, columns - inputs))
    product = record(graph.packed_matmul(rows._node, packed._node, scales._node), rows, packed, scales)
    result = reshape(product, (*x.shape[:-1], packed.shape[0]))
    return result if bias is None else result + bias


def _columns(packed: Tensor, bits: int) -> int:
    return packed.shape[1] * graph.WORD_BITS // bits
