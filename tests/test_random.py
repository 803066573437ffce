"""Random numbers: Philox against known answers, distributions, and the same bits on every driver."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, NATIVE, SMALL, one_opencl
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import Device
from penstock.drivers.opencl import OpenCLDriver
from penstock.graph import random as graph
from penstock.graph.node import Node, leaf, topological
from penstock.graph.random import RANDOM_BITS, philox, random_bits
from penstock.kernels.dialects.opencl import OpenCL
from penstock.kernels.dialects.philox import PHILOX
from penstock.tensor import random
from penstock.tensor.random import Generator

pytestmark = one_opencl

# The known answers of the authors of Philox: counter, key, block.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
WORDS = st.integers(0, 2**32 - 1)
STATES = st.one_of(
    st.lists(WORDS, min_size=4, max_size=4),
    st.just([7, 8, 0xFFFFFFFF, 5]),  # the counter carries into its high word
    st.just([7, 8, 0xFFFFFFFF, 0xFFFFFFFF]),  # and comes round to 0
)


@pytest.fixture(scope="module", params=DRIVERS)
def on(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = Device.over(DRIVERS[request.param](), SMALL)
    yield device
    device.close()


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """A block in Python integers, round by round as in the paper."""
    left, right, keys = counter[1::2], counter[0::2], list(key)
    for _ in range(10):
        products = [factor * word for factor, word in zip((0xD2511F53, 0xCD9E8D57), right, strict=True)]
        highs, lows = ([divmod(p, 2**32)[part] for p in reversed(products)] for part in (0, 1))
        right = [high ^ word ^ k for high, word, k in zip(highs, left, keys, strict=True)]
        left = lows
        keys = [(k + step) % 2**32 for k, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return [right[0], left[0], right[1], left[1]]


def slow_bits(state: list[int], count: int) -> list[int]:
    first = state[2] + (state[3] << 32)
    words: list[int] = []
    for block in range(first, first + -(-count // 4)):
        words += slow_philox([block % 2**32, (block >> 32) % 2**32, 0, 0], state[:2])
    return words[:count]


def meaning(state: list[int], shape: tuple[int, ...]) -> np.ndarray:
    return RANDOM_BITS.reference(np.array(state, np.uint32), shape=shape)


def given_words(words: Any) -> Node:
    array = np.array(words, np.uint32)
    return leaf(array, array.shape, array.dtype)


def value(node: Node) -> np.ndarray:
    """The value of a node by NumPy references."""
    values: dict[Node, Any] = {}
    with np.errstate(all="raise"):
        for item in topological([node]):
            inputs = [values[parent] for parent in item.inputs]
            known = item.value is not None
            values[item] = item.value if known else item.primitive.reference(*inputs, **item.attributes)
    return values[node]


@pytest.mark.parametrize(("counter", "key", "block"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], block: list[int]) -> None:
    assert slow_philox(counter, key) == block
    result = philox([np.array([word], np.uint64) for word in counter], (key[0], key[1]))
    assert [int(word[0]) for word in result] == block


@settings(max_examples=50, deadline=None)
@given(state=STATES, count=st.integers(0, 30))
def test_the_meaning_is_philox_word_by_word(state: list[int], count: int) -> None:
    assert meaning(state, (count,)).tolist() == slow_bits(state, count)


def test_bits_lie_in_row_major_order() -> None:
    result = meaning([1, 2, 3, 4], (2, 3, 5))
    assert result.dtype == np.uint32
    assert result.reshape(-1).tolist() == slow_bits([1, 2, 3, 4], 30)
    assert meaning([1, 2, 3, 4], ()).tolist() == slow_bits([1, 2, 3, 4], 1)[0]


def test_a_kernel_draws_the_same_words() -> None:
    kernel = """
