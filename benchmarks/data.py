"""Loaders beside PyTorch's: samples per second of the same datasets with the same workers, in turn.

    python benchmarks/data.py [--workers 0 2] [--rounds 5]

A ratio above 1 says that Penstock's loader is faster. PyTorch's gives tensors in the host's memory, and
Penstock's tensors on the device, which is a copy more.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import penstock as ps
from penstock.data import Arrays, Loader

BATCH = 64


class Pictures:
    """Images that are computed, as a decoder would: 3 x 64 x 64, and a label."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index >= self._length:
            raise IndexError(index)
        image = np.random.default_rng(index).standard_normal((3, 64, 64), dtype=np.float32)
        return np.tanh(image), index % 10


class Rows:
    """Rows of an array, each by itself, as a PyTorch dataset has them."""

    def __init__(self, rows: int) -> None:
        self.values = np.random.default_rng(1).standard_normal((rows, 256), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


def seconds(epoch: Callable[[], Iterable[Any]]) -> float:
    """How long an epoch takes."""
    begun = time.perf_counter()
    for _ in epoch():
        pass
    ps.sync()
    return time.perf_counter() - begun


def compared(name: str, ours: Any, theirs: Any, samples: int, rounds: int) -> None:
    """Print the samples per second of both, and the ratio, of epochs in turn."""
    times: dict[str, list[float]] = {"penstock": [], "torch": []}
    for _ in range(rounds + 1):  # the first is to get warm: processes start in it
        times["penstock"].append(seconds(lambda: ours))
        times["torch"].append(seconds(lambda: theirs))
    own, other = (min(times[which][1:]) for which in ("penstock", "torch"))
    ratios = [b / a for a, b in zip(times["penstock"][1:], times["torch"][1:], strict=True)]
    print(
        f"{name:<28} {samples / own:>12,.0f} {samples / other:>12,.0f} {other / own:>8.2f} "
        f"{statistics.median(ratios):>8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch_data: Any = importlib.import_module("torch.utils.data")
    torch: Any = importlib.import_module("torch")
    cases: dict[str, Any] = {"computed images": Pictures(2048), "rows one by one": Rows(50_000)}
    print(f"{'':<28} {'penstock/s':>12} {'torch/s':>12} {'best':>8} {'median':>8}")
    for workers in given.workers:
        for name, dataset in cases.items():
            with Loader(dataset, BATCH, shuffle=True, seed=1, workers=workers) as ours:
                theirs = torch_data.DataLoader(
                    dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
                )
                compared(f"{name}, {workers} workers", ours, theirs, len(dataset), given.rounds)
    rows = cases["rows one by one"].values
    ours = Loader(Arrays(rows), BATCH, shuffle=True, seed=1)
    theirs = torch_data.DataLoader(torch_data.TensorDataset(torch.from_numpy(rows)), BATCH, shuffle=True)
    compared("rows of an array", ours, theirs, len(rows), given.rounds)


if __name__ == "__main__":
    main()
