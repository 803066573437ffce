"""Tensors against NumPy, and against PyTorch where it is installed: each line runs all sides in turn.

    python benchmarks/tensor.py [--device opencl:0]

A ratio is the peer's time over Penstock's: above 1, Penstock is faster. PyTorch runs eagerly.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

import penstock as ps
from penstock.realize import realize
from runtime import best_of

torch: Any
try:
    torch = importlib.import_module("torch")
except ImportError:
    torch = None

Expression = Callable[..., Any]


def chain(xp: Any, x: Any, y: Any) -> Any:
    """Ten elementwise operations."""
    return (xp.sqrt(xp.exp(-(x * y + x)) + y) * x - xp.tanh(y)) / (y + 1)


def softmax(xp: Any, x: Any) -> Any:
    most = xp.amax(x, 1, keepdim=True) if xp is torch else xp.max(x, axis=1, keepdims=True)
    e = xp.exp(x - most)
    return e / (xp.sum(e, 1, keepdim=True) if xp is torch else xp.sum(e, axis=1, keepdims=True))


def matmul(xp: Any, x: Any, y: Any) -> Any:
    return xp.matmul(x, y)


def compare(what: str, expression: Expression, device: ps.Device, *arrays: Any) -> None:
    tensors = [ps.asarray(array, device=device) for array in arrays]

    def ours() -> None:
        result = expression(ps, *tensors)
        realize([result._node], device)
        device.sync()

    sides: dict[str, Callable[[], object]] = {"penstock": ours, "numpy": lambda: expression(np, *arrays)}
    if torch is not None:
        peers = [torch.from_numpy(array) for array in arrays]
        sides["torch"] = lambda: expression(torch, *peers)
    for _ in range(2):
        ours()  # the second time compiles
    best = best_of(sides)
    ratios = "  ".join(
        f"{name} {best[name] / best['penstock']:5.2f}x" for name in sides if name != "penstock"
    )
    print(f"{what:<44} {best['penstock'] * 1e3:8.2f} ms   {ratios}", flush=True)


def recording(device: ps.Device, operations: int = 200) -> None:
    """What a cached expression of many operations costs in Python, for each operation."""
    x = ps.asarray(np.ones(1 << 15, np.float32), device=device)

    def expression() -> ps.Tensor:
        y = x
        for _ in range(operations // 2):
            y = y * 1.0001 + x
        return y

    def run() -> None:
        realize([expression()._node], device)

    for _ in range(3):
        run()
    device.sync()
    best = best_of({"record": expression, "record and run": run}, repeat=3)
    for name, seconds in best.items():
        print(f"{name}, an operation of {operations:<25} {seconds / operations * 1e6:8.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="opencl")
    device = ps.use(parser.parse_args().device)
    print(f"{device.name}: {device.capabilities.description}; NumPy {np.__version__}", end="")
    print(f"; PyTorch {torch.__version__}\n" if torch else "; PyTorch is not installed\n")
    draw = np.random.default_rng(0).random
    x, y = (draw(4 << 20, np.float32) for _ in range(2))
    compare("ten elementwise operations, 4M floats", chain, device, x, y)
    compare("softmax of 4096 x 1024", softmax, device, draw((4096, 1024), np.float32))
    for n in (64, 1024):
        compare(f"matmul of {n}", matmul, device, draw((n, n), np.float32), draw((n, n), np.float32))
    recording(device)


if __name__ == "__main__":
    main()
