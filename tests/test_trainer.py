"""`ps.Trainer`: a user's own model, data and step, in a run that is resumed to the same bits."""

from __future__ import annotations

import doctest
import gc
import io
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainer_models
from rich.console import Console
from trainer_models import RUNS, accuracy, make

import penstock as ps
from penstock import Tensor, cli, nn, optim
from penstock.data import DataError
from penstock.errors import CheckpointError, OutOfDeviceMemory, SettingError
from penstock.measuring import ceilings
from penstock.nn import functional as F  # noqa: N812
from penstock.optim import lr_scheduler
from penstock.train import Callback, EarlyStopping, Metrics, NoView, TrainingError, load_last, report_on
from penstock.train.checkpoint import checkpoint_files, load
from penstock.train.view import LiveView


@pytest.fixture(autouse=True)
def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    default = ps.default_device()
    ps.use("host")  # which compiles nothing
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)  # which takes its time
    yield
    ps.use(default)


def lines(run: Path) -> list[dict[str, Any]]:
    """What must be the same in two runs: all metrics but times and memory."""
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changing = ("seconds", "samples_per_second", "data_wait", "device_wait", "hit_rate")
    return [
        {key: value for key, value in line.items() if key not in changing and not key.endswith("_bytes")}
        for line in read
    ]


def assert_same(run: Path, other: Path) -> None:
    """Two runs have the same bits: metrics, weights, moments, random state, and places in the data."""
    assert lines(run) == lines(other)
    last, same = load_last(run)[0], load_last(other)[0]
    for mine, others in ((last.model, same.model), (last.optimizer, same.optimizer)):
        assert mine.keys() == others.keys()
        assert all(np.array_equal(mine[name], others[name]) for name in mine)
    assert (last.step, last.generator, last.position) == (same.step, same.generator, same.position)
    known = [{**state.more, "callbacks": None} for state in (last, same)]
    assert known[0] == known[1]


X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = (X @ np.float32([[1], [-2], [0.5]]) + 0.1).astype(np.float32)


def line_run(folder: Path, **changed: Any) -> ps.Trainer:
    """A small linear model."""
    ps.random.manual_seed(1)
    model = changed.pop("model", None) or nn.Linear(3, 1)
    optimizer = changed.pop("optimizer", None) or optim.SGD(model.parameters(), lr=0.1)
    data = changed.pop("data", None) or ps.data.Loader(ps.data.Arrays(X, Y), batch=5, shuffle=True)
    given = {"loss": F.mse_loss, "epochs": 3, "view": NoView()}
    if "steps" in changed:
        del given["epochs"]
    return ps.Trainer(model, optimizer=optimizer, data=data, folder=folder, **{**given, **changed})


# A run


def test_a_few_lines_train_a_model_with_all_that_a_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.random.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    points = np.random.default_rng(1).normal(size=(250, 2)).astype(np.float32)
    inside = (np.hypot(*points.T) < 1.2).astype(np.int64)
    trainer = ps.Trainer(
        model,
        loss=F.cross_entropy,
        optimizer=optim.AdamW(model.parameters(), lr=5e-2),
        data=ps.data.Loader(ps.data.Arrays(points[:200], inside[:200]), batch=32, shuffle=True),
        evaluation=ps.data.Loader(ps.data.Arrays(points[200:], inside[200:]), batch=20),
        metrics={"accuracy": accuracy},
        folder=tmp_path / "run",
        epochs=15,
        memory="1GiB",
    )
    assert trainer.fit()
    assert (trainer.step, trainer.epoch) == (15 * 7, 15)
    run = lines(tmp_path / "run")
    assert [line["step"] for line in run] == list(range(1, 106))
    assert [line["step"] for line in run if "validation_loss" in line] == list(range(7, 106, 7))
    assert [line["epoch"] for line in run[6:8]] == [1, 2]
    assert run[-1]["validation_accuracy"] > 0.9
    logits = model(ps.asarray(points[200:])).numpy()  # the oracle: means over samples, not over batches
    assert np.mean(logits.argmax(1) == inside[200:]) == pytest.approx(
        trainer.evaluate()["accuracy"], abs=1e-6
    )
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(50), inside[200:]]
    assert losses.mean() == pytest.approx(run[-1]["validation_loss"], rel=1e-4)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"checkpoints", "config.toml", "metrics.jsonl", "profile.json", "report.html", "run.lock"}
    said = capsys.readouterr().out
    for part in ("a model Sequential of 82 parameters", "step 105/105", "validation_accuracy", "of 1.0 GiB"):
        assert part in said
    assert trainer.fit()  # there is nothing left to do
    assert "all 105 steps are done; more epochs or steps go on" in capsys.readouterr().out
    assert len(lines(tmp_path / "run")) == 105


