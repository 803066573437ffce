"""`penstock report`: the page of a run or of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.terminal import say


def report(
    source: Annotated[
        Path,
        typer.Argument(help="The folder of a run, or a trace that ps.profile wrote.", metavar="RUN"),
    ],
) -> None:
    """Write the page of a run, or of a trace, beside it."""
    from penstock.train import report_on

    say(Console(), f"report: {report_on(source)}")
