"""How long large functions take to build, and what a step of a deep model costs without jit.

    python benchmarks/building.py [--device opencl:0] [--save FILE]

Seconds are this thread's CPU time, since wall-clock time depends on other load of the machine. With
`XDG_CACHE_HOME=$(mktemp -d)` before it, nothing was compiled before. There is no peer: the goals are seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import penstock as ps
import penstock.nn
import penstock.optim
from measuring import Report

OUTPUTS, CHECKPOINTS, STEPS = 1000, 2000, 12


def spent(call: Callable[[], object]) -> float:
    """The CPU seconds of a call in this thread."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def many_outputs(x: ps.Tensor) -> float:
    """A jitted function of many results."""
    return spent(lambda: ps.jit(lambda x: [x * float(k) + 1.0 for k in range(OUTPUTS)])(x))


def many_checkpoints(x: ps.Tensor) -> float:
    """A jitted function of a long chain that is recomputed for its gradient."""
    weight = ps.ones(x.shape[-1]).requires_grad_()

    def function(x: ps.Tensor) -> ps.Tensor:
        for _ in range(CHECKPOINTS):
            x = ps.checkpoint(lambda x: ps.tanh(x * weight), x)
        ps.sum(x).backward()
        assert weight.grad is not None
        gradient, weight.grad = weight.grad, None
        return gradient

    return spent(lambda: ps.jit(function)(x))


def deep_steps() -> list[float]:
    """Training steps without jit of a transformer with two layers on each side."""
    ps.manual_seed(0)
    encoder = ps.nn.TransformerEncoder(ps.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
    decoder = ps.nn.TransformerDecoder(ps.nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
    optimizer = ps.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    source, target = ps.randn(4, 9, 32), ps.randn(4, 7, 32)

    def step() -> None:
        loss = (decoder(target, encoder(source)) ** 2).mean()
        loss.backward()
        optimizer.step()
        loss.numpy()

    return [spent(step) for _ in range(STEPS)]


def start(device: str) -> float:
    """A process that only opens a device by its name."""
    before = os.times()
    subprocess.run([sys.executable, "-c", f"import penstock; penstock.use({device!r})"], check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device)
    report = Report()
    x = ps.asarray(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32))
    seconds = many_outputs(x)
    report.add(f"a jitted function of {OUTPUTS:,} outputs", seconds, "s", "<= 3", seconds <= 3, "")
    seconds = many_checkpoints(x)
    report.add(f"a chain of {CHECKPOINTS:,} checkpoints", seconds, "s", "<= 5", seconds <= 5, "")
    first, *others = deep_steps()
    report.add("a transformer's step without jit", min(others), "s", "", None, f"the first {first:.1f} s")
    report.add("a process that opens the device", start(device.name), "s", "", None, "")
    if options.save:
        report.save(options.save, "building", device, {})


if __name__ == "__main__":
    main()