def test_another_fit_goes_on_with_more_epochs(tmp_path: Path) -> None:
    line_run(tmp_path / "whole", epochs=5).fit()
    line_run(tmp_path / "run", epochs=2).fit()
    resumed = line_run(tmp_path / "run", epochs=5)
    assert resumed.fit()
    assert (resumed.step, resumed.epoch) == (20, 5)
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_without_evaluations_the_last_three_checkpoints_are_kept(tmp_path: Path) -> None:
    line_run(tmp_path / "run", epochs=6).fit()
    assert [load(path).step for path in checkpoint_files(tmp_path / "run")] == [16, 20, 24]


def test_steps_and_epochs_of_data_of_every_kind(tmp_path: Path) -> None:
    batches = [(X[at : at + 5], Y[at : at + 5]) for at in range(0, 20, 5)]
    for number, data in enumerate((batches, tuple(batches), iter(batches), (batch for batch in batches))):
        trainer = line_run(tmp_path / str(number), data=data, steps=4)
        assert trainer.fit()
        assert (trainer.step, trainer.epoch) == (4, 1)
        assert lines(tmp_path / str(number)) == lines(tmp_path / "0")
    with pytest.raises(DataError, match=r"list_iterator gave no batch in epoch 2; an iterator gives"):
        line_run(tmp_path / "once", data=iter(batches), epochs=2).fit()
    with pytest.raises(DataError, match="int cannot be iterated"):
        line_run(tmp_path / "none", data=3)
    assert line_run(tmp_path / "dlpack", data=[(ps.asarray(X), Y)], epochs=2).fit()


