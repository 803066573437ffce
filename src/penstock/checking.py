"""Checks that a device computes the same as NumPy, for a few operations of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock import nn, optim
from penstock.drivers.host import HostDriver
from penstock.runtime import Device

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    what: str
    seconds: float  # including compilation
    problem: str = ""  # empty if all is right


def check(device: Device) -> Iterator[Finding]:
    """Run all checks in turn. A check that raises is a problem, like wrong values."""
    for what, attempt in _CHECKS.items():
        start = perf_counter()
        try:
            attempt(device)
            problem = ""
        except Exception as error:  # a driver may raise anything
            problem = f"{type(error).__name__}: {error}" if not isinstance(error, _Wrong) else str(error)
        yield Finding(what, perf_counter() - start, problem)


class _Wrong(Exception):
    """Values that differ."""


def _same(what: str, result: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Raise unless both are equal, up to a share of the largest expected value."""
    got, wanted = np.asarray(result), np.asarray(expected)
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise _Wrong(
            f"{what} is {got.dtype} of shape {got.shape}, not {wanted.dtype} of shape {wanted.shape}"
        )
    if not got.size:
        return
    off = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
    worst = float(np.max(np.where(np.isnan(off), np.inf, off)))
    if worst > tolerance * max(float(np.max(np.abs(wanted.astype(np.float64)))), 1e-30):
        index = np.unravel_index(int(np.argmax(off)), got.shape)
        at = tuple(map(int, index))
        raise _Wrong(f"{what} is off by {worst:.3g}: {got[index]} at {at}, where {wanted[index]} is right")


def _run(device: Device, function: Callable[..., Any], *arrays: Array) -> Any:
    """The result of a function of tensors as a program of the device, after a replay, as in training."""
    step = ps.jit(function)
    for _ in range(2):
        results = step(*(ps.asarray(array, device=device) for array in arrays))
    return [result.numpy() for result in results] if isinstance(results, tuple) else results.numpy()


def _floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _copies(device: Device) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1_000_003, np.uint8)
    buffer = device.upload(data)
    _same("what was uploaded", device.download(buffer).wait(), data)
    device.upload(data[:777], into=buffer, offset=12_345)
    data[12_345 : 12_345 + 777] = data[:777].copy()
    target = device.empty(buffer.nbytes)
    device.copy(target, buffer)
    device.copy(target, buffer, 1001, target_offset=3, source_offset=500_001)
    data[3:1004] = data[500_001:501_002].copy()
    _same("what was copied on the device", device.download(target).wait(), data)


def _elementwise(device: Device) -> None:
    x, y = _floats(10_007), _floats(10_007, seed=1)
    result = _run(device, lambda x, y: ps.tanh(x) * y + ps.exp(-x * x) / (1 + abs(y)), x, y)
    _same("an expression", result, np.tanh(x) * y + np.exp(-x * x) / (1 + np.abs(y)), 1e-5)
    integers = np.random.default_rng(2).integers(-(2**31), 2**31, 1003).astype(np.int32)
    result = _run(device, lambda n: ps.where(n > 0, n * 7 + 3, n // 5), integers)
    _same("integers", result, np.where(integers > 0, integers * np.int32(7) + np.int32(3), integers // 5))


def _reductions(device: Device) -> None:
    x = _floats(37, 1001)
    result = _run(device, lambda x: (ps.sum(x, axis=1), ps.max(x, axis=0), ps.mean(x)), x)
    _same("sums of rows", result[0], x.sum(1), 1e-5)
    _same("largest of columns", result[1], x.max(0))
    _same("a mean", result[2], x.mean(dtype=np.float64).astype(np.float32), 1e-3)
    many = _floats(300_000, seed=1)
    _same("a long sum", _run(device, lambda x: ps.sum(x * x), many), np.sum(many * many), 1e-5)


def _products(device: Device) -> None:
    a, b = _floats(65, 130), _floats(130, 70, seed=1)
    _same("a product", _run(device, lambda a, b: a @ b, a, b), a @ b, 1e-5)
    a, b = _floats(3, 128, 64), _floats(3, 128, 64, seed=1)
    result = _run(device, lambda a, b: nn.functional.gelu(ps.matmul(a, b.mT), "tanh"), a, b)
    x = a.astype(np.float64) @ b.swapaxes(1, 2)
    gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    _same("products with what follows them", result, gelu.astype(np.float32), 1e-5)


def _softmax(device: Device) -> None:
    x = 10 * _floats(64, 501)
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    result = _run(device, lambda x: nn.functional.softmax(x, axis=-1), x)
    _same("a softmax", result, (exact / exact.sum(1, keepdims=True)).astype(np.float32), 1e-5)


def _indices(device: Device) -> None:
    table, upstream = _floats(50, 24), _floats(200, 24, seed=1)
    index = np.random.default_rng(2).integers(0, 50, 200)

    def gather_and_back(table: Any, index: Any, upstream: Any) -> Any:
        def loss(table: Any) -> Any:
            return ps.sum(ps.take(table, index, axis=0) * upstream)

        return ps.take(table, index, axis=0), ps.grad(loss)(table)

    rows, gradient = _run(device, gather_and_back, table, index, upstream)
    expected = np.zeros_like(table)
    np.add.at(expected, index, upstream)
    _same("rows by their indices", rows, table[index])
    _same("sums by their indices", gradient, expected, 1e-5)


def _sorting(device: Device) -> None:
    x = _floats(5, 1000)
    result = _run(device, lambda x: (ps.sort(x), ps.argmax(x, axis=1), ps.cumulative_sum(x, axis=1)), x)
    _same("a sort", result[0], np.sort(x))
    _same("indices of the largest", result[1], np.argmax(x, axis=1))
    _same("running sums", result[2], np.cumsum(x, axis=1), 1e-5)


def _random(device: Device) -> None:
    host = Device.over(HostDriver())
    many = (200_003,)  # so many that the device computes them, even the first time
    ours, theirs = ps.random.Generator(7, device), ps.random.Generator(7, host)
    _same("random bits", ours.integers(0, 1 << 20, many).numpy(), theirs.integers(0, 1 << 20, many).numpy())
    _same("random numbers", ours.uniform(many).numpy(), theirs.uniform(many).numpy())
    host.close()


def _training(device: Device) -> None:
    inputs = ps.asarray(np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32), device=device)
    wanted = ps.asarray(np.array([[0], [1], [1], [0]], np.float32), device=device)
    ps.random.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 8, device=device), nn.Tanh(), nn.Linear(8, 1, device=device))
    optimizer = optim.Adam(model.parameters(), lr=0.05)

    @ps.jit
    def step(inputs: Any, wanted: Any) -> Any:
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(200):
        loss = float(step(inputs, wanted))
    if not loss < 0.01:
        raise _Wrong(f"a network that learns exclusive or has a loss of {loss:.3g} after 200 steps")


_CHECKS: dict[str, Callable[[Device], None]] = {
    "copies": _copies,
    "elementwise": _elementwise,
    "reductions": _reductions,
    "matrix products": _products,
    "softmax": _softmax,
    "gather and scatter": _indices,
    "sorting and scans": _sorting,
    "random numbers": _random,
    "training": _training,
}
