"""`penstock advise`: advice about a program or a trace."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

import penstock
from penstock.terminal import say, write_json


def advise(
    source: Annotated[
        list[str],
        typer.Argument(
            help="A trace that ps.profile saved; or what to run: a script, or -m MODULE, with its arguments.",
            metavar="TRACE|COMMAND...",
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as a last line of JSON, for other programs.")
    ] = False,
) -> None:
    """Say what would make a program faster or smaller.

    Each flaw is named with its evidence, its line and the gain. A command runs in this process, under a
    profile: script.py --lr 1, or -- python -m package.
    """
    from penstock.advising.running import profiled
    from penstock.advising.text import rendered

    status = 0
    if len(source) == 1 and source[0].endswith(".json"):
        advice = penstock.advise(source[0])
    else:
        profile, status = profiled(source)
        advice = penstock.advise(profile)
    if as_json:
        write_json([asdict(item) for item in advice])
    else:
        say(Console(), rendered(advice))
    if status:
        raise typer.Exit(status)
