"""Kernels in WGSL: naga accepts every kind, also for minimal devices, and functions are accurate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, WEBGPU_KINDS
from test_cuda_sources import DTYPES, Gathering, Given, Imagined, applied, build
from test_fusion import ALIASES, only, realized
from test_graph import at
from test_random_graphs import grown

import penstock as ps
from penstock import Device, nn, optim
from penstock.drivers.driver import Capabilities, Driver
from penstock.execution import realize
from penstock.execution.executable import Executable
from penstock.execution.realize import executables
from penstock.fusion.groups import Group
from penstock.graph import contraction, elementwise, reducing, shaping
from penstock.graph.node import Node
from penstock.graph.reference import computed
from penstock.kernels.cache import whole_text
from penstock.kernels.lower import fusible, write
from penstock.kernels.source import ALIGNMENT, KernelSource
from penstock.kernels.templates.choose import template_launches

BOOL = np.dtype(bool)
NAN, INF = float("nan"), float("inf")
POISON = 0xAB

# Capabilities: a device with WebGPU's minimum, and a device with large limits.
LITTLE = {"local_bytes": 16 << 10, "max_group_size": 256, "int64": False, "max_buffers": 8}
PLENTY = {"local_bytes": 32 << 10, "max_group_size": 1024, "int64": True, "max_buffers": 64}


class ImaginedWgsl(Imagined):
    """A WebGPU device that holds memory and computes nothing."""

    def __init__(self, having: Mapping[str, Any]) -> None:
        super().__init__()
        self.capabilities = replace(
            self.capabilities, language="wgsl", compute_units=32, float64=False, **having
        )


@pytest.fixture(scope="module")
def webgpu() -> Iterator[Driver]:
    """The driver that asks naga."""
    if not WEBGPU_KINDS:
        pytest.skip("naga is reached through an adapter, and there is none")
    driver = DRIVERS["webgpu"]()
    yield driver
    driver.close()


@pytest.fixture(params=[LITTLE, PLENTY], ids=["little", "plenty"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    monkeypatch.setattr(Executable, "_on_host", lambda *_: None)  # it would read what was not computed
    made = Device.over(ImaginedWgsl(request.param))
    executables(made).kernels = Gathering(made)
    yield made
    made.close()


@pytest.fixture
def given(device: Device) -> Given:
    return Given(device)


def check(device: Device, webgpu: Driver, at_least: int) -> None:
    """Naga accepts all that was gathered, and each takes no more than the device has."""
    gathered = executables(device).kernels
    assert isinstance(gathered, Gathering)
    assert len(gathered.sources) >= at_least
    having = device.capabilities
    for source in gathered.sources.values():
        text = whole_text([source], "wgsl")
        webgpu.compile(text, {source.name: source.signature})
        assert local_bytes(source.text) <= having.local_bytes
        assert len(source.buffers) <= having.max_buffers
        assert np.prod(source.group) <= having.max_group_size
        assert having.int64 or not re.search(r"\b[iu]64\b", text)


def local_bytes(text: str) -> int:
    """The memory of a group that a text declares."""
    sizes = {"u32": 4, "i32": 4, "f32": 4, "atomic<i32>": 4, "i64": 8, "u64": 8, "vec4<f32>": 16}
    arrays = re.findall(r"var<workgroup> \w+: array<(.+?), (\d+)>;", text)
    single = re.findall(r"var<workgroup> \w+: ((?!array).+?);", text)
    return sum(sizes[kind] * int(length) for kind, length in arrays) + sum(sizes[kind] for kind in single)


@pytest.mark.slow("little")
def test_elementwise_primitives_of_every_dtype(device: Device, given: Given, webgpu: Driver) -> None:
    for dtype in DTYPES:
        nodes = [
            node
            for primitive in elementwise.PRIMITIVES.values()
            if primitive not in (elementwise.CAST, elementwise.FULL)
            and (node := applied(given, primitive, dtype)) is not None
        ]
        nodes += [elementwise.cast(given((5, 70), dtype), other) for other in DTYPES if other != dtype]
        nodes.append(elementwise.add(given((9,), dtype), elementwise.full((9,), dtype, 3)))
        for node in nodes:
            build(device, [node])
    check(device, webgpu, 200)


@pytest.mark.slow("plenty")
def test_reductions_and_views_of_every_dtype(device: Device, given: Given, webgpu: Driver) -> None:
    for dtype in DTYPES:
        for shape in ((6, 300), (3, 5000)):
            x = given(shape, dtype)
            for axes in ((1,), (0,), (0, 1)):
                for reduce in (reducing.sum_, reducing.prod, reducing.max_, reducing.min_):
                    if dtype != BOOL or reduce not in (reducing.sum_, reducing.prod):
                        build(device, [reduce(x, axes)])
        x = given((4, 6), dtype)
        build(device, [elementwise.positive(shaping.permute(x, (1, 0)))])
        build(device, [shaping.concat([x, shaping.slice_(x, ((0, 4, 2), (0, 6, 1)))], 0)])
        build(device, [contraction.gather(x, given((7,), np.dtype(np.int32)))])
    check(device, webgpu, 200)


@pytest.mark.slow("plenty")
def test_kernels_of_single_nodes(device: Device, given: Given, webgpu: Driver) -> None:
    shapes = [((5, 6), 0), ((3, 500), 1), ((2, 9000), 1)]
    for number, dtype in enumerate(DTYPES):
        for shape, axis in (shapes * 2)[number % 3 :][:2]:  # each shape with several dtypes of every kind
            x = given(shape, dtype)
            build(device, [reducing.argmax(x, axis), reducing.argmin(x, axis)])
            build(device, [reducing.argsort(x, axis, False), reducing.argsort(x, axis, True)])
            for reverse in (False, True):
                sums, products = (reducing.cumulative_sum, reducing.cumulative_prod)
                build(device, [sums(x, axis, reverse), products(x, axis, reverse)])
                if x.dtype.kind == "f":
                    build(device, [reducing.linear_recurrence(x, x, axis, reverse)])
        for index_dtype in (np.int32, np.int64, np.uint8):
            index = given((40,), np.dtype(index_dtype))
            build(device, [contraction.scatter_add(given((40, 3), dtype), index, 11)])
            build(device, [contraction.scatter_add(given((40, 384), dtype), index, 5000)])
    check(device, webgpu, 100)


def test_random_graphs(device: Device, given: Given, webgpu: Driver) -> None:
    for seed in range(12):
        _, wanted = grown(seed, 60, 0, lambda array: given(array.shape, array.dtype))
        build(device, wanted)
    check(device, webgpu, 50)


def test_products(device: Device, given: Given, webgpu: Driver) -> None:
    for dtype in (np.float32, np.float16):
        for m, n, k in ((3, 5, 7), (64, 64, 64), (200, 2000, 130), (513, 1026, 64), (1024, 1024, 64)):
            left, right = given((2, m, k), np.dtype(dtype)), given((2, n, k), np.dtype(dtype))
            product = contraction.matmul(left, shaping.permute(right, (0, 2, 1)))
            build(device, [product])
            build(device, [elementwise.isnan(product), elementwise.cast(product, np.dtype(np.float16))])
    check(device, webgpu, 20)


def test_random_numbers(device: Device, webgpu: Driver) -> None:
    generator = ps.random.Generator(1, device)
    for make in (generator.uniform, generator.normal):
        for dtype in (ps.float32, ps.float16, ps.bfloat16):
            draw: Callable[[], Any] = ps.jit(lambda make=make, dtype=dtype: make((100,), dtype=dtype))
            draw()
    check(device, webgpu, 6)


@pytest.mark.slow("little")
def test_training_steps(device: Device, webgpu: Driver) -> None:
    ps.random.manual_seed(0)
    gpt = nn.GPT(vocab_size=50, context=16, width=32, layers=2, heads=2, device=device)
    adamw = optim.AdamW(gpt.parameters(), clip_norm=1.0)

    @ps.jit
    def learn(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = nn.functional.cross_entropy(gpt(x).reshape(-1, 50), y.reshape(-1))
        loss.backward()
        adamw.step()
        return loss

    tokens = ps.asarray(np.zeros((4, 16), np.int32), device=device)
    learn(tokens, tokens)
    check(device, webgpu, 30)


# Values


@pytest.fixture(scope="module")
def opened() -> Iterator[Device]:
    if not WEBGPU_KINDS:
        pytest.skip("there is no adapter")
    made = Device.over(DRIVERS["webgpu"]())
    yield made
    made.close()


@pytest.fixture
def real(opened: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A WebGPU device that computes everything by kernels, at the first sight."""
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    return opened


