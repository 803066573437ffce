"""Indices out of range are refused on every driver and path, with the index, the length and the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL

import penstock as ps
from penstock.device.host import HostDriver
from penstock.dispatch.device import AutoDevice
from penstock.errors import BadIndex
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.runtime import Device

ROWS, WIDTH, COUNT = 7, 5, 4
# Rows of a table, and an index for them; each says what it does to the index before it is looked up.
Function = Callable[[Any, Any], Any]
READS: dict[str, Function] = {
    "embedding": lambda x, i: F.embedding(i, x),
    "x[index]": lambda x, i: x[i],
    "x[1, index]": lambda x, i: x.T[1, i],
    "x[index, index]": lambda x, i: x[i, i % 2],
    "x[:, None, index]": lambda x, i: x.T[:, None, i],
    "take": lambda x, i: ps.take(x, i, axis=0),
    "take_along_axis": lambda x, i: ps.take_along_axis(x, ps.expand_dims(i, axis=1), axis=0),
    "cross_entropy": lambda x, i: F.cross_entropy(x.T[:COUNT], i),
    "linear_cross_entropy": lambda x, i: F.linear_cross_entropy(x[:COUNT], x, i),
    "gradient": lambda x, i: ps.grad(lambda x: ps.sum(F.embedding(i, x) ** 2))(x),
}
FROM_END = ("x[index]", "x[1, index]", "x[index, index]", "x[:, None, index]", "take", "take_along_axis")


@pytest.fixture(params=[*DRIVERS, "auto"])
def on(request: pytest.FixtureRequest) -> Iterator[Device]:
    names = ["opencl-device", "host"] if request.param == "auto" else [request.param]
    members = [Device.over(DRIVERS[name](), SMALL) for name in names]
    yield AutoDevice(members) if request.param == "auto" else members[0]
    for member in members:
        member.close()


def table(on: Device) -> ps.Tensor:
    return ps.asarray(np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH), device=on)


def ids(on: Device, last: int, dtype: Any = np.int64) -> ps.Tensor:
    return ps.asarray(np.array([0, 3, 2, last], dtype), device=on)


def refused(function: Callable[[], ps.Tensor], index: int, line: Callable[..., Any]) -> None:
    """The value cannot be read. The error names the index, the length, and the line of `line`."""
    with pytest.raises(BadIndex) as caught:
        function().numpy()
    error = caught.value
    assert (error.index, error.length) == (index, ROWS)
    assert f"index {index} is out of range" in str(error)
    assert f"length {ROWS}" in str(error)
    assert isinstance(error, IndexError)
    assert error.where == f"{__file__}:{line.__code__.co_firstlineno}"
    assert error.where in str(error)


@pytest.fixture
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of jitted functions, too, kernels compute everything."""
    monkeypatch.setattr("penstock.realize.Structure.waits_for_no_compiler", lambda self, seen: False)


@pytest.mark.parametrize("name", READS)
def test_numpy_refuses_a_bad_index(name: str) -> None:
    on = Device.over(HostDriver("host"), SMALL)
    function, bads = READS[name], (ROWS, 10**6, -ROWS - 1 if name in FROM_END else -1)
    for bad in bads:
        refused(lambda: function(table(on), ids(on, bad)), bad, function)  # noqa: B023
    on.close()


@pytest.mark.parametrize("name", READS)
def test_kernels_refuse_a_bad_index(on: Device, name: str, kernels_only: None) -> None:
    function = READS[name]
    x = table(on)
    for bad in (ROWS, 10**6, -ROWS - 1 if name in FROM_END else -1):
        refused(lambda: function(x, ids(on, bad)), bad, function)  # noqa: B023
    good = function(x, ids(on, ROWS - 1)).numpy()
    assert np.isfinite(good).all()


@pytest.mark.parametrize("name", READS)
def test_jitted_functions_refuse_a_bad_index(on: Device, name: str) -> None:
    function = READS[name]
    jitted, x = ps.jit(lambda x, i: function(x, i)), table(on)
    expected = function(x, ids(on, ROWS - 1)).numpy()
    for bad in (ROWS, -ROWS - 1 if name in FROM_END else -1):
        np.testing.assert_allclose(jitted(x, ids(on, ROWS - 1)).numpy(), expected, 1e-6)
        refused(lambda: jitted(x, ids(on, bad)), bad, function)  # noqa: B023
    np.testing.assert_allclose(jitted(x, ids(on, ROWS - 1)).numpy(), expected, 1e-6)
