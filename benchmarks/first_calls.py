"""First calls: what a new expression of new shapes takes in a new process, without `@ps.jit`.

    python benchmarks/first_calls.py [--device NAME] [--dtype DTYPE] [--rounds N] [--save FILE]

Expressions as users write them in their first hour are each computed once and read, in a process that has
seen none of them, with shapes that no process has seen. One side has the kernels that are compiled ahead,
once for a machine; the other waits for the compiler (PENSTOCK_COMPILE_AHEAD=0). Both have a cache folder of
their own, which is empty at first: the first side has the time to fill it. Processes run in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import penstock as ps
from measuring import Report
from penstock import Device
from penstock.execution.realize import executables
from usual import OF_IMAGES, USUAL, Arrays

GOAL_SECONDS = 0.05  # of a first call
EXPRESSIONS = USUAL | OF_IMAGES
SIDES = {"compiled ahead": "1", "waiting": "0"}


def _calls(device: Device, dtype: str, seed: int) -> dict[str, float]:
    """The CPU seconds of the first call of each expression."""
    n, m = (int(size) for size in np.random.default_rng(seed).integers(60, 700, 2))
    arrays, taken = Arrays(device, dtype), {}
    for name, expression in EXPRESSIONS.items():
        given = time.process_time()
        expression(arrays, n, m).numpy()
        taken[name] = time.process_time() - given
    return taken


def _fill(device: Device) -> None:
    """Wait until the kernels of single operations are compiled."""
    ahead = executables(device)._ahead
    while ahead is not None and ahead._work is not None:
        time.sleep(0.5)


def _print_calls(name: str, dtype: str, seed: int, fills: bool) -> None:
    """Print the seconds of all first calls."""
    device = ps.use(name)
    (ps.ones(3, device=device) + 1).numpy()  # which opens it
    if fills:
        _fill(device)
    print(json.dumps([_calls(device, dtype, seed), time.process_time()]))


def _in_a_process(
    name: str, dtype: str, seed: int, fills: bool, variables: dict[str, str]
) -> tuple[dict[str, float], float]:
    command = [
        sys.executable,
        __file__,
        "--device",
        name,
        "--dtype",
        dtype,
        "--seed",
        str(seed),
        *(["--fill"] if fills else []),
    ]
    environment = {**os.environ, **variables}
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    seconds, whole = json.loads(answer)
    return seconds, whole


def compare(report: Report, name: str, dtype: str, rounds: int, folder: str) -> None:
    calls: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for turn in range(rounds + 1):
        for side, ahead in SIDES.items():
            variables = {"XDG_CACHE_HOME": f"{folder}/{side}", "PENSTOCK_COMPILE_AHEAD": ahead}
            seconds, whole = _in_a_process(name, dtype, turn, turn == 0 and ahead == "1", variables)
            if turn:
                calls[side].append(seconds)
            elif ahead == "1":
                what = "kernels of single operations, CPU time, once for a machine"
                report.add(
                    what, whole - sum(seconds.values()), "s", "", None, "in a thread, while it is quiet"
                )
    for side, given in calls.items():
        every = [seconds for each in given for seconds in each.values()]
        slow = sum(seconds > GOAL_SECONDS for seconds in every)
        detail = f"the longest {max(every):.2f} s; {slow} of {len(every)} took more than {GOAL_SECONDS} s"
        report.add(f"{side}: a first call, CPU time", float(np.median(every)), "s", "", None, detail)
        each = np.mean([sum(seconds.values()) for seconds in given])
        report.add(f"{side}: all {len(EXPRESSIONS)} of them", float(each), "s", "", None, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default=ps.default_device().name)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.seed is not None:
        _print_calls(chosen.device, chosen.dtype, chosen.seed, chosen.fill)
        return
    device = ps.use(chosen.device)
    print(f"{device.name}: {device.capabilities.description}\n")
    report = Report()
    with TemporaryDirectory() as folder:
        compare(report, chosen.device, chosen.dtype, chosen.rounds, folder)
    if chosen.save:
        report.save(chosen.save, "first_calls", device, {})


if __name__ == "__main__":
    main()