def test_parts_of_a_batch_before_the_last_are_inputs(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.line(x) * scale

    scales = np.ones((20, 1), np.float32)
    model = Two()
    assert line_run(tmp_path / "run", model=model, data=[(X, scales, Y)], epochs=30).fit()
    assert lines(tmp_path / "run")[-1]["loss"] < lines(tmp_path / "run")[0]["loss"] / 5
    with pytest.raises(SettingError, match="1 part was given; for batches of another form"):
        line_run(tmp_path / "one", data=[X], epochs=1).fit()


# Resuming


class Failing(Callback):
    """Ends a run as a kill would do: without a checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, trainer: ps.Trainer, metrics: Metrics) -> None:
        if metrics.step == self._step:
            raise InterruptedError


@pytest.mark.slow("resnet", "lstm")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_failed_resumes_to_the_same_bits(tmp_path: Path, name: str) -> None:
    assert make(name, tmp_path / "whole", callbacks=[Callback()]).fit()
    for step in (1, 5, 6, 9):  # before the first checkpoint, at and after another, and in a later epoch
        with pytest.raises(InterruptedError):
            make(name, tmp_path / "run", callbacks=[Failing(step)]).fit()
    assert make(name, tmp_path / "run", callbacks=[Callback()]).fit()
    assert_same(tmp_path / "run", tmp_path / "whole")


def killed_often(name: str, run: Path, device: str, times: int, rng: random.Random) -> None:
    """Train in processes that are killed at random moments, then in one that ends."""
    command = [sys.executable, trainer_models.__file__, name, str(run), device]
    for _ in range(times):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(rng.randint(0, 7)):  # lines of steps and of checkpoints
                process.stdout.readline()
            time.sleep(rng.random() * 0.02)
            process.kill()
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "done"


@pytest.mark.slow("resnet", "lstm")
@pytest.mark.parametrize("name", RUNS)
def test_kills_at_random_moments_leave_the_same_bits(tmp_path: Path, name: str) -> None:
    assert make(name, tmp_path / "whole").fit()
    killed_often(name, tmp_path / "run", "host", 1 if name == "own" else 4, random.Random(name))
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_kills_at_random_moments_leave_the_same_bits_on_the_default_device(tmp_path: Path) -> None:
    device = ps.devices()[0].name
    killed_often("own", tmp_path / "whole", device, 0, random.Random())  # in a process with the same compiler
    killed_often("own", tmp_path / "run", device, 1, random.Random(0))
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_signal_saves_and_another_fit_goes_on(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_step(self, trainer: ps.Trainer, metrics: Metrics) -> None:
            if metrics.step == 5:
                signal.raise_signal(signal.SIGINT)

    line_run(tmp_path / "whole", callbacks=[Callback()]).fit()
    trainer = line_run(tmp_path / "run", callbacks=[Interrupt()])
    before = signal.getsignal(signal.SIGINT)
    assert not trainer.fit()
    assert (trainer.step, trainer.stopped_by) == (6, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert load_last(tmp_path / "run")[0].step == 6
    assert trainer.fit()  # in the same process
    assert trainer.stopped_by is None
    assert_same(tmp_path / "run", tmp_path / "whole")
    once = line_run(tmp_path / "once", data=iter([(X, Y)] * 12), steps=12, callbacks=[Interrupt()])
    assert not once.fit()
    assert once.fit()
    assert len(lines(tmp_path / "once")) == 12


@pytest.mark.slow
def test_augmented_samples_of_workers_are_resumed_too(tmp_path: Path) -> None:
    def run(folder: Path, **changed: Any) -> ps.Trainer:
        data = ps.data.Loader(Noisy(), batch=4, shuffle=True, workers=2)
        return line_run(folder, data=data, epochs=2, **changed)

    assert run(tmp_path / "whole", callbacks=[Callback()]).fit()
    with pytest.raises(InterruptedError):  # in the second epoch, after a step that has no checkpoint
        run(tmp_path / "run", callbacks=[Failing(7)], checkpoint_every=2).fit()
    assert run(tmp_path / "run", callbacks=[Callback()]).fit()
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


class Noisy:
    """Samples with noise of NumPy's generator, which workers seed for each batch."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> Any:
        return X[index] + np.random.normal(size=3).astype(np.float32), Y[index]


def test_what_changed_since_the_checkpoint_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    line_run(run, epochs=1).fit()
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "run.lock"]
    kept = {path: path.read_bytes() for path in files}
    small = nn.Sequential(nn.Linear(3, 1))
    with pytest.raises(CheckpointError, match=r"step 4 .* does not fit the program.*lacks \['0.bias'"):
        line_run(run, model=small).fit()
    with pytest.raises(CheckpointError, match=r"weight has shape \(2, 3\), and \(1, 3\) was given"):
        line_run(run, model=nn.Linear(3, 2)).fit()
    model = nn.Linear(3, 1)
    with pytest.raises(CheckpointError, match=r"the state of another optimizer.*needs another folder"):
        line_run(run, model=model, optimizer=optim.Adam(model.parameters(), lr=0.1)).fit()
    for data, message in (
        (
            ps.data.Loader(ps.data.Arrays(X[:15], Y[:15]), batch=5, shuffle=True),
            "had 4 batches, and has 3 now",
        ),
        (ps.data.Loader(ps.data.Arrays(X, Y), batch=5), "with shuffle=True, and this has False"),
        (ps.data.Loader(ps.data.Arrays(X, Y + 1), batch=5, shuffle=True), "with contents"),
        (ps.data.Loader(ps.data.Arrays(X[:19], Y[:19]), batch=5, shuffle=True), "with samples=20"),
        ([(X, Y)] * 4, "the data was of another kind than list"),
    ):
        with pytest.raises(CheckpointError, match=message):
            line_run(run, data=data).fit()
    schedule = lr_scheduler.StepLR(optim.SGD(model.parameters(), lr=0.1), 2)
    with pytest.raises(CheckpointError, match="only one of them has a scheduler"):
        line_run(run, model=model, optimizer=schedule.optimizer, scheduler=schedule).fit()
    assert {path: path.read_bytes() for path in kept} == kept
    assert line_run(run, epochs=2).fit()
    line_run(tmp_path / "list", data=[(X, Y)] * 4, epochs=1).fit()
    with pytest.raises(DataError, match=r"first batch .* float32 \(20, 3\).*, and is float32 \(10, 3\)"):
        line_run(tmp_path / "list", data=[(X[:10], Y[:10])] * 4, epochs=2).fit()


def test_runs_of_the_two_kinds_are_told_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line_run(tmp_path / "mine", epochs=1).fit()
    for command in (["train", "--resume"], ["generate"]):
        with pytest.raises(CheckpointError, match=r"a run of ps\.Trainer.* its fit\(\) goes on"):
            cli.app([*command, str(tmp_path / "mine")], standalone_mode=False)
    (tmp_path / "text.txt").write_text("a text of some letters, again and again. " * 20)
    sizes = ["--device", "host", "--steps", "1", "--width", "8", "--layers", "1"]
    given = ["--data", str(tmp_path / "text.txt"), "--set", "model.context=8", "--set", "model.heads=1"]
    given += ["--set", "data.tokenizer=bytes"]
    cli.app(["train", *sizes, *given, "--out", str(tmp_path / "text")], standalone_mode=False)
    with pytest.raises(CheckpointError, match="is a run of `penstock train`; take another folder"):
        line_run(tmp_path / "text").fit()
    capfd.readouterr()