__kernel void draw(__global uint *out, __global const uint *state, int n) {
    int i = get_global_id(0);
    ulong block = (((ulong)state[3] << 32) | state[2]) + (ulong)(i >> 2);
    if (i < n) out[i] = philox(state[0], state[1], (uint)block, (uint)(block >> 32), i & 3);
}
__kernel void known(__global uint *out, __global const uint *in) {
    int i = get_global_id(0), j = i >> 2;
    in += 6 * j;
    if (j < 3) out[i] = philox_128(in[4], in[5], in[0], in[1], in[2], in[3], i & 3);
}
"""
    signatures = {"draw": ("uint32*", "uint32*", "int32"), "known": ("uint32*", "uint32*")}
    device = Device.over(OpenCLDriver(NATIVE, "opencl-philox"), SMALL)
    kernels = device.compile(OpenCL.prelude + PHILOX + kernel, signatures)
    for state in ([0, 0, 0, 0], [0xA4093822, 0x299F31D0, 0xFFFFFFF0, 3], [1, 2, 0xFFFFFFFF, 0xFFFFFFFF]):
        out = device.empty(4 * 1001)
        words = device.upload(np.array(state, np.uint32))
        device.stream.launch(kernels["draw"], (16,), (64,), (out, words, 1001))
        assert np.array_equal(device.download(out, np.uint32).wait(), meaning(state, (1001,)))
    out = device.empty(4 * 12)
    words = device.upload(np.array([counter + key for counter, key, _ in KNOWN], np.uint32))
    device.stream.launch(kernels["known"], (1,), (64,), (out, words))
    assert device.download(out, np.uint32, (3, 4)).wait().tolist() == [block for _, _, block in KNOWN]
    device.close()


@settings(max_examples=20, deadline=None)
@given(state=STATES, shape=st.lists(st.integers(1, 40), min_size=1, max_size=2), step=st.integers(1, 3))
def test_kernels_draw_the_same_words_through_views(state: list[int], shape: list[int], step: int) -> None:
    words = random_bits(ps.asarray(np.array(state, np.uint32))._node, tuple(shape))
    drawn = ps.Tensor(words, ps.default_device())
    expected = meaning(state, tuple(shape))
    np.testing.assert_array_equal(drawn[..., step - 1 :: step].numpy(), expected[..., step - 1 :: step])
    np.testing.assert_array_equal(
        (ps.permute_dims(drawn, tuple(range(len(shape)))[::-1]) ^ 1).numpy(), expected.T ^ 1
    )


# The numbers made of the bits


@pytest.mark.parametrize(("dtype", "digits"), [("float16", 11), ("float32", 24), ("float64", 53)])
def test_uniform(dtype: str, digits: int) -> None:
    drawn = Generator(1).uniform((100, 200), dtype=np.dtype(dtype)).numpy()
    assert drawn.dtype == dtype
    scaled = drawn.astype(np.float64) * 2.0**digits
    assert np.array_equal(scaled, np.floor(scaled))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean(dtype=np.float64) - 1 / 2) < 0.01
    assert abs(drawn.var(dtype=np.float64) - 1 / 12) < 0.002
    assert distance(drawn, lambda x: x) < 2


def test_uniform_is_the_bits_over_their_count() -> None:
    words = meaning([5, 0, 0, 0], (8,)).astype(np.uint64)
    assert Generator(5).uniform(8).tolist() == [(int(word) >> 8) / 2**24 for word in words]
    pairs = [(int(upper) >> 5 << 26 | int(lower) >> 6) / 2**53 for upper, lower in words.reshape(4, 2)]
    assert Generator(5).uniform(4, dtype=ps.float64).tolist() == pairs


def test_uniform_between_bounds_never_reaches_the_upper_one() -> None:
    drawn = Generator(2).uniform(20_000, -3, 5).numpy()
    assert drawn.dtype == np.float32
    assert -3 <= drawn.min() < -2.99
    assert 4.99 < drawn.max() < 5
    high = float(np.nextafter(np.float32(2), np.float32(3)))
    assert set(Generator(2).uniform(1000, 2, high).tolist()) == {2.0}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_bits_lead_out_of_range(dtype: str) -> None:
    """The smallest and the largest words, which no test would draw."""
    result = np.dtype(dtype)
    words = graph.NORMAL_WORDS[result]
    ends = [[word] * words for word in (0, 2**32 - 1)]
    least, most = value(graph.uniform(given_words([end[: words // 2] for end in ends]), result))
    assert least == 0
    assert 1 - np.finfo(result).eps <= most < 1
    far, near = value(graph.normal(given_words(ends), result))
    assert 6.6 < far < 8.6
    assert abs(near) < 1e-3
    for chance in (0, 1):
        assert value(graph.bernoulli(given_words([[0], [2**32 - 1]]), chance)).tolist() == [chance] * 2


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_normal(dtype: str) -> None:
    drawn = Generator(3).normal(20_000, dtype=np.dtype(dtype)).numpy()
    assert drawn.dtype == dtype
    wide = drawn.astype(np.float64)
    assert abs(wide.mean()) < 0.03
    assert abs(wide.std() - 1) < 0.03
    assert abs((wide**3).mean()) < 0.1
    assert abs((wide**4).mean() - 3) < 0.2
    assert distance(wide, np.vectorize(lambda x: (1 + math.erf(x / math.sqrt(2))) / 2)) < 2
    pairs = wide.reshape(-1, 2)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 0.03


def test_normal_is_box_and_muller_of_the_bits() -> None:
    words = [(int(word) + 1) / 2**32 for word in meaning([5, 0, 0, 0], (40,))]
    expected = [
        math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)
        for first, second in zip(words[0::2], words[1::2], strict=True)
    ]
    np.testing.assert_allclose(Generator(5).normal(20).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_normal_has_its_mean_and_deviation() -> None:
    drawn = Generator(4).normal((50, 400), 10, 3).numpy()
    assert abs(drawn.mean() - 10) < 0.1
    assert abs(drawn.std() - 3) < 0.1
    assert set(Generator(4).normal(10, 7, 0).tolist()) == {7.0}


def distance(drawn: np.ndarray, chance_below: Callable[[np.ndarray], Any]) -> float:
    """Kolmogorov's: over 2 once in 1,500 samples that come from the distribution."""
    ordered = np.sort(drawn.reshape(-1).astype(np.float64))
    below, steps = chance_below(ordered), np.arange(ordered.size + 1) / ordered.size
    return max(np.max(steps[1:] - below), np.max(below - steps[:-1])) * math.sqrt(ordered.size)


