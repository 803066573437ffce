"""Dtypes: equality, promotion, and bfloat16 from the host to kernels, against ml_dtypes and float32."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, SMALL, WEBGPU_KINDS

import penstock as ps
from penstock import Device
from penstock.drivers.opencl import OpenCLDriver
from penstock.graph.dtypes import ALL, HALF_PRECISION, DType
from penstock.kernels.source import KernelSource

BF16 = np.dtype(ml_dtypes.bfloat16)
both_halves = pytest.mark.parametrize("half", HALF_PRECISION, ids=str)


OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))  # the host can access their memory


@pytest.fixture(scope="module", params=[OPENCL, "host", *CUDA_KINDS, *WEBGPU_KINDS])
def on(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = Device.over(DRIVERS[request.param](), SMALL)
    yield device
    device.close()


@pytest.fixture(params=["interpreted", "programs"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """NumPy node by node, or programs from the first sight on: both mean the same."""
    least = 1 if request.param == "programs" else 1 << 60
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", least)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", least)
    return str(request.param)


def bits_of(array: np.ndarray) -> np.ndarray:
    return array.view(f"uint{8 * array.dtype.itemsize}")


def same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Every bit, but for those of NaNs."""
    assert actual.dtype == expected.dtype
    with np.errstate(all="ignore"):
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(bits_of(actual)[~nan], bits_of(expected)[~nan])


