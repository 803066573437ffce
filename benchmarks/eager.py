"""Single expressions and small programs without `@ps.jit`, next to PyTorch eager, NumPy and CuPy.

    python benchmarks/eager.py [--device opencl:0] [--only sum softmax] [--cpu-time] [--save FILE]

Every call is realised. A ratio is the time of the better peer over Penstock's: above 1, Penstock is faster.
"travelled" is the bytes that a call copies between host and device, counted by a profile.

With `--cpu-time`, CPU seconds of all threads are compared instead of time, for machines that others use, too.
PyTorch and NumPy then have one thread, because several spin while they wait.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from measuring import Report, best_of, installed

F = ps.nn.functional


torch, cupy = installed("torch"), installed("cupy")
Arrays = dict[str, Any]
_THREADS = "OPENBLAS_NUM_THREADS"
_COMPILING_SECONDS = 1.5  # that a thread has for what came, or came often; it waits until a second was quiet


@dataclass(frozen=True)
class Operation:
    """An operation in each library; `numpy`: of NumPy and CuPy, if they have it."""

    name: str
    ours: Callable[[Arrays], ps.Tensor]
    torch: Callable[[Arrays], Any]
    numpy: Callable[[Any, Arrays], Any] | None = None


def _for_a_while(loop: Callable[[int], None]) -> None:
    """Have quick operations come often: a thread then compiles them for the calling thread."""
    start = time.perf_counter()
    while time.perf_counter() - start < 0.02:
        loop(10)


def operator(name: str, apply: Callable[[Arrays], Any]) -> Operation:
    """An operation that all libraries write the same way."""
    return Operation(name, apply, apply, lambda _, a: apply(a))


def function(name: str, word: str, operand: str = "x") -> Operation:
    """A function of an array with the same name in all libraries."""
    return Operation(
        name,
        lambda a: getattr(ps, word)(a[operand]),
        lambda a: getattr(torch, word)(a[operand]),
        lambda xp, a: getattr(xp, word)(a[operand]),
    )


def softmax(xp: Any, x: Any) -> Any:
    e = xp.exp(x - xp.max(x, axis=1, keepdims=True))
    return e / xp.sum(e, axis=1, keepdims=True)


def layer_norm(xp: Any, x: Any) -> Any:
    centred = x - xp.mean(x, axis=1, keepdims=True)
    return centred / xp.sqrt(xp.mean(centred * centred, axis=1, keepdims=True) + np.float32(1e-5))


OPERATIONS = [
    operator("add", lambda a: a["x"] + a["y"]),
    operator("x * 2", lambda a: a["x"] * 2),
    operator("divide", lambda a: a["x"] / a["y"]),
    operator("row broadcast", lambda a: a["x"] + a["row"]),
    operator("column broadcast", lambda a: a["x"] * a["column"]),
    operator("matmul", lambda a: a["x"] @ a["y"]),
    operator("matrix by vector", lambda a: a["x"] @ a["row"]),
    operator("transpose", lambda a: a["x"].T + 1.0),
    function("exp", "exp"),
    function("tanh", "tanh"),
    function("sqrt", "sqrt", "y"),
    function("sum", "sum"),
    Operation("relu", lambda a: F.relu(a["x"]), lambda a: torch.relu(a["x"])),
    Operation("relu(x) + 1", lambda a: F.relu(a["x"]) + 1, lambda a: torch.relu(a["x"]) + 1),
    Operation(
        "gelu",
        lambda a: F.gelu(a["x"], "tanh"),
        lambda a: torch.nn.functional.gelu(a["x"], approximate="tanh"),
    ),
    Operation(
        "where",
        lambda a: ps.where(a["x"] > 0, a["x"], a["y"]),
        lambda a: torch.where(a["x"] > 0, a["x"], a["y"]),
        lambda xp, a: xp.where(a["x"] > 0, a["x"], a["y"]),
    ),
    Operation(
        "to float16",
        lambda a: ps.astype(a["x"], ps.float16),
        lambda a: a["x"].half(),
        lambda xp, a: a["x"].astype(np.float16),
    ),
    Operation(
        "sum of rows",
        lambda a: ps.sum(a["x"], axis=1),
        lambda a: a["x"].sum(1),
        lambda xp, a: a["x"].sum(1),
    ),
    Operation(
        "sum of columns",
        lambda a: ps.sum(a["x"], axis=0),
        lambda a: a["x"].sum(0),
        lambda xp, a: a["x"].sum(0),
    ),
    Operation(
        "max of rows",
        lambda a: ps.max(a["x"], axis=1),
        lambda a: a["x"].amax(1),
        lambda xp, a: a["x"].max(1),
    ),
    Operation(
        "argmax of rows",
        lambda a: ps.argmax(a["x"], axis=1),
        lambda a: a["x"].argmax(1),
        lambda xp, a: a["x"].argmax(1),
    ),
    Operation(
        "variance of rows",
        lambda a: ps.var(a["x"], axis=1),
        lambda a: a["x"].var(1, correction=0),
        lambda xp, a: a["x"].var(1),
    ),
    Operation(
        "cumulative sum",
        lambda a: ps.cumulative_sum(a["x"], axis=1),
        lambda a: a["x"].cumsum(1),
        lambda xp, a: xp.cumsum(a["x"], 1),
    ),
    Operation(
        "sort",
        lambda a: ps.sort(a["x"], axis=1),
        lambda a: a["x"].sort(1).values,
        lambda xp, a: xp.sort(a["x"], 1),
    ),
    Operation(
        "softmax",
        lambda a: F.softmax(a["x"], axis=1),
        lambda a: a["x"].softmax(1),
        lambda xp, a: softmax(xp, a["x"]),
    ),
    Operation(
        "layer norm",
        lambda a: F.layer_norm(a["x"], a["x"].shape[-1:]),
        lambda a: torch.nn.functional.layer_norm(a["x"], a["x"].shape[-1:]),
        lambda xp, a: layer_norm(xp, a["x"]),
    ),
    Operation("one row", lambda a: a["x"][3], lambda a: a["x"][3].clone(), lambda xp, a: a["x"][3].copy()),
    Operation(
        "a block",
        lambda a: a["x"][: len(a["x"]) // 2, 1:],
        lambda a: a["x"][: len(a["x"]) // 2, 1:].contiguous(),
        lambda xp, a: a["x"][: len(a["x"]) // 2, 1:].copy(),
    ),
    Operation(
        "rows by index",
        lambda a: ps.take(a["x"], a["index"], axis=0),
        lambda a: a["x"][a["index"]],
        lambda xp, a: a["x"].take(a["index"], 0),
    ),
    Operation(
        "concat",
        lambda a: ps.concat([a["x"], a["y"]]),
        lambda a: torch.cat([a["x"], a["y"]]),
        lambda xp, a: xp.concatenate([a["x"], a["y"]]),
    ),
]


def arrays(size: int) -> Arrays:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((size, size), dtype=np.float32),
        "y": rng.random((size, size), dtype=np.float32) + np.float32(0.5),
        "row": rng.random(size, dtype=np.float32),
        "column": rng.random((size, 1), dtype=np.float32),
        "index": rng.integers(0, size, size),
    }


class Sides:
    """A piece of work on every side, each with a function that waits for its end."""

    def __init__(self, device: ps.Device, report: Report, clock: Callable[[], float]) -> None:
        self.device, self.report, self.clock = device, report, clock
        self.gpu = device.name.startswith("cuda")
        self.place = "cuda" if self.gpu else "cpu"

    def wait(self, name: str) -> None:
        if name == "penstock":
            self.device.sync()
        elif name == "torch" and self.gpu:
            torch.cuda.synchronize()
        elif name == "cupy":
            cupy.cuda.Device().synchronize()

    def compare(self, what: str, sides: dict[str, Callable[[], object]], goal: float, rounds: int) -> None:
        """Penstock against the best of its peers; calls are repeated until a round is long enough."""
        seconds: dict[str, float] = {}
        loops = {name: self._loop(name, call) for name, call in sides.items()}
        repeat = {}
        for name, loop in loops.items():
            loop(12)  # the first may be computed by NumPy or single operations
            if name == "penstock" and not self.gpu:
                for _ in range(2):
                    time.sleep(_COMPILING_SECONDS)
                    _for_a_while(loop)
            loop(3)
            start = time.perf_counter()
            loop(3)
            repeat[name] = max(1, min(1000, int(0.02 * 3 / (time.perf_counter() - start))))
        timed: dict[str, Callable[[], object]] = {
            name: partial(loop, repeat[name]) for name, loop in loops.items()
        }
        for name, best in best_of(timed, rounds=rounds, clock=self.clock).items():
            seconds[name] = best / repeat[name]
        travelled = self._travelled(sides["penstock"])
        peers = {name: time for name, time in seconds.items() if name != "penstock"}
        ratio = min(peers.values()) / seconds["penstock"]
        detail = ", ".join(f"{name} {value * 1e6:,.1f} us" for name, value in seconds.items())
        self.report.add(
            what, ratio, "x", f">= {goal:g}x", ratio >= goal, f"{detail}; {travelled:,} bytes travelled"
        )

    def _loop(self, name: str, call: Callable[[], object]) -> Callable[[int], None]:
        def loop(count: int) -> None:
            for _ in range(count):
                call()
            self.wait(name)

        return loop

    def _travelled(self, call: Callable[[], object]) -> int:
        self.device.sync()
        with ps.profile(device=self.device) as profile:
            call()
            self.device.sync()
        return sum(copy.nbytes for copy in profile.copies() if copy.direction != "copy")

    def operation(self, operation: Operation, given: Arrays, rounds: int, goal: float) -> None:
        """Measure an operation at a size."""
        size = len(given["x"])
        ours = {name: ps.asarray(array, device=self.device) for name, array in given.items()}
        sides: dict[str, Callable[[], object]] = {"penstock": lambda: operation.ours(ours).realize()}
        if torch is not None:
            theirs = {name: torch.from_numpy(array).to(self.place) for name, array in given.items()}
            sides["torch"] = lambda: operation.torch(theirs)
        arrays_of = operation.numpy
        if arrays_of is not None and not self.gpu:
            sides["numpy"] = lambda: arrays_of(np, given)
        if arrays_of is not None and self.gpu and cupy is not None:
            there = {name: cupy.asarray(array) for name, array in given.items()}
            sides["cupy"] = lambda: arrays_of(cupy, there)
        self.compare(f"{operation.name}, {size} x {size}", sides, goal, rounds)


# Small programs, each a function that returns a call of Penstock and a call of PyTorch


def xor(device: ps.Device, place: str) -> Iterator[Callable[[], object]]:
    yield from _mlp(device, place, (2, 8, 1), 4)


def mlp(device: ps.Device, place: str) -> Iterator[Callable[[], object]]:
    yield from _mlp(device, place, (256, 512, 512, 10), 128)


def _mlp(device: ps.Device, place: str, layers: tuple[int, ...], rows: int) -> Iterator[Callable[[], object]]:
    """A training step with Adam and a squared error."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, layers[0]), dtype=np.float32)
    y = rng.standard_normal((rows, layers[-1]), dtype=np.float32)
    parts: list[ps.nn.Module] = []
    for inputs, outputs in pairwise(layers):
        parts += [ps.nn.Linear(inputs, outputs, device=device), ps.nn.Tanh()]
    model = ps.nn.Sequential(*parts[:-1])
    updates = ps.optim.Adam(model.parameters(), lr=1e-3)
    ours_x, ours_y = ps.asarray(x, device=device), ps.asarray(y, device=device)

    def ours() -> None:
        loss = F.mse_loss(model(ours_x), ours_y)
        loss.backward()
        updates.step()

    yield ours
    if torch is None:
        return
    theirs: list[Any] = []
    for inputs, outputs in pairwise(layers):
        theirs += [torch.nn.Linear(inputs, outputs, device=place), torch.nn.Tanh()]
    net = torch.nn.Sequential(*theirs[:-1])
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    their_x, their_y = torch.from_numpy(x).to(place), torch.from_numpy(y).to(place)

    def step() -> None:
        adam.zero_grad()
        loss = torch.nn.functional.mse_loss(net(their_x), their_y)
        loss.backward()
        adam.step()

    yield step