# What a step does


def test_accumulated_batches_are_like_one_large_batch(tmp_path: Path) -> None:
    def rows(size: int) -> list[Any]:
        return [(X[at : at + size], Y[at : at + size]) for at in range(0, 20, size)]

    large = line_run(tmp_path / "large", data=rows(9), epochs=6)
    parts = line_run(tmp_path / "parts", data=rows(3), epochs=6, accumulate=3)
    assert large.fit()
    assert parts.fit()
    assert large.step == parts.step == 18  # 9, 9 and 2 rows in an epoch
    for run, other in zip(lines(tmp_path / "parts"), lines(tmp_path / "large"), strict=True):
        assert run["loss"] == pytest.approx(other["loss"], rel=1e-5)
    for name, array in large.model.state_dict().items():
        np.testing.assert_allclose(parts.model.state_dict()[name], array, rtol=1e-5)


def test_a_step_is_that_of_the_formula(tmp_path: Path) -> None:
    """The oracle: least squares by gradient descent with a clipped gradient, in NumPy."""
    model = nn.Linear(3, 1)
    weight, bias = (array.astype(np.float64) for array in model.state_dict().values())
    if weight.shape == (1,):
        weight, bias = bias, weight
    optimizer = optim.SGD(model.parameters(), lr=0.1, clip_norm=0.5)
    assert line_run(tmp_path / "run", model=model, optimizer=optimizer, data=[(X, Y)], epochs=10).fit()
    for _ in range(10):
        error = X @ weight.T + bias - Y
        gradients = [2 * error.T @ X / 20, 2 * error.mean(0)]
        norm = np.sqrt(sum((part**2).sum() for part in gradients))
        scale = 0.1 * min(0.5 / (norm + 1e-6), 1)
        weight, bias = weight - scale * gradients[0], bias - scale * gradients[1]
    np.testing.assert_allclose(model.weight.numpy(), weight, rtol=1e-4)
    np.testing.assert_allclose(model.bias.numpy(), bias, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_in_half_precision_train_and_resume(tmp_path: Path, dtype: str) -> None:
    def run(folder: Path, **changed: Any) -> ps.Trainer:
        ps.random.manual_seed(1)
        return line_run(folder, model=nn.Linear(3, 1).to(getattr(ps, dtype)), epochs=8, **changed)

    trainer = run(tmp_path / "whole", callbacks=[Callback()], evaluation=[(X, Y)])
    assert trainer.fit()
    assert "master.0" in trainer.optimizers[0].state_dict()
    losses = [line["loss"] for line in lines(tmp_path / "whole")]
    assert losses[-1] < losses[0] / 10
    assert any(
        np.float32(loss) != ps.asarray(loss).astype(ps.bfloat16).item() for loss in losses
    )  # in float32
    with pytest.raises(InterruptedError):
        run(tmp_path / "run", callbacks=[Failing(15)], evaluation=[(X, Y)]).fit()
    run(tmp_path / "run", callbacks=[Callback()], evaluation=[(X, Y)]).fit()
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_evaluations_are_in_evaluation_mode_and_leave_the_modes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1), nn.Dropout(0.5))
    model[2].eval()
    trainer = line_run(tmp_path / "run", model=model, evaluation=[(X, Y)], epochs=1)
    trainer.fit()
    assert [part.training for part in model] == [True, True, False]
    assert trainer.evaluate() == trainer.evaluate()
    assert trainer.evaluate()["loss"] == pytest.approx(
        np.mean((X @ model[1].weight.numpy().T + model[1].bias.numpy() - Y) ** 2), rel=1e-5
    )
    model.eval()
    line_run(tmp_path / "again", model=model, epochs=1).fit()
    assert model.training