def all_kinds_of_floats(count: int = 40_003) -> np.ndarray:
    """Random bits: subnormals, infinities and NaNs among them; and ties, where rounding is to even."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    bits[::5] = bits[::5] & 0xFFFF0000 | 0x8000  # ties of bfloat16
    bits[1::5] = bits[1::5] & 0xFFFFE000 | 0x1000  # ties of float16
    bits[2::50] &= 0x807FFFFF  # subnormals
    bits[3::50] = 0x7F7FFFFF  # beyond the largest half
    bits[4::50] = 0x7F800001  # a NaN whose upper half is infinity's
    bits[5::50] = bits[5::50] & 0x8FFFFFFF | 0x30000000  # where float16 has subnormals
    return bits.view(np.float32)


def numbers(half: DType, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(half)


# The objects


def test_equality_is_strict() -> None:
    for dtype in ALL:
        assert dtype == dtype.numpy
        assert dtype.numpy == dtype
        assert dtype == dtype.numpy.type
        assert hash(dtype) == hash(dtype.numpy)
        assert [other for other in ALL if other == dtype] == [dtype]
        for other in (None, dtype.name, float, int, bool, object(), dtype.numpy.newbyteorder(), 1):
            if other is not None or dtype.itemsize > 1:
                assert (dtype == other) is (isinstance(other, np.dtype) and other == dtype.numpy)
                assert (dtype != other) is not (dtype == other)


def test_one_object_for_each() -> None:
    for dtype in ALL:
        assert copy.deepcopy(dtype) is pickle.loads(pickle.dumps(dtype)) is dtype
        assert ps.zeros(1, dtype=dtype.name).dtype is dtype
        assert ps.zeros(1, dtype=dtype.numpy).dtype is dtype
        assert ps.zeros(1, dtype=dtype.numpy.type).dtype is dtype
        assert getattr(ps, dtype.name) is dtype
        assert str(dtype) == dtype.name
        assert repr(dtype) == f"penstock.{dtype.name}"
    assert ps.zeros(1, dtype=float).dtype is ps.float64
    assert ps.asarray(np.zeros(1, np.longlong)).dtype is ps.int64
    assert ps.asarray(np.arange(3, dtype=">f4")).tolist() == [0, 1, 2]
    for wrong in (None, "float8", "V2", object, [("x", "f4")]):
        with pytest.raises(TypeError, match=r"no dtype of Penstock; there are bool, int8, .*bfloat16"):
            ps.asarray(1).astype(wrong)


def test_numpy_takes_them() -> None:
    for dtype in ALL:
        assert np.zeros(2, dtype).dtype == dtype
        assert np.ones(2).astype(dtype).view(dtype).dtype == dtype
        assert np.dtype(dtype) is dtype.numpy


def test_the_standards_inspection_lists_its_own() -> None:
    info = ps.__array_namespace_info__()
    assert info.dtypes(kind="real floating") == {"float32": ps.float32, "float64": ps.float64}
    assert not set(info.dtypes()) & {"float16", "bfloat16"}
    assert ps.isdtype(ps.bfloat16, "real floating")
    assert not ps.isdtype(ps.bfloat16, ("integral", ps.float16))


# Promotion, by PyTorch's rules for tensors with axes

WITH_BFLOAT16 = {
    "bool": "bfloat16",
    **{f"{sign}int{bits}": "bfloat16" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "bfloat16",
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
}
WITH_FLOAT16 = WITH_BFLOAT16 | {
    name: "float16" for name, result in WITH_BFLOAT16.items() if result == "bfloat16"
}
WITH_FLOAT16 |= {"bfloat16": "float32", "float16": "float16"}


@pytest.mark.parametrize(("half", "table"), [("bfloat16", WITH_BFLOAT16), ("float16", WITH_FLOAT16)])
def test_promotion(half: str, table: dict[str, str]) -> None:
    assert set(table) == {dtype.name for dtype in ALL}
    for other, expected in table.items():
        a, b = ps.zeros(2, dtype=half), ps.ones(2, dtype=other)
        assert (a + b).dtype is (b + a).dtype is ps.result_type(a, b) is getattr(ps, expected)
    for number, kind in ((True, half), (1, half), (1.5, half), (1j, "complex64")):
        assert ps.result_type(ps.zeros(2, dtype=half), number) is getattr(ps, kind)
    assert (ps.zeros(2, dtype=half) * 1.5).dtype is getattr(ps, half)


def test_promotion_of_the_others() -> None:
    for value, other, expected in [
        ("bool", "int8", "int8"),
        ("int8", "uint8", "int16"),
        ("uint8", "uint32", "uint32"),
        ("int64", "uint32", "int64"),
        ("int64", "float32", "float32"),
        ("float32", "complex64", "complex64"),
        ("float64", "complex64", "complex128"),
        ("uint64", "complex64", "complex64"),
    ]:
        assert ps.result_type(value, other) is ps.result_type(other, value) is getattr(ps, expected)
    with pytest.raises(TypeError, match="no common integer type"):
        ps.result_type("uint64", "int8")


def test_casts_and_limits() -> None:
    assert ps.can_cast(ps.bfloat16, ps.float32)
    assert ps.can_cast(ps.int8, ps.bfloat16)
    for other in (ps.float16, ps.int64):
        assert not ps.can_cast(ps.bfloat16, other)
        assert not ps.can_cast(other, ps.bfloat16)
    actual = ps.finfo(ps.bfloat16)
    assert (actual.bits, actual.eps, actual.smallest_normal) == (16, 2.0**-7, 2.0**-126)
    assert actual.max == -actual.min == (2 - 2.0**-7) * 2.0**127
    assert actual.dtype is ps.bfloat16
    assert ps.finfo(ps.complex64).dtype is ps.float32


# Values in and out


def test_values_come_and_go(on: Device) -> None:
    array = numbers(ps.bfloat16, (3, 4))
    x = ps.asarray(array, device=on)
    assert x.dtype is ps.bfloat16
    same_bits(x.numpy(), array)
    same_bits(np.asarray(x), array)
    same_bits(ps.asarray([[1, 0.1]], dtype="bfloat16").numpy(), np.array([[1, 0.1]], BF16))
    assert x.tolist() == array.astype(np.float32).tolist()
    assert type(x[0, 0].item()) is float
    assert float(x[0, 0]) == float(array[0, 0])
    assert repr(ps.asarray([1, 2.5], dtype="bfloat16", device=on)) == (
        f"tensor([1. , 2.5], dtype=bfloat16, device={on.name})"
    )
    x[0] = 0.1
    assert x[0].tolist() == [0.10009765625] * 4
    same_bits(ps.asarray([x[0, 0], x[1, 1]]).numpy(), np.array([0.1, array[1, 1]], BF16))
    assert (
        ps.arange(3, dtype="bfloat16").tolist()
        == ps.linspace(0, 2, 3, dtype="bfloat16").tolist()
        == [0, 1, 2]
    )


def test_dlpack(on: Device) -> None:
    array = numbers(ps.bfloat16, (3, 4))
    x = ps.asarray(array, device=on)

    class Speaks:
        """Another library's array."""

        __dlpack_device__ = x.__dlpack_device__
        __dlpack__ = x.__dlpack__

    class SpeaksTheOldWay(Speaks):
        def __dlpack__(self, stream: Any = None) -> Any:
            return x.__dlpack__()

    for other in (Speaks(), SpeaksTheOldWay()):
        same_bits(ps.from_dlpack(other).numpy(), array)
        same_bits(ps.asarray(other).numpy(), array)
    with pytest.raises((BufferError, RuntimeError)):  # it has no such type, and raises
        np.from_dlpack(x)
    assert np.from_dlpack(x.astype(ps.float32)).dtype == np.float32


