"""The bridge on a CPU where bits depend on what is fused: 16-bit floats, and products that read windows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import test_random_graphs
from conftest import DRIVERS, NATIVE, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bridge import OPENCL, compiled_ahead
from test_random_graphs import grown
from test_same_bits import EXPRESSIONS

import penstock as ps
from penstock import Device
from penstock.compiler.as_fused import AsFused, depends_on_fusion
from penstock.compiler.passes import fused
from penstock.config import Settings
from penstock.drivers.opencl import opencl_capabilities
from penstock.execution import ahead
from penstock.execution.executable import Executable
from penstock.execution.realize import executables
from penstock.execution.structure import Structure
from penstock.graph.contraction import gather, matmul
from penstock.graph.dtypes import DType, bfloat16, float16, float32, int64
from penstock.graph.elementwise import CAST, cast, exp, like, multiply, tanh
from penstock.graph.node import Node, leaf, placeholder, topological
from penstock.graph.reducing import sum_
from penstock.graph.separate import NotSeparable
from penstock.graph.shaping import permute
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it

CPU = opencl_capabilities(NATIVE)
DTYPES = ["float16", "bfloat16"]
Function = Callable[..., ps.Tensor]


@pytest.fixture(scope="module")
def cpu() -> Iterator[Device]:
    made = Device.over(DRIVERS[OPENCL](), Settings(compile_ahead=False))
    yield made
    made.close()


def values(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(getattr(ps, dtype))


def both(device: Device, wanted: list[Node]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The values of nodes by the fused program, and by that of single operations."""
    structure, own = Structure(wanted, device.capabilities), executables(device)
    inputs = [node.value for node in structure.inputs], structure.constants()
    programs = own.build(structure), Executable(own._separate(structure), device, own.kernels)
    together, apart = (
        [
            device.download(buffer, node.dtype, node.shape).wait()
            for node, buffer in zip(structure.nodes, program.run(*inputs), strict=False)
        ]
        for program in programs
    )
    return together, apart


def check_bits(name: str, device: Device, wanted: ps.Tensor) -> None:
    (together,), (apart,) = both(device, [wanted._node])
    assert together.tobytes() == apart.tobytes(), name


# The graph


def in_float32(*wanted: Node) -> list[Node]:
    return [*map(AsFused(fused(wanted, CPU), CPU).stored, wanted)]


def names(*wanted: Node) -> list[str]:
    """What is computed, from the first operation to the last."""
    nodes = [node for node in topological(wanted) if node.value is None]
    return [f"to {node.dtype}" if node.primitive is CAST else node.primitive.name for node in nodes]


def x_(dtype: DType = float16) -> Node:
    return placeholder((40, 40), dtype)


def test_a_group_rounds_what_it_stores() -> None:
    (result,) = in_float32(tanh(exp(x_())))
    assert names(result) == ["to float32", "exp", "tanh", "to float16"]
    inner = exp(x_())
    assert names(*in_float32(matmul(inner, inner), inner)) == [
        *("to float32", "exp", "to float16", "to float32", "matmul", "to float16")
    ]


def test_a_cast_rounds_where_it_is() -> None:
    (result,) = in_float32(tanh(cast(exp(x_(float32)), bfloat16)))
    assert names(result) == ["exp", "to bfloat16", "to float32", "tanh", "to bfloat16"]
    (wide,) = in_float32(cast(exp(x_()), float32))
    assert names(wide) == ["to float32", "exp"]


def test_what_is_only_moved_stays_in_16_bits() -> None:
    (result,) = in_float32(permute(x_(), (1, 0)))
    assert names(result) == ["permute"]
    (result,) = in_float32(gather(x_(), placeholder((3,), int64)))
    assert names(result) == ["gather"]


def test_an_operation_of_several_kernels_is_computed_once() -> None:
    cheap = multiply(x_(), x_())
    results = in_float32(sum_(cheap, (0,)), sum_(permute(cheap, (1, 0)), (0,)))
    assert names(*results).count("multiply") == 1


def test_a_constant_in_float32_is_rounded_to_16_bits() -> None:
    number = 0.1
    result = multiply(x_(), like(x_(), number))
    values = AsFused(fused([result], CPU), CPU)
    ((wide, narrow),) = values.constants.items()
    assert wide in topological([values.stored(result)])
    assert (wide.attributes["number"], narrow.attributes["number"]) == (float(np.float16(number)), number)


# Bits


