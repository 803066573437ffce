"""Tensors beside NumPy's arrays and scalars: always tensors, with gradients, on every path."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import penstock as ps

A = np.array([[1.5, -2.0, 0.5], [3.0, 4.0, -1.0]], np.float32)
B = np.array([[2.0, 0.5, -1.0], [1.0, 3.0, 2.0]], np.float32)
C, D = np.array([[7, 2, 3], [4, 5, 6]], np.int32), np.array([[1, 2, 0], [3, 1, 2]], np.int32)
REALS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
INTEGERS = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift, operator.pow]
IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
}
SCALARS = [
    np.bool_(True),
    *(np.dtype(name).type(2) for name in ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64")),
    *(np.dtype(name).type(2.5) for name in ("float16", "float32", "float64")),
    ml_dtypes.bfloat16(2.5),
]


def named(values: list[Any]) -> dict[str, Any]:
    return {"argvalues": values, "ids": [getattr(v, "__name__", type(v).__name__) for v in values]}


def agrees(result: Any, expected: Any) -> None:
    assert type(result) is ps.Tensor
    assert result.dtype == expected.dtype
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("operate", **named([*REALS, *COMPARISONS]))
def test_operators_with_arrays_on_either_side(operate: Callable[..., Any]) -> None:
    agrees(operate(ps.asarray(A), B), operate(A, B))
    agrees(operate(A, ps.asarray(B)), operate(A, B))
    agrees(operate(ps.asarray(A), B[0]), operate(A, B[0]))
    agrees(operate(A[0], ps.asarray(B)), operate(A[0], B))


@pytest.mark.parametrize("operate", **named([*REALS, *COMPARISONS, *INTEGERS]))
def test_operators_of_integers_with_arrays(operate: Callable[..., Any]) -> None:
    if operate in (operator.floordiv, operator.mod):
        agrees(operate(D, ps.asarray(C)), operate(D, C))
        return
    with np.errstate(divide="ignore"):
        expected = operate(C, D).astype(np.float32) if operate is operator.truediv else operate(C, D)
    agrees(operate(ps.asarray(C), D), expected)
    agrees(operate(C, ps.asarray(D)), expected)


@pytest.mark.parametrize("number", **named(SCALARS))
def test_a_numpy_scalar_counts_as_a_python_number(number: Any) -> None:
    plain = number.item()
    tensor = ps.asarray(A)
    for operate in (*REALS, *COMPARISONS):
        agrees(operate(tensor, number), operate(A, plain))
        agrees(operate(number, tensor), operate(plain, A))
    agrees(ps.add(tensor, number), A + plain)
    agrees(ps.maximum(number, tensor), np.maximum(plain, A))
    agrees(ps.where(A > 0, tensor, number), np.where(A > 0, A, np.float32(plain)))
    for operate, meaning in IN_PLACE.items():
        changed = ps.asarray(np.abs(A))
        result = operate(changed, number)
        assert result is changed
        agrees(changed, meaning(np.abs(A), plain))


@pytest.mark.parametrize("operate", **named(list(IN_PLACE)))
def test_in_place_with_an_array(operate: Callable[..., Any]) -> None:
    changed = ps.asarray(np.abs(A))
    same = operate(changed, np.abs(B))
    assert same is changed
    agrees(changed, IN_PLACE[operate](np.abs(A), np.abs(B)))


def test_an_array_has_its_own_dtype_in_the_promotion() -> None:
    tensor = ps.asarray(A)
    assert (tensor * B.astype(np.float64)).dtype == ps.float64
    assert (B.astype(np.float16) * tensor).dtype == ps.float32
    assert (tensor.astype(ps.bfloat16) * np.ones(3, ml_dtypes.bfloat16)).dtype == ps.bfloat16
    assert (tensor * np.array(2.0)).dtype == ps.float64  # without axes it is an array all the same
    assert (tensor * np.float64(2.0)).dtype == ps.float32
    assert (ps.asarray(C) * np.float64(2.5)).dtype == ps.float32
    assert (ps.asarray(C) * np.int64(2)).dtype == ps.int32
    assert (tensor * np.complex128(1j)).dtype == ps.complex64


LOSSES: dict[str, Callable[[Any], Any]] = {
    "array right": lambda t: t * B,
    "array left": lambda t: B * t,
    "scalar right": lambda t: t * np.float32(2) - np.float64(0.5) + np.float16(3),
    "scalar left": lambda t: np.float32(2) / (np.float64(3) + t * t),
    "minus": lambda t: B - t,
    "power": lambda t: np.float32(2) ** t,
    "matmul right": lambda t: t @ B.T,
    "matmul left": lambda t: B.T @ t,
    "function": lambda t: ps.add(B, ps.multiply(t, B)),
    "where": lambda t: ps.where(A > 0, t, B) * B,
    "matmul": lambda t: ps.matmul(B.T, t),
    "vecdot": lambda t: ps.vecdot(B, t),
    "tensordot": lambda t: ps.tensordot(t, B, axes=2),
    "concat": lambda t: ps.concat([B, t]) * 2,
    "stack": lambda t: ps.stack([t, B]) * 2,
    "ufunc": lambda t: np.tanh(t) * np.hypot(t, B),
    "ufunc of a tensor alone": lambda t: np.exp(np.negative(t)),
    "maximum": lambda t: np.maximum(t, B),
    "minimum by clip": lambda t: ps.clip(t, np.float64(-1.5), np.array(3.5, np.float32)),
    "kernel": lambda t: ps.kernel("x * y + b")(t, B, np.float32(2)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_pass_beside_numpy(name: str) -> None:
    """Against finite differences of the same function, in float64."""
    loss = LOSSES[name]
    tensor = ps.asarray(A.astype(np.float64)).requires_grad_()
    result = loss(tensor)
    assert type(result) is ps.Tensor
    ps.sum(result).backward()
    assert tensor.grad is not None
    expected = np.zeros(A.shape)
    for place in np.ndindex(A.shape):
        step = np.zeros(A.shape)
        step[place] = 1e-6
        ends = [ps.sum(loss(ps.asarray(A + sign * step))).item() for sign in (1, -1)]
        expected[place] = (ends[0] - ends[1]) / 2e-6
    np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-5, atol=1e-7)


UFUNCS = [value for value in vars(np).values() if isinstance(value, np.ufunc)]


@pytest.mark.parametrize("ufunc", **named(sorted(set(UFUNCS), key=lambda ufunc: ufunc.__name__)))
def test_a_ufunc_gives_the_right_tensor_or_is_refused(ufunc: np.ufunc) -> None:
    if ufunc.signature is not None:  # of matrices
        right = B.T if ufunc is np.matmul else B
        if ufunc.__name__ in vars(ps):
            agrees(ufunc(A, ps.asarray(right)), ufunc(A, right))
        else:
            with pytest.raises(TypeError, match="is no function of tensors"):
                ufunc(A, ps.asarray(right))
        return
    outcomes = 0
    floating = np.abs(A) + 1
    for value, other in ((floating, np.abs(B) + 1), (C, D + 1), (A > 0, B > 0)):
        arrays = (value, other)[: ufunc.nin]
        try:
            with np.errstate(all="ignore"):
                expected = ufunc(*arrays)
        except TypeError:
            continue
        if value is not floating and (ufunc is np.reciprocal or np.result_type(*expected) == np.float16):
            continue  # where NumPy's dtypes for truth values and integers are others than the standard's
        try:
            result = ufunc(*arrays[:-1], ps.asarray(arrays[-1]))
        except TypeError:
            continue
        outcomes += 1
        assert type(result) is ps.Tensor
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5)
    assert outcomes or ufunc.__name__ not in vars(ps)


def test_what_ufuncs_cannot_do_with_tensors_is_refused_by_name() -> None:
    tensor, array = ps.asarray(A), A.copy()
    with pytest.raises(TypeError, match=r"np.add cannot write a tensor into ndarray"):
        array += tensor
    assert np.array_equal(array, A)
    with pytest.raises(TypeError, match=r"np.add.reduce"):
        np.add.reduce(tensor)
    with pytest.raises(TypeError, match="with dtype"):
        np.multiply(tensor, B, dtype=np.float64)
    with pytest.raises(TypeError, match=r"np.cbrt is no function of tensors"):
        np.cbrt(tensor)
    assert type(np.asarray(tensor)) is np.ndarray


@pytest.mark.parametrize(
    "wrong", [np.ma.array(B), B.view(np.matrix), np.array(["a"]), np.datetime64("2020"), "a"]
)
def test_what_a_tensor_cannot_stand_beside_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        ps.add(ps.asarray(A), wrong)
    with pytest.raises(TypeError):
        ps.asarray(A) + wrong
    with pytest.raises(TypeError):
        ps.asarray(A) @ wrong


def test_functions_of_several_tensors_take_arrays() -> None:
    tensor, index = ps.asarray(A), np.array([1, 0])
    agrees(ps.take(tensor, index, axis=0), A[index])
    agrees(ps.take_along_axis(tensor, np.argsort(A), axis=-1), np.sort(A))
    agrees(ps.searchsorted(ps.asarray(np.sort(A[0])), B[0]), np.searchsorted(np.sort(A[0]), B[0]))
    agrees(ps.broadcast_arrays(B[0], tensor)[0], np.broadcast_to(B[0], (2, 3)))
    agrees(ps.meshgrid(ps.asarray(A[0]), B[0])[1], np.meshgrid(A[0], B[0])[1])
    agrees(ps.diff(tensor, prepend=B), np.diff(A, prepend=B))
    agrees(ps.repeat(tensor, np.array([2, 1]), axis=0), np.repeat(A, [2, 1], axis=0))


def test_arrays_inside_a_jitted_function_are_not_stale() -> None:
    array, rows = B.copy(), np.vstack([B, B])
    scaled = ps.jit(lambda t: (t * array + rows[:2]) @ ps.asarray(array, dtype=ps.float32).T)
    tensor = ps.asarray(A)
    for change in (0, 1, 2):
        array += change
        rows -= change
        agrees(scaled(tensor), (A * array + rows[:2]) @ array.T)


def test_gradients_beside_numpy_inside_jit() -> None:
    loss = ps.jit(ps.grad(lambda t: ps.sum(np.float32(3) * (B * t) ** 2)))
    for _ in range(2):
        agrees(loss(ps.asarray(A)), 6 * A * B * B)
