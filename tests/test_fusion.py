"""Groups as pure functions of graphs, and their kernels against NumPy: those for CPUs, and those for GPUs."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, WEBGPU_KINDS, opencl_threads
from test_graph import at

import penstock as ps
from penstock import Device
from penstock.drivers.opencl import OpenCLDriver, opencl_capabilities
from penstock.execution import realize
from penstock.fusion.groups import Group, partition
from penstock.fusion.views import base
from penstock.graph import contraction, creating, elementwise, reducing, shaping
from penstock.graph.calls import inline
from penstock.graph.node import Node, topological
from penstock.graph.simplify import simplify
from penstock.kernels import cache
from penstock.kernels.lower import constants, fusible
from penstock.kernels.lowering import fused
from penstock.kernels.lowering.fused import lower

CPU = opencl_capabilities(NATIVE)
F32 = np.dtype(np.float32)
NAN, INF = float("nan"), float("inf")


def groups(*wanted: Node, alone: tuple[str, ...] = ()) -> list[Group]:
    return partition(wanted, lambda node: node.primitive.name not in alone)


def only(*wanted: Node) -> Group:
    (group,) = groups(*wanted)
    return group


def x_(*shape: int, dtype: Any = np.float32) -> Node:
    return at(np.ones(shape or (4, 8), dtype))


def number(like: Node, value: float) -> Node:
    return elementwise.like(like, value)


def names(group: Group) -> list[str]:
    return [node.primitive.name for node in group.nodes]


def turned(x: Node) -> Node:
    return shaping.permute(x, (1, 0))


def holds(result: list[Group], wanted: list[Node]) -> None:
    """Groups come after their inputs, store nothing twice, and compute all wanted nodes."""
    stored: set[Node] = set()
    for group in result:
        inside = set(group.nodes)
        assert inside >= set(group.outputs)
        for node in group.inputs:
            assert node.value is not None or base(node) in stored, f"{node} is read before it is there"
        known = set(group.inputs)
        for node in group.nodes:
            assert known.issuperset(node.inputs), f"{node} stands before what it needs"
            known.add(node)
        assert not stored.intersection(group.outputs)
        stored.update(group.outputs)
    assert stored.issuperset(base(node) for node in wanted if base(node).value is None)


# Maps


def test_a_chain_is_one_map() -> None:
    x, y = x_(), x_()
    group = only(elementwise.exp(elementwise.add(elementwise.multiply(x, y), number(x, 2))))
    assert group.kind == "map"
    assert group.inputs == (x, y)
    assert names(group) == ["multiply", "full", "add", "exp"]


def test_views_and_broadcasts_are_inside() -> None:
    x = x_(4, 1)
    wide = reducing.expand(x, (4, 4))
    part = shaping.slice_(wide, ((3, 4, -1), (0, 4, 1)))
    group = only(elementwise.add(turned(wide), part))
    assert group.kind == "map"
    assert group.inputs == (x,)


def test_items_that_are_moved_are_inside() -> None:
    x, index = x_(4, 8), x_(3, dtype=np.int64)
    wide = shaping.pad(elementwise.abs_(x), ((1, 4, 1), (0, 8, 1)), (6, 8))
    both = shaping.concat([wide, contraction.gather(x, index)], 0)
    group = only(elementwise.negative(both))
    assert group.kind == "map"
    assert set(group.inputs) == {x, index}


def test_what_many_need_is_computed_once_where_it_is_at_hand() -> None:
    shared = elementwise.exp(x_())
    first, second = elementwise.sin(shared), elementwise.cos(shared)
    group = only(first, second)
    assert set(group.outputs) == {first, second}
    assert names(group).count("exp") == 1


def test_a_value_needed_at_another_place_is_stored() -> None:
    costly = elementwise.exp(x_(4, 4))
    result = groups(elementwise.add(costly, turned(costly)))
    assert [group.outputs[0] is costly for group in result] == [True, False]


def test_what_is_cheap_is_computed_again() -> None:
    x = x_(4, 4)
    cheap = elementwise.add(x, number(x, 1))
    (group,) = groups(elementwise.add(cheap, turned(cheap)))
    assert group.inputs == (x,)
    moved = turned(x)
    result = groups(elementwise.sin(moved), turned(elementwise.cos(moved)))
    assert {group.inputs for group in result} == {(x,)}


def test_two_chains_that_meet_are_one_group() -> None:
    x, y = x_(), x_()
    left, right = elementwise.exp(x), elementwise.sin(y)
    both = elementwise.multiply(left, right)
    group = only(left, right, both)
    assert set(group.outputs) == {left, right, both}


def test_a_wanted_reshape_is_its_base() -> None:
    y = elementwise.exp(x_(4, 8))
    assert only(shaping.reshape(y, (32,))).outputs == (y,)
    assert groups(shaping.reshape(x_(4, 8), (32,))) == []


def test_computed_values_are_inputs() -> None:
    y = elementwise.exp(x_())
    y.set_value("somewhere")
    assert only(elementwise.log(y)).inputs == (y,)


def test_other_primitives_stand_alone_with_groups_around_them() -> None:
    x = x_(4, 4)
    scan = reducing.cumulative_sum(elementwise.exp(x), 0)
    result = groups(elementwise.tanh(scan), alone=("cumulative_sum",))
    assert [group.kind for group in result] == ["map", "single", "map"]
    assert result[1].outputs == (scan,)


def test_what_stands_alone_reads_views_that_were_written_out() -> None:
    x = x_(4, 8)
    moved = turned(x)
    scan = reducing.cumulative_sum(moved, 0)
    result = groups(scan, alone=("cumulative_sum",))
    assert [group.outputs for group in result] == [(moved,), (scan,)]


def test_groups_are_bounded() -> None:
    node = x_()
    for _ in range(500):
        node = elementwise.sin(node)
    result = groups(node)
    holds(result, [node])
    assert 3 <= len(result) <= 8
    assert all(len(group.nodes) <= 200 for group in result)


def test_what_is_read_at_ever_more_places_is_stored_now_and_then() -> None:
    x = y = x_(16, 16)
    for _ in range(30):  # each item needs three of the step before, and so on
        first, rest = ((15, 1, 1), (0, 16, 1)), ((0, 15, 1), (0, 16, 1))
        rolled = shaping.concat([shaping.slice_(y, first), shaping.slice_(y, rest)], 0)
        y = elementwise.add(rolled, elementwise.abs_(y))
    result = groups(y)
    holds(result, [y])
    assert result[0].inputs == (x,)
    assert sum(statements(lower(group, CPU).kernel.body) for group in result) < 1500


def statements(body: list[Any]) -> int:
    return sum(1 + statements(getattr(statement, "body", [])) for statement in body)


def test_long_chains_need_no_recursion() -> None:
    y = x_(4, 8)
    for _ in range(150):
        y = elementwise.sin(y)
        for _ in range(3):
            y = shaping.slice_(y, ((3, 4, -1), (0, 8, 1)))
    result = groups(elementwise.exp(y))
    assert sum(statements(lower(group, CPU).kernel.body) for group in result) > 150
    views = x_(4, 8)
    for _ in range(500):
        views = shaping.slice_(views, ((3, 4, -1), (0, 8, 1)))
    (group,) = groups(elementwise.exp(views))
    assert statements(lower(group, CPU).kernel.body) < 20


def test_what_kernels_cannot_hold_stands_alone_even_if_it_is_a_view() -> None:
    x = x_(4, 8)
    strange = elementwise.cast(x, np.dtype(np.complex64))
    wide = reducing.expand(shaping.reshape(strange, (4, 8, 1)), (4, 8, 2))
    ones = elementwise.like(wide, 1j)
    out = elementwise.abs_(elementwise.add(wide, ones))
    result = partition([out], lambda node: fusible(node, CPU))
    holds(result, [out])
    assert {group.kind for group in result} == {"single"}
    empty = shaping.slice_(x, ((0, 0, 1), (0, 8, 1)))
    result = partition([elementwise.exp(empty)], lambda node: fusible(node, CPU))
    assert [group.kind for group in result] == ["single", "single"]


# Rows, columns and products


def test_reductions_over_trailing_axes_are_rows() -> None:
    x = x_(4, 6, 8)
    for axes in [(2,), (1, 2), (0, 1, 2)]:
        group = only(elementwise.exp(reducing.sum_(elementwise.sin(x), axes)))
        assert group.kind == "row"
        assert names(group) == ["sin", "sum", "exp"]
        assert group.columns == np.prod([x.shape[axis] for axis in axes])


def test_axes_of_length_one_do_not_matter() -> None:
    assert only(reducing.sum_(x_(4, 8, 1), (1,))).kind == "row"
    assert only(reducing.sum_(x_(1, 8, 4), (0, 2))).kind == "row"


def test_a_reduction_and_its_source_can_both_be_stored() -> None:
    y = elementwise.exp(x_())
    total = reducing.sum_(y, (1,))
    group = only(y, total)
    assert group.kind == "row"
    assert set(group.outputs) == {y, total}


def test_a_column_computes_its_inputs_by_itself() -> None:
    x, gradient = x_(), x_()
    into_bias = reducing.sum_(elementwise.multiply(gradient, elementwise.tanh(x)), (0,))
    group = only(into_bias)
    assert group.kind == "column"
    assert set(group.inputs) == {x, gradient}
    both = only(into_bias, reducing.sum_(gradient, (0,)))
    assert both.kind == "column"
    assert len(both.outputs) == 2, "sums over the same axes are taken together"


def test_what_is_stored_anyway_is_not_computed_again_for_columns() -> None:
    y = elementwise.tanh(x_())
    result = groups(y, reducing.sum_(y, (0,)))
    assert [group.kind for group in result] == ["map", "column"]
    assert result[1].inputs == (y,)


def test_middle_axes_are_columns() -> None:
    assert only(reducing.max_(x_(3, 4, 5), (1,))).kind == "column"
    assert only(reducing.max_(x_(3, 4, 5), (0, 2))).kind == "column"


def test_a_product_takes_in_what_is_done_to_its_items() -> None:
    x, w, bias, residual = x_(4, 8), x_(8, 6), x_(6), x_(4, 6)
    product = contraction.matmul(x, w)
    wide = reducing.expand(shaping.reshape(bias, (1, 6)), (4, 6))
    active = elementwise.tanh(elementwise.add(product, wide))
    out = elementwise.cast(elementwise.add(active, residual), np.dtype(np.float16))
    group = only(out)
    assert group.kind == "matmul"
    assert set(group.inputs) == {x, w, bias, residual}
    assert group.outputs == (out,)
    assert set(only(active, out).outputs) == {active, out}


def test_a_product_reads_its_operands_through_views() -> None:
    x, w = x_(4, 3, 8), x_(6, 8)
    heads = shaping.permute(x, (1, 0, 2))
    wide = reducing.expand(shaping.reshape(turned(w), (1, 8, 6)), (3, 8, 6))
    group = only(contraction.matmul(heads, wide))
    assert set(group.inputs) == {x, w}


def test_an_operand_that_no_strides_describe_is_written_out() -> None:
    x, w = x_(4, 6), x_(8, 5)
    mixed = shaping.reshape(turned(x), (3, 8))
    result = groups(contraction.matmul(mixed, w))
    assert [group.kind for group in result] == ["map", "matmul"]
    assert result[0].outputs == (base(mixed),)
    assert set(result[1].inputs) == {base(mixed), w}


def test_an_operand_is_read_where_a_view_of_it_is_stored() -> None:
    x, w = x_(4, 6), x_(4, 5)
    moved = turned(x)
    product = contraction.matmul(moved, w)
    result = groups(moved, product)
    holds(result, [moved, product])
    assert set(result[-1].inputs) == {moved, w}
    group = only(elementwise.exp(product))
    assert set(group.inputs) == {x, w}


def test_a_softmax_after_a_product_is_a_row_of_its_own() -> None:
    x, w = x_(4, 8), x_(8, 6)
    product = contraction.matmul(x, w)
    powers = elementwise.exp(product)
    out = elementwise.divide(powers, reducing.restore(reducing.sum_(powers, (1,)), powers, (1,)))
    assert [group.kind for group in groups(out)] == ["matmul", "row"]


# Layers


def softmax(x: ps.Tensor) -> ps.Tensor:
    powers = ps.exp(x - ps.max(x, axis=-1, keepdims=True))
    return powers / ps.sum(powers, axis=-1, keepdims=True)


def layer_norm(x: ps.Tensor, weight: ps.Tensor, bias: ps.Tensor) -> ps.Tensor:
    centred = x - ps.mean(x, axis=-1, keepdims=True)
    spread = ps.sqrt(ps.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return centred / spread * weight + bias


def rms_norm(x: ps.Tensor, weight: ps.Tensor) -> ps.Tensor:
    return x / ps.sqrt(ps.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def gelu(x: ps.Tensor) -> ps.Tensor:
    return 0.5 * x * (1 + ps.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def cross_entropy(x: ps.Tensor, labels: ps.Tensor) -> ps.Tensor:
    """The loss of each row."""
    moved = x - ps.max(x, axis=-1, keepdims=True)
    logs = moved - ps.log(ps.sum(ps.exp(moved), axis=-1, keepdims=True))
    right = ps.expand_dims(labels, axis=1) == ps.arange(x.shape[1], device=x.device)
    return -ps.sum(ps.where(right, logs, 0.0), axis=-1)


def linear(x: ps.Tensor, weight: ps.Tensor, bias: ps.Tensor) -> ps.Tensor:
    return gelu(x @ weight + bias)


def attention(q: ps.Tensor, k: ps.Tensor, v: ps.Tensor) -> ps.Tensor:
    return softmax((q @ k.mT) * 0.125) @ v


LABELS = np.arange(12) * 5 % 64
# Each layer: its function, the shapes of what it takes, and the kinds of group in its forward pass, in its
# backward pass alone, and in both together.
LAYERS: dict[str, tuple[Callable[..., ps.Tensor], list[tuple[int, ...]], str, str, str]] = {
    "softmax": (softmax, [(12, 64)], "row", "row", "row"),
    "layer_norm": (layer_norm, [(12, 64), (64,), (64,)], "row", "row column", "row column"),
    "rms_norm": (rms_norm, [(12, 64), (64,)], "row", "row column", "row column"),
    "gelu": (gelu, [(12, 64)], "map", "map", "map"),
    "cross_entropy": (cross_entropy, [(12, 64)], "row", "row", "row"),
    "linear": (
        linear,
        [(12, 64), (64, 48), (48,)],
        "matmul",
        "matmul matmul matmul column",
        "matmul matmul matmul column",
    ),
    "attention": (attention, [(2, 3, 16, 8)] * 3, "matmul row matmul", "", ""),
}


@pytest.fixture(scope="module")
def host() -> Iterator[Device]:
    device = Device.over(DRIVERS["host"]())
    yield device
    device.close()


def layer(name: str, device: Device) -> tuple[ps.Tensor, list[ps.Tensor]]:
    """A layer's result, and its inputs with the gradients of a weighted sum."""
    function, shapes, *_ = LAYERS[name]
    rng = np.random.default_rng(3)
    arrays = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
    inputs = [ps.asarray(array, device=device).requires_grad_() for array in arrays]
    rest = [ps.asarray(LABELS, device=device)] if name == "cross_entropy" else []
    result = function(*inputs, *rest)
    weights = rng.uniform(0.5, 1.5, result.shape).astype(np.float32)
    result.backward(ps.asarray(weights, device=device))
    return result, inputs