@both_halves
def test_rounding_is_to_the_nearest_even(on: Device, way: str, half: DType) -> None:
    floats = all_kinds_of_floats()
    x = ps.asarray(floats, device=on)
    with np.errstate(all="ignore"):
        expected = floats.astype(half)
    same_bits(x.astype(half).numpy(), expected)
    back = expected.astype(np.float32)
    same_bits(ps.asarray(expected, device=on).astype(ps.float32).numpy(), back)
    same_bits(x.astype(half).astype(ps.float32).numpy(), back)  # a cast rounds inside a kernel too
    every = np.arange(1 << 16, dtype=np.uint16).view(half)
    same_bits(ps.asarray(every, device=on).astype(ps.float32).astype(half).numpy(), every)


@pytest.fixture(params=["opencl", "host", *CUDA_KINDS, *WEBGPU_KINDS])
def forced(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device whose kernels compute everything."""
    driver = DRIVERS.get(request.param, lambda: OpenCLDriver(NATIVE, "opencl-forced"))()
    device = Device.over(driver, replace(SMALL, force_kernels=True))
    yield device
    device.close()


@both_halves
def test_kernels_round_every_tie_and_the_floats_beside_it(forced: Device, half: DType) -> None:
    every = (
        np.arange(0x7F80 if half == ml_dtypes.bfloat16 else 0x7C00, dtype=np.uint16)
        .view(half)
        .astype(np.float32)
    )
    ties = ((every[:-1].astype(np.float64) + every[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(ties, np.float32(end)) for end in (-np.inf, np.inf)]
    floats = np.concatenate([ties, *beside, -ties, *(-floats for floats in beside)])
    x, rounded = ps.asarray(floats, device=forced), floats.astype(half)
    same_bits(x.astype(half).numpy(), rounded)
    back = -rounded.astype(np.float32)
    same_bits((-x.astype(half).astype(ps.float32)).numpy(), back)
    same_bits((-ps.asarray(rounded, device=forced).astype(ps.float32)).numpy(), back)


@both_halves
def test_kernels_read_and_write_every_half(forced: Device, half: DType) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(half)
    for values in (every, every[:-3]):
        x = ps.asarray(values, device=forced)
        with np.errstate(all="ignore"):
            same_bits((-x.astype(ps.float32)).numpy(), -values.astype(np.float32))
        same_bits((-x).numpy(), -values)


@pytest.mark.slow("float16")
@both_halves
def test_other_casts(on: Device, way: str, half: DType) -> None:
    for other in ("bool", "int8", "uint8", "int32", "int64", "float64", "float16", "bfloat16"):
        array = np.random.default_rng(1).integers(0, 100, 999).astype(other)
        same_bits(ps.asarray(array, device=on).astype(half).numpy(), array.astype(np.float32).astype(half))
        x = array.astype(np.float32).astype(half)
        np.testing.assert_array_equal(ps.asarray(x, device=on).astype(other).numpy(), x.astype(other))


# Computing: in float32, rounded once

ELEMENTWISE: list[Callable[..., Any]] = [
    lambda xp, a, b: a + b,
    lambda xp, a, b: a * b,
    lambda xp, a, b: a / b,
    lambda xp, a, b: xp.maximum(a, b),
    lambda xp, a, b: xp.where(a > b, a, b),
    lambda xp, a, b: abs(a),
    lambda xp, a, b: xp.sign(a),
    lambda xp, a, b: xp.floor(a),
    lambda xp, a, b: xp.signbit(a),
    lambda xp, a, b: xp.isnan(a / (a - a)),
    lambda xp, a, b: a.T,
    lambda xp, a, b: a[::2, 3:],
    lambda xp, a, b: xp.concat([a, b], axis=1),
]


@both_halves
@pytest.mark.parametrize("function", ELEMENTWISE, ids=range(len(ELEMENTWISE)))
def test_elementwise(on: Device, way: str, half: DType, function: Callable[..., Any]) -> None:
    a, b = (numbers(half, (37, 29), seed) for seed in (0, 1))
    with np.errstate(all="ignore"):
        wide = function(np, a.astype(np.float32), b.astype(np.float32))
    actual = function(ps, ps.asarray(a, device=on), ps.asarray(b, device=on))
    expected = wide if wide.dtype == bool else wide.astype(half)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.numpy(), expected)


@both_halves
def test_functions_are_within_a_rounding(on: Device, way: str, half: DType) -> None:
    a = abs(numbers(half, (999,)))
    x, wide = ps.asarray(a, device=on), a.astype(np.float64)
    for name in ("exp", "log1p", "sqrt", "tanh", "sin"):
        actual = getattr(ps, name)(x).numpy().astype(np.float64)
        np.testing.assert_allclose(actual, getattr(np, name)(wide), rtol=0.6 * ps.finfo(half).eps, atol=1e-7)


@both_halves
def test_nextafter_is_the_neighbour_among_halves(on: Device, way: str, half: DType) -> None:
    x = ps.asarray([1, -1, 0], dtype=half, device=on)
    eps = ps.finfo(half).eps
    assert ps.nextafter(x, x + 1)[:2].tolist() == [1 + eps, -1 + eps / 2]


@pytest.mark.slow("float16", "webgpu")
@both_halves
@pytest.mark.parametrize("axis", [0, 1, None])
def test_reductions_add_up_in_float32(on: Device, way: str, half: DType, axis: int | None) -> None:
    a = abs(numbers(half, (300, 200)))
    x, wide = ps.asarray(a, device=on), a.astype(np.float64)
    one_rounding = 0.51 * ps.finfo(half).eps
    for name in ("sum", "mean", "max", "var", "std"):
        actual = getattr(ps, name)(x, axis=axis)
        assert actual.dtype is half
        expected = getattr(np, name)(wide, axis=axis)
        np.testing.assert_allclose(actual.numpy().astype(np.float64), expected, rtol=one_rounding + 1e-5)
    total = ps.cumulative_sum(x, axis=axis or 0).numpy().astype(np.float64)
    np.testing.assert_allclose(total, np.cumsum(wide, axis or 0), rtol=one_rounding + 1e-5)


def test_a_long_sum_does_not_stand_still(on: Device, way: str) -> None:
    ones = ps.ones(5000, dtype=ps.bfloat16, device=on)
    assert ps.sum(ones).item() == 4992  # the nearest bfloat16; added up in it, they stop at 256
    assert (
        ps.mean(ps.full(5000, 60000.0, dtype=ps.float16, device=on)).item() == 60000
    )  # the sum is beyond it


@both_halves
def test_products_add_up_in_float32(on: Device, way: str, half: DType) -> None:
    a, b = abs(numbers(half, (20, 500))), abs(numbers(half, (500, 30), 1))
    x, y = ps.asarray(a, device=on), ps.asarray(b, device=on)
    wide = a.astype(np.float64) @ b.astype(np.float64)
    rounding = 0.51 * ps.finfo(half).eps + 1e-5
    for actual, expected in ((x @ y, wide), (ps.vecdot(x, y[:, 0]), wide[:, 0])):
        assert actual.dtype is half
        np.testing.assert_allclose(actual.numpy().astype(np.float64), expected, rtol=rounding)


@both_halves
def test_orders_and_sets(on: Device, way: str, half: DType) -> None:
    a = numbers(half, (40, 30))
    x, wide = ps.asarray(a, device=on), a.astype(np.float32)
    np.testing.assert_array_equal(ps.sort(x).numpy(), np.sort(wide))
    np.testing.assert_array_equal(ps.argmax(x, axis=0).numpy(), np.argmax(wide, axis=0))
    values, counts = np.unique(wide, return_counts=True)
    actual = ps.unique_counts(x)
    np.testing.assert_array_equal(actual.values.numpy(), values)
    np.testing.assert_array_equal(actual.counts.numpy(), counts)
    sorted_row = ps.sort(x[0])
    np.testing.assert_array_equal(
        ps.searchsorted(sorted_row, x[0]).numpy(), np.searchsorted(np.sort(wide[0]), wide[0])
    )


@pytest.mark.slow("float16", "webgpu")
@both_halves
def test_gradients_pass(on: Device, way: str, half: DType) -> None:
    a = numbers(half, (30, 20))

    def loss(x: ps.Tensor, w: ps.Tensor) -> ps.Tensor:
        hidden = ps.tanh(x * 0.5) + x.astype(ps.float32).astype(x.dtype)
        return ps.sum(hidden @ w) + ps.mean(x[[1, 2, 1]] ** 2) + ps.max(x)

    x, w = (ps.asarray(array, device=on).requires_grad_() for array in (a, numbers(half, (20, 10), 1)))
    loss(x, w).backward()
    actual = ps.grad(loss, (0, 1))(x, w)
    wide = [ps.asarray(tensor.numpy(), dtype=ps.float64, device=on) for tensor in (x, w)]
    expected = ps.grad(loss, (0, 1))(*wide)
    for tensor, by_function, exact in zip((x, w), actual, expected, strict=True):
        assert tensor.grad is not None
        assert tensor.grad.dtype is by_function.dtype is half
        np.testing.assert_array_equal(tensor.grad.numpy(), by_function.numpy())
        np.testing.assert_allclose(
            by_function.numpy().astype(np.float64), exact.numpy(), rtol=0.05, atol=0.05
        )
    with pytest.raises(TypeError, match="gradients are for floating point"):
        ps.zeros(2, dtype=ps.int64).requires_grad_()


def test_random_numbers(on: Device, way: str) -> None:
    generator = ps.random.Generator(1, on)
    drawn = generator.uniform(20_000, dtype=ps.bfloat16).numpy().astype(np.float64)
    assert set(drawn * 256) == set(range(256))
    scaled = generator.uniform(20_000, -1, 3, dtype=ps.bfloat16).numpy()
    assert scaled.dtype == BF16
    assert scaled.min() >= -1
    assert scaled.max() < 3
    normal = generator.normal(20_000, dtype=ps.bfloat16).numpy().astype(np.float64)
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.02


def test_kernels_see_words() -> None:
    source = KernelSource("k", "", ("bfloat16", "bool", "float16"), ("float32",), (1,), (1,))
    assert source.signature == ("uint16*", "uint8*", "float16*", *["int32"] * 3, "float32")


def test_bfloat16_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ps.ones((64, 64), dtype=ps.bfloat16, device="opencl:0")
    steps = ps.explain(ps.sum(ps.exp(x.realize()) * 2, axis=1), x @ x)
    assert "host [" not in steps


def test_halves_that_may_lie_anywhere_are_read_and_written_by_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PoCL from 3.1 on crashes where vload_half8 is given an address that is no multiple of 16."""
    texts: list[str] = []
    compile_ = OpenCLDriver.compile

    def noted(self: OpenCLDriver, text: Any, signatures: Any) -> Any:
        texts.append(text)
        return compile_(self, text, signatures)

    monkeypatch.setattr(OpenCLDriver, "compile", noted)
    device = Device.over(OpenCLDriver(NATIVE, "opencl"))
    x = ps.asarray(np.ones((40, 40), np.float16), device=device)
    ps.jit(lambda x: (x @ x, x[:, 1:] * 2, ps.sum(x, axis=1)))(x)[0].numpy()
    device.close()
    text = "\n".join(texts)
    assert "from_halves_8(*" in text
    assert "= to_halves_8(" in text
    assert re.findall(r"v(?:load|store)_half8\([^;]*;", text) == [
        "vload_half8(0, (half *)&u);",
        "vstore_half8(x, 0, (half *)&u);",
    ] * len(texts)
