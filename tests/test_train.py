"""Training runs: settings, checkpoints, the loop, and what they write."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

import penstock as ps
from penstock.collectives.communicator import Traffic
from penstock.data.text import silent
from penstock.errors import CheckpointError, SettingError
from penstock.measuring import ceilings
from penstock.train import (
    Checkpoint,
    Config,
    Metrics,
    TextTrainer,
    TrainingError,
    load,
    load_last,
    load_model,
)
from penstock.train import checkpoint as checkpoints
from penstock.train.loading import stream_text
from penstock.train.metrics import Curve, MetricsLog, RankTraffic, is_of_ranks
from penstock.train.view import LiveView, PlainView

TEXT = "the quick brown fox jumps over the lazy dog; the early bird catches the worm.\n" * 60
TREE: dict[str, dict[str, Any]] = {
    "model": {"context": 16, "width": 16, "layers": 1, "heads": 2, "dropout": 0.1},
    "data": {"tokenizer": "characters", "batch": 4},
    "optimizer": {"learning_rate": 0.01, "warmup": 2},
    "run": {"steps": 20, "evaluate_every": 5, "evaluate_batches": 2},
}


class Silent:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.losses: list[float] = []

    def phase(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[int], None]]:
        return silent(name, total)

    def start(self, done: int, steps: int | None, seconds: float) -> None: ...

    def show(self, metrics: Metrics) -> None:
        self.losses.append(metrics.loss)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def _own_cache_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    default = ps.default_device()
    ps.use("host")  # which compiles nothing
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)  # which takes its time
    yield
    ps.use(default)


@pytest.fixture
def default_device() -> None:
    ps.use(ps.devices()[0])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "text.txt").write_text(TEXT)
    return Config().changed(TREE).changed({"data": {"path": str(tmp_path / "text.txt")}})


def measured(run: Path) -> list[tuple[Any, ...]]:
    """What must be the same in two runs: all but times and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], line["loss"], line["learning_rate"], line.get("validation_loss")) for line in lines
    ]


def resume(run: Path, view: Silent | None = None) -> TextTrainer:
    checkpoint, _ = load_last(run)
    return TextTrainer(checkpoint.config, run, view or Silent(), checkpoint)


# Settings