def kinds(*tensors: ps.Tensor) -> str:
    wanted = simplify(inline([tensor._node for tensor in tensors]))
    result = partition(wanted, lambda node: fusible(node, CPU))
    holds(result, wanted)
    return " ".join(group.kind for group in result)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_few_groups(host: Device, name: str) -> None:
    *_, forward, backward, both = LAYERS[name]
    result, inputs = layer(name, host)
    parts = [tensor.grad for tensor in inputs if tensor.grad is not None]
    assert len(parts) == len(inputs)
    assert kinds(result) == forward
    if backward:
        assert kinds(*parts) == backward
        assert kinds(result, *parts) == both
    else:
        assert len(kinds(*parts).split()) <= 7
        assert len(kinds(result, *parts).split()) <= 9


def test_a_mean_loss_costs_one_more(host: Device) -> None:
    x = ps.asarray(np.ones((12, 64), np.float32), device=host).requires_grad_()
    loss = ps.mean(cross_entropy(x, ps.asarray(LABELS, device=host)))
    loss.backward()
    assert x.grad is not None
    assert kinds(loss) == "row row"
    assert kinds(x.grad) == "row"
    assert kinds(loss, x.grad) == "row row"


# No circles


def random_graph(choice: random.Random, size: int) -> list[Node]:
    nodes = [x_(4, 4), x_(4, 4)]
    steps: list[Callable[[Node, Node], Node]] = [
        elementwise.add,
        elementwise.multiply,
        lambda a, b: elementwise.exp(a),
        lambda a, b: turned(a),
        lambda a, b: elementwise.add(a, turned(b)),
        lambda a, b: reducing.restore(reducing.sum_(a, (1,)), a, (1,)),
        lambda a, b: reducing.restore(reducing.sum_(a, (0,)), a, (0,)),
        lambda a, b: shaping.slice_(a, ((3, 4, -1), (0, 4, 1))),
        lambda a, b: shaping.reshape(shaping.reshape(a, (2, 8)), (4, 4)),
        lambda a, b: contraction.matmul(a, b),
        lambda a, b: reducing.cumulative_sum(a, 0),
    ]
    for _ in range(size):
        a, b = (choice.choice(nodes[-12:]) for _ in range(2))
        nodes.append(choice.choices(steps, [4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1])[0](a, b))
    return nodes


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_have_groups_in_order(seed: int) -> None:
    choice = random.Random(seed)
    nodes = random_graph(choice, choice.choice((10, 40, 160)))
    wanted = [node for node in (*choice.sample(nodes, 3), *nodes[-3:]) if node.value is None]
    result = groups(*wanted, alone=("cumulative_sum",))
    holds(result, wanted)
    reached = {node for node in topological(wanted) if node.value is None}
    assert {node for group in result for node in group.nodes} <= reached