def floats(count: int = 20_000) -> np.ndarray:
    """Numbers of every size, those near 0 and 1 above all, and everything special."""
    rng = np.random.default_rng(0)
    special = [0.0, -0.0, 1.0, -1.0, NAN, INF, -INF, 0.5, -0.5, 1e-40, -1e-40, 1e-45, 3.4e38, -3.4e38]
    special += [88.7, 88.722, 88.73, -87.3, -103.9, -104.0, 8191.9, 8192.5, 1e6, 2.0**23, 2.0**24 + 2]
    sizes = np.exp(rng.uniform(-87, 88, count)) * rng.choice([-1, 1], count)
    near = [rng.uniform(-1.001, 1.001, count), rng.uniform(-12, 12, count), rng.uniform(-105, 105, count)]
    quarters = np.arange(1, 3000) * (np.pi / 2)
    return np.concatenate([special, sizes, *near, quarters]).astype(np.float32)


def units(result: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The error of results in units of the last place; values that are not finite have to be equal."""
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float32)
    finite = np.isfinite(nearest) & np.isfinite(result)
    np.testing.assert_array_equal(result[~finite], nearest[~finite])
    step = np.spacing(np.maximum(np.abs(nearest[finite]), np.finfo(np.float32).tiny)).astype(np.float64)
    return np.abs(result[finite].astype(np.float64) - exact[finite]) / step


UNARY = "exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh"
MOST_UNITS = {"tan": 5.0}


@pytest.mark.parametrize("name", UNARY.split())
def test_functions_are_exact_to_a_few_units(real: Device, name: str) -> None:
    a = floats()
    result = (getattr(ps, name)(ps.asarray(a, device=real) * 1)).numpy()
    with np.errstate(all="ignore"):
        exact = getattr(np, ALIASES.get(name, name))(a.astype(np.float64))
    assert units(result, exact).max() < MOST_UNITS.get(name, 3.5)
    zeros = getattr(ps, name)(ps.asarray(np.array([0.0, -0.0], np.float32), device=real) * 1).numpy()
    if zeros[0] == 0:
        np.testing.assert_array_equal(np.signbit(zeros), [False, True])


def pairs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    special = [0.0, -0.0, 1.0, -1.0, NAN, INF, -INF, 0.5, -0.5, 2.0, 3.0, -2.0, -3.0, 2.5, -2.5, 1e-40]
    special += [3e38, -3e38, 1e-30, 16777217.0, 33554433.0, 1.0000001]
    both = np.array([(value, other) for value in special for other in special])
    a, b = floats(4000), rng.permutation(floats(4000))
    with np.errstate(over="ignore"):
        return (
            np.concatenate([both[:, 0], a]).astype(np.float32),
            np.concatenate([both[:, 1], b]).astype(np.float32),
        )


@pytest.mark.parametrize("name", ["atan2", "hypot", "pow"])
def test_functions_of_two_are_exact_to_a_few_units(real: Device, name: str) -> None:
    a, b = pairs()
    rng = np.random.default_rng(2)
    if name == "pow":  # results of every size, from bases near 1 too
        base = np.exp(rng.uniform(-80, 80, 30_000) * rng.choice([1, 1e-2, 1e-5], 30_000))
        with np.errstate(divide="ignore"):
            power = rng.uniform(-88, 88, 30_000) / np.log(base.astype(np.float32).astype(np.float64))
        keep = np.isfinite(power)
        a = np.concatenate([a, base[keep]]).astype(np.float32)
        b = np.concatenate([b, power[keep]]).astype(np.float32)
    result = getattr(ps, name)(ps.asarray(a, device=real) * 1, ps.asarray(b, device=real)).numpy()
    with np.errstate(all="ignore"):
        exact = getattr(np, ALIASES.get(name, name))(a.astype(np.float64), b.astype(np.float64))
    assert units(result, exact).max() < 4
    numbers = ~np.isnan(exact)
    np.testing.assert_array_equal(np.signbit(result[numbers]), np.signbit(exact[numbers]))


EXACT = (
    "maximum minimum copysign nextafter equal not_equal less less_equal greater greater_equal add subtract"
)


@pytest.mark.parametrize("name", EXACT.split())
def test_what_is_exact(real: Device, name: str) -> None:
    a, b = pairs()
    result = getattr(ps, name)(ps.asarray(a, device=real) * 1, ps.asarray(b, device=real)).numpy()
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(a, b)
    np.testing.assert_array_equal(result, expected)


ONE = """abs positive negative sign square ceil floor round trunc isnan isinf isfinite signbit logical_not
bitwise_invert exp sin tanh log1p reciprocal"""
TWO = """add subtract multiply divide maximum minimum floor_divide remainder pow equal not_equal less
less_equal greater greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
bitwise_left_shift bitwise_right_shift logaddexp copysign hypot atan2"""


def items(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of the values at the ends of a dtype, of those around 0, and of others."""
    rng = np.random.default_rng(3)
    if dtype == "bool":
        special = [False, True]
    elif dtype.startswith("float"):
        special = [0.0, -0.0, 1.0, -1.0, NAN, INF, -INF, 0.5, -2.5, 3.0, 6e4, 6e-8]
    else:
        ends = np.iinfo(dtype)
        special = [ends.min, ends.max, 0, 1, 2, 7, ends.max - 1, *([-1, -7] if ends.min else [])]
    both = [(value, other) for value in special for other in special]
    a, b = (np.array([pair[side] for pair in both]).astype(dtype) for side in (0, 1))
    more = rng.integers(-9 if dtype[0] in "if" else 0, 2 if dtype == "bool" else 10, (2, 61)).astype(dtype)
    return np.concatenate([a, more[0]]), np.concatenate([b, more[1]])


@pytest.mark.slow("int8", "uint16", "int64", "bool", "uint8", "float16")
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "uint8", "bool", "int8", "uint16"])
def test_the_namespace_means_what_numpy_means(real: Device, dtype: str) -> None:
    a, b = items(dtype)
    host = Device.over(DRIVERS["host"]())
    done = 0
    for name in (*ONE.split(), *TWO.split()):
        results = []
        for item in (real, host):
            x, y = (ps.asarray(array, device=item)[:] for array in (a, b))
            if "shift" in name and b.dtype.kind in "iu":
                y = ps.asarray(np.abs(b.astype(np.int64) % 8).astype(dtype), device=item)
            if name == "pow" and b.dtype.kind in "iu":
                y = ps.asarray(b % 5, device=item)
            try:
                results.append(getattr(ps, name)(*((x, y) if name in TWO.split() else (x,))))
            except TypeError:
                break  # there is none for the dtype
        if len(results) < 2:
            continue
        (actual,), (expected,) = (
            realized(value, result) for value, result in zip((real, host), results, strict=True)
        )
        assert actual.dtype == expected.dtype, name
        digits = {"float32": 4e-7, "float16": 1e-3}.get(str(actual.dtype), 0)
        np.testing.assert_allclose(actual, expected, rtol=digits, atol=0, err_msg=name)
        if actual.dtype.kind == "f":
            numbers = ~np.isnan(expected)
            np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]), name)
        done += 1
    host.close()
    assert done > 12


