"""Programs with exactly one flaw each, and the same without it, for tests and benchmarks of `ps.advise`.

The responsible line has the comment `flaw`. Each function prepares everything and returns a loop to call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock import Device, Tensor, nn, optim
from penstock.config import Settings
from penstock.profiling.evidence import Evidence

Array = npt.NDArray[Any]
Loop = Callable[[], object]
RANDOM = np.random.default_rng(1)


@dataclass(frozen=True)
class Flaw:
    """A flaw, a program with and without it, and what is counted of it."""

    name: str
    flawed: Callable[[Device], Loop]
    mended: Callable[[Device], Loop]
    counted: str
    count: Callable[[Evidence], float]  # the quantity that the advice says would fall
    settings: Settings | None = None  # of the device, for the flawed program


def array(*shape: int) -> Array:
    return RANDOM.standard_normal(shape, dtype=np.float32)


def captured(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A step under `jit`."""
    return ps.jit(function)


def trained(device: Device, width: int) -> Callable[..., Tensor]:
    """A step of training of a small network."""
    model = nn.Sequential(
        nn.Linear(width, width, device=device), nn.Tanh(), nn.Linear(width, 1, device=device)
    )
    optimizer = optim.SGD(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # without jit around it, flaw: unjitted-step
        return loss

    return step


# Batches


def in_batches(device: Device, size: int) -> Loop:
    step = captured(trained(device, 48))
    samples, wanted = array(6400, 48), array(6400, 1)

    def loop() -> None:
        for start in range(0, len(samples), size):
            part = slice(start, start + size)
            x, y = ps.asarray(samples[part], device=device), ps.asarray(wanted[part], device=device)
            loss = step(x, y)  # flaw: small-batches
        loss.item()

    loop()
    return loop


def small_batches(device: Device) -> Loop:
    return in_batches(device, 8)


def larger_batches(device: Device) -> Loop:
    return in_batches(device, 64)


def small_operations(device: Device) -> Loop:
    rows = [ps.asarray(row, device=device) for row in array(400, 64)]
    scale = ps.asarray(array(64), device=device)

    def loop() -> list[float]:
        return [ps.sum(row * scale).item() for row in rows]  # flaw: small-operations

    loop()
    return loop


def one_operation(device: Device) -> Loop:
    rows, scale = ps.asarray(array(400, 64), device=device), ps.asarray(array(64), device=device)

    def loop() -> list[float]:
        result: list[float] = ps.sum(rows * scale, axis=1).tolist()
        return result

    loop()
    return loop


# Shapes and dtypes


def in_lengths(device: Device, lengths: list[int]) -> Loop:
    weights = ps.asarray(array(128, 128), device=device)
    text = array(max(lengths) + len(lengths), 128)

    def loop() -> None:
        # A new function, as in a new process, so that captures belong to this loop.
        mixed = captured(lambda x: ps.sum(ps.tanh(x @ weights), axis=0))
        for start, length in enumerate(lengths):
            x = ps.asarray(text[start : start + length], device=device)
            result = mixed(x)  # flaw: changing-shapes
        result.numpy()

    return loop


def changing_shapes(device: Device) -> Loop:
    return in_lengths(device, list(range(101, 117)))


def padded_shapes(device: Device) -> Loop:
    return in_lengths(device, [104] * 4 + [108] * 4 + [112] * 4 + [116] * 4)


def chain(x: Tensor) -> Tensor:
    return ps.sum((x * 2 + 1) * x - x, axis=1)


def in_dtype(device: Device, dtype: type) -> Loop:
    drawn: Array = np.random.default_rng(1).random((1024, 1024)).astype(dtype)
    chained = captured(chain)

    def loop() -> None:
        x = ps.asarray(drawn, device=device)  # flaw: wide-dtype
        for _ in range(40):
            result = chained(x)
        result.numpy()

    loop()
    return loop


def wide_dtype(device: Device) -> Loop:
    return in_dtype(device, np.float64)


def narrow_dtype(device: Device) -> Loop:
    return in_dtype(device, np.float32)


def host_operation(device: Device) -> Loop:
    x = ps.asarray((array(256, 512) + 1j * array(256, 512)).astype(np.complex64), device=device)
    power = captured(lambda x: ps.sum(ps.abs(x * x), axis=1))

    def loop() -> None:
        for _ in range(20):
            result = power(x)  # flaw: host-operation
        result.numpy()

    loop()
    return loop


def real_numbers(device: Device) -> Loop:
    x, y = ps.asarray(array(256, 512), device=device), ps.asarray(array(256, 512), device=device)
    power = captured(lambda x, y: ps.sum(x * x + y * y, axis=1))

    def loop() -> None:
        for _ in range(20):
            result = power(x, y)
        result.numpy()

    loop()
    return loop


# Copies and waits


def round_trip(device: Device) -> Loop:
    weights = ps.asarray(array(64, 64) / 8, device=device)
    start = array(4096, 64)
    mixed = captured(lambda x: x @ weights)

    def loop() -> None:
        x = ps.asarray(start, device=device)
        for _ in range(20):
            values = mixed(x).numpy()  # flaw: round-trip
            x = ps.asarray(np.sign(values) * np.sqrt(np.abs(values)), device=device)
        x.numpy()

    loop()
    return loop


def on_the_device(device: Device) -> Loop:
    weights = ps.asarray(array(64, 64) / 8, device=device)
    start = array(4096, 64)

    @ps.jit
    def mixed(x: Tensor) -> Tensor:
        y = x @ weights
        return ps.sign(y) * ps.sqrt(ps.abs(y))

    def loop() -> None:
        x = ps.asarray(start, device=device)
        for _ in range(20):
            x = mixed(x)
        x.numpy()

    loop()
    return loop


def repeated_upload(device: Device) -> Loop:
    table, total = array(1024, 2048), captured(lambda x: ps.sum(x, axis=1))

    def loop() -> None:
        for _ in range(30):
            x = ps.asarray(table, device=device)  # flaw: repeated-upload
            result = total(x)
        result.numpy()

    loop()
    return loop


def one_upload(device: Device) -> Loop:
    table, total = array(1024, 2048), captured(lambda x: ps.sum(x, axis=1))

    def loop() -> None:
        x = ps.asarray(table, device=device)
        for _ in range(30):
            result = total(x)
        result.numpy()

    loop()
    return loop


def waiting(device: Device, every: int) -> Loop:
    weights = ps.asarray(array(1024, 1024), device=device)
    x = ps.asarray(array(1024, 1024), device=device)
    mixed = captured(lambda x: ps.max(x @ weights))
    noise = array(100_000)
    mixed(x).item()
    start = time.perf_counter()
    mixed(x).item()
    seconds = time.perf_counter() - start

    def loop() -> None:
        for number in range(1, 21):
            largest = mixed(x)
            if number % every == 0:
                largest.item()  # flaw: hidden-wait
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:  # what else a program does, for as long as the product takes
                np.sort(noise)

    loop()
    return loop


def hidden_wait(device: Device) -> Loop:
    return waiting(device, every=1)


def rare_waits(device: Device) -> Loop:
    return waiting(device, every=10)


class Batches:
    """Arrays that are slow to make."""

    def __init__(self) -> None:
        self._random, self._number = np.random.default_rng(1), 0

    def __next__(self) -> Array:
        self._number += 1
        return self._random.standard_normal((512, 1024), dtype=np.float32)

    def state(self) -> int:
        return self._number


def late_data(device: Device) -> Loop:
    mixed, noise = captured(lambda x: ps.max(x)), array(400_000)

    def loop() -> None:
        batches = Batches()
        for _ in range(20):
            x = ps.asarray(next(batches), device=device)  # flaw: late-data
            np.sort(noise)  # other work of a program for each step
            largest = mixed(x)
        largest.item()

    loop()
    return loop


def data_ahead(device: Device) -> Loop:
    mixed, noise = captured(lambda x: ps.max(x)), array(400_000)

    def loop() -> None:
        with ps.data.Prefetch(Batches(), device) as batches:
            for _ in range(20):
                x = next(batches)
                np.sort(noise)
                largest = mixed(x)
            largest.item()

    loop()
    return loop


# Fusion and recording


def computed_twice(device: Device) -> Loop:
    x, weights = ps.asarray(array(1024, 1024), device=device), ps.asarray(array(1024, 1024), device=device)

    def loop() -> None:
        for _ in range(12):
            y = x @ weights
            ps.max(y).realize()  # flaw: computed-twice
            ps.sum(y).realize()
        device.sync()

    loop()
    loop()
    return loop


def computed_once(device: Device) -> Loop:
    x, weights = ps.asarray(array(1024, 1024), device=device), ps.asarray(array(1024, 1024), device=device)

    @ps.jit
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ weights
        return ps.max(y), ps.sum(y)

    def loop() -> None:
        for _ in range(12):
            both(x)
        device.sync()

    loop()
    return loop


def forced_realization(device: Device) -> Loop:
    x = ps.asarray(array(2048, 1024), device=device)

    def loop() -> None:
        for _ in range(20):
            y = (x * 2 + 1).realize()  # flaw: forced-realization
            (y * y - 3).realize()
        device.sync()

    loop()
    loop()
    return loop


def left_alone(device: Device) -> Loop:
    x = ps.asarray(array(2048, 1024), device=device)

    def loop() -> None:
        for _ in range(20):
            y = x * 2 + 1
            (y * y - 3).realize()
        device.sync()

    loop()
    loop()
    return loop


TEXT = "out[i] = x[i] / (1.0f + fabs(x[i]));"
raw_softsign = ps.raw_kernel("softsign", {"opencl": TEXT, "cuda": TEXT}, inputs=["x"], outputs={"out": "x"})
softsign = ps.kernel("x / (1 + abs(x))")


def between_maps(device: Device, own: Callable[[Tensor], Tensor]) -> Loop:
    x = ps.asarray(array(2048, 1024), device=device)
    chained = captured(lambda x: own(x * 2 + 1) * 3 - x)

    def loop() -> None:
        for _ in range(20):
            chained(x)  # flaw: raw-kernel
        device.sync()

    loop()
    return loop


def raw_kernel(device: Device) -> Loop:
    return between_maps(device, raw_softsign)


def formula(device: Device) -> Loop:
    return between_maps(device, softsign)


def unjitted_step(device: Device) -> Loop:
    step = trained(device, 32)
    x, y = ps.asarray(array(64, 32), device=device), ps.asarray(array(64, 1), device=device)

    def loop() -> None:
        for _ in range(150):
            loss = step(x, y)
            loss.item()

    loop()
    return loop


def jitted_step(device: Device) -> Loop:
    step = captured(trained(device, 32))
    x, y = ps.asarray(array(64, 32), device=device), ps.asarray(array(64, 1), device=device)

    def loop() -> None:
        for _ in range(150):
            loss = step(x, y)
            loss.item()

    loop()
    return loop


# Memory


def growing_memory(device: Device) -> Loop:
    x, doubled = ps.asarray(array(256, 256), device=device), captured(lambda x: x * 2)

    def loop() -> list[Tensor]:
        kept = []
        for _ in range(60):
            kept.append(doubled(x))  # flaw: growing-memory
        device.sync()
        return kept

    loop()
    return loop


def numbers_kept(device: Device) -> Loop:
    x, doubled = ps.asarray(array(256, 256), device=device), captured(lambda x: ps.max(x * 2))

    def loop() -> list[Tensor]:
        kept = []
        for _ in range(60):
            kept.append(doubled(x))
        device.sync()
        return kept

    loop()
    return loop


def pool_misses(device: Device) -> Loop:
    x = ps.asarray(array(16, 1024), device=device)

    @ps.jit
    def several(x: Tensor) -> list[Tensor]:
        return [x * number for number in range(1, 13)]

    def loop() -> None:
        for _ in range(40):
            several(x)  # flaw: pool-misses
        device.sync()

    loop()
    return loop


def in_phases(device: Device, trim: bool) -> Loop:
    doubled = captured(lambda x: ps.sum(x * 2))

    def loop() -> None:
        for megabytes in (64, 80, 96):
            x = ps.zeros((megabytes, 1 << 18), device=device).realize()
            for _ in range(3):
                total = doubled(x)
            total.item()
            del x
            if trim:
                ps.memory.trim()

    loop()
    ps.memory.trim()
    return loop


def idle_memory(device: Device) -> Loop:
    return in_phases(device, trim=False)


def trimmed(device: Device) -> Loop:
    return in_phases(device, trim=True)


def deep(device: Device, again: bool) -> Loop:
    weights = [ps.asarray(array(64, 64) / 8, device=device).requires_grad_() for _ in range(16)]
    x = ps.asarray(array(4096, 64), device=device)

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = ps.tanh(x @ weight)
        return x

    @ps.jit
    def step(x: Tensor) -> list[Tensor | None]:
        for start in range(0, len(weights), 4):
            part = weights[start : start + 4]
            x = ps.checkpoint(layers, x, *part) if again else layers(x, *part)
        ps.sum(x * x).backward()
        slopes = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        return slopes

    def loop() -> None:
        for _ in range(10):
            slopes = step(x)  # flaw: tight-memory
        assert slopes[0] is not None
        slopes[0].numpy()

    loop()
    device.limit_bytes = LIMIT
    return loop


LIMIT = 19 << 20  # bytes, nearly all of which kept values take


def tight_memory(device: Device) -> Loop:
    return deep(device, again=False)


def checkpointed(device: Device) -> Loop:
    return deep(device, again=True)


def launches(evidence: Evidence) -> float:
    return sum(run.launches for run in evidence.runs)


def runs(evidence: Evidence) -> float:
    return sum(run.runs for run in evidence.runs)


def built(evidence: Evidence) -> float:
    return sum(run.built for run in evidence.runs)


def recorded(evidence: Evidence) -> float:
    return sum(run.nodes for run in evidence.runs)


def moved(evidence: Evidence) -> float:
    return sum(run.nbytes for run in evidence.runs)


def sent(evidence: Evidence) -> float:
    return sum(transfer.nbytes for transfer in evidence.transfers)


def operations(evidence: Evidence) -> float:
    return sum(run.operations for run in evidence.runs)


def read(evidence: Evidence) -> float:
    return sum(wait.count for wait in evidence.waits if wait.why in ("download", "view"))


def by_numpy(evidence: Evidence) -> float:
    return sum(sum(run.host_steps.values()) for run in evidence.runs)


def between(evidence: Evidence) -> float:
    return sum(transfer.calls - transfer.beside for transfer in evidence.transfers)


FLAWS = [
    Flaw("small-batches", small_batches, larger_batches, "launches", launches),
    Flaw("small-operations", small_operations, one_operation, "runs", runs),
    Flaw("changing-shapes", changing_shapes, padded_shapes, "programs built", built),
    Flaw("wide-dtype", wide_dtype, narrow_dtype, "bytes moved", moved),
    Flaw("host-operation", host_operation, real_numbers, "steps of NumPy", by_numpy),
    Flaw("round-trip", round_trip, on_the_device, "bytes sent", sent),
    Flaw("repeated-upload", repeated_upload, one_upload, "bytes sent", sent),
    Flaw("hidden-wait", hidden_wait, rare_waits, "waits", read),
    Flaw("late-data", late_data, data_ahead, "arrays sent between steps", between),
    Flaw("computed-twice", computed_twice, computed_once, "operations", operations),
    Flaw("forced-realization", forced_realization, left_alone, "bytes moved", moved),
    Flaw("raw-kernel", raw_kernel, formula, "bytes moved", moved),
    Flaw("unjitted-step", unjitted_step, jitted_step, "operations recorded", recorded),
    Flaw("growing-memory", growing_memory, numbers_kept, "peak bytes", lambda evidence: evidence.peak_bytes),
    Flaw(
        "pool-misses",
        pool_misses,
        pool_misses,
        "pool misses",
        lambda evidence: evidence.pool_misses,
        Settings(pool_capacity=0),
    ),
    Flaw("idle-memory", idle_memory, trimmed, "bytes taken", lambda evidence: evidence.taken_bytes),
    Flaw("tight-memory", tight_memory, checkpointed, "peak bytes", lambda evidence: evidence.peak_bytes),
]
