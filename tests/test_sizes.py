"""Kernels whose sizes are arguments: few are compiled for many shapes, and they give the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, WEBGPU_KINDS, examples, opencl_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from test_random_graphs import check
from test_random_graphs import make as make_device

import penstock as ps
from penstock import Device, nn
from penstock.drivers.driver import Driver
from penstock.drivers.opencl import OpenCLDriver
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.dialects.dialect import DialectBody
from penstock.kernels.ir.expressions import Const, Type
from penstock.kernels.rewriting import Integers
from penstock.kernels.sizes import MOST_WRITTEN_OUT, Sizes
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource
from penstock.kernels.templates.launches import Launch
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it

# The IR


def source(build: Callable[[KernelBuilder], None], name: str, language: str = "opencl") -> KernelSource:
    capabilities = replace(DRIVERS["host"]().capabilities, language=language, vector_width=1)
    k = KernelBuilder(name, capabilities, ["float32"], [], ["float32"])
    build(k)
    return k.source((1,), (1,))


def launched(*builds: Callable[[KernelBuilder], None], language: str = "opencl") -> list[Launch]:
    """A sequence of kernels, the first of which have their sizes as constants."""
    sizes = Sizes()
    return [
        sizes.launch(Launch(source(build, f"add_{number}", language), (0,)), number >= MOST_WRITTEN_OUT)
        for number, build in enumerate(builds)
    ]


def test_what_differs_becomes_an_argument_and_the_rest_stays() -> None:
    def build(n: int, k: KernelBuilder) -> None:
        with k.loop("i", 0, n, 8) as i:
            k.store(k.outputs[0], i * (3 * n) + n, k.scalars[0])

    result = launched(*(partial(build, n) for n in (10, 20, 30, 40)))
    assert [launch.scalars for launch in result] == [(), (), (30, 90), (40, 120)]
    assert result[2].source.text == result[3].source.text
    assert result[2].source.name == result[3].source.name
    assert "int out0_place, int size0, int size1, float c0" in result[2].source.text
    assert "i < size0; i += 8) {" in result[2].source.text
    assert "out0[i * size1 + size0] = c0;" in result[2].source.text
    assert result[2].source.signature == ("float32*", "int32", "int32", "int32", "float32")
    assert [launch.source.name for launch in result[:2]] == ["add_0", "add_1"]


def test_integers_that_were_equal_by_chance_are_told_apart_later() -> None:
    def build(a: int, b: int, k: KernelBuilder) -> None:
        k.let("x", a)
        k.let("y", b)

    result = launched(*(partial(build, a, b) for a, b in ((1, 1), (2, 2), (3, 3), (4, 5))))
    assert result[2].scalars == (3,)
    assert result[3].scalars == (4, 5)
    assert result[2].source.name != result[3].source.name


def test_the_same_kernel_for_another_shape_is_the_same_kernel() -> None:
    def build(k: KernelBuilder) -> None:
        k.store(k.outputs[0], k.group(), k.scalars[0])

    first, second = launched(build, build)
    assert first.source == second.source


@pytest.mark.parametrize(
    ("language", "build"),
    [
        ("opencl", lambda n, k: k.registers("sums", "float32", n)),
        ("opencl", lambda n, k: k.shared("panel", "float32", n)),
        ("opencl", lambda n, k: k.let("x", Const(float(n), Type("float32")))),
        ("opencl", lambda n, k: k.let(f"x{n}", 0)),
        ("opencl", lambda n, k: k.let("x", Const(99999999999 + n, Type("int64")))),
        ("opencl", lambda n, k: k.let("x", k.load_vector(k.outputs[0], 0, 2 * n))),
        ("wgsl", lambda n, k: k.block_reduce("x", "sum", k.variable("y", 0), 64, 1 << n)),
    ],
)
def test_what_cannot_be_an_argument_stays(language: str, build: Callable[[int, KernelBuilder], None]) -> None:
    result = launched(*(partial(build, n) for n in (2, 3, 4, 5)), language=language)
    assert all(not launch.scalars for launch in result)
    assert [launch.source.name for launch in result] == ["add_0", "add_1", "add_2", "add_3"]


def test_loops_that_are_laid_out_differ_by_how_often() -> None:
    def build(n: int, k: KernelBuilder) -> None:
        with k.loop("i", 0, n, unrolled=n) as i:
            k.store(k.outputs[0], i, k.scalars[0])

    assert not any(launch.scalars for launch in launched(*(partial(build, n) for n in (2, 3, 4, 5))))


def test_constants_keep_their_types() -> None:
    def build(n: int, k: KernelBuilder) -> None:
        for dtype in ("uint32", "int64", "uint64"):
            k.let(f"x_{dtype}", Const(n, Type(dtype)))

    text = launched(*(partial(build, n) for n in (4, 5, 6)))[2].source.text
    assert "x_uint32 = (uint)size0;" in text
    assert "x_int64 = (long)size0;" in text
    assert "x_uint64 = (ulong)size0;" in text


def test_more_parameters_than_a_device_takes_stay_constants() -> None:
    def build(n: int, k: KernelBuilder) -> None:
        for number in range(1, 300):
            k.let(f"x{number}", n * number)

    assert not launched(*(partial(build, n) for n in (4, 5, 6)))[2].scalars


# Devices


def all_as_arguments(
    sizes: Sizes, source: KernelSource, varied: bool
) -> tuple[KernelSource, tuple[int, ...]]:
    """Stands in for `Sizes._varied`: all integers become arguments, whether they differ or not."""
    if not isinstance(source.body, DialectBody):
        return source, ()
    integers = Integers(source.body.kernel, source.body.dialect.fixed_nodes)
    values = list(dict.fromkeys(integers.values))
    if not values or len(source.signature) * 8 + len(values) * 4 > MOST_PARAMETER_BYTES:
        return source, ()
    argument = [values.index(value) for value in integers.values]
    body = replace(source.body, kernel=integers.as_arguments(argument, len(values)))
    scalars = ("int32",) * len(values) + source.scalars
    return replace(source, body=body, scalars=scalars, sizes=len(values)), tuple(values)


make = make_device  # a fixture


@pytest.mark.parametrize("kind", ["opencl-device", "opencl-threads", *CUDA_KINDS, *WEBGPU_KINDS])
def test_every_integer_that_may_be_an_argument_can_be_one(
    make: Callable[[str], Device], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sizes, "_varied", all_as_arguments)
    for seed in range(2000, 2000 + examples(3, quick=1)):
        check(make(kind), seed, 60)


KINDS = ["opencl", "opencl-threads", *CUDA_KINDS, *WEBGPU_KINDS]


def _driver(kind: str) -> Driver:
    if kind in DRIVERS:
        return DRIVERS[kind]()
    return opencl_threads() if kind == "opencl-threads" else OpenCLDriver(NATIVE, kind)


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Iterator[Callable[[], Device]]:
    """Opens the device of a test's kind anew, so that no shape was seen there before."""
    opened: list[Device] = []

    def device() -> Device:
        opened.append(Device.over(_driver(request.param)))
        return opened[-1]

    yield device
    for item in opened:
        item.close()