@pytest.mark.parametrize("dtype", [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)])
def test_integers_cover_the_range_of_their_dtype(dtype: str) -> None:
    result, bounds = np.dtype(dtype), np.iinfo(dtype)
    low, high = int(bounds.min), int(bounds.max) + 1
    drawn = Generator(6).integers(low, high, 5000, dtype=result).numpy()
    assert drawn.dtype == dtype
    assert distance((drawn.astype(np.float64) - low) / (high - low), lambda x: x) < 2
    if high - low == 256:
        assert len(set(drawn.tolist())) == 256
    start = max(low, -2)
    drawn = Generator(6).integers(start, start + 5, (100, 7), dtype=result).numpy()
    counts = np.unique_counts(drawn)
    assert counts.values.tolist() == list(range(start, start + 5))
    assert counts.counts.min() > 100
    assert set(Generator(6).integers(high - 1, high, 20, dtype=result).tolist()) == {high - 1}


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_integers_are_a_fraction_of_the_range_or_a_remainder(data: st.DataObject) -> None:
    low = data.draw(st.integers(-(2**63), 2**63 - 1))
    high = data.draw(st.integers(low + 1, min(2**63, low + 2 ** data.draw(st.integers(1, 64)))))
    state = data.draw(STATES)
    node = graph.integers(random_bits(given_words(state), (3, 2)), low, high, ps.int64)
    words, count = slow_bits(state, 6), high - low
    whole = [upper << 32 | lower for upper, lower in zip(words[0::2], words[1::2], strict=True)]
    expected = [(x * count >> 64 if count <= 2**32 else x % count) + low for x in whole]
    assert value(node).tolist() == expected


def test_the_lower_word_carries_into_an_integer() -> None:
    words = given_words([[0x55555555, 0x55555555], [0x55555555, 0x55555556]])
    assert value(graph.integers(words, 0, 3, ps.int64)).tolist() == [0, 1]


