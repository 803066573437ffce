"""Sums of small integers in a wide dtype make no wide copy of the input, on any device."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from conftest import one_opencl

import penstock as ps
from penstock import Device
from penstock.fusion import costs

pytestmark = one_opencl
COUNT = 1 << 22


@pytest.mark.slow("uint8")
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "bool"])
def test_no_copy_of_all_items(
    device: Device, dtype: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:  # as beyond 2**31 items
        monkeypatch.setattr(costs, "MOST_ITEMS", COUNT)
    values = (np.arange(COUNT) % 3).astype(dtype)
    x = ps.asarray(values, device=device)
    total = ps.jit(lambda x: ps.sum(x, dtype=ps.int64))
    before = device.pool.stats().peak_bytes
    tracemalloc.start()
    assert total(x).item() == int(values.sum(dtype=np.int64))
    on_host = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # At most what goes to the host for NumPy, and nothing like 8 bytes for each item.
    assert on_host < 2 * values.nbytes + 2 * COUNT
    assert device.pool.stats().peak_bytes - before < COUNT


def test_sums_along_axes_and_their_wrapping(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MOST_ITEMS", 1)
    values = np.random.default_rng(0).integers(-128, 128, (40, 30, 20)).astype(np.int8)
    x = ps.asarray(values, device=device)
    for axis in (0, 1, (0, 2), None):
        result = ps.jit(lambda x, axis=axis: ps.sum(x, axis=axis))(x)
        assert result.dtype == ps.int64
        np.testing.assert_array_equal(result.numpy(), values.sum(axis=axis, dtype=np.int64))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_the_smallest_number_negated_is_itself(device: Device, dtype: str) -> None:
    values = np.array([[np.iinfo(dtype).min, -1, 3, -7]] * 3, dtype)
    x = ps.asarray(values, device=device)
    negated, size = ps.jit(lambda x: (ps.prod(-x, axis=1), ps.sum(ps.abs(x), axis=1)))(x)
    np.testing.assert_array_equal(negated.numpy(), np.prod(-values, axis=1, dtype=np.int64))
    np.testing.assert_array_equal(size.numpy(), np.sum(np.abs(values), axis=1, dtype=np.int64))