def test_a_group_that_grows_late_makes_no_circle() -> None:
    x, y = x_(4, 4), x_(4, 4)
    early = elementwise.exp(x)
    between = elementwise.sin(turned(early))
    further = elementwise.sin(turned(between))
    late = elementwise.cos(y)
    grown = elementwise.add(early, turned(late))  # joins the first group, which now depends on the last
    wanted = [between, further, late, grown, elementwise.add(further, late)]
    holds(groups(*wanted), wanted)


# What a kernel depends on


def test_constants_are_arguments_and_not_part_of_the_structure() -> None:
    x = x_()
    first, second = (only(elementwise.multiply(x, number(x, value))) for value in (1.0, 2.0))
    assert first.structure == second.structure
    assert [(node.primitive.name, name) for node, name in constants(first)] == [("full", "number")]
    assert first.structure != only(elementwise.add(x, number(x, 1.0))).structure
    assert first.structure != only(elementwise.multiply(turned(x), turned(number(x, 1.0)))).structure
    other = x_(dtype=np.float64)
    assert first.structure != only(elementwise.multiply(other, number(other, 1.0))).structure


# On devices


@pytest.fixture(scope="module", params=["vectors", "threads", *CUDA_KINDS, *WEBGPU_KINDS])
def shared(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = {"vectors": lambda: OpenCLDriver(NATIVE, "opencl-vectors"), "threads": opencl_threads, **DRIVERS}
    device = Device.over(made[request.param]())
    yield device
    device.close()


@pytest.fixture
def device(shared: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device that computes everything by kernels, the first time too."""
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    monkeypatch.setattr(fused, "_BUSY", 0)  # threads of a GPU have several items, even of small values
    return shared


def compiled(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that are compiled from now on."""
    result: list[str] = []
    real = device.driver.compile

    def compile_(source: Any, signatures: Any) -> Any:
        result.append(source)
        return real(source, signatures)

    monkeypatch.setattr(device.driver, "compile", compile_)
    return result


def both(function: Callable[..., Any], device: Device, *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The results of a function of arrays on the device and with NumPy."""
    result = function(ps, *(ps.asarray(array, device=device) for array in arrays)).numpy()
    with np.errstate(all="ignore"):
        expected = function(np, *arrays)
    return result, expected


def has_vectors(sources: list[str]) -> list[bool]:
    """Whether each kernel computes vectors, told by how it reads and writes them."""
    return ["(GLOBAL loose_" in source or "vload_half8(0, in" in source for source in sources]


def realized(device: Device, *tensors: ps.Tensor) -> list[np.ndarray]:
    """The values of tensors that are computed together."""
    realize.realize([tensor._node for tensor in tensors], device)
    return [tensor.numpy() for tensor in tensors]


ALIASES = {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "asinh": "arcsinh",
    "acosh": "arccosh",
    "atanh": "arctanh",
    "pow": "power",
    "atan2": "arctan2",
    "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
    "bitwise_invert": "invert",
}
UNARY = """abs acos asin asinh atan atanh ceil cos cosh exp expm1 floor log log10 log1p log2 negative round
           sign sin sinh sqrt tan tanh trunc isnan isinf isfinite signbit"""
BINARY = """add subtract multiply divide maximum minimum pow atan2 hypot copysign nextafter logaddexp equal
            not_equal less less_equal greater greater_equal remainder floor_divide"""
DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64"
SPECIAL = [0.0, -0.0, 1.0, -1.0, NAN, INF, -INF, 0.5, -0.5, 1.5, 2.5, -2.5]


def numpy_name(name: str) -> Any:
    return getattr(np, ALIASES.get(name, name))


@pytest.mark.slow("1")
@pytest.mark.parametrize("tail", [0, 1])
def test_every_function_agrees_with_numpy(device: Device, monkeypatch: pytest.MonkeyPatch, tail: int) -> None:
    """In vectors, with single items at the end of an odd length."""
    sources = compiled(device, monkeypatch)
    rng = np.random.default_rng(0)
    pairs = np.array([(value, other) for value in SPECIAL for other in SPECIAL])
    a = np.concatenate([pairs[:, 0], rng.uniform(-0.99, 0.99, 120 + tail)]).astype(np.float32)
    b = np.concatenate([pairs[:, 1], rng.uniform(-3, 3, 120 + tail)]).astype(np.float32)
    assert a.size % 8 == tail
    # Times 1, so that a single kernel computes all results: those of a common value are fused.
    x, y = ps.asarray(a, device=device) * 1, ps.asarray(b, device=device) * 1
    results = [getattr(ps, name)(x) for name in UNARY.split()] + [ps.acosh(ps.abs(x) + 1)]
    results += [getattr(ps, name)(x, y) for name in BINARY.split()]
    result = realized(device, *results)
    assert has_vectors(sources)[0] == (device.capabilities.vector_width > 1)
    with np.errstate(all="ignore"):
        expected = [numpy_name(name)(a) for name in UNARY.split()] + [np.arccosh(np.abs(a) + 1)]
        expected += [_binary(name)(a, b) for name in BINARY.split()]
    for name, item, right in zip([*UNARY.split(), "acosh", *BINARY.split()], result, expected, strict=True):
        np.testing.assert_allclose(item, right, rtol=1e-5, atol=1e-6, err_msg=name)
        assert item.dtype == right.dtype, name


def _binary(name: str) -> Any:
    # Where NumPy differs from the standard: see the reference of the primitive.
    return elementwise.PRIMITIVES[name].reference if name == "floor_divide" else numpy_name(name)


def test_signs_of_zeros_and_extremes(device: Device) -> None:
    a = np.array([0.0, -0.0, -3.5, 3.5, -0.2, 0.2, NAN, INF, -INF], np.float32)
    x = ps.asarray(a, device=device) * 1
    results = realized(device, ps.abs(x), -x, ps.round(x), ps.trunc(x), ps.ceil(x), ps.sqrt(x), x * 1)
    expected = [np.abs(a), -a, np.round(a), np.trunc(a), np.ceil(a), np.sqrt(np.where(a < 0, NAN, a)), a]
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, right)
        numbers = ~np.isnan(right)
        np.testing.assert_array_equal(np.signbit(result[numbers]), np.signbit(right[numbers]))


def test_what_is_not_a_number_wins(device: Device) -> None:
    rows = np.array([[1, NAN, 3], [NAN, 1, 2], [1, 2, NAN], [-INF, INF, 0], [-INF, -INF, -INF], [2, 2, 2]])
    a = np.concatenate([rows, rows[:, ::-1]], 1).astype(np.float32)
    x, y = ps.asarray(a, device=device) * 1, ps.asarray(a[::-1].copy(), device=device)
    results = [ps.max(x, axis=1), ps.min(x, axis=1), ps.max(x, axis=0), ps.min(x, axis=0)]
    results += [ps.maximum(x, y), ps.minimum(x, y), ps.max(x), ps.min(x[3:])]
    right = [a.max(1), a.min(1), a.max(0), a.min(0)]
    right += [np.maximum(a, a[::-1]), np.minimum(a, a[::-1]), a.max(), a[3:].min()]
    for result, expected in zip(realized(device, *results), right, strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.slow("7", "9")
@pytest.mark.parametrize("length", [1, 7, 8, 9, 65])
def test_vectors_have_tails(device: Device, length: int) -> None:
    rng = np.random.default_rng(length)
    a, b = rng.uniform(-1, 1, (2, 5, length)).astype(np.float32)

    def function(m: Any, a: Any, b: Any) -> list[Any]:
        c = a * b + 0.5
        return [c, m.sum(c, axis=1), m.max(c, axis=0), m.sum(c * a, axis=0), m.sum(a - b[:1])]

    result = realized(device, *function(ps, ps.asarray(a, device=device), ps.asarray(b, device=device)))
    for value, right in zip(result, function(np, a, b), strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-5)


@pytest.mark.slow("uint8", "int16", "uint16", "uint32", "int64", "int8", "uint64")
@pytest.mark.parametrize("dtype", DTYPES.split())
def test_dtypes(device: Device, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    sources = compiled(device, monkeypatch)
    rng = np.random.default_rng(5)
    if dtype == "bool":
        a, b = rng.random((2, 9, 13)) < 0.5
    elif dtype.startswith("float"):
        a, b = rng.uniform(-2, 2, (2, 9, 13)).astype(dtype)
    else:
        limits = np.iinfo(dtype)
        a, b = rng.integers(limits.min, limits.max, (2, 9, 13), dtype=dtype, endpoint=True)
        a[0, :3], b[0, :3] = limits.min, (0, limits.max, 1)
        b[1, 1] = 0
        if limits.min:
            b[0, 2] = -1
    unit = True if dtype == "bool" else 1
    x, y = ps.asarray(a, device=device) * unit, ps.asarray(b, device=device) * unit
    numbers = "add subtract multiply maximum minimum" if dtype != "bool" else "add multiply"
    whole = "bitwise_and bitwise_or bitwise_xor remainder floor_divide bitwise_left_shift bitwise_right_shift"
    truth = "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"
    special = truth if dtype == "bool" else "" if dtype.startswith("float") else whole
    compare = "equal not_equal" + ("" if dtype == "bool" else " less less_equal greater greater_equal")
    binary = [*numbers.split(), *compare.split(), *special.split()]
    unary = ["logical_not", "bitwise_invert"] if dtype == "bool" else ["abs", "sign", "negative", "square"]
    unary += ["bitwise_invert"] if dtype.lstrip("u").startswith("int") else []
    shift = np.asarray(b % 8 if dtype not in ("bool", "float16") else b, a.dtype)
    s = ps.asarray(shift, device=device)
    single = ("abs", "sign", "shift", "remainder", "floor_divide")  # of integers: without vectors
    results, right = [], []
    with np.errstate(all="ignore"):
        apart = ~~x if special == whole else x  # another kernel, so that the rest can have vectors
        for name in unary:
            results.append(getattr(ps, name)(apart if name in single else x))
            right.append(numpy_name(name)(a))
        for name in binary:
            moved = name.endswith("shift")
            lone = name.split("_")[-1] in single or name in single
            results.append(getattr(ps, name)(apart if lone else x, s if moved else y))
            right.append(numpy_name(name)(a, shift if moved else b))
        results += [ps.where(x > y if dtype != "bool" else x, x, y), ps.flip(x, axis=1)[::2]]
        right += [np.where(a > b if dtype != "bool" else a, a, b), a[:, ::-1][::2]]
        if dtype == "bool":
            results += [ps.any(x, axis=1), ps.all(x, axis=0), ps.sum(ps.astype(x, ps.int64), axis=0)]
            right += [a.any(1), a.all(0), a.sum(0, dtype=np.int64)]
        else:
            for axis in (0, 1):
                results += [
                    ps.max(x, axis=axis),
                    ps.min(x, axis=axis),
                    ps.sum(x, axis=axis, dtype=x.dtype),
                    ps.prod(x, axis=axis, dtype=x.dtype),
                ]
                right += [a.max(axis), a.min(axis), a.sum(axis, dtype=dtype), a.prod(axis, dtype=dtype)]
    found_all = realized(device, *results)
    if device.capabilities.vector_width > 1 and dtype not in ("int8", "uint8", "int16", "uint16", "float64"):
        assert any(has_vectors(sources))
    tolerance = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-13}.get(dtype, 0)
    for at_, (result, expected) in enumerate(zip(found_all, right, strict=True)):
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(
            result, expected, rtol=tolerance, atol=tolerance, err_msg=f"result {at_} of {unary + binary}"
        )


def test_dtypes_change_inside_kernels(device: Device) -> None:
    a = np.arange(-20, 21)
    x = ps.asarray(a, device=device) * 1
    results, right = [], []
    for name in DTYPES.split():
        there = ps.astype(x * 10, getattr(ps, name))
        results += [there, ps.astype(there, ps.float32)]
        right += [(a * 10).astype(name), (a * 10).astype(name).astype(np.float32)]
    f = ps.astype(x, ps.float32) / 4
    results += [ps.astype(f, ps.bool), ps.astype(f, ps.float16), ps.astype(f, ps.float64)]
    right += [(a / 4).astype(bool), (a / 4).astype(np.float16), a / 4]
    for result, expected in zip(realized(device, *results), right, strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)


def test_items_that_are_moved(device: Device) -> None:
    a = np.arange(7 * 24, dtype=np.float32).reshape(7, 24)
    index = np.array([[6, 0], [3, 3], [1, 5]])

    def function(m: Any, a: Any, index: Any) -> list[Any]:
        b = a * 2 + 1
        joined = m.concat if m is ps else m.concatenate
        up = m.expand_dims(a, axis=0)
        return [
            b[::-1, 3::-2],
            b[5:1:-3, ::5].T,
            joined([b, a[:, :8]], axis=1),
            joined([a[::2], b, a[6:2:-1]], axis=0) - 1,
            m.sum(joined([b, a], axis=1), axis=1),
            m.take(b, index.reshape((6,)), axis=0) * 3,
            m.take(a, index.reshape((6,)), axis=1),
            m.reshape(m.permute_dims(b, (1, 0)) if m is ps else b.T, (12, 14)) + 1,
            m.roll(b, (3, 5), axis=(0, 1)),
            m.broadcast_to(up, (3, 7, 24)) * m.reshape(b, (1, 7, 24)),
        ]

    x, i = ps.asarray(a, device=device), ps.asarray(index, device=device)
    for at_, (result, right) in enumerate(
        zip(realized(device, *function(ps, x, i)), function(np, a, index), strict=True)
    ):
        np.testing.assert_array_equal(result, right, err_msg=f"result {at_}")


def test_padding(device: Device) -> None:
    a = np.arange(1, 1 + 6 * 16, dtype=np.float32).reshape(6, 16)
    x = ps.asarray(a, device=device)._node
    twice = elementwise.add(x, x)
    cases = [
        (((1, 6, 1), (0, 16, 1)), (8, 16)),
        (((0, 6, 1), (8, 16, 1)), (6, 32)),  # whole vectors
        (((0, 6, 1), (3, 16, 1)), (6, 20)),
        (((0, 6, 2), (15, 16, -1)), (12, 16)),
        (((17, 6, -3), (31, 16, -2)), (19, 33)),
    ]
    nodes = [shaping.pad(twice, slices, shape) for slices, shape in cases]
    nodes += [reducing.sum_(shaping.pad(twice, *cases[2]), (1,)), reducing.max_(nodes[3], (0,))]
    realize.realize(nodes, device)
    expected = [shaping.PAD.reference(a * 2, *case) for case in cases]
    expected += [expected[2].sum(1), expected[3].max(0)]
    for node, right in zip(nodes, expected, strict=True):
        result = device.download(node.value, node.dtype, node.shape).wait()
        np.testing.assert_array_equal(result, right)


def test_an_index_out_of_range_reads_nothing_that_is_not_there(device: Device) -> None:
    x = ps.asarray(np.arange(5, dtype=np.float32), device=device)._node
    index = ps.asarray(np.array([-3, 0, 4, 5, 1 << 40]), device=device)._node
    node = contraction.gather(x, index)
    realize.realize([node], device)
    result = device.download(node.value, node.dtype, node.shape).wait()
    assert result.tolist() == [0, 0, 4, 4, 4]


def test_sequences(device: Device) -> None:
    nodes = [
        creating.sequence(3, -2, 21, np.dtype(np.int64)),
        creating.sequence(0.5, 0.25, 21, F32),
        creating.sequence(250, 3, 21, np.dtype(np.uint8)),
    ]
    nodes = [elementwise.add(node, number(node, 1)) for node in nodes]
    realize.realize(nodes, device)
    for node, first, step in zip(nodes, (4, 1.5, 251), (-2, 0.25, 3), strict=True):
        result = device.download(node.value, node.dtype, node.shape).wait()
        np.testing.assert_array_equal(result, (first + step * np.arange(21)).astype(node.dtype))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_agree_with_numpy(device: Device, host: Device, name: str) -> None:
    if device.capabilities.vector_width == 1 and name in ("softmax", "rms_norm", "gelu", "attention"):
        pytest.skip("the others have the same kinds of kernel, and these take long to compile")
    result, inputs = layer(name, device)
    parts = [tensor.grad for tensor in inputs if tensor.grad is not None]
    actual = realized(device, result, *parts)
    result, inputs = layer(name, host)
    parts = [tensor.grad for tensor in inputs if tensor.grad is not None]
    for value, right in zip(actual, realized(host, result, *parts), strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-5)


def test_rows_that_no_cache_holds(device: Device) -> None:
    a = np.random.default_rng(1).uniform(-1, 1, (3, 20_001)).astype(np.float32)
    result, right = both(lambda m, x: _softmax(m, x), device, a)
    np.testing.assert_allclose(result, right, rtol=1e-4)


def _softmax(m: Any, x: Any) -> Any:
    powers = m.exp(x - m.max(x, axis=-1, keepdims=True))
    return powers / m.sum(powers, axis=-1, keepdims=True)


def test_products_take_in_their_surroundings(device: Device) -> None:
    rng = np.random.default_rng(2)
    shapes = [(2, 3, 10, 7), (2, 3, 9, 7), (9,), (2, 3, 10, 9)]
    x, y, bias, residual = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes)

    def function(m: Any, x: Any, y: Any, bias: Any, residual: Any) -> list[Any]:
        turned_ = y.mT if m is ps else np.swapaxes(y, -1, -2)
        out = m.tanh(x @ turned_ + bias)
        moved = m.permute_dims if m is ps else np.transpose
        mixed = m.reshape(moved(x, (0, 1, 3, 2)), (2, 3, 10, 7))
        return [out + residual * residual, out, mixed @ turned_, (x[:, ::-1] @ turned_[:, 1:2]) * 2]

    given = [ps.asarray(array, device=device) for array in (x, y, bias, residual)]
    expected = function(np, x, y, bias, residual)
    for result, right in zip(realized(device, *function(ps, *given)), expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-5)
    half = [ps.astype(tensor, ps.float16) for tensor in given[:2]]
    found_half = (half[0] @ half[1].mT + 1).numpy()
    assert found_half.dtype == np.float16
    np.testing.assert_allclose(found_half, x @ np.swapaxes(y, -1, -2) + 1, rtol=1e-2, atol=1e-2)


def test_other_constants_need_no_other_kernels(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    a = np.arange(11, dtype=np.float32)
    x = ps.asarray(a, device=device)
    result = compiled(device, monkeypatch)
    for scale, offset in [(2.0, 1.0), (-3.5, 0.25), (2.0, NAN)]:
        values = ps.sum((x * scale + offset) * ps.arange(11, device=device, dtype=ps.float32)).numpy()
        np.testing.assert_allclose(values, ((a * scale + offset) * a).sum(), rtol=1e-6)
        assert len(result) == 1


def test_explain_names_the_steps_and_the_plan(device: Device) -> None:
    x = ps.asarray(np.ones((64, 64), np.float32), device=device)
    y = ps.cumulative_sum(ps.tanh(ps.sum(ps.exp(x) * 2 + 1, axis=1)), axis=0) + 1
    lines = ps.explain(y).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("1. row [exp full multiply full add sum tanh] -> float32[64]")
    assert "16.0 KiB read, 256 B written" in lines[0]
    assert lines[1].startswith("2. single [cumulative_sum] -> float32[64]")
    assert lines[2].startswith("3. map [full add] -> float32[64]")
    assert lines[3].startswith("3 steps")
    assert "arena of" in lines[3]
    assert ps.explain(x) == "computed already"
    assert y._node.value is None, "explaining computes nothing"
    assert "host [fourier]" in ps.explain(ps.fft.fft(x))


def test_kernels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_KERNELS", 2)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    device = Device.over(DRIVERS["host"]())
    kernels = realize.executables(device).kernels
    tables = [table for table in vars(kernels).values() if isinstance(table, OrderedDict)]
    assert tables
    for length in (1, 2, 3, 4, 5, 1, 2):
        x = ps.asarray(np.ones(length, np.float32), device=device)
        assert (ps.exp(x * 0) * 2 - x + length).numpy().tolist() == [length + 1.0] * length
        assert all(len(table) <= 2 for table in tables)
    assert sum(map(bool, tables)) >= 2
    device.close()
