"""Models that PyTorch exported to ONNX, beside onnxruntime: outputs, planned memory and time.

    python benchmarks/onnx_models.py [--device opencl:0] [--rounds 20] [--json FILE]

A ResNet and a small transformer are exported by `torch.onnx.export`, which needs the packages torch and
onnxscript; onnxruntime runs the same files. Outputs are compared with PyTorch's. Calls take turns in one
process; a ratio above 1 says that Penstock is faster, or takes less CPU time. The peak is what the plan says,
weights included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import penstock as ps

SKIPPED = 3  # calls that compile and get warm


def resnet(torch: Any) -> tuple[Any, Any]:
    """A ResNet of eight blocks for images of 64 x 64, and a batch of 8."""
    nn = torch.nn

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(outputs)
            self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.norm2 = nn.BatchNorm2d(outputs)
            self.short = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.norm2(self.second(self.norm1(self.first(x)).relu()))
            return (y + self.short(x)).relu()

    widths = [32, 32, 64, 64, 128, 128, 256, 256]
    blocks = [
        Block(before, width, 1 if before == width else 2)
        for before, width in zip([32, *widths], widths, strict=False)
    ]
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*stem, *blocks, *head).eval(), torch.randn(8, 3, 64, 64)


def transformer(torch: Any) -> tuple[Any, Any]:
    """A transformer of four layers of 128, with causal attention, and a batch of 8 texts of 64 tokens."""
    nn = torch.nn

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(1000, 128), nn.Embedding(64, 128)
            layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(128, 1000)
            self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1))

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.positions.weight
            return self.head(self.layers(x, mask=self.mask, is_causal=True))

    return Model().eval(), torch.randint(0, 1000, (8, 64))


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """How long a call takes, and its CPU seconds."""
    begun, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begun, time.process_time() - busy


def measured(name: str, model: Any, example: Any, folder: Path, rounds: int) -> dict[str, Any]:
    """Export a model, compare its outputs, and measure calls in turn."""
    torch: Any = importlib.import_module("torch")
    runtime: Any = importlib.import_module("onnxruntime")
    path = folder / f"{name}.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (example,), str(path), dynamo=True, verbose=False)
    with torch.no_grad():
        expected = model(example).numpy()
    given = example.numpy()
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: given}
    module = ps.onnx.load(path)
    module.requires_grad_(False)
    x = ps.asarray(given)

    @ps.jit
    def forward(x: ps.Tensor) -> ps.Tensor:
        result: ps.Tensor = module(x)
        return result

    errors = {
        "penstock": float(np.abs(forward(x).numpy() - expected).max()),
        "onnxruntime": float(np.abs(session.run(None, feed)[0] - expected).max()),
    }
    times: dict[str, list[tuple[float, float]]] = {"penstock": [], "onnxruntime": []}
    for _ in range(rounds + SKIPPED):
        times["penstock"].append(seconds(lambda: forward(x).numpy()))
        times["onnxruntime"].append(seconds(lambda: session.run(None, feed)))
    own, other = (np.array(times[which][SKIPPED:]) for which in ("penstock", "onnxruntime"))
    ratios = other / own
    weights = sum(tensor.size * 4 for tensor in module.parameters())
    return {
        "model": name,
        "largest_difference": errors,
        "weights_bytes": weights,
        "peak_bytes": ps.memory.plan(forward, x).unlimited_bytes,
        "milliseconds": {"penstock": own[:, 0].min() * 1e3, "onnxruntime": other[:, 0].min() * 1e3},
        "cpu_milliseconds": {"penstock": own[:, 1].min() * 1e3, "onnxruntime": other[:, 1].min() * 1e3},
        "ratio": {"best": other[:, 0].min() / own[:, 0].min(), "median": statistics.median(ratios[:, 0])},
        "cpu_ratio": other[:, 1].min() / own[:, 1].min(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = ps.use(given.device) if given.device else ps.default_device()
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    rows = []
    print(f"{'':<12} {'difference':>10} {'peak':>10} {'penstock':>10} {'ort':>10} {'ratio':>6} {'CPU':>6}")
    with TemporaryDirectory() as folder:
        for make in (resnet, transformer):
            row = measured(make.__name__, *make(torch), Path(folder), given.rounds)
            rows.append(row)
            own, other = row["milliseconds"]["penstock"], row["milliseconds"]["onnxruntime"]
            print(
                f"{row['model']:<12} {row['largest_difference']['penstock']:>10.1e} "
                f"{row['peak_bytes'] / 2**20:>6.1f} MiB {own:>7.2f} ms {other:>7.2f} ms "
                f"{row['ratio']['best']:>6.2f} {row['cpu_ratio']:>6.2f}"
            )
    if given.json:
        versions = {name: importlib.import_module(name).__version__ for name in ("torch", "onnxruntime")}
        about: dict[str, Any] = {
            "device": device.capabilities.description,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        about |= {"load": os.getloadavg()[0], **versions}
        given.json.write_text(json.dumps({"about": about, "models": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
