"""Convolutions of a ResNet, forward and with both gradients, jitted, beside PyTorch's on two threads.

    python benchmarks/convolution.py [name ...]

Prints the best time of some runs of each, and the ratio.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import penstock as ps
from penstock.nn import functional as F  # noqa: N812

# Batch, channels, outputs, lengths, window, stride, groups
CASES = {
    "64 channels of 56": (8, 64, 64, 56, 3, 1, 1),
    "128 channels of 28": (8, 128, 128, 28, 3, 1, 1),
    "256 channels of 14": (8, 256, 256, 14, 3, 1, 1),
    "512 channels of 7": (8, 512, 512, 7, 3, 1, 1),
    "with a stride of 2": (8, 64, 128, 56, 3, 2, 1),
    "pointwise": (8, 64, 256, 56, 1, 1, 1),
    "by channel": (8, 64, 64, 56, 3, 1, 64),
}
_RUNS = 7


def milliseconds(run: Callable[[], Any]) -> float:
    """The shortest of several runs, after two runs of warm-up."""
    times = []
    for _ in range(_RUNS + 2):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times[2:]) * 1e3


def measured(case: tuple[int, ...], torch: Any) -> list[float]:
    """Both sides of a case: the convolution, and the convolution with its gradients."""
    batch, channels, outputs, length, size, stride, groups = case
    random = np.random.default_rng(0)
    arrays = [
        random.standard_normal(shape, np.float32)
        for shape in ((batch, channels, length, length), (outputs, channels // groups, size, size))
    ]
    settings: dict[str, Any] = {"stride": stride, "padding": size // 2, "groups": groups}
    x, w = (ps.asarray(array) for array in arrays)
    forward: Any = ps.jit(lambda x, w: F.conv2d(x, w, **settings))
    both: Any = ps.jit(ps.grad(lambda x, w: ps.sum(F.conv2d(x, w, **settings) ** 2), (0, 1)))
    theirs: list[Any] = [torch.tensor(array, requires_grad=True) for array in arrays]

    def their_forward() -> None:
        with torch.no_grad():
            torch.nn.functional.conv2d(*theirs, **settings)

    def their_step() -> None:
        for tensor in theirs:
            tensor.grad = None
        (torch.nn.functional.conv2d(*theirs, **settings) ** 2).sum().backward()

    ours = [
        lambda: forward(x, w).device.sync(),
        lambda: both(x, w)[0].device.sync(),
    ]
    return [milliseconds(run) for run in (ours[0], their_forward, ours[1], their_step)]


def main() -> None:
    """Print a line for each case, or for those whose name contains an argument."""
    torch = importlib.import_module("torch")

    torch.set_num_threads(2)
    print("milliseconds: Penstock, PyTorch, ratio; then the same with gradients")
    for name, case in CASES.items():
        if len(sys.argv) == 1 or any(part in name for part in sys.argv[1:]):
            a, b, c, d = measured(case, torch)
            print(f"{name:20} {a:7.1f} {b:7.1f} {a / b:5.2f}x {c:8.1f} {d:7.1f} {c / d:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