def lstm_cell(device: ps.Device, place: str) -> Iterator[Callable[[], object]]:
    """Sixteen steps of a cell, without gradients."""
    rng = np.random.default_rng(0)
    rows, inputs, hidden = 32, 64, 128
    given = [
        rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        for shape in ((16, rows, inputs), (inputs, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,))
    ]
    zeros = np.zeros((rows, hidden), np.float32)

    def run(sigmoid: Any, tanh: Any, xs: Any, w: Any, u: Any, b: Any, h: Any, c: Any) -> Any:
        for at in range(16):
            gates = xs[at] @ w + h @ u + b
            i, f, g, o = (gates[:, part * hidden : (part + 1) * hidden] for part in range(4))
            c = sigmoid(f) * c + sigmoid(i) * tanh(g)
            h = sigmoid(o) * tanh(c)
        return h

    ours = [ps.asarray(array, device=device) for array in (*given, zeros, zeros)]
    yield lambda: run(F.sigmoid, ps.tanh, *ours).realize()
    if torch is not None:
        theirs = [torch.from_numpy(array).to(place) for array in (*given, zeros, zeros)]
        yield lambda: run(torch.sigmoid, torch.tanh, *theirs)


def attention_block(device: ps.Device, place: str) -> Iterator[Callable[[], object]]:
    """Norm, causal attention with 4 heads, a projection and the sum with the input; no gradients."""
    rng = np.random.default_rng(0)
    batch, length, width, heads = 4, 128, 256, 4
    x, qkv, out = (
        rng.standard_normal(shape, dtype=np.float32) * np.float32(0.05)
        for shape in ((batch, length, width), (width, 3 * width), (width, width))
    )

    def ours() -> ps.Tensor:
        h = F.layer_norm(a, a.shape[-1:]) @ b
        q, k, v = (
            ps.permute_dims(
                ps.reshape(
                    h[:, :, part * width : (part + 1) * width], (batch, length, heads, width // heads)
                ),
                (0, 2, 1, 3),
            )
            for part in range(3)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (a + ps.reshape(ps.permute_dims(y, (0, 2, 1, 3)), (batch, length, width)) @ c).realize()

    a, b, c = (ps.asarray(array, device=device) for array in (x, qkv, out))
    yield ours
    if torch is None:
        return
    p, q_, r = (torch.from_numpy(array).to(place) for array in (x, qkv, out))

    def theirs() -> Any:
        h = torch.nn.functional.layer_norm(p, (width,)) @ q_
        q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2) for part in h.split(width, 2))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return p + y.transpose(1, 2).reshape(batch, length, width) @ r

    yield theirs


