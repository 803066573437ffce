"""A model that is several times the memory it may take: its state lies at the host, and comes for its uses.

    python benchmarks/capped.py [--device cuda:0] [--memory 24GiB] [--layers 32] [--width 4096] [--batch 16]

Everything happens under the cap, from the first weight on. The weights are bfloat16, the moments and the
master weights float32: 14 bytes for a parameter, nearly all of them in pinned memory of the host. A file that
describes a device plans the step, and runs nothing. The share is that of the device's rate of products.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import penstock as ps
import penstock.optim
from budget import Budgets
from measuring import Report
from penstock.compiler.launches import timeline
from penstock.compiler.schedule import Schedule
from penstock.config import parse_bytes
from penstock.measuring.step_rates import step_rates
from penstock.models.gpt2 import GPT, Block

VOCABULARY, CONTEXT, HEAD = 50304, 1024, 128
GIB = 1 << 30
GOAL = 0.1  # of the predicted time


def narrow_gpt(width: int, layers: int) -> GPT:
    """A GPT in bfloat16. Its blocks are made one by one: all of them in float32 may pass the cap."""
    heads = width // HEAD
    model = GPT(VOCABULARY, CONTEXT, width, 1, heads).to(ps.bfloat16)
    model.blocks += [
        Block(width, heads, dropout=0.0, bias=True, eps=1e-5, layer=at).to(ps.bfloat16)
        for at in range(1, layers)
    ]
    return model


class Training(Budgets):
    """A model, and its step."""

    def __init__(self, width: int, layers: int, batch: int) -> None:
        self.model = narrow_gpt(width, layers)
        self.optimizer = ps.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01)
        self.parameters = sum(tensor.size for tensor in self.model.parameters())
        rng = np.random.default_rng(0)
        self.tokens = ps.asarray(rng.integers(0, VOCABULARY, (batch, CONTEXT + 1)).astype(np.int32))
        self._step: Any = self.step(None)

    def next_loss(self) -> ps.Tensor:
        loss: ps.Tensor = self._step(self.tokens)
        return loss

    @property
    def schedule(self) -> Schedule:
        """Of the step, after the first."""
        (captures,) = self._step._captured.values()
        schedule: Schedule = captures[0].program.schedule
        return schedule


def lines(training: Training, device: ps.Device, limit: int, steps: int, report: Report) -> None:
    present = device.driver.rates is None
    rates = device.driver.rates or step_rates(device)
    assert rates is not None, "a GPU or a file is needed, whose rates are known"
    start = perf_counter()
    losses = [training.next_loss()]
    if present:
        device.sync()
    schedule, stats = training.schedule, device.memory_stats()
    seconds = predicted = rates.seconds(*timeline(schedule, device.capabilities))
    print(f"first step in {perf_counter() - start:.1f} s; {seconds:.2f} s for others predicted", flush=True)
    taken = stats.driver_bytes - stats.staging_bytes
    detail = (
        f"{taken / GIB:.2f} GiB; {stats.staging_bytes / GIB:.1f} GiB of the host; {len(schedule.recomputed)} "
        f"again, {len(schedule.moved)} to the host, {len(schedule.hosted)} kept there"
    )
    report.add("share of the cap taken", taken / limit, "", "<= 1", taken <= limit, detail)
    if present:
        start = perf_counter()
        losses.append(training.next_loss())  # which captures a graph
        device.sync()
        print(f"second step in {perf_counter() - start:.2f} s", flush=True)
        start = perf_counter()
        losses += [training.next_loss() for _ in range(steps)]
        device.sync()
        seconds = (perf_counter() - start) / steps
        values = ", ".join(f"{loss.item():.3f}" for loss in losses)
        detail = f"{predicted:.2f} predicted; losses {values}"
        report.add(
            "seconds for a step", seconds, "s", "within 10%", abs(predicted / seconds - 1) < GOAL, detail
        )
    rate = training.tokens.shape[0] * CONTEXT / seconds
    share = 6 * training.parameters * rate / rates.product_rate("bfloat16")
    report.add("tokens/s", rate, "", "", None, f"{share:.1%} of the rate of products, without attention's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device)
    device.limit_bytes = options.memory
    start = perf_counter()
    training = Training(options.width, options.layers, options.batch)
    made = f"{training.parameters / 1e9:.2f}B parameters, made in {perf_counter() - start:.1f} s"
    print(made, flush=True)
    report = Report()
    lines(training, device, parse_bytes(options.memory), options.steps, report)
    if options.save:
        given = f" --device {device.name} --memory {options.memory} --layers {options.layers}"
        report.save(options.save, "capped", device, {}, f"{given} --batch {options.batch}")


if __name__ == "__main__":
    main()
