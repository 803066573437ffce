"""The names that PyTorch's and NumPy's users type: values against NumPy, gradients against differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import name_stubs
import numpy as np
import pytest
from conftest import DRIVERS, SMALL, examples, one_opencl
from differences import check_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import Device, names
from penstock.tensor import arithmetic
from penstock.testing import assert_fused_equal

pytestmark = one_opencl
Function = Callable[..., Any]


@pytest.fixture(scope="module", params=[kind for kind in DRIVERS if kind != "opencl-device"])
def on(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = Device.over(DRIVERS[request.param](), SMALL)
    yield device
    device.close()


def array(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


A, B, POSITIVE = array(3, 4), array(3, 4, seed=1), np.abs(array(3, 4)) + 0.5
INDEX = np.array([[0, 2, 1, 0], [2, 2, 0, 1]])
MASK = array(3, 4, seed=2) > 0


def scattered(a: np.ndarray, index: np.ndarray, source: np.ndarray, add: bool) -> np.ndarray:
    result = a.copy()
    columns = np.arange(index.shape[1])[None].repeat(len(index), 0)
    if add:
        np.add.at(result, (index, columns), source[: len(index)])
    else:
        result[index, columns] = source[: len(index)]
    return result


def windows(a: np.ndarray, size: int, step: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(a, size, axis=1)[:, ::step]


def running_logsumexp(a: np.ndarray, axis: int) -> np.ndarray:
    return np.logaddexp.accumulate(a.astype(np.float64), axis).astype(a.dtype)


# A call in one of the spellings, the same with NumPy, and the arguments.
CALLS: dict[str, tuple[Function, Function, tuple[np.ndarray, ...]]] = {
    "sum": (lambda x: x.sum(dim=-1, keepdim=True), lambda a: a.sum(-1, keepdims=True), (A,)),
    "positional": (lambda x: ps.sum(x, 0), lambda a: a.sum(0), (A,)),
    "all axes": (lambda x: x.mean(dim=()), lambda a: a.mean(), (A,)),
    "methods": (lambda x: x.exp().log1p().sqrt(), lambda a: np.sqrt(np.log1p(np.exp(a))), (A,)),
    "amax": (lambda x: ps.amax(x, dim=(0, 1)), lambda a: a.max(), (A,)),
    "max": (lambda x: x.max(1).values, lambda a: a.max(1), (A,)),
    "min": (lambda x: ps.min(x, dim=0, keepdim=True)[0], lambda a: a.min(0, keepdims=True), (A,)),
    "max of two": (lambda x, y: ps.max(x, y), np.maximum, (A, B)),
    "argmax": (lambda x: x.argmax(dim=1), lambda a: a.argmax(1), (A,)),
    "var": (lambda x: x.var(), lambda a: a.var(ddof=1), (A,)),
    "std": (lambda x: ps.std(x, dim=1, unbiased=False), lambda a: a.std(1), (A,)),
    "std by axis": (lambda x: x.std(axis=1), lambda a: a.std(1), (A,)),
    "reshape": (lambda x: x.reshape(2, 6), lambda a: a.reshape(2, 6), (A,)),
    "view": (lambda x: x.view(-1, 2), lambda a: a.reshape(-1, 2), (A,)),
    "permute": (lambda x: x.permute(1, 0), lambda a: a.T, (A,)),
    "transpose": (lambda x: x.transpose(0, -1), lambda a: a.T, (A,)),
    "all reversed": (lambda x: ps.transpose(x), lambda a: a.T, (A,)),
    "flatten": (lambda x: x.unflatten(1, (2, -1)).flatten(1), lambda a: a, (A,)),
    "chunk": (lambda x: x.chunk(2, dim=1)[1], lambda a: a[:, 2:], (A,)),
    "split": (lambda x: ps.split(x, [1, 3], dim=1)[1], lambda a: a[:, 1:], (A,)),
    "tensor_split": (lambda x: ps.tensor_split(x, 3, dim=1), lambda a: np.array_split(a, 3, 1), (A,)),
    "cat": (lambda x, y: ps.cat([x, y], dim=1), lambda a, b: np.concatenate([a, b], 1), (A, B)),
    "gather": (
        lambda x: x.gather(0, ps.asarray(INDEX, device=x.device)),
        lambda a: np.take_along_axis(a, INDEX, 0),
        (A,),
    ),
    "scatter": (
        lambda x, y: x.scatter(0, ps.asarray(INDEX[:1], device=x.device), y),
        lambda a, b: scattered(a, INDEX[:1], b, add=False),
        (A, B),
    ),
    "scatter_add": (
        lambda x, y: ps.scatter_add(x, 0, ps.asarray(INDEX, device=x.device), y),
        lambda a, b: scattered(a, INDEX, b, add=True),
        (A, B),
    ),
    "index_select": (
        lambda x: x.index_select(1, ps.asarray([3, 0], device=x.device)),
        lambda a: a[:, [3, 0]],
        (A,),
    ),
    "index_add": (
        lambda x, y: x.index_add(0, ps.asarray([1, 1, 0], device=x.device), y, alpha=2),
        lambda a, b: a + 2 * np.stack([b[2], b[0] + b[1], 0 * b[0]]),
        (A, B),
    ),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1.0), lambda a: np.where(a > 0, -1, a), (A,)),
    "topk": (lambda x: x.topk(2, dim=1)[0], lambda a: -np.sort(-a, 1)[:, :2], (A,)),
    "kthvalue": (lambda x: ps.kthvalue(x, 2, dim=0)[0], lambda a: np.sort(a, 0)[1], (A,)),
    "median": (lambda x: x.median(dim=0).values, lambda a: np.sort(a, 0)[1], (A,)),
    "quantile": (
        lambda x: ps.quantile(x, [0.2, 0.5], dim=1),
        lambda a: np.quantile(a, [0.2, 0.5], axis=1),
        (A,),
    ),
    "cumsum": (lambda x: x.cumsum(dim=0), lambda a: a.cumsum(0), (A,)),
    "cumprod": (lambda x: ps.cumprod(x, 1), lambda a: a.cumprod(1), (A,)),
    "cummax": (lambda x: ps.cummax(x, dim=1).values, lambda a: np.maximum.accumulate(a, 1), (A,)),
    "cummin": (lambda x: x.cummin(0).values, lambda a: np.minimum.accumulate(a, 0), (A,)),
    "logcumsumexp": (lambda x: ps.logcumsumexp(x * 50, 1), lambda a: running_logsumexp(a * 50, 1), (A,)),
    "logsumexp": (lambda x: x.logsumexp(dim=1), lambda a: np.log(np.exp(a).sum(1)), (A,)),
    "softmax": (lambda x: x.softmax(-1), lambda a: np.exp(a) / np.exp(a).sum(-1, keepdims=True), (A,)),
    "norm": (lambda x: x.norm(p=3, dim=1), lambda a: (np.abs(a) ** 3).sum(1) ** (1 / 3), (A,)),
    "einsum": (lambda x, y: ps.einsum("ij,kj->ik", x, y), lambda a, b: a @ b.T, (A, B)),
    "outer": (lambda x, y: ps.outer(x[0], y[1]), lambda a, b: np.outer(a[0], b[1]), (A, B)),
    "bmm": (lambda x, y: x[None].bmm(y[None].mT), lambda a, b: (a @ b.T)[None], (A, B)),
    "baddbmm": (
        lambda x, y: ps.baddbmm(x[None, :, :3], x[None], y[None].mT, beta=0.5, alpha=2),
        lambda a, b: (0.5 * a[:, :3] + 2 * a @ b.T)[None],
        (A, B),
    ),
    "tril": (lambda x: x.tril(diagonal=1), lambda a: np.tril(a, 1), (A,)),
    "diag": (
        lambda x: x[0].diag(1) + ps.diag(x @ x.mT @ x).sum(),
        lambda a: np.diag(a[0], 1) + np.trace(a @ a.T @ a),
        (A,),
    ),
    "unfold": (lambda x: x.unfold(1, 2, 2), lambda a: windows(a, 2, 2), (A,)),
    "roll": (lambda x: x.roll(shifts=1, dims=0), lambda a: np.roll(a, 1, 0), (A,)),
    "flip": (lambda x: x.flip(0, 1), lambda a: a[::-1, ::-1], (A,)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), lambda a: a.clip(-0.5, 0.5), (A,)),
    "lerp": (lambda x, y: x.lerp(y, 0.3), lambda a, b: a + 0.3 * (b - a), (A, B)),
    "erf": (lambda x: x.erf(), np.vectorize(math.erf, otypes="f"), (A,)),
    "erfc": (lambda x: x.erfc(), np.vectorize(math.erfc, otypes="f"), (A,)),
    "lgamma": (
        lambda x: (x * 4).lgamma(),
        lambda a: np.vectorize(math.lgamma, otypes="f")(a * 4),
        (POSITIVE,),
    ),
    "round": (lambda x: x.detach().round(decimals=1), lambda a: a.round(1), (A,)),
    "div": (lambda x, y: ps.div(x, y, rounding_mode="trunc"), lambda a, b: np.trunc(a / b), (A, B)),
    "fmod": (lambda x, y: x.fmod(y), np.fmod, (A, POSITIVE)),
    "alpha": (lambda x, y: x.add(y, alpha=2).sub(y), lambda a, b: a + b, (A, B)),
    "expand": (lambda x: x[:, None].expand(-1, 2, 4), lambda a: a[:, None].repeat(2, 1), (A,)),
    "repeat": (lambda x: x.repeat(2, 1), lambda a: np.tile(a, (2, 1)), (A,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=1), lambda a: a.repeat(2, 1), (A,)),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(0).squeeze(), lambda a: a, (A,)),
    "where": (lambda x, y: x.where(x > 0, y), lambda a, b: np.where(a > 0, a, b), (A, B)),
    "reflect": (
        lambda x: ps.pad(x, (2, 1), mode="reflect"),
        lambda a: np.pad(a, ((0, 0), (2, 1)), "reflect"),
        (A,),
    ),
    "replicate": (
        lambda x: ps.pad(x, (2, 1, 1, 0), "replicate"),
        lambda a: np.pad(a, ((1, 0), (2, 1)), "edge"),
        (A,),
    ),
    "circular": (
        lambda x: ps.pad(x, (2, 1), "circular"),
        lambda a: np.pad(a, ((0, 0), (2, 1)), "wrap"),
        (A,),
    ),
    "constant": (
        lambda x: ps.pad(x, (1, -1), value=3.0),
        lambda a: np.pad(a, ((0, 0), (1, 0)), constant_values=3)[:, :-1],
        (A,),
    ),
    "nearest": (lambda x: ps.interpolate(x[None], scale_factor=2), lambda a: a[None].repeat(2, 2), (A,)),
    "area": (
        lambda x: ps.interpolate(x[None], 2, mode="area"),
        lambda a: a.reshape(1, 3, 2, 2).mean(-1),
        (A,),
    ),
    "linear": (
        lambda x: ps.interpolate(x[None], 7, mode="linear", align_corners=True),
        lambda a: np.stack([np.interp(np.linspace(0, 3, 7), np.arange(4), row) for row in a])[None],
        (A,),
    ),
    "nan_to_num": (lambda x: (x / 0).nan_to_num(posinf=1.0, neginf=-1.0), np.sign, (A,)),
}


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", CALLS)
def test_a_spelling_agrees_with_numpy(on: Device, name: str) -> None:
    function, reference, arrays = CALLS[name]
    result = function(*(ps.asarray(array, device=on) for array in arrays))
    expected = reference(*arrays)
    for ours, theirs in zip(
        *[x if isinstance(x, (tuple, list)) else [x] for x in (result, expected)], strict=True
    ):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-5, atol=2e-6)


ROUGH = {"round", "div", "median", "argmax"}  # no slope, or none that differences would find
SLOW_TO_COMPILE = pytest.mark.slow(*(name for number, name in enumerate(CALLS) if number % 4))


@SLOW_TO_COMPILE
@pytest.mark.parametrize("name", CALLS)
def test_the_same_inside_jit(name: str) -> None:
    function, reference, arrays = CALLS[name]
    assert_fused_equal(function, *arrays, reference=reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ROUGH | {"nan_to_num"}])
def test_gradients_agree_with_differences(name: str) -> None:
    function, _, arrays = CALLS[name]
    check_gradients(function, *arrays)


# Names that the standard has, too


def test_dim_says_pytorch_and_axis_the_standard(on: Device) -> None:
    x = ps.asarray(A, device=on)
    values, indices = ps.max(x, dim=1)
    assert ps.max(x, axis=1).tolist() == values.tolist()
    assert indices.tolist() == A.argmax(1).tolist()
    assert ps.sort(x).tolist() == np.sort(A).tolist()
    assert x.sort().indices.tolist() == ps.sort(x, dim=-1)[1].tolist() == np.argsort(A).tolist()
    assert x.sort(axis=0).tolist() == np.sort(A, 0).tolist()
    np.testing.assert_allclose(ps.var(x).item(), A.var(), rtol=1e-5)
    np.testing.assert_allclose(ps.var(x, dim=0).numpy(), A.var(0, ddof=1), rtol=1e-5)
    np.testing.assert_allclose(ps.var(x, 0, keepdim=True).numpy(), A.var(0, ddof=1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(x.var(axis=0).numpy(), A.var(0), rtol=1e-5)
    assert [part.tolist() for part in ps.nonzero(x > 0)] == [part.tolist() for part in np.nonzero(A > 0)]
    assert (x > 0).nonzero().tolist() == np.argwhere(A > 0).tolist()
    assert x[:, None].squeeze(0).shape == (3, 1, 4)
    with pytest.raises(ValueError, match="is not of length 1"):
        ps.squeeze(x, 0)
    assert ps.repeat(x, 2, axis=0).shape == (6, 4)
    assert x.repeat(1, 2).shape == (3, 8)
    assert x.equal(x) is True
    assert ps.equal(x, x).shape == x.shape
    with pytest.raises(TypeError, match=r"a pair of values and indices, as in PyTorch; take \.values"):
        _ = ps.max(x, 0) * 2


def test_a_tensor_without_axes_has_an_axis_for_pytorch() -> None:
    x = ps.tensor(3.0)
    assert x.sum(dim=0).item() == x.cumsum(0).item() == x.max(dim=-1).values.item() == 3
    assert x.var(0, unbiased=False).item() == ps.std(x, dim=-1, unbiased=False).item() == 0
    with pytest.raises(IndexError, match="axis 0 is out of range"):
        ps.sum(x, axis=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: x.sum(axis=0, dim=0), TypeError, "sum: axis and dim are the same"),
        (lambda x: x.sum(0, dim=0), TypeError, "multiple values"),
        (lambda x: ps.max(x, dim=0, axis=0), TypeError, "max: axis and keepdims are the standard's"),
        (lambda x: ps.max(x, keepdim=True), TypeError, "max: keepdim goes with dim"),
        (lambda x: x.max((0, 1)), TypeError, "amax takes several"),
        (lambda x: x.sum(along=0), TypeError, "unexpected keyword argument 'along'"),
        (lambda x: ps.sum(x, 0, ps.float64), TypeError, "keepdims is True or False"),
        (lambda x: ps.zeros(2.5, 3), TypeError, "a shape is an integer or a tuple of integers"),
        (lambda x: x.reshape(3.0, 4), TypeError, "a shape is an integer or a tuple of integers"),
        (lambda x: x.reshape(5, 5), ValueError, "cannot take the shape"),
        (lambda x: x.to("cuda", 3), TypeError, "to takes a dtype, a device or a tensor, and 3"),
        (lambda x: ps.var(x, dim=0, unbiased=True, correction=1), TypeError, "unbiased=True is correction=1"),
        (lambda x: ps.median(x, axis=0), TypeError, "unexpected keyword argument 'axis'"),
        (lambda x: x.gather(0, x), TypeError, "gather: an index has integers, and float32"),
        (lambda x: x.scatter(0, ps.asarray([[0] * 9]), x), ValueError, "do not fit an index"),
        (lambda x: x.topk(9), ValueError, "k=9 is beyond axis 1"),
        (lambda x: ps.pad(x, ((1, 1), (2, 2))), ValueError, "of the last axis, then of the one before"),
        (lambda x: ps.pad(x, (4, 0), "reflect"), ValueError, "has 3 items to mirror"),
        (lambda x: ps.pad(x, (1, 1), "mirror"), ValueError, "mode is 'constant', 'reflect'"),
        (lambda x: ps.einsum("ij,jk", x), ValueError, "has 2 operands, and 1 were given"),
        (lambda x: ps.einsum("ij,ij->k", x, x), ValueError, "names axis 'k', which no operand has"),
        (lambda x: ps.einsum("ijk->k", x), ValueError, "'ijk' does not fit shape"),
        (lambda x: x.bmm(x), ValueError, "bmm takes tensors of 3 and 3 axes"),
        (lambda x: x.split(0), ValueError, "parts have a length of 1 or more"),
        (lambda x: ps.one_hot(ps.asarray([0, 5]), 3).numpy(), IndexError, "one_hot: index 5 is out of range"),
        (lambda x: f"{x:.3f}", TypeError, "formats one value, and the shape is"),
        (lambda x: ps.linalg.inv(x), ValueError, "linalg.inv takes square matrices"),
        (lambda x: ps.linalg.inv(ps.zeros(2, 2)).numpy(), np.linalg.LinAlgError, "Singular"),
        (lambda x: ps.pad(x.int(), (1, 1), value=0.5), TypeError, "a value for int32 is an integer, and 0.5"),
        (lambda x: x.int().addmm(x.int(), x.int().T, beta=0.5), TypeError, "beta and alpha are integers"),
        (lambda x: x.quantile(ps.asarray(0.5).requires_grad_()), TypeError, "no gradient with respect to q"),
        (lambda x: ps.linalg.norm(x, axis=0, dim=0), TypeError, "norm: axis and dim are the same"),
        (lambda x: ps.fft.rfft(x.to(ps.complex64)), TypeError, "fft.rfft does not take complex64"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: Function, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(ps.asarray(A))


def test_a_name_that_is_not_there_says_what_to_use() -> None:
    x = ps.ones(2)
    for owner, name, hint in (
        (x, "view_as", r"use x\.reshape\(other\.shape\)"),
        (x, "data", r"use x\.detach\(\)"),
        (x, "transposed", "'Tensor' object has no attribute 'transposed'"),
        (ps, "compile", r"use ps\.jit"),
        (ps, "cumsums", "did you mean cumsum"),
        (ps, "quaternion", "docs/tensors.md lists what there is"),
    ):
        with pytest.raises(AttributeError, match=hint):
            getattr(owner, name)
    assert not hasattr(x, "__cuda_array_interface__")
    assert not {*names.OF_METHODS} & {*names.METHODS}, "it is there after all"
    assert not {*names.OF_FUNCTIONS} & {*ps.__all__}, "it is there after all"


# Making and converting


def test_tensors_are_made_as_in_pytorch() -> None:
    assert ps.tensor([1, 2]).dtype == ps.int64
    assert ps.tensor([1.0]).dtype == ps.float
    assert ps.tensor(np.ones(2)).dtype == ps.double
    assert ps.zeros(2, 3).shape == ps.ones((2, 3)).shape == ps.empty(size=(2, 3)).shape == (2, 3)
    assert ps.zeros(2, requires_grad=True).requires_grad
    assert ps.arange(1, end=4).tolist() == [1, 2, 3]
    assert ps.linspace(0, 1, steps=3).tolist() == [0, 0.5, 1]
    assert ps.eye(2, dtype=ps.half).dtype == ps.float16
    x = ps.rand(2, 3)
    assert x.shape == ps.randn((2, 3)).shape == ps.rand_like(x).shape == x.new_zeros(2, 3).shape
    assert 0 <= ps.randint(5, (4,)).numpy().min() <= ps.randint(0, 5, (4,)).numpy().max() + 5
    assert sorted(ps.randperm(4).tolist()) == [0, 1, 2, 3]
    ps.manual_seed(3)
    drawn = ps.randn(3)
    ps.manual_seed(3)
    assert ps.random.normal(3).tolist() == drawn.tolist()


def test_conversions(on: Device) -> None:
    x = ps.tensor([1.5, 0.0], device=on)
    assert x.to(ps.float64).dtype == x.double().dtype == ps.float64
    assert x.half().float().type_as(x.long()).dtype == x.long().dtype == ps.int64
    assert x.bool().tolist() == [True, False]
    assert x.to(on) is x
    assert x.to(ps.zeros(1, dtype=ps.int32, device=on)).dtype == ps.int
    assert x.to("host", ps.float16).device.name == "host"
    assert x.cpu().tolist() == [1.5, 0]
    assert (x.size(), x.size(0), x.size, x.dim(), x.numel()) == ((2,), 2, 2, 1, 2)
    assert f"{x[0]:.3f}" == "1.500"
    assert f"{x[0]}" == str(x[0])
    assert f"{x.long()[0]:03d}" == "001"


def test_changes_in_place(on: Device) -> None:
    x = ps.tensor([1.0, -2.0], device=on)
    same = x
    x.add_(1).mul_(2).clamp_(min=0)
    assert same is x
    assert x.tolist() == [4, 0]
    assert x.fill_(3).tolist() == [3, 3]
    assert x.copy_(ps.tensor([1, 2], device=on)).tolist() == [1, 2]
    assert x.masked_fill_(x > 1, 9).zero_().tolist() == [0, 0]
    assert x.normal_().isfinite().all()
    with pytest.raises(TypeError, match="in place, float32"):
        x.eq_(x)


@pytest.mark.parametrize(
    ("value", "function"),
    [
        (3.0, lambda x: x.topk(1).values),
        (3.0, lambda x: x.median(0).values),
        (3.0, lambda x: x.cummax(0).values),
        (3.0, lambda x: x.cummin(0).values),
        ([3.0], lambda x: ps.diff(x, n=0)),
        ([3], lambda x: x.nan_to_num()),
        ([3.0], lambda x: x.scatter(0, ps.zeros(0, dtype=ps.int64), x)),
        ([[3.0]], lambda x: ps.linalg.matrix_power(x, 1)),
    ],
)
def test_a_result_that_is_equal_is_a_tensor_of_its_own(value: Any, function: Function) -> None:
    x = ps.tensor(value)
    result = function(x)
    result += 1
    assert x.tolist() == value


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda wide, small: wide.add(small, alpha=2), [393, 406]),
        (lambda wide, small: wide.sub(small, alpha=2), [-407, -394]),
        (lambda wide, small: ps.addcmul(wide, small, small, value=2), [79993, 80006]),
        (lambda _, small: ps.addcmul(small, small.to(ps.int8), small.to(ps.int8)), [3336, 3336]),
        (lambda wide, x: ps.addcdiv(wide.double() * 0, x.float(), x.float() * 3) * 3, [1, 1]),
        (lambda wide, small: small.clamp(min=wide + 300), [255, 255]),
        (lambda wide, small: small.clamp(max=wide), [0, 6]),
        (lambda wide, small: small.clamp(wide, 300 + wide), [200, 200]),
    ],
)
def test_the_widest_operand_says_what_is_computed_in(function: Function, wanted: list[float]) -> None:
    result = function(ps.tensor([-7, 6], dtype=ps.int32), ps.tensor([200, 200], dtype=ps.uint8))
    assert result.tolist() == wanted


@pytest.mark.parametrize("dtype", [ps.float16, ps.bfloat16, ps.float32, ps.float64])
def test_nan_to_num_keeps_the_dtype(dtype: Any) -> None:
    result = ps.tensor([ps.inf, -ps.inf, ps.nan, 1.0], dtype=dtype).nan_to_num()
    most = float(ps.finfo(dtype).max)
    assert (result.dtype, result.tolist()) == (dtype, [most, -most, 0, 1])
    assert ps.tensor([-ps.inf], dtype=dtype).nan_to_num_(neginf=-2.0).tolist() == [-2]


def test_fmod_at_zero() -> None:
    x = ps.tensor([-0.0, 0.0, -3.0, 4.0]).requires_grad_()
    result = x.fmod(1.5)
    result.sum().backward()
    np.testing.assert_array_equal(result.numpy(), np.fmod(x.numpy(), 1.5))
    assert np.signbit(result.numpy()).tolist() == [True, False, True, False]
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1, 1]


# Values that only NumPy's own functions tell


def test_counts_and_sets(on: Device) -> None:
    ids = ps.asarray([3, 1, 3, 0], device=on)
    assert ps.one_hot(ids).tolist() == np.eye(4, dtype=int)[[3, 1, 3, 0]].tolist()
    assert ids.bincount(minlength=6).tolist() == [1, 1, 0, 2, 0, 0]
    assert ps.bincount(ids, ps.asarray([1.0, 2.0, 0.5, 1.0], device=on)).tolist() == [1, 2, 0, 1.5]
    weighted = ps.bincount(ids, ps.asarray([2, 1, 2, 1], device=on))
    assert (weighted.dtype, weighted.tolist()) == (
        ps.float64,
        np.bincount([3, 1, 3, 0], [2, 1, 2, 1]).tolist(),
    )
    assert ps.asarray(5, device=on).nonzero().shape == (1, 0)
    values, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
    assert (values.tolist(), inverse.tolist(), counts.tolist()) == ([0, 1, 3], [2, 1, 2, 0], [1, 1, 2])
    x = ps.asarray(A, device=on)
    assert x.masked_select(x > 0).tolist() == A[A > 0].tolist()
    for bins, ends in ((5, None), (4, (-1.0, 1.0)), (np.array([-1.0, 0.2, 0.3, 2.0], "float32"), None)):
        wanted, edges = np.histogram(A, bins, ends)
        asked = ps.asarray(bins, device=on) if isinstance(bins, np.ndarray) else bins
        result = ps.histogram(x, asked, range=ends)
        assert result.hist.tolist() == wanted.tolist()
        np.testing.assert_allclose(result.bin_edges.numpy(), edges, rtol=1e-6)
    assert ps.allclose(x, x + 1e-9)
    assert ps.isclose(ps.asarray([np.inf, np.inf, 1.0]), ps.asarray([np.inf, 1.0, np.nan])).tolist() == [
        True,
        False,
        False,
    ]


def test_what_depends_on_values_is_refused_inside_jit() -> None:
    for call in (ps.one_hot, ps.bincount, lambda ids: ids.masked_select(ids > 0)):
        with pytest.raises(ps.errors.CaptureError, match="jitted"):
            ps.jit(call)(ps.asarray([1, 2]))


def test_running_results_of_special_values(on: Device) -> None:
    values = np.array([[1, np.nan, 3, -np.inf], [2, 2, 1, 2], [-np.inf, -1000, 0, 1000]], np.float32)
    x = ps.asarray(values, device=on)
    result, indices = x.cummax(1)
    np.testing.assert_array_equal(result.numpy(), np.maximum.accumulate(values, 1))
    assert indices.tolist() == [[0, 1, 1, 1], [0, 1, 1, 3], [0, 1, 2, 3]]
    np.testing.assert_allclose(x[2].logcumsumexp(0).numpy(), [-np.inf, -1000, 0, 1000])
    assert ps.logsumexp(ps.asarray([-np.inf, -np.inf]), 0).item() == -np.inf


def test_gamma_functions_over_their_range() -> None:
    for dtype, tolerance in (("float32", 3e-6), ("float64", 1e-13)):
        a = np.concatenate([np.linspace(0.01, 40, 997), 10.0 ** np.arange(2, 30)]).astype(dtype)
        expected = np.vectorize(math.lgamma, otypes="d")(a)
        result = ps.asarray(a, device="host").lgamma().numpy()
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)
    negative = np.linspace(-7.4, -0.1, 97)
    expected = np.vectorize(math.lgamma, otypes="d")(negative)
    np.testing.assert_allclose(
        ps.asarray(negative, device="host").lgamma().numpy(), expected, rtol=1e-11, atol=1e-11
    )
    check_gradients(lambda x: x.lgamma(), np.linspace(-2.3, 11, 9), tolerance=1e-5)
    check_gradients(lambda x: x.digamma(), np.linspace(-2.3, 11, 9), tolerance=1e-5)
    assert ps.asarray([0.0, -3.0, np.inf]).lgamma().tolist() == [np.inf] * 3
    assert ps.asarray([3]).lgamma().item() == pytest.approx(math.log(2))
    poles = ps.asarray([-3.0, -1.0, 0.0]).digamma().numpy()
    np.testing.assert_array_equal(poles, [np.nan, np.nan, -np.inf])


def test_integers_where_the_result_is_floating_point(on: Device) -> None:
    ids = ps.asarray([-2, 0, 3], device=on)
    for function, wanted in (
        (ps.sigmoid, 1 / (1 + np.exp([2.0, 0.0, -3.0]))),
        (ps.erf, [math.erf(x) for x in (-2, 0, 3)]),
        (lambda x: ps.logit(x, eps=0.25), np.log([1 / 3, 1 / 3, 3])),
    ):
        result = function(ids)
        assert result.dtype == ps.float32
        np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-5)
    for function, answer in ((ps.isfinite, True), (ps.isnan, False), (ps.isinf, False)):
        assert function(ids > 0).tolist() == [answer] * 3


def test_sorted_values_and_grids_in_pytorchs_words(on: Device) -> None:
    row, items = np.array([1, 3, 3, 7]), np.array([[3, 0], [8, 4]])
    x, y = (ps.asarray(part, device=on) for part in (row, items))
    assert ps.searchsorted(x, y, right=True).tolist() == np.searchsorted(row, items, "right").tolist()
    assert ps.searchsorted(x, y, out_int32=True).dtype == ps.int32
    for result, wanted in zip(
        ps.meshgrid([x, x[:2]], indexing="ij"), np.meshgrid(row, row[:2], indexing="ij"), strict=True
    ):
        np.testing.assert_array_equal(result.numpy(), wanted)
    assert ps.unique(x, dim=None).tolist() == [1, 3, 7]
    with pytest.raises(TypeError, match="unique rows are not supported"):
        ps.unique(y, dim=0)
    with pytest.raises(ValueError, match=r"takes a sorted vector, and the shape is \(2, 2\)"):
        ps.searchsorted(y, x)
    with pytest.raises(ValueError, match="right=True and side='left'"):
        ps.searchsorted(x, y, right=True, side="left")


def test_items_around_integers_are_integers(on: Device) -> None:
    padded = ps.pad(ps.asarray([1, 2], device=on), (1, 2), value=7.0)
    assert (padded.dtype, padded.tolist()) == (ps.int64, [7, 1, 2, 7, 7])
    truths = ps.pad(ps.asarray([True, False], device=on), (0, 1), value=1.0)
    assert truths.tolist() == [True, False, True]
    x = ps.asarray(A, device=on)
    assert ps.diff(x, 0, 1, x, x).tolist() == x.tolist()
    np.testing.assert_array_equal(
        ps.diag_embed(x, 1, 0, 2).numpy(), np.stack([np.diag(row, 1) for row in A], axis=1)
    )


LETTERS = "abcde"


@settings(max_examples=examples(60, quick=20))
@given(st.data())
def test_einsum_agrees_with_numpy(data: st.DataObject) -> None:
    lengths = {letter: data.draw(st.integers(1, 3)) for letter in LETTERS}
    terms = data.draw(st.lists(st.text(LETTERS, min_size=0, max_size=3), min_size=1, max_size=4))
    there = sorted(set("".join(terms)))
    output = data.draw(
        st.permutations(there).flatmap(lambda all_: st.integers(0, len(all_)).map(lambda n: all_[:n]))
    )
    dots = data.draw(st.booleans())
    equation = (
        ",".join(("..." if dots else "") + term for term in terms)
        + "->"
        + ("..." if dots else "")
        + "".join(output)
    )
    arrays = [
        array(
            *([2] if dots and at % 2 else []), *(lengths[letter] for letter in term), seed=at, dtype="float64"
        )
        for at, term in enumerate(terms)
    ]
    expected = np.einsum(equation, *arrays)
    result = ps.einsum(equation, *(ps.asarray(a, device="host") for a in arrays))
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-10, atol=1e-10)


def test_einsum_multiplies_in_the_order_of_least_work() -> None:
    thin, wide = (ps.asarray(array(length, 64)) for length in (1, 64))
    for equation, operands in (("ij,jk,kl->il", (thin, wide, wide)), ("ij,kj,li->lk", (wide, wide, thin))):
        text = ps.explain(ps.einsum(equation, *operands))
        assert "matmul] -> float32[1, 64]" in text
        assert "matmul] -> float32[64, 64]" not in text, "no product of the two wide matrices"


# Declarations


def test_the_declarations_are_those_of_the_table() -> None:
    for path, text in name_stubs.stubs().items():
        assert path.read_text() == text, "python tests/name_stubs.py writes them"


@pytest.mark.slow
def test_a_type_checker_knows_the_names(tmp_path: Path) -> None:
    from mypy import api

    program = tmp_path / "program.py"
    program.write_text(
        "import penstock as ps\n"
        "x: ps.Tensor = ps.zeros(2, 3, requires_grad=True).exp().sum(dim=-1, keepdim=True)\n"
        "values, indices = x.max(dim=0)\n"
        "y: ps.Tensor = ps.cat([x, ps.tensor([[1.0]])], dim=0).reshape(1, 3).to('cpu').float()\n"
        "length: int = x.size(0)\n"
        "pair: tuple[ps.Tensor, ps.Tensor] = x.topk(1, dim=-1)\n"
        "x.sum(along=1)  # line 7\n"
        "x.nothing  # line 8\n"
        "class Net(ps.nn.Module):\n"
        "    def __init__(self) -> None:\n"
        "        self.inner = ps.nn.Sequential(ps.nn.Linear(3, 2), ps.nn.ReLU())\n"
        "    def forward(self, x: ps.Tensor) -> tuple[ps.Tensor, int]:\n"
        "        return self.inner(x), 1\n"
        "a, b = Net()(x)\n"
        "c: ps.Tensor = a\n"
        "d: str = b  # line 16\n"
        "Net()(1)  # line 17\n"
    )
    text, _, status = api.run(["--strict", "--no-incremental", str(program)])
    assert status == 1
    assert [line.split(":")[1] for line in text.splitlines() if ": error:" in line] == [
        "7",
        "8",
        "16",
        "17",
    ], text


def test_completion_shows_what_users_use() -> None:
    assert set(dir(ps)) == {*ps.__all__, "__version__", "__array_api_version__"}
    assert {"Tensor", "jit", "nn", "sum", "__array_namespace_info__"} <= set(dir(ps))


# Of the array API standard, besides the elementwise functions.
STANDARD = """
    all any arange argmax argmin argsort astype broadcast_to concat count_nonzero cumulative_prod
    cumulative_sum diff empty empty_like eye flip full full_like linspace matmul max mean min moveaxis
    nonzero ones ones_like permute_dims prod repeat reshape roll sort squeeze stack std sum take
    take_along_axis tensordot tile tril triu unstack var vecdot zeros zeros_like"""


def test_every_name_is_in_the_docs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "tensors.md").read_text()
    for name in set(names.FUNCTIONS) - {*STANDARD.split(), *arithmetic.__all__}:
        assert f"`{name}`" in page, name
    for name in names.METHODS:
        known = name.removesuffix("_") in (*names.FUNCTIONS, *names.IN_PLACE)
        assert known or f"`x.{name}`" in page, name
