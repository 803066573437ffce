"""The cost of profiles: while none is active, against the same code without hooks; and while one is active.

    python benchmarks/profiler.py [--device opencl:0] [--save FILE]

Times are the best of several rounds, in which the sides take turns. In these workloads the host
does much for little work of the device: many small launches, steps, copies.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
import penstock.runtime as runtime_module
import penstock.stream.stream as stream_module
from measuring import Report, best_of
from penstock.stream.queue import CommandQueue
from penstock.stream.stream import Stream
from penstock.stream.transfer import Transfers
from runtime import kernels

# Each hook of a profile in the source, and the code without it.
HOOKS: list[tuple[type, str, str, str]] = [
    (CommandQueue, "retire", "        if self.recorders:\n            self._tell(batch)\n", ""),
    (
        Stream,
        "_graph",
        "    if self.recorders:\n"
        "        return False  # in a graph, nobody knows how long each launch takes\n",
        "",
    ),
    (
        Stream,
        "wait",
        "    for recorder in self.recorders:\n        recorder.waited(where, why, start, end)\n",
        "",
    ),
    (
        Transfers,
        "_copied_in_place",
        "        recorders = self._stream.recorders\n        start = perf_counter() if recorders else 0.0\n",
        "        recorders = ()\n",
    ),
]


def without(owner: type, name: str, hook: str, instead: str) -> Callable[..., Any]:
    """A method as it would be without its hook."""
    text = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    if hook not in text:
        raise SystemExit(f"{owner.__name__}.{name} has changed: its hook is not where this benchmark looks")
    result: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + text.replace(hook, instead)
    exec(code, sys.modules[owner.__module__].__dict__, result)
    method: Callable[..., Any] = result[name]
    return method


def opened(device: ps.Device, hooks: bool) -> ps.Device:
    """The same device opened again, with or without hooks."""
    classes = {CommandQueue: stream_module, Stream: runtime_module, Transfers: runtime_module}
    methods: dict[type, dict[str, Any]] = {owner: {} for owner in classes}
    for owner, name, hook, instead in HOOKS:
        methods[owner][name] = without(owner, name, hook, instead)
    made = ps.Device(f"{device.name}-{hooks}", device.capabilities, device.another_driver)
    for owner, place in classes.items():
        # Separate classes for both sides: Python is faster with a class that was never modified.
        setattr(place, owner.__name__, type(owner.__name__, (owner,), {} if hooks else methods[owner]))
    try:
        made.empty(1)
    finally:
        for owner, place in classes.items():
            setattr(place, owner.__name__, owner)
    return made


def launches(device: ps.Device) -> Callable[[], None]:
    """A thousand launches of next to nothing."""
    axpy = kernels(device)["axpy"]
    x, y = device.upload(np.ones(64, np.float32)), device.upload(np.ones(64, np.float32))

    def run() -> None:
        for _ in range(1000):
            device.stream.launch(axpy, (1,), (64,), (x, y, 0.5, 64))
        device.sync()

    return run


def steps(device: ps.Device) -> Callable[[], None]:
    """Two hundred training steps of a network that learns the sine."""
    ps.use(device)
    model = ps.nn.Sequential(ps.nn.Linear(1, 32), ps.nn.Tanh(), ps.nn.Linear(32, 1))
    optimizer = ps.optim.Adam(model.parameters(), lr=1e-3)
    points = np.linspace(-3, 3, 64, dtype=np.float32)[:, None]
    x, y = (ps.asarray(values, device=device) for values in (points, np.sin(points)))

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = ps.mean((model(x) - y) ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def run() -> None:
        for _ in range(200):
            loss = step(x, y)
        float(loss)

    return run


def copies(device: ps.Device) -> Callable[[], None]:
    """Two hundred small arrays to the device and back."""
    array = np.zeros(1024, np.float32)

    def run() -> None:
        for _ in range(200):
            device.download(device.upload(array)).wait()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    device, report = ps.use(asked.device), Report()
    hooked, bare = opened(device, hooks=True), opened(device, hooks=False)
    for workload in (launches, steps, copies):
        off = workload(hooked)

        def on(run: Callable[[], None] = off) -> None:
            with ps.profile(device=hooked):
                run()

        best = best_of({"without": workload(bare), "off": off, "on": on}, rounds=40)
        what, ratio = workload.__name__, best["off"] / best["without"]
        detail = ", ".join(f"{side} {seconds * 1e3:.2f} ms" for side, seconds in best.items())
        report.add(f"{what}: profile off / no hooks", ratio, "x", "< 1.03", ratio < 1.03, detail)
        report.add(f"{what}: profile on / no hooks", best["on"] / best["without"], "x", "", None, "")
    if asked.save:
        report.save(asked.save, "profiler", device, {"numpy": np.__version__})


if __name__ == "__main__":
    main()
