"""`penstock config`: all settings, with what they mean."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer
from rich.console import Console

from penstock.cli.settings import Changes, with_settings
from penstock.config import Settings, explanation, variable_of
from penstock.models.sizes import SIZES
from penstock.terminal import say, write_json


@with_settings()
def config(
    changes: Changes,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON, for other programs.")] = False,
) -> None:
    """Print all settings, each with what it means.

    Those of a run are printed as a file for --config, and those of devices after them. Options, --set and
    --config change what is printed, as they would change the run.
    """
    from penstock.train.config import Config

    settings, environment = changes.applied(Config()), Settings.from_environment()
    values = {variable_of(item.name): getattr(environment, item.name) for item in fields(Settings)}
    if as_json:
        write_json(settings.tree() | {"environment": values})
        return
    console = Console()
    say(console, settings.toml())
    say(console, f"# Sizes for model.name: {', '.join(SIZES)}")
    say(console, "# Devices are set by the environment:")
    for item in fields(Settings):
        variable = variable_of(item.name)
        say(console, f"# {variable}={_text(values[variable])}")
        say(console, f"#     {explanation(item)}")


def _text(value: object) -> str:
    """A value as the environment has it."""
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)
