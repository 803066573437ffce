"""Reductions of rows on a CPU: their order depends on the length of a row and on nothing else in a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from conftest import NATIVE

import penstock as ps
from penstock import Device
from penstock.config import Settings
from penstock.drivers.opencl import OpenCLDriver
from penstock.graph.reducing import BLOCK

RNG = np.random.default_rng(0)
LENGTHS = (1, 7, 8, 13, 31, 63, 64, 71, 95, 96, 100, 203, 1000, 2048, 4096, 4097, 5000, 12345)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device.over(
        OpenCLDriver(NATIVE, "opencl-rows"), Settings(force_kernels=True, compile_ahead=False)
    )
    yield device
    device.close()


def folded(parts: np.ndarray, combine: Callable[..., np.ndarray]) -> np.ndarray:
    """Sum neighbours on the first axis until a single item is left."""
    while len(parts) > 1:
        parts = combine(parts[::2], parts[1::2])
    return parts[0]


def in_turn(values: np.ndarray, combine: Callable[..., np.ndarray], start: float) -> np.ndarray:
    total = np.full(values.shape[1:], start, np.float32)
    for value in values:
        total = accumulated(combine, total, value)
    return total


def accumulated(combine: Callable[..., np.ndarray], total: np.ndarray, value: np.ndarray) -> np.ndarray:
    """A total with one more value: of zeros of both signs, the total's counts."""
    return combine(value, total) if combine is maximum else combine(total, value)


def of_row(row: np.ndarray, combine: Callable[..., np.ndarray], start: float, blocks: bool) -> np.ndarray:
    """The reduction of a row in the order of the kernels."""
    strip = 32 if len(row) >= 64 else 8
    strips, vectors = len(row) // strip * strip, len(row) // 8 * 8
    wide = []
    if strips:
        parts = row[:strips].reshape(-1, strip)
        size = BLOCK if blocks and len(parts) > BLOCK else len(parts)
        totals = [
            folded(in_turn(parts[at : at + size], combine, start).reshape(-1, 8), combine)
            for at in range(0, len(parts), size)
        ]
        wide.append(in_turn(np.array(totals), combine, start) if len(totals) > 1 else totals[0])
    if strips < vectors:
        wide.append(in_turn(row[strips:vectors].reshape(-1, 8), combine, start))
    tail = in_turn(row[vectors:], combine, start)
    if not wide:
        return tail
    lanes = wide[0] if len(wide) == 1 else combine(*wide)
    while len(lanes) > 1:
        lanes = combine(lanes[: len(lanes) // 2], lanes[len(lanes) // 2 :])
    return accumulated(combine, tail, lanes[0]) if vectors < len(row) else lanes[0]


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(a) | (a > b), a, b)


@pytest.mark.slow("1", "8", "31", "63", "96", "100", "1000", "4096", "5000")
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_added_up_in_one_order(device: Device, length: int) -> None:
    x = RNG.standard_normal((16, length)).astype(np.float32)
    expected = np.array([of_row(row, np.add, 0, blocks=True) for row in x])
    tensor = ps.asarray(x, device=device)
    np.testing.assert_array_equal(ps.sum(tensor, axis=1).numpy(), expected)
    # Beside what is computed in vectors, and what is not.
    small = ps.zeros((16, length), dtype=ps.int8, device=device)
    for other in (tensor * 0, small):
        both = ps.jit(lambda a, b: ps.sum(a + ps.astype(b, ps.float32), axis=1))
        np.testing.assert_array_equal(both(tensor, other).numpy(), expected)


@pytest.mark.slow("1", "8", "31", "63", "96", "100", "1000", "4096", "5000")
@pytest.mark.parametrize("length", LENGTHS)
def test_extremes_of_zeros_and_nan(device: Device, length: int) -> None:
    x = RNG.choice(np.array([0.0, -0.0, -1.0], np.float32), (6, length))
    x[0, length // 2] = np.nan
    x[1, -1] = np.nan
    x[2] = -np.inf
    with np.errstate(all="ignore"):
        expected = np.array([of_row(row, maximum, -np.inf, blocks=False) for row in x])
    tensor, small = ps.asarray(x, device=device), ps.zeros((6, length), dtype=ps.int8, device=device)
    together = ps.jit(lambda a, b: (ps.max(a, axis=1), ps.sum(ps.astype(b, ps.int32), axis=1)))
    for result in (ps.max(tensor, axis=1), together(tensor, small)[0], -ps.min(-tensor, axis=1)):
        got = result.numpy()
        np.testing.assert_array_equal(got, expected)
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))


WEIGHTED: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[ps.Tensor], ps.Tensor]]] = {
    "a row of two axes": ((4, 6, 70), (6, 1), lambda x: ps.sum(x, axis=(1, 2))),
    "vectors of it": ((40, 60, 200), (60, 1), lambda x: ps.sum(x, axis=(1, 2))),
    "an axis between": ((50, 3, 24), (3, 24), lambda x: ps.sum(x, axis=(0, 2))),
    "a product": ((4, 6, 70), (6, 1), lambda x: ps.prod(x, axis=(1, 2))),
    "columns of two axes": ((40, 10, 20), (10, 1), lambda x: ps.sum(x, axis=(0, 1))),
    "long columns": ((40, 60, 20), (60, 1), lambda x: ps.mean(x, axis=(0, 1))),
}


@pytest.mark.slow("float64")
@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_several_axes_that_cannot_be_one(device: Device, name: str, dtype: type) -> None:
    """They are summed in the order of a contiguous product."""
    shape, other, reduce = WEIGHTED[name]
    x = (1 + RNG.standard_normal(shape) / 10).astype(dtype)
    y = (1 + RNG.standard_normal(other) / 10).astype(dtype)
    given = [ps.asarray(array, device=device) for array in (x, y)]
    result = ps.jit(lambda x, y: reduce(x * y))(*given).numpy()
    np.testing.assert_array_equal(result, reduce((given[0] * given[1]).realize()).numpy())
    host = ps.asarray((x * y).astype(np.float64), device="host")
    np.testing.assert_allclose(result, reduce(host).numpy(), rtol=1e-5)


@pytest.mark.slow("40", "130", "5")
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32, np.int64, np.float64, np.float16])
@pytest.mark.parametrize("length", [5, 40, 77, 130])
def test_other_dtypes(device: Device, dtype: type, length: int) -> None:
    x = RNG.integers(-9, 9, (5, length)).astype(dtype)
    tensor = ps.asarray(x, device=device)
    np.testing.assert_array_equal(ps.sum(tensor, axis=1).numpy(), x.sum(1))
    np.testing.assert_array_equal(ps.max(tensor, axis=1).numpy(), x.max(1))
    np.testing.assert_array_equal(ps.min(tensor, axis=1).numpy(), x.min(1))
    np.testing.assert_array_equal(ps.any(tensor > 8, axis=1).numpy(), (x > 8).any(1))
    np.testing.assert_array_equal(ps.all(tensor > -9, axis=1).numpy(), (x > -9).all(1))
