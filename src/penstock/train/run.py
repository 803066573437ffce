"""A run in its folder: what a trainer keeps there, and what it goes on from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.data.files import written_whole
from penstock.errors import CheckpointError, PenstockError, SettingError
from penstock.formatting import format_bytes
from penstock.nn.state import read
from penstock.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from penstock.optim.optimizer import LEAST_SCALE, Optimizer
from penstock.report import Findings, findings
from penstock.train import checkpoint as checkpoints
from penstock.train.callbacks import Best, Callback
from penstock.train.checkpoint import Arrays, Checkpoint
from penstock.train.config import Config
from penstock.train.feed import Feed
from penstock.train.folder import RunFolder
from penstock.train.metrics import FILE as METRICS_FILE
from penstock.train.metrics import MetricsLog, read_curves
from penstock.train.ranks import Ranks
from penstock.train.report import CONFIG_FILE, read_findings, read_sample, write_report, write_sample
from penstock.train.report import FILE as REPORT_FILE
from penstock.train.saving import check_shared, save_together
from penstock.train.settings import RunSettings
from penstock.train.view import NoView, View


class TrainingError(PenstockError, RuntimeError):
    """Training cannot continue: its loss is not finite."""


class Run:
    """The state of a training, and the folder that it is saved to. `step` is how many steps are done."""

    _held: RunFolder | None = None
    _is_first = False  # whether the folder had no run before
    _opened = False  # whether a checkpoint, if there is one, has been loaded
    _log: MetricsLog
    _fits = "program"  # what a checkpoint may not fit, and what to do then
    _otherwise = ". Another model, optimizer or dataset needs another folder"
    _own_files: tuple[str, ...] = ()  # of the folder, besides those that every run has

    def __init__(
        self,
        model: ps.nn.Module,
        optimizers: Sequence[Optimizer],
        data: Any,
        folder: Path,
        view: View,
        scheduler: LRScheduler | ReduceLROnPlateau | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if not model.parameters() or not optimizers:
            raise SettingError(f"{type(model).__name__} has no parameters to train, or there is no optimizer")
        self.model, self.folder = model, folder
        self.optimizers = list(optimizers)
        self.step = 0
        self._device = model.parameters()[0].device
        self._ranks = Ranks(model, self.optimizers)
        self._view = view if self._ranks.writes else NoView()
        self._feed = Feed(data, self._device, self._ranks.split)
        self._scheduler, self._callbacks = scheduler, list(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise SettingError(
                    f"a callback is a ps.train.Callback, and {type(callback).__name__} was given"
                )
        self._stateful = [
            callback for callback in self._callbacks if type(callback).state_dict is not Callback.state_dict
        ]
        self._best = Best()
        self._seconds = 0.0
        self._saved = 0  # the step of the last checkpoint
        self._findings: Findings | None = None

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return self._feed.epoch

    @property
    def best_checkpoint(self) -> Path | None:
        """The file of the best checkpoint; None if there was no evaluation."""
        return checkpoints.best_of(self.folder)

    def whole(self) -> AbstractContextManager[None]:
        """A block, which all ranks enter, in which the model's parameters are whole on their device."""
        return self._ranks.whole()

    def load_best(self) -> int:
        """Load the weights of the best checkpoint into the model; the step that it is of."""
        path = self.best_checkpoint
        if path is None:
            raise CheckpointError(f"{self.folder} has no checkpoint with an evaluation")
        best = checkpoints.load(path)
        with self._ranks.whole("host"):
            self._load_model_state(best.model)
        self._opened = False  # another `fit` goes on from the last checkpoint
        return best.step

    def _settings(self) -> Config | RunSettings:
        """The settings, which the folder shows."""
        raise NotImplementedError

    def _model_name(self) -> str:
        return f"a model {type(self.model).__name__}"

    def _call(self, event: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self, *args)

    def report(self, sample: str = "") -> bool:
        """Write `report.html`, with the last sample of text if there is one; whether it succeeded.

        If the report cannot be written, a note says why, and the run goes on.
        """
        if not self._ranks.writes:
            return False
        try:
            with self._ranks.group.patient():
                if sample:
                    write_sample(self.folder, sample)
                text = sample or read_sample(self.folder)
                write_report(self.folder, self._settings(), self._log.curves, self._findings, text)
        except Exception as error:  # a run is worth more than its report
            self._view.note(f"there is no new report: {error}")
            return False
        return True

    # Checkpoints

    def _save(self, validation: float | None, score: float | None = None) -> None:
        scales = (optimizer._numbers["scale"] for optimizer in self.optimizers if optimizer._numbers)
        if any(float(scale) <= LEAST_SCALE for scale in scales):
            self._view.note(
                f"at step {self.step} the gradients overflow float16 even though the loss is not scaled any "
                "more; such steps change nothing. Use bfloat16 or float32, or a lower learning_rate"
            )
        tensors = self._model_tensors()
        pieces = self._ranks.pieces(tensors)
        model: Arrays = {}
        if pieces is None:
            with self._ranks.whole("host"):
                model = read(tensors)
        for name, array in model.items():
            self._check_array(f"model.{name}", array)
        states = [optimizer.state_dict() for optimizer in self.optimizers] if pieces is None else []
        checkpoint = Checkpoint(
            step=self.step,
            config=self._settings(),
            model=model,
            optimizer=_joined(states) if pieces is None else self._ranks.common_state(),
            generator=ps.random.state(),
            seconds=self._seconds,
            validation_loss=validation,
            **self._state(score),
        )
        if pieces is None:
            checkpoints.save(self.folder, checkpoint)
        else:
            save_together(self.folder, checkpoint, pieces, self._ranks.group, self._check_array)
        self._saved = self.step
        self._call("on_checkpoint", checkpoints.path_of(self.folder, self.step))

    def _check_array(self, name: str, array: npt.NDArray[Any]) -> None:
        if name.startswith("model.") and array.size and array.dtype.kind not in "biu":
            largest = float(np.abs(array.astype(np.float32)).max())
            self._check(largest, f"largest of {name.removeprefix('model.')}", self.step)

    def _check(self, value: float, what: str, step: int) -> None:
        if math.isfinite(value):
            return
        kept = checkpoints.checkpoint_files(self.folder)
        there = f"The last good checkpoint is {kept[-1]}" if kept else "There is no checkpoint yet"
        raise TrainingError(f"the {what} is {value} at step {step}. {there}. {self._advice(bool(kept))}")

    def _advice(self, resumes: bool) -> str:
        """What to do about values that are not finite."""
        again = "fit() of another process goes on from it" if resumes else "fit() starts again"
        return (
            f"A lower learning rate (now {self.optimizers[0].lr}), a warmup, or clip_norm of the optimizer "
            f"mostly helps; {again}"
        )

    # The folder

    def _hold(self) -> None:
        """Lock the folder, and load its last checkpoint if that was not done yet."""
        if self._held is None and self._ranks.writes:
            self._held = RunFolder(self.folder)
        if self._opened:
            return
        try:
            resumed = None
            if checkpoints.checkpoint_files(self.folder):
                resumed, problems = checkpoints.load_last(self.folder)
                for problem in problems:
                    self._view.note(problem)
                if isinstance(resumed.config, Config):
                    raise CheckpointError(f"{self.folder} is a run of `penstock train`; take another folder")
            self._open(resumed)
        except BaseException:
            self._let_go()
            raise

    def _open(self, resumed: Checkpoint | None) -> None:
        """Begin with a locked folder, from a checkpoint if there is one."""
        if resumed:
            self._restore(resumed)
        self._ranks.group.barrier()  # all have read what rank 0 may replace
        check_shared(self.folder, self._ranks.group)
        self._is_first = not (self.folder / CONFIG_FILE).exists()
        if self._ranks.writes:
            self._write_settings()
        self._log = MetricsLog(self.folder if self._ranks.writes else None, self.step)
        try:
            self._findings = read_findings(self.folder)
        except PenstockError as error:
            self._view.note(f"{error}; the report goes without it")
            self._findings = None
        self._saved = self.step
        self._opened = True

    def _restore(self, resumed: Checkpoint) -> None:
        """Resume from a checkpoint; from an earlier one, with a note, if a part of it is missing."""
        problems: list[str] = []
        for checkpoint in itertools.chain([resumed], checkpoints.older(self.folder, resumed.step)):
            try:
                self._load(checkpoint)
            except (KeyError, ValueError, TypeError) as error:
                which = f"the checkpoint of step {checkpoint.step} in {self.folder}"
                problems.append(f"{which} does not fit the {self._fits}: {_said(error)}")
                continue
            for problem in problems:
                self._view.note(f"{problem}; the checkpoint of step {self.step} is used")
            return
        raise CheckpointError(problems[0] + self._otherwise)

    def _load(self, checkpoint: Checkpoint) -> None:
        with self._ranks.whole("host"):
            self._load_model_state(checkpoint.model)
            states = _parted(checkpoint.optimizer, len(self.optimizers))
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        self._load_state(checkpoint)
        ps.random.set_state(checkpoint.generator)
        self.step, self._seconds = checkpoint.step, checkpoint.seconds

    def _model_tensors(self) -> dict[str, ps.Tensor]:
        """What a checkpoint has of the model."""
        return self.model.saved_tensors()

    def _load_model_state(self, state: Arrays) -> None:
        self.model.load_state_dict(state)

    def _state(self, score: float | None) -> dict[str, Any]:
        """What a checkpoint has besides arrays, by the names of its fields."""
        data = self._feed.state()
        more = {
            "data": data,
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
            "best": self._best.state_dict(),
            "callbacks": [callback.state_dict() for callback in self._stateful],
            "score": score,
        }
        return {"position": data["batches"], "text": "", "more": more}

    def _load_state(self, checkpoint: Checkpoint) -> None:
        """Restore what `_state` gave."""
        more = checkpoint.more
        if (more["scheduler"] is None) != (self._scheduler is None):
            raise ValueError("only one of them has a scheduler")
        if len(more["callbacks"]) != len(self._stateful):
            raise ValueError(
                f"it has the state of {len(more['callbacks'])} callbacks, and {len(self._stateful)} have one"
            )
        self._feed.load_state(more["data"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(more["scheduler"])
        self._best.load_state_dict(more["best"])
        for callback, state in zip(self._stateful, more["callbacks"], strict=True):
            callback.load_state_dict(state)

    def _let_go(self) -> None:
        """Unlock the folder. If no step was done in it, nothing of this run is left there."""
        if self._held is None:
            return
        if self._opened:
            self._log.close()
        if self._is_first and not checkpoints.checkpoint_files(self.folder) and not read_curves(self.folder):
            self._held.remove_files([CONFIG_FILE, METRICS_FILE, REPORT_FILE, findings.FILE, *self._own_files])
        elif not (self.folder / CONFIG_FILE).exists():
            self._held.remove_files([])
        self._held.release()
        self._held = None

    def _write_settings(self) -> None:
        with written_whole(self.folder / CONFIG_FILE) as file:
            file.write(self._settings().toml().encode())
        size = sum(tensor.size for tensor in self.model.parameters())
        trained = sum(tensor.size for tensor in self.model.parameters() if tensor.requires_grad)
        part = "" if trained == size else f", of which {trained:,} are trained,"
        dtype = self.model.parameters()[0].dtype
        where = f"{self._device.name} ({self._device.capabilities.description})"
        limit = self._device.limit_bytes
        within = "" if limit is None else f", within {format_bytes(limit)}"
        self._view.note(f"{self._model_name()} of {size:,} parameters{part} in {dtype} on {where}{within}")
        self._view.note(f"run: {self.folder}")


def _joined(states: Sequence[Arrays]) -> Arrays:
    """The states of optimizers as a single one, which has their numbers if there are several."""
    if len(states) == 1:
        return states[0]
    return {f"{at}.{name}": array for at, state in enumerate(states) for name, array in state.items()}


def _parted(state: Arrays, count: int) -> list[Arrays]:
    """The states that were joined."""
    if count == 1:
        return [state]
    parts: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(count)]
    for name, array in state.items():
        number, _, rest = name.partition(".")
        if not number.isdecimal() or int(number) >= count:
            raise ValueError(f"the state of another number of optimizers than {count}")
        parts[int(number)][rest] = array
    return [*parts]


def _said(error: Exception) -> str:
    """The message of an error; that of a KeyError has quotes around it."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
