"""Attention as a primitive: reference and gradients without a device, groups, and CUDA kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_graph import at, check_gradient, evaluate, sample

import penstock as ps
from penstock import Device
from penstock.drivers.driver import Capabilities
from penstock.drivers.host import HostDriver
from penstock.errors import DeviceError
from penstock.fusion.groups import Group, partition
from penstock.graph import attention as graph_attention
from penstock.graph import dtypes, shaping
from penstock.graph.attention import ATTENTION, ATTENTION_GRADIENT, attention, packed_attention
from penstock.graph.calls import inline
from penstock.graph.checkpoint import CHECKPOINT
from penstock.graph.decompose import decompose
from penstock.graph.gradient import gradients
from penstock.graph.node import Kind, Node, leaf, topological
from penstock.graph.reference import computed
from penstock.graph.simplify import simplify
from penstock.kernels.attention.kernels import attention_kernels
from penstock.kernels.cache import whole_text
from penstock.kernels.lower import fusible
from penstock.kernels.source import KernelSource
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.tensor.core import record

HALF_PRECISION = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
HOST: Capabilities = HostDriver("imagined").capabilities
CUDA: Capabilities = replace(HOST, language="cuda", kind="gpu", tensor_cores=True)
# (batch, queries, keys, heads, width of a head)
SHAPES = [
    (2, 128, 128, 3, 64),
    (1, 64, 64, 1, 64),
    (2, 200, 200, 2, 64),
    (1, 1, 1, 2, 64),
    (2, 130, 130, 2, 32),
    (1, 100, 100, 2, 16),
    (1, 257, 257, 2, 128),
    (1, 129, 129, 2, 80),
    (2, 37, 100, 3, 64),
    (1, 1, 130, 2, 48),
    (1, 100, 517, 2, 32),
    (1, 129, 300, 1, 128),
    (32, 128, 128, 6, 64),
]


# Without a device


def composed(query: np.ndarray, key: np.ndarray, value: np.ndarray, causal: bool, scale: float) -> np.ndarray:
    """Softmax of all scores, head by head."""
    result = np.empty(query.shape)
    for b, h in np.ndindex(query.shape[0], query.shape[2]):
        scores = query[b, :, h] @ key[b, :, h].T * scale
        if causal:
            last = scores.shape[1] - scores.shape[0]
            scores[~np.tri(*scores.shape, last, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        result[b, :, h] = weights / weights.sum(axis=1, keepdims=True) @ value[b, :, h]
    return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (1, 4)])
def test_it_means_the_softmax_of_scores(queries: int, keys: int, causal: bool) -> None:
    query = sample(2, queries, 3, 4, low=-2, high=2)
    key, value = (sample(2, keys, 3, 4, low=-2, high=2, seed=seed) for seed in (1, 2))
    result = evaluate(attention(at(query), at(key), at(value), causal, 0.7))
    np.testing.assert_allclose(result, composed(query, key, value, causal, 0.7), rtol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_its_gradients(causal: bool) -> None:
    arrays = [sample(2, length, 2, 3, low=-1, high=1, seed=length) for length in (3, 4, 4)]
    check_gradient(lambda q, k, v: attention(q, k, v, causal, 0.6), *arrays)
    check_gradient(lambda x: packed_attention(x, causal, 0.6), sample(1, 4, 3, 2, 3, low=-1, high=1))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda x: packed_attention(x, True, 0.6), (1, 3, 3, 2, 2)),
        (lambda x: attention(x, x, x, True, 0.6), (1, 3, 2, 2)),
    ],
)
def test_its_second_gradient(make: Callable[[Node], Node], shape: tuple[int, ...]) -> None:
    def first(x: Node) -> Node:
        mixed = make(x)
        (result,) = gradients(mixed, at(sample(*mixed.shape, seed=5)), [x])
        assert result is not None
        return result

    check_gradient(first, sample(*shape, low=-1, high=1))


@pytest.mark.parametrize("items", [1, 1 << 24])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_made_of_what_every_device_has(
    monkeypatch: pytest.MonkeyPatch, causal: bool, items: int
) -> None:
    monkeypatch.setattr(graph_attention, "_ROW_ITEMS", items)  # a part of the queries at a time, or all
    packed = at(sample(2, 40, 3, 2, 4, low=-1, high=1))
    sides = [at(sample(2, length, 2, 4, low=-1, high=1, seed=length)) for length in (33, 40, 41)]
    together, apart = packed_attention(packed, causal, 0.5), attention(sides[0], *sides[1:2] * 2, causal, 0.5)
    wanted = [together, *gradients(together, at(sample(*together.shape, seed=8)), [packed])]
    wanted += [apart, *gradients(apart, at(sample(*apart.shape, seed=9)), sides[:2])]
    nodes = [node for node in wanted if node is not None]
    result = decompose(nodes, HOST)
    assert not any(node.primitive.kind is Kind.ATTENTION for node in topological(result))
    assert decompose(nodes, CUDA) != nodes  # of float64
    for node, parts in zip(nodes, result, strict=True):
        np.testing.assert_allclose(evaluate(parts), evaluate(node), rtol=1e-9, atol=1e-12)


def test_the_parts_keep_no_copies_of_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_attention, "_ROW_ITEMS", 1)
    query, key, value = (at(sample(1, 2, 40, 4, seed=side)) for side in range(3))
    nodes = topological([graph_attention.attend(query, key, value, True, 0.5)], through_values=True)
    kept = [node.inputs[1:] for node in nodes if node.primitive is CHECKPOINT]
    assert kept == [(query, key, value)] * 3


def test_packed_or_not_is_the_same() -> None:
    packed = sample(2, 5, 3, 2, 4, low=-1, high=1)
    sides = [at(np.ascontiguousarray(packed[:, :, side])) for side in range(3)]
    whole, parts = at(packed), attention(*sides, True, 0.5)
    together = packed_attention(whole, True, 0.5)
    np.testing.assert_array_equal(evaluate(together), evaluate(parts))
    slope = at(sample(*parts.shape, seed=9))
    (result,) = gradients(together, slope, [whole])
    assert result is not None
    for side, part in enumerate(gradients(parts, slope, sides)):
        assert part is not None
        np.testing.assert_array_equal(evaluate(result)[:, :, side], evaluate(part))


# Groups


def given(*shape: int) -> Node:
    node = leaf(object(), shape, dtypes.bfloat16)
    node.tracked = True
    return node


def grouped(*wanted: Node | None) -> list[Group]:
    nodes = simplify([node for node in wanted if node is not None])
    return partition(nodes, lambda node: fusible(node, CUDA))


def test_nothing_is_copied_around_packed_attention() -> None:
    packed, slope = given(2, 128, 3 * 4 * 64), given(2, 128, 4 * 64)
    mixed = packed_attention(shaping.reshape(packed, (2, 128, 3, 4, 64)), True, 0.125)
    joined = shaping.reshape(mixed, (2, 128, 4 * 64))
    forward, backward = grouped(joined, *gradients(joined, slope, [packed]))
    assert [node.primitive for node in forward.outputs] == [ATTENTION] * 2
    assert [node.attributes["part"] for node in forward.outputs] == ["result", "lse"]
    assert forward.inputs == (packed,)
    assert [node.primitive for node in backward.outputs] == [ATTENTION_GRADIENT]
    assert backward.outputs[0].shape == (2, 128, 3, 4, 64)
    assert backward.inputs == (packed, *forward.outputs, slope)


def test_gradients_of_separate_inputs_are_one_group() -> None:
    sides = [given(2, 3, length, 64) for length in (10, 20, 20)]
    turned = [shaping.permute(side, (0, 2, 1, 3)) for side in sides]
    mixed = attention(*turned, True, 0.125)
    nodes = gradients(mixed, given(*mixed.shape), turned)
    forward, backward = grouped(*nodes)
    assert [node.attributes["part"] for node in backward.outputs] == ["query", "key", "value"]
    assert forward.inputs == tuple(sides)
    lowering = attention_kernels(backward)
    assert len(lowering.launches) == 2
    assert lowering.scratch == (2 * 3 * 10 * 8,)


def test_what_is_not_wanted_goes_to_scratch() -> None:
    sides = [given(2, 10, 3, 64) for _ in range(3)]
    mixed = attention(sides[0], sides[1], sides[2], True, 0.125)
    (only,) = grouped(mixed)
    assert attention_kernels(only).scratch == (2 * 3 * 10 * 4,)
    _, backward = grouped(gradients(mixed, given(*mixed.shape), sides)[0])
    rows, keys, values = attention_kernels(backward).scratch
    assert (rows, keys, values) == (2 * 3 * 10 * 8, sides[1].nbytes, sides[2].nbytes)


def test_rows_that_do_not_lie_well_are_written_out_first() -> None:
    query = shaping.permute(given(2, 64, 3, 16), (0, 3, 2, 1))  # neighbours in a row are far apart
    moved = shaping.slice_(given(2, 16, 3, 80), ((0, 2, 1), (0, 16, 1), (0, 3, 1), (4, 64, 1)))  # by 8 bytes
    whole = given(2, 16, 3, 64)
    groups = grouped(attention(query, moved, whole, False, 0.125))
    assert [group.kind for group in groups] == ["map", "map", "attention"]
    assert groups[-1].inputs[-1] is whole


@pytest.mark.parametrize(
    ("shape", "causal", "scale", "dtype"),
    [
        ((1, 8, 1, 24), True, 1.0, dtypes.bfloat16),
        ((1, 8, 1, 144), True, 1.0, dtypes.bfloat16),
        ((1, 8, 1, 64), True, -1.0, dtypes.bfloat16),
        ((1, 8, 1, 64), True, 1.0, dtypes.float32),
    ],
)
def test_what_has_no_kernel_stands_alone(shape: Any, causal: bool, scale: float, dtype: Any) -> None:
    sides = [leaf(object(), shape, dtype) for _ in range(3)]
    assert not fusible(attention(*sides, causal, scale), CUDA)
    assert fusible(attention(*(given(1, 8, 1, 64) for _ in range(3)), True, 1.0), CUDA)
    assert not fusible(attention(*(given(1, 8, 1, 64) for _ in range(3)), True, 1.0), HOST)


# Tensors


@pytest.fixture
def plain() -> Iterator[Device]:
    """A device that has no kernel for it."""
    made = Device.over(HostDriver("plain"))
    yield made
    made.close()


@pytest.fixture
def imagined() -> Iterator[Device]:
    """A device that would have kernels for attention, and computes nothing."""
    driver = HostDriver("cuda-imagined", shared_memory=False)
    driver.capabilities = CUDA
    made = Device.over(driver)
    yield made
    made.close()


def primitives(tensor: ps.Tensor) -> set[str]:
    """What the device of a tensor computes it by."""
    nodes = decompose(inline([tensor._node]), tensor.device.capabilities)
    return {node.primitive.name for node in topological(nodes)}


def test_tensors_use_it_where_there_is_a_kernel(imagined: Device, plain: Device) -> None:
    halves = [ps.zeros((2, 3, 10, 64), dtype=ps.bfloat16, device=imagined) for _ in range(3)]
    wide = [ps.zeros((2, 3, 10, 64), device=imagined) for _ in range(3)]
    result = F.scaled_dot_product_attention(*halves, is_causal=True)
    assert "attention" in primitives(result)
    assert result.shape == (2, 3, 10, 64)
    assert "attention" not in primitives(F.scaled_dot_product_attention(*wide))
    assert "attention" not in primitives(F.scaled_dot_product_attention(halves[0][:1], *halves[1:]))
    packed = ps.zeros((2, 10, 3, 4, 32), dtype=ps.float16, device=imagined)
    assert "attention" in primitives(F.packed_attention(packed))
    elsewhere = ps.zeros((2, 10, 3, 4, 32), dtype=ps.float16, device=plain)
    assert "attention" not in primitives(F.packed_attention(elsewhere))


@pytest.mark.parametrize("axes", [0, 1, 3])
def test_any_number_of_axes_before_the_last_two(imagined: Device, axes: int) -> None:
    before = (2, 3, 2)[:axes]
    query = ps.zeros((*before, 7, 32), dtype=ps.bfloat16, device=imagined)
    other = ps.zeros((*before, 9, 32), dtype=ps.bfloat16, device=imagined)
    result = F.scaled_dot_product_attention(query, other, other, is_causal=True)
    assert result.shape == query.shape
    assert "attention" in primitives(result)


def test_packed_attention_is_that_of_its_parts(plain: Device) -> None:
    packed = ps.asarray(sample(2, 6, 3, 2, 4, low=-1, high=1).astype(np.float32), device=plain)
    result = F.packed_attention(packed, is_causal=True).numpy()
    parts = [packed.numpy()[:, :, side].astype(np.float64) for side in range(3)]
    np.testing.assert_allclose(result, composed(*parts, True, 0.5), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"\(2, 6, 4, 2, 4\) is not \(batch, length, 3"):
        F.packed_attention(ps.zeros((2, 6, 4, 2, 4)))


def test_devices_without_a_kernel_leave_it_to_numpy(plain: Device) -> None:
    arrays = [sample(1, 4, 2, 16, low=-1, high=1, seed=seed).astype(np.float32) for seed in range(3)]
    tensors = [ps.asarray(array, device=plain) for array in arrays]
    nodes = [tensor._node for tensor in tensors]
    result = record(attention(nodes[0], nodes[1], nodes[2], True, 0.25), *tensors)
    np.testing.assert_allclose(result.numpy(), composed(*arrays, True, 0.25), rtol=1e-5, atol=1e-6)


# Kernels


@pytest.mark.parametrize("dtype", HALF_PRECISION)
@pytest.mark.parametrize("length", [16, 20])
def test_windows_in_half_precision(dtype: str, length: int) -> None:
    """Rows of 20 scores end with items that are no vector, and are masked and rounded one by one."""
    draw = np.random.default_rng(0).normal(size=(3, 1, 2, length, 16)).astype(HALF_PRECISION[dtype])
    results = [
        F.scaled_dot_product_attention(
            *(ps.asarray(array, device=device) for array in draw), is_causal=True, window=5
        )
        for device in (None, "host")
    ]
    result, wanted = (tensor.numpy().astype(np.float32) for tensor in results)
    assert np.abs(result - wanted).max() < 0.05


def sources(shape: tuple[int, ...], dtype: Any, causal: bool) -> list[KernelSource]:
    batch, queries, keys, heads, width = shape
    lengths = (queries, keys, keys)
    sides = [leaf(object(), (batch, length, heads, width), dtype) for length in lengths]
    for side in sides:
        side.tracked = True
    mixed = attention(*sides, causal, width**-0.5)
    groups = grouped(*gradients(mixed, leaf(object(), mixed.shape, dtype), sides))
    return [launch.source for group in groups for launch in attention_kernels(group).launches]


@pytest.mark.slow("48", "80", "sm_90", "16", "sm_80", "64")
@pytest.mark.parametrize(
    ("width", "architecture"),
    [*itertools.product([16, 48, 64, 80, 128], ["sm_80", "sm_90a"]), (64, "sm_90")],  # whose text is sm_80's
)
def test_the_kernels_compile(width: int, architecture: str) -> None:
    cuda = pytest.importorskip("penstock.drivers.cuda")
    for dtype, causal in ((dtypes.bfloat16, True), (dtypes.float16, False)):
        text = whole_text(sources((2, 100, 130, 3, width), dtype, causal), "cuda")
        assert cuda.compile_text(text, architecture).startswith(b"\x7fELF")


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_serve_every_batch(causal: bool) -> None:
    few, many, longer = (
        {source.name: source.text for source in sources((*shape, 3, 64), dtypes.bfloat16, causal)}
        for shape in ((2, 100, 130), (7, 100, 130), (2, 101, 130))
    )
    assert few == many
    assert not few.keys() & longer.keys()


def test_halves_are_multiplied_by_tensor_cores() -> None:
    text = whole_text(sources((1, 64, 64, 1, 64), dtypes.bfloat16, True), "cuda")
    assert "wgmma.mma_async" in text
    assert "mma.sync.aligned.m16n8k16" in text


@pytest.fixture(scope="module")
def gpu() -> Iterator[Device]:
    cuda = pytest.importorskip("penstock.drivers.cuda")
    try:
        number = cuda.find_devices()[0]
    except (DeviceError, IndexError):
        pytest.skip("no CUDA device")
    made = Device.over(cuda.CudaDriver(number, "cuda-attention"))
    yield made
    made.close()


def distance(result: np.ndarray, wanted: np.ndarray) -> float:
    """The error relative to the norm, which may be 0; with NaN the check fails."""
    off = np.linalg.norm((result.astype(np.float64) - wanted).ravel())
    return float(off / max(np.linalg.norm(wanted.astype(np.float64).ravel()), 1e-2))


@pytest.mark.parametrize("dtype", HALF_PRECISION)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuda_computes_it(
    gpu: Device, shape: tuple[int, ...], causal: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    batch, queries, keys, heads, width = shape
    random = np.random.default_rng(queries)
    lengths = (queries, keys, keys, queries)
    arrays = [random.normal(size=(batch, n, heads, width)).astype(HALF_PRECISION[dtype]) for n in lengths]
    query, key, value, slope = (ps.asarray(array.swapaxes(1, 2), device=gpu) for array in arrays)

    def run() -> list[np.ndarray]:
        def total(*sides: ps.Tensor) -> ps.Tensor:
            results.append(F.scaled_dot_product_attention(*sides, is_causal=causal, lower_right=causal))
            return ps.sum(ps.astype(results[-1], ps.float32) * ps.astype(slope, ps.float32))

        results: list[ps.Tensor] = []
        _, actual = ps.value_and_grad(total, (0, 1, 2))(query, key, value)
        assert "attention" in primitives(results[0])
        return [tensor.numpy() for tensor in (results[0], *actual)]

    actual, again = run(), run()
    nodes = [leaf(object(), array.shape, dtypes.float32) for array in arrays]
    mixed = attention(*nodes[:3], causal, width**-0.5)
    lse = Node(ATTENTION, mixed.inputs, {**mixed.attributes, "part": "lse"})
    wide = [array.astype(np.float32) for array in arrays]
    result = computed(mixed, wide[:3])
    inputs = (*wide[:3], result, computed(lse, wide[:3]), wide[3])
    wanted = [result]
    for part in ("query", "key", "value"):
        node = Node(
            ATTENTION_GRADIENT, (*mixed.inputs, mixed, lse, nodes[3]), {**mixed.attributes, "part": part}
        )
        wanted.append(computed(node, list(inputs)))
    most = 1e-2 if dtype == "bfloat16" else 2e-3
    for item, same, right in zip(actual, again, wanted, strict=True):
        assert distance(item, right.swapaxes(1, 2)) < most
        np.testing.assert_array_equal(item.view(np.uint16), same.view(np.uint16))
