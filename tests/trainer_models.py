"""Runs of `ps.Trainer` for the tests: `python trainer_models.py NAME FOLDER DEVICE` trains in a process.

It prints a line for each step, so that whoever reads them can end the process at any of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock import Tensor, nn, optim
from penstock.measuring import ceilings
from penstock.nn import functional as F  # noqa: N812
from penstock.train import Callback, Metrics, NoView

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from pictures import draw
from resnet import resnet


class Writer(nn.Module):
    """An LSTM over letters, with dropout."""

    def __init__(self, letters: int = 8, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, letters)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.lstm(self.embedding(ids))[0]))


class Pair(nn.Module):
    """Two networks with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.decode = nn.Linear(6, 2), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).astype(ps.float32).mean()


def resnet_run(folder: Path, **changed: Any) -> ps.Trainer:
    """Batches of a shuffled loader, the last of an epoch shorter; a scheduler; evaluations with a metric."""
    images, labels = draw(44, np.random.default_rng(1))
    train, test = ps.data.Arrays(images[:28], labels[:28]), ps.data.Arrays(images[28:], labels[28:])
    model = resnet(4, 10)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, clip_norm=1.0)
    given = {
        "loss": F.cross_entropy,
        "data": ps.data.Loader(train, batch=8, shuffle=True, seed=3),
        "evaluation": ps.data.Loader(test, batch=12),
        "metrics": {"accuracy": accuracy},
        "scheduler": optim.lr_scheduler.StepLR(optimizer, 2, 0.9),
        "schedule_every": "epoch",
        "epochs": 3,
        "checkpoint_every": 3,
    }
    return ps.Trainer(model, optimizer=optimizer, folder=folder, **{"view": NoView(), **given, **changed})


def lstm_run(folder: Path, **changed: Any) -> ps.Trainer:
    """A list of batches of tokens, gradients of two at a time, dropout, and a scheduler for every step."""
    letters = np.random.default_rng(2).integers(0, 8, (22, 7)) // 2
    batches = [letters[at : at + 4] for at in range(0, 22, 4)]
    model = Writer()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    given = {
        "loss": None,
        "data": batches,
        "evaluation": batches[:2],
        "scheduler": optim.lr_scheduler.CosineAnnealingLR(optimizer, 12),
        "accumulate": 2,
        "steps": 11,
        "checkpoint_every": 2,
        "evaluate_every": 4,
    }
    trainer = ps.Trainer(model, optimizer=optimizer, folder=folder, **{"view": NoView(), **given, **changed})

    @trainer.batch_loss
    def loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return trainer


class Points:
    """An iterable dataset: the same items in each epoch."""

    def __iter__(self) -> Any:
        return iter(np.random.default_rng(4).normal(size=(18, 6)).astype(np.float32))


def own_run(folder: Path, **changed: Any) -> ps.Trainer:
    """A step of one's own with two optimizers, noise, and several values; a dataset that is iterated."""
    model = Pair()
    optimizers = [
        optim.SGD(model.code.parameters(), lr=0.05, momentum=0.9),
        optim.Adam(model.decode.parameters(), lr=0.01),
    ]
    given = {"data": ps.data.Loader(Points(), batch=5), "epochs": 3, "checkpoint_every": 2}
    trainer = ps.Trainer(model, None, optimizers, folder=folder, **{"view": NoView(), **given, **changed})

    @trainer.train_step
    def step(points: Tensor) -> dict[str, Tensor]:
        codes = model.code(points)
        loss = F.mse_loss(model.decode(codes + 0.1 * ps.randn(codes.shape)), points)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return {"loss": loss, "size": (codes * codes).mean()}

    return trainer


RUNS = {"resnet": resnet_run, "lstm": lstm_run, "own": own_run}


def make(name: str, folder: Path, **changed: Any) -> ps.Trainer:
    ps.random.manual_seed(5)
    return RUNS[name](folder, **changed)


class Tell(Callback):
    """Prints each step, and each checkpoint."""

    def on_step(self, trainer: ps.Trainer, metrics: Metrics) -> None:
        print("step", metrics.step, flush=True)

    def on_checkpoint(self, trainer: ps.Trainer, path: Path) -> None:
        print("saved", trainer.step, flush=True)


if __name__ == "__main__":
    ceilings._measured = lambda *_: 1e11  # which takes its time
    ps.use(sys.argv[3])
    assert make(sys.argv[1], Path(sys.argv[2]), callbacks=[Tell()]).fit()
    print("done", flush=True)