def k_means(device: ps.Device, place: str) -> Iterator[Callable[[], object]]:
    """One iteration of Lloyd's algorithm: distances, the nearest centre, and the mean of each cluster."""
    rng = np.random.default_rng(0)
    points = rng.standard_normal((4096, 16), dtype=np.float32)
    centres = points[:32].copy()

    def ours() -> ps.Tensor:
        distances = ps.sum(b * b, axis=1) - 2 * (a @ b.T)
        nearest = ps.argmin(distances, axis=1)
        member = ps.astype(nearest[:, None] == numbers, ps.float32)
        return (member.T @ a / ps.maximum(ps.sum(member, axis=0), 1.0)[:, None]).realize()

    a, b = ps.asarray(points, device=device), ps.asarray(centres, device=device)
    numbers = ps.arange(32, device=device)
    yield ours
    if torch is None:
        return
    p, q = torch.from_numpy(points).to(place), torch.from_numpy(centres).to(place)
    indices = torch.arange(32, device=place)

    def theirs() -> Any:
        distances = (q * q).sum(1) - 2 * (p @ q.T)
        member = (distances.argmin(1)[:, None] == indices).float()
        return member.T @ p / member.sum(0).clamp(min=1)[:, None]

    yield theirs


PROGRAMS = {
    "XOR, a training step": xor,
    "MLP, a training step": mlp,
    "LSTM cell, 16 steps": lstm_cell,
    "attention block": attention_block,
    "k-means, one iteration": k_means,
}


