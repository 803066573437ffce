"""Products of few rows with quantized weights, by themselves: shapes of Llamas of 1 and 8 billion weights.

    python benchmarks/quantized.py --device cuda:0                # with PyTorch in bfloat16, if it is there
    python benchmarks/quantized.py --shapes 256x512 --rows 1 8    # on any machine

A program multiplies with as many matrices as exceed the device's caches, all different. Its products need
nothing of one another, so small ones may run at the same time; those of PyTorch, in a CUDA graph, do not.
Programs of all kinds take turns, and the median of their times is told: for a product, as bytes of weights
and scales a second, and against the unquantized product.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import penstock as ps
from penstock.graph.dtypes import DType, checked

SHAPES = {  # outputs x inputs
    "1b": ("2048x2048", "512x2048", "8192x2048", "2048x8192", "128256x2048"),
    "8b": ("4096x4096", "1024x4096", "14336x4096", "4096x14336", "128256x4096"),
}
CACHES = 256 << 20  # bytes of weights of a program, which exceed all caches
MOST_MATRICES = 64
TURNS = 15

Program = Callable[[], Any]


def layers(outputs: int, inputs: int, dtype: DType, kind: str, count: int, device: ps.Device) -> list[Any]:
    """Layers with random weights: their values are of no importance for the time."""
    made: list[Any] = []
    draw = np.random.default_rng(0)
    for _ in range(count):
        if kind in ("int8", "int4"):
            layer: Any = ps.nn.QuantizedLinear(
                inputs, outputs, False, 4 if kind == "int4" else 8, device=device
            )
            words = draw.integers(0, 1 << 32, layer.packed.shape, dtype=np.uint32)
            layer.packed = ps.asarray(words, device=device)
            layer.scales = (ps.ones(layer.scales.shape, device=device) * 1e-3).astype(dtype)
        else:
            layer = ps.nn.Linear(inputs, outputs, False, device).to(dtype)
        made.append(layer)
    return made


def program(made: list[Any], x: ps.Tensor, device: ps.Device) -> Program:
    """Multiply with all layers."""

    @ps.jit
    def run(x: ps.Tensor) -> list[ps.Tensor]:
        return [layer(x) for layer in made]

    def once() -> None:
        run(x)
        device.sync()

    return once


def torch_program(outputs: int, inputs: int, rows: int, count: int) -> Program | None:
    """The same in PyTorch's bfloat16, in a CUDA graph."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    with torch.no_grad():
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)

        def run() -> None:
            for weight in weights:
                torch.nn.functional.linear(x, weight)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

    def once() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return once


def compare(shape: str, rows: int, dtype: DType, device: ps.Device) -> None:
    outputs, inputs = map(int, shape.split("x"))
    plain, item = str(dtype), 8 * dtype.itemsize
    bits = {plain: item, "int8": 8 + item / 32, "int4": 4 + item / 32, "PyTorch": 16}
    counts = {
        kind: max(1, min(MOST_MATRICES, round(CACHES / (outputs * inputs * size / 8))))
        for kind, size in bits.items()
    }
    x = ps.ones((rows, inputs), device=device).astype(dtype)
    programs: dict[str, Program] = {}
    for kind in (plain, "int8", "int4"):
        programs[kind] = program(layers(outputs, inputs, dtype, kind, counts[kind], device), x, device)
    if str(device).startswith("<Device cuda") and (
        peer := torch_program(outputs, inputs, rows, counts["PyTorch"])
    ):
        programs["PyTorch"] = peer
    times: dict[str, list[float]] = {kind: [] for kind in programs}
    for turn in range(TURNS + 2):
        for kind, run in programs.items():
            start = time.perf_counter()
            run()
            if turn > 1:  # before, programs are built
                times[kind].append((time.perf_counter() - start) / counts[kind])
    usual = statistics.median(times[plain])
    cells = []
    for kind in programs:
        each = statistics.median(times[kind])
        rate = outputs * inputs * bits[kind] / 8 / each / 1e9
        cells.append(f"{kind} {each * 1e6:8.2f} us {rate:6.0f} GB/s {usual / each:5.2f}x")
    print(f"{shape:>12}, {rows:2} rows: " + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shapes", nargs="+", default=["1b", "8b"], help="1b, 8b, or outputs x inputs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    chosen = parser.parse_args()
    if chosen.device:
        ps.use(chosen.device)
    device = ps.default_device()
    print(f"{device}: times of a product")
    for rows in chosen.rows:
        for name in chosen.shapes:
            for shape in SHAPES.get(name, (name,)):
                compare(shape, rows, checked(chosen.dtype), device)


if __name__ == "__main__":
    main()
