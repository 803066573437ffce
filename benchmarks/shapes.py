"""New shapes: their cost in a jitted function, and the speed of kernels whose sizes are arguments.

    python benchmarks/shapes.py [--device NAME] [--shapes N] [--rounds N] [--save FILE]

First, a small network is trained with batches of many sizes, no size twice: the CPU time of a step whose
shape is new, and the growth of the resident memory. Then programs run on the same device opened twice. On one
side the shape is the first that the program meets, so that its kernels have their sizes in the text; on the
other it comes after others, and its kernels take their sizes as arguments. Both run in turn in one process;
the ratio is the median over rounds of neighbouring times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import penstock as ps
from measuring import Report, classifier
from penstock.config import Settings
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it

GOAL_SECONDS, GOAL_RATIO = 0.1, 1.05
BEFORE = 3  # shapes that a program has before the measured shape


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def network(device: ps.Device, sizes: tuple[int, ...]) -> Callable[[int], ps.Tensor]:
    """A training step of a network with these layers, for a batch of a size that is given."""
    step = classifier(device, sizes, ps.nn.GELU, ps.optim.AdamW)

    def run(rows: int) -> ps.Tensor:
        y = np.arange(rows, dtype=np.int32) % sizes[-1]
        return step(ps.asarray(drawn(rows, sizes[0]), device=device), ps.asarray(y, device=device))

    return run


def new_shapes(report: Report, device: ps.Device, count: int) -> None:
    run = network(device, (16, 32, 4))
    batches = np.random.default_rng(0).permutation(count) + 1
    seconds = []
    for number, rows in enumerate(batches):
        start = time.process_time()
        run(int(rows)).item()
        seconds.append(time.process_time() - start)
        if number == 9:
            before = resident_bytes()
    grown = (resident_bytes() - before) / 2**20
    median, slow = statistics.median(seconds), sum(taken > GOAL_SECONDS for taken in seconds)
    detail = f"{sum(seconds):.0f} s in all; {slow} of {count} took more than {GOAL_SECONDS} s"
    goal = f"<= {GOAL_SECONDS} s"
    report.add("a new shape, CPU time, median", median, "s", goal, median <= GOAL_SECONDS, detail)
    if before:
        report.add(f"resident memory after {count}", grown, "MiB", "", None, "more than after the first ten")


def resident_bytes() -> int:
    """The resident memory of the process; 0 if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def programs() -> dict[str, tuple[Callable[..., ps.Tensor], Callable[[int], tuple[np.ndarray, ...]], int]]:
    """By name: a function, its arguments for a size, and the size that is measured."""
    return {
        "gelu(x) * y, 1M": (lambda x, y: F.gelu(x) * y, lambda n: (drawn(n, 1000), drawn(n, 1000)), 1000),
        "x + row, 1M": (lambda x, y: x + y, lambda n: (drawn(n, 1000), drawn(1000)), 1000),
        "transposed copy, 1M": (lambda x: x.T + 1, lambda n: (drawn(n, 1000),), 1000),
        "softmax, 1000 x 1000": (F.softmax, lambda n: (drawn(n, n),), 1000),
        "softmax, 10000 x 50": (F.softmax, lambda n: (drawn(10000, n),), 50),
        "sum of rows, 1000 x 1000": (lambda x: x.sum(axis=1), lambda n: (drawn(n, n),), 1000),
        "sum of columns, 1000 x 1000": (lambda x: x.sum(axis=0), lambda n: (drawn(n, n),), 1000),
        "sum, 1M": (lambda x: x.sum(), lambda n: (drawn(n),), 1_000_000),
        "layer norm, 1000 x 768": (
            lambda x, y: F.layer_norm(x, y.shape, y, y),
            lambda n: (drawn(n, 768), drawn(768)),
            1000,
        ),
        "product, 50 x 50": (lambda x, y: x @ y, lambda n: (drawn(n, n), drawn(n, n)), 50),
        "product, 250 x 250": (lambda x, y: x @ y, lambda n: (drawn(n, n), drawn(n, n)), 250),
        "product, 1000 x 1000": (lambda x, y: x @ y, lambda n: (drawn(n, n), drawn(n, n)), 1000),
        "product, 1000 x 64 x 256": (lambda x, y: x @ y, lambda n: (drawn(n, 64), drawn(64, 256)), 1000),
        "batched products, 64 x 32": (
            lambda x, y: x @ y,
            lambda n: (drawn(8, n, 32), drawn(8, 32, n)),
            64,
        ),
        "cumulative sum, 1000 x 1000": (
            lambda x: ps.cumulative_sum(x, axis=1),
            lambda n: (drawn(n, 1000),),
            1000,
        ),
        "sort, 100 x 1000": (lambda x: ps.sort(x, axis=1), lambda n: (drawn(100, n),), 1000),
    }


def finished(device: ps.Device, call: Callable[[], object]) -> None:
    """Call, and wait for the device."""
    call()
    device.sync()


def compared(report: Report, name: str, sides: dict[str, Callable[[], object]], rounds: int) -> None:
    times: dict[str, list[float]] = {"own": [], "shared": []}
    start = time.perf_counter()
    sides["own"]()
    repeat = max(1, int(0.02 / (time.perf_counter() - start)))
    for number in range(rounds + 1):
        for side in ("own", "shared") if number % 2 else ("shared", "own"):
            start = time.perf_counter()
            for _ in range(repeat):
                sides[side]()
            if number:
                times[side].append((time.perf_counter() - start) / repeat)
    ratio = statistics.median(a / b for a, b in zip(times["shared"], times["own"], strict=True))
    result = {side: 1e6 * statistics.median(seconds) for side, seconds in times.items()}
    detail = f"{result['shared']:.0f} over {result['own']:.0f} µs"
    report.add(name, ratio, "x", f"<= {GOAL_RATIO}x", ratio <= GOAL_RATIO, detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", help="its name; the default device otherwise")
    parser.add_argument("--shapes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device) if options.device else ps.default_device()
    print(f"{device.name}: {device.capabilities.description}\n")
    report = Report()
    new_shapes(report, device, options.shapes)
    settings = Settings.from_environment()
    opened = {side: ps.Device.over(device.another_driver(), settings) for side in ("own", "shared")}
    for name, (function, arguments, size) in programs().items():
        sides: dict[str, Callable[[], object]] = {}
        for side, value in opened.items():
            compiled = ps.jit(function)
            for number in range(BEFORE if side == "shared" else 0):
                compiled(*(ps.asarray(a, device=value) for a in arguments(size + 1 + number))).numpy()
            given = [ps.asarray(a, device=value) for a in arguments(size)]
            sides[side] = partial(finished, value, partial(compiled, *given))
        compared(report, name, sides, options.rounds)
    for name, layers, rows in (("MLP 784-256-10, 128 rows", (784, 256, 10), 128),):
        sides = {}
        for side, value in opened.items():
            step = network(value, layers)
            for number in range(BEFORE if side == "shared" else 0):
                step(rows + 1 + number).item()
            sides[side] = partial(finished, value, partial(step, rows))
        compared(report, name, sides, options.rounds)
    if options.save:
        report.save(options.save, "shapes", device, {"numpy": np.__version__})


if __name__ == "__main__":
    main()