@pytest.mark.parametrize("probability", [0, 0.001, 0.3, 1])
def test_bernoulli(probability: float) -> None:
    drawn = Generator(8).bernoulli(probability, (200, 200)).numpy()
    assert drawn.dtype == bool
    assert abs(drawn.mean() - probability) <= 4 * math.sqrt(probability * (1 - probability) / drawn.size)


def test_permutations() -> None:
    generator = Generator(9)
    for n in (0, 1, 2, 1000):
        result = generator.permutation(n)
        assert result.dtype == ps.int64
        assert sorted(result.tolist()) == list(range(n))
    orders = {tuple(generator.permutation(3).tolist()) for _ in range(60)}
    assert len(orders) == 6


# Generators


def draws(generator: Generator) -> dict[str, ps.Tensor]:
    return {
        "uniform": generator.uniform((3, 5)),
        "float64": generator.uniform((3, 5), dtype=ps.float64),
        "to three": generator.uniform(7, 0, 3),
        "integers": generator.integers(-5, 1000, (2, 2, 2)),
        "far": generator.integers(-(2**62), 3 * 2**61, 9),
        "bernoulli": generator.bernoulli(0.5, 33),
        "permutation": generator.permutation(20),
        "normal": generator.normal((4, 4), 1, 2),
        "normal64": generator.normal(5, dtype=ps.float64),
        "between": generator.uniform(7, -1, 3),
    }


def test_a_seed_gives_the_same_on_every_device(on: Device) -> None:
    expected = draws(Generator(2**63 + 11, "host"))
    for name, drawn in draws(Generator(2**63 + 11, on)).items():
        assert drawn.device is on
        if name.startswith("normal") or name == "between":
            np.testing.assert_allclose(drawn.numpy(), expected[name].numpy(), rtol=1e-5, atol=1e-6)
        else:
            assert np.array_equal(drawn.numpy(), expected[name].numpy()), name


def test_a_seed_gives_the_same_at_every_draw(on: Device) -> None:
    """Also in the first call, which NumPy would compute if it were not random."""
    first, *others = (Generator(5, on).normal((256, 160)).numpy() for _ in range(3))
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_draws_follow_each_other_without_overlap() -> None:
    generator = Generator(10)
    first, second, third = generator.uniform(6), generator.uniform((2, 2)), generator.uniform(4)
    assert generator.state() == {"seed": 10, "counter": 4}
    whole = Generator(10).uniform(16).tolist()
    assert first.tolist() == whole[:6]
    assert second.numpy().reshape(-1).tolist() == whole[8:12]
    assert third.tolist() == whole[12:]
    assert len(set(whole)) == 16
    assert Generator(11).uniform(16).tolist() != whole
    assert Generator(10 + 2**32).uniform(16).tolist() != whole
    assert generator.uniform((0, 3)).shape == (0, 3)
    assert generator.state()["counter"] == 4


def test_drawing_is_lazy_and_equal_in_structure() -> None:
    generator = Generator(12)
    for first, second in zip(draws(generator).values(), draws(generator).values(), strict=True):
        assert first._node.value is None
        outlines = []
        for drawn in (first, second):
            order = topological([drawn._node])
            places = {node: place for place, node in enumerate(order)}
            outlines.append(
                [
                    (node.primitive.name, str(node.attributes), [places[parent] for parent in node.inputs])
                    for node in order
                ]
            )
        assert outlines[0] == outlines[1]
        assert first.tolist() != second.tolist()


def test_the_state_goes_through_a_checkpoint() -> None:
    generator = Generator(13)
    generator.normal(100)
    saved = json.dumps(generator.state())
    expected = generator.integers(0, 10**9, 10).tolist()
    other = Generator(0)
    other.set_state(json.loads(saved))
    assert other.seed == 13
    assert other.integers(0, 10**9, 10).tolist() == expected
    other.set_state({"seed": 13, "counter": 2**64 - 1})
    wrapped = other.uniform(8).tolist()
    assert wrapped[4:] == Generator(13).uniform(4).tolist()
    assert other.state()["counter"] == 1