@pytest.mark.slow("(300, 130)", "(5, 7)")
@pytest.mark.parametrize("shape", [(300, 130), (5, 7), (41, 203)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_operations_give_the_bits_of_a_fused_program(
    cpu: Device, dtype: str, shape: tuple[int, int]
) -> None:
    x = ps.asarray(values(dtype, *shape), device=cpu)
    for name, function in EXPRESSIONS.items():
        check_bits(name, cpu, function(x))


PRODUCTS: dict[str, Function] = {
    "alone": lambda x, y: x @ y,
    "with an epilogue": lambda x, y: ps.tanh(x @ y) * 2 + 1,
    "in float32": lambda x, y: (x @ y).astype(ps.float32) / 3,
    "of what is computed": lambda x, y: ps.exp(x / 9) @ y,
}


@pytest.mark.slow("(3, 700, 90)", "(90, 700, 3)", "(130, 3001, 9)")
@pytest.mark.parametrize(
    "sizes", [(9, 70, 20), (40, 2100, 20), (130, 3001, 9), (3, 700, 90), (90, 700, 3)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_divide_their_sums_alike(cpu: Device, dtype: str, sizes: tuple[int, int, int]) -> None:
    """A CPU packs matrices of 16-bit floats, and so it divides their sums along K in another way."""
    rows, steps, columns = sizes
    left, right = values(dtype, rows, steps), values(dtype, steps, columns)
    for turns in itertools.product((False, True), repeat=2):
        x, y = (
            ps.asarray(array.T.copy(), device=cpu).T if turn else ps.asarray(array, device=cpu)
            for array, turn in zip((left, right), turns, strict=True)
        )
        for name, function in PRODUCTS.items():
            check_bits(name, cpu, function(x, y))


def test_few_rows_are_multiplied_as_vectors(cpu: Device) -> None:
    """Of windows that lie along K, which are not copied for these, but for others that read the same."""
    x, few, more = (
        ps.asarray(values("float32", *shape), device=cpu)
        for shape in ((1, 1, 20, 64), (2, 1, 1, 30), (5, 1, 1, 30))
    )
    check_bits("few", cpu, F.conv2d(x, few))
    check_bits("both", cpu, ps.concat([F.conv2d(x, few), F.conv2d(x, more)], axis=1))


@pytest.mark.parametrize("first", [6000, 6100])
def test_random_graphs_have_the_same_bits(cpu: Device, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_random_graphs, "FLOATS", ("float16", "bfloat16", "float16", "float32"))
    count, compared = examples(16, quick=4), 0
    for seed in range(first, first + count):
        _, wanted = grown(seed, 40, 0, lambda array: leaf(cpu.upload(array), array.shape, array.dtype))
        if not depends_on_fusion(wanted):  # what has 16 bits is not among the values of a few
            continue
        compared += 1
        for fused_value, single in zip(*both(cpu, wanted), strict=True):
            assert fused_value.tobytes() == single.tobytes(), seed
    assert compared >= 0.8 * count


def check_constants(device: Device, dtype: str) -> None:
    """Those of another expression, which the same program computes, are in their places, by dtype."""
    x = ps.asarray(values(dtype, 20, 30), device=device)
    y = ps.asarray(values("float32", 20, 30), device=device)

    def structure(number: float, other: float) -> Structure:
        return Structure([((x * number).astype(ps.float32) + y * other)._node], device.capabilities)

    first, second, own = structure(2.5, 2.5), structure(3.3, 0.1), executables(device)
    assert first.key == second.key
    program = Executable(own._separate(first), device, own.kernels)
    (buffer,) = program.run([node.value for node in first.inputs], second.constants())
    expected = ps.jit(lambda x, y: (x * 3.3).astype(ps.float32) + y * 0.1)(x, y).numpy()
    np.testing.assert_array_equal(device.download(buffer, y.dtype, y.shape).wait(), expected)


def test_constants_keep_their_places(cpu: Device) -> None:
    check_constants(cpu, "float16")


Shapes = tuple[int, int, int, int]  # rows and columns of images, channels, outputs


def convolutions(array: Callable[..., ps.Tensor], shape: Shapes) -> dict[str, Callable[[], ps.Tensor]]:
    rows, columns, channels, outputs = shape
    x, weight = array(4, channels, rows, columns), array(outputs, channels, 3, 3)
    one, even = x[:1].contiguous(), ps.exp(x[:, :, : rows // 2 * 2, : columns // 2 * 2])
    return {
        "with padding": lambda: F.conv2d(x, weight, padding=1),
        "with a bias": lambda: F.relu(F.conv2d(x, weight, array(outputs))),
        "with a stride": lambda: F.conv2d(x, weight, stride=2, padding=1),
        "of items": lambda: F.conv2d(x, array(outputs, channels, 1, 1)),
        "of an image": lambda: F.conv2d(one, array(outputs, channels, 5, 5), padding=2),
        "of each channel": lambda: F.conv2d(x, array(channels, 1, 3, 3), padding=1, groups=channels),
        "of few windows": lambda: F.conv2d(array(8, channels, 7, 7), weight),
        "of many channels": lambda: F.conv2d(array(1, 90, 9, 16), array(outputs, 90, 3, 3), padding=1),
        "of sequences": lambda: F.conv1d(array(4, channels, 300), array(outputs, channels, 5), padding=2),
        "transposed": lambda: F.conv_transpose2d(x, array(channels, outputs, 2, 2), stride=2),
        "largest items": lambda: F.max_pool2d(ps.exp(x), 3, stride=2, padding=1),
        "means": lambda: F.avg_pool2d(even, 2),
        "the gradient of a weight": lambda: ps.grad(lambda w: F.conv2d(x, w, padding=1).sum())(weight),
        "the gradient of items": lambda: ps.grad(lambda w: (F.conv2d(x, w, stride=3) ** 2).sum())(
            weight[:, :, 1:2, 1:2]
        ),
        "the gradient of images": lambda: ps.grad(lambda x: (F.conv2d(x, weight, padding=1) ** 2).sum())(x),
    }


@pytest.mark.slow("(16, 24, 8, 16)", "bfloat16")
@pytest.mark.parametrize("shape", [(20, 33, 5, 7), (16, 24, 8, 16)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_convolutions_add_up_in_the_order_of_windows(cpu: Device, dtype: str, shape: Shapes) -> None:
    made = convolutions(lambda *shape: ps.asarray(values(dtype, *shape), device=cpu), shape)
    for name, function in made.items():
        check_bits(name, cpu, function())


def test_large_copies_of_windows_are_not_separable(cpu: Device) -> None:
    x, w = (ps.asarray(values("float32", *shape), device=cpu) for shape in ((64, 64, 64, 64), (4, 64, 3, 3)))
    structure = Structure([F.conv2d(x, w)._node], cpu.capabilities)
    with pytest.raises(NotSeparable, match="as long as"):
        executables(cpu)._separate(structure)


def test_products_that_share_panels_are_not_separable(cpu: Device) -> None:
    w = ps.asarray(values("bfloat16", 512, 512), device=cpu)
    xs = [ps.asarray(values("bfloat16", 8, 512), device=cpu) for _ in range(5)]
    structure = Structure([sum(x @ w for x in xs)._node], cpu.capabilities)
    with pytest.raises(NotSeparable, match="lays out"):
        executables(cpu)._separate(structure)


# The bridge


@pytest.fixture
def bridged(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Device, set[str]]]:
    """A device, and the texts that count as compiled."""
    monkeypatch.setattr(ahead.Ahead, "_is_done", lambda self: True)
    device, on_disk = Device.over(DRIVERS[OPENCL](), Settings(compile_ahead=True)), set[str]()
    monkeypatch.setattr(device.driver, "has_compiled", on_disk.__contains__)
    yield device, on_disk
    device.close()


OPERATIONS: list[Function] = [
    lambda x, y: x + y,
    lambda x, y: x * 0.7 - y,
    lambda x, y: x / (ps.abs(y) + 1),
    lambda x, y: ps.tanh(x),
    lambda x, y: ps.where(x > y, x, 0.3),
    lambda x, y: x.T,
    lambda x, y: ps.concat([x[:, 7:], y[:, :7]], axis=1),
    lambda x, y: x @ y / 5,
    lambda x, y: F.softmax(x, axis=1),
    lambda x, y: x - ps.mean(x, axis=0),
    lambda x, y: x - ps.max(y, axis=1, keepdims=True),
    lambda x, y: x.astype(ps.float32) * 1.1,
    lambda x, y: x.astype(ps.float16),
    lambda x, y: x.astype(ps.bfloat16),
]
STEPS = st.lists(
    st.tuples(st.sampled_from(range(len(OPERATIONS))), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=8,
)


def computed(steps: list[tuple[int, int, int]], *arrays: ps.Tensor) -> ps.Tensor:
    """The last of the values that steps compute: each an operation on two of the values before."""
    known = list(arrays)
    for operation, first, second in steps:
        known.append(OPERATIONS[operation](known[-1 - first % len(known)], known[-1 - second % len(known)]))
    return known[-1]


@settings(max_examples=examples(100, quick=8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_first_calls_later_calls_and_jitted_calls_give_the_same_bits(
    bridged: tuple[Device, set[str]], steps: list[tuple[int, int, int]]
) -> None:
    device, on_disk = bridged
    arrays = [ps.asarray(values(dtype, 33, 33), device=device) for dtype in DTYPES]
    compiled_ahead(device, on_disk, computed(steps, *arrays))
    results = [computed(steps, *arrays).numpy().tobytes() for _ in range(3)]
    for bridge in executables(device)._bridges.values():
        assert bridge.compiled is not None
        bridge.compiled.result(60)
    results.append(computed(steps, *arrays).numpy().tobytes())
    results.append(ps.jit(lambda *given: computed(steps, *given))(*arrays).numpy().tobytes())
    assert len({*results}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_new_waits_for_no_compiler(bridged: tuple[Device, set[str]], dtype: str) -> None:
    device, on_disk = bridged
    x = ps.asarray(values(dtype, 40, 30), device=device)
    function: Function = lambda x: F.softmax(ps.exp(x) * 0.7 - x, axis=1)  # noqa: E731
    compiled_ahead(device, on_disk, function(x))
    first = function(x).numpy()
    assert len(executables(device)._bridges) == 1
    assert not executables(device)._programs
    assert first.tobytes() == ps.jit(function)(x).numpy().tobytes()
