"""The manners of the command line: help, versions, settings, answers for programs, progress, and caches."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import penstock as ps
from penstock import terminal
from penstock.cli import app
from penstock.config import Settings
from penstock.drivers.host import HostDriver
from penstock.drivers.rates import StepRates
from penstock.errors import PenstockError, SettingError
from penstock.measuring import ceilings
from penstock.terminal import phase, show, table
from penstock.train import Config

COMMANDS = (
    "devices",
    "train",
    "plan",
    "config",
    "generate",
    "chat",
    "serve",
    "eval",
    "report",
    "bench",
    "cache",
    "advise",
)


def penstock(*arguments: str, columns: int = 80) -> str:
    """What a command prints to standard output; Penstock's errors are raised."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    if isinstance(result.exception, PenstockError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*arguments: str) -> Any:
    """What a command answers to a program."""
    return json.loads(penstock(*arguments, "--json"))


def run(*command: str, **environment: str) -> str:
    """The output of a process that ends well."""
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _same_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)  # which takes its time
    default = ps.default_device()
    yield
    ps.use(default)


# Help and versions


def test_the_version() -> None:
    assert penstock("--version") == f"penstock {ps.__version__}\n"


def test_the_package_runs_as_the_command() -> None:
    assert run(sys.executable, "-m", "penstock", "--version") == f"penstock {ps.__version__}\n"


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in COMMANDS)], ids=lambda command: " ".join(command)
)
def test_help_fits_80_columns_and_has_a_short_form(command: tuple[str, ...]) -> None:
    text = penstock(*command, "-h")
    assert text == penstock(*command, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_every_command_is_listed_with_a_whole_sentence() -> None:
    text = penstock("-h")
    for name in COMMANDS:
        (line,) = re.findall(rf"^  {name} +(.*)$", text, re.MULTILINE)
        assert line.endswith(".")
        assert not line.endswith("...")


def test_a_shell_can_complete_commands_and_options() -> None:
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    words = run(sys.executable, "-m", "penstock", COMP_WORDS="penstock ca", **asked)
    assert words.split() == ["cache"]
    asked["COMP_CWORD"] = "2"
    words = run(sys.executable, "-m", "penstock", COMP_WORDS="penstock train --acc", **asked)
    assert words.split() == ["--accumulate"]


# Settings


def test_config_prints_a_file_that_means_the_same() -> None:
    text = penstock("config")
    assert Config().changed(tomllib.loads(text)) == Config()
    for line in text.splitlines():
        assert line.startswith(("[", "#")) or not line or "  # " in line  # each has its explanation


def test_config_explains_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_COMMANDS", "7")
    text = penstock("config")
    assert "# PENSTOCK_MAX_COMMANDS=7\n" in text
    assert answer("config")["environment"]["PENSTOCK_MAX_COMMANDS"] == 7
    assert len(answer("config")["environment"]) == len(Settings.__dataclass_fields__)


def test_options_come_before_set_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[data]\nbatch = 2\n[model]\nwidth = 32\nlayers = 2\n")
    settings = answer(
        "config", "--config", str(file), "--set", "data.batch=3", "--set", "model.width=64", "--batch", "5"
    )
    assert settings["data"]["batch"] == 5
    assert settings["model"]["width"] == 64
    assert settings["model"]["layers"] == 2


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("optimizer.clip_norm=2", 2.0),
        ("data.tokenizer=bytes", "bytes"),
        ('data.tokenizer="bytes"', "bytes"),
        ("run.memory=2GiB", "2GiB"),
        ("data.path=a = b", "a = b"),
    ],
)
def test_set_takes_any_setting(assignment: str, value: object) -> None:
    section, key = assignment.partition("=")[0].split(".")
    assert answer("config", "--set", assignment)[section][key] == value


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("batch=8", "section.key=value"),
        ("data.batch", "section.key=value"),
        ("data.size=8", "has no key 'size'; its keys are path, "),
        ("dat.batch=8", "no section 'dat'; the sections are model, data"),
        ("data.batch=eight", "data.batch is an integer, and 'eight' was given"),
        ("data.batch=0", "data.batch is 1 or more, and 0 was given"),
    ],
)
def test_what_cannot_be_set_is_told(assignment: str, message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        penstock("config", "--set", assignment)


def test_a_run_has_the_settings_of_the_command_line(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    folder = tmp_path / "run"
    sizes = "--width 16 --layers 1 --heads 2 --context 16 --batch 2 --tokenizer bytes"
    others = "--device host --steps 2 --lr 0.5 --set run.evaluate_batches=1"
    penstock("train", "--data", str(text), "--out", str(folder), *sizes.split(), *others.split())
    written = tomllib.loads((folder / "config.toml").read_text())
    assert written["model"] | {"width": 16, "layers": 1, "context": 16} == written["model"]
    assert written["optimizer"]["learning_rate"] == 0.5
    assert written["run"]["evaluate_batches"] == 1
    assert written["data"]["path"] == str(text)


# Answers for programs


def test_devices_for_a_program() -> None:
    devices = answer("devices")
    assert [device["name"] for device in devices] == [device.name for device in ps.devices()]
    assert [device["name"] for device in devices if device["default"]] == [ps.default_device().name]
    assert all(device["total_bytes"] > 0 for device in devices)
    with pytest.raises(SettingError, match="cannot be combined"):
        penstock("devices", "--json", "--check")


def test_a_plan_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = StepRates(2e9, {"float32": 1e10}, 3e-6, 1e10)
    monkeypatch.setattr("penstock.execution.rates.step_rates", lambda device, dtypes: rates)
    sizes = "--width 16 --layers 1 --heads 2 --memory 1KiB"
    plan = answer("plan", "--device", "host", *sizes.split())
    assert plan["device"] == "host"
    assert plan["limit_bytes"] == 1024
    assert plan["fits"] is False
    assert plan["smallest_bytes"] == plan["budgets"][-1]["budget_bytes"] <= plan["unlimited_bytes"]
    assert plan["batch"] == Config().data.batch


def test_advice_for_a_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import penstock as ps\nprint(ps.asarray([1.0]).item())\n")
    ps.memory.trim()  # of what other tests in this process have left in the pool
    output = CliRunner().invoke(app, ["advise", "--json", str(script)]).stdout
    first, last = output.strip().splitlines()
    assert first == "1.0"
    assert json.loads(last) == []


# Tables and progress


def test_tables_in_a_pipe_have_lines_as_long_as_they_need() -> None:
    rows = table(("name", "what"))
    rows.add_row("a", "long " * 40)
    piped = Console(file=io.StringIO(), width=80)
    show(piped, rows)
    assert len(piped.file.getvalue().splitlines()) == 2  # type: ignore[attr-defined]
    screen = Console(file=io.StringIO(), width=80, force_terminal=True)
    show(screen, rows)
    assert len(screen.file.getvalue().splitlines()) > 2  # type: ignore[attr-defined]


def test_devices_are_listed_in_a_line_each() -> None:
    lines = penstock("devices", columns=40).splitlines()
    assert len(lines) == len(ps.devices()) + 2


def test_no_color_is_heeded() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"NO_COLOR": "1", "TERM": "xterm"})
    terminal.say(console, "text", style="red")
    assert console.file.getvalue() == "text\n"  # type: ignore[attr-defined]


