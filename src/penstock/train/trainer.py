"""The training loop, and all that belongs to a run: data, model, optimizer, checkpoints, metrics, report."""

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
from penstock.data.files import written_whole
from penstock.errors import CheckpointError, PenstockError
from penstock.formatting import format_bytes
from penstock.nn import GPT
from penstock.optim import AdamW, cosine
from penstock.optim.optimizers import LEAST_SCALE
from penstock.profiling.profiles import Profile
from penstock.report import Certificate, Findings, findings
from penstock.stream.future import Future
from penstock.tensor.jit import plans
from penstock.train import checkpoint as checkpoints
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
_PROMPT = 16  # tokens that begin the sample


class TrainingError(PenstockError, RuntimeError):
    """Training cannot go on: its loss is no number any more."""


class Trainer:
    """A run in its folder, new or from a checkpoint. `train` goes on until its steps are done.

    It computes on the default device, and takes its random numbers from the default generator.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        view: View,
        resumed: Checkpoint | None = None,
        numbered: bool = False,
    ) -> None:
        """Get everything ready. The folder is taken, and a new one made, when all else is known to be good.

        Nobody else may have it until `train` ends; RunInUse names who has it. With `numbered`, it is a new
        one in any case, with a number behind its name where that is taken.
        """
        self.config, self.folder = config, folder
        self.step = 0
        self.stopped_by: signal.Signals | None = None  # what ended `train` early
        self._view = view
        self._device = ps.default_device()
        self._is_first = False  # whether the folder had no run before this one
        self._held = RunFolder(folder) if folder.is_dir() and not numbered else None
        try:
            self._build(resumed)
            if self._held is None:
                self._held = RunFolder(folder, numbered)
                self.folder = self._held.path
            self._is_first = not (self.folder / CONFIG_FILE).exists()
            self._write_settings()
            self._log = MetricsLog(self.folder, self.step)
            self._findings = self._found_before()
        except BaseException:
            self._let_go()
            raise
        self._saved = self.step
        self._pending: deque[tuple[int, float, list[Future[npt.NDArray[np.float32]]]]] = deque()
        self._train_step, self._loss_of = self._steps()

    def _build(self, resumed: Checkpoint | None) -> None:
        """Text, model and optimizer, as they are at the beginning or in a checkpoint."""
        ps.random.manual_seed(self.config.run.seed)
        self._open_text(resumed)
        self.model = build_model(self.config, self.tokenizer.vocab_size)
        self.model.to(getattr(ps, self.config.model.precision))
        self._optimizer = _make_optimizer(self.model, self.config)
        self._position = 0
        self._seconds = 0.0
        if resumed:
            self._restore(resumed)

    # Training

    def train(self) -> bool:
        """Go on until all steps are done, or until Ctrl-C or SIGTERM; whether they are done."""
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
                    # The losses but the last: the device has that step to do meanwhile.
                    for metrics in self._finished(prefetch, leave=1):
                        self._record(metrics)
                if self.step > self._saved:
                    self._record_all(prefetch)
                    self._save(None)
                self.stopped_by = received()
        finally:
            self._view.stop()
            if self._log.curves:
                self.report()
            self._let_go()
        return self.step >= steps

    def _batches(self) -> TextBatches:
        data, model = self.config.data, self.config.model
        return TextBatches(self._store.train, data.batch, model.context, self.config.run.seed, self._position)

    def prompt(self) -> npt.NDArray[np.int32]:
        """Where a sample of text may begin: tokens that were not trained on, if there are any."""
        tokens = self._store.validation if len(self._store.validation) else self._store.train
        return tokens[:_PROMPT].astype(np.int32)

    def report(self, sample: str = "") -> bool:
        """Write `report.html`, with a sample of text if there is one, now or from before; whether it could.

        A report that cannot be written ends nothing: a note says why.
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

    def _steps(self) -> tuple[Callable[[ps.Tensor, bool, bool], ps.Tensor], Callable[[ps.Tensor], ps.Tensor]]:
        model, optimizer, accumulate = self.model, self._optimizer, self.config.optimizer.accumulate

        @ps.jit
        def train_step(tokens: ps.Tensor, first: bool, last: bool) -> ps.Tensor:
            # `first` is only told apart: then there are no gradients yet, to which the new ones are added.
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            optimizer.backward(loss if accumulate == 1 else loss / accumulate)
            if last:
                optimizer.step()
            return loss

        @ps.jit
        def loss_of(tokens: ps.Tensor) -> ps.Tensor:
            with ps.no_grad():
                return model.loss(tokens[:, :-1], tokens[:, 1:])

        return train_step, loss_of

    def _advance(self, batches: Prefetch[ps.Tensor]) -> None:
        """Ask for one more step. Its losses are read later."""
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
        """What was measured at the steps before the last ones; waits for them."""
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
        """The time, and how long data and the device were waited for until then."""
        return time.perf_counter(), (batches.waited_seconds, self._device.stream.waits.seconds)

    def _record_all(self, batches: Prefetch[ps.Tensor]) -> None:
        """Record every step that was asked for; waits for them."""
        for metrics in self._finished(batches, leave=0):
            self._record(metrics)

    def _record(self, metrics: Metrics) -> None:
        self._log.add(metrics)
        self._view.show(metrics)

    # The profile

    def _keep_profile(self, profile: Profile, steps: int, batches: Prefetch[ps.Tensor]) -> None:
        """Keep what the profile of the last steps found, for the report. No step is charged for it."""
        start, (data, device) = self._now(batches)
        try:
            certificates = [Certificate.of(plan) for plan in plans(self._train_step)]
            self._findings = findings.of_profile(
                profile, (self.step - steps + 1, self.step), certificates[0] if certificates else None
            )
            self._findings.save(self.folder / findings.FILE)
        except Exception as error:  # a run is worth more than its report
            self._view.note(f"the profile of steps up to {self.step} is not in the report: {error}")
        end, (data_end, device_end) = self._now(batches)
        then, waited = self._clock
        self._clock = then + end - start, (waited[0] + data_end - data, waited[1] + device_end - device)

    def _found_before(self) -> Findings | None:
        """What an earlier part of the run has found."""
        try:
            return read_findings(self.folder)
        except PenstockError as error:
            self._view.note(f"{error}; the report goes without it")
            return None

    # Every now and then

    def _saves(self, evaluates: bool) -> bool:
        """Whether a checkpoint follows this step."""
        every = self.config.run.checkpoint_every
        return self.step % every == 0 or self.step == self.config.run.steps if every else evaluates

    def _pause(self, batches: Prefetch[ps.Tensor], evaluates: bool, saves: bool) -> None:
        """Record every step that was asked for, and evaluate after the last one, or save, or both."""
        validation = None
        for metrics in self._finished(batches, leave=0):
            if evaluates and metrics.step == self.step:
                validation = self._evaluate()
            self._record(replace(metrics, validation_loss=validation))
        if saves:
            self._save(validation)
        self.report()

    def _evaluate(self) -> float | None:
        """The mean loss of the validation batches, the same ones each time; None where there are none."""
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
        kept = checkpoints.found(self.folder)
        there = f"The last good checkpoint is {kept[-1]}" if kept else "There is no checkpoint yet"
        how = f"penstock train {f'--resume {self.folder} ' if kept else ''}--config FILE"
        raise TrainingError(
            f"the {what} is {value} at step {step}. {there}. A lower learning_rate (now "
            f"{self.config.optimizer.learning_rate}) or a longer warmup, under [optimizer] in a file, mostly "
            f"helps: {how}"
        )

    # The beginning

    def _open_text(self, resumed: Checkpoint | None) -> None:
        setting = self.config.data
        text = find_text(setting.path) if setting.path else python_sources()
        self._view.note(f"text: {setting.path or 'the sources of this Python'}")
        if resumed:
            self.tokenizer = load_tokenizer(self.folder / TOKENIZER_FILE)
        else:
            self.tokenizer = _make_tokenizer(self.config, text)
        self._store = TokenStore.open(text, self.tokenizer, setting.validation)
        self._view.note(
            f"{text.summary()}\n{len(self._store):,} tokens of {self.tokenizer.vocab_size:,} kinds"
        )
        if resumed and resumed.text != self._store.key:
            self._view.note(
                "the text is not the one that the run began with; its batches are others from here on"
            )
        check_fits(self.config, self.tokenizer.vocab_size, self._device)
        self._validation = []
        if len(self._store.validation) > self.config.model.context:
            batches = TextBatches(self._store.validation, setting.batch, self.config.model.context, seed=0)
            self._validation = [ps.asarray(next(batches)) for _ in range(self.config.run.evaluate_batches)]
        elif setting.validation:
            self._view.note("the text is too short for validation; there is none")

    def _restore(self, resumed: Checkpoint) -> None:
        """Go on from a checkpoint; from an older one, with a note, where something is missing in it."""
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
                self._view.note(f"{problem}; the one of step {self.step} is used")
            return
        raise CheckpointError(problems[0])

    def _let_go(self) -> None:
        """Let others have the folder. Where no step was done in it, nothing of this run stays there."""
        if self._held is None:
            return
        if self._is_first and not checkpoints.found(self.folder) and not read_curves(self.folder):
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


