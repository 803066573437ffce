"""Runs in parallel, interrupted, and ended before their first step: folders, locks, signals, checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import penstock as ps
from penstock import cli
from penstock.cli import training
from penstock.data import DataError
from penstock.data.text import silent
from penstock.errors import OutOfDeviceMemory, PenstockError, SettingError
from penstock.measuring import ceilings
from penstock.train import Config, Metrics, TextTrainer, load_last
from penstock.train import checkpoint as checkpoints
from penstock.train.folder import RunFolder, RunInUse

TEXT = "the quick brown fox jumps over the lazy dog; the early bird catches the worm.\n" * 20
TREE: dict[str, dict[str, Any]] = {
    "model": {"context": 8, "width": 8, "layers": 1, "heads": 2, "dropout": 0.1},
    "data": {"tokenizer": "characters", "batch": 2, "path": "text.txt"},
    "optimizer": {"warmup": 2},
    "run": {"steps": 12, "evaluate_every": 5, "evaluate_batches": 1},
}


class View:
    """Records notes, and calls a function at a step."""

    def __init__(self, at: int = 0, call: Any = None) -> None:
        self.notes: list[str] = []
        self._at, self._call = at, call

    def phase(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[int], None]]:
        return silent(name, total)

    def start(self, done: int, steps: int | None, seconds: float) -> None: ...

    def show(self, metrics: Metrics) -> None:
        if metrics.step == self._at:
            self._call()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)  # which takes its time
    monkeypatch.setattr(training, "_SAMPLE", 3)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    default = ps.default_device()
    ps.use("host")  # which compiles nothing
    yield
    default.limit_bytes = None
    ps.use(default)


@pytest.fixture
def config() -> Config:
    config = Config().changed(TREE)
    Path("c.toml").write_text(config.toml())
    return config


def penstock(*arguments: str) -> Result:
    """Run a command in this process; Penstock's errors are raised, as `main` finds them."""
    result = CliRunner().invoke(cli.app, list(arguments))
    if isinstance(result.exception, PenstockError):
        raise result.exception
    return result


