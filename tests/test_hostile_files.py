"""Files that are hostile or damaged: a single line says what is wrong, and nothing hangs."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

import penstock as ps
from penstock import cli
from penstock.cli import generating, training
from penstock.data import ByteTokenizer, CharTokenizer, find_text, load_tokenizer
from penstock.data.text import silent
from penstock.errors import PenstockWarning
from penstock.measuring import ceilings
from penstock.printable import printable, shown
from penstock.train import Config, Metrics, TextTrainer, load_last
from penstock.train import checkpoint as checkpoints
from penstock.train.view import LiveView, PlainView

TEXT = "the quick brown fox jumps over the lazy dog; the early bird catches the worm.\n" * 20
TREE: dict[str, dict[str, Any]] = {
    "model": {"context": 8, "width": 8, "layers": 1, "heads": 2},
    "data": {"tokenizer": "characters", "batch": 2, "path": "text.txt"},
    "run": {"steps": 4, "evaluate_every": 1, "evaluate_batches": 1, "device": "host"},
}
DEEP_JSON = "[" * 100_000
DEEP_OBJECT = '{"a":' * 100_000
DATA = "[data]\npath = 'text.txt'\ntokenizer = 'bytes'\n"
HUGE_INTEGER = "1" + "0" * 5000
ESCAPE = "\x1b]0;owned\x07\x1b[31m\x9b2J"


class Silent:
    def phase(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[int], None]]:
        return silent(name, total)

    def start(self, done: int, steps: int | None, seconds: float) -> None: ...

    def show(self, metrics: Metrics) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, of which each test has a copy."""
    place = tmp_path_factory.mktemp("trained")
    default = ps.default_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setattr(ceilings, "_measured", lambda device, what: 1e11)  # which takes its time
        patch.chdir(place)
        ps.use("host")
        Path("text.txt").write_text(TEXT)
        trainer = TextTrainer(Config().changed(TREE), Path("run"), Silent())
        trainer.fit()
        trainer.report("a sample")
    ps.use(default)
    return place / "run"


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)
    monkeypatch.setattr(training, "_SAMPLE", 2)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    copied(trained, Path("run"))
    default = ps.default_device()
    ps.use("host")
    yield
    ps.use(default)


