"""Digits by `ps.Trainer`: kill it, or stop it with Ctrl-C, and start it again: the same bits."""

from pathlib import Path

import numpy as np
from pictures import digits

import penstock as ps
from penstock import Tensor, nn, optim
from penstock.nn import functional as F  # noqa: N812
from penstock.train import EarlyStopping


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).astype(ps.float32).mean()


def main(folder: str | Path = "runs/digits", epochs: int = 30) -> float:
    ps.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 4 * 4, 10),
    )
    images, labels = digits()
    labels = labels.astype(np.int64)
    train, test = ps.data.Arrays(images[:-360], labels[:-360]), ps.data.Arrays(images[-360:], labels[-360:])
    trainer = ps.Trainer(
        model,
        loss=F.cross_entropy,
        optimizer=optim.AdamW(model.parameters(), lr=3e-3, clip_norm=1.0),
        data=ps.data.Loader(train, batch=64, shuffle=True, drop_last=True),
        evaluation=ps.data.Loader(test, batch=120),
        metrics={"accuracy": accuracy},
        early_stopping=EarlyStopping("validation_accuracy", patience=5, mode="max"),
        folder=folder,
        epochs=epochs,
        memory="1GiB",
    )
    if not trainer.fit():
        return float("nan")  # Ctrl-C: the next start goes on
    step = trainer.load_best()
    right = trainer.evaluate()["accuracy"]
    print(f"{right:.1%} of new digits right, by the weights of step {step}; see {folder}/report.html")
    return right


if __name__ == "__main__":
    main()
