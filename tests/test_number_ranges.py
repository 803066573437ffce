"""Integers that a dtype cannot hold: comparisons are right, other operations raise; nothing wraps around."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
ARITHMETIC = [
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.pow),
    *(operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
]
IN_PLACE = [operator.iadd, operator.isub, operator.imul, operator.iand, operator.ilshift]


def beyond(dtype: str) -> list[int]:
    limits = np.iinfo(dtype)
    return [int(limits.max) + 1, int(limits.min) - 1, 3 * (int(limits.max) + 1) + 1, -(1 << 100), 1 << 100]


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_comparisons_with_integers_beyond_the_dtype_are_right(dtype: str) -> None:
    limits = np.iinfo("int64" if dtype == "bool" else dtype)
    array = np.array([0, 1] if dtype == "bool" else [limits.min, 0, 1, limits.max], dtype)
    tensor = ps.asarray(array)
    exact = array.astype(object)  # Python's own integers
    for number in [*beyond(str(limits.dtype)), 0, 1]:
        for compare in COMPARISONS:
            for result, expected in (
                (compare(tensor, number), compare(exact, number)),
                (compare(number, tensor), compare(number, exact)),
            ):
                assert result.dtype == ps.bool
                assert result.tolist() == expected.astype(bool).tolist(), (compare, number)
    inside = ps.jit(lambda x: x < int(limits.max) + 1)
    assert inside(tensor).tolist() == inside(tensor).tolist() == [True] * array.size


@pytest.mark.parametrize("dtype", INTEGERS)
def test_arithmetic_with_integers_beyond_the_dtype_is_refused(dtype: str) -> None:
    tensor = ps.asarray(np.array([1, 2], dtype))
    for number in beyond(dtype):
        for operate in ARITHMETIC:
            with pytest.raises(OverflowError, match=f"does not fit into {dtype}, which goes from"):
                operate(tensor, number)
            with pytest.raises(OverflowError, match=f"does not fit into {dtype}"):
                operate(number, tensor)
        for operate in IN_PLACE:
            with pytest.raises(OverflowError, match=f"does not fit into {dtype}"):
                operate(tensor, number)
        assert tensor.tolist() == [1, 2]


MAKERS: dict[str, Callable[[ps.Tensor, int], Any]] = {
    "full": lambda x, n: ps.full((2,), n, dtype=x.dtype),
    "full by a float": lambda x, n: ps.full((2,), float(n * 4), dtype=x.dtype),
    "full_like": lambda x, n: ps.full_like(x, n),
    "asarray of a number": lambda x, n: ps.asarray(n, dtype=x.dtype),
    "asarray of a list": lambda x, n: ps.asarray([1, n], dtype=x.dtype),
    "arange to": lambda x, n: ps.arange(n, n + 2, dtype=x.dtype),
    "arange by": lambda x, n: ps.arange(0, 3 * n, n, dtype=x.dtype),
    "linspace": lambda x, n: ps.linspace(0, n * 4, 3, dtype=x.dtype),
    "where": lambda x, n: ps.where(x > 1, x, n),
    "maximum": lambda x, n: ps.maximum(x, n),
    "item": lambda x, n: x.__setitem__(0, n),
    "items": lambda x, n: x.__setitem__(slice(None), [0, n]),
    "items by a mask": lambda x, n: x.__setitem__(x > 1, n),
    "formula": lambda x, n: ps.kernel(f"x + {n}")(x),
    "argument of a formula": lambda x, n: ps.kernel("x + y")(x, n),
}


@pytest.mark.parametrize("name", MAKERS)
def test_values_beyond_the_dtype_are_refused(name: str) -> None:
    for dtype in INTEGERS:
        tensor = ps.asarray(np.array([1, 2], dtype))
        for number in beyond(dtype)[:2]:
            with pytest.raises(OverflowError):
                MAKERS[name](tensor, number)
        assert tensor.tolist() == [1, 2]


def test_clip_takes_limits_beyond_the_dtype_where_they_have_a_meaning() -> None:
    x = ps.asarray(np.array([0, 7, 255], np.uint8))
    assert ps.clip(x, -5, 300).tolist() == [0, 7, 255]
    assert ps.clip(x, -(1 << 70), 9).tolist() == [0, 7, 9]
    assert ps.clip(x, np.int64(5), np.int64(300)).tolist() == [5, 7, 255]
    with pytest.raises(OverflowError, match="300 does not fit into uint8"):
        ps.clip(x, 300)
    with pytest.raises(OverflowError, match="-1 does not fit into uint8"):
        ps.clip(x, max=-1)


def test_numbers_that_are_no_integers_of_a_dtype() -> None:
    with pytest.raises(ValueError, match="nan cannot become int32"):
        ps.full((2,), float("nan"), dtype=ps.int32)
    with pytest.raises(ValueError, match="inf cannot become uint8"):
        ps.full((2,), float("inf"), dtype=ps.uint8)
    with pytest.raises(TypeError, match="no imaginary part"):
        ps.full((2,), 1j, dtype=ps.float32)
    with pytest.raises(TypeError, match="full takes a number, and str was given"):
        ps.full((2,), "1")  # type: ignore[arg-type]
    with pytest.raises(OverflowError, match="1329 bits does not fit into float32"):
        ps.asarray([1.0]) * 10**400
    assert (ps.asarray([1.0]) * 10**20).item() == np.float32(1e20)


# The constants of formulas are Python's integers

FORMULAS = {
    "x * 10**20": 1e20,
    "x * 2**63": 2.0**63,
    "x + (2**64 - 2**64)": 1.0,
    "x * (2**62 + 2**62)": 2.0**63,
    "x * (3 * 2**62)": 3 * 2.0**62,
    "x * -(-2**63)": 2.0**63,
    "x * (1 << 70)": 2.0**70,
    "x * ((1 << 70) >> 68)": 4.0,
    "x * (10**20 // 10**19)": 10.0,
    "x * (10**20 % 7)": float(10**20 % 7),
    "x * (-7 // 2)": -4.0,
    "x * 2**-1": 0.5,
    "x * maximum(2**63, 2**64)": 2.0**64,
    "x * abs(-2**63)": 2.0**63,
    "x * square(2**32)": 2.0**64,
    "x * sqrt(2**80)": 2.0**40,
    "x * (10**20 * 0.5)": 5e19,
    "x if 10**20 > 10**19 else -x": 1.0,
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_constants_of_formulas_do_not_wrap(formula: str) -> None:
    x = ps.asarray([1.0], dtype=ps.float64)
    np.testing.assert_allclose(ps.kernel(formula)(x).numpy(), [FORMULAS[formula]], rtol=1e-12)


def test_constants_of_formulas_that_no_dtype_holds_are_refused() -> None:
    for formula in ("x * 10**10**10", "x * (1 << 10**9)", "x * 10**400"):
        with pytest.raises(OverflowError, match="is beyond"):
            ps.kernel(formula)(ps.asarray([1.0]))
    with pytest.raises(OverflowError, match="100000000000000000000 does not fit into int64") as refused:
        ps.kernel("x * 10**20")(ps.asarray([1]))
    assert "in the kernel" in refused.value.__notes__[0]


# Gradients where a function has none


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(4,), (1,), (3, 2)])
def test_the_gradient_of_the_deviation_of_a_constant_is_0(dtype: str, shape: tuple[int, ...]) -> None:
    for correction in (0, 1) if shape != (1,) else (0,):
        x = ps.asarray(np.full(shape, 2.5, dtype)).requires_grad_()
        value = ps.std(x, correction=correction)
        value.backward()
        assert value.item() == 0
        assert x.grad is not None
        assert not np.any(x.grad.numpy())


def test_constant_rows_leave_the_gradients_of_others_alone() -> None:
    array = np.array([[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]])
    x = ps.asarray(array).requires_grad_()
    ps.sum(ps.std(x, axis=1)).backward()
    row = array[1]
    expected = [[0, 0, 0], (row - row.mean()) / (3 * row.std())]
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["hypot", "atan2"])
def test_the_gradients_at_the_origin_are_0_and_right_beside_it(name: str) -> None:
    x, y = (
        ps.asarray(np.array(v, np.float32)).requires_grad_() for v in ([0, 0, 3, 1e-25], [0, 2, 4, 1e-25])
    )
    ps.sum(getattr(ps, name)(x, y)).backward()
    a, b = np.array([0, 3, 1e-25]), np.array([2, 4, 1e-25])
    length = np.hypot(a, b)
    expected = (a / length, b / length) if name == "hypot" else (b / length / length, -a / length / length)
    for tensor, slope in zip((x, y), expected, strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(tensor.grad.numpy(), [0, *slope], rtol=1e-5)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_running_extremes_know_the_ends_of_a_dtype(dtype: str) -> None:
    ends = np.iinfo(dtype)
    array = np.array([3, ends.max, 3, 2, ends.min, 1, ends.min, ends.max], dtype)
    x = ps.asarray(array)
    assert ps.cummin(x, 0).values.tolist() == np.minimum.accumulate(array).tolist()
    assert ps.cummax(x, 0).values.tolist() == np.maximum.accumulate(array).tolist()
    assert ps.cummin(x, 0).indices.tolist() == [0, 0, 2, 3, 4, 4, 6, 6]  # of equal items the last


@pytest.mark.parametrize("dtype", INTEGERS)
def test_remainders_of_the_ends_of_a_dtype(dtype: str) -> None:
    ends = np.iinfo(dtype)
    numbers = np.unique(np.array([ends.min, ends.min + 1, 0, 1, 2, 3, 7, ends.max - 1, ends.max], dtype))
    if dtype[0] == "i":
        numbers = np.concatenate([numbers, -numbers])
    x, y = (array.ravel() for array in np.meshgrid(numbers, numbers))
    with np.errstate(all="ignore"):
        expected = np.fmod(x, y)
    assert ps.fmod(ps.asarray(x), ps.asarray(y)).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_closeness_of_the_ends_of_a_dtype(dtype: str) -> None:
    ends = np.iinfo(dtype)
    numbers = np.array([ends.min, ends.min + 1, 0, 1, 3, 5, ends.max - 1, ends.max], dtype)
    x, y = (array.ravel() for array in np.meshgrid(numbers, numbers))
    distance = np.abs(x.astype(object) - y.astype(object))
    for limits in (
        {"rtol": 0, "atol": 0},
        {"rtol": 0, "atol": 2},
        {"rtol": 0.5, "atol": 1},
        {"rtol": 3, "atol": 2},
    ):
        close = (distance <= limits["atol"] + limits["rtol"] * np.abs(y.astype(object))).tolist()
        assert ps.isclose(ps.asarray(x), ps.asarray(y), **limits).tolist() == close, limits
        assert ps.isclose(ps.asarray(x), int(ends.max), **limits).tolist()[-8:] == close[-8:], limits
    assert not ps.allclose(ps.asarray(x), ps.asarray(y))
