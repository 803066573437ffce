"""Workloads that measure how fast a device is.

Other processes can only slow a measurement down, so the best of several counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from penstock.execution.structure import Structure
from penstock.graph.dtypes import bfloat16, float16, float32, float64
from penstock.runtime import Device
from penstock.tensor.creation import asarray
from penstock.tensor.jit import jit
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import astype
from penstock.tensor.reduction import sum as sum_

measuring: ContextVar[bool] = ContextVar("measuring", default=False)  # on a device opened only for that

DTYPES = {str(dtype): dtype for dtype in (float16, bfloat16, float32, float64)}
_MOVED = {"cpu": 64 << 20, "gpu": 256 << 20}  # bytes of an array, beyond the caches
_TRANSFERRED = 32 << 20  # bytes of a copy between host and device
_LENGTH, _MOST_LENGTH = 1024, 8192  # of the matrices of products
_LONG = 2e-3  # seconds of a product that is large enough to measure
_LAUNCHED, _RECORDED = 100, 200  # in a row, for each measured time
_TRIES = 3  # at least
_AGREEING = 1.1  # if the shortest times differ by more than this factor, it is tried for longer:
_PATIENCE = 3  # so many times as long


@contextmanager
def device_for_measuring(device: Device) -> Iterator[Device]:
    """The same device opened a second time, independent of the user's work; profiles ignore it.

    A device whose driver was given by the user cannot be opened a second time, and is used itself.
    """
    token = measuring.set(True)
    own = Device(f"{device.name} (measured)", device.capabilities, device.another_driver)
    try:
        if own.driver is device.driver:
            yield device
            return
        try:
            yield own
        finally:
            own.close()
    finally:
        measuring.reset(token)


def most_bytes(device: Device) -> int:
    """The most memory that these workloads take."""
    return 4 * _MOVED[_size(device)]


def _size(device: Device) -> str:
    return "gpu" if device.capabilities.kind == "gpu" else "cpu"


def bandwidth(device: Device, seconds: float) -> float:
    """Bytes per second: the best of a copy, a kernel that reads and writes, and a kernel that only reads.

    Each is tried for about so many seconds.
    """
    nbytes = min(_MOVED[_size(device)], device.capabilities.total_bytes // 16)
    array = np.ones(nbytes // 4, np.float32)
    source, target = device.upload(array), device.empty(array.nbytes)
    copied = best_seconds(device, partial(device.copy, target, source), seconds)
    del source, target
    x = asarray(array, device=device)
    doubled = best_seconds(device, partial(jit(lambda x: x * 2), x), seconds)
    read = best_seconds(device, partial(jit(sum_), x), seconds)
    return array.nbytes / min(copied / 2, doubled / 2, read)


def launches(device: Device, seconds: float) -> float:
    """Replays per second of a jitted function that does almost nothing."""
    x = asarray(np.ones(64, np.float32), device=device)
    doubled: Callable[..., Any] = jit(lambda x: x * 2)

    def replay() -> None:
        for _ in range(_LAUNCHED):
            doubled(x)

    return _LAUNCHED / best_seconds(device, replay, seconds)


def recorded_operations(device: Device, seconds: float) -> float:
    """Operations per second that are recorded and looked up, without `jit`."""
    x = asarray(np.ones(64, np.float32), device=device)

    def record() -> None:
        y = x
        for _ in range(_RECORDED):
            y = y + 1.0
        Structure([y._node])

    return _RECORDED / best_seconds(device, record, seconds)


def product_operations(device: Device, dtype: str, seconds: float) -> float:
    """Operations per second of a large matrix product."""
    length = _LENGTH
    taken = _product_seconds(device, length, dtype, seconds)
    if taken < _LONG:
        while taken < _LONG and length < _MOST_LENGTH:  # each takes about eight times as long
            length, taken = 2 * length, 8 * taken
        taken = _product_seconds(device, length, dtype, seconds)
    return 2 * length**3 / taken


def _product_seconds(device: Device, length: int, dtype: str, seconds: float) -> float:
    # Few bits change between values, so that a GPU takes little power and does not lower its clock.
    array = np.ones((length, length), np.float32)
    x = astype(asarray(array, device=device), DTYPES[dtype])
    return best_seconds(device, partial(jit(lambda x: matmul(x, x)), x), seconds)


def transfers(device: Device, seconds: float) -> tuple[float, float]:
    """Bytes per second to the device and from it, between it and pinned memory, by the driver only."""
    driver = device.driver
    buffer = device.empty(_TRANSFERRED)
    pinned = driver.allocate(_TRANSFERRED, pinned=True)
    host = pinned.host
    assert host is not None

    def upload() -> None:
        event = driver.write(driver.incoming, buffer.memory, buffer.offset, host, None)
        driver.flush(driver.incoming)
        driver.wait(event)

    def download() -> None:
        event = driver.read(driver.outgoing, host, buffer.memory, buffer.offset, None)
        driver.flush(driver.outgoing)
        driver.wait(event)

    try:
        with device.stream.lock:
            times = [best_seconds(device, call, seconds / 2) for call in (upload, download)]
    finally:
        driver.free(pinned)
    return _TRANSFERRED / times[0], _TRANSFERRED / times[1]


def link(device: Device, seconds: float) -> float:
    """Bytes per second in each direction between the device and pinned memory, while both are busy."""
    driver = device.driver
    buffers = [device.empty(_TRANSFERRED) for _ in range(2)]
    pinned = [driver.allocate(_TRANSFERRED, pinned=True) for _ in range(2)]
    (host, other), (memory, source) = ([part.host for part in pinned], [part.memory for part in buffers])
    assert host is not None
    assert other is not None

    def both() -> None:
        arriving = driver.write(driver.incoming, memory, buffers[0].offset, host, None)
        leaving = driver.read(driver.outgoing, other, source, buffers[1].offset, None)
        for queue in (driver.incoming, driver.outgoing):
            driver.flush(queue)
        driver.wait(arriving)
        driver.wait(leaving)

    try:
        with device.stream.lock:
            return _TRANSFERRED / best_seconds(device, both, seconds)
    finally:
        for part in pinned:
            driver.free(part)


def best_seconds(
    device: Device, call: Callable[[], Any], seconds: float, clock: Callable[[], float] = perf_counter
) -> float:
    """The shortest time of a call including the wait for it, of several that take about so many seconds.

    It is tried for longer if the shortest times differ.
    """
    for _ in range(2):
        call()  # compiles
    device.sync()
    shortest: list[float] = []
    end = clock() + seconds
    last = end + _PATIENCE * seconds
    while True:
        start = clock()
        call()
        device.sync()
        now = clock()
        shortest = sorted([*shortest, now - start])[:_TRIES]
        if len(shortest) == _TRIES and now >= (end if shortest[-1] < _AGREEING * shortest[0] else last):
            return shortest[0]


def mean_seconds(
    device: Device, call: Callable[[], Any], seconds: float, clock: Callable[[], float] = perf_counter
) -> float:
    """The time of one of many calls in a row that take about so many seconds."""
    count = max(round(seconds / best_seconds(device, call, seconds / 8, clock)), 1)
    start = clock()
    for _ in range(count):
        call()
    device.sync()
    return (clock() - start) / count