def test_settings_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    config = Config().changed({**TREE, "data": {"path": 'a "quoted"\\ ä folder'}, "run": {"memory": "2GiB"}})
    (tmp_path / "c.toml").write_text(config.toml(), "utf-8")
    assert Config().with_file(tmp_path / "c.toml") == config
    assert Config().changed(json.loads(json.dumps(config.tree()))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modell]\nwidth = 3", "no section 'modell'; the sections are model, data, optimizer, run"),
        ("[model]\nwidht = 3", "no key 'widht'; its keys are name, context, width"),
        ("model = 3", r"\[model\] is a section"),
        ("[model]\nwidth = '3'", "model.width is an integer, and '3'"),
        ("[model]\nwidth = true", "model.width is an integer"),
        ("[optimizer]\nlearning_rate = nan", "learning_rate is a number"),
        ("[model]\nwidth = 10\nheads = 4", "model.width is a multiple of heads"),
        ("[model]\nprecision = 'int8'", "float32 or float16 or bfloat16"),
        ("[model]\ndropout = 1", "model.dropout is from 0"),
        ("[data]\nvocabulary = 3", "256 or more"),
        ("[data]\ntokenizer = 'words'", "bpe or bytes or characters"),
        ("[optimizer]\nclip_norm = 0", "more than 0"),
        ("[optimizer]\nbeta1 = 1.0", "optimizer.beta1"),
        ("[run]\nsteps = 0", "run.steps is 1 or more"),
        ("[run]\nmemory = 'much'", "not a size"),
        ("[run", "is not TOML"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(SettingError, match=message):
        Config().with_file(tmp_path / "c.toml")


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none\.toml cannot be read"):
        Config().with_file(tmp_path / "none.toml")


# The loop


@pytest.mark.slow("-1")
@pytest.mark.parametrize("number", [0, -1])
def test_a_run_learns_and_writes_its_folder(tmp_path: Path, config: Config, number: int) -> None:
    ps.use(ps.devices()[number])
    config = config.changed({"run": {"steps": 60}})
    view = Silent()
    trainer = TextTrainer(config, tmp_path / "run", view)
    assert trainer.fit()
    assert np.mean(view.losses[-5:]) < 0.8 * np.mean(view.losses[:5])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert [line["step"] for line in lines if "validation_loss" in line] == list(range(5, 61, 5))
    assert lines[-1]["validation_loss"] < lines[4]["validation_loss"]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["seconds"] > lines[0]["seconds"] > 0
    assert lines[1]["learning_rate"] == pytest.approx(0.01 * 2 / 3)
    assert Config().with_file(tmp_path / "run" / "config.toml") == config
    model, tokenizer = load_model(tmp_path / "run")
    assert tokenizer is not None
    pieces = list(stream_text(model, tokenizer, tokenizer.encode("the "), 10, seed=1))
    assert len("".join(pieces)) == 10
    assert len(pieces) >= 10
    assert pieces == list(stream_text(trainer.model, tokenizer, tokenizer.encode("the "), 10, seed=1))


@pytest.mark.slow
@pytest.mark.usefixtures("default_device")
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, config: Config) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    TextTrainer(config, whole, Silent()).fit()
    script = f"""
        import os, signal
        from pathlib import Path
        from penstock.train import Config, TextTrainer
        from test_train import Silent

        class Killer(Silent):
            def show(self, metrics):
                if metrics.step == 13:
                    os.kill(os.getpid(), signal.SIGKILL)

        config = Config().with_file(Path({str(whole / "config.toml")!r}))
        TextTrainer(config, Path({str(killed)!r}), Killer()).fit()
    """
    place = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=place, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert len(measured(killed)) == 13
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 14, "lo')  # a kill can come inside a line
    assert resume(killed).fit()
    assert measured(killed) == measured(whole)
    assert measured(whole)[-1][0] == 20


@pytest.mark.usefixtures("default_device")
def test_a_stop_at_any_step_resumes_to_the_same_bits(tmp_path: Path, config: Config) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    TextTrainer(config, whole, Silent()).fit()

    class Interrupter(Silent):
        def show(self, metrics: Metrics) -> None:
            if metrics.step == 6:
                signal.raise_signal(signal.SIGINT)

    view = Interrupter()
    before = signal.getsignal(signal.SIGINT)
    trainer = TextTrainer(config, stopped, view)
    assert not trainer.fit()
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this step" in view.notes[-1]
    assert trainer.step == 7
    assert checkpoints.checkpoint_files(stopped)[-1].name == "step-00000007.safetensors"
    assert resume(stopped).fit()
    assert measured(stopped) == measured(whole)


def test_a_second_interrupt_ends_at_once(tmp_path: Path, config: Config) -> None:
    class Impatient(Silent):
        def show(self, metrics: Metrics) -> None:
            if metrics.step == 7:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        TextTrainer(config, tmp_path / "run", Impatient()).fit()
    assert load_last(tmp_path / "run")[0].step == 5


@pytest.mark.slow
def test_accumulated_batches_are_like_one_large_batch(tmp_path: Path, config: Config) -> None:
    config = config.changed({"model": {"dropout": 0.0}, "run": {"steps": 4}, "data": {"validation": 0.0}})
    TextTrainer(config.changed({"data": {"batch": 6}}), tmp_path / "large", Silent()).fit()
    parts = config.changed({"data": {"batch": 2}, "optimizer": {"accumulate": 3}})
    TextTrainer(parts, tmp_path / "parts", Silent()).fit()
    large, small = measured(tmp_path / "large"), measured(tmp_path / "parts")
    np.testing.assert_allclose([item[1] for item in small], [item[1] for item in large], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "number"), [("float16", -1), ("bfloat16", 0)])
