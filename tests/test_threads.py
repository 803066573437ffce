"""Kernels for GPUs, whose threads compute several neighbours: every dtype, place and length, against NumPy.

They run on PoCL, and on a CUDA device where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS, opencl_threads
from test_fusion import DTYPES as NAMES
from test_fusion import compiled, only, realized, x_
from test_graph import at

import penstock as ps
from penstock import Device
from penstock.execution import realize
from penstock.graph import dtypes, elementwise, reducing, shaping
from penstock.graph.node import Node
from penstock.kernels.ir.expressions import INT, Load
from penstock.kernels.ir.statements import Barrier, Let, RegisterArray, Statement, Store
from penstock.kernels.lowering import fused
from penstock.kernels.lowering.fused import lower
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [*map(np.dtype, NAMES.split()), BFLOAT16]


GPU = opencl_threads().capabilities


@pytest.fixture(scope="module", params=["threads", *CUDA_KINDS, *WEBGPU_KINDS])
def shared(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = Device.over({"threads": opencl_threads, **DRIVERS}[request.param]())
    yield device
    device.close()


@pytest.fixture
def device(shared: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device that computes everything by kernels, with as many lanes as there can be."""
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    monkeypatch.setattr(fused, "_BUSY", 0)
    return shared


def numbers(dtype: np.dtype[Any], *shape: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    return rng.integers(0 if dtype.kind == "u" else -9, 10, shape).astype(dtype)


def statements(body: list[Statement]) -> Iterator[Statement]:
    for statement in body:
        yield statement
        yield from statements(getattr(statement, "body", []))


def values(body: list[Statement], kind: type[Any]) -> list[Any]:
    """The values of a kind that statements name."""
    lets = [statement for statement in statements(body) if isinstance(statement, Let)]
    return [let.value for let in lets if isinstance(let.value, kind)]


def same(result: np.ndarray, right: np.ndarray, tolerance: float = 0.0) -> None:
    assert result.shape == right.shape
    assert result.dtype == right.dtype
    wide = (item.astype(np.float32) if item.dtype == BFLOAT16 else item for item in (result, right))
    np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)


# Reading and writing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_items_are_read_and_written_in_words(
    device: Device, monkeypatch: pytest.MonkeyPatch, dtype: np.dtype[Any]
) -> None:
    sources = compiled(device, monkeypatch)
    a, b = numbers(dtype, 6, 48), numbers(dtype, 48)
    x, y = ps.asarray(a, device=device), ps.asarray(b, device=device)
    if dtype == np.bool_:
        result = realized(device, x | y, ~x)
        right = [a | b, ~a]
    else:
        result = realized(device, x + y, x * 2)
        right = [a + b, a * np.asarray(2, dtype)]
    if device.capabilities.language == "wgsl":  # which has no other way, but for parts of words
        assert not any("atomic" in source for source in sources)
    else:
        assert "LOAD_" in sources[0]
        assert "STORE_" in sources[0]
    for value, expected in zip(result, right, strict=True):
        same(value, expected)


@pytest.mark.slow("webgpu", "2", "4", "8")
@pytest.mark.parametrize("dtype", [BFLOAT16, *map(np.dtype, ("uint8", "float32", "int64"))], ids=str)
@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 8, 13])
def test_slices_begin_anywhere(device: Device, dtype: np.dtype[Any], start: int) -> None:
    a = numbers(dtype, 5, 64)
    x = ps.asarray(a, device=device)

    def function(x: Any) -> list[Any]:
        part, odd = x[:, start : start + 32], x[1:4, start : start + 29]
        return [part + part, odd + odd, x[::2, start : start + 48 : 2] + part[::2, ::-1][:, :24]]

    for result, right in zip(realized(device, *function(x)), function(a), strict=True):
        same(result, right)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
def test_halves_are_rounded_as_numpy_does(device: Device, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(64, 32)).astype(np.float32) * np.float32(10.0) ** rng.integers(-9, 6, (64, 1))
    a[0, :6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-8]
    x = ps.asarray(a, device=device)
    there = ps.astype(x * 1.5, getattr(ps, str(dtype)))
    back = ps.astype(there, ps.float32) * 2
    result = realized(device, there, back)
    with np.errstate(over="ignore"):
        right = (a * np.float32(1.5)).astype(dtype)
    np.testing.assert_array_equal(result[0].astype(np.float32), right.astype(np.float32))
    np.testing.assert_array_equal(result[1], right.astype(np.float32) * 2)