def copied(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `penstock` writes to stderr when it fails: one line. Nothing of a command waits for ever."""
    capfd.readouterr()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(cli.sys, "argv", ["penstock", *arguments])
        patch.setattr(warnings, "showwarning", warnings.showwarning)  # `main` sets its own
        with pytest.raises(SystemExit) as ended:
            cli.main()
    errors = capfd.readouterr().err
    assert ended.value.code == 1, errors
    assert "Traceback" not in errors
    assert errors.count("\n") == 1, errors
    assert len(errors) < 2000
    return errors


# Numbers, nesting, sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + DEEP_JSON, "nested too deeply"),
        ("x = " + "{a=" * 5000, "nested too deeply"),
        ("model.width" + ".a" * 5000 + " = 1", "model.width is an integer"),
        ("[model]\nwidth = " + HUGE_INTEGER, "is not TOML: "),
        ("[model]\nwidth = 0x" + "f" * 5000, "model.width is less than 2**64"),
        ("[optimizer]\nlearning_rate = 0x" + "f" * 5000, "optimizer.learning_rate is less than 2**64"),
        ("[model]\nlayers = 1000000", "model.layers is at most 10000"),
        ("[data]\nvocabulary = 1000000000000", "data.vocabulary is 256 or more, and at most"),
        (f"{DATA}batch = 100000000\n[model]\nwidth = 128", "takes at least"),
        (f"{DATA}[model]\nwidth = 1000000000", "takes at least"),
        (f"{DATA}[model]\ncontext = 1000000000000", "takes at least"),
        (f"{DATA}[run]\nevaluate_batches = 1000000000000", "takes at least"),
        ('[data]\npath = "x\\u0000y"', "there is no file or folder"),
        ('[data]\npath = "\\u001b[31m"', r"there is no file or folder \x1b[31m"),
        ('["\\u001b[31m"]\na = 1', r"there is no section '\x1b[31m'"),
    ],
)
def test_settings(text: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("c.toml").write_text(text)
    assert message in complaint(capfd, "train", "--config", "c.toml", "--device", "host", "--out", "new")
    assert not Path("new").exists()


WRONG_CONFIGS: dict[str, tuple[Any, str]] = {
    "deep": (DEEP_JSON, "nested too deeply"),
    "deep object": (DEEP_OBJECT, "nested too deeply"),
    "huge": ('{"n_layer": ' + HUGE_INTEGER + "}", "cannot be read"),
    "list": ("[1, 2]", "config.json is an object, not [1, 2]"),
    "text": ('"x"', "is an object"),
    "layers": ({"n_layer": 10**6}, "the number of layers is 1"),
    "width": ({"n_embd": 10**9}, "wte.weight has the shape"),
    "context": ({"n_positions": 10**12}, "wpe.weight has the shape"),
    "boolean": ({"n_layer": True}, "n_layer is an integer of 1 or more, not True"),
    "fraction": ({"n_layer": 1.5}, "n_layer is an integer of 1 or more, not 1.5"),
    "none": ({"vocab_size": None}, "config.json lacks vocab_size"),
    "heads": ({"n_head": 0}, "n_head is an integer of 1 or more, not 0"),
    "dropout": ({"resid_pdrop": "much"}, "resid_pdrop is a number, not 'much'"),
    "epsilon": ({"layer_norm_epsilon": [1]}, "layer_norm_epsilon is a number, not [1]"),
    "activation": ({"activation_function": {"a": 1}}, "the activation {'a': 1} is not"),
    "escape": ({"model_type": ESCAPE}, r"the model_type '\x1b]0;owned"),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_the_config_of_a_pretrained_model(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    change, message = WRONG_CONFIGS[case]
    ps.nn.GPT(vocab_size=11, context=4, width=4, layers=1, heads=2).save_pretrained("gpt2")
    path = Path("gpt2/config.json")
    text = change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    assert message in complaint(capfd, "generate", "gpt2")


@pytest.mark.parametrize("text", [DEEP_JSON, DEEP_OBJECT, '{"a": ' + HUGE_INTEGER + "}", "7", "null"])
@pytest.mark.parametrize("name", ["tokenizer.json", "profile.json", "trace.json", "bench.json"])
def test_other_files_of_json(name: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(name) if name in ("trace.json", "bench.json") else Path("run") / name
    path.write_text(text)
    orders = {
        "tokenizer.json": [("generate", "run")],
        "profile.json": [("report", "run")],
        "trace.json": [("report", "trace.json"), ("advise", "trace.json")],
        "bench.json": [("bench", "--compare", "bench.json")],
    }
    for order in orders[name]:
        assert name in complaint(capfd, *order)


def test_metrics_that_are_not_ours_are_passed_over() -> None:
    path = Path("run/metrics.jsonl")
    sound = path.read_text()
    wrong = (
        DEEP_JSON,
        "x" * 200_000,
        '{"step": ' + HUGE_INTEGER + "}",
        '{"step": 1' + "0" * 400 + ', "loss": 1}',
    )
    more = '{"step": true}', '{"step": -1}', '{"step": 2, "loss": 1' + "0" * 400 + "}", "[]"
    path.write_text("\n".join([*wrong, *more, "", sound]))
    assert cli.app(["report", "run"], standalone_mode=False) is None
    assert '"loss"' in Path("run/metrics.jsonl").read_text()


# Checkpoints with a right checksum


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the state and the arrays of a checkpoint, and give it the checksum that belongs to them."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        metadata = dict(file.metadata())
    arrays, state = load_file(path), json.loads(metadata["state"])
    change(state, arrays)
    metadata["state"] = json.dumps(state)
    metadata["sum"] = checkpoints._sum(metadata["state"], arrays)
    save_file(arrays, path, metadata)


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "no step": lambda state, arrays: state.pop("step"),
    "no position": lambda state, arrays: state.pop("position"),
    "no generator": lambda state, arrays: state.pop("generator"),
    "no settings": lambda state, arrays: state.pop("config"),
    "an empty generator": lambda state, arrays: state.update(generator={}),
    "a wrong generator": lambda state, arrays: state.update(generator={"seed": "x", "counter": []}),
    "a text as step": lambda state, arrays: state.update(step="4"),
    "a negative step": lambda state, arrays: state.update(step=-4),
    "an endless time": lambda state, arrays: state.update(seconds=float("inf")),
    "a list as settings": lambda state, arrays: state.update(config=[1]),
    "settings of lists": lambda state, arrays: state.update(config={"model": [1]}),
    "no weight": lambda state, arrays: arrays.pop("model.norm.weight"),
    "no moment": lambda state, arrays: arrays.pop(next(name for name in arrays if "optimizer.mean" in name)),
    "a weight of another shape": lambda state, arrays: arrays.update(
        {"model.norm.weight": np.zeros(3, np.float32)}
    ),
    "no model": lambda state, arrays: [arrays.pop(name) for name in list(arrays) if name[:5] == "model"],
    "nothing": lambda state, arrays: (arrays.clear(), arrays.update(x=np.zeros(1))),
}


@pytest.mark.slow(
    "no moment",
    "settings of lists",
    "no weight",
    "a list as settings",
    "a negative step",
    "an endless time",
    "a text as step",
    "an empty generator",
)
@pytest.mark.parametrize("case", CHANGES)
def test_a_checkpoint_without_all_of_its_state_is_passed_over(
    case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    rewritten(checkpoints.checkpoint_files(Path("run"))[-1], CHANGES[case])
    cli.app(["train", "--resume", "run"], standalone_mode=False)
    output = capfd.readouterr()
    assert "step-00000004" in output.err or "step 4 in run does not fit" in output.out
    assert load_last(Path("run"))[0].step == 4
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_a_model_too_large_for_the_machine_is_not_made(capfd: pytest.CaptureFixture[str]) -> None:
    for path in checkpoints.checkpoint_files(Path("run")):
        rewritten(path, lambda state, arrays: state["config"]["model"].update(width=10**7, heads=1))
    assert "takes at least" in complaint(capfd, "generate", "run")
    assert "takes at least" in complaint(capfd, "train", "--resume", "run", "--steps", "9")


# What is no file


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")
@pytest.mark.parametrize("make", [fifo, folder, device])
def test_what_is_no_file_is_refused_at_once(
    make: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    stuck = threading.Timer(60, lambda: os._exit(3))  # rather than to wait for ever
    stuck.start()
    make(Path("x.toml"))
    assert "x.toml cannot be read" in complaint(capfd, "train", "--config", "x.toml")
    make(Path("x.json"))
    assert "x.json" in complaint(capfd, "report", "x.json")
    assert "x.json" in complaint(capfd, "bench", "--compare", "x.json")
    make(Path("x.txt"))
    assert "x.txt" in complaint(capfd, "train", "--data", "x.txt", "--device", "host")
    assert not find_text(["text.txt", "x.txt"]).files[1:]
    make(checkpoints.checkpoint_files(Path("run"))[-1])
    checkpoint, problems = load_last(Path("run"))
    assert checkpoint.step == 3
    assert len(problems) == 1
    make(Path("run/tokenizer.json"))
    assert "tokenizer.json" in complaint(capfd, "generate", "run")
    make(Path("run/sample.txt"))
    cli.app(["report", "run"], standalone_mode=False)
    make(Path("run/profile.json"))
    assert "profile.json" in complaint(capfd, "report", "run")
    ps.nn.GPT(vocab_size=11, context=4, width=4, layers=1, heads=2).save_pretrained("gpt2")
    make(Path("gpt2/model.safetensors"))
    assert "model.safetensors cannot be read" in complaint(capfd, "generate", "gpt2")
    stuck.cancel()


@pytest.mark.parametrize("name", ["sample.txt", "config.toml", "metrics.jsonl", "profile.json"])
def test_a_link_out_of_the_run_is_not_followed(name: str) -> None:
    Path("secret").write_bytes(b"a secret\n" if name == "sample.txt" else Path("run", name).read_bytes())
    Path("run", name).unlink()
    Path("run", name).symlink_to(Path("secret").absolute())
    if name == "sample.txt":
        cli.app(["report", "run"], standalone_mode=False)
    else:
        with pytest.raises(ps.errors.ReportError, match="outside of the run's folder"):
            cli.app(["report", "run"], standalone_mode=False)
    assert "a secret" not in Path("run/report.html").read_text("utf-8")


# The terminal


@pytest.mark.parametrize("view", [PlainView, LiveView])
def test_notes_cannot_command_a_terminal(view: type[PlainView] | type[LiveView]) -> None:
    with open("out.txt", "w+", encoding="utf-8") as file:
        console = Console(file=file, force_terminal=True, width=200, color_system=None)
        view(console).note(f"run: {ESCAPE}\u202e[bold]x[/bold]\n\tnext")
        file.seek(0)
        shown_text = file.read()
    assert not set("\x1b\x07\x9b\u202e") & set(shown_text)
    assert r"run: \x1b]0;owned\x07\x1b[31m\x9b2J\u202e[bold]x[/bold]" in shown_text


def test_generated_text_is_written_out_for_terminals_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generating.stream([f"a{ESCAPE}\n"]) == f"a{ESCAPE}\n"
    assert ESCAPE in capsys.readouterr().out
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True)
    assert generating.stream([f"a{ESCAPE}\n"]) == f"a{ESCAPE}\n"
    assert "a\\x1b]0;owned\\x07\\x1b[31m\\x9b2J\n" in capsys.readouterr().out


def test_devices_with_names_like_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ps.registry.find("host")
    named = ps.Device(f"host{ESCAPE}", replace(host.capabilities, description="[red]x[/red]"), lambda: None)
    monkeypatch.setattr(ps, "devices", lambda: [named])
    cli.app(["devices"], standalone_mode=False)
    output = capsys.readouterr().out
    assert "[red]x[/red]" in output
    assert "\x1b" not in output


def test_values_in_messages_are_short_and_plain() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "list that is too large to show"
    assert shown(16**5000) == "int that is too large to show"
    assert len(shown("x" * 1000)) < 100
    assert printable("a\tb\nc é 漢 \N{GRINNING FACE}") == "a\tb\nc é 漢 \N{GRINNING FACE}"
    assert printable("\ud800\r\x00") == r"\ud800\r\x00"
    while deep:
        deep = deep[0]


def test_warnings_are_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    cli._show_warning(PenstockWarning(f"a {ESCAPE}"), PenstockWarning, "file.py", 1)
    assert capfd.readouterr().err == "penstock: a \\x1b]0;owned\\x07\\x1b[31m\\x9b2J\n"


def test_tokenizers_of_the_wrong_kind(tmp_path: Path) -> None:
    for content in ('{"type": "characters", "characters": 7}', '{"type": ["bytes"]}', '{"model": 7}'):
        Path("t.json").write_text(content)
        with pytest.raises(ps.data.DataError, match=r"t\.json holds no"):
            load_tokenizer("t.json")
    for tokenizer in (ByteTokenizer(), CharTokenizer(TEXT)):
        tokenizer.save(tmp_path / "t.json")
        assert load_tokenizer("t.json").vocab_size == tokenizer.vocab_size