def taken(run: Path, name: str) -> list[int]:
    return [json.loads(line)[name] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_budget_is_kept_and_gives_the_same_bits(tmp_path: Path) -> None:
    images = np.random.default_rng(3).normal(size=(64, 40)).astype(np.float32)

    def run(folder: Path, memory: int | None = None) -> ps.Trainer:
        gc.collect()
        ps.random.manual_seed(2)
        model = nn.Sequential(*[part for _ in range(12) for part in (nn.Linear(40, 40), nn.Tanh())])
        model.state_dict()  # initialized, which takes memory too
        optimizer = optim.SGD(model.parameters(), lr=0.01)
        data = [(images, images)] * 4
        return line_run(folder, model=model, optimizer=optimizer, data=data, epochs=2, memory=memory)

    free = run(tmp_path / "free")
    batch = ps.asarray(images), ps.asarray(images + 0)
    plan = ps.memory.plan(free._train_step, batch, 64, 64, True, True)  # type: ignore[arg-type]
    del batch
    free.fit()
    del free
    most, least = plan.budgets[0].budget_bytes, plan.smallest_bytes
    assert least < most
    with pytest.raises(OutOfDeviceMemory, match=r"does not fit|exceed"):
        run(tmp_path / "refused", least // 2).fit()
    assert not (tmp_path / "refused").exists()
    assert run(tmp_path / "tight", (least + most) // 2).fit()
    live, limits = (taken(tmp_path / "tight", name) for name in ("live_bytes", "limit_bytes"))
    assert max(live) <= min(limits) == max(limits) == (least + most) // 2
    assert max(taken(tmp_path / "tight", "planned_bytes")) < max(taken(tmp_path / "free", "planned_bytes"))
    assert_same(tmp_path / "tight", tmp_path / "free")
    assert ps.default_device().limit_bytes is None  # the budget is that of `fit`


def test_epochs_and_evaluations_take_no_more_and_more_memory(tmp_path: Path) -> None:
    test = ps.data.Loader(ps.data.Arrays(X, Y), batch=8)
    line_run(tmp_path / "run", epochs=12, evaluation=test, metrics={"error": F.l1_loss}).fit()
    live = taken(tmp_path / "run", "live_bytes")
    assert max(live[24:]) <= max(live[:24])


# Early stopping and schedules


def scripted(folder: Path, values: list[float], **changed: Any) -> ps.Trainer:
    """A run whose metric `score` in epoch n is the nth value."""
    model = nn.Linear(3, 1)
    model.register_buffer("at", ps.zeros((), dtype=ps.int64))
    table = ps.asarray(np.float32(values))

    class Count(Callback):
        def on_evaluation(self, trainer: ps.Trainer, metrics: Metrics) -> None:
            model.at += 1

    return line_run(
        folder,
        model=model,
        data=[(X, Y)],
        evaluation=[(X, Y)],
        metrics={"score": lambda outputs, targets: table[model.at]},
        callbacks=[Count(), *changed.pop("callbacks", [])],
        **{"epochs": len(values), **changed},
    )


def test_a_run_ends_when_nothing_gets_better(tmp_path: Path) -> None:
    values = [1.0, 3.0, 2.0, 5.0, 4.0, 4.5, 4.9, 9.0, 9.0]
    stopping = EarlyStopping("validation_score", patience=3, mode="max")
    trainer = scripted(tmp_path / "run", values, early_stopping=stopping)
    assert trainer.fit()
    assert trainer.epoch == 7
    best = trainer.best_checkpoint
    assert best is not None
    assert best.name == "step-00000004.safetensors"
    assert load(best).more["score"] == -5.0
    assert trainer.load_best() == 4
    assert np.array_equal(trainer.model.state_dict()["weight"], load(best).model["weight"])
    again = scripted(tmp_path / "run", values, early_stopping=stopping)
    assert again.fit()  # it has ended, in another process too
    assert again._how_done() == "the run has ended at step 7, by its validation_score"
    assert again.epoch == 7
    for epochs in (2, 4, 6):  # the state of early stopping is resumed
        scripted(tmp_path / "parts", values, early_stopping=stopping, epochs=epochs).fit()
    parts = scripted(tmp_path / "parts", values, early_stopping=stopping)
    assert parts.fit()
    assert parts.epoch == 7
    lowest = scripted(tmp_path / "low", values, early_stopping=EarlyStopping("validation_score", 2))
    assert lowest.fit()
    assert lowest.epoch == 3
    plain = scripted(tmp_path / "plain", values)
    assert plain.fit()
    assert plain.epoch == 9


def test_the_best_is_kept_although_checkpoints_are_seldom(tmp_path: Path) -> None:
    stopping = EarlyStopping("validation_score", patience=3)
    trainer = scripted(tmp_path / "run", [5, 4, 1, 2, 2, 2, 2], early_stopping=stopping, checkpoint_every=100)
    assert trainer.fit()
    assert trainer.load_best() == 3


def test_wrong_metrics_of_early_stopping_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match=r"'validation_x', which evaluations do not have.*validation_score"
    ):
        scripted(tmp_path / "run", [1, 2], early_stopping=EarlyStopping("validation_x")).fit()
    with pytest.raises(SettingError, match="needs `evaluation`"):
        line_run(tmp_path / "none", early_stopping=EarlyStopping())
    with pytest.raises(SettingError, match="patience is 1 or more and mode min or max; 0 and 'min'"):
        EarlyStopping(patience=0)
    with pytest.raises(CheckpointError, match="no checkpoint with an evaluation"):
        line_run(tmp_path / "fresh").load_best()


def test_schedulers_advance_with_steps_epochs_and_evaluations(tmp_path: Path) -> None:
    def rates(run: Path) -> list[float]:
        return [line["learning_rate"] for line in lines(run)]

    for every, expected in (("step", [1.0, 0.5, 0.25, 0.125]), ("epoch", [1.0, 1.0, 0.5, 0.5])):
        model = nn.Linear(3, 1)
        scheduler = lr_scheduler.ExponentialLR(optim.SGD(model.parameters(), lr=1.0, clip_norm=0.01), 0.5)
        line_run(
            tmp_path / every,
            model=model,
            optimizer=scheduler.optimizer,
            scheduler=scheduler,
            schedule_every=every,
            data=[(X, Y)] * 2,
            epochs=2,
        ).fit()
        assert rates(tmp_path / every) == expected
    model = nn.Linear(3, 1)
    plateau = lr_scheduler.ReduceLROnPlateau(optim.SGD(model.parameters(), lr=1e-9), patience=0, factor=0.5)
    plateau.eps = 0.0
    trainer = line_run(
        tmp_path / "plateau",
        model=model,
        optimizer=plateau.optimizer,
        scheduler=plateau,
        data=[(X, Y)],
        evaluation=[(X, Y)],
        epochs=4,
    )
    trainer.fit()  # nothing gets better at such a rate
    assert rates(tmp_path / "plateau") == [1e-9, 1e-9, 0.5e-9, 0.25e-9]
    assert load_last(tmp_path / "plateau")[0].more["scheduler"] == plateau.state_dict()


# Callbacks


class Told(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_start(self, trainer: ps.Trainer) -> None:
        self.events.append(f"start {trainer.step}")

    def on_step(self, trainer: ps.Trainer, metrics: Metrics) -> None:
        self.events.append(f"step {metrics.step}")

    def on_evaluation(self, trainer: ps.Trainer, metrics: Metrics) -> None:
        assert metrics.validation_loss is not None
        self.events.append(f"evaluation {metrics.step}")

    def on_epoch(self, trainer: ps.Trainer, epoch: int) -> None:
        self.events.append(f"epoch {epoch}")

    def on_checkpoint(self, trainer: ps.Trainer, path: Path) -> None:
        assert path.exists()
        self.events.append(f"checkpoint {trainer.step}")

    def on_end(self, trainer: ps.Trainer) -> None:
        self.events.append(f"end {trainer.step}")

    def state_dict(self) -> dict[str, Any]:
        return {"events": len(self.events)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.events = ["before"] * state["events"]


def test_callbacks_are_told_in_order_and_keep_their_state(tmp_path: Path) -> None:
    told = Told()
    line_run(tmp_path / "run", evaluation=[(X, Y)], epochs=2, checkpoint_every=3, callbacks=[told]).fit()
    assert told.events == [
        *("start 0", "step 1", "step 2", "step 3", "checkpoint 3"),
        *("step 4", "evaluation 4", "epoch 1", "step 5", "step 6", "checkpoint 6", "step 7"),
        *("step 8", "evaluation 8", "epoch 2", "checkpoint 8", "end 8"),
    ]
    again = Told()
    line_run(tmp_path / "run", evaluation=[(X, Y)], epochs=2, checkpoint_every=3, callbacks=[again]).fit()
    assert again.events == [*["before"] * 15, "start 8", "end 8"]
    with pytest.raises(CheckpointError, match="the state of 1 callbacks, and 2 have one"):
        line_run(tmp_path / "run", callbacks=[Told(), Told()]).fit()


class Once(Callback):
    """Fails once, and stops the run after step 8."""

    step = 6

    def on_step(self, trainer: ps.Trainer, metrics: Metrics) -> None:
        if metrics.step == self.step:
            self.step = 0
            raise InterruptedError

    def on_evaluation(self, trainer: ps.Trainer, metrics: Metrics) -> None:
        if metrics.step == 8:
            trainer.stop()


@pytest.mark.parametrize("kind", ["loader", "list"])
def test_another_fit_goes_on_from_the_last_checkpoint(tmp_path: Path, kind: str) -> None:
    batches = [(X[at : at + 5], Y[at : at + 5]) for at in range(0, 20, 5)]
    given: dict[str, Any] = {"evaluation": [(X, Y)], "data": batches if kind == "list" else None}
    line_run(tmp_path / "whole", **given).fit()
    trainer = line_run(tmp_path / "run", callbacks=[Once()], **given)
    with pytest.raises(InterruptedError):
        trainer.fit()
    assert not trainer.fit()
    trainer.load_best()
    with ps.no_grad():
        trainer.model.weight *= 0
    assert trainer.fit()
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_an_iterator_cannot_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    data = iter([(X, Y)] * 12)
    trainer = line_run(tmp_path / "run", data=data, steps=12, checkpoint_every=2, callbacks=[Once()])
    with pytest.raises(InterruptedError):
        trainer.fit()
    with pytest.raises(CheckpointError, match="a list_iterator cannot go back"):
        trainer.fit()


def test_a_state_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"self": self}

    with pytest.raises(CheckpointError, match="cannot be written as JSON: Object of type Odd"):
        line_run(tmp_path / "run", callbacks=[Odd()]).fit()


def test_a_callback_ends_a_run(tmp_path: Path) -> None:
    class Enough(Callback):
        def on_epoch(self, trainer: ps.Trainer, epoch: int) -> None:
            trainer.stop()

    trainer = line_run(tmp_path / "run", callbacks=[Enough()])
    assert not trainer.fit()
    assert trainer.epoch == 1
    assert load_last(tmp_path / "run")[0].step == 4
    assert not trainer.fit()
    assert trainer.epoch == 2


# Refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epochs": None}, "epochs or steps: give just one"),
        ({"steps": 3, "epochs": 3}, "epochs or steps: give just one"),
        ({"epochs": 0}, "epochs is 1 or more, and 0"),
        ({"epochs": float("nan")}, "epochs is an integer, and nan"),
        ({"epochs": None, "steps": "3"}, "steps is an integer, and '3'"),
        ({"accumulate": 0}, "accumulate is 1 or more"),
        ({"accumulate": 1.5}, "accumulate is an integer, and 1.5"),
        ({"evaluate_every": -1}, "evaluate_every is 1 or more"),
        ({"schedule_every": "day"}, "step or epoch, and 'day'"),
        ({"memory": "much"}, "not a size"),
        ({"metrics": {"a": accuracy}, "loss": None}, "`metrics` go with `loss`"),
        ({"metrics": {"loss": accuracy}}, "cannot have the name 'loss'"),
        ({"metrics": {"validation_x": accuracy}}, "cannot have the name 'validation_x'"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        line_run(tmp_path / "run", **changed)


@pytest.mark.parametrize("name", ["data", "evaluation"])
def test_a_batch_without_samples_is_refused(tmp_path: Path, name: str) -> None:
    trainer = line_run(tmp_path / "run", **{name: [(X[:4], Y[:4]), (X[:0], Y[:0])]})
    with pytest.raises(DataError, match=r"no samples \(float32 \(0, 3\), float32 \(0, 1\)\)"):
        trainer.fit()


def test_missing_functions_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"no loss: give `loss`, or define it with @trainer\.batch_loss"):
        line_run(tmp_path / "run", loss=None).fit()
    model = nn.Linear(3, 1)
    several = [optim.SGD([model.weight], lr=0.1), optim.SGD([model.bias], lr=0.1)]
    with pytest.raises(SettingError, match=r"several optimizers need a step .* @trainer\.train_step"):
        line_run(tmp_path / "run", model=model, optimizer=several).fit()
    trainer = line_run(tmp_path / "run", loss=None, evaluation=[(X, Y)])
    trainer.train_step(lambda x, y: F.mse_loss(trainer.model(x), y))
    with pytest.raises(SettingError, match="evaluations need a loss"):
        trainer.fit()
    with pytest.raises(SettingError, match=r"a callback is a ps\.train\.Callback, and function was given"):
        line_run(tmp_path / "run", callbacks=[lambda: None])
    with pytest.raises(SettingError, match="accumulate=1"):
        line_run(tmp_path / "run", accumulate=2).train_step(lambda x, y: x)
    with pytest.raises(SettingError, match=r"loss is a tensor with a single value, and shape \(5, 1\)"):
        line_run(tmp_path / "run", loss=lambda outputs, targets: outputs - targets).fit()
    with pytest.raises(SettingError, match="no parameters to train"):
        line_run(tmp_path / "run", model=nn.Tanh(), optimizer=several)
    assert not (tmp_path / "run").exists()  # nothing was trained


def test_a_step_of_one_s_own_is_evaluated_by_the_loss_of_a_batch(tmp_path: Path) -> None:
    trainer = line_run(tmp_path / "run", loss=None, evaluation=[(X, Y)], epochs=2)

    @trainer.train_step
    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = F.mse_loss(trainer.model(x), y)
        loss.backward()
        trainer.optimizers[0].step()
        return {"loss": loss, "rows": ps.asarray(float(x.shape[0]))}

    @trainer.batch_loss
    def loss(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.l1_loss(trainer.model(x), y), "zero": (x * 0).sum()}

    assert trainer.fit()
    last = lines(tmp_path / "run")[-1]
    assert (last["rows"], last["validation_zero"]) == (5.0, 0.0)
    error = np.abs(trainer.model(ps.asarray(X)).numpy() - Y).mean()
    assert last["validation_loss"] == pytest.approx(error, rel=1e-5)


def test_a_loss_that_is_no_number_ends_a_run_with_advice(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    trainer = line_run(tmp_path / "run", model=model, optimizer=optim.SGD(model.parameters(), lr=1e20))
    with pytest.raises(TrainingError, match=r"loss is (inf|nan) at step \d.*learning rate \(now 1e\+20\)"):
        trainer.fit()


def test_own_metrics_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    wrong = line_run(tmp_path / "run", metrics={"odd": lambda outputs, targets: outputs.mean() * np.inf})
    assert wrong.fit()
    assert "odd" not in lines(tmp_path / "run")[0]


# The report and the view


class Copies:
    """Batches of which nobody knows the number."""

    def __iter__(self) -> Any:
        return iter([(X, Y)] * 3)


def test_a_view_without_a_number_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert line_run(tmp_path / "run", data=Copies(), epochs=1, view=None).fit()
    said = capsys.readouterr().out
    assert "step 1  loss" in said
    assert "left" not in said
    console = Console(record=True, width=200, force_terminal=True, file=io.StringIO())
    assert line_run(tmp_path / "live", data=Copies(), epochs=2, view=LiveView(console)).fit()
    assert "6/?" in console.export_text()


def test_a_report_has_the_metrics_of_the_user(tmp_path: Path) -> None:
    metrics = {"mean <b>error</b>": lambda outputs, targets: ps.abs(outputs - targets).mean()}
    line_run(tmp_path / "run", metrics=metrics, evaluation=[(X, Y)]).fit()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "mean &lt;b&gt;error&lt;/b&gt;" in page
    assert "Samples per second" in page
    assert "12 of 12" in page
    assert 'id="sample"' not in page
    (tmp_path / "run" / "report.html").unlink()
    assert report_on(tmp_path / "run").read_text() == page  # also from the folder alone
    unknown = line_run(tmp_path / "unknown", data=Copies(), epochs=2)
    unknown.fit()
    assert "6 of 6" in (tmp_path / "unknown" / "report.html").read_text()


def test_the_example_in_the_docstring_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    example = doctest.DocTestParser().get_doctest(ps.Trainer.__doc__ or "", {"ps": ps, "np": np}, "", None, 0)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.slow
def test_a_type_checker_accepts_programs_of_users(tmp_path: Path) -> None:
    from mypy import api

    example = Path(__file__).parent.parent / "examples" / "trainer.py"
    program = tmp_path / "program.py"
    program.write_text(
        "import penstock as ps\n"
        "from penstock.nn import functional as F\n"
        "model = ps.nn.Linear(3, 1)\n"
        "optimizer = ps.optim.SGD(model.parameters(), lr=0.1)\n"
        "class Log(ps.train.Callback):\n"
        "    def on_step(self, trainer: ps.Trainer, metrics: ps.train.Metrics) -> None:\n"
        "        print(metrics.loss)\n"
        "def error(outputs: ps.Tensor, targets: ps.Tensor) -> ps.Tensor:\n"
        "    return (outputs - targets).abs().mean()\n"
        "trainer = ps.Trainer(model, F.mse_loss, optimizer, [(1, 2)], folder='run', epochs=2,\n"
        "    metrics={'error': error}, callbacks=[Log()], early_stopping=ps.train.EarlyStopping())\n"
        "@trainer.train_step\n"
        "def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:\n"
        "    return F.mse_loss(model(x), y)\n"
        "done: bool = trainer.fit()\n"
        "ps.Trainer(model, F.mse_loss, optimizer, [])  # line 16: no folder\n"
    )
    text, _, _ = api.run(["--strict", "--no-incremental", str(program), str(example)])
    errors = [line for line in text.splitlines() if ": error:" in line and "pictures" not in line]
    assert [line.split(":")[1] for line in errors] == ["16"], text
