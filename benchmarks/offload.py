"""Training steps whose values move to the host: bits, the driver's memory, predicted and measured times.

    python benchmarks/offload.py [--device cuda:0] [--model mlp] [--rates card.toml] [--save FILE]
    python benchmarks/offload.py --model gpt2-124M --recompute --budgets 3818MiB 3GiB
    python benchmarks/offload.py --model gpt-1.5B --device card.toml --plan      # only what is predicted

Values move even on devices where that is not offered, or with --recompute not at all. The budgets are
shares of what the step takes without a budget, and the smallest that would do, or those that are given. Each
has a new model: two steps for the bits, then the times. Times are predicted from rates that are measured
first, or from those of a file.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

import penstock as ps
import penstock.nn
import penstock.optim
from budget import MIB, MODELS, SHARES, SLACK, Budgets
from measuring import Report
from penstock.compiler.launches import timeline
from penstock.compiler.schedule import Schedule
from penstock.config import parse_bytes
from penstock.drivers.description import read_description
from penstock.drivers.rates import StepRates
from penstock.execution.memory_plan import MemoryPlan
from penstock.measuring.step_rates import step_rates

ROUNDS, STEPS = 5, 5  # of which the best round counts
WIDTH, LAYERS, ROWS = 2048, 8, 16384


class Perceptron(Budgets):
    """Layers of one width, trained by AdamW."""

    def __init__(self, device: ps.Device) -> None:
        ps.random.manual_seed(0)
        self.device = device
        widths = pairwise([WIDTH // self.scale(device)] * (LAYERS + 1))
        layers = [ps.nn.Linear(a, b) for a, b in widths]
        self.model = ps.nn.Sequential(*(part for layer in layers for part in (layer, ps.nn.GELU())))
        if device.capabilities.matmul_library:
            self.model.to(ps.bfloat16)
        self.optimizer = ps.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.01)
        rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH)) / 4
        given = rows[:: self.scale(device), :: self.scale(device)].astype(np.float32)
        self.tokens = ps.asarray(given, device=device).astype(next(iter(self.model.parameters())).dtype)
        self.tokens.realize()

    @staticmethod
    def scale(device: ps.Device) -> int:
        """How much smaller it is on a CPU."""
        return 1 if device.capabilities.matmul_library else 16

    def step(self, memory: int | None) -> Callable[[ps.Tensor], ps.Tensor]:
        @ps.jit(memory=memory)
        def step(rows: ps.Tensor) -> ps.Tensor:
            loss = ps.mean(self.model(rows).astype(ps.float32) ** 2)
            self.optimizer.backward(loss)
            self.optimizer.step()
            return loss

        return step


@dataclass
class Measured:
    bits: str
    seconds: float
    taken_bytes: int  # by the driver, without pinned memory
    schedule: Schedule


def clean(device: ps.Device) -> None:
    gc.collect()
    device.cleanup()


def measured(make: Callable[[], Budgets], limit: int) -> Measured:
    """Two steps of a new model under a budget, then as many as are timed."""
    ours = make()
    device, step = ours.device, ours.step(limit)
    losses = [step(ours.tokens).numpy() for _ in range(2)]
    parameters = [parameter.numpy() for parameter in ours.model.parameters()]
    digest = hashlib.sha256(b"".join(array.tobytes() for array in (*losses, *parameters))).hexdigest()
    best = float("inf")
    for _ in range(ROUNDS):
        device.sync()
        start = perf_counter()
        for _ in range(STEPS):
            step(ours.tokens)
        device.sync()
        best = min(best, (perf_counter() - start) / STEPS)
    stats = device.memory_stats()
    (captures,) = step._captured.values()  # type: ignore[attr-defined]
    schedule = captures[0].program.schedule
    return Measured(digest, best, stats.driver_bytes - stats.staging_bytes, schedule)


def planned(name: str, make: Callable[[], Budgets], table: bool) -> MemoryPlan:
    """What a step takes, and with `table` also under budgets; the model is gone afterwards."""
    ours = make()
    start = process_time()
    plan: MemoryPlan = ps.memory.plan(ours.step(None), ours.tokens)
    count = len(plan.budgets) if table else 1  # which plans them
    print(f"{name}: {count} budgets planned in {process_time() - start:.1f} CPU seconds", flush=True)
    return plan


def limits_of(plan: MemoryPlan, budgets: list[str]) -> dict[str, int]:
    """The budgets by name: 100%, and those that are given, or shares of it and the smallest."""
    if budgets:
        return {"100%": plan.unlimited_bytes, **{text: parse_bytes(text) for text in budgets}}
    unlimited, smallest = plan.unlimited_bytes, plan.smallest_bytes + SLACK
    limits = {f"{share:.0%}": int(share * unlimited) for share in SHARES} | {"the smallest": smallest}
    return {what: limit for what, limit in limits.items() if limit >= smallest}


def lines(
    name: str, make: Callable[[], Budgets], limits: dict[str, int], rates: StepRates | None, report: Report
) -> None:
    device = ps.default_device()
    clean(device)
    bits, first = set[str](), 0.0
    for what, limit in limits.items():
        result = measured(make, limit)
        clean(device)
        bits.add(result.bits)
        first = first or result.seconds
        schedule = result.schedule
        predicted = rates.seconds(*timeline(schedule, device.capabilities)) if rates else float("nan")
        detail = (
            f"{result.seconds * 1e3:.2f} ms, {predicted * 1e3:.2f} predicted; "
            f"{result.taken_bytes / MIB:.1f} of {limit / MIB:.1f} MiB; {len(schedule.recomputed)} again, "
            f"{len(schedule.moved)} to the host, {len(schedule.hosted)} kept there"
        )
        within = result.taken_bytes <= limit
        report.add(f"{name}: time at {what}", result.seconds / first, "x", "in budget", within, detail)
    report.add(f"{name}: different results", len(bits), "", "= 1", len(bits) == 1, "loss and parameters")


def gpt(name: str, device: ps.Device) -> Budgets:
    sizes = MODELS[name]
    tokens = np.random.default_rng(0).integers(0, sizes.vocab, (sizes.batch, sizes.context + 1))
    return Budgets(sizes, tokens, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--model", choices=["mlp", *MODELS], help="mlp and gpt2-124M on CUDA, else mlp and nano"
    )
    parser.add_argument("--recompute", action="store_true", help="nothing moves to the host")
    parser.add_argument("--budgets", nargs="+", default=[], help="in place of the shares, such as 3GiB")
    parser.add_argument("--plan", action="store_true", help="print the table of budgets, and run nothing")
    parser.add_argument("--rates", type=Path, help="a file of `penstock devices --rates`")
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device)
    device.capabilities = replace(device.capabilities, offloads=not options.recompute)
    cuda = device.name.startswith("cuda")
    report, rates = Report(), None
    if not options.plan:
        rates = read_description(options.rates)[1] if options.rates else step_rates(device)
        print(rates, f"link cost {device.link_cost}", flush=True)
    for name in [options.model] if options.model else ["mlp", "gpt2-124M" if cuda else "nano"]:
        make = partial(Perceptron, device) if name == "mlp" else partial(gpt, name, device)
        plan = planned(name, make, not options.budgets)
        if options.plan:
            print(plan, flush=True)
        else:
            lines(name, make, limits_of(plan, options.budgets), rates, report)
    if options.save:
        model = f" --model {options.model}" if options.model else ""
        budgets = " ".join([" --budgets", *options.budgets]) if options.budgets else ""
        given = f" --device {device.name}{model}{' --recompute' if options.recompute else ''}{budgets}"
        report.save(options.save, "offload", device, {}, given)


if __name__ == "__main__":
    main()
