"""Inputs that are read across their rows: through tiles, on a CPU's vectors and on threads, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, WEBGPU_KINDS, examples, opencl_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_sources import Imagined
from test_graph import at

import penstock as ps
from penstock import Device
from penstock.config import Settings
from penstock.drivers.cuda import compile_text
from penstock.drivers.driver import Capabilities
from penstock.drivers.opencl import OpenCLDriver, opencl_capabilities
from penstock.fusion.groups import partition
from penstock.graph import elementwise, reducing, shaping
from penstock.graph.node import Node
from penstock.kernels.cache import whole_text
from penstock.kernels.lower import fusible, write

VECTORS = opencl_capabilities(NATIVE)
THREADS = replace(VECTORS, vector_width=1)
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.int64, np.bool_)
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", params=["vectors", "threads", *CUDA_KINDS, *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    own = {"threads": opencl_threads, "vectors": lambda: OpenCLDriver(NATIVE, "opencl-vectors")}
    driver = {**own, **DRIVERS}[request.param]()
    device = Device.over(driver, Settings(force_kernels=True, compile_ahead=False))
    yield device
    device.close()


def values(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return (RNG.standard_normal(shape) * 50).astype(dtype)


@pytest.mark.slow("(16, 16)", "(130, 33)", "(264, 24)", "(17, 40)")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 16), (17, 40), (130, 33), (264, 24), (33, 259)])
def test_every_dtype_and_rest_of_a_tile(device: Device, shape: tuple[int, int], dtype: Any) -> None:
    x, y = values(shape, dtype), values(shape[::-1], dtype)
    chosen = values(shape[::-1], np.bool_)
    given_x, given_y, condition = (ps.asarray(part, device=device) for part in (x, y, chosen))
    np.testing.assert_array_equal(
        ps.where(condition, given_x.T, given_y).numpy(), np.where(chosen, x.T, y), strict=True
    )


@given(st.data())
@settings(max_examples=examples(20, 10), deadline=None)
def test_any_order_of_axes(device: Device, data: st.DataObject) -> None:
    lengths = st.sampled_from([1, 2, 3, 15, 16, 17, 31, 40])
    shape = tuple(data.draw(st.lists(lengths, min_size=2, max_size=4)))
    axes = data.draw(st.permutations(range(len(shape))))
    x = values(shape)
    y = values(tuple(shape[axis] for axis in axes))
    result = ps.permute_dims(ps.asarray(x, device=device), axes) * 2 + ps.asarray(y, device=device)
    np.testing.assert_array_equal(result.numpy(), x.transpose(axes) * 2 + y)


def test_one_input_in_several_orders(device: Device) -> None:
    x = values((70, 70))
    t = ps.asarray(x, device=device)
    np.testing.assert_array_equal((t + t.T * 2 - t[::-1].T).numpy(), x + x.T * 2 - x[::-1].T)


def test_beside_parts_that_are_read_as_they_lie(device: Device) -> None:
    x = values((50, 50))
    t = ps.asarray(x, device=device)
    for axis in (0, 1):
        expected = np.concatenate([x.T, x], axis)[1:, 3:] * 2
        np.testing.assert_array_equal((ps.concat([t.T, t], axis=axis)[1:, 3:] * 2).numpy(), expected)


def test_more_inputs_than_tiles_stay_in_the_cache(device: Device) -> None:
    arrays = [values((40, 24)) for _ in range(7)]
    total = sum(
        (ps.asarray(array, device=device).T for array in arrays[1:]), ps.asarray(arrays[0], device=device).T
    )
    expected = sum((array.T for array in arrays[1:]), arrays[0].T)
    np.testing.assert_array_equal(total.numpy(), expected)


def source(result: Node, capabilities: Capabilities) -> str:
    (group,) = partition([result], lambda node: fusible(node, capabilities))
    lowering = write(group, capabilities, "x")
    assert lowering is not None
    return whole_text([launch.source for launch in lowering.launches], capabilities.language)


@pytest.mark.parametrize("capabilities", [VECTORS, THREADS], ids=["vectors", "threads"])
def test_only_what_is_read_across_goes_through_a_tile(capabilities: Capabilities) -> None:
    x = at(np.ones((64, 48), np.float32))
    cube = at(np.ones((20, 30, 40), np.float32))
    pairs = at(np.ones((64, 2), np.float32))
    row = at(np.ones(64, np.float32))
    across = [shaping.permute(x, (1, 0)), shaping.permute(cube, (2, 0, 1)), shaping.permute(cube, (0, 2, 1))]
    along = [
        x,
        shaping.permute(cube, (1, 0, 2)),
        shaping.permute(pairs, (1, 0)),
        shaping.slice_(x, ((0, 64, 1), (0, 24, 2))),
        reducing.expand(shaping.reshape(row, (64, 1)), (64, 48)),
    ]
    assert all("tile" in source(elementwise.negative(view), capabilities) for view in across)
    assert not any("tile" in source(elementwise.negative(view), capabilities) for view in along)


def test_results_that_exceed_the_cache_are_streamed() -> None:
    """Not where a vector would not be aligned, nor where the result may be written over an input."""

    def streams(rows: int, columns: int, dtype: Any = np.float32, beside: bool = False) -> bool:
        x, y = at(np.ones((rows, columns), dtype)), at(np.ones((columns, rows), dtype))
        turned = shaping.permute(x, (1, 0))
        result = elementwise.add(turned, y) if beside else elementwise.negative(turned)
        return "nontemporal" in source(result, replace(VECTORS, cache_bytes=1 << 15))

    assert streams(64, 40)
    assert streams(64, 40, np.int32)
    assert not streams(64, 24)
    assert not streams(65, 40)
    assert not streams(64, 40, beside=True)
    assert not streams(64, 80, np.int16)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_streamed_results(dtype: Any) -> None:
    driver = OpenCLDriver(NATIVE, "opencl-streams")
    driver.capabilities = replace(driver.capabilities, cache_bytes=1)
    device = Device.over(driver, Settings(force_kernels=True, compile_ahead=False))
    for shape in ((264, 24), (72, 2056), (24, 70), (17, 40)):
        x = values(shape, dtype)
        np.testing.assert_array_equal((ps.asarray(x, device=device).T + 1).numpy(), x.T + 1)
    device.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_nvrtc_takes_it(dtype: Any) -> None:
    x = at(np.ones((64, 50), dtype))
    text = source(elementwise.negative(shaping.permute(x, (1, 0))), Imagined().capabilities)
    assert "tile" in text
    assert compile_text(text, "sm_90").startswith(b"\x7fELF")


def kinds(*wanted: Node) -> list[str]:
    return [group.kind.value for group in partition(wanted, lambda node: fusible(node, VECTORS))]


def test_what_a_reduction_would_read_across_is_written_out_first() -> None:
    x = at(np.ones((300, 260), np.float32))
    across = shaping.permute(x, (1, 0))
    shifted = elementwise.add(across, elementwise.full(across.shape, across.dtype, 1))
    assert kinds(reducing.sum_(across, (1,))) == ["map", "row"]
    assert kinds(reducing.sum_(across, (0,))) == ["map", "column"]
    assert kinds(reducing.sum_(shifted, (1,))) == ["map", "row"]
    rows = reducing.restore(reducing.sum_(shifted, (1,)), shifted, (1,))
    assert kinds(elementwise.subtract(shifted, rows)) == ["map", "row"]
    assert kinds(shifted) == ["map"]
    small = shaping.permute(at(np.ones((30, 26), np.float32)), (1, 0))
    narrow = shaping.permute(at(np.ones((30_000, 3), np.float32)), (1, 0))
    heads = shaping.permute(at(np.ones((40, 50, 60), np.float32)), (1, 0, 2))
    for view in (small, narrow, heads):
        assert kinds(reducing.sum_(view, (view.ndim - 1,))) == ["row"]


def test_reductions_of_a_transposed_tensor(device: Device) -> None:
    x = values((300, 260))
    t = ps.asarray(x, device=device)
    with np.errstate(over="ignore"):
        soft = np.exp(x.T - x.T.max(1, keepdims=True))
        soft /= soft.sum(1, keepdims=True)
    np.testing.assert_array_equal(ps.max(t.T + 1, axis=1).numpy(), (x.T + 1).max(1))
    np.testing.assert_allclose(
        ps.sum(t.T, axis=0).numpy(), x.T.sum(0, dtype=np.float64), rtol=1e-4, atol=1e-2
    )
    np.testing.assert_allclose(ps.nn.functional.softmax(t.T).numpy(), soft, rtol=1e-4, atol=1e-6)
    copied = (t.T + 0).realize()
    for axis in (0, 1):
        np.testing.assert_array_equal(ps.sum(t.T, axis=axis).numpy(), ps.sum(copied, axis=axis).numpy())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiles_fit_into_the_memory_of_a_workgroup(dtype: type) -> None:
    """Of more inputs than fit, some are read without a tile."""
    total = None
    for _ in range(9):
        turned = shaping.permute(at(np.ones((640, 640), dtype)), (1, 0))
        total = turned if total is None else elementwise.add(total, turned)
    assert total is not None
    text = source(total, Imagined().capabilities)
    assert "__shared__" in text
    compile_text(text, "sm_90")  # refuses what is too much


@given(st.data())
@settings(max_examples=examples(4, 2), deadline=None)
def test_large_tiles_and_items_that_are_no_neighbours(device: Device, data: st.DataObject) -> None:
    rows, columns = (data.draw(st.integers(256, 330)) for _ in range(2))
    dtype = data.draw(st.sampled_from((np.float32, np.float16, np.uint8, np.int64)))
    x = values((rows, columns), dtype)
    top, left = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 5))
    index = RNG.integers(0, rows, rows + 5)
    given_x, given_index = ps.asarray(x, device=device), ps.asarray(index, device=device)
    for result, expected in (
        (given_x.T + 1, x.T + dtype(1)),
        (given_x[top:, left:], x[top:, left:]),
        (given_x[top::2, left:] * 2, x[top::2, left:] * dtype(2)),
        (ps.take(given_x, given_index, axis=0), x[index]),
        (ps.take(given_x, given_index % columns, axis=1), x[:, index % columns]),
    ):
        np.testing.assert_array_equal(result.numpy(), expected, strict=True)
