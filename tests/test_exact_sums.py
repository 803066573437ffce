"""Long sums are as exact as pairwise sums, on every driver, in every memory layout, at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, NATIVE, SMALL, opencl_threads

import penstock as ps
from penstock import Device, nn
from penstock.drivers.driver import Driver
from penstock.drivers.opencl import best_memory_kind

EPS = 2.0**-23  # of float32


KINDS: dict[str, Callable[[], Driver]] = {
    kind: DRIVERS[kind] for kind in ("opencl-device", "host", "cuda", "webgpu") if kind in DRIVERS
}
KINDS["opencl-gpu"] = lambda: opencl_threads("opencl-gpu", best_memory_kind(NATIVE))


pytestmark = pytest.mark.slow("opencl-gpu")


@pytest.fixture(params=KINDS, scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(KINDS[request.param](), SMALL)
    yield made
    made.close()


def long(device: Device, length: int) -> int:
    """The length of a test's axis: shorter if a CPU stands in for a GPU, or if NumPy computes."""
    real = device.capabilities.language in ("opencl", "cuda") and device.name != "opencl-gpu"
    return length if real else length // 8


def filled(device: Device, shape: tuple[int, ...], dtype: str = "float32") -> tuple[ps.Tensor, np.ndarray]:
    """0.1 everywhere, whose multiples are all rounded to the same side; and the same in float64."""
    x = ps.asarray(np.full(shape, 0.1, np.float32), device=device).astype(getattr(ps, dtype))
    return x, x.astype(ps.float32).numpy().astype(np.float64)


def at_each_call(function: Callable[..., ps.Tensor], *tensors: ps.Tensor) -> list[np.ndarray]:
    """The results of a first and a second call, and of a call under jit."""
    calls = (function, function, ps.jit(function))
    return [call(*tensors).astype(ps.float32).numpy().astype(np.float64) for call in calls]


def check(got: np.ndarray, wanted: Any, absolute: Any, count: int, rounding: float = EPS) -> None:
    """By the bound of pairwise sums of `count` values, the sum of whose sizes is `absolute`."""
    bound = (2 * EPS * np.log2(count) + rounding) * np.asarray(absolute)
    error = np.abs(got - wanted)
    assert np.all(error <= bound), f"{float(np.max(error / bound)):.1f} times the bound"