def test_half_precision_trains_and_resumes(
    tmp_path: Path, config: Config, precision: str, number: int
) -> None:
    ps.use(ps.devices()[number])
    config = config.changed({"model": {"precision": precision}, "run": {"steps": 20}})
    view = Silent()
    TextTrainer(config, tmp_path / "run", view).fit()
    assert np.mean(view.losses[-3:]) < np.mean(view.losses[:3])
    before = measured(tmp_path / "run")
    checkpoints.checkpoint_files(tmp_path / "run")[-1].unlink()
    trainer = resume(tmp_path / "run")
    assert trainer.step == 15
    assert str(trainer.model.tokens.weight.dtype) == precision
    trainer.fit()
    assert measured(tmp_path / "run") == before
    assert "".join(stream_text(trainer.model, trainer.tokenizer, trainer.prompt(), 3, temperature=0))


def test_an_infinite_loss_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    trainer = TextTrainer(config, run, Silent())
    weight = trainer.model.norm.weight

    def spoil(metrics: Metrics) -> None:
        if metrics.step == 8:
            with ps.no_grad():
                weight.__imul__(math.nan)

    trainer._view.show = spoil  # type: ignore[method-assign]
    with pytest.raises(
        TrainingError, match=r"loss is nan at step 10.*step-00000005.*learning_rate \(now 0.01\)"
    ):
        trainer.fit()
    assert [case[0] for case in measured(run)] == list(range(1, 10))
    assert load_last(run)[0].step == 5
    assert resume(run).fit()


def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path, config: Config) -> None:
    trainer = TextTrainer(config, tmp_path / "run", Silent())
    with ps.no_grad():
        trainer.model.norm.bias.__imul__(math.inf)
    with pytest.raises(TrainingError, match=r"norm\.bias.*There is no checkpoint yet"):
        trainer._save(None)
    assert checkpoints.checkpoint_files(tmp_path / "run") == []


