"""Kernels of single nodes against their NumPy references: those for CPUs, and those for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, WEBGPU_KINDS, examples, for_a_gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_graph import at

from penstock import Device
from penstock.drivers.driver import Capabilities
from penstock.drivers.opencl import OpenCLDriver
from penstock.graph import contraction, reducing
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Node
from penstock.graph.reference import computed
from penstock.kernels.cache import whole_text
from penstock.kernels.source import ALIGNMENT
from penstock.kernels.templates.choose import template_launches

POISON = 0xAB
NAN, INF = float("nan"), float("inf")
VARIANTS = ("cpu", "gpu")
Make = Callable[[Node, int], Node]
sums, products, largest, smallest = SCANS_AND_EXTREMES = (
    reducing.cumulative_sum,
    reducing.cumulative_prod,
    reducing.argmax,
    reducing.argmin,
)
few = settings(
    max_examples=examples(8, quick=4),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Bench:
    """A device under two sets of capabilities; each node's kernels are compiled as a program."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.compiled: dict[str, Any] = {}

    def capabilities(self, variant: str) -> Capabilities:
        return replace(self.device.capabilities, vector_width={"cpu": 8, "gpu": 1}[variant])

    def run(self, node: Node, variant: str) -> np.ndarray:
        language = self.device.capabilities.language
        if variant == "cpu" and language != "opencl":
            pytest.skip("only OpenCL has vectors of eight numbers")
        if node.inputs[0].dtype == np.float64 and not self.device.capabilities.float64:
            pytest.skip("the device has no float64")
        lone = template_launches(node, self.capabilities(variant))
        assert lone is not None
        sources = {launch.source.name: launch.source for launch in lone.launches}
        assert all(sources[launch.source.name] == launch.source for launch in lone.launches)
        # A text in WGSL is one kernel.
        texts = [[source] for source in sources.values()] if language == "wgsl" else [list(sources.values())]
        kernels = {}
        for part in texts:
            text = whole_text(part, language)
            if text not in self.compiled:
                signatures = {source.name: source.signature for source in part}
                with for_a_gpu(variant == "gpu"):
                    self.compiled[text] = self.device.compile(text, signatures)
            kernels |= self.compiled[text]
        values = [guarded(np.full(node.nbytes, POISON, np.uint8))]
        values += [guarded(np.ascontiguousarray(parent.value)) for parent in node.inputs]
        values += [guarded(np.full(nbytes, POISON, np.uint8)) for nbytes in lone.scratch]
        buffers = [self.device.upload(value) for value in values]
        for launch in lone.launches:
            source = launch.source
            taken = [buffers[place] for place in launch.buffers]
            assert len(taken) == len(source.buffers)
            args = (*taken, *(1 for _ in taken), *launch.scalars)
            self.device.stream.launch(kernels[source.name], source.grid, source.group, args)
        for buffer, value in zip(buffers, values, strict=True):
            after = self.device.download(buffer).wait()
            assert (after[:ALIGNMENT] == POISON).all()
            assert (after[-ALIGNMENT:] == POISON).all()
            if value is values[0]:
                result = after[ALIGNMENT:-ALIGNMENT].view(node.dtype).reshape(node.shape)
        return result


def guarded(array: np.ndarray) -> np.ndarray:
    guard = np.full(ALIGNMENT, POISON, np.uint8)
    return np.concatenate([guard, array.reshape(-1).view(np.uint8), guard])


@pytest.fixture(scope="module", params=["opencl", *CUDA_KINDS, *WEBGPU_KINDS])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    opencl = {"opencl": lambda: OpenCLDriver(NATIVE, "opencl-lone")}
    device = Device.over({**DRIVERS, **opencl}[request.param]())
    yield Bench(device)
    device.close()


def meaning(node: Node) -> np.ndarray:
    with np.errstate(all="ignore"):
        return node.primitive.reference(*(parent.value for parent in node.inputs), **node.attributes)