# Items that are smaller than words


def launched(device: Device, group: Group, capabilities: Capabilities | None = None) -> list[np.ndarray]:
    """A group's outputs by its kernel, between guards that must stay."""
    written = write(group, capabilities or device.capabilities, "test")
    assert written is not None
    (launch,) = written.launches
    source = launch.source
    (kernel,) = device.compile(whole_text([source], "wgsl"), {source.name: source.signature}).values()
    guard = np.full(ALIGNMENT, POISON, np.uint8)
    arrays = [np.full(node.nbytes, POISON, np.uint8) for node in group.outputs]
    arrays += [np.ascontiguousarray(node.value).reshape(-1).view(np.uint8) for node in group.inputs]
    buffers = [device.upload(np.concatenate([guard, array, guard])) for array in arrays]
    device.stream.launch(kernel, source.grid, source.group, (*buffers, *(1 for _ in buffers)))
    results = []
    for buffer, node in zip(buffers, group.outputs, strict=False):
        after = device.download(buffer).wait()
        assert (after[:ALIGNMENT] == POISON).all()
        assert (after[-ALIGNMENT:] == POISON).all()
        results.append(after[ALIGNMENT:-ALIGNMENT].view(node.dtype).reshape(node.shape))
    return results


@pytest.mark.slow("uint8", "uint16", "4", "7", "8", "3", "5")
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "float16"])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 70])
def test_small_items_leave_their_neighbours_alone(real: Device, dtype: str, length: int) -> None:
    rng = np.random.default_rng(length)
    x = at(rng.integers(0, 2 if dtype == "bool" else 100, (3, length)).astype(dtype))
    y = at(rng.integers(0, 2 if dtype == "bool" else 100, (3, length)).astype(dtype))
    wanted = [elementwise.maximum(x, y), reducing.max_(x, (1,)), reducing.min_(x, (0,))]
    wanted.append(elementwise.minimum(x, reducing.restore(reducing.max_(y, (1,)), y, (1,))))
    for node in wanted:
        (result,) = launched(real, only(node))
        np.testing.assert_array_equal(result, computed_whole(node))


