"""Freedoms and errors of shader compilers, which results must not depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, WEBGPU_KINDS
from test_fusion import ALIASES
from test_wgsl import INF, MOST_UNITS, NAN, UNARY, units

import penstock as ps
from penstock import Device
from penstock.config import Settings

WIDENED = [("int8", "int32"), ("int16", "int32"), ("uint8", "int32"), ("uint16", "int32")]
WIDENED += [(narrow, "int64") for narrow in ("int8", "int16", "int32", "uint8", "uint32")]


@pytest.fixture(scope="module")
def real() -> Iterator[Device]:
    """A WebGPU device that computes everything by kernels."""
    if not WEBGPU_KINDS:
        pytest.skip("there is no adapter")
    made = Device.over(DRIVERS["webgpu"](), Settings(force_kernels=True))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_and_differences_are_not_folded(real: Device, dtype: str) -> None:
    """WGSL lets compilers assume that there is no NaN, and put sums in another order."""
    a = np.array([NAN, INF, -INF, 0.0, -0.0, 1.0, 0.1, 1e-30, 1e30, 3e38, -2.5]).astype(np.float32)
    x, y = ps.asarray(a, device=real), ps.asarray(a[::-1].copy(), device=real)
    x, y = (ps.astype(t, getattr(ps, dtype)) for t in (x, y))
    formulas: list[Callable[[Any, Any], Any]] = [
        lambda x, y: x - x,
        lambda x, y: x + -x,
        lambda x, y: -x + x,
        lambda x, y: (x + y) - x,
        lambda x, y: x - (y + x),
        lambda x, y: (x + 1.5) - 1.5,
        lambda x, y: 1.5 - (1.5 + x),
        lambda x, y: x + y,
        lambda x, y: (x + y) < x,
        lambda x, y: (x > x) * y,
        lambda x, y: (x < x) * y - y,
    ]
    for number, formula in enumerate(formulas):
        result = formula(x, y).numpy().astype(np.float32)
        with np.errstate(all="ignore"):
            # In a kernel, values of 16 bits are rounded where they are stored.
            expected = formula(*(t.numpy().astype(np.float32) for t in (x, y)))
            if expected.dtype == np.float32:
                expected = expected.astype(x.numpy().dtype)
        np.testing.assert_array_equal(result, expected.astype(np.float32), f"formula {number}")


@pytest.mark.parametrize("name", [*UNARY.split(), "abs", "sign", "negative", "copysign"])
def test_functions_after_a_barrier(real: Device, name: str) -> None:
    """Given another sign as bits, values come out wrong after a barrier where Mesa has LLVM 15."""
    rng = np.random.default_rng(5)
    a = (rng.integers(-20, 21, (6, 40)) / 64).astype(np.float32)  # of which all sums are exact
    x = ps.asarray(a, device=real)
    function, exact = getattr(ps, name), getattr(np, ALIASES.get(name, name))
    more = (-1.5,) if name == "copysign" else ()
    for given, values in (
        (ps.sum(x, axis=1), a.sum(axis=1)),
        (x - ps.max(x, axis=1, keepdims=True), a - a.max(axis=1, keepdims=True)),
    ):
        with np.errstate(all="ignore"):
            expected = np.asarray(exact(values.astype(np.float64), *more))
        assert units(function(given, *more).numpy(), expected).max(initial=0) < MOST_UNITS.get(name, 3.5)


@pytest.mark.parametrize("name", ["atan2", "hypot", "pow", "copysign", "nextafter", "divide", "remainder"])
def test_functions_of_a_value_and_itself(real: Device, name: str) -> None:
    a = np.array([-3.0, -1.5, -1.0, -0.0, 0.0, 1.0, 2.5, 40.0, NAN, INF, -INF], np.float32)
    x = ps.asarray(a, device=real)
    with np.errstate(all="ignore"):
        wide = a if name == "nextafter" else a.astype(np.float64)
        expected = getattr(np, ALIASES.get(name, name))(wide, wide)
    assert units(getattr(ps, name)(x, x).numpy(), expected).max() < 4


@pytest.mark.parametrize(("narrow", "wide"), WIDENED)
def test_whole_numbers_that_were_widened(real: Device, narrow: str, wide: str) -> None:
    """Mesa 22 takes widened numbers to be never less than a constant of 64 bits."""
    ends = np.iinfo(narrow)
    a = np.array([ends.min, ends.max, 0, 1, 2, 7, 100, *([-1, -7, -100] if ends.min else [])], narrow)
    a, b = (part.reshape(-1) for part in np.meshgrid(a, a))
    x, y = (ps.astype(ps.asarray(part, device=real), getattr(ps, wide)) for part in (a, b))
    for name in ("floor_divide", "remainder", "maximum", "less", "subtract"):
        with np.errstate(all="ignore"):
            expected = getattr(np, name)(a.astype(wide), b.astype(wide))
        np.testing.assert_array_equal(getattr(ps, name)(x, y).numpy(), expected, name)
    for name in ("abs", "sign", "negative"):
        np.testing.assert_array_equal(getattr(ps, name)(x).numpy(), getattr(np, name)(a.astype(wide)), name)
    np.testing.assert_array_equal((x < 0).numpy(), a.astype(wide) < 0)
    zero, one = (ps.astype(x != x, getattr(ps, wide)), ps.astype(x == x, getattr(ps, wide)))
    for name in ("less", "less_equal", "greater", "greater_equal", "equal"):
        for constant, number in ((zero, 0), (one, 1)):
            expected = getattr(np, name)(a.astype(wide), number)
            np.testing.assert_array_equal(getattr(ps, name)(x, constant).numpy(), expected, name)
    np.testing.assert_array_equal(
        (x >> 63 if wide == "int64" else x >> 31).numpy(), (a.astype(wide) < 0) * -1
    )
