"""Elementwise functions at special values, in every lane of a vector; sigmoid and erf to the last digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, one_opencl

import penstock as ps
from penstock import Device, nn

pytestmark = one_opencl
F = nn.functional
_UNARY = """exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh
floor ceil trunc round abs sign negative square"""
_BINARY = "add subtract multiply divide pow atan2 hypot copysign maximum minimum"
UNARY, BINARY = _UNARY.split(), _BINARY.split()
LANES = 8
MOST_ULPS = 4
# Functions of float32 by which an OpenCL CPU gives 0 instead of a subnormal number: `exp` of less than -87.3.
FLUSHED = ("exp",)


def specials(dtype: Any) -> np.ndarray:
    """Zeros, limits, and what is large for an angle."""
    limits = np.finfo(dtype)
    sizes = [
        0,
        limits.smallest_subnormal,
        limits.tiny,
        limits.eps,
        0.5,
        1,
        3,
        20,
        88.5,
        1000,
        limits.max,
        np.inf,
    ]
    if dtype != np.float16:
        sizes += [2.0**22, 2.0**23 - 1, 2.0**23, 2.0**23 + 1, 1e10, 1e20, 1e30]
    result = np.array(sizes, dtype)
    return np.concatenate([result, -result, [np.array(np.nan, dtype)]])


def in_every_lane(dtype: Any, values: np.ndarray) -> np.ndarray:
    """Each value in each lane of a vector whose other lanes are ordinary, and some more: a row for each."""
    ordinary = np.random.default_rng(0).uniform(1e-5, 1, (len(values) * LANES, LANES)).astype(dtype)
    ordinary[1::2] *= np.array(-30, dtype)
    lanes = np.tile(np.arange(LANES), len(values))
    ordinary[np.arange(len(lanes)), lanes] = np.repeat(values, LANES)
    return ordinary.reshape(-1)


def check(name: str, got: np.ndarray, exact: np.ndarray, *inputs: np.ndarray, flushed: bool = False) -> None:
    """Within a few units in the last place of an exact result, which is NaN, infinite or -0 where that is."""
    dtype = got.dtype
    with np.errstate(all="ignore"):
        rounded = exact.astype(dtype)
        unit = np.spacing(np.clip(np.abs(rounded), np.finfo(dtype).tiny, np.finfo(dtype).max))
        error = np.abs(got.astype(exact.dtype) - exact) / unit.astype(exact.dtype)
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    if flushed:
        same |= (np.abs(rounded) < np.finfo(dtype).tiny) & (got == 0)
    wrong = ~same & ~(error <= MOST_ULPS)
    shown = [tuple(x[wrong][:3].tolist() for x in inputs), got[wrong][:3].tolist(), exact[wrong][:3].tolist()]
    assert not wrong.any(), f"{name} of {shown[0]} is {shown[1]} and not {shown[2]}"
    if name in ("maximum", "minimum"):
        return  # 0 and -0 are equal, so either may be the result
    zero = (got == 0) & (rounded == 0) & ~(flushed & (exact != 0))
    np.testing.assert_array_equal(
        np.signbit(got[zero]), np.signbit(rounded[zero]), f"the sign of {name}'s zero"
    )


def wide(dtype: Any) -> Any:
    return np.longdouble if dtype == np.float64 else np.float64


NUMPY = {
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "pow": np.power,
    "atan2": np.arctan2,
}


@pytest.fixture(scope="module")
def opencl() -> Any:
    made = Device.over(DRIVERS["opencl-device"](), SMALL)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_functions_of_one_input(opencl: Device, dtype: Any) -> None:
    x = in_every_lane(dtype, specials(dtype))
    functions = [getattr(ps, name) for name in UNARY]
    results = ps.jit(lambda x: [function(x) for function in functions])(ps.asarray(x, device=opencl))
    for name, result in zip(UNARY, results, strict=True):
        with np.errstate(all="ignore"):
            exact = NUMPY.get(name, getattr(np, name, None))(x.astype(wide(dtype)))
        flushed = name in FLUSHED and dtype == np.float32
        check(name, result.numpy(), exact, x, flushed=flushed)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_of_two_inputs(opencl: Device, dtype: Any) -> None:
    values = specials(dtype)
    values = values[np.isnan(values) | (np.abs(values) < 1e25) | np.isinf(values)]  # no products overflow
    first, second = (side.reshape(-1) for side in np.meshgrid(values, values))
    x, y = in_every_lane(dtype, first), in_every_lane(dtype, second)
    functions = [getattr(ps, name) for name in BINARY]
    results = ps.jit(lambda x, y: [function(x, y) for function in functions])(
        ps.asarray(x, device=opencl), ps.asarray(y, device=opencl)
    )
    for name, result in zip(BINARY, results, strict=True):
        with np.errstate(all="ignore"):
            exact = NUMPY.get(name, getattr(np, name, None))(x.astype(wide(dtype)), y.astype(wide(dtype)))
        check(name, result.numpy(), exact, x, y)


def ordinary(dtype: Any, count: int) -> np.ndarray:
    """Numbers of all sizes, near 1, where functions bend, and near multiples of a quarter of a turn."""
    random, limits = np.random.default_rng(0), np.finfo(dtype)
    most = np.log10(float(limits.max))
    parts = [random.uniform(-end, end, count) for end in (1, 20, 100, 800, 1e4, 1e7)]
    parts += [10 ** random.uniform(-most, most, count) * random.choice([-1, 1], count)]
    parts += [1 + random.uniform(-1e-3, 1e-3, count), np.arange(1, count) * np.pi / 4]
    return np.concatenate(parts).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_of_ordinary_numbers(opencl: Device, dtype: Any) -> None:
    x = ordinary(dtype, 5000)
    y = np.random.default_rng(1).permutation(x)
    exponents = np.where(
        np.arange(len(x)) % 2, y, np.random.default_rng(2).uniform(-6, 6, len(x)).astype(dtype)
    )
    cases = [(name, (x,)) for name in UNARY] + [("atan2", (x, y)), ("hypot", (x, y)), ("pow", (x, exponents))]
    for name, inputs in cases:
        with np.errstate(all="ignore"):
            exact = NUMPY.get(name, getattr(np, name, None))(*(array.astype(wide(dtype)) for array in inputs))
        got = getattr(ps, name)(*(ps.asarray(array, device=opencl) for array in inputs)).numpy()
        check(name, got, exact, *inputs, flushed=name in FLUSHED and dtype == np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bits_do_not_depend_on_the_place_in_a_vector(opencl: Device, dtype: Any) -> None:
    """Alone, in a vector of others, among large ones, and in what is left after vectors."""
    ones = ordinary(dtype, 3)
    large = np.array([1e30, np.inf, np.nan, -(2.0**21)], dtype)
    mixed = np.stack([ones, np.resize(large, ones.shape)]).T.reshape(-1)
    for name in (*UNARY, "pow", "atan2", "hypot", "remainder"):
        function = ps.jit(getattr(ps, name))

        def bits(array: np.ndarray) -> np.ndarray:
            x = ps.asarray(np.ascontiguousarray(array), device=opencl)
            result = function(x) if name in UNARY else function(x, x * 0 + 1.7)  # noqa: B023
            return np.where(np.isnan(result.numpy()), dtype(np.nan), result.numpy())

        alone = np.concatenate([bits(ones[at : at + 1]) for at in range(len(ones))])
        for together in (bits(ones), bits(np.tile(ones, 40))[-len(ones) :], bits(mixed)[::2]):
            assert together.tobytes() == alone.tobytes(), name


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_divisions_are_exact(opencl: Device, dtype: Any) -> None:
    """In kernels: of zeros, infinities, tiny and large quotients, multiples, and numbers near them."""
    first, second = (side.reshape(-1) for side in np.meshgrid(specials(dtype), specials(dtype)))
    numbers = np.random.default_rng(0).permutation(ordinary(dtype, 500) if dtype != np.float16 else first)
    whole = np.arange(-200, 200).astype(dtype)
    x = np.concatenate([first, numbers, whole, whole / 10])
    y = np.concatenate([second, numbers[::-1], np.roll(whole, 7), np.full_like(whole, 0.1)]).astype(dtype)
    given = [ps.asarray(side, device=opencl) for side in (x, y)]
    with np.errstate(all="ignore"):
        quotient = np.where(np.isfinite(x) & np.isfinite(y), np.floor_divide(x, y), np.floor(x / y))
        expected = {"remainder": np.remainder(x, y), "fmod": np.fmod(x, y), "floor_divide": quotient}
    for name, wanted in expected.items():
        assert "host" not in str(ps.explain(getattr(ps, name)(*given)))
        for function in (getattr(ps, name), ps.jit(getattr(ps, name))):
            got = function(*given).numpy()
            np.testing.assert_array_equal(got, wanted, name)
            signs = np.signbit(got) == np.signbit(wanted)
            assert np.all(signs | np.isnan(wanted)), name


# Functions of networks, by NumPy and by kernels


def both(device: Device, function: Callable[[ps.Tensor], ps.Tensor], x: np.ndarray) -> list[np.ndarray]:
    """What NumPy, or a kernel without jit, makes of few items, and what a jitted kernel makes of them."""
    tensor = ps.asarray(x, device=device)
    return [call(tensor).numpy() for call in (function, ps.jit(function))]


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


RANGES = {np.float32: 87.0, np.float64: 700.0, np.float16: 16.0}
ROUNDING = {np.float32: 2.0**-20, np.float64: 2.0**-49, np.float16: 2.0**-10}


def dtypes(device: Device) -> list[Any]:
    return [dtype for dtype in RANGES if dtype != np.float64 or device.capabilities.float64]


@pytest.mark.slow("host-late")
def test_sigmoid_and_silu_are_exact_down_to_the_smallest_results(device: Device) -> None:
    assert F.sigmoid(ps.asarray(-20.0, device=device)).item() == pytest.approx(2.0611536e-09, rel=1e-6)
    for dtype in dtypes(device):
        most = RANGES[dtype]
        x = np.linspace(-most, most, 1001).astype(dtype)
        exact, tolerance = x.astype(np.float64), ROUNDING[dtype]
        smallest = 2 * float(np.finfo(dtype).smallest_subnormal)
        chance = sigmoid(exact)
        slope = chance * sigmoid(-exact)
        expected = {
            F.sigmoid: (chance, slope),
            F.silu: (exact * chance, chance + exact * slope),
        }
        for function, (value, gradient) in expected.items():
            for got in both(device, function, x):
                np.testing.assert_allclose(got.astype(float), value, rtol=tolerance, atol=smallest)
            for got in both(device, ps.grad(lambda x, f=function: ps.sum(f(x))), x):
                # The slope of silu passes through 0.
                near = tolerance * (2 if function is F.silu else 0)
                np.testing.assert_allclose(
                    got.astype(float), gradient, rtol=4 * tolerance, atol=near + smallest
                )


def test_sigmoid_of_infinities_and_nan(device: Device) -> None:
    x = np.array([-np.inf, -1e30, 1e30, np.inf, np.nan], np.float32)
    for got in both(device, F.sigmoid, x):
        np.testing.assert_array_equal(got, [0, 0, 1, 1, np.nan])
    for got in both(device, ps.grad(lambda x: ps.sum(F.sigmoid(x))), x):
        np.testing.assert_array_equal(got, [0, 0, 0, 0, np.nan])


def test_erf_to_the_last_digits(device: Device) -> None:
    for dtype in dtypes(device):
        parts = [np.linspace(-7, 7, 2001), 10.0 ** np.linspace(-30 if dtype != np.float16 else -4, 0, 200)]
        x = np.concatenate(
            [*parts, [0.0, -0.0, 0.5, 1.0, -1.0, 30.0, -30.0, np.inf, -np.inf, np.nan]]
        ).astype(dtype)
        exact = np.array([math.erf(float(number)) for number in x])
        tolerance = {np.float32: 4e-7, np.float64: 1e-15, np.float16: 1e-3}[dtype]
        for got in both(device, F.erf, x):
            np.testing.assert_allclose(got.astype(float), exact, rtol=tolerance, atol=0)
        slope = 2 / math.sqrt(math.pi) * np.exp(-(x.astype(np.float64) ** 2))
        for got in both(device, ps.grad(lambda x: ps.sum(F.erf(x))), x):
            smallest = 2 * float(np.finfo(dtype).tiny)
            np.testing.assert_allclose(got.astype(float), slope, rtol=20 * tolerance, atol=smallest)


@pytest.mark.parametrize("kind", ["u", "i"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shifts_by_more_bits_than_there_are(opencl: Device, kind: str, size: int) -> None:
    dtype = np.dtype(f"{kind}{size}")
    ends = np.iinfo(dtype)
    values = np.array([ends.min, ends.min + 1, 0, 1, 2, ends.max - 1, ends.max], dtype)
    x, shift = np.meshgrid(values, np.arange(8 * size + 4).astype(dtype))
    results = ps.jit(lambda x, y: [ps.bitwise_right_shift(x, y), ps.bitwise_left_shift(x, y)])(
        ps.asarray(x, device=opencl), ps.asarray(shift, device=opencl)
    )
    for result, function in zip(results, (np.right_shift, np.left_shift), strict=True):
        np.testing.assert_array_equal(result.numpy(), function(x, shift))


@pytest.mark.parametrize("jitted", [False, True])
def test_fractional_powers_of_minus_infinity(opencl: Device, jitted: bool) -> None:
    x = ps.full((37,), -np.inf, device=opencl)
    power = ps.jit(ps.pow) if jitted else ps.pow
    assert np.all(power(x, 0.5).numpy() == np.inf)
    assert np.all(power(x, -2.5).numpy() == 0)
    assert np.all(np.isnan(power(x, np.nan).numpy()))


@pytest.mark.parametrize("exponent", [2, 3, 4, 0.5, -0.5, -1, -2, 1.7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_powers_by_a_number(opencl: Device, dtype: Any, exponent: float) -> None:
    x = np.concatenate([specials(dtype), ordinary(dtype, 300)])
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(wide(dtype)), dtype(exponent))
        if exponent % 1:  # NumPy has NaN and -0 on some processors
            exact[np.isneginf(x)], exact[x == 0] = (np.inf, 0) if exponent > 0 else (0, np.inf)
    power = lambda x: x**exponent  # noqa: E731
    for function in (power, ps.jit(power)):
        check("pow", function(ps.asarray(x, device=opencl)).numpy(), exact, x)
    near = ps.asarray(np.abs(x[np.abs(x) < 100]) + dtype(0.1), device=opencl)
    slope = exponent * np.power(near.numpy().astype(wide(dtype)), exponent - 1)
    got = ps.grad(lambda x: ps.sum(power(x)))(near).numpy()
    np.testing.assert_allclose(got, slope.astype(dtype), rtol=20 * np.finfo(dtype).eps)


@pytest.mark.parametrize(("dtype", "x"), [(np.float32, -87.0), (np.float64, -708.0), (np.float64, -30.0)])
def test_silu_far_below_0(opencl: Device, dtype: Any, x: float) -> None:
    wanted = np.longdouble(x) * np.exp(np.longdouble(x))
    for silu in (ps.nn.functional.silu, ps.jit(ps.nn.functional.silu)):
        got = silu(ps.asarray(np.full(5, x, dtype), device=opencl)).numpy()
        np.testing.assert_allclose(
            got.astype(np.longdouble), wanted, rtol=2e-5 if dtype == np.float32 else 1e-12
        )


@pytest.mark.parametrize("count", [1, 5, 8])
def test_exponentials_at_the_end_of_the_range(device: Device, count: int) -> None:
    """Where they overflow, and the number before, in vectors and one by one."""
    last = np.float32(88.72283)
    beyond = np.nextafter(last, np.float32(np.inf))
    for value, expected in ((last, 3.4027985e38), (beyond, np.inf), (np.float32(1000), np.inf)):
        x = ps.asarray(np.full(count, value), device=device)
        np.testing.assert_allclose(ps.exp(x).numpy(), np.full(count, expected), rtol=1e-6)
        np.testing.assert_allclose(ps.tanh(x / 2).numpy(), np.ones(count), rtol=1e-6)


def test_tanh_to_units_in_the_last_place(device: Device) -> None:
    """As precise as is said where it is nearly linear, where it bends and where it nears 1."""
    x = np.concatenate([np.logspace(-30, 1.1, 40_001), np.linspace(0, 10, 40_001)]).astype(np.float32)
    exact = np.tanh(x.astype(np.float64))
    y = ps.tanh(ps.asarray(x, device=device)).numpy()
    assert np.max(np.abs(y - exact) / np.spacing(exact.astype(np.float32))) < 4
    assert y.max() <= 1


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def nearest(number: float, dtype: str) -> int:
    """A number as an integer of a dtype, in Python's exact arithmetic."""
    limits = np.iinfo(dtype)
    if math.isnan(number):
        return 0
    whole = math.trunc(number) if math.isfinite(number) else int(math.copysign(1 << 70, number))
    return max(int(limits.min), min(int(limits.max), whole))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_floats_become_the_nearest_integers(device: Device, dtype: str) -> None:
    """On every device, also what is out of range, which C and NumPy leave to the machine."""
    limits = np.iinfo(dtype)
    for source in (np.float16, np.float32, *([np.float64] if device.capabilities.float64 else [])):
        with np.errstate(over="ignore"):
            ends = np.array([limits.min, limits.max, 2.0 * limits.max], np.float64).astype(source)
            around = [np.nextafter(ends, source(way)) for way in (-np.inf, np.inf)]
        values = np.concatenate([specials(source), ends, *around, np.array([-0.9, -1.5, 1.9], source)])
        array = in_every_lane(source, values)
        wanted = [nearest(number, dtype) for number in array.astype(np.float64).tolist()]
        x = ps.asarray(array, device=device)
        assert x.astype(getattr(ps, dtype)).tolist() == wanted
        assert ps.jit(lambda x: (x + 0).astype(getattr(ps, dtype)))(x).tolist() == wanted
