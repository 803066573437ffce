"""Training steps against PyTorch, where it is installed: all sides run in turn, each at its best settings.

    python benchmarks/train.py [--device opencl:0] [--no-compile] [--only NAME] [--save FILE]

A ratio is the peer's time, or memory, over Penstock's. PyTorch runs eagerly (`torch`) and through
`torch.compile` (`compiled`), with as many threads as there are cores, on the same batches and optimizer.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
import penstock.nn
import penstock.optim
from measuring import Report, best_of
from penstock.bench.steps import Gpt, torch_gpt

torch: Any
try:
    torch = importlib.import_module("torch")
except ImportError:
    torch = None

Step = Callable[[], object]


NANO, SEED = Gpt(2048, 128, 128, 4, 4, 16), Gpt(16000, 128, 384, 6, 6, 4)


# Penstock


def mlp_step(sizes: tuple[int, ...], x: Any, y: Any, device: ps.Device) -> Step:
    layers: list[Any] = []
    for inputs, outputs in pairwise(sizes):
        layers += [ps.nn.Linear(inputs, outputs), ps.nn.Tanh()]
    model = ps.nn.Sequential(*layers[:-1])
    optimizer = ps.optim.Adam(model.parameters(), lr=1e-3)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = ps.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    given, wanted = ps.asarray(x, device=device), ps.asarray(y, device=device)
    return lambda: step(given, wanted)


def gpt_step(sizes: Gpt, tokens: Any, device: ps.Device) -> Step:
    model = ps.nn.GPT(sizes.vocab, sizes.context, sizes.width, sizes.layers, sizes.heads)
    optimizer = ps.optim.AdamW(model.parameters(), lr=1e-3)

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    return lambda: step(ps.asarray(tokens, device=device))


# PyTorch


def torch_mlp_step(sizes: tuple[int, ...], x: Any, y: Any, compiled: bool, device: str = "cpu") -> Step:
    layers: list[Any] = []
    for inputs, outputs in pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of = torch.compile(_mse(model)) if compiled else _mse(model)
    inputs, targets = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _mse(model: Any) -> Any:
    return lambda x, y: torch.nn.functional.mse_loss(model(x), y)


def torch_gpt_step(sizes: Gpt, tokens: Any, compiled: bool) -> Step:
    model = torch_gpt(torch, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss_of(ids: Any) -> Any:
        logits = model(ids[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    if compiled:
        loss_of = torch.compile(loss_of)
    ids = torch.from_numpy(tokens)

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        return loss

    return step


# Lines


def waited(step: Step, device: ps.Device) -> Step:
    def run() -> None:
        step()
        device.sync()

    return run


def compare(
    what: str, goal: float, ours: Step, peers: dict[str, Step], report: Report, rounds: int, repeat: int
) -> None:
    sides: dict[str, Step] = {"penstock": ours, **peers}
    for call in sides.values():
        for _ in range(3):
            call()
    best = best_of(sides, rounds=rounds, repeat=repeat)
    detail = f"{best['penstock'] * 1e3:.3f} ms"
    detail += "".join(f"; {name} {best[name] / best['penstock']:.2f}x" for name in peers)
    if peers:
        ratio = min(best[name] for name in peers) / best["penstock"]
        report.add(what, ratio, "x", f">= {goal}", ratio >= goal, detail)
    else:
        report.add(what, best["penstock"] * 1e3, "ms", "", None, detail)


def mlp_data(name: str) -> tuple[tuple[int, ...], Any, Any]:
    """The sizes of a small network, its inputs and its targets."""
    if name == "XOR":
        x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
        return (2, 8, 1), x, np.array([[0], [1], [1], [0]], np.float32)
    x = np.linspace(-3, 3, 256, dtype=np.float32).reshape(-1, 1)
    return (1, 64, 64, 1), x, np.sin(x)


def mlp_line(name: str, goal: float, options: argparse.Namespace, device: ps.Device, report: Report) -> None:
    sizes, x, y = mlp_data(name)
    ours = mlp_step(sizes, x, y, device)

    def many() -> None:
        for _ in range(100):
            ours()
        device.sync()

    peers: dict[str, Step] = {}
    if torch is not None:
        kinds = ["torch"] if options.no_compile else ["torch", "compiled"]
        for kind in kinds:
            step = torch_mlp_step(sizes, x, y, kind == "compiled")
            peers[kind] = lambda step=step: [step() for _ in range(100)]  # type: ignore[misc]
    compare(f"{name}, 100 steps", goal, many, peers, report, rounds=7, repeat=1)


def gpt_line(
    name: str, goal: float, sizes: Gpt, options: argparse.Namespace, device: ps.Device, report: Report
) -> None:
    tokens = np.random.default_rng(0).integers(0, sizes.vocab, (sizes.batch, sizes.context + 1))
    ours = waited(gpt_step(sizes, tokens, device), device)
    peers: dict[str, Step] = {}
    if torch is not None:
        peers["torch"] = torch_gpt_step(sizes, tokens, False)
        if not options.no_compile:
            peers["compiled"] = torch_gpt_step(sizes, tokens, True)
    compare(name, goal, ours, peers, report, rounds=7, repeat=1)


_CHILD = """
import sys, time
start = time.perf_counter()
sys.path.insert(0, {folder!r})
if {side!r} == "penstock":
    sys.modules["torch"] = None  # loading the peer is not this side's time