# Shapes and axes; the first length is the one that is shortened.
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((1 << 22,), None),
    ((4194301,), None),  # a prime number: no parts of equal length
    ((1 << 20, 3), 0),
    ((1 << 17, 24), 0),
    ((99991, 3), 0),
    ((1 << 14, 3, 40), (0, 2)),
    ((1 << 13, 8, 64), (0, 1)),
]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_sums(device: Device, shape: tuple[int, ...], axis: Any) -> None:
    shape = (long(device, shape[0]), *shape[1:])
    x, exact = filled(device, shape)
    wanted = exact.sum(axis=axis)
    for got in at_each_call(lambda x: ps.sum(x, axis=axis), x):
        check(got, wanted, wanted, exact.size // wanted.size)


@pytest.mark.parametrize("shape", [(3, 1 << 20), (2, 1 << 18, 6), (2, 3, 99991)])
def test_sums_along_later_axes(device: Device, shape: tuple[int, ...]) -> None:
    axis = int(np.argmax(shape))
    shape = tuple(long(device, length) if at == axis else length for at, length in enumerate(shape))
    x, exact = filled(device, shape)
    for got in at_each_call(lambda x: ps.sum(x, axis=axis), x):
        check(got, exact.sum(axis=axis), exact.sum(axis=axis), shape[axis])


@pytest.mark.parametrize("rows", [1, 3, 4, 6, 128])
def test_a_cpu_adds_the_rows_of_a_column_one_after_the_other(device: Device, rows: int) -> None:
    """However many items it reads per iteration."""
    if device.capabilities.vector_width == 1:
        pytest.skip("threads of a GPU share rows, and NumPy has an order of its own")
    x = np.random.default_rng(0).standard_normal((rows, 37), dtype=np.float32)
    wanted = np.cumsum(x, axis=0)[-1]
    for got in at_each_call(lambda x: ps.sum(x, axis=0), ps.asarray(x, device=device)):
        np.testing.assert_array_equal(got, wanted)


def test_sums_of_a_transposed_matrix(device: Device) -> None:
    x, exact = filled(device, (long(device, 1 << 18), 7))
    for got in at_each_call(lambda x: ps.sum(ps.permute_dims(x, (1, 0)), axis=1), x):
        check(got, exact.sum(axis=0), exact.sum(axis=0), len(exact))


@pytest.mark.slow("opencl-device")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_half_precision_are_in_float32(device: Device, dtype: str, axis: int) -> None:
    shape = (long(device, 1 << 17), 3) if axis == 0 else (3, long(device, 1 << 17))
    x, exact = filled(device, shape, dtype)
    # A sum has the dtype of its items, so it is scaled to fit.
    wanted = exact.sum(axis=axis) / 1024
    rounding = 2.0**-11 if dtype == "float16" else 2.0**-8
    for got in at_each_call(lambda x: ps.sum(x / 1024, axis=axis), x):
        check(got, wanted, wanted, max(shape), rounding)


def test_means_variances_and_norms(device: Device) -> None:
    count = long(device, 1 << 21)
    x = ps.asarray(np.tile(np.array([0.1, 0.3], np.float32), count // 2), device=device)
    exact = x.numpy().astype(np.float64)
    for got in at_each_call(lambda x: ps.mean(x), x):
        check(got, exact.mean(), exact.mean(), count)
    for got in at_each_call(lambda x: ps.var(x), x):
        check(got, exact.var(), np.mean(exact**2), count)
    for got in at_each_call(lambda x: ps.std(x), x):
        check(got, exact.std(), exact.std(), count)
    for got in at_each_call(lambda x: ps.sqrt(ps.sum(x * x)), x):
        check(got, np.sqrt((exact**2).sum()), np.sqrt((exact**2).sum()), count)


def test_softmax_and_its_gradient(device: Device) -> None:
    """Rows so long that the sums of one kernel have several levels, between maxima and what is written."""
    count = long(device, 1 << 18)
    x, exact = filled(device, (3, count))
    wanted = np.full(exact.shape, 1 / count)
    for got in at_each_call(lambda x: nn.functional.softmax(x, axis=1), x):
        check(got, wanted, wanted, count)
    for got in at_each_call(lambda x: ps.grad(lambda x: ps.sum(nn.functional.softmax(x, axis=1) ** 2))(x), x):
        assert np.abs(got).max() <= 1e-5 / count  # all subtracted values are equal


def test_sums_beside_maps_of_the_same_rows(device: Device) -> None:
    """Down columns, of what another kernel computes."""
    x, exact = filled(device, (long(device, 1 << 16), 48))

    def both(x: ps.Tensor) -> ps.Tensor:
        y = ps.exp(x)
        return ps.concat([ps.sum(y, axis=0), ps.sum(x * y, axis=0), y[0]])

    wanted = np.concatenate(
        [np.exp(exact).sum(axis=0), (exact * np.exp(exact)).sum(axis=0), np.exp(exact)[0]]
    )
    for got in at_each_call(both, x):
        check(got, wanted, wanted, len(exact), 8 * EPS)  # the function has an error of its own


@pytest.mark.parametrize("shape", [(1 << 20,), (1 << 18, 3), (3, 1 << 18)])
def test_cumulative_sums(device: Device, shape: tuple[int, ...]) -> None:
    axis = int(np.argmax(shape))
    shape = tuple(max(long(device, length), 3) if length > 3 else 3 for length in shape)
    x, exact = filled(device, shape)
    wanted = np.cumsum(exact, axis=axis)
    for got in at_each_call(lambda x: ps.cumulative_sum(x, axis=axis), x):
        check(got, wanted, wanted, shape[axis])


# Rows, inner length and columns; both ways in which the left side may lie.
PRODUCTS = [(2, 1 << 20, 3), (16, (1 << 17) + 77, 16), (40, 3000, 40), (5, 20000, 264)]


@pytest.mark.slow("True", "1048576")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), PRODUCTS)
def test_products(device: Device, rows: int, inner: int, columns: int, transposed: bool) -> None:
    """Their error is bounded: as if no more than 8,192 products were added up one after the other."""
    inner = long(device, inner)
    x, left = filled(device, (inner, rows) if transposed else (rows, inner))
    y, right = filled(device, (inner, columns))
    wanted = (left.T if transposed else left) @ right
    for got in at_each_call(lambda x, y: (x.T if transposed else x) @ y, x, y):
        error = np.max(np.abs(got - wanted) / wanted)
        assert error <= (8192 / 4 + 2 * np.log2(inner)) * EPS / 2


def test_products_of_float16_do_not_overflow_in_parts(device: Device) -> None:
    inner = long(device, 1 << 19)
    signs = np.where(np.arange(inner) < inner // 2, 1, -1).astype(np.float16)
    x = ps.asarray(np.tile(signs, (2, 1)), device=device)
    y = ps.asarray(np.ones((inner, 2), np.float16), device=device)
    for got in at_each_call(lambda x, y: x @ y, x, y):
        np.testing.assert_array_equal(got, 0)


def test_sums_with_infinities_and_nan_stay_what_they_are(device: Device) -> None:
    x = np.full((3, 1 << 15), 0.1, np.float32)
    x[0, 77], x[1, 9000], x[2, 4], x[2, 20000] = np.inf, np.nan, np.inf, -np.inf
    for got in at_each_call(lambda x: ps.sum(x, axis=1), ps.asarray(x, device=device)):
        np.testing.assert_array_equal(got, [np.inf, np.nan, np.nan])
    for got in at_each_call(lambda x: ps.sum(x, axis=0), ps.asarray(x.T.copy(), device=device)):
        np.testing.assert_array_equal(got, [np.inf, np.nan, np.nan])


@pytest.mark.parametrize(("count", "rows", "width"), [(1 << 20, 3, 1), (1 << 18, 7, 5), (1 << 17, 300, 70)])
@pytest.mark.slow("0.1", "262144", "131072")
@pytest.mark.parametrize("often", [0.9, 0.1])
def test_rows_that_are_added_up_by_index(
    device: Device, count: int, rows: int, width: int, often: float
) -> None:
    """The gradient of an embedding, in which one row gets most, or none of them does."""
    count = long(device, count)
    rng = np.random.default_rng(0)
    ids = np.where(rng.random(count) < often, 1, rng.integers(0, rows, count)).astype(np.int32)
    index, table = ps.asarray(ids, device=device), ps.zeros((rows, width), device=device)
    upstream, exact = filled(device, (count, width))
    wanted = np.stack([np.bincount(ids, column, minlength=rows) for column in exact.T], axis=1)
    gradient = ps.grad(lambda table, upstream: ps.sum(ps.take(table, index, axis=0) * upstream))
    results = at_each_call(lambda table, upstream: gradient(table, upstream), table, upstream)
    for got in results:
        check(got, wanted, wanted, count)
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
