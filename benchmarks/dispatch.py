"""Automatic dispatch against each of its devices alone, over a grid of programs and sizes.

    python benchmarks/dispatch.py [--quick] [--save FILE]

Each line runs the same on every device and on `auto`, in turn, and prints the time on `auto` over that on the
best of the others. Times are medians over rounds; the tuning cache starts empty, in a
cache folder of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from measuring import Report
from penstock.dispatch import AutoDevice

SETTLED = 60  # calls on `auto` before its times count: it tries close candidates in them
CALLS = 3  # of a side in a round
PAUSE = 0.01  # seconds, in which the threads of the previous side stop spinning
WITHIN = 1.1  # of the best device's time, which is the goal

Call = Callable[[], Any]
Case = Callable[[ps.Device], Call]  # makes the call on a device


def chain(x: ps.Tensor) -> ps.Tensor:
    y = ps.exp(-(x * 2 + 1))
    return y / (1 + y)


def softmax(x: ps.Tensor) -> ps.Tensor:
    return ps.nn.functional.softmax(x, axis=-1)


def product(x: ps.Tensor) -> ps.Tensor:
    return x @ x


def maps_and_product(x: ps.Tensor) -> ps.Tensor:
    """Long elementwise chains before a product: each may be faster on another device."""
    for _ in range(4):
        x = ps.tanh(x) * 0.5 + ps.exp(-x * x)
    return x @ x.T


def on(function: Callable[..., Any], shape: tuple[int, ...], jitted: bool) -> Case:
    def made(device: ps.Device) -> Call:
        x = ps.asarray(np.random.default_rng(0).random(shape, np.float32), device=device)
        run = ps.jit(function) if jitted else function
        return lambda: run(x).realize()

    return made


def mlp(batch: int, width: int) -> Case:
    """A training step of two layers with Adam, on a batch that comes from the host each time."""
    return lambda device: trained(device, batch, width)


def trained(device: ps.Device, batch: int, width: int) -> Call:
    ps.random.manual_seed(0)
    ps.use(device)
    model = ps.nn.Sequential(ps.nn.Linear(width, width), ps.nn.GELU(), ps.nn.Linear(width, 16))
    optimizer = ps.optim.Adam(model.parameters(), lr=1e-3)
    rng = np.random.default_rng(0)
    data = rng.random((batch, width), np.float32)
    classes = rng.integers(0, 16, batch)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = ps.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return lambda: step(ps.asarray(data, device=device), ps.asarray(classes, device=device))


def cases(quick: bool) -> Iterator[tuple[str, Case]]:
    every = 2 if quick else 1
    for jitted in (False, True):
        how = "jitted" if jitted else "eager"
        for items in [1 << power for power in (8, 11, 14, 16, 18, 20, 22)][::every]:
            yield f"chain of {items} items, {how}", on(chain, (items,), jitted)
        for rows in (1, 16, 256, 4096)[::every]:
            yield f"softmax of {rows} rows of 512, {how}", on(softmax, (rows, 512), jitted)
        for length in (8, 32, 64, 128, 256, 512, 1024)[::every]:
            yield f"matmul of length {length}, {how}", on(product, (length, length), jitted)
        for length in (64, 256, 768)[::every]:
            yield f"maps and matmul of length {length}, {how}", on(maps_and_product, (length,) * 2, jitted)
    for batch, width in ((4, 16), (32, 64), (64, 256), (256, 512))[::every]:
        yield f"MLP step, {batch} x {width}", mlp(batch, width)


def medians(times: dict[ps.Device, list[float]]) -> dict[ps.Device, float]:
    return {device: statistics.median(result) for device, result in times.items()}


def seconds_of(sides: dict[ps.Device, Call], rounds: int) -> dict[ps.Device, list[float]]:
    """The times of each side, including the wait for its results; the sides take turns."""
    times: dict[ps.Device, list[float]] = {device: [] for device in sides}
    chance = random.Random(0)
    for _ in range(rounds):
        # In random order, as the threads of a side may still spin while the next side runs.
        for device in chance.sample(list(sides), len(sides)):
            time.sleep(PAUSE)
            sides[device]()  # wakes the side's own threads
            device.sync()
            for _ in range(CALLS):
                start = time.perf_counter()
                sides[device]()
                device.sync()
                times[device].append(time.perf_counter() - start)
    return times


def measured_line(auto: AutoDevice, report: Report) -> None:
    start = time.perf_counter()
    assert auto.dispatcher.rates
    took = time.perf_counter() - start
    names = " and ".join(member.name for member in auto.members)
    report.add("to measure the machine", took, "s", "< 5 s", took < 5, names)


def grid_lines(auto: AutoDevice, report: Report, quick: bool) -> None:
    ratios, chosen = [], []
    for name, make in cases(quick):
        sides: dict[ps.Device, Call] = {device: make(device) for device in (*auto.members, auto)}
        for device, call in sides.items():
            for _ in range(SETTLED if device is auto else 4):
                call()
            device.sync()
        times = seconds_of(sides, 7 if quick else 15)
        result = medians(times)
        if result[auto] >= WITHIN * min(result[member] for member in auto.members):
            # Other load of the machine affects sides unequally: more rounds tell it from a bad choice.
            for device, more in seconds_of(sides, 30).items():
                times[device] += more
            result = medians(times)
        best = min(result[member] for member in auto.members)
        ratio = result[auto] / best
        ratios.append(ratio)
        holder = auto.holder(sides[auto]()._node.value)
        where = holder.name
        chosen.append(
            min(result[holder], result[auto]) / best
        )  # the second device, if a program is split between two
        detail = ", ".join(f"{device.name} {1e6 * result[device]:.0f}" for device in sides)
        report.add(name, ratio, "x", "< 1.1x", ratio < WITHIN, f"{detail} µs; on {where}")
    share = sum(ratio < WITHIN for ratio in ratios) / len(ratios)
    report.add("the worst of the grid", max(ratios), "x", "< 1.1x", max(ratios) < WITHIN, "")
    report.add("the median of the grid", statistics.median(ratios), "x", "", None, "")
    report.add("within 10% of the best device", 100 * share, "%", "", None, f"of {len(ratios)} programs")
    right = 100 * sum(ratio < WITHIN for ratio in chosen) / len(chosen)
    detail = "by the time of the chosen device itself"
    report.add("choices within 10% of the best", right, "%", "100 %", right == 100, detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every other size, fewer rounds")
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        auto = ps.use("auto")
        assert isinstance(auto, AutoDevice)
        print(f"{auto.name}: {auto.capabilities.description}\n")
        report = Report()
        measured_line(auto, report)
        grid_lines(auto, report, options.quick)
        if options.save:
            quick = " --quick" if options.quick else ""
            report.save(options.save, "dispatch", auto, {"numpy": np.__version__}, quick)


if __name__ == "__main__":
    main()