def build_model(config: Config, vocab_size: int) -> GPT:
    """The model of a configuration, with fresh weights, on the default device."""
    shape = config.model
    return GPT(vocab_size, shape.context, shape.width, shape.layers, shape.heads, shape.dropout)


def _make_optimizer(model: GPT, config: Config) -> AdamW:
    setting = config.optimizer
    matrices = [tensor for tensor in model.parameters() if tensor.ndim >= 2]
    others = [tensor for tensor in model.parameters() if tensor.ndim < 2]
    return AdamW(
        [{"params": matrices, "weight_decay": setting.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=setting.learning_rate,
        betas=(setting.beta1, setting.beta2),
        clip_norm=setting.clip_norm,
    )


def _make_tokenizer(config: Config, text: Text) -> Tokenizer:
    match config.data.tokenizer:
        case "bytes":
            return ByteTokenizer()
        case "characters":
            return CharTokenizer(text)
    return train_bpe(text, config.data.vocabulary)


@contextmanager
def _interruptible(view: View) -> Iterator[Callable[[], signal.Signals | None]]:
    """Which of Ctrl-C and SIGTERM has come, as a function. The next one ends the process at once, as ever."""
    received: signal.Signals | None = None

    def handler(number: int, _: FrameType | None) -> None:
        nonlocal received
        received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        view.note("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: received  # only the main thread is told of signals
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