def measured(run: Path) -> list[tuple[Any, ...]]:
    """What must be the same in two runs: all but times and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line.get("validation_loss")) for line in lines]


# Folders


def test_folders_taken_at_the_same_time_are_not_the_same(tmp_path: Path) -> None:
    taken: list[RunFolder] = []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        taken.append(RunFolder(tmp_path / "runs" / "now", numbered=True))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {folder.path.name for folder in taken}
    assert names == {"now"} | {f"now-{number}" for number in range(2, 9)}
    for folder in taken:
        folder.release()


@pytest.mark.usefixtures("config")
def test_runs_of_the_same_second_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.time, "strftime", lambda text: "2026-01-31-120000")
    for _ in range(2):
        assert penstock("train", "--config", "c.toml", "--steps", "2").exit_code == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "2026-01-31-120000",
        "2026-01-31-120000-2",
    ]


def test_a_folder_in_use_is_refused_by_name(config: Config) -> None:
    first = TextTrainer(config, Path("run"), View())
    with pytest.raises(RunInUse, match=f"run is in use by process {os.getpid()} on .*, since 20"):
        TextTrainer(config, Path("run"), View())
    assert first.fit()
    TextTrainer(config.changed({"run": {"steps": 13}}), Path("run"), View(), load_last(Path("run"))[0]).fit()
    assert [step for step, *_ in measured(Path("run"))] == list(range(1, 14))


def test_what_the_lock_says_is_not_believed(tmp_path: Path) -> None:
    held = RunFolder(tmp_path / "run")
    for said in (b"", b"[" * 5000, b'{"process": "x"}', b'{"process": 1}', b"\xff", b"7"):
        (tmp_path / "run" / "run.lock").write_bytes(said)
        with pytest.raises(RunInUse, match="in use by another process"):
            RunFolder(tmp_path / "run")
    held.release()
    held.release()
    RunFolder(tmp_path / "run").release()


# Signals, in a process of its own


def test_sigterm_saves_and_a_second_process_is_kept_out(config: Config) -> None:
    words = "train --config c.toml --device host --steps 1000000 --out run"
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = Path("run/metrics.jsonl")
    while not (path.exists() and path.stat().st_size) and process.poll() is None:
        time.sleep(0.05)
    with pytest.raises(RunInUse, match=f"run is in use by process {process.pid} on"):
        TextTrainer(config, Path("run"), View())
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "to go on: penstock train --resume run" in output
    last = measured(Path("run"))[-1][0]
    assert load_last(Path("run"))[0].step == last
    assert penstock("train", "--resume", "run", "--steps", str(last + 2)).exit_code == 0
    assert [step for step, *_ in measured(Path("run"))] == list(range(1, last + 3))


@pytest.mark.slow("2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_handlers_come_back(config: Config, number: signal.Signals) -> None:
    TextTrainer(config, Path("whole"), View()).fit()
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    trainer = TextTrainer(config, Path("run"), View(7, lambda: signal.raise_signal(number)))
    assert not trainer.fit()
    assert trainer.stopped_by is number
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert load_last(Path("run"))[0].step == 8
    checkpoint = load_last(Path("run"))[0]
    assert TextTrainer(checkpoint.config, Path("run"), View(), checkpoint).fit()
    assert measured(Path("run")) == measured(Path("whole"))


# Checkpoints


@pytest.mark.slow("7", "50")
@pytest.mark.parametrize(("every", "steps"), [(0, [5, 10, 12]), (4, [4, 8, 12]), (7, [7, 12]), (50, [12])])
def test_checkpoints_come_as_often_as_asked_and_change_nothing(
    config: Config, every: int, steps: list[int]
) -> None:
    TextTrainer(config, Path("whole"), View()).fit()
    TextTrainer(config.changed({"run": {"checkpoint_every": every}}), Path("run"), View()).fit()
    assert measured(Path("run")) == measured(Path("whole"))
    assert [checkpoints.load(path).step for path in checkpoints.checkpoint_files(Path("run"))] == steps


def test_checkpoint_every_is_an_option_and_is_checked(config: Config) -> None:
    assert penstock("train", "--config", "c.toml", "--out", "run", "--checkpoint-every", "6").exit_code == 0
    assert [path.stem for path in checkpoints.checkpoint_files(Path("run"))] == [
        "step-00000006",
        "step-00000012",
    ]
    assert load_last(Path("run"))[0].config.run.checkpoint_every == 6
    with pytest.raises(SettingError, match=r"run\.checkpoint_every is 0 or more, and -1"):
        config.changed({"run": {"checkpoint_every": -1}})


def test_a_run_without_a_checkpoint_is_resumed_from_its_start(config: Config) -> None:
    TextTrainer(config, Path("whole"), View()).fit()

    def die() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        TextTrainer(config, Path("runs/dead"), View(3, die)).fit()
    assert checkpoints.checkpoint_files(Path("runs/dead")) == []
    result = penstock("train", "--resume")
    assert result.exit_code == 0
    assert "runs/dead has no checkpoint yet; the run starts from its first step" in result.stderr
    assert measured(Path("runs/dead")) == measured(Path("whole"))


def test_float16_that_always_overflows_is_told(config: Config) -> None:
    view = View()
    trainer = TextTrainer(config.changed({"model": {"precision": "float16"}}), Path("run"), view)
    state = trainer.optimizers[0].state_dict()
    trainer.optimizers[0].load_state_dict(state | {"scale": np.float32(1)})
    trainer._save(None)
    assert any("the gradients overflow float16" in note for note in view.notes)


# What never began leaves nothing


def test_a_run_that_did_no_step_leaves_no_folder(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        TextTrainer(config.changed({"data": {"path": "nowhere"}}), Path("runs/a"), View())
    with pytest.raises(DataError, match="need 2001 tokens"):
        TextTrainer(config.changed({"model": {"context": 2000}}), Path("runs/a"), View()).fit()
    try:
        ps.default_device().limit_bytes = "4KiB"
        with pytest.raises(OutOfDeviceMemory, match=r"4\.0 KiB"):
            TextTrainer(config, Path("runs/a"), View()).fit()
    finally:
        ps.default_device().limit_bytes = None

    def interrupted(self: TextTrainer, batches: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TextTrainer, "_advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TextTrainer(config, Path("runs/a"), View()).fit()
    assert not Path("runs/a").exists()
    Path("mine").mkdir()
    Path("mine/notes").write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        TextTrainer(config, Path("mine"), View()).fit()
    with pytest.raises(DataError, match="no file or folder"):
        TextTrainer(config.changed({"data": {"path": "nowhere"}}), Path("mine"), View())
    assert [path.name for path in Path("mine").iterdir()] == ["notes"]


def test_a_second_run_that_fails_leaves_the_first(config: Config) -> None:
    TextTrainer(config, Path("run"), View()).fit()
    kept = [path for path in Path("run").rglob("*") if path.is_file() and path.name != "run.lock"]
    before = {path: path.read_bytes() for path in kept}
    with pytest.raises(DataError, match="no file or folder"):
        TextTrainer(
            config.changed({"data": {"path": "nowhere"}}), Path("run"), View(), load_last(Path("run"))[0]
        )
    assert {path: path.read_bytes() for path in before} == before


def test_leftovers_of_a_killed_run_are_removed(config: Config) -> None:
    TextTrainer(config, Path("run"), View()).fit()
    left = [Path("run/report.html.1-0123abcd.part"), Path("run/checkpoints/x.1-0123abcd.part")]
    for path in left:
        path.touch()
        os.utime(path, (0, 0))
    RunFolder(Path("run")).release()
    assert not any(path.exists() for path in left)


# Reports


def test_a_report_that_cannot_be_written_ends_nothing(config: Config) -> None:
    Path("run/report.html").mkdir(parents=True)  # so that no file can take its name
    Path("run/report.html/full").touch()
    view = View()
    trainer = TextTrainer(config, Path("run"), view)
    assert trainer.fit()
    assert not trainer.report("a sample")
    assert load_last(Path("run"))[0].step == 12
    assert any("there is no new report: " in note and "report.html" in note for note in view.notes)
    result = penstock("train", "--resume", "run", "--steps", "13")
    assert result.exit_code == 0
    assert "report: " not in result.stdout.splitlines()[-1]
