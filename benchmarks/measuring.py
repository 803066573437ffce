"""Shared by all benchmarks: timing several sides in turn, and a table that is printed and saved."""

from __future__ import annotations

import gc
import importlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import penstock as ps

Step = Callable[[ps.Tensor, ps.Tensor], ps.Tensor]
Sides = dict[str, Callable[[], object]]
_PAUSE = 0.02  # seconds, in which the threads of the previous side stop spinning


def installed(name: str) -> Any:
    """A peer's module; None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def best_of(
    sides: Sides, rounds: int = 15, repeat: int = 1, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of each side, the best of `rounds`, run in turn; each is called `repeat` times a round."""
    best = dict.fromkeys(sides, float("inf"))
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, call in sides.items():
            time.sleep(_PAUSE if len(sides) > 1 else 0)
            call()  # wakes the side's own threads
            start = clock()
            for _ in range(repeat):
                call()
            best[name] = min(best[name], (clock() - start) / repeat)
    gc.enable()
    return best


def classifier(
    device: ps.Device,
    layers: Sequence[int],
    activation: Callable[[], ps.nn.Module],
    optimizer: Callable[..., ps.optim.Optimizer],
) -> Step:
    """A jitted training step of a network with layers of these sizes: of rows and their classes."""
    parts: list[ps.nn.Module] = []
    for inputs, outputs in pairwise(layers):
        parts += [ps.nn.Linear(inputs, outputs, device=device), activation()]
    model = ps.nn.Sequential(*parts[:-1])
    updates = optimizer(model.parameters(), lr=1e-3)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = ps.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        updates.step()
        return loss

    return step


class Report:
    """Lines of the table, printed as they come and kept for the file."""

    def __init__(self, after: Callable[[], None] = lambda: None) -> None:
        """`after` is called after each line, such as to save those that there are."""
        self.rows: list[dict[str, Any]] = []
        self._after = after

    def add(self, what: str, value: float, unit: str, goal: str, met: bool | None, detail: str) -> None:
        mark = {True: "met", False: "MISSED", None: ""}[met]
        self.rows.append(
            {"what": what, "value": round(value, 3), "unit": unit, "goal": goal, "met": met, "detail": detail}
        )
        print(f"{what:<46} {value:7.2f} {unit:<4} {goal:<10} {mark:<7} {detail}", flush=True)
        self._after()

    def save(
        self,
        path: Path,
        benchmark: str,
        device: ps.Device,
        versions: dict[str, str],
        options: str | None = None,
    ) -> None:
        """Write the table as JSON, with the commit and the device; `options`: of the command, if not that."""
        given = f" --device {device.name}" if options is None else options
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        result = asked.stdout.strip() if asked.returncode == 0 else "unknown"
        about = {
            "command": f"python benchmarks/{benchmark}.py{given}",
            "commit": os.environ.get("GIT_COMMIT") or result,
            "device": device.capabilities.description,
            "api": device.capabilities.api,
            "python": platform.python_version(),
            **versions,
            "rows": self.rows,
        }
        path.write_text(json.dumps(about, indent=1) + "\n")