@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 8, 6), (70, 65, 33), (128, 130, 16)])
@pytest.mark.parametrize("units", [2, 1000])  # with as many, products have few items
def test_products_end_in_small_items(real: Device, shape: tuple[int, int, int], units: int) -> None:
    m, n, k = shape
    rng = np.random.default_rng(0)
    left, right = at(rng.integers(-3, 4, (m, k)).astype("f4")), at(rng.integers(-3, 4, (k, n)).astype("f4"))
    product = contraction.matmul(left, right)
    ends = [
        elementwise.cast(product, np.dtype(np.float16)),
        elementwise.less(product, elementwise.abs_(product)),
    ]
    for end in ends:
        having = replace(real.capabilities, compute_units=units)
        (result,) = launched(real, only(end), having)
        np.testing.assert_array_equal(result, computed_whole(end))


def computed_whole(node: Node) -> np.ndarray:
    if node.value is not None:
        return node.value
    return computed(node, [computed_whole(parent) for parent in node.inputs])


# What a device may lack


def test_without_64_bits_whole_numbers_are_for_numpy(real: Device) -> None:
    having = replace(real.capabilities, int64=False)
    x, small = at(np.arange(9)), at(np.arange(9, dtype=np.int32))
    assert not fusible(elementwise.negative(x), having)
    assert not fusible(elementwise.cast(small, np.dtype(np.uint64)), having)
    assert fusible(elementwise.negative(x), real.capabilities)
    assert fusible(elementwise.negative(small), having)
    assert template_launches(reducing.cumulative_sum(x, 0), having) is None
    for node in (reducing.argmax(small, 0), reducing.argsort(x, 0, False)):
        lone = template_launches(node, having)
        assert lone is not None
        assert not any("64(" in launch.source.text for launch in lone.launches)


