"""The first items of sorted rows: by a kernel that keeps few, or by sorting, with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, one_opencl

import penstock as ps
from penstock import Device

pytestmark = one_opencl

SHAPES = [((3, 100), 1), ((2, 1000), -1), ((5, 37, 3), 1), ((1, 33), 0)]
KEPT, SORTED = (1, 3, 64), 65  # numbers of items


@pytest.fixture(scope="module")
def opencl() -> Any:
    made = Device.over(DRIVERS["opencl-device"](), SMALL)
    yield made
    made.close()


def items(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random items, many of which are equal, and special ones."""
    rng = np.random.default_rng(0)
    if dtype.startswith("float"):
        array = rng.integers(-9, 9, shape).astype(dtype)
        special = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf], dtype)
    else:
        limits = np.iinfo(dtype)
        array = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        special = np.array([limits.min, limits.max, 0, 1], dtype)
    places = rng.random(shape) < 0.2
    array[places] = rng.choice(special, places.sum())
    return array


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "int32", "uint32", "int64", "uint64", "int8"]
)
@pytest.mark.parametrize("largest", [False, True])
def test_first_items_are_those_of_a_stable_sort(opencl: Device, dtype: str, largest: bool) -> None:
    for shape, axis in SHAPES:
        array = items(dtype, shape)
        x = ps.asarray(array, device=opencl)
        order = ps.argsort(x, axis=axis, descending=largest).numpy()
        for count in (*KEPT, SORTED) if shape == SHAPES[0][0] else KEPT[1:2]:
            if count > array.shape[axis]:
                continue
            first = np.take(order, np.arange(count), axis)
            values, indices = ps.topk(x, count, axis=axis, largest=largest)
            np.testing.assert_array_equal(indices.numpy(), first)
            np.testing.assert_array_equal(values.numpy(), np.take_along_axis(array, first, axis))


def test_rows_that_replace_the_kept_items_at_each_step(opencl: Device) -> None:
    array = np.arange(3000, dtype=np.float32).reshape(3, 1000)
    for largest in (False, True):
        values, indices = ps.topk(ps.asarray(array, device=opencl), 5, largest=largest)
        expected = np.arange(999, 994, -1) if largest else np.arange(5)
        np.testing.assert_array_equal(indices.numpy(), np.tile(expected, (3, 1)))
        np.testing.assert_array_equal(values.numpy(), array[:, expected])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_sums_of_exponentials(opencl: Device, dtype: Any) -> None:
    """Not by the host: of infinities and large differences, too."""
    ends = [-np.inf, -700, -3, 0, 0.5, 1, 60, 700, np.inf, np.nan]
    x, y = (side.reshape(-1).astype(dtype) for side in np.meshgrid(ends, ends))
    with np.errstate(all="ignore"):
        exact = np.logaddexp(x.astype(np.float64), y.astype(np.float64))
    tensors = [ps.asarray(side, device=opencl) for side in (x, y)]
    assert "host" not in str(ps.explain(ps.logaddexp(*tensors)))
    got = ps.logaddexp(*tensors).numpy()
    np.testing.assert_allclose(
        got, exact.astype(dtype), rtol=4 * np.finfo(dtype).eps, atol=np.finfo(dtype).eps
    )
