"""What a user adds to a run: callbacks, and the metric by which it ends early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import SettingError
from penstock.train.metrics import Metrics

if TYPE_CHECKING:
    from penstock.train.trainer import Trainer


class Callback:
    """The base of callbacks: a run calls these methods, of which each does nothing by itself.

    `trainer.stop()` in any of them ends the run with a checkpoint. A callback that changes what is trained
    does that in `on_evaluation` or `on_epoch`: all steps are done then, in a resumed run too. What has to
    survive the process is given by `state_dict`.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Training starts, or goes on; a checkpoint has been loaded if there is one."""

    def on_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """The metrics of a step are known. The device may be computing the next step already."""

    def on_evaluation(self, trainer: Trainer, metrics: Metrics) -> None:
        """The model was evaluated; `metrics` are those of the last step, with the evaluation's."""

    def on_epoch(self, trainer: Trainer, epoch: int) -> None:
        """An epoch has ended; the first is 1."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """A checkpoint was written."""

    def on_end(self, trainer: Trainer) -> None:
        """Training has ended, in any way but an exception."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: values that JSON can hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run after `patience` evaluations without a new best of a metric, and keeps the best checkpoint.

    The metrics of evaluations begin with "validation_". `mode` is "min" if lower is better, or "max".
    """

    metric: str = "validation_loss"
    patience: int = 3
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.patience < 1 or self.mode not in ("min", "max"):
            raise SettingError(
                f"patience is 1 or more and mode min or max; {self.patience!r} and {self.mode!r} were given"
            )

    def score(self, metrics: Metrics) -> float:
        """The metric, as a value of which lower is better."""
        values = metrics.named()
        if self.metric not in values:
            known = ", ".join(name for name in values if name.startswith("validation_"))
            raise SettingError(
                f"early stopping is by {self.metric!r}, which evaluations do not have; they have {known}"
            )
        return float(values[self.metric]) * (1 if self.mode == "min" else -1)


class Best:
    """The best evaluation of a run so far, by its score, and how many came since."""

    def __init__(self) -> None:
        self.score = math.inf
        self.since = 0

    def add(self, score: float) -> bool:
        """Add an evaluation; whether it is the best."""
        if score < self.score:
            self.score, self.since = score, 0
            return True
        self.since += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain numbers."""
        return {"score": self.score, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.score, self.since = float(state["score"]), int(state["since"])