def chain_line(device: ps.Device, report: Report, length: int = 200) -> None:
    """An operation in a chain, recorded and run."""
    x = ps.ones((8, 8), device=device)

    def chain() -> None:
        y = x
        for _ in range(length // 2):
            y = y * 0.5 + 1.0
        y.realize()
        device.sync()

    for _ in range(12):
        chain()
    time.sleep(2.0)  # while a thread compiles
    chain()
    best = best_of({"chain": chain}, rounds=20)["chain"] / length * 1e6
    report.add(f"an operation in a chain of {length}", best, "us", "<= 8", best <= 8, "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=None, help="by default the first")
    parser.add_argument("--only", nargs="*", default=[], help="words of the lines to run")
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU seconds of all threads")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    if options.cpu_time and _THREADS not in os.environ:  # which NumPy reads when it is imported
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _THREADS: "1"})
    device = ps.use(options.device) if options.device else ps.default_device()
    report = Report()
    sides = Sides(device, report, time.process_time if options.cpu_time else time.perf_counter)
    if torch is not None and options.cpu_time:
        torch.set_num_threads(1)
    # The same precision on a GPU: products in full float32, as Penstock's.
    goals = {8: 0.67, 512: 1.0, 4096: 1.0} if sides.gpu else {8: 0.8, 256: 0.8, 2048: 0.8}

    def asked(name: str) -> bool:
        return not options.only or any(word in name for word in options.only)

    for size, goal in goals.items():
        given = arrays(size)
        for operation in OPERATIONS:
            if asked(f"{operation.name}, {size} x {size}"):
                sides.operation(operation, given, options.rounds, goal)
    for name, program in PROGRAMS.items():
        if asked(name):
            calls = dict(zip(("penstock", "torch"), program(device, sides.place), strict=False))
            sides.compare(name, calls, 1.5 if "MLP" in name and sides.gpu else 0.8, options.rounds)
    if asked("chain"):
        chain_line(device, report)
    if options.save:
        versions = {peer.__name__: peer.__version__ for peer in (np, torch, cupy) if peer is not None}
        given_options = f" --device {device.name} --cpu-time" if options.cpu_time else ""
        report.save(options.save, "eager", device, versions, given_options)


if __name__ == "__main__":
    main()