import numpy as np, train
sizes = train.NANO
tokens = np.random.default_rng(0).integers(0, sizes.vocab, (sizes.batch, sizes.context + 1))
if {side!r} == "penstock":
    device = train.ps.use({device!r})
    step = train.waited(train.gpt_step(sizes, tokens, device), device)
else:
    step = train.torch_gpt_step(sizes, tokens, {side!r} == "compiled")
def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))
before = status("VmRSS")
step()
print(time.perf_counter() - start)
step()
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # the peak starts anew, after the compilers
for _ in range(5): step()
print(status("VmHWM") - before)
"""


def process_lines(options: argparse.Namespace, device: ps.Device, report: Report) -> None:
    """Processes of their own: time to the first step, and the memory that training adds (on Linux)."""
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, list[float]] = {}
        kinds = ["penstock cold", "penstock warm"]
        if torch is not None:
            kinds += ["torch"] if options.no_compile else ["torch", "compiled"]
        for kind in kinds:
            text = _CHILD.format(folder=str(Path(__file__).parent), side=kind.split()[0], device=device.name)
            environment = {
                **os.environ,
                "POCL_CACHE_DIR": folder,
                "CUDA_CACHE_PATH": folder,
                "TORCHINDUCTOR_CACHE_DIR": folder,
            }
            run = subprocess.run(
                [sys.executable, "-c", text], check=True, env=environment, capture_output=True, text=True
            )
            result[kind] = [float(line) for line in run.stdout.split()[-2:]]
    for kind, goal in (("cold", 10.0), ("warm", 2.0)):
        seconds = result[f"penstock {kind}"][0]
        others = ", ".join(f"{name} {result[name][0]:.1f} s" for name in kinds[2:])
        report.add(
            f"GPT nano: first step, {kind} cache", seconds, "s", f"<= {goal:g}", seconds <= goal, others
        )
    if torch is not None:
        peak = min(result[name][1] for name in kinds[2:])
        ratio = result["penstock warm"][1] / peak
        detail = ", ".join(f"{name} {result[name][1] / 1024:.0f} MiB" for name in kinds[1:])
        report.add("GPT nano: peak memory that training adds", ratio, "x", "<= 0.6", ratio <= 0.6, detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--only", choices=["xor", "sine", "nano", "seed", "process"])
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = ps.use(options.device)
    versions = {"numpy": np.__version__, "torch": torch.__version__ if torch else "not installed"}
    print(f"{device.name}: {device.capabilities.description}; {versions}\n")
    report = Report()
    start = time.perf_counter()
    lines: dict[str, Callable[[], None]] = {
        "xor": lambda: mlp_line("XOR", 8, options, device, report),
        "sine": lambda: mlp_line("sine", 5, options, device, report),
        "nano": lambda: gpt_line("GPT nano", 1.8, NANO, options, device, report),
        "seed": lambda: gpt_line("GPT seed", 1.3, SEED, options, device, report),
        "process": lambda: process_lines(options, device, report),
    }
    for name, line in lines.items():
        if options.only in (None, name):
            line()
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    if options.save:
        report.save(options.save, "train", device, versions)


if __name__ == "__main__":
    main()
