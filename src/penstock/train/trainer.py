"""The training loop of a run: steps, evaluations, checkpoints, metrics, callbacks and the report."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console

import penstock as ps
from penstock.config import parse_bytes
from penstock.data import DataError
from penstock.errors import SettingError
from penstock.formatting import format_bytes
from penstock.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from penstock.optim.optimizer import Optimizer
from penstock.profiling.profiles import Profile
from penstock.report import findings
from penstock.train import checkpoint as checkpoints
from penstock.train import stepping
from penstock.train.callbacks import Callback, EarlyStopping
from penstock.train.config import Config
from penstock.train.feed import Feed, closed_after, state_of, uploaded
from penstock.train.interrupting import interruptible
from penstock.train.metrics import NAMES, Metrics
from penstock.train.ranks import Pending
from penstock.train.run import Run
from penstock.train.settings import SECTION, RunSettings
from penstock.train.view import View, open_view
from penstock.train.window import Window, planned_step

F = TypeVar("F", bound=Callable[..., Any])
_EVALUATED = "validation_"  # before the names of an evaluation's metrics
_UNKNOWN_STEPS = 1 << 30
_REPORTING = 20  # times as long as a report took: at least so much training before the next


class Trainer(Run):
    """Trains a model, in a folder that has all of the run, and from which it is resumed to the same bits.

    `fit` runs until all epochs or steps are done; another `fit`, also of another process after a kill, goes
    on from the last checkpoint. `step` is how many steps are done, and `epoch` how many epochs.

    >>> import tempfile
    >>> model = ps.nn.Linear(2, 1)
    >>> trainer = ps.Trainer(
    ...     model,
    ...     loss=ps.nn.functional.mse_loss,
    ...     optimizer=ps.optim.SGD(model.parameters(), lr=0.1),
    ...     data=[(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))],  # a batch of 4 samples
    ...     folder=tempfile.mkdtemp(),
    ...     epochs=3,
    ...     view=ps.train.NoView(),
    ... )
    >>> trainer.fit(), trainer.step
    (True, 3)
    """

    _has_epochs = True
    _goes_on = "more epochs or steps go on"

    def __init__(
        self,
        model: ps.nn.Module,
        loss: stepping.Loss | None,
        optimizer: Optimizer | Sequence[Optimizer],
        data: Iterable[Any],
        *,
        folder: str | os.PathLike[str],
        epochs: int | None = None,
        steps: int | None = None,
        evaluation: Iterable[Any] | None = None,
        metrics: Mapping[str, stepping.Loss] | None = None,
        scheduler: LRScheduler | ReduceLROnPlateau | None = None,
        schedule_every: Literal["step", "epoch"] = "step",
        accumulate: int = 1,
        memory: int | str | None = None,
        evaluate_every: int | None = None,
        checkpoint_every: int | None = None,
        early_stopping: EarlyStopping | None = None,
        callbacks: Sequence[Callback] = (),
        view: View | None = None,
    ) -> None:
        """`loss` is a function of the model's outputs and the targets; so are `metrics`, by name.

        `data` gives a batch at a time, and an epoch in a loop: a `ps.data.Loader`, a list, or anything else
        that can be iterated. A batch is a tuple of the model's inputs and, last, the targets; for others, or
        with loss=None, see `batch_loss` and `train_step`. `evaluation` is the same for evaluations.

        Either `epochs` or `steps` say how long it trains; a step takes `accumulate` batches, whose gradients
        are those of all of their samples together. The `scheduler` advances after every step or epoch;
        ReduceLROnPlateau, after every evaluation. `memory`, such as "1GiB", is the budget of the devices.
        Evaluations come after `evaluate_every` steps, or else after each epoch, and checkpoints after
        `checkpoint_every` steps, or else after each evaluation. Of the checkpoints, the last three are kept,
        and the best: that of the lowest validation loss, or by the metric of `early_stopping`. The `view` is
        the terminal, unless another is given, such as `ps.train.NoView()`.
        """
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        view = view if view is not None else open_view(Console())
        super().__init__(model, optimizers, data, Path(folder), view, scheduler, callbacks)
        self.stopped_by: signal.Signals | None = None  # the signal that ended `fit` early
        self._epochs, self._steps, self._accumulate = epochs, steps, accumulate
        self._evaluate_every, self._checkpoint_every = evaluate_every, checkpoint_every
        self._memory = None if memory is None else parse_bytes(memory)
        self._schedule_every, self._early_stopping = schedule_every, early_stopping
        self._evaluation: Any = evaluation
        self._evaluation_state = state_of(evaluation)
        self._metrics = dict(metrics or {})
        self._loss_name = "" if loss is None else _name(loss)
        self._values_of: stepping.Step | None = None
        self._train_step: Callable[..., dict[str, ps.Tensor]] | None = None
        self._has_own_step = False
        self._evaluate_batch: Callable[[Any], dict[str, ps.Tensor]] | None = None
        if loss is not None:
            self.batch_loss(stepping.batch_values(model, loss, self._metrics))
        self._pending: deque[tuple[int, int, float, int, Pending]] = deque()  # with their samples
        self._ends = False
        self._reopens = False  # whether another `fit` loads the last checkpoint
        self._next_report = 0.0  # when it may be written again during training
        self._check_settings()

    def _check_settings(self) -> None:
        if (self._epochs is None) == (self._steps is None):
            raise SettingError("a run has epochs or steps: give just one of them")
        counts = {
            "epochs": self._epochs,
            "steps": self._steps,
            "accumulate": self._accumulate,
            "evaluate_every": self._evaluate_every,
            "checkpoint_every": self._checkpoint_every,
        }
        for name, count in counts.items():
            if count is not None and (isinstance(count, bool) or not isinstance(count, Integral)):
                raise SettingError(f"{name} is an integer, and {count!r} was given")
            if count is not None and count < 1:
                raise SettingError(f"{name} is 1 or more, and {count} was given")
        if self._schedule_every not in ("step", "epoch"):
            raise SettingError(f"schedule_every is step or epoch, and {self._schedule_every!r} was given")
        if self._metrics and not self._loss_name:
            raise SettingError("`metrics` go with `loss`; @trainer.batch_loss returns its own in a dict")
        self._check_names(self._metrics)
        stopping = self._early_stopping
        if stopping and self._evaluation is None and stopping.metric.startswith(_EVALUATED):
            raise SettingError(f"early stopping by {stopping.metric!r} needs `evaluation`, the data for it")

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name in NAMES or name.startswith(_EVALUATED):
                raise SettingError(f"a metric cannot have the name {name!r}, which the run uses itself")

    # What a user defines

    def batch_loss(self, function: F) -> F:
        """A decorator: the loss of a batch, for batches that are not a pair of inputs and targets.

        The function takes the parts of a batch, and returns the loss, or a dict with "loss" and metrics. It
        is called in training and in evaluations, as a part of a jitted function.
        """
        self._values_of = function
        self._evaluate_batch = stepping.evaluation_step(function)
        if len(self.optimizers) == 1 and not self._has_own_step:
            self._train_step = stepping.training_step(function, self.optimizers[0])
        return function

    def train_step(self, function: F) -> F:
        """A decorator: a whole step of one's own, with gradients and updates by any number of optimizers.

        The function takes the parts of a batch, and returns the loss, or a dict with "loss" and metrics. It
        is jitted. Evaluations use `loss` or `batch_loss`. Checkpoints have what belongs to the model, to the
        optimizers and to callbacks, and nothing else that the function may use.
        """
        if self._accumulate != 1:
            raise SettingError("a step of one's own trains on a single batch: use it with accumulate=1")
        self._train_step, self._has_own_step = stepping.own_step(function), True
        return function

    def stop(self) -> None:
        """End `fit` after this step, with a checkpoint; for callbacks."""
        self._ends = True

    # Training

    def fit(self) -> bool:
        """Train until all epochs or steps are done, or it ends early; whether nothing is left to do.

        Ctrl-C and SIGTERM end it after the step, with a checkpoint; then it is False, and `stopped_by` is the
        signal. A checkpoint that does not fit model, optimizer or data raises a CheckpointError.
        """
        self._check_functions()
        with ExitStack() as budget:
            if not self._ranks.chooses:
                self._enter_budget(budget)
            self._hold()
            try:
                if not self.model.training:
                    self.model.train()
                self._ends, self.stopped_by, self._reopens = False, None, False
                self._ranks.begin()
                if self._ranks.chooses:
                    self._choose()
                    self._enter_budget(budget)
                self._call("on_start")
                total = self._total_steps()
                if self._is_done():
                    self._view.note(self._how_done())
                self._view.start(self.step, total, self._seconds)
                left = _UNKNOWN_STEPS if total is None else total - self.step
                with interruptible(self._view) as received, Window(self._device, left) as window:
                    self._run(received, window)
                    self.stopped_by = self._ranks.stopped_by(received())
                self._call("on_end")
            except BaseException:
                self._reopens = bool(checkpoints.checkpoint_files(self.folder))
                if self._reopens:
                    self._pending.clear()
                raise
            finally:
                self._view.stop()
                self._feed.close()
                if self._log.curves:
                    self.report()
                self._let_go()
                self._opened = not self._reopens
        return self._is_done()

    def _enter_budget(self, budget: ExitStack) -> None:
        if self._memory is not None:
            budget.enter_context(ps.memory.budget(self._memory))

    def _choose(self) -> None:
        """Let the first batch choose how ranks divide what they keep; until then, all of it is whole."""
        assert self._train_step is not None
        with self._ranks.group.patient():
            self._ranks.choose(
                self._train_step, self._accumulate, self._has_own_step, self._memory, self._view.note
            )
            if not self._is_done():
                self._feed.read()

    def _check_functions(self) -> None:
        if self._train_step is None and self._values_of is None:
            raise SettingError("there is no loss: give `loss`, or define it with @trainer.batch_loss")
        if self._train_step is None:
            raise SettingError(
                "several optimizers need a step of one's own: define it with @trainer.train_step"
            )
        if self._evaluation is not None and self._evaluate_batch is None:
            raise SettingError("evaluations need a loss: give `loss`, or define it with @trainer.batch_loss")

    def _run(self, received: Callable[[], signal.Signals | None], window: Window) -> None:
        self._start_clock()
        while not (self._is_done() or self._ranks.stops(self.step, received() or self._ends)):
            if window.due:
                self._record_all()
                window.begin()
            self._ranks.wish = received() or self._ends
            self._advance(self._feed)
            ended = self._feed.at_start()  # the epoch
            evaluates = self._evaluates(ended)
            saves = self._saves(evaluates)
            profiled = window.after_step(last=evaluates or saves or ended or received() is not None)
            if profiled:
                self._keep_profile(*profiled)
            if evaluates or saves or ended:
                self._pause(evaluates, saves, ended)
                self._start_clock()
            elif profiled:
                self._record_all()
            # All losses except the last, since the device is still computing that step.
            for metrics in self._finished(leave=1):
                self._record(metrics)
        if self.step > self._saved:
            self._record_all()
            self._save(None)

    def _is_done(self) -> bool:
        stopping = self._early_stopping
        if stopping and self._best.since >= stopping.patience:
            return True
        if self._steps is not None:
            return self.step >= self._steps
        return self._epochs is not None and self.epoch >= self._epochs

    def _how_done(self) -> str:
        """Why nothing is left to do, and what would go on."""
        if self._early_stopping and self._best.since >= self._early_stopping.patience:
            return f"the run has ended at step {self.step}, by its {self._early_stopping.metric}"
        return f"all {self.step} steps are done; {self._goes_on}"

    def _total_steps(self) -> int | None:
        """How many steps the whole run has, if that is known."""
        if self._steps is not None or self._epochs is None:
            return self._steps
        batches = self._feed.batches_in_epoch()
        return None if batches is None else self._epochs * -(-batches // self._accumulate)

    def _evaluates(self, epoch_ended: bool) -> bool:
        every = self._evaluate_every
        return (self.step % every == 0 if every else epoch_ended) or self._is_done()

    def _saves(self, evaluates: bool) -> bool:
        """Whether a checkpoint follows this step."""
        every = self._checkpoint_every
        return self.step % every == 0 or self._is_done() if every else evaluates

    # A step

    def _advance(self, feed: Feed) -> None:
        """Submit a step. Its losses are read later."""
        assert self._train_step is not None
        epoch = feed.epoch + 1
        batches = feed.take(self._accumulate)
        self._before_step()
        rate = self.optimizers[0].lr
        values = self._ranks.train(self._train_step, batches, own=self._has_own_step)
        self.step += 1
        if isinstance(self._scheduler, LRScheduler) and self._schedule_every == "step":
            self._scheduler.step()
        self._pending.append((self.step, epoch, rate, sum(batch.size for batch in batches), values))
        del batches
        feed.look_ahead()

    def _before_step(self) -> None:
        """For trainers with a schedule of their own."""

    def _finished(self, leave: int) -> Iterator[Metrics]:
        """The metrics of all steps except the last submitted; waits for them."""
        done = [self._pending.popleft() for _ in range(len(self._pending) - leave)]
        if not done:
            return
        read = [values.wait() for _, _, _, _, values in done]
        then, waited = self._clock
        self._start_clock()
        now, waits = self._clock
        took = max(now - then, 1e-9)
        memory = self._device.memory_stats()
        rate_of = sum(samples for _, _, _, samples, _ in done) / took
        for (step, epoch, rate, _, _), means in zip(done, read, strict=True):
            values = dict(means.values)
            loss = values.pop(stepping.LOSS)
            self._check(loss, "loss", step)
            self._check_names(values)
            self._seconds += took / len(done)
            yield Metrics(
                step=step,
                loss=loss,
                learning_rate=rate,
                seconds=self._seconds,
                data_wait=(waits[0] - waited[0]) / took,
                device_wait=(waits[1] - waited[1]) / took,
                live_bytes=memory.live_bytes,
                planned_bytes=memory.planned_bytes,
                pooled_bytes=memory.pooled_bytes,
                peak_bytes=memory.peak_bytes,
                limit_bytes=memory.limit_bytes,
                hit_rate=memory.pool.hit_rate,
                epoch=epoch if self._has_epochs else None,
                traffic=self._ranks.told(means, step),
                others=_finite(values),
                **self._speed(rate_of),
            )

    def _speed(self, samples_per_second: float) -> dict[str, float | None]:
        """The metrics of speed."""
        return {"tokens_per_second": None, "samples_per_second": samples_per_second}

    def _start_clock(self) -> None:
        self._clock = self._now()

    def _now(self) -> tuple[float, tuple[float, float]]:
        """The time, and how long it was waited for data and for the device until then."""
        return time.perf_counter(), (self._feed.waited_seconds, self._device.stream.waits.seconds)

    def _record_all(self) -> None:
        """Record the metrics of every submitted step; waits for them."""
        for metrics in self._finished(leave=0):
            self._record(metrics)

    def _record(self, metrics: Metrics) -> None:
        self._log.add(metrics)
        self._view.show(metrics)
        self._call("on_step", metrics)

    def _keep_profile(self, profile: Profile, steps: int) -> None:
        """Keep the findings of the profile of the last steps for the report. Its time counts for no step."""
        start, (data, device) = self._now()
        try:
            window = (self.step - steps + 1, self.step)
            plans = planned_step(self._device, self._train_step, self._accumulate)
            self._findings = findings.of_profile(profile, window, *plans)
            if self._ranks.writes:
                self._findings.save(self.folder / findings.FILE)
        except Exception as error:  # a run is worth more than its report
            self._view.note(f"the profile of steps up to {self.step} is not in the report: {error}")
        end, (data_end, device_end) = self._now()
        then, waited = self._clock
        self._clock = then + end - start, (waited[0] + data_end - data, waited[1] + device_end - device)

    # Evaluations and checkpoints

    def _pause(self, evaluates: bool, saves: bool, epoch_ended: bool) -> None:
        """Record the metrics of every submitted step, then what follows an evaluation or an epoch."""
        validation = score = None
        improved = False
        for metrics in self._finished(leave=0):
            results = self._evaluate() if evaluates and metrics.step == self.step else {}
            if results:
                validation = results.pop(_EVALUATED + stepping.LOSS)
                others = {**metrics.others, **_finite(results)}
                metrics = replace(metrics, validation_loss=validation, others=others)
            self._record(metrics)
            if evaluates and metrics.step == self.step:
                score = self._score(metrics)
                improved = score is not None and self._best.add(score)
                self._after_evaluation(metrics)
        if epoch_ended and self._has_epochs:
            if isinstance(self._scheduler, LRScheduler) and self._schedule_every == "epoch":
                self._scheduler.step()
            self._call("on_epoch", self.epoch)
        if saves or (improved and self._early_stopping):
            self._save(validation, score)
        start = time.perf_counter()
        if start >= self._next_report:
            self.report()
            end = time.perf_counter()
            self._next_report = end + _REPORTING * (end - start)

    def _score(self, metrics: Metrics) -> float | None:
        """The score of an evaluation, of which lower is better."""
        return self._early_stopping.score(metrics) if self._early_stopping else metrics.validation_loss

    def _after_evaluation(self, metrics: Metrics) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            metric = self._early_stopping.metric if self._early_stopping else f"{_EVALUATED}{stepping.LOSS}"
            self._scheduler.step(metrics.named().get(metric, metrics.loss))
        self._call("on_evaluation", metrics)

    def evaluate(self) -> dict[str, float]:
        """The loss and the metrics of the evaluation data, by name."""
        self._check_functions()
        return {name.removeprefix(_EVALUATED): value for name, value in self._evaluate().items()}

    def _evaluate(self) -> dict[str, float]:
        """The means over the samples of the evaluation's data; empty if there is none."""
        if self._evaluation is None or self._evaluate_batch is None:
            return {}
        if self._evaluation_state is not None:  # always the same batches
            self._evaluation.load_state_dict(self._evaluation_state)
        evaluate = self._evaluate_batch
        with closed_after(self._evaluation) as batches:
            values = self._ranks.evaluate(lambda batch: evaluate(uploaded(batch, self._device)), batches)
        if values is None:
            raise DataError("`evaluation` gave no batch; give what can be iterated again, such as a list")
        means = {_EVALUATED + name: mean for name, mean in values.items()}
        self._check(means[_EVALUATED + stepping.LOSS], "validation loss", self.step)
        return means

    def _settings(self) -> Config | RunSettings:
        about = {
            "model": type(self.model).__name__,
            "parameters": sum(tensor.size for tensor in self.model.parameters()),
            "loss": self._loss_name,
            "metrics": list(self._metrics),
            "epochs": self._epochs,
            "steps": self._total_steps(),
            "accumulate": self._accumulate,
            "evaluate_every": self._evaluate_every,
            "checkpoint_every": self._checkpoint_every,
            "scheduler": self._scheduler and type(self._scheduler).__name__,
            "early_stopping": self._early_stopping and str(self._early_stopping),
            "memory": self._memory and format_bytes(self._memory),
            "device": self._device.name,
        }
        optimizers = {
            f"optimizer{at or ''}": {
                "name": type(each).__name__,
                **each.defaults,
                "clip_norm": each.clip_norm,
            }
            for at, each in enumerate(self.optimizers)
        }
        return RunSettings.of({SECTION: about, **optimizers, "data": self._feed.described()})


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """The values that are numbers, which a line of metrics can hold."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