def items(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Numbers with many ties; integers reach the ends of their range, others have NaN, infinities and -0."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if "float" in dtype:
        numbers = rng.integers(-9, 9, shape).astype(dtype)
        special = rng.random(shape) < 0.1
        return np.where(special, rng.choice(np.array([NAN, -NAN, INF, -INF, -0.0], dtype), shape), numbers)
    ends = np.iinfo(dtype)
    small = rng.integers(0, 9, shape, dtype)
    return np.where(rng.random(shape) < 0.3, rng.integers(ends.min, ends.max, shape, dtype), small)


def check(bench: Bench, variant: str, node: Node) -> None:
    np.testing.assert_array_equal(bench.run(node, variant), meaning(node))


SHAPES = [((7, 200), 1), ((1, 5000), 1), ((70, 2, 37), 0), ((3, 9, 20), 1), ((1,), 0)]


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_scans_from_the_end(bench: Bench, variant: str, shape: tuple[int, ...], axis: int) -> None:
    whole = at(items("int32", shape))
    check(bench, variant, reducing.cumulative_sum(whole, axis, reverse=True))
    check(bench, variant, reducing.cumulative_prod(whole, axis, reverse=True))
    check(bench, variant, reducing.cumulative_sum(at(items("float32", shape)), axis, reverse=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow("True")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_linear_recurrences(
    bench: Bench, variant: str, shape: tuple[int, ...], axis: int, reverse: bool
) -> None:
    rng = np.random.default_rng(1)
    # Small integers, so that every order of operations gives the same bits.
    x, factor = rng.integers(-9, 9, shape), rng.integers(-1, 2, shape)
    nodes = (at(array.astype(np.float32)) for array in (x, factor))
    check(bench, variant, reducing.linear_recurrence(*nodes, axis, reverse))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("largest_factor", [0.5, 0.999, 1.0])
def test_long_linear_recurrences_are_accurate(
    bench: Bench, variant: str, reverse: bool, largest_factor: float
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 9001)).astype(np.float32)
    factor = rng.uniform(-largest_factor, largest_factor, x.shape).astype(np.float32)
    factor[1] = np.float32(largest_factor)
    node = reducing.linear_recurrence(at(x), at(factor), 1, reverse)
    exact = meaning(reducing.linear_recurrence(at(x.astype(float)), at(factor.astype(float)), 1, reverse))
    got = bench.run(node, variant)
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-5 * np.abs(exact).max())
    np.testing.assert_array_equal(bench.run(node, variant), got)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reverse", [False, True])
def test_linear_recurrences_of_what_overflows(bench: Bench, variant: str, reverse: bool) -> None:
    """Products of factors that are infinite or vanish have no part in results that are neither."""
    x, factor = np.zeros((6, 9001), np.float32), np.full((6, 9001), 2, np.float32)
    x[1, 4500], factor[1, 4600:4700] = 1, 0  # forgotten before it is infinite, or after
    x[2, ::100], factor[2, ::50] = 3, 0
    x[3, 20], factor[3] = INF, 0.5  # stays infinite for ever
    x[4], factor[4, 0], factor[4, -1] = 1, INF, NAN  # one of them multiplies nothing
    factor[4, 1:-1] = 1
    x[5, 0], x[5, -1] = 1, -1  # grows until it is infinite
    check(bench, variant, reducing.linear_recurrence(at(x), at(factor), 1, reverse))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("make", "dtype", "shape", "axis"),
    [
        (sums, "float32", (7, 200), 1),
        (sums, "float32", (1, 5000), 1),
        (products, "float32", (70, 2, 37), 0),
        (sums, "float32", (1,), 0),
        (sums, "int32", (5, 1000), 1),
        (products, "int32", (6, 70), 1),
        (products, "int64", (6, 70), 1),
        (sums, "int64", (3, 9, 20), 1),
        (sums, "bool", (2, 130), 1),
        (products, "bool", (5, 3), 0),
        (products, "uint16", (9, 65), 0),
        (products, "float64", (3, 100), 1),
        (reducing.cumulative_max, "float32", (1, 5000), 1),
        (reducing.cumulative_max, "int32", (5, 1000), 1),
        (reducing.cumulative_max, "int64", (3, 9, 20), 1),
    ],
)
def test_scans(bench: Bench, variant: str, make: Make, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    array = items(dtype, shape)
    if array.dtype.kind == "f":  # a few special items would make everything after them special
        array = np.random.default_rng(1).uniform(0.9, 1.1, shape).astype(dtype)
        array.flat[0] = -0.0
    node = make(at(array), axis)
    got, wanted = bench.run(node, variant), meaning(node)
    if array.dtype.kind == "f" and variant == "gpu":  # added up in another order
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    else:
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scans_keep_what_is_special(bench: Bench, variant: str) -> None:
    rows = np.zeros((8, 300), np.float32)
    rows[0] = -0.0
    rows[1, 70] = NAN
    rows[2, 80] = INF
    rows[3, 20], rows[3, 260] = INF, -INF
    rows[4] = 1
    with np.errstate(invalid="ignore"):
        for make in (sums, products, reducing.cumulative_max):
            node = make(at(rows), 1)
            got, wanted = bench.run(node, variant), meaning(node)
            np.testing.assert_array_equal(got, wanted)
            np.testing.assert_array_equal(np.signbit(got[0]), np.signbit(wanted[0]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("make", "dtype", "shape", "axis"),
    [
        (largest, "float32", (40, 3, 300), 0),
        (smallest, "float32", (6, 10), 1),
        (largest, "float32", (1,), 0),
        (smallest, "float64", (3, 90), 1),
        (largest, "int32", (3, 77), 1),
        (smallest, "int64", (3, 200), 1),
        (largest, "int8", (5, 66, 3), 1),
        (largest, "bool", (4, 130), 1),
        (smallest, "bool", (1, 5, 9), 1),
        (largest, "float32", (1, 5003), 1),  # few rows, which a GPU divides
        (smallest, "int8", (2, 2500), 1),
        (largest, "bfloat16", (2, 5003), 1),
        (smallest, "float16", (4, 300), 1),
        (smallest, "bfloat16", (40, 3, 9), 0),
    ],
)
def test_extremes(
    bench: Bench, variant: str, make: Make, dtype: str, shape: tuple[int, ...], axis: int
) -> None:
    check(bench, variant, make(at(items(dtype, shape)), axis))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_of_equal_ones_and_the_first_nan_win(bench: Bench, variant: str) -> None:
    rng = np.random.default_rng(2)
    rows = np.zeros((60, 1100), np.float32)
    for row in rows:
        row[rng.choice(1100, 3, replace=False)] = rng.choice([NAN, -NAN, 1, -1, -0.0])
    rows[0] = NAN
    rows[1] = -INF
    rows[2, 1099] = NAN
    few = np.zeros((1, 4100), np.float32)
    few[0, [1500, 3000, 4099]] = 1, 1, NAN
    for array, axis in ((rows, 1), (np.ascontiguousarray(rows.T), 0), (few, 1), (few[:, :4000], 1)):
        for make in (largest, smallest):
            check(bench, variant, make(at(np.ascontiguousarray(array)), axis))


# What a GPU sorts in registers takes other compilers than CUDA's many seconds.
LONG_ROWS: list[Any] = [
    ("float32", (4, 4096), 1, False),
    ("float32", (5, 300), 1, True),
    ("int64", (2, 1500), 1, False),
] * bool(CUDA_KINDS)


@pytest.mark.slow("webgpu", "(1, 30)", "(3, 20)")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "shape", "axis", "descending"),
    [
        ("float32", (9, 10), 1, False),
        ("float32", (9, 10), 1, True),
        ("float32", (5, 40), 1, False),
        ("float32", (3, 20, 2), 1, True),
        ("float32", (1, 9000), 1, False),
        ("float64", (3, 20), 1, False),
        ("int32", (2, 5000, 2), 1, True),
        ("int64", (1, 30), 1, False),
        ("int8", (2, 4500), 1, True),
        ("bool", (3, 20), 1, True),
        ("bool", (1,), 0, False),
        *LONG_ROWS,
    ],
)
def test_sorting(
    bench: Bench, variant: str, dtype: str, shape: tuple[int, ...], axis: int, descending: bool
) -> None:
    for order in (reducing.argsort, reducing.sort):
        check(bench, variant, order(at(items(dtype, shape)), axis, descending))


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "index_dtype", "index_shape", "rest", "length"),
    [
        ("float32", "int64", (300,), (130,), 40),
        ("float32", "int64", (5000,), (), 300),
        ("float32", "int32", (3, 50), (2, 5), 700),
        ("float32", "int64", (1,), (1,), 1),
        ("bfloat16", "int32", (700,), (24,), 40),
        ("bfloat16", "int64", (90,), (7,), 200),
        ("float16", "int64", (2, 100), (6,), 11),
        ("float16", "int64", (300,), (64,), 300),
        ("float64", "uint8", (400,), (3,), 100),
        ("int16", "int64", (4000,), (8,), 2),  # more in one row than a group of a GPU can note
        ("int64", "int64", (100,), (64,), 256),
        ("bool", "int32", (50,), (9,), 30),
    ],
)
def test_scattering(
    bench: Bench,
    variant: str,
    dtype: str,
    index_dtype: str,
    index_shape: tuple[int, ...],
    rest: tuple[int, ...],
    length: int,
) -> None:
    rng = np.random.default_rng(3)
    index = rng.integers(0, length, index_shape, index_dtype)
    index.flat[: index.size // 3] = rng.integers(0, length)  # one row occurs more often than the others
    shape = (*index_shape, *rest)
    if dtype.endswith(("float16", "float32", "float64")):
        values = rng.integers(-9, 9, shape).astype(dtype)  # sums of whole numbers are the same in any order
    else:
        values = items(dtype, shape)
    node = contraction.scatter_add(at(values), at(index), length)
    if variant == "cpu" and node.dtype in HALF_PRECISION and bench.device.capabilities.language != "wgsl":
        assert template_launches(node, bench.capabilities(variant)) is None
        return
    np.testing.assert_array_equal(bench.run(node, variant), computed(node, [values, index]))


def test_sums_of_a_gpu_are_the_same_every_time(bench: Bench) -> None:
    rng = np.random.default_rng(5)
    index = rng.integers(0, 50, (3000,))
    index[: index.size // 3] = 7
    node = contraction.scatter_add(at(rng.normal(size=(3000, 33)).astype(np.float32)), at(index), 50)
    first = bench.run(node, "gpu")
    np.testing.assert_allclose(first, meaning(node), rtol=1e-4, atol=1e-4)
    for _ in range(3):
        np.testing.assert_array_equal(bench.run(node, "gpu"), first)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_index_out_of_range_writes_nothing(bench: Bench, variant: str) -> None:
    index = np.array([3, -1, 5, 1 << 40, 0, -(1 << 33), 3, 4])
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    inside = (index >= 0) & (index < 5)
    got = bench.run(contraction.scatter_add(at(values), at(index), 5), variant)
    wanted = contraction.scatter_add(at(values[inside]), at(index[inside]), 5)
    np.testing.assert_array_equal(got, meaning(wanted))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "index_dtype", "count", "rest", "few"),
    [
        ("float32", "int32", 20, (64,), True),
        ("float32", "int64", 1, (3, 5), True),
        ("bfloat16", "int32", 30, (7,), True),
        ("float16", "int64", 9, (128,), True),
        ("bfloat16", "int32", 15, (4, 6), False),
        ("bool", "int32", 12, (), True),
        ("int64", "int64", 5, (3,), False),
    ],
)
def test_rows_that_are_replaced(
    bench: Bench,
    variant: str,
    dtype: str,
    index_dtype: str,
    count: int,
    rest: tuple[int, ...],
    few: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not few:  # so that they are put by a kernel of their own
        monkeypatch.setattr("penstock.kernels.templates.update._FEW_ROWS", 0)
    rng = np.random.default_rng(4)
    numbers = (rng.integers(0, 9, (rows, *rest)).astype(dtype) for rows in (40, count))
    index = rng.permutation(40)[:count].astype(index_dtype)
    index[count // 2] = [-1, 40][count % 2]  # which is out of range
    node = contraction.put_rows(*(at(array) for array in numbers), at(index))
    check(bench, variant, node)


@given(data=st.data())
@few
def test_sorting_many_rows_on_a_cpu(bench: Bench, data: st.DataObject) -> None:
    # Few shapes, because each has kernels of its own.
    rows, length = data.draw(st.sampled_from([(8, 64), (21, 140)]))
    dtype = data.draw(st.sampled_from(["float32", "int32", "uint32"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    array = rng.integers(0, 1 << 32, (rows, length), np.uint32).view(dtype)
    if dtype == "float32":
        array = np.where(np.isnan(array), np.float32(1), array)
        if data.draw(st.booleans()):  # in some rows
            array[rng.integers(0, rows), :3] = -0.0, 0.0, NAN
    node = reducing.sort(at(array), 1, data.draw(st.booleans()))
    result = bench.run(node, "cpu")
    np.testing.assert_array_equal(result.view(np.uint32), meaning(node).view(np.uint32))


@pytest.mark.parametrize("variant", VARIANTS)
@given(shape=st.lists(st.integers(1, 70), min_size=1, max_size=3), data=st.data())
@few
def test_any_shape(bench: Bench, variant: str, shape: list[int], data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    array = items("int32", tuple(shape), seed=data.draw(st.integers(0, 99)))
    kind = data.draw(st.sampled_from(["along", "sort", "scatter"]))
    if kind == "sort":
        order = data.draw(st.sampled_from([reducing.argsort, reducing.sort]))
        check(bench, variant, order(at(array), axis, data.draw(st.booleans())))
    elif kind == "scatter":
        length = data.draw(st.integers(1, 70))
        index = np.random.default_rng(4).integers(0, length, shape[: data.draw(st.integers(1, len(shape)))])
        check(bench, variant, contraction.scatter_add(at(array), at(index), length))
    else:
        make = data.draw(st.sampled_from(SCANS_AND_EXTREMES))
        check(bench, variant, make(at(array), axis))


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_has_no_kernel(bench: Bench, variant: str) -> None:
    having = bench.capabilities(variant)
    x = at(np.ones((3, 3), np.float32))
    assert template_launches(contraction.matmul(x, x), having) is None
    assert template_launches(reducing.cumulative_sum(at(np.ones((0, 3), np.float32)), 0), having) is None
    wide = reducing.cumulative_sum(at(np.ones(3)), 0)
    assert template_launches(wide, replace(having, float64=False)) is None
    assert having.language != "opencl" or template_launches(wide, having) is not None
    huge = at(np.broadcast_to(np.float32(0), (1 << 30,)))
    assert template_launches(reducing.argmax(huge, 0), having) is None


def test_a_gpu_with_small_groups_sorts_what_fits_them(bench: Bench) -> None:
    small = replace(bench.capabilities("gpu"), max_group_size=64)
    for length, fits in ((1024, True), (1025, False)):
        node = reducing.argsort(at(np.ones(length, np.float32)), 0, False)
        assert (template_launches(node, small) is not None) == fits