def test_parts_are_read_only_where_they_are_needed() -> None:
    x, y = x_(4, 8), x_(4, 8)
    group = only(shaping.concat([elementwise.add(x, y), x], 0))
    loads = values(lower(group, GPU).kernel.body, Load)
    assert loads
    assert all(load.mask for load in loads)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
def test_parts_are_put_together(device: Device, dtype: np.dtype[Any]) -> None:
    a, b = numbers(dtype, 4, 16), numbers(dtype, 4, 8)
    x, y = ps.asarray(a, device=device), ps.asarray(b, device=device)

    def function(m: Any, x: Any, y: Any) -> list[Any]:
        joined = m.concat if m is ps else np.concatenate
        wide = joined([x, y + y, x * y[:, :1]], axis=1)
        # What is read under a condition is also read without it.
        spread = m.broadcast_to(x[:1], (3, 16))
        return [
            wide + 1,
            joined([spread, x], axis=0) + joined([x, spread], axis=0),
            joined([y, x[:, 3:8]], axis=1),
        ]

    for result, right in zip(realized(device, *function(ps, x, y)), function(np, a, b), strict=True):
        same(result, right)
    node = shaping.pad(elementwise.add(y._node, y._node), ((0, 4, 1), (8, 8, 1)), (4, 24))
    node = elementwise.add(node, shaping.pad(y._node, ((0, 4, 1), (3, 8, 1)), (4, 24)))
    realize.realize([node], device)
    right = np.zeros((4, 24), dtype)
    right[:, 8:16] += b + b
    right[:, 3:11] += b
    same(device.download(node.value, node.dtype, node.shape).wait(), right)


@pytest.mark.parametrize("shape", [(6, 64), (7, 9), (3, 5, 16)])
def test_random_numbers_are_those_of_the_host(device: Device, shape: tuple[int, ...]) -> None:
    host = Device.over(DRIVERS["host"]())
    result = []
    for where in (device, host):
        generator = ps.random.Generator(3, device=where)
        kept = generator.bernoulli(0.5, shape)
        numbers = generator.uniform(shape)
        joined = ps.concat([numbers, ps.zeros(shape, device=where)], axis=0)  # read under a condition
        result.append(realized(where, ps.where(kept, 1, 0), numbers * 1, joined * 1, ps.max(joined, axis=0)))
    host.close()
    for value, right in zip(*result, strict=True):
        np.testing.assert_array_equal(value, right)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
def test_neighbouring_threads_read_neighbours(device: Device, dtype: np.dtype[Any]) -> None:
    a, b = numbers(dtype, 40, 96), numbers(dtype, 96, 40)
    x, y = ps.asarray(a, device=device), ps.asarray(b, device=device)
    c = numbers(dtype, 3, 40, 8, 4)
    result = realized(
        device, x.T * 2, y.T + x, ps.permute_dims(ps.asarray(c, device=device), (3, 0, 2, 1)) * 2
    )
    for value, right in zip(result, [a.T * 2, b.T + a, c.transpose(3, 0, 2, 1) * 2], strict=True):
        same(value, right.astype(dtype))


def test_threads_follow_what_is_read_most() -> None:
    def order(node: Node) -> list[str]:
        body = lower(only(node), GPU).kernel.body
        lets = [
            statement
            for statement in statements(body)
            if isinstance(statement, Let) and statement.type == INT
        ]
        return [let.name for let in lets if let.name != "item"]

    x, y = x_(64, 96), x_(8, 768)  # of which a transposed read is too narrow for a tile
    assert order(elementwise.exp(shaping.permute(y, (1, 0)))) == ["a0_", "a1_"]
    plain = elementwise.add(x, reducing.expand(x_(1, 96), (64, 96)))
    assert order(plain) == ["a1_", "a0_"]


# Rows

