"""The command line: `penstock`, with a file for each command.

Commands import what they need when they run, so that the others, and `--help`, start quickly.
"""

from __future__ import annotations

import sys
import warnings
from itertools import pairwise
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from typer.core import TyperCommand

import penstock
from penstock.cli import (
    advising,
    benching,
    caches,
    chatting,
    configuring,
    evaluating,
    generating,
    listing,
    planning,
    reporting,
    serving,
    training,
)
from penstock.collectives.world import communicator
from penstock.errors import PenstockError, PenstockWarning, SettingError
from penstock.terminal import complain, say

_PATHS = ("--compare", "--config", "--data", "--model", "--out", "--rates", "--save")


class _Command(TyperCommand):
    """A command that refuses an empty path, such as `--out "$UNSET"`, which would be the present folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `click.Command`."""
        for option, value in pairwise([*args, "end"]):
            if (option in _PATHS and not value) or option in [f"{name}=" for name in _PATHS]:
                raise SettingError(f"the path after {option} is empty")
        return super().parse_args(ctx, args)


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help, wrapped to the width of the terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"penstock {penstock.__version__}\n")
        raise typer.Exit


@app.callback()
def penstock_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train and run neural networks on any GPU, inside a memory budget that you set."""


for _command in (
    listing.devices,
    training.train,
    planning.plan,
    configuring.config,
    generating.generate,
    chatting.chat,
    serving.serve,
    reporting.report,
    benching.bench,
    caches.cache,
):
    app.command(_command.__name__, cls=_Command)(_command)
app.command("eval", cls=_Command)(evaluating.evaluate)
# What follows the name of a script belongs to the script.
app.command("advise", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    advising.advise
)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings of Penstock in a line, without its source; see `warnings.showwarning`."""
    if issubclass(category, PenstockWarning):
        say(Console(stderr=True), f"penstock: {message}", style="yellow")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def main() -> None:
    """Run the command line; Penstock's own errors are shown in a line, with exit status 1."""
    warnings.showwarning = _show_warning
    try:
        app(prog_name="penstock")
    except PenstockError as error:
        _end(error)
    except MemoryError:
        _end("this machine has not enough memory for that")


def _end(why: PenstockError | str) -> None:
    """Say why the command failed, and end the other ranks, which would wait for this one."""
    ranks = communicator()
    complain(why if ranks.size == 1 else f"rank {ranks.rank} of {ranks.size}: {why}")
    ranks.engine.abort()
    raise SystemExit(1)