def test_loops_that_software_would_end_are_for_numpy(real: Device) -> None:
    """Mesa's software Vulkan ends the loops of a thread after 65535 steps."""
    software = replace(real.capabilities, kind="cpu")
    gpu = replace(real.capabilities, kind="gpu")
    long = at(np.zeros((300_000, 2), np.float32))
    many = at(np.zeros((1, 1_000_000), np.float32))
    cases: list[tuple[Node, Callable[[Node, Capabilities], bool]]] = [
        (reducing.cumulative_sum(long, 0), lambda node, having: template_launches(node, having) is not None),
        (reducing.argmax(long, 0), lambda node, having: template_launches(node, having) is not None),
        (contraction.matmul(many, shaping.permute(many, (1, 0))), fusible),
        (reducing.sum_(at(np.zeros((1_000_000, 2), np.float32)), (0,)), fusible),
    ]
    for node, has_kernel in cases:
        assert not has_kernel(node, software)
        assert has_kernel(node, gpu)


@pytest.mark.parametrize("rows", [65_000, 100_000])
def test_long_axes_are_right(real: Device, rows: int) -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(-3, 4, (rows, 3)).astype(np.float32)
    index = rng.integers(0, 5, rows)
    x = ps.asarray(a, device=real)
    result = realized(real, ps.cumulative_sum(x, axis=0), ps.argmax(x, axis=0), ps.sum(x, axis=0), x.mT @ x)
    right = [a.cumsum(0), a.argmax(0), a.sum(0), a.T @ a]
    for value, expected in zip(result, right, strict=True):
        np.testing.assert_array_equal(value, expected)
    node = contraction.scatter_add(x._node, ps.asarray(index, device=real)._node, 5)
    realize.realize([node], real)
    found_sums = real.download(node.value, node.dtype, node.shape).wait()
    np.testing.assert_array_equal(found_sums, [a[index == row].sum(0) for row in range(5)])


@pytest.mark.parametrize("dtype", ["int32", "uint32", "float32"])
def test_columns_of_numbers_beside_those_of_truth_values(real: Device, dtype: str) -> None:
    a = np.random.default_rng(0).integers(0, 2, (257, 130)).astype(dtype)
    x = ps.asarray(a, device=real)
    result = realized(real, ps.max(x, axis=0), ps.any(x, axis=0), ps.min(x, axis=0), ps.all(x, axis=0))
    for value, expected in zip(result, [a.max(0), a.any(0), a.min(0), a.all(0)], strict=True):
        np.testing.assert_array_equal(value, expected)


def sources_of(node: Node, capabilities: Capabilities) -> Sequence[KernelSource]:
    written = write(only(node), capabilities, "test")
    assert written is not None
    return [launch.source for launch in written.launches]


def test_words_are_written_whole_where_they_can_be(real: Device) -> None:
    for dtype, size, whole in (
        ("uint8", 24, True),
        ("uint8", 18, False),
        ("float16", 6, True),
        ("float16", 5, False),
    ):
        (source,) = sources_of(elementwise.abs_(at(np.ones(size, dtype))), real.capabilities)
        assert ("atomic" not in source.text) == whole