ROWS = [
    (1, 1),
    (5, 7),
    (3, 8),
    (8, 24),
    (4, 96),
    (16, 384),
    (6, 768),
    (2, 1000),
    (4, 1536),
    (3, 1024),
    (2, 4104),
    (1, 16000),
]
FURTHER = ("(5, 7)", "(3, 8)", "(4, 96)", "(2, 1000)", "(3, 1024)", "(1, 16000)")  # in the whole suite


@pytest.mark.slow("webgpu", *FURTHER, "(2, 33000)", "(3, 20001)")
@pytest.mark.parametrize("shape", [*ROWS, (2, 33_000), (3, 32_772), (3, 20_001)])
def test_rows_of_every_length(device: Device, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    a = rng.normal(size=shape).astype(np.float32)
    w = rng.normal(size=shape[1:]).astype(np.float32)

    def function(m: Any, x: Any, w: Any) -> list[Any]:
        e = m.exp(x - m.max(x, axis=-1, keepdims=True))
        centred = x - m.mean(x, axis=-1, keepdims=True)
        norm = centred / m.sqrt(m.mean(centred * centred, axis=-1, keepdims=True) + 1e-5) * w
        return [e / m.sum(e, axis=-1, keepdims=True), norm, m.sum(x * w, axis=-1), m.min(x, axis=-1)]

    result = realized(device, *function(ps, ps.asarray(a, device=device), ps.asarray(w, device=device)))
    for value, right in zip(result, function(np, a, w), strict=True):
        np.testing.assert_allclose(value, right, rtol=2e-4, atol=2e-5)


@pytest.mark.slow("webgpu", *FURTHER, "(2, 4104)")
@pytest.mark.parametrize("shape", ROWS)
def test_norms_and_losses_of_halves(device: Device, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    arrays = [rng.normal(size=shape).astype(BFLOAT16) for _ in range(2)]
    arrays += [rng.normal(size=shape[1:]).astype(BFLOAT16) for _ in range(2)]
    target = rng.integers(0, shape[1], shape[:1])
    host = Device.over(DRIVERS["host"]())
    result = []
    for where in (device, host):
        x, g, w, b = (ps.asarray(array, device=where).requires_grad_() for array in arrays)
        y = F.layer_norm(x + g, w.shape, w, b)
        y.backward(ps.asarray(arrays[0], device=where))
        loss = F.cross_entropy(g, ps.asarray(target, device=where))
        loss.backward()
        result.append(realized(where, y, loss, x.grad, g.grad, w.grad, b.grad))
    host.close()
    for value, right in zip(*result, strict=True):
        # A sum in another order may be rounded to the next half.
        np.testing.assert_allclose(value.astype(np.float32), right.astype(np.float32), rtol=2e-2, atol=2e-2)


def test_what_a_later_pass_needs_stays_in_registers() -> None:
    x = x_(8, 256)
    e = elementwise.exp(elementwise.subtract(x, reducing.restore(reducing.max_(x, (1,)), x, (1,))))
    group = only(elementwise.divide(e, reducing.restore(reducing.sum_(e, (1,)), e, (1,))))
    body = lower(group, GPU).kernel.body
    assert sum(load.buffer == "in0" for load in values(body, Load)) == 1
    assert sum(isinstance(statement, RegisterArray) for statement in statements(body)) == 2
    long = x_(2, 1 << 16)
    group = only(elementwise.add(long, reducing.restore(reducing.sum_(long, (1,)), long, (1,))))
    body = lower(group, GPU).kernel.body
    assert sum(load.buffer == "in0" for load in values(body, Load)) == 2


def test_all_threads_of_a_row_have_read_what_its_result_is_written_over() -> None:
    x, r = x_(4, 256), x_(4)
    form = lower(only(elementwise.add(reducing.sum_(x, (1,)), r)), GPU)
    assert form.may_alias == ((1,),)
    assert any(isinstance(statement, Barrier) for statement in form.kernel.body)
    form = lower(only(elementwise.exp(reducing.sum_(x, (1,)))), GPU)
    assert not any(isinstance(statement, Barrier) for statement in form.kernel.body)


def test_a_row_has_one_store_of_its_result(device: Device) -> None:
    a = np.random.default_rng(3).normal(size=(96, 40)).astype(np.float32)
    r = np.arange(96, dtype=np.float32)
    x, y = ps.asarray(a, device=device), ps.asarray(r, device=device)
    for _ in range(5):  # over and over in the same memory
        y = ps.sum(x, axis=1) + y
        y.realize()
        r = a.sum(1) + r
    np.testing.assert_allclose(y.numpy(), r, rtol=1e-4, atol=1e-4)


# Columns


@pytest.mark.slow("int64", "bool", "(2, 5)", "(300, 3)", "(3, 17, 8)", "(1, 8)", "(5000, 1)")
@pytest.mark.parametrize(
    "dtype", [BFLOAT16, np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)], ids=str
)
@pytest.mark.parametrize(
    "shape", [(1, 8), (2, 5), (7, 24), (300, 3), (257, 40), (64, 1536), (5000, 1), (3, 17, 8), (4, 130, 33)]
)
def test_columns_of_every_shape(device: Device, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    a = numbers(dtype, *shape)
    x = ps.asarray(a, device=device)
    axis = len(shape) - 2
    if dtype == np.bool_:
        result = realized(device, ps.any(x, axis=axis), ps.all(x | True, axis=axis))
        right = [a.any(axis), np.full_like(a.any(axis), True)]
    else:
        total = ps.sum(x, axis=axis, dtype=x.dtype)
        result = realized(
            device, total + total, ps.max(x, axis=axis), ps.sum(x * x, axis=axis, dtype=x.dtype)
        )
        wide = a.astype(np.float64) if dtype == BFLOAT16 else a
        once, squares = wide.sum(axis).astype(dtype), (a * a).astype(wide.dtype).sum(axis).astype(dtype)
        right = [once + once, a.max(axis), squares]
    for value, expected in zip(result, right, strict=True):
        same(value, expected)


def test_sums_over_first_and_last_axes(device: Device) -> None:
    a = np.random.default_rng(4).normal(size=(6, 32, 20)).astype(np.float32)
    x = ps.asarray(a, device=device)
    result = realized(device, ps.sum(x, axis=(0, 2)), ps.max(x * 2, axis=(0, 2)), ps.sum(x, axis=0))
    for value, right in zip(result, [a.sum((0, 2)), (a * 2).max((0, 2)), a.sum(0)], strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-4)


# Lanes


def lanes(node: Node, change: Callable[..., None]) -> set[int]:
    """The lanes that a group stores."""
    change(fused, "_BUSY", 0)
    group = only(node)
    return {
        statement.type.width
        for statement in statements(lower(group, GPU).kernel.body)
        if isinstance(statement, Store)
    }


def test_lanes_are_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    change = monkeypatch.setattr

    def doubled(*shape: int, dtype: Any = np.float32) -> Node:
        x = at(np.ones(shape, dtype))
        return elementwise.add(x, x)

    assert lanes(doubled(4, 8), change) == {4}
    assert lanes(doubled(4, 8, dtype=BFLOAT16), change) == {8}
    assert lanes(doubled(4, 8, dtype=np.int64), change) == {2}
    assert lanes(doubled(3, 5), change) == {1}
    assert lanes(doubled(6, 5), change) == {2}
    x = at(np.ones((6, 8), np.float32))
    assert lanes(elementwise.add(x, shaping.slice_(x_(6, 9), ((0, 6, 1), (1, 8, 1)))), change) == {4}
    change(fused, "_BUSY", 1 << 20)
    few = lower(only(elementwise.add(x, x)), GPU)
    assert few.kernel.grid == (1,)
    assert {
        statement.type.width for statement in statements(few.kernel.body) if isinstance(statement, Store)
    } == {1}


def test_functions_of_integers_are_exact_beside_bfloat16() -> None:
    x = at(np.ones((64, 96), BFLOAT16))
    total = reducing.sum_(elementwise.cast(x, dtypes.float32), (1,))
    assert lower(only(elementwise.exp(total)), GPU).kernel.quick
    count = reducing.sum_(elementwise.cast(x, dtypes.int32), (1,))
    group = only(elementwise.exp(elementwise.cast(count, dtypes.float32)))
    assert not lower(group, GPU).kernel.quick
