"""Predicted and measured step times of a GPT and a perceptron.

    python benchmarks/prediction.py [--device opencl:0] [--cpu-time]

The rates are measured first, then the steps, on the same clock. With --cpu-time that clock is the time that
the processors work for this process, of all its threads: what a CPU device needs, on a machine that others
use, too. The goal is 10%.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from time import perf_counter, process_time
from typing import Any

import numpy as np

import penstock as ps
import penstock.nn
import penstock.optim
from measuring import Report
from penstock.bench.steps import Gpt
from penstock.measuring.step_rates import measured_rates
from penstock.measuring.workloads import best_seconds

NANO = Gpt(2048, 128, 128, 4, 4, 16)
WIDTHS, ROWS = (784, 256, 128, 10), 128
GOAL = 0.1
SECONDS = 1.0  # of trying each step

Step = tuple[Callable[..., Any], tuple[ps.Tensor, ...]]


def gpt(device: ps.Device) -> Step:
    model = ps.nn.GPT(NANO.vocab, NANO.context, NANO.width, NANO.layers, NANO.heads)
    optimizer = ps.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.backward(loss)
        optimizer.step()
        return loss

    ids = np.random.default_rng(0).integers(0, NANO.vocab, (NANO.batch, NANO.context + 1))
    return step, (ps.asarray(ids, device=device),)


def mlp(device: ps.Device) -> Step:
    layers: list[Any] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [ps.nn.Linear(inputs, outputs), ps.nn.ReLU()]
    model = ps.nn.Sequential(*layers[:-1])
    optimizer = ps.optim.Adam(model.parameters(), lr=1e-3)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = ps.nn.functional.cross_entropy(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, WIDTHS[0])).astype(np.float32)
    y = rng.integers(0, WIDTHS[-1], ROWS)
    return step, (ps.asarray(x, device=device), ps.asarray(y, device=device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    device = ps.use(options.device)
    clock = process_time if options.cpu_time else perf_counter
    rates = measured_rates(device, clock)
    print(rates)
    report = Report()
    for name, made in (("nano GPT", gpt), ("perceptron", mlp)):
        step, args = made(device)
        predicted = rates.seconds(ps.memory.plan(step, *args).unlimited.launches)
        measured = best_seconds(device, partial(step, *args), SECONDS, clock)
        ratio = predicted / measured
        detail = f"{predicted * 1e3:.2f} ms predicted, {measured * 1e3:.2f} ms measured"
        report.add(
            f"{name}: predicted over measured", ratio, "x", "within 10%", abs(ratio - 1) < GOAL, detail
        )


if __name__ == "__main__":
    main()
