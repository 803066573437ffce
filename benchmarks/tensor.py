"""Tensors against NumPy, and against PyTorch where it is installed: each line runs all sides in turn.

    python benchmarks/tensor.py [--device opencl:0] [--no-compile] [--save FILE]

A ratio is the peer's time over Penstock's: above 1, Penstock is faster. PyTorch runs eagerly (`torch`) and,
if there is a C++ compiler, through `torch.compile` (`compiled`). Penstock's functions are jitted.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from measuring import Report, best_of
from penstock.plan.arena import plan
from planner_graphs import branching_values, gpt_values, mlp_values

torch: Any
try:
    torch = importlib.import_module("torch")
except ImportError:
    torch = None

Expression = Callable[..., Any]
_GENERATOR = np.random.default_rng(0)
ROWS, COLUMNS = 4096, 1024
GPT_LAYERS, MLP_LAYERS = 130, 1110  # as many as make 10,000 values
GPT_SHAPES = [(2048, 384, 384), (2048, 1536, 384), (2048, 384, 1536), (512, 16000, 384), (2048, 512, 128)]


def chain(xp: Any, x: Any, y: Any) -> Any:
    """Ten elementwise operations."""
    return (xp.sqrt(xp.exp(-(x * y + x)) + y) * x - xp.tanh(y)) / (y + 1)


def softmax(xp: Any, x: Any) -> Any:
    if xp is torch:
        return torch.softmax(x, 1)
    if xp is ps:
        return ps.nn.functional.softmax(x, axis=1)
    e = xp.exp(x - xp.max(x, axis=1, keepdims=True))
    return e / xp.sum(e, axis=1, keepdims=True)


def layer_norm(xp: Any, x: Any, weight: Any, bias: Any) -> Any:
    if xp is torch:
        return torch.nn.functional.layer_norm(x, (COLUMNS,), weight, bias, 1e-5)
    if xp is ps:
        return ps.nn.functional.layer_norm(x, weight.shape, weight, bias)
    centred = x - xp.mean(x, axis=1, keepdims=True)
    variance = xp.mean(centred * centred, axis=1, keepdims=True)
    return centred / xp.sqrt(variance + 1e-5) * weight + bias


def cross_entropy(xp: Any, x: Any, target: Any) -> Any:
    if xp is torch:
        return torch.nn.functional.cross_entropy(x, target)
    if xp is np:
        shifted = x - np.max(x, axis=1, keepdims=True)
        logs = np.log(np.sum(np.exp(shifted), axis=1))
        return np.mean(logs - shifted[np.arange(len(x)), target])
    return ps.nn.functional.cross_entropy(x, target)


def cross_entropy_backward(xp: Any, x: Any, target: Any) -> Any:
    """The loss and its gradient."""
    if xp is torch:
        logits = x.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(logits, target)
        loss.backward()
        return loss, logits.grad
    if xp is np:
        shifted = x - np.max(x, axis=1, keepdims=True)
        e = np.exp(shifted)
        total = np.sum(e, axis=1, keepdims=True)
        gradient = e / total
        rows = np.arange(len(x))
        gradient[rows, target] -= 1
        return np.mean(np.log(total[:, 0]) - shifted[rows, target]), gradient / np.float32(len(x))
    return ps.value_and_grad(partial(cross_entropy, ps))(x, target)


def layer_norm_backward(xp: Any, x: Any, weight: Any, bias: Any) -> Any:
    """The gradients of the sum of squares."""
    if xp is torch:
        inputs = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        y = layer_norm(torch, *inputs)
        (y * y).sum().backward()
        return [tensor.grad for tensor in inputs]
    if xp is np:
        centred = x - np.mean(x, axis=1, keepdims=True)
        scale = 1 / np.sqrt(np.mean(centred * centred, axis=1, keepdims=True) + np.float32(1e-5))
        hat = centred * scale
        g = 2 * (hat * weight + bias)
        d = g * weight
        mean, along = np.mean(d, axis=1, keepdims=True), np.mean(d * hat, axis=1, keepdims=True)
        return scale * (d - mean - hat * along), np.sum(g * hat, axis=0), np.sum(g, axis=0)

    def loss(*inputs: ps.Tensor) -> ps.Tensor:
        y = layer_norm(ps, *inputs)
        return ps.sum(y * y)

    return ps.grad(loss, (0, 1, 2))(x, weight, bias)


def squared_error_backward(xp: Any, x: Any, y: Any) -> Any:
    """The gradient of the mean of squares."""
    if xp is torch:
        inputs = x.detach().requires_grad_()
        ((inputs - y) ** 2).mean().backward()
        return inputs.grad
    if xp is np:
        return (x - y) * np.float32(2 / x.size)
    return ps.grad(lambda x: ((x - y) ** 2).mean())(x)


def uniform(xp: Any) -> Any:
    if xp is np:
        return _GENERATOR.random((ROWS, COLUMNS), np.float32)
    return xp.rand(ROWS, COLUMNS)


def normal(xp: Any) -> Any:
    if xp is np:
        return _GENERATOR.standard_normal((ROWS, COLUMNS), np.float32)
    return xp.randn(ROWS, COLUMNS)


def dropout(xp: Any, x: Any) -> Any:
    if xp is np:
        return np.where(_GENERATOR.random(x.shape, np.float32) < 0.9, x / np.float32(0.9), np.float32(0))
    return xp.nn.functional.dropout(x, 0.1, True)


def matmul(xp: Any, x: Any, y: Any) -> Any:
    return xp.matmul(x, y)


class Sides:
    """Runs an expression on every side."""

    def __init__(self, device: ps.Device, compiles: bool, report: Report) -> None:
        self._device = device
        self._compiles = compiles
        self._report = report

    def compare(
        self, what: str, expression: Expression, *arrays: Any, goal: float = 1.0, compiled: bool = True
    ) -> None:
        """Penstock against the best of its peers."""
        tensors = [ps.asarray(array, device=self._device) for array in arrays]
        jitted = ps.jit(partial(expression, ps))

        def ours() -> None:
            jitted(*tensors)
            self._device.sync()

        sides: dict[str, Callable[[], object]] = {"penstock": ours, "numpy": lambda: expression(np, *arrays)}
        if torch is not None:
            peers = [torch.from_numpy(array) for array in arrays]
            sides["torch"] = lambda: expression(torch, *peers)
            if self._compiles and compiled:
                fast = torch.compile(partial(expression, torch))
                sides["compiled"] = lambda: fast(*peers)
        for call in sides.values():
            call()  # compiles
            call()
        best = best_of(sides)
        peers_best = min(seconds for name, seconds in best.items() if name != "penstock")
        ratios = "  ".join(
            f"{name} {best[name] / best['penstock']:.2f}x" for name in sides if name != "penstock"
        )
        ratio = peers_best / best["penstock"]
        detail = f"{best['penstock'] * 1e3:.2f} ms; {ratios}"
        self._report.add(what, ratio, "x", f">= {goal}", ratio >= goal, detail)


def replaying(device: ps.Device, report: Report, operations: int = 200) -> None:
    """The Python time of a cached expression of many operations, for each operation."""
    x = ps.asarray(np.ones(1 << 12, np.float32), device=device)

    def expression(x: ps.Tensor) -> ps.Tensor:
        y = x
        for _ in range(operations // 2):
            y = y * 1.0001 + x
        return y

    jitted = ps.jit(expression)
    for _ in range(3):
        jitted(x)
        expression(x).realize()
    device.sync()
    sides: dict[str, Callable[[], object]] = {
        "replay of a jitted function": lambda: jitted(x),
        "recording": lambda: expression(x),
        "recording and running": lambda: expression(x).realize(),
    }
    for name, call in sides.items():
        best = best_of({name: call}, repeat=3)[name]
        device.sync()
        cost = best / operations * 1e6
        goal = "<= 3" if name.startswith("replay") else ""
        report.add(f"{name}, an operation of {operations}", cost, "us", goal, cost <= 3 if goal else None, "")


def planning(report: Report) -> None:
    """Time of the planner, and how far its arena is from the least possible."""
    graphs = {
        "GPT": gpt_values(GPT_LAYERS),
        "MLP": mlp_values(MLP_LAYERS),
        "branching graph": branching_values(0, 10_000),
    }
    for name, values in graphs.items():
        start = time.perf_counter()
        result = plan(values, 256)
        seconds = time.perf_counter() - start
        detail = f"{len(values)} values"
        report.add(f"planner, {name}: time", seconds, "s", "<= 0.2", seconds <= 0.2, detail)
        report.add(f"planner, {name}: gap", 100 * result.gap, "%", "<= 1", result.gap <= 0.01, detail)


def starting(device: ps.Device, report: Report) -> None:
    """The time of a new process to its first result by kernels, with cold and warm caches on disk."""
    program = (
        "import penstock as ps, numpy as np\n"
        f"ps.use({device.name!r})\n"
        "x = ps.asarray(np.ones((512, 512), np.float32))\n"
        "ps.jit(lambda x: ps.sum(ps.exp(x @ x / 512), axis=1))(x).numpy()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            environment = {**os.environ, "POCL_CACHE_DIR": folder, "CUDA_CACHE_PATH": folder}
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, env=environment)
            seconds = time.perf_counter() - start
            report.add(f"{name} start of a process to its first result", seconds, "s", "", None, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device)
    versions = {"numpy": np.__version__, "torch": torch.__version__ if torch else "not installed"}
    print(f"{device.name}: {device.capabilities.description}; {versions}\n")
    report = Report()
    warnings.simplefilter("ignore")
    draw = np.random.default_rng(0).random
    sides = Sides(device, not options.no_compile, report)
    x, y = (draw(4 << 20, np.float32) for _ in range(2))
    sides.compare("ten elementwise operations, 4M floats", chain, x, y)
    x = draw((ROWS, COLUMNS), np.float32)
    weight, bias = draw(COLUMNS, np.float32), draw(COLUMNS, np.float32)
    target = np.random.default_rng(1).integers(0, COLUMNS, ROWS)
    size = f"{ROWS} x {COLUMNS}"
    sides.compare(f"softmax, {size}", softmax, x)
    sides.compare(f"layer norm, {size}", layer_norm, x, weight, bias)
    sides.compare(f"layer norm and backward, {size}", layer_norm_backward, x, weight, bias)
    sides.compare(f"cross-entropy, {size}", cross_entropy, x, target)
    sides.compare(f"cross-entropy and backward, {size}", cross_entropy_backward, x, target)
    sides.compare(f"gradient of (x - y) ** 2, {size}", squared_error_backward, x, draw(x.shape, np.float32))
    sides.compare(f"uniform numbers, {size}", uniform, compiled=False)
    sides.compare(f"normal numbers, {size}", normal, compiled=False)
    sides.compare(f"dropout, {size}", dropout, x, compiled=False)
    for n in (64, 128, 256, 512, 1024, 2048):
        sides.compare(
            f"matmul of {n}",
            matmul,
            draw((n, n), np.float32),
            draw((n, n), np.float32),
            goal=0.95,
            compiled=False,
        )
    for m, n, k in GPT_SHAPES:
        a, b = draw((m, k), np.float32), draw((k, n), np.float32)
        sides.compare(f"matmul {m} x {n} x {k}", matmul, a, b, goal=0.95, compiled=False)
    replaying(device, report)
    planning(report)
    starting(device, report)
    if options.save:
        report.save(options.save, "tensor", device, versions)


if __name__ == "__main__":
    main()
