"""The training loop of a run, with its data, model, optimizer, checkpoints, metrics and report."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.compiler.launches import timeline
from penstock.data import (
    ByteTokenizer,
    CharTokenizer,
    Prefetch,
    Text,
    TextBatches,
    Tokenizer,
    TokenStore,
    find_text,
    load_tokenizer,
    python_sources,
    train_bpe,
)
from penstock.data.batches import ChunkBatches
from penstock.data.files import written_whole
from penstock.errors import CheckpointError, PenstockError
from penstock.formatting import format_bytes
from penstock.measuring.step_rates import step_rates
from penstock.optim import cosine
from penstock.optim.optimizer import LEAST_SCALE
from penstock.profiling.profiles import Profile
from penstock.report import Certificate, Findings, PlannedStep, findings
from penstock.stream.future import Future
from penstock.tensor.jit import schedules
from penstock.train import checkpoint as checkpoints
from penstock.train.building import build_model, make_optimizer, make_steps
from penstock.train.checkpoint import Checkpoint
from penstock.train.config import Config
from penstock.train.folder import RunFolder
from penstock.train.metrics import FILE as METRICS_FILE
from penstock.train.metrics import Metrics, MetricsLog, read_curves
from penstock.train.report import CONFIG_FILE, read_findings, read_sample, write_report, write_sample
from penstock.train.report import FILE as REPORT_FILE
from penstock.train.sizing import check_fits
from penstock.train.view import View
from penstock.train.window import Window

TOKENIZER_FILE = "tokenizer.json"
_PROMPT = 16  # tokens of the sample's prompt


class TrainingError(PenstockError, RuntimeError):
    """Training cannot continue: its loss is not finite."""


class Trainer:
    """A run in its folder, new or from a checkpoint. `train` runs until its steps are done.

    It computes on the default device, and uses the default random generator.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        view: View,
        resumed: Checkpoint | None = None,
        numbered: bool = False,
    ) -> None:
        """Prepare everything. The folder is locked, and created if it is new, after all else has succeeded.

        It stays locked until `train` ends; RunInUse names the process that uses it. With `numbered`, a new
        folder is created in any case, with a number after its name if that exists.
        """
        self.config, self.folder = config, folder
        self.step = 0
        self.stopped_by: signal.Signals | None = None  # the signal that ended `train` early
        self._view = view
        self._device = ps.default_device()
        self._is_first = False  # whether the folder had no run before
        self._held = RunFolder(folder) if folder.is_dir() and not numbered else None
        try:
            self._build(resumed)
            if self._held is None:
                self._held = RunFolder(folder, numbered)
                self.folder = self._held.path
            self._is_first = not (self.folder / CONFIG_FILE).exists()
            self._write_settings()
            self._log = MetricsLog(self.folder, self.step)
            self._findings = self._earlier_findings()
        except BaseException:
            self._let_go()
            raise
        self._saved = self.step
        self._pending: deque[tuple[int, float, list[Future[npt.NDArray[np.float32]]]]] = deque()
        self._train_step, self._loss_of = make_steps(self.model, self._optimizer, config)

    def _build(self, resumed: Checkpoint | None) -> None:
        """Create text, model and optimizer, new or from a checkpoint."""
        ps.random.manual_seed(self.config.run.seed)
        self._open_text(resumed)
        self.model = build_model(self.config, self.tokenizer.vocab_size)
        self.model.to(getattr(ps, self.config.model.precision))
        self._optimizer = make_optimizer(self.model, self.config)
        self._position = 0
        self._seconds = 0.0
        if resumed:
            self._restore(resumed)

    # Training

    def train(self) -> bool:
        """Run until all steps are done, or until Ctrl-C or SIGTERM; whether all are done."""
        steps, every = self.config.run.steps, self.config.run.evaluate_every
        if self._held is None:
            self._held = RunFolder(self.folder)
        try:
            batches = self._batches()
            self._view.start(self.step, steps, self._seconds)
            with (
                Prefetch(batches, self._device) as prefetch,
                _interruptible(self._view) as received,
                Window(self._device, steps - self.step) as window,
            ):
                self._start_clock(prefetch)
                while self.step < steps and not received():
                    if window.due:
                        self._record_all(prefetch)
                        window.begin()
                    self._advance(prefetch)
                    evaluates = self.step % every == 0 or self.step == steps
                    saves = self._saves(evaluates)
                    profiled = window.after_step(last=evaluates or saves or received() is not None)
                    if profiled:
                        self._keep_profile(*profiled, prefetch)
                    if evaluates or saves:
                        self._pause(prefetch, evaluates, saves)
                        self._start_clock(prefetch)
                    elif profiled:
                        self._record_all(prefetch)
                    # All losses except the last, since the device is still computing that step.
                    for metrics in self._finished(prefetch, leave=1):
                        self._record(metrics)
                if self.step > self._saved:
                    self._record_all(prefetch)
                    self._save(None)
                self.stopped_by = received()
        finally:
            self._view.stop()
            self._store.close()
            if self._store.replaced:
                self._view.note(f"not UTF-8, and replaced by U+FFFD: {self._store.replaced} places")
            if self._log.curves:
                self.report()
            self._let_go()
        return self.step >= steps

    def _batches(self) -> TextBatches | ChunkBatches:
        data, model = self.config.data, self.config.model
        return self._store.batches(data.batch, model.context, self.config.run.seed, self._position)

    def prompt(self) -> npt.NDArray[np.int32]:
        """The prompt of the sample: tokens that were not trained on, if there are any."""
        tokens = self._store.validation if len(self._store.validation) else self._store.train
        return tokens[:_PROMPT].astype(np.int32)

    def report(self, sample: str = "") -> bool:
        """Write `report.html`, with the last sample of text if there is one; whether it succeeded.

        If the report cannot be written, a note says why, and the run goes on.
        """
        try:
            if sample:
                write_sample(self.folder, sample)
            write_report(
                self.folder, self.config, self._log.curves, self._findings, sample or read_sample(self.folder)
            )
        except Exception as error:  # a run is worth more than its report
            self._view.note(f"there is no new report: {error}")
            return False
        return True

    # One step

    def _advance(self, batches: Prefetch[ps.Tensor]) -> None:
        """Submit a step. Its losses are read later."""
        setting, number = self.config.optimizer, self.config.optimizer.accumulate
        warmup = min(setting.warmup, self.config.run.steps)
        schedule = cosine(setting.learning_rate, self.config.run.steps, warmup, setting.final_rate)
        self._optimizer.lr = rate = schedule(self.step)
        losses = []
        for at in range(number):
            loss = self._train_step(next(batches), at == 0, at == number - 1)
            losses.append(loss.numpy_async())
        self.step += 1
        self._position = batches.state()
        self._pending.append((self.step, rate, losses))

    def _finished(self, batches: Prefetch[ps.Tensor], leave: int) -> Iterator[Metrics]:
        """The metrics of all steps except the last submitted; waits for them."""
        tokens = self.config.data.batch * self.config.model.context * self.config.optimizer.accumulate
        done = [self._pending.popleft() for _ in range(len(self._pending) - leave)]
        if not done:
            return
        losses = [float(np.mean([future.wait() for future in futures])) for _, _, futures in done]
        then, waited = self._clock
        self._start_clock(batches)
        now, waits = self._clock
        took = max(now - then, 1e-9)
        memory = self._device.memory_stats()
        for (step, rate, _), loss in zip(done, losses, strict=True):
            self._check(loss, "loss", step)
            self._seconds += took / len(done)
            yield Metrics(
                step=step,
                loss=loss,
                learning_rate=rate,
                seconds=self._seconds,
                tokens_per_second=tokens * len(done) / took,
                data_wait=(waits[0] - waited[0]) / took,
                device_wait=(waits[1] - waited[1]) / took,
                live_bytes=memory.live_bytes,
                planned_bytes=memory.planned_bytes,
                pooled_bytes=memory.pooled_bytes,
                peak_bytes=memory.peak_bytes,
                limit_bytes=memory.limit_bytes,
                hit_rate=memory.pool.hit_rate,
            )

    def _start_clock(self, batches: Prefetch[ps.Tensor]) -> None:
        self._clock = self._now(batches)

    def _now(self, batches: Prefetch[ps.Tensor]) -> tuple[float, tuple[float, float]]:
        """The time, and how long it was waited for data and for the device until then."""
        return time.perf_counter(), (batches.waited_seconds, self._device.stream.waits.seconds)

    def _record_all(self, batches: Prefetch[ps.Tensor]) -> None:
        """Record the metrics of every submitted step; waits for them."""
        for metrics in self._finished(batches, leave=0):
            self._record(metrics)

    def _record(self, metrics: Metrics) -> None:
        self._log.add(metrics)
        self._view.show(metrics)

    # The profile

    def _keep_profile(self, profile: Profile, steps: int, batches: Prefetch[ps.Tensor]) -> None:
        """Keep the findings of the profile of the last steps for the report. Its time counts for no step."""
        start, (data, device) = self._now(batches)
        try:
            window = (self.step - steps + 1, self.step)
            self._findings = findings.of_profile(profile, window, *self._planned())
            self._findings.save(self.folder / findings.FILE)
        except Exception as error:  # a run is worth more than its report
            self._view.note(f"the profile of steps up to {self.step} is not in the report: {error}")
        end, (data_end, device_end) = self._now(batches)
        then, waited = self._clock
        self._clock = then + end - start, (waited[0] + data_end - data, waited[1] + device_end - device)

    def _planned(self) -> tuple[Certificate | None, PlannedStep | None]:
        """The plan of the training step, and what is predicted of it."""
        known = schedules(self._train_step)
        if not known:
            return None, None
        rates = step_rates(self._device, measure=False)
        seconds = None
        if rates is not None:
            planned = timeline(known[0], self._device.capabilities)
            seconds = self.config.optimizer.accumulate * rates.seconds(*planned)
        return Certificate.of(known[0].plan), PlannedStep.of(known[0], self._device.held_bytes(), seconds)

    def _earlier_findings(self) -> Findings | None:
        """The findings of an earlier part of the run."""
        try:
            return read_findings(self.folder)
        except PenstockError as error:
            self._view.note(f"{error}; the report goes without it")
            return None

    # Evaluations and checkpoints

    def _saves(self, evaluates: bool) -> bool:
        """Whether a checkpoint follows this step."""
        every = self.config.run.checkpoint_every
        return self.step % every == 0 or self.step == self.config.run.steps if every else evaluates

    def _pause(self, batches: Prefetch[ps.Tensor], evaluates: bool, saves: bool) -> None:
        """Record the metrics of every submitted step, then evaluate, or save a checkpoint, or both."""
        validation = None
        for metrics in self._finished(batches, leave=0):
            if evaluates and metrics.step == self.step:
                validation = self._evaluate()
            self._record(replace(metrics, validation_loss=validation))
        if saves:
            self._save(validation)
        self.report()

    def _evaluate(self) -> float | None:
        """The mean loss of the validation batches, which are always the same; None if there are none."""
        if not self._validation:
            return None
        self.model.eval()
        losses = [self._loss_of(tokens).numpy_async() for tokens in self._validation]
        self.model.train()
        loss = float(np.mean([float(future.wait()) for future in losses]))
        self._check(loss, "validation loss", self.step)
        return loss

    def _save(self, validation: float | None) -> None:
        model = self.model.state_dict()
        for name, array in model.items():
            self._check(float(np.abs(array.astype(np.float32)).max()), f"largest of {name}", self.step)
        optimizer = self._optimizer.state_dict()
        if optimizer.get("scale", math.inf) <= LEAST_SCALE:
            self._view.note(
                f"at step {self.step} the gradients overflow float16 even though the loss is not scaled any "
                "more; such steps change nothing. Use bfloat16 or float32, or a lower learning_rate"
            )
        checkpoints.save(
            self.folder,
            Checkpoint(
                step=self.step,
                config=self.config,
                model=model,
                optimizer=optimizer,
                generator=ps.random.state(),
                position=self._position,
                text=self._store.key,
                seconds=self._seconds,
                validation_loss=validation,
            ),
        )
        self._saved = self.step

    def _check(self, value: float, what: str, step: int) -> None:
        if math.isfinite(value):
            return
        kept = checkpoints.checkpoint_files(self.folder)
        there = f"The last good checkpoint is {kept[-1]}" if kept else "There is no checkpoint yet"
        how = f"penstock train {f'--resume {self.folder} ' if kept else ''}--config FILE"
        raise TrainingError(
            f"the {what} is {value} at step {step}. {there}. A lower learning_rate (now "
            f"{self.config.optimizer.learning_rate}) or a longer warmup, under [optimizer] in a file, mostly "
            f"helps: {how}"
        )

    # Setup

    def _open_text(self, resumed: Checkpoint | None) -> None:
        setting = self.config.data
        text = find_text(setting.path) if setting.path else python_sources()
        self._view.note(f"text: {setting.path or 'the sources of this Python'}")
        if resumed:
            self.tokenizer = load_tokenizer(self.folder / TOKENIZER_FILE)
        else:
            self.tokenizer = _make_tokenizer(self.config, text, self._view)
        begun = resumed.text if resumed else None
        self._store = TokenStore.open(
            text, self.tokenizer, setting.validation, progress=self._view.phase, begun=begun
        )
        self._view.note(f"{text.summary()}\n{self._store.summary()}")
        if resumed and resumed.text != self._store.key:
            self._view.note(
                "the text is not the one that the run began with, or its files were moved or touched; "
                "where it differs, so do the batches from here on"
            )
        check_fits(self.config, self.tokenizer.vocab_size, self._device)
        self._validation = []
        if len(self._store.validation) > self.config.model.context:
            batches = TextBatches(self._store.validation, setting.batch, self.config.model.context, seed=0)
            self._validation = [ps.asarray(next(batches)) for _ in range(self.config.run.evaluate_batches)]
        elif setting.validation:
            self._view.note("the text is too short for validation; there is none")

    def _restore(self, resumed: Checkpoint) -> None:
        """Resume from a checkpoint; from an earlier one, with a note, if a part of it is missing."""
        problems: list[str] = []
        for checkpoint in itertools.chain([resumed], checkpoints.older(self.folder, resumed.step)):
            try:
                self.model.load_state_dict(checkpoint.model)
                self._optimizer.load_state_dict(checkpoint.optimizer)
                ps.random.set_state(checkpoint.generator)
            except (KeyError, ValueError, TypeError) as error:
                which = f"the checkpoint of step {checkpoint.step} in {self.folder}"
                problems.append(f"{which} does not fit the settings: {error}")
                continue
            self.step = checkpoint.step
            self._position, self._seconds = checkpoint.position, checkpoint.seconds
            for problem in problems:
                self._view.note(f"{problem}; the checkpoint of step {self.step} is used")
            return
        raise CheckpointError(problems[0])

    def _let_go(self) -> None:
        """Unlock the folder. If no step was done in it, nothing of this run is left there."""
        if self._held is None:
            return
        if self._is_first and not checkpoints.checkpoint_files(self.folder) and not read_curves(self.folder):
            self._held.remove_files([CONFIG_FILE, TOKENIZER_FILE, METRICS_FILE, REPORT_FILE, findings.FILE])
        elif not (self.folder / CONFIG_FILE).exists():
            self._held.remove_files([])
        self._held.release()
        self._held = None

    def _write_settings(self) -> None:
        with written_whole(self.folder / CONFIG_FILE) as file:
            file.write(self.config.toml().encode())
        self.tokenizer.save(self.folder / TOKENIZER_FILE)
        size = sum(tensor.size for tensor in self.model.parameters())
        where = f"{self._device.name} ({self._device.capabilities.description})"
        limit = self._device.limit_bytes
        within = "" if limit is None else f", within {format_bytes(limit)}"
        self._view.note(f"a GPT of {size:,} parameters in {self.config.model.precision} on {where}{within}")
        self._view.note(f"run: {self.folder}")


def _make_tokenizer(config: Config, text: Text, view: View) -> Tokenizer:
    match config.data.tokenizer:
        case "bytes":
            return ByteTokenizer()
        case "characters":
            with view.phase("looking for characters"):
                return CharTokenizer(text)
    return train_bpe(text, config.data.vocabulary, view.phase)


@contextmanager
def _interruptible(view: View) -> Iterator[Callable[[], signal.Signals | None]]:
    """A function that tells which of Ctrl-C and SIGTERM was received. A second ends the process at once."""
    received: signal.Signals | None = None

    def handler(number: int, _: FrameType | None) -> None:
        nonlocal received
        received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        view.note("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: received  # only the main thread receives signals
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
