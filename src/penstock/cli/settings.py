"""The settings of a run on the command line: a file, `--set`, and options of their own for the usual ones."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.config import explanation
from penstock.errors import SettingError
from penstock.models.sizes import SIZES
from penstock.train.config import Config

# The settings that have an option of their own, and its name.
_OPTIONS = {
    "model": "model.name",
    "lora": "lora.rank",
    "data": "data.path",
    "device": "run.device",
    "steps": "run.steps",
    "memory": "run.memory",
    "seed": "run.seed",
    "checkpoint_every": "run.checkpoint_every",
    "lr": "optimizer.learning_rate",
    "batch": "data.batch",
    "accumulate": "optimizer.accumulate",
    "context": "model.context",
    "width": "model.width",
    "layers": "model.layers",
    "heads": "model.heads",
    "precision": "model.precision",
    "tokenizer": "data.tokenizer",
    "vocabulary": "data.vocabulary",
}
_METAVARS = {"model": "NAME", "lora": "RANK", "data": "PATH", "device": "NAME", "memory": "BYTES"}
_FILE = Annotated[
    Path | None,
    typer.Option(help="Settings in TOML; `penstock config` prints and explains all.", metavar="FILE"),
]
_SET = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting, as data.batch=8; may be repeated.", metavar="KEY=VALUE"),
]


@dataclass(frozen=True)
class Changes:
    """What the command line changes in the settings: options before `--set`, and that before the file."""

    file: Path | None
    assigned: Sequence[str]  # section.key=value
    options: dict[str, Any]  # by the name of the option; None: not given

    def applied(self, config: Config) -> Config:
        """Settings with the changes."""
        if self.file is not None:
            config = config.with_file(self.file)
        for assignment in self.assigned:
            config = config.changed(_tree(assignment), f"--set {assignment}")
        for name, value in self.options.items():
            if value is not None:
                section, key = _OPTIONS[name].split(".")
                is_path = name == "data" or (name == "model" and value not in SIZES)
                config = config.changed({section: {key: _absolute(value) if is_path else value}})
        return config


Command = Callable[..., None]


def with_settings(*, without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Add the options of settings to a command, which gets them as its argument `changes`."""
    names = [name for name in _OPTIONS if name not in without]
    return functools.partial(_extended, names)


def _extended(names: Sequence[str], command: Command) -> Command:
    @functools.wraps(command)
    def run(config: Path | None = None, assigned: list[str] | None = None, **given: Any) -> None:
        options = {name: given.pop(name, None) for name in names}
        command(changes=Changes(config, assigned or (), options), **given)

    parameters = [
        *(
            each
            for each in inspect.signature(command, eval_str=True).parameters.values()
            if each.name != "changes"
        ),
        _parameter("config", _FILE),
        _parameter("assigned", _SET),
        *(_parameter(name, _option(name)) for name in names),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str) -> Any:
    section, key = _OPTIONS[name].split(".")
    part = getattr(Config(), section)
    (item,) = (item for item in fields(part) if item.name == key)
    text = explanation(item)
    kind = type(getattr(part, key))
    help_text = f"{text[0].upper()}{text[1:]}."
    return Annotated[kind | None, typer.Option(help=help_text, metavar=_METAVARS.get(name))]


def _tree(assignment: str) -> dict[str, dict[str, Any]]:
    """`section.key=value` as a tree; a value that is not TOML is a text."""
    name, sign, text = assignment.partition("=")
    section, dot, key = name.strip().partition(".")
    if not sign or not dot:
        raise SettingError(
            f"--set takes section.key=value, such as data.batch=8, and {assignment!r} was given"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return {section: {key: value}}


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
