"""`ps.matmul_batch`: many small products as few launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, surface

import penstock as ps
from penstock.execution.structure import Structure
from penstock.runtime import Device

pytestmark = surface

SHAPES = [((3, 4), (4, 5)), ((8, 8), (8, 8)), ((3, 4), (4, 5)), ((1, 7), (7, 1)), ((3, 4), (4, 5))]


def pairs(device: Device, shapes: Any = SHAPES, dtype: Any = np.float32) -> tuple[list[Any], list[Any]]:
    """Left and right factors, as arrays and as tensors."""
    rng = np.random.default_rng(len(shapes))
    arrays = [[rng.integers(-4, 5, shape).astype(dtype) for shape in pair] for pair in shapes]
    return arrays, [[ps.asarray(array, device=device) for array in pair] for pair in arrays]


def batch(tensors: list[Any]) -> list[ps.Tensor]:
    return ps.matmul_batch([left for left, _ in tensors], [right for _, right in tensors])


@pytest.mark.parametrize("jitted", [False, True])
def test_products_are_those_of_numpy(device: Device, jitted: bool) -> None:
    arrays, tensors = pairs(device)
    function = ps.jit(batch) if jitted else batch
    for _ in range(3):  # by NumPy, compiled, replayed
        results = function(tensors)
        assert isinstance(results, list)
        for (left, right), result in zip(arrays, results, strict=True):
            np.testing.assert_array_equal(result.numpy(), left @ right)


def test_large_batches_are_compiled(device: Device) -> None:
    arrays, tensors = pairs(device, [((32, 32), (32, 32))] * 40)  # more items than NumPy would be asked for
    for _ in range(2):
        for (left, right), result in zip(arrays, batch(tensors), strict=True):
            np.testing.assert_array_equal(result.numpy(), left @ right)


@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_are_those_of_the_single_products(device: Device, jitted: bool) -> None:
    arrays, tensors = pairs(device)

    def loss(lefts: list[ps.Tensor], rights: list[ps.Tensor]) -> ps.Tensor:
        total = ps.zeros((), device=device)
        for weight, product in enumerate(ps.matmul_batch(lefts, rights), start=1):
            total = total + weight * (product * product).sum()
        return total

    def gradients(flat: list[ps.Tensor]) -> list[ps.Tensor]:
        leaves = [x.detach().requires_grad_() for x in flat]
        half = len(leaves) // 2
        loss(leaves[:half], leaves[half:]).backward()
        return [x.grad for x in leaves if x.grad is not None]

    flat = [left for left, _ in tensors] + [right for _, right in tensors]
    result = (ps.jit(gradients) if jitted else gradients)(flat)
    for at, (left, right) in enumerate(arrays):
        g = 2 * (at + 1) * (left @ right)
        np.testing.assert_array_equal(result[at].numpy(), g @ right.T)
        np.testing.assert_array_equal(result[at + len(arrays)].numpy(), left.T @ g)


def test_products_of_one_shape_are_one_product() -> None:
    device = Device.over(DRIVERS["host"]())  # whose products are not put together by themselves
    _, tensors = pairs(device)
    lines: list[str] = []

    @ps.jit
    def function(tensors: list[Any]) -> list[ps.Tensor]:
        results = batch(tensors)
        lines.extend(ps.explain(*results).splitlines())
        return results

    function(tensors)
    products = [line for line in lines if "[matmul]" in line]
    assert len(products) == 3, lines  # of three shapes
    device.close()


def test_the_recorded_graph_is_the_same_on_every_device() -> None:
    keys = []
    for kind in ("host", "opencl-svm"):  # without vectors, and with them
        device = Device.over(DRIVERS[kind]())

        @ps.jit
        def function(tensors: list[Any]) -> list[ps.Tensor]:
            results = batch(tensors)
            keys.append(Structure([result._node for result in results], checked=False).key)
            return results

        function(pairs(device)[1])
        device.close()
    assert keys[0] == keys[-1]


def test_reading_one_result_computes_no_product_again() -> None:
    device = Device.over(DRIVERS["host"]())
    arrays, tensors = pairs(device, [((4, 4), (4, 4))] * 6)
    results = batch(tensors)
    assert "matmul" not in ps.explain(*results)
    np.testing.assert_array_equal(results[5].numpy(), arrays[5][0] @ arrays[5][1])
    device.close()


def test_dtypes_are_promoted_and_kept_apart() -> None:
    a, b = ps.ones((2, 2)), ps.ones((2, 2), dtype=ps.int32)
    results = ps.matmul_batch([a, a, b], [a, ps.astype(a, ps.float64), b])
    assert [result.dtype for result in results] == [ps.float32, ps.float64, ps.int32]
    assert [result.tolist() for result in results] == [[[2, 2], [2, 2]]] * 3


def test_what_is_no_batch_is_refused() -> None:
    a, b = ps.ones((2, 3)), ps.ones((3, 2))
    assert ps.matmul_batch([], []) == []
    with pytest.raises(ValueError, match="takes pairs, and 2 and 1 matrices"):
        ps.matmul_batch([a, a], [b])
    with pytest.raises(ValueError, match=r"takes matrices, and shape \(3,\) was given in pair 1"):
        ps.matmul_batch([a, a], [b, ps.ones(3)])
    with pytest.raises(ValueError, match="takes matrices, and ndarray was given in pair 0"):
        ps.matmul_batch([np.ones((2, 3))], [b])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(2, 3\) do not fit"):
        ps.matmul_batch([a], [a])
    with pytest.raises(ValueError, match="do not fit"):
        ps.matmul_batch([a, a], [a, a])
    with pytest.raises(TypeError, match="does not take bool"):
        ps.matmul_batch([ps.ones((2, 2), dtype=ps.bool)], [ps.ones((2, 2), dtype=ps.bool)])


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize(
    ("left", "right"),
    [((1, 5), (5, 1)), ((70, 40), (40, 33)), ((2, 3, 17, 40), (2, 3, 40, 19)), ((65, 700), (700, 2))],
)
def test_products_of_integers_wrap_around_as_those_of_numpy(
    device: Device, dtype: str, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    """Of matrices as they are and transposed, alone and with more in the same kernel."""
    rng, limits = np.random.default_rng(0), np.iinfo(dtype)
    x, y = (rng.integers(limits.min, limits.max, shape, dtype, endpoint=True) for shape in (left, right))
    expected = x @ y
    for turned in (False, True):
        a, b = (
            ps.asarray(np.ascontiguousarray(array.swapaxes(-1, -2)), device=device).mT for array in (x, y)
        )
        if not turned:
            a, b = (ps.asarray(array, device=device) for array in (x, y))
        np.testing.assert_array_equal((a @ b).numpy(), expected)
        with_more = ps.jit(lambda a, b: a @ b + a[..., :1])(a, b).numpy()
        np.testing.assert_array_equal(with_more, expected + x[..., :1])