def test_the_functions_draw_from_one_generator() -> None:
    random.manual_seed(14)
    generator = Generator(14)
    for mine, theirs in (
        (random.uniform(3), generator.uniform(3)),
        (random.normal(3), generator.normal(3)),
        (random.integers(0, 9, 3), generator.integers(0, 9, 3)),
        (random.bernoulli(0.5, 9), generator.bernoulli(0.5, 9)),
        (random.permutation(9), generator.permutation(9)),
        (random.rand(2, 3), generator.uniform((2, 3))),
        (random.randn(2, 3), generator.normal((2, 3))),
        (random.randint(-3, 3, (2, 3)), generator.integers(-3, 3, (2, 3))),
    ):
        assert mine.tolist() == theirs.tolist()
    assert random.state() == generator.state()
    random.set_state({"seed": 14, "counter": 0})
    assert random.uniform(3).tolist() == Generator(14).uniform(3).tolist()


def test_no_gradient_reaches_the_bits_and_one_passes_a_mask() -> None:
    x = ps.ones(50).requires_grad_()
    mask = Generator(15).bernoulli(0.5, 50)
    ps.where(mask, x * 2, 0.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == (mask.numpy() * 2.0).tolist()


def test_errors_name_what_was_given() -> None:
    g = Generator(0)
    for error, message, call in (
        (ValueError, r"no negative lengths, and \(2, -1\)", lambda: g.uniform((2, -1))),
        (TypeError, r"a shape is an integer .* 2\.5", lambda: g.uniform(2.5)),
        (TypeError, "a shape is an integer .* 'ab'", lambda: g.normal("ab")),
        (ValueError, "low < high in float32, .* 1 and 1", lambda: g.uniform(2, 1, 1)),
        (ValueError, "low < high in float32", lambda: g.uniform(2, 1, 1 + 1e-12)),
        (ValueError, "low < high", lambda: g.uniform(2, 0, math.nan)),
        (ValueError, "finite distance", lambda: g.uniform(2, -3e38, 3e38)),
        (ValueError, "finite in float32", lambda: g.normal(2, 1e300)),
        (ValueError, "std >= 0", lambda: g.normal(2, 0, -1)),
        (TypeError, "uniform does not make int32", lambda: g.uniform(2, dtype=ps.int32)),
        (TypeError, "normal does not make complex64", lambda: g.normal(2, dtype=ps.complex64)),
        (TypeError, "integers does not make float32", lambda: g.integers(0, 2, 2, dtype=ps.float32)),
        (TypeError, "no dtype of Penstock", lambda: g.uniform(2, dtype="U3")),
        (ValueError, "low < high, and 3 and 3", lambda: g.integers(3, 3, 2)),
        (ValueError, "high is from -128 to 128, and 200", lambda: g.integers(0, 200, 2, dtype=ps.int8)),
        (ValueError, "low is from 0 to 255, and -1", lambda: g.integers(-1, 2, 2, dtype=ps.uint8)),
        (TypeError, r"low is an integer, and 0\.5", lambda: g.integers(0.5, 2, 2)),
        (ValueError, r"between 0 and 1, and 1\.5", lambda: g.bernoulli(1.5, 2)),
        (ValueError, "between 0 and 1, and nan", lambda: g.bernoulli(math.nan, 2)),
        (ValueError, "length of a permutation", lambda: g.permutation(-1)),
        (ValueError, "seed is from 0 to", lambda: Generator(-1)),
        (ValueError, "seed is from 0 to", lambda: random.manual_seed(2**64)),
        (TypeError, "seed is an integer, and '1'", lambda: Generator("1")),
        (ValueError, "a seed and a counter, and", lambda: g.set_state({"seed": 1})),
        (ValueError, "counter is from 0", lambda: g.set_state({"seed": 1, "counter": -1})),
        (ValueError, "there is no device 'abacus'", lambda: Generator(0, "abacus")),
    ):
        with pytest.raises(error, match=message):
            call()
    assert g.state() == {"seed": 0, "counter": 0}
