"""The cost of index checks: the time of a training step with the check over that without it.

    python benchmarks/indices.py [--device NAME] [--rounds N] [--save FILE]

Both sides run in turn in one process, on the same device opened twice, with `check_indices` and without. A
batch of ids comes from the host for every step. The loss is read once in ten steps, and in lines of their own
at every step. The ratio is the median over rounds of neighbouring times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import penstock as ps
from measuring import Report, classifier
from penstock.bench.steps import Gpt
from penstock.config import Settings

GOAL = 1.01
STEPS = 10  # of a side in a round


NANO = Gpt(vocab=2048, context=128, width=128, layers=4, heads=4, batch=16)
GPT2 = Gpt(vocab=50257, context=1024, width=768, layers=12, heads=12, batch=8)
Steps = Callable[[int], None]  # runs ten steps, and reads the loss of every n-th


def gpt(device: ps.Device, sizes: Gpt) -> Steps:
    model = ps.nn.GPT(sizes.vocab, sizes.context, sizes.width, sizes.layers, sizes.heads, device=device)
    optimizer = ps.optim.AdamW(model.parameters(), lr=1e-3)

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    batch = np.random.default_rng(0).integers(0, sizes.vocab, (sizes.batch, sizes.context + 1), np.int32)
    return repeated(lambda: step(ps.asarray(batch, device=device)))


def mlp(device: ps.Device) -> Steps:
    step = classifier(device, (784, 256, 128, 10), ps.nn.ReLU, ps.optim.Adam)
    rng = np.random.default_rng(0)
    x = ps.asarray(rng.standard_normal((128, 784)).astype(np.float32), device=device)
    y = rng.integers(0, 10, 128, np.int32)
    return repeated(lambda: step(x, ps.asarray(y, device=device)))


def repeated(step: Callable[[], ps.Tensor]) -> Steps:
    def steps(reading: int) -> None:
        for number in range(STEPS):
            loss = step()
            if number % reading == reading - 1:
                loss.item()

    return steps


def line(report: Report, name: str, sides: dict[bool, Steps], reading: int, rounds: int) -> None:
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for checked in (True, False) if number % 2 else (False, True):
            start = time.perf_counter()
            sides[checked](reading)
            if number:  # the first round captures and compiles
                times[checked].append((time.perf_counter() - start) / STEPS)
    ratio = statistics.median(a / b for a, b in zip(times[True], times[False], strict=True))
    result = {checked: 1e6 * statistics.median(seconds) for checked, seconds in times.items()}
    how = "each step" if reading == 1 else f"once in {reading} steps"
    detail = f"{result[True]:.0f} over {result[False]:.0f} µs a step"
    report.add(f"{name}, loss read {how}", ratio, "x", f"< {GOAL}x", ratio < GOAL, detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", help="its name; the default device otherwise")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device) if options.device else ps.default_device()
    settings = Settings.from_environment()
    opened = {
        checked: ps.Device.over(device.another_driver(), replace(settings, check_indices=checked))
        for checked in (True, False)
    }
    print(f"{device.name}: {device.capabilities.description}\n")
    cases: dict[str, Callable[[ps.Device], Steps]] = {
        "MLP 784-256-128-10": mlp,
        "GPT nano": lambda device: gpt(device, NANO),
    }
    if device.capabilities.kind == "gpu":
        cases["GPT-2 124M"] = lambda device: gpt(device, GPT2)
    report = Report()
    for name, made in cases.items():
        sides = {checked: made(value) for checked, value in opened.items()}
        for reading in (STEPS, 1):
            line(report, name, sides, reading, options.rounds)
    if options.save:
        report.save(options.save, "indices", device, {"numpy": np.__version__})


if __name__ == "__main__":
    main()