def compiled_on(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels, as they are compiled on a device."""
    names: list[str] = []
    driver = device.driver
    compile_, own = type(driver).compile, driver

    def noted(self: Driver, text: object, signatures: dict[str, tuple[str, ...]]) -> object:
        if self is own:
            names.extend(signatures)
        return compile_(self, text, signatures)  # type: ignore[arg-type]

    monkeypatch.setattr(type(driver), "compile", noted)
    return names


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


EXPRESSIONS: dict[str, Callable[[ps.Tensor], ps.Tensor]] = {
    "elementwise": lambda x: F.gelu(x) * x + 1,
    "rows": lambda x: F.softmax(x) + x.sum(axis=1, keepdims=True),
    "columns": lambda x: x.sum(axis=0) * ps.mean(x),
    "moves": lambda x: ps.concat([x.T[::2], -x.T], axis=0)[1:] + x[0, 0],
    "product": lambda x: F.relu(x @ x.T) @ x,
    "thin product": lambda x: x.T @ x[:, :2],
    "cumulative": lambda x: ps.cumulative_sum(x, axis=1),
    "sorted": lambda x: ps.sort(x, axis=0) + ps.argmax(x, axis=0),
    "halves": lambda x: (x.astype(ps.float16) * 3).sum(axis=0),
    "gathered": lambda x: ps.take(x, ps.argsort(x[:, 0]), axis=0),
    "gradient": ps.grad(lambda x: F.cross_entropy(x, ps.zeros((len(x),), dtype=ps.int32, device=x.device))),
}

# The first two get kernels of their own, and small ones after them a kernel for any length.
SHAPES = [(9, 5), (40, 33), (13, 70), (64, 8), (37, 41), (130, 12), (2, 96), (3, 3), (300, 64)]
# Of more than 16 items and of 32 at most: what sorts longer ones takes twice as long to compile.
SORTED_SHAPES = [(9, 5), (20, 33), (13, 7), (27, 41), (32, 8)]


@pytest.mark.slow(
    "opencl-threads",
    "sorted",
    "gathered",
    "halves",
    "thin product",
    "columns",
    "webgpu",
    "elementwise",
    "moves",
)
@pytest.mark.parametrize("fresh", KINDS, indirect=True)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_later_shapes_give_the_bits_of_first_shapes(fresh: Callable[[], Device], name: str) -> None:
    shared = fresh()
    function = ps.jit(EXPRESSIONS[name])
    shapes = SORTED_SHAPES if name in ("sorted", "gathered") else SHAPES
    for shape in shapes[: examples(9, quick=5)]:
        array = drawn(*shape)
        result = function(ps.asarray(array, device=shared)).numpy()
        own = EXPRESSIONS[name]
        alone = ps.jit(lambda x, own=own: own(x))(ps.asarray(array, device=fresh())).numpy()
        assert result.tobytes() == alone.tobytes(), shape


@settings(max_examples=examples(5, quick=2), deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 200)] * 3), min_size=4, max_size=6), st.integers(0, 3))
def test_products_of_any_sizes_give_the_same_bits(sizes: list[tuple[int, int, int]], how: int) -> None:
    def function(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        left = x.T if how & 1 else x
        right = y.T if how & 2 else y
        return left @ right + 1

    shared = Device.over(_driver("opencl"))
    try:
        jitted = ps.jit(function)
        for rows, inner, columns in sizes:
            left = drawn(inner, rows) if how & 1 else drawn(rows, inner)
            right = drawn(columns, inner) if how & 2 else drawn(inner, columns)
            result = jitted(*(ps.asarray(array, device=shared) for array in (left, right))).numpy()
            exact = (left.T if how & 1 else left) @ (right.T if how & 2 else right) + 1
            np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-4)
            alone = Device.over(_driver("opencl"))
            single = ps.jit(lambda x, y: function(x, y))(
                ps.asarray(left, device=alone), ps.asarray(right, device=alone)
            )
            assert single.numpy().tobytes() == result.tobytes()
            alone.close()
    finally:
        shared.close()


@pytest.mark.slow("opencl-threads", "webgpu", "opencl")
@pytest.mark.parametrize("fresh", KINDS, indirect=True)
def test_new_batch_sizes_of_a_network_compile_little(
    fresh: Callable[[], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fresh()
    names = compiled_on(device, monkeypatch)
    model = nn.Sequential(nn.Linear(16, 32, device=device), nn.GELU(), nn.Linear(32, 4, device=device))
    optimizer = ps.optim.AdamW(model.parameters(), lr=1e-3)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def run(rows: int) -> int:
        before = len(names)
        y = np.arange(rows, dtype=np.int32) % 4
        loss = step(ps.asarray(drawn(rows, 16), device=device), ps.asarray(y, device=device)).item()
        assert 0 < loss < 10
        return len(names) - before

    on_cpu = device.capabilities.vector_width > 1
    batches = random.Random(0).sample(range(1, 300) if on_cpu else range(130, 150), 30 if on_cpu else 20)
    new = [run(rows) for rows in batches]
    assert new[0] > 0
    assert sum(count > 0 for count in new[10:]) <= 2, new


@pytest.mark.parametrize("fresh", KINDS, indirect=True)
def test_every_row_of_a_tensor_is_read_by_few_kernels(
    fresh: Callable[[], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fresh()
    names = compiled_on(device, monkeypatch)
    array = drawn(40, 3000)
    x = ps.asarray(array, device=device)
    for row in range(40):
        np.testing.assert_array_equal((x[row] * 2).numpy(), array[row] * 2)
    assert len(names) <= 6


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize("fresh", KINDS[:1], indirect=True)
def test_a_profile_tells_shapes_of_one_kernel_apart(fresh: Callable[[], Device]) -> None:
    device = fresh()
    function = ps.jit(lambda x: ps.exp(x) + 1)
    inputs = [ps.asarray(drawn(rows, 500), device=device) for rows in (900, 1000, 1100, 1200)]
    for x in inputs:
        function(x).numpy()
    with ps.profile(device=device) as profile:
        for x in inputs:
            function(x).numpy()
    result = [kernel for kernel in profile.kernels() if "exp" in kernel.name]
    assert len(result) == 4
    assert len({kernel.name for kernel in result}) == 3
    assert sorted(kernel.read_bytes for kernel in result) == [
        4 * 500 * rows for rows in (900, 1000, 1100, 1200)
    ]
