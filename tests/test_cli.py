"""The command line: `penstock train` and `penstock generate`, as users type them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import COMMAND_WITH_RATES
from typer.testing import CliRunner, Result

import penstock as ps
from penstock.cli import app, training
from penstock.drivers.rates import StepRates
from penstock.errors import CheckpointError, PenstockError, SettingError
from penstock.measuring import ceilings
from penstock.nn import GPT
from penstock.train import Config
from penstock.train.planning import _Bounds, plan_step

TEXT = "the quick brown fox jumps over the lazy dog; the early bird catches the worm.\n" * 60
SETTINGS = """
[model]
context = 16
width = 16
layers = 1
heads = 2
[data]
vocabulary = 280
batch = 4
[run]
steps = 8
evaluate_every = 4
evaluate_batches = 1
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)  # which takes its time
    monkeypatch.setattr(training, "_SAMPLE", 20)
    Path("tiny.toml").write_text(SETTINGS)
    Path("text.txt").write_text(TEXT)
    default = ps.default_device()
    yield
    for device in (default, ps.use("host")):  # which the tests have given limits
        device.limit_bytes = None
    ps.use(default)


def penstock(*arguments: str) -> Result:
    """Run a command in this process; Penstock's errors are raised, as `main` finds them."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    if isinstance(result.exception, PenstockError):
        raise result.exception
    return result


def train(*arguments: str) -> Result:
    result = penstock("train", "--config", "tiny.toml", "--data", "text.txt", *arguments)
    assert result.exit_code == 0, result.output
    return result


def steps_of(run: str) -> list[int]:
    return [json.loads(line)["step"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def test_train_shows_its_steps_and_ends_with_a_sample() -> None:
    output = train(
        "--device", "host", "--steps", "6", "--seed", "3", "--memory", "64MiB", "--out", "run"
    ).stdout
    for part in (
        "text: ",
        "tokens of 280 kinds",
        "parameters in float32 on host",
        "within 64.0 MiB",
        "step 4/6  loss",
        "validation",
        "peak of 64.0 MiB",
        "a sample:",
        "penstock generate run",
    ):
        assert part in output
    config = Config().with_file(Path("run/config.toml"))
    assert config.run.device == "host"
    assert (config.run.steps, config.run.seed, config.run.memory) == (6, 3, "64MiB")
    assert config.model.width == 16
    assert config.data.path == str(Path("text.txt").absolute())
    assert steps_of("run") == [1, 2, 3, 4, 5, 6]
    names = {path.name for path in Path("run").iterdir()}
    files = {"config.toml", "metrics.jsonl", "profile.json", "report.html", "sample.txt", "tokenizer.json"}
    assert names == files | {"checkpoints", "run.lock"}
    assert "Sample" in Path("run/report.html").read_text("utf-8")


def test_without_a_folder_runs_are_numbered_by_time_and_the_last_is_resumed() -> None:
    train("--device", "host")
    (run,) = Path("runs").iterdir()
    output = penstock("train", "--resume", "--steps", "11").stdout
    assert f"run: {run}" in output
    assert steps_of(str(run)) == list(range(1, 12))
    output = penstock("train", "--resume", str(run), "--device", "host").stdout
    assert "all 11 steps are done" in output
    assert steps_of(str(run)) == list(range(1, 12))


def test_the_sources_of_python_are_the_text_if_there_is_no_other() -> None:
    Path("bytes.toml").write_text(SETTINGS + "[optimizer]\nwarmup = 1\n")
    Path("bytes.toml").write_text(
        Path("bytes.toml").read_text().replace("[data]", "[data]\ntokenizer = 'bytes'")
    )
    output = penstock(
        "train", "--device", "host", "--steps", "2", "--config", "bytes.toml", "--out", "run"
    ).stdout
    assert "text: the sources of this Python" in output
    assert "tokens of 256 kinds" in output


def test_orders_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SettingError, match="say --resume run; for a new run there say --out run"):
        penstock("train", "run")
    with pytest.raises(SettingError, match="do not go together"):
        penstock("train", "--resume", "--out", "run")
    with pytest.raises(SettingError, match="no run in runs/"):
        penstock("train", "--resume")
    with pytest.raises(CheckpointError, match="holds no run"):
        penstock("train", "--resume", "nowhere")
    with pytest.raises(SettingError, match=r"run\.steps is 1 or more, and 0"):
        penstock("train", "--steps", "0")
    with pytest.raises(PenstockError, match="no file or folder"):
        penstock("train", "--data", "nowhere")
    with pytest.raises(PenstockError, match="no device 'abacus'"):
        penstock("train", "--device", "abacus")
    assert not Path("runs").exists()
    for arguments in (["--out", ""], ["--out="], ["--data", ""], ["--model="], ["--config", ""]):
        with pytest.raises(SettingError, match=f"the path after {arguments[0]} is empty"):
            penstock("train", *arguments)
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/checkpoints/step-00000001.safetensors").touch()
    with pytest.raises(SettingError, match="run holds a run already; --resume run"):
        penstock("train", "--out", "run")


def test_a_memory_limit_that_is_too_small_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PenstockError, match=r"(?s)cannot give .* the limit set for it.*--memory") as caught:
        train("--memory", "100KiB", "--out", "run")
    assert "A smaller batch under [data]" in str(caught.value)
    ps.default_device().limit_bytes = None
    train("--out", "run2", "--device", "host")  # nothing is left behind that would be in the way


@pytest.mark.slow
def test_a_run_inside_a_budget_has_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = StepRates(2e9, {"float32": 1e10}, 3e-6, 1e10)
    monkeypatch.setattr("penstock.measuring.step_rates.step_rates", lambda device, dtypes: rates)
    train("--device", "host", "--out", "free")
    table = penstock("plan", "--config", "tiny.toml", "--device", "host", "--memory", "1KiB").stdout
    heading, columns, *rows, verdict = table.splitlines()
    assert heading.startswith("on host; ")
    assert columns.split()[0] == "budget"
    assert "nothing" in rows[0]
    assert "is too little" in verdict
    plan = plan_step(Config().with_file(Path("tiny.toml")))
    limit = (plan.smallest_bytes + plan.unlimited_bytes) // 2
    ps.default_device().pool.reset_peak()
    train("--device", "host", "--memory", str(limit), "--out", "small")
    lines = [Path(run, "metrics.jsonl").read_text().splitlines() for run in ("free", "small")]
    free, small = ([json.loads(line) for line in part] for part in lines)
    assert [row["loss"] for row in small] == [row["loss"] for row in free]
    assert max(row["peak_bytes"] for row in small) <= limit


@pytest.mark.slow
def test_a_plan_for_a_card_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = StepRates(2e11, {"float32": 1e13}, 3e-6, 1e10)
    monkeypatch.setattr("penstock.measuring.step_rates.step_rates", lambda device: rates)
    written = penstock("devices", "opencl", "--rates", "card.toml").stdout
    assert "penstock plan --device card.toml" in " ".join(written.split())
    card = Path("card.toml")
    text = re.sub(r"(?m)^(memory|max_allocation_bytes) = .*", r"\1 = 500000", card.read_text())
    card.write_text(text)
    words = ("plan", "--config", "tiny.toml", "--device", "card.toml")
    heading, columns, *_, verdict = penstock(*words).stdout.splitlines()
    assert heading.startswith("on card.toml; ")
    assert "step" in columns.split()
    assert re.search("488.3 KiB (is enough|will do).* for a step$", verdict)
    fitted = penstock(*words, "--fit", "batch").stdout
    assert "the largest batch inside 488.3 KiB:" in fitted
    with pytest.raises(SettingError, match="give only one of them"):
        penstock("devices", "--check", "--rates", "card.toml")
    with pytest.raises(SettingError, match=r"named like card\.toml"):
        penstock("devices", "opencl", "--rates", "card.txt")
    with pytest.raises(SettingError, match="and not host"):
        penstock("devices", "host", "--rates", "card.toml")


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.measuring.step_rates.step_rates", lambda device, dtypes: None)
    words = ("plan", "--config", "tiny.toml", "--device", "host", "--fit")
    result = penstock(*words, "batch", "--memory", "300KiB")
    tried = re.findall(r"batch (\d+): (fits|too large)", result.stderr)
    fitting = [int(size) for size, verdict in tried if verdict == "fits"]
    larger = [int(size) for size, verdict in tried if verdict == "too large"]
    assert max(fitting) < min(larger) <= max(fitting) + max(max(fitting) // 8, 1)
    assert f"the largest batch inside 300.0 KiB: {max(fitting)}\n" in result.stdout
    for size, verdict in tried:  # what is planned for all budgets says the same
        plan = plan_step(Config().with_file(Path("tiny.toml")).changed({"data": {"batch": int(size)}}))
        assert (plan.smallest_bytes <= 300 * 1024) == (verdict == "fits")
    with pytest.raises(SettingError, match="--fit is batch or context, and 'width'"):
        penstock(*words, "width")
    with pytest.raises(SettingError, match="not even a context of 1 fits"):
        penstock(*words, "context", "--memory", "1KiB")


def test_few_sizes_are_tried() -> None:
    """Bytes grow in proportion to the size, or by leaps."""
    assert tries(lambda size: 10 + 3 * size, 8) <= 5
    for first in (1, 16, 500, 4000):
        assert tries(lambda size: 10 + 3 * size, first) <= 6
        assert tries(lambda size: 3 * size + size * size // 100, first) <= 10
        assert tries(lambda size: 5 * size + (size > 150) * 10_000, first) <= 10
        assert tries(lambda size: 5 * size + (size > 150) * 10_000, first, leap=150) <= 5  # which is known


def tries(nbytes_of: Callable[[int], int], first: int, leap: int | None = None) -> int:
    """How many sizes are tried until the largest is known that takes no more than 1000 bytes."""
    bounds, sizes = _Bounds(1000, first, 8), list[int]()
    while (size := bounds.next_size()) is not None:
        sizes.append(size)
        growth = () if leap is None else (leap / size,)
        bounds.note(size, nbytes_of(size) <= 1000, partial(nbytes_of, size), *growth)
    largest = max(size for size in sizes if nbytes_of(size) <= 1000)
    assert any(largest < size <= largest + max(largest // 8, 1) for size in sizes)
    return len(sizes)


def test_generate_goes_on_from_a_prompt() -> None:
    train("--device", "host", "--out", "run")
    words = ("generate", "run", "--device", "host", "--prompt", "the quick", "--tokens", "12")
    first = penstock(*words, "--seed", "5").stdout
    assert first.startswith("the quick")
    assert len(first) > len("the quick\n")
    assert penstock(*words, "--seed", "5").stdout == first
    greedy = penstock(*words, "--temperature", "0").stdout
    assert penstock(*words, "--top-k", "1").stdout == greedy
    assert penstock(*words, "--top-p", "0.000001").stdout == greedy
    assert penstock("generate", "run", "--tokens", "3", "--device", "host").exit_code == 0


def test_generate_reads_the_folders_of_hugging_face() -> None:
    train("--device", "host", "--out", "run")
    ps.use("host")
    ps.random.manual_seed(1)
    GPT(280, context=16, width=16, layers=1, heads=2).save_pretrained("gpt2")
    words = ("generate", "gpt2", "--device", "host", "--tokens", "4", "--temperature", "0")
    ids = penstock(*words, "--prompt", "17 4 2").stdout.split()
    assert len(ids) == 4
    assert all(0 <= int(token) < 280 for token in ids)
    with pytest.raises(SettingError, match=r"no tokenizer.json, so a prompt is ids"):
        penstock(*words, "--prompt", "the quick")
    with pytest.raises(SettingError, match="from 0 to 279"):
        penstock(*words, "--prompt", "300")
    Path("gpt2/tokenizer.json").write_bytes(Path("run/tokenizer.json").read_bytes())
    assert penstock(*words, "--prompt", "the").stdout.startswith("the")
    Path("gpt2/generation_config.json").write_text('{"eos_token_id": "</s>"}')
    for command in ("generate", "serve"):
        with pytest.raises(SettingError, match="stop tokens are token ids, and '</s>' was given"):
            penstock(command, "gpt2", "--device", "host", *(["--port", "0"] if command == "serve" else []))
    with pytest.raises(CheckpointError, match="neither the folder of a run nor"):
        penstock("generate", "cache")


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND_WITH_RATES, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "COLUMNS": "200"}
    )


def wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    while not (path.exists() and path.stat().st_size) and process.poll() is None:
        time.sleep(0.05)


def test_ctrl_c_saves_and_ends_well() -> None:
    words = ("train", "--config", "tiny.toml", "--data", "text.txt", "--out", "run")
    process = started(*words, "--device", "host", "--steps", "1000000")
    wait_for(Path("run/metrics.jsonl"), process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopping after this step" in output
    assert "to go on: penstock train --resume run" in output
    assert errors == ""
    last = steps_of("run")[-1]
    assert f"stopped at step {last}" in output
    assert Path(f"run/checkpoints/step-{last:08}.safetensors").is_file()
    assert penstock("train", "--resume", "run", "--steps", str(last + 2)).exit_code == 0
    assert steps_of("run") == list(range(1, last + 3))


def test_text_is_streamed_as_it_comes_and_a_closed_pipe_is_no_drama() -> None:
    train("--device", "host", "--out", "run")
    process = started("generate", "run", "--device", "host", "--tokens", "1000000", "--prompt", "the")
    assert process.stdout is not None
    assert process.stdout.read(6).startswith("the")  # long before the last token
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used() -> None:
    train("--device", "host", "--out", "run")
    path = Path("run/checkpoints/step-00000008.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    process = started("train", "--resume", "run")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "step-00000008.safetensors is damaged" in errors
    assert "step 5/8" in output
    assert steps_of("run") == list(range(1, 9))
