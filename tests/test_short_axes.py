"""What a CPU's vectors read along short axes: strides, phases, pooling and windows, against NumPy."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import NATIVE, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graph import at

import penstock as ps
from penstock import Device
from penstock.config import Settings
from penstock.drivers.opencl import OpenCLDriver, opencl_capabilities
from penstock.fusion.groups import partition
from penstock.fusion.splitting import split
from penstock.graph import elementwise, reducing, shaping
from penstock.graph.convolution_reference import Geometry, convolution_reference
from penstock.graph.node import Kind, Node, topological
from penstock.kernels.cache import whole_text
from penstock.kernels.lower import fusible, write
from penstock.nn import functional

CPU = opencl_capabilities(NATIVE)
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device.over(
        OpenCLDriver(NATIVE, "opencl-vectors"), Settings(force_kernels=True, compile_ahead=False)
    )
    yield device
    device.close()


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def text_of(wanted: Node) -> str:
    """The kernel of a value that is a single group."""
    (group,) = partition([wanted], lambda node: fusible(node, CPU))
    lowering = write(group, CPU, "kernel")
    assert lowering is not None
    return whole_text([launch.source for launch in lowering.launches], "opencl").split("KERNEL kernel")[-1]


def test_lanes_are_items_of_several_axes() -> None:
    x = at(values(6, 8, 8))
    strided = shaping.slice_(x, ((0, 6, 1), (0, 4, 2), (0, 4, 2)))
    assert "float8" in text_of(elementwise.exp(strided))
    phases = shaping.concat([shaping.reshape(at(values(6, 16)), (6, 16, 1)) for _ in range(2)], 2)
    assert "float8" in text_of(elementwise.exp(shaping.reshape(phases, (6, 32))))


def test_a_concatenation_of_reshaped_values_has_vectors() -> None:
    parts = [at(values(2, 4, 5, 32)) for _ in range(3)]
    rows = [shaping.reshape(shaping.permute(part, (0, 2, 1, 3)), (2, 5, 128)) for part in parts]
    assert "float8" in text_of(elementwise.negative(shaping.concat(rows, 2)))


@settings(max_examples=examples(20, 8), deadline=None)
@given(data=st.data())
def test_any_short_axes(device: Device, data: st.DataObject) -> None:
    """Strides, orders of axes and repetitions, which no axis is long enough for by itself."""
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=2, max_size=4))
    array = values(*lengths)
    order = data.draw(st.permutations(range(array.ndim)))
    steps = tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in lengths)
    again = data.draw(st.sampled_from([1, 2, 4]))
    x = ps.asarray(array, device=device)
    moved = ps.repeat(ps.permute_dims(x, tuple(order))[steps] * 2, again, axis=-1)
    expected = np.repeat(array.transpose(order)[steps] * 2, again, axis=-1)
    np.testing.assert_array_equal((moved + 1).numpy(), expected + 1)
    rows = (moved.shape[0], moved.size // moved.shape[0])
    sums = ps.sum(ps.reshape(moved, rows), axis=1).numpy()
    np.testing.assert_allclose(sums, expected.reshape(rows).sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_interleaved_values(device: Device, parts: int) -> None:
    arrays = [values(5, 16) for _ in range(parts)]
    expected = np.stack(arrays, -1).reshape(5, 16 * parts)
    whole = ps.reshape(ps.stack([ps.asarray(x, device=device) for x in arrays], axis=-1), expected.shape)
    np.testing.assert_array_equal((whole * 3).numpy(), expected * 3)
    np.testing.assert_allclose(ps.sum(whole, axis=1).numpy(), expected.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_, np.float16])
def test_concatenations_of_many_parts(device: Device, axis: int, dtype: type) -> None:
    """Rows of inputs, of one of them twice, of computed values and of nothing."""
    arrays = [(values(*np.insert([3, 17], axis, count)) * 9).astype(dtype) for count in (2, 1, 4, 0, 3, 5)]
    x = [ps.asarray(array, device=device) for array in arrays]
    joined = ps.concat([x[0], ~x[1] if dtype is np.bool_ else x[1] * 2, *x[2:], x[2], x[0]], axis=axis)
    other = ~arrays[1] if dtype is np.bool_ else (arrays[1] * 2).astype(dtype)
    expected = np.concatenate([arrays[0], other, *arrays[2:], arrays[2], arrays[0]], axis)
    np.testing.assert_array_equal(joined.numpy(), expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint64])
def test_single_items_of_other_sizes(device: Device, dtype: type) -> None:
    """The condition of a choice between vectors has items as large as theirs."""
    arrays = [RNG.integers(0, 200, (40, 1)).astype(dtype) for _ in range(3)]
    joined = ps.jit(lambda *parts: ps.maximum(ps.concat([part + 1 for part in parts], axis=1), parts[0]))
    result = joined(*(ps.asarray(array, device=device) for array in arrays)).numpy()
    right = np.maximum(np.concatenate([array + dtype(1) for array in arrays], 1), arrays[0])
    assert np.array_equal(result, right)


def test_a_row_of_a_concatenation_reads_one_part() -> None:
    parts = [at(values(2, 64)) for _ in range(6)]
    text = text_of(elementwise.negative(shaping.concat(parts, 0)))
    assert len(re.findall(r"\(GLOBAL loose_float\d+ \*\)\(part", text)) == 1


@pytest.mark.parametrize("name", ["max", "min", "sum"])
def test_reductions_of_few_items_are_elementwise(name: str) -> None:
    reduce = {"max": reducing.max_, "min": reducing.min_, "sum": reducing.sum_}[name]
    (many,) = split([reduce(at(values(2048, 2, 2, 2)), (2, 3))], CPU)
    assert not any(node.primitive.kind is Kind.REDUCTION for node in topological([many]))
    (few,) = split([reduce(at(values(64, 2)), (1,))], CPU)
    assert few.primitive.kind is Kind.REDUCTION


def test_they_have_the_values_of_numpy(device: Device) -> None:
    array = values(4096, 2, 2)
    array[5, 0, 0], array[6, 1, 1] = np.nan, np.inf
    x = ps.asarray(array, device=device)
    for ours, theirs in ((ps.max, np.max), (ps.min, np.min), (ps.sum, np.sum)):
        np.testing.assert_allclose(ours(x, axis=(1, 2)).numpy(), theirs(array, axis=(1, 2)), rtol=1e-5)


def test_pooling_and_its_gradient_under_jit_and_outside(device: Device) -> None:
    array = values(64, 8, 8, 8)
    x = ps.asarray(array, device=device)
    pooled = functional.max_pool2d(functional.relu(x), 2)
    blocks = np.maximum(array, 0).reshape(64, 8, 4, 2, 4, 2)
    np.testing.assert_array_equal(pooled.numpy(), blocks.max((3, 5)))

    def loss(x: ps.Tensor) -> ps.Tensor:
        return ps.sum(functional.max_pool2d(x, 2) ** 2)

    gradient = ps.grad(loss)(x).numpy()
    windows = array.reshape(64, 8, 4, 2, 4, 2)
    chosen = windows == windows.max((3, 5), keepdims=True)
    np.testing.assert_allclose(gradient, (2 * windows * chosen).reshape(array.shape), rtol=1e-6)
    assert ps.jit(ps.grad(loss))(x).numpy().tobytes() == gradient.tobytes()


@pytest.mark.parametrize(
    ("channels", "outputs", "size", "stride"),
    [(3, 5, 8, 1), (4, 32, 16, 1), (2, 7, 24, 1), (130, 3, 8, 1), (4, 8, 32, 2), (3, 2, 12, 1)],
)
def test_windows_are_read_in_place(
    device: Device, channels: int, outputs: int, size: int, stride: int
) -> None:
    x, weight = values(2, channels, size, size), values(outputs, channels, 3, 3)
    geometry = Geometry((stride, stride), ((1, 1), (1, 1)), (1, 1), 1)
    expected = convolution_reference(x.astype(np.float64), weight.astype(np.float64), geometry)
    given_x, given_weight = (ps.asarray(array, device=device) for array in (x, weight))
    ours = functional.conv2d(given_x, given_weight, stride=stride, padding=1)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-4, atol=1e-3)

    def loss(x: ps.Tensor) -> ps.Tensor:
        return ps.sum(functional.conv2d(x, given_weight, stride=stride, padding=1) * seen)

    seen = ps.asarray(values(*expected.shape), device=device)
    gradient = ps.grad(loss)(given_x).numpy()
    step = values(*x.shape) / 64  # the loss is linear in the images
    change = (
        convolution_reference(step.astype(np.float64), weight.astype(np.float64), geometry)
    ) * seen.numpy()
    np.testing.assert_allclose(np.sum(gradient.astype(np.float64) * step), change.sum(), rtol=1e-3, atol=1e-2)
