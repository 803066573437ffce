"""Programs that tests start as several ranks. Rank 0 prints a line of JSON."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.measuring import ceilings
from penstock.train import NoView
from penstock.train.callbacks import Callback


def digest(model: ps.nn.Module, optimizer: ps.distributed.DataParallel) -> str:
    from hashlib import blake2b

    with optimizer.gathered():
        arrays = [parameter.astype(ps.float32).numpy() for parameter in model.parameters()]
    return blake2b(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def mlp(options: dict[str, Any]) -> dict[str, Any]:
    """Losses and weights of a network with dropout, whose batches of 20 samples do not divide evenly."""
    ps.random.manual_seed(3)
    model = ps.nn.Sequential(ps.nn.Linear(6, 16), ps.nn.GELU(), ps.nn.Dropout(0.2), ps.nn.Linear(16, 3))
    optimizer = ps.distributed.DataParallel(
        ps.optim.AdamW(model.parameters(), lr=1e-2, clip_norm=1.0), bucket=256, **options
    )

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = ps.nn.functional.cross_entropy(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    rng = np.random.default_rng(0)
    losses = []
    for _ in range(4):
        x = ps.asarray(rng.standard_normal((20, 6)).astype(np.float32))
        losses.append(optimizer.train(step, x, ps.asarray(rng.integers(0, 3, 20))).wait())
    return {"losses": losses, "weights": digest(model, optimizer)}


def gpt(options: dict[str, Any]) -> dict[str, Any]:
    """The same of a GPT, in float32 or narrower."""
    ps.random.manual_seed(3)
    model = ps.nn.GPT(64, 16, 32, 1, 2, 0.1)
    model.to(getattr(ps, options.pop("precision", "float32")))
    optimizer = ps.distributed.DataParallel(
        ps.optim.AdamW(model.parameters(), lr=1e-2, clip_norm=1.0), bucket=20_000, shards=4, **options
    )

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.backward(loss)
        optimizer.step()
        return loss

    rng = np.random.default_rng(0)
    batches = [ps.asarray(rng.integers(0, 64, (8, 17))) for _ in range(3)]
    losses = [optimizer.train(step, batch).wait() for batch in batches]
    return {"losses": losses, "weights": digest(model, optimizer), "hidden": _hidden(step)}


def _hidden(step: Any) -> bool:
    """Whether an exchange starts before the last product, and the first wait comes after it."""
    from penstock.tensor.jit import schedules

    for schedule in schedules(step):
        names = [[node.primitive for node in group.group.nodes] for group in schedule.groups]
        starts = [at for at, group in enumerate(names) if group[0].collective == "start"]
        waits = [at for at, group in enumerate(names) if group[0].collective == "wait"]
        products = [at for at, group in enumerate(names) if any(each.multiplies_matrices for each in group)]
        if starts:
            return starts[0] < products[-1] < waits[0]
    return False


class KillAt(Callback):
    """Kills the last rank at a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, trainer: Any, metrics: Any) -> None:
        last = ps.distributed.rank() == ps.distributed.size() - 1
        if metrics.step == self._step and last:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_while_writing(rank: int, call: int, later: float) -> None:
    """Kill a rank at a call that opens, renames or removes a file of a checkpoint, or a little later."""
    calls = itertools.count(1)

    def kill() -> None:
        time.sleep(later)
        os.kill(os.getpid(), signal.SIGKILL)

    def look(event: str, given: tuple[Any, ...]) -> None:
        names = event in ("open", "os.rename", "os.remove")
        if names and "checkpoints" in str(given[0]) and next(calls) == call:
            threading.Thread(target=kill).start() if later else kill()

    if ps.distributed.rank() == rank:
        sys.addaudithook(look)


def trainer(options: dict[str, Any]) -> dict[str, Any]:
    """A run of the trainer in a folder, which may be killed at a step."""
    ceilings._measured = lambda *_: 1e11  # which takes its time
    ps.random.manual_seed(5)
    norm = [ps.nn.BatchNorm1d(8)] if options.pop("norm", False) else []
    model = ps.nn.Sequential(ps.nn.Linear(4, 8), *norm, ps.nn.Dropout(0.1), ps.nn.Linear(8, 2))
    rng = np.random.default_rng(1)
    samples = rng.standard_normal((48, 4)).astype(np.float32), rng.integers(0, 2, 48)
    loader = ps.data.Loader(list(zip(*samples, strict=True)), batch=8, shuffle=True, seed=2)
    killed, own = options.pop("killed", 0), options.pop("own", False)
    parallel = options.pop("parallel", {})
    if "writing" in options:
        kill_while_writing(**options.pop("writing"))
    optimizer = ps.distributed.DataParallel(
        ps.optim.AdamW(model.parameters(), lr=1e-2, clip_norm=1.0), shards=4, **parallel
    )
    run = ps.Trainer(
        model,
        ps.nn.functional.cross_entropy,
        optimizer,
        loader,
        evaluation=[(samples[0][at : at + 7], samples[1][at : at + 7]) for at in (0, 7, 14)],
        view=NoView(),
        callbacks=[KillAt(killed)] if killed else [],
        **options,
    )
    if own:

        @run.train_step
        def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
            loss = ps.nn.functional.cross_entropy(model(x), y)
            optimizer.backward(loss)
            optimizer.step()
            return loss

    run.fit()
    lines = (Path(options["folder"]) / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    return {
        "losses": [line["loss"] for line in metrics],
        "validation": [line["validation_loss"] for line in metrics if "validation_loss" in line],
        "weights": digest(model, optimizer),
        "buffers": {name: tensor.tolist() for name, tensor in model.named_buffers()},
    }


def raises(options: dict[str, Any]) -> dict[str, Any]:
    """The last rank fails while the others wait for it."""
    if ps.distributed.rank() == ps.distributed.size() - 1:
        raise ValueError("this rank has no data")
    ps.distributed.barrier()
    return {}


def hangs(options: dict[str, Any]) -> dict[str, Any]:
    """The last rank does not come."""
    if ps.distributed.rank() == ps.distributed.size() - 1:
        time.sleep(60)
    ps.distributed.barrier()
    return {}


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    ps.distributed.init(timeout=given.pop("timeout", 50.0))
    ps.use(given.pop("device"))
    results = globals()[sys.argv[1]](given)
    if ps.distributed.rank() == 0:
        print(json.dumps(results | {"sent_bytes": ps.distributed.traffic().sent_bytes}))