def test_another_text_is_told_and_another_model_refused(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    TextTrainer(config, run, Silent()).fit()
    checkpoint, _ = load_last(run)
    (tmp_path / "text.txt").write_text(TEXT[:-100])
    view = Silent()
    TextTrainer(config.changed({"run": {"steps": 22}}), run, view, checkpoint).fit()
    assert any("not the one that the run began with" in note for note in view.notes)
    assert len(measured(run)) == 22
    wider = config.changed({"model": {"width": 32}})
    with pytest.raises(CheckpointError, match=r"step 20 .* does not fit the settings"):
        TextTrainer(wider, run, Silent(), checkpoint)


def test_a_text_too_short_for_validation_is_told(tmp_path: Path, config: Config) -> None:
    (tmp_path / "text.txt").write_text("a tiny text, but enough of it for one batch or two")
    view = Silent()
    assert TextTrainer(config.changed({"run": {"steps": 5}}), tmp_path / "run", view).fit()
    assert any("too short for validation" in note for note in view.notes)
    assert [case[3] for case in measured(tmp_path / "run")] == [None] * 5


# Checkpoints


@pytest.fixture
def checkpoint(config: Config) -> Checkpoint:
    return Checkpoint(
        step=10,
        config=config,
        model={"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)},
        optimizer={"lr": np.array(0.5), "mean.0": np.zeros((2, 3), np.float32)},
        generator={"seed": 1 << 63, "counter": 2, "captured": 3},
        position=40,
        text="key",
        seconds=1.5,
        validation_loss=2.0,
    )


def test_a_checkpoint_is_read_back_as_it_was_written(tmp_path: Path, checkpoint: Checkpoint) -> None:
    result = load(checkpoints.save(tmp_path, checkpoint))
    same = replace(checkpoint, model=result.model, optimizer=result.optimizer)
    assert result == same
    for mine, other in ((checkpoint.model, result.model), (checkpoint.optimizer, result.optimizer)):
        assert set(mine) == set(other)
        assert all(mine[name].shape == other[name].shape for name in mine)
        assert all((mine[name] == other[name]).all() for name in mine)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010.safetensors"]


def test_the_last_three_and_the_best_are_kept(tmp_path: Path, checkpoint: Checkpoint) -> None:
    for step, loss in [(1, 5.0), (2, 3.0), (3, 4.0), (4, 4.0), (5, None), (6, 3.5), (7, 9.0)]:
        checkpoints.save(tmp_path, replace(checkpoint, step=step, validation_loss=loss))
    assert [load(path).step for path in checkpoints.checkpoint_files(tmp_path)] == [2, 5, 6, 7]


def test_every_damaged_byte_is_noticed(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = checkpoints.save(tmp_path, checkpoint)
    sound = path.read_bytes()
    rng = np.random.default_rng(1)
    for length in {0, 1, 7, 8, 9, *rng.integers(0, len(sound), 30).tolist(), len(sound) - 1}:
        path.write_bytes(sound[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            load(path)
    used = len(sound.rstrip(b" "))  # padding of the header may be anything
    for at in {*range(12), *rng.integers(0, used, 300).tolist()}:
        changed = bytearray(sound)
        changed[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        try:
            result = load(path)
        except CheckpointError:
            continue
        # What changed was white space, or the order of keys: nothing that is read.
        assert replace(result, model={}, optimizer={}) == replace(checkpoint, model={}, optimizer={})
        assert (result.model["a.weight"] == checkpoint.model["a.weight"]).all()


def test_damaged_and_foreign_checkpoints_are_passed_over(tmp_path: Path, checkpoint: Checkpoint) -> None:
    checkpoints.save(tmp_path, checkpoint)
    folder = tmp_path / "checkpoints"
    sound = checkpoints.checkpoint_files(tmp_path)[0].read_bytes()
    (folder / "step-00000011.safetensors").write_bytes(sound[:-5])
    save_file({"x": np.zeros(3)}, folder / "step-00000012.safetensors")
    (folder / "step-00000013.safetensors").mkdir()
    (folder / "step-00000014.safetensors").write_bytes(b"")
    (folder / "step-00000015.safetensors.1-2.part").write_bytes(sound[:100])
    result, problems = load_last(tmp_path)
    assert result.step == 10
    assert len(problems) == 4
    assert "its format is None" in problems[2]
    (folder / "step-00000010.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        load_last(tmp_path)
    with pytest.raises(CheckpointError, match="holds no run with a checkpoint"):
        load_last(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load(tmp_path / "none.safetensors")


def test_settings_of_another_version_are_named(tmp_path: Path, checkpoint: Checkpoint) -> None:
    class Later(Config):
        def tree(self) -> dict[str, dict[str, Any]]:
            return {**super().tree(), "cluster": {"nodes": 3}}

    path = checkpoints.save(tmp_path, replace(checkpoint, config=Later()))
    with pytest.raises(CheckpointError, match=r"another version of Penstock: .* no section 'cluster'"):
        load(path)


def test_a_full_disk_is_told_and_the_last_good_checkpoint_stays(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"the disk is full .* There is no checkpoint before it"):
        checkpoints.save(tmp_path, checkpoint)
    monkeypatch.undo()
    checkpoints.save(tmp_path, checkpoint)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"disk is full.*make room.*good checkpoint is .*step-00000010"):
        checkpoints.save(tmp_path, replace(checkpoint, step=11))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010.safetensors"]
    assert load_last(tmp_path)[0].step == 10


def test_a_write_that_ends_half_way_leaves_nothing(tmp_path: Path, checkpoint: Checkpoint) -> None:
    resource = pytest.importorskip("resource")  # which Windows lacks
    checkpoints.save(tmp_path, checkpoint)
    large = replace(checkpoint, step=11, model={"a": np.zeros(1 << 16, np.float32)})
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            checkpoints.save(tmp_path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010.safetensors"]
    checkpoints.save(tmp_path, large)
    assert load_last(tmp_path)[0].step == 11


def test_a_full_disk_ends_a_run_with_its_checkpoints(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = TextTrainer(config, tmp_path / "run", Silent())
    save = checkpoints.save

    def saved(run: Path, checkpoint: Checkpoint) -> Path:
        if checkpoint.step > 5:
            raise CheckpointError("the disk is full")
        return save(run, checkpoint)

    monkeypatch.setattr(checkpoints, "save", saved)
    with pytest.raises(CheckpointError, match="full"):
        trainer.fit()
    assert load_last(tmp_path / "run")[0].step == 5
    assert len(measured(tmp_path / "run")) == 10


# Metrics and views


def metrics(step: int, **changed: Any) -> Metrics:
    values = {"loss": 3.0, "learning_rate": 1e-3, "seconds": step * 0.5, "tokens_per_second": 100.0}
    values |= {"data_wait": 0.01, "device_wait": 0.9, "live_bytes": 1 << 20, "pooled_bytes": 1 << 10}
    values |= {"planned_bytes": 1 << 19}
    return Metrics(step, **{**values, "peak_bytes": 2 << 20, "limit_bytes": None, "hit_rate": 0.5, **changed})


def test_metrics_that_no_number_can_be_are_not_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    with pytest.raises(ValueError, match="JSON"):
        log.add(metrics(1, loss=math.nan))


def test_curves_stay_short_and_keep_the_mean() -> None:
    curve = Curve()
    for step in range(1 << 15):
        curve.add(step, float(step % 7))
    assert 200 <= len(curve.points) <= 500
    assert np.mean([value for _, value in curve.points]) == pytest.approx(3, abs=0.05)
    assert [step for step, _ in curve.points] == sorted(step for step, _ in curve.points)
    curve.add(1 << 15, 9.0)
    assert curve.shown() == [*curve.points, (1 << 15, 9.0)]  # the last value is never left out


def test_views_show_what_ranks_exchanged() -> None:
    ranks = (Traffic(4, 1 << 20, 0.1, 0.02), Traffic(4, 2 << 20, 0.1, 0.06))
    several = replace(metrics(1), traffic=RankTraffic(ranks))
    named = several.named()
    assert {name: named[name] for name in named if is_of_ranks(name)} == {
        "longest_rank_wait": 0.06,
        "shortest_rank_wait": 0.02,
        "sent_bytes": 3 << 20,
        "hidden_exchange": pytest.approx(0.6),
        "rank_0_wait": 0.02,
        "rank_0_sent": 1 << 20,
        "rank_0_hidden": pytest.approx(0.8),
        "rank_1_wait": 0.06,
        "rank_1_sent": 2 << 20,
        "rank_1_hidden": pytest.approx(0.4),
    }
    assert len(RankTraffic(ranks * 16).named()) == 4
    summary = "2 ranks waited 20 to 60 ms (rank 0 the least), 3.0 MiB sent, 60% of exchanges hidden"
    for view, parts in (
        (PlainView, [summary]),
        (LiveView, [summary, "rank 0: waited 20.0 ms, 1.0 MiB sent, 80% hidden"]),
    ):
        console = Console(record=True, width=200, force_terminal=view is LiveView, file=io.StringIO())
        shown = view(console)
        shown.start(0, 1, 0.0)
        shown.show(several)
        shown.stop()
        text = console.export_text()
        assert all(part in text for part in parts)


@pytest.mark.parametrize("view", [PlainView, LiveView])
def test_views_show_what_was_measured(view: type[PlainView] | type[LiveView]) -> None:
    console = Console(record=True, width=200, force_terminal=view is LiveView, file=open(os.devnull, "w"))  # noqa: SIM115
    shown = view(console)
    shown.start(0, 40, 0.0)
    for step in range(1, 41):
        validation = 2.5 if step % 10 == 0 else None
        shown.show(metrics(step, limit_bytes=4 << 20, validation_loss=validation))
    shown.note("a [note]")
    shown.stop()
    shown.stop()
    text = console.export_text()
    for part in (
        "3.0000",
        "validation 2.5000",
        "100 tokens/s",
        "1.0 MiB live, 1.0 KiB pooled, 2.0 MiB peak of 4.0 MiB",
    ):
        assert part in text
    assert "waits 1% for data, 90% for the device" in text
    assert "a [note]" in text
    if view is PlainView:
        assert text.count("step") == 21  # the first, and every second step
        assert "0:15 left" in text
    else:
        assert "40/40" in text
        assert "50% of requests" in text
    console.file.close()
