"""Random bits by the counter-based generator Philox4x32-10, and random values made of them.

An item depends on the state and on its own index only, so every device draws the same bits in any order.
Random values are elementwise functions of bits. The bits have an additional last axis: the 32-bit words that
a single value takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.graph.dtypes import bfloat16, float16, float32, float64, limits, uint32, uint64
from penstock.graph.elementwise import (
    add,
    bitwise_right_shift,
    cast,
    cos,
    less,
    like,
    log,
    multiply,
    remainder,
    sqrt,
)
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape
from penstock.graph.reducing import INDEX, argsort
from penstock.graph.shaping import reshape, slice_axis

WORD, DOUBLE_WORD = uint32, uint64
WORDS_PER_BLOCK = 4
# How many words a single value takes.
UNIFORM_WORDS = {bfloat16: 1, float16: 1, float32: 1, float64: 2}
NORMAL_WORDS = {bfloat16: 2, float16: 2, float32: 2, float64: 4}
INTEGERS_WORDS = PERMUTATION_WORDS = 2
BERNOULLI_WORDS = 1

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_MASK = (1 << 32) - 1


def philox(counter: Sequence[Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """The four words of each block, from the four words of its counter; all are uint64 under 2**32."""
    c0, c1, c2, c3 = counter
    for turn in range(10):
        k0, k1 = ((word + turn * step) & _MASK for word, step in zip(key, _KEY_STEPS, strict=True))
        p0, p1 = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> 32) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
    return c0, c1, c2, c3


def _bits_shape(state: Node, *, shape: Shape) -> tuple[Shape, DType]:
    assert state.shape == (4,)
    assert state.dtype == WORD
    return shape, WORD


def _bits_reference(state: Array, shape: Shape) -> Array:
    key0, key1, low, high = (int(word) for word in state)
    count = math.prod(shape)
    block = np.arange(-(-count // WORDS_PER_BLOCK), dtype=np.uint64) + np.uint64(high << 32 | low)
    zero = np.zeros_like(block)
    words = philox((block & _MASK, block >> 32, zero, zero), (key0, key1))
    return np.stack(words, -1).astype(WORD).reshape(-1)[:count].reshape(shape)


RANDOM_BITS = Primitive("random_bits", Kind.RANDOM, _bits_shape, _bits_reference, weight=4)


def random_bits(state: Node, shape: Shape) -> Node:
    """32 random bits in each item.

    `state` holds four words: the key and the number of the first block, the low word of each before its
    high word. Item `i` in row-major order is word `i % 4` of block `first + i // 4`, modulo 2**64.
    """
    return Node(RANDOM_BITS, (state,), {"shape": shape})


def uniform(bits: Node, dtype: DType) -> Node:
    """Multiples of 2**-8, 2**-11, 2**-24 or 2**-53 (by dtype) in [0, 1) with equal probability."""
    if dtype == float64:
        return _times(_whole53(bits, 0), 2.0**-53)
    digits = limits(dtype).nmant + 1
    return _times(cast(_shifted(_word(bits, 0), 32 - digits), dtype), 2.0**-digits)


def normal(bits: Node, dtype: DType) -> Node:
    """Values of mean 0 and deviation 1 by the Box-Muller transform, at most 6.7 in size (float64: 8.6).

    The bits are the same on every device; log, sqrt and cos of devices may differ in their last bits.
    """
    if dtype == float64:
        first, second, step = _whole53(bits, 0), _whole53(bits, 2), 2.0**-53
    else:
        # float32 rounds large words to 24 bits, but is exact for small words, which make the tails.
        first, second, step = cast(_word(bits, 0), float32), cast(_word(bits, 1), float32), 2.0**-32
    above_zero = _times(add(first, like(first, 1)), step)  # in (0, 1]
    radius = sqrt(_times(log(above_zero), -2))
    return cast(multiply(radius, cos(_times(second, 2 * math.pi * step))), dtype)


def integers(bits: Node, low: int, high: int, dtype: DType) -> Node:
    """Integers in [low, high), of 64 random bits each.

    For a count up to 2**32 the result is floor(x * count / 2**64), beyond that x % count. The probability of
    each is 1 / count to a relative error below count / 2**64; exactly, if count is a power of 2.
    """
    count = high - low
    if count <= 1 << 32:
        upper, lower = (cast(_word(bits, k), DOUBLE_WORD) for k in (0, 1))
        carry = _shifted(_times(lower, count), 32)
        offset = _shifted(add(_times(upper, count), carry), 32)  # the sum stays under 2**64
    else:
        offset = _joined(bits)
        if count < 1 << 64:
            offset = remainder(offset, like(offset, count))
    # Modulo 2**64, so that low may be negative.
    return cast(add(offset, like(offset, low % (1 << 64))), dtype)


def bernoulli(bits: Node, probability: float) -> Node:
    """True with this probability, rounded to a multiple of 2**-32."""
    word = cast(_word(bits, 0), INDEX)  # for a probability of 1, the bound is 2**32, which is no uint32
    return less(word, like(word, round(probability * 2**32)))


def permutation(bits: Node) -> Node:
    """The indices of the items in random order; with a probability of n**2 / 2**65, two of n keep theirs."""
    return argsort(_joined(bits), 0, False)


def _word(bits: Node, number: int) -> Node:
    """Word `number` of each value."""
    *shape, words = bits.shape
    if words > 1:
        count = math.prod(shape)
        rows = reshape(bits, (count, words))  # in a kernel, two axes cost fewer divisions than many
        bits = slice_axis(rows, 1, number, 1)
    return reshape(bits, tuple(shape))


def _joined(bits: Node) -> Node:
    """Words 0 and 1 as 64 bits."""
    upper, lower = (cast(_word(bits, k), DOUBLE_WORD) for k in (0, 1))
    return add(_times(upper, 1 << 32), lower)


def _whole53(bits: Node, number: int) -> Node:
    """An integer of 53 random bits in float64, from two words."""
    upper = cast(_shifted(_word(bits, number), 5), float64)
    lower = cast(_shifted(_word(bits, number + 1), 6), float64)
    return add(_times(upper, 2.0**26), lower)


def _shifted(x: Node, bits: int) -> Node:
    return bitwise_right_shift(x, like(x, bits))


def _times(x: Node, factor: float) -> Node:
    return multiply(x, like(x, factor))