def test_a_phase_is_named_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO())
    with phase(console, "waiting"):
        pass
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    monkeypatch.setattr(terminal, "_PATIENCE", 0.01)
    monkeypatch.setattr(terminal, "_REMINDER", 0.01)
    with phase(console, "reading", total=100) as advance:
        advance(30)
        end = time.monotonic() + 60
        while console.file.getvalue().count("\n") < 2 and time.monotonic() < end:  # type: ignore[attr-defined]
            time.sleep(0.01)
    first, second = console.file.getvalue().splitlines()[:2]  # type: ignore[attr-defined]
    assert first == second == "reading: 0 s, 30%"


def test_a_phase_in_a_terminal_goes_away() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with phase(console, "tokenizing", total=10) as advance:
        advance(10)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tokenizing" in shown
    assert shown.endswith("\x1b[1A\x1b[2K")  # the line is erased


def test_an_error_ends_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="wrong"), phase(Console(file=io.StringIO()), "waiting"):
        raise ValueError("wrong")


# Caches


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Caches with a file of 100 bytes each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path / "pocl"))
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path / "nvidia"))
    monkeypatch.delenv("MESA_SHADER_CACHE_DIR", raising=False)
    own = tmp_path / "penstock"
    files = {
        "measurements": own / "choices-0123.json",
        "kernels": own / "kernels" / "a.bin",
        "pocl": tmp_path / "pocl" / "programs" / "b.bin",
        "tokens": own / "tokens" / "c.tokens",
        "nvidia": tmp_path / "nvidia" / "3" / "d",
        "mesa": tmp_path / "mesa_shader_cache" / "e",
    }
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(100))
    return files


def test_caches_are_listed_with_their_sizes(folders: dict[str, Path]) -> None:
    listed = {cache["name"]: cache for cache in answer("cache")}
    assert {name: cache["nbytes"] for name, cache in listed.items()} == dict.fromkeys(folders, 100)
    for name, file in folders.items():
        assert file.is_relative_to(listed[name]["folder"])
    assert all(name in penstock("cache") for name in folders)


def test_clearing_leaves_what_other_programs_use(folders: dict[str, Path]) -> None:
    other = folders["measurements"].parent / "other"
    other.write_bytes(b"")
    assert "400 B were removed" in penstock("cache", "--clear")
    assert [name for name, file in folders.items() if file.exists()] == ["nvidia", "mesa"]
    assert other.exists()
    penstock("cache", "nvidia", "--clear")
    assert not folders["nvidia"].exists()
    assert folders["mesa"].exists()


def test_a_cache_that_is_not_there(folders: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match="there is no cache cuda; there are measurements, "):
        penstock("cache", "cuda", "--clear")
    assert all(file.exists() for file in folders.values())


def test_links_in_a_cache_are_left_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (folders["tokens"].parent / "link").symlink_to(target)
    penstock("cache", "--clear")
    assert target.read_bytes() == b"precious"


# In an interpreter


def test_the_memory_is_printed_for_a_person() -> None:
    device = ps.Device.over(HostDriver())
    x = ps.zeros((1 << 18,), device=device)
    device.sync()
    x.numpy()
    lines = str(ps.memory.stats()).splitlines()
    assert any(
        line.startswith(f"{device.name}: ") and " live (" in line and "peak " in line for line in lines
    )
    assert lines[-1].startswith("this process: ")
    device.close()
