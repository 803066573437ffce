"""`penstock bench`: measurements, and comparisons with earlier measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench(
    device: Annotated[
        list[str] | None,
        typer.Option(help="A name from `penstock devices`; may be given several times.", metavar="NAME"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A case by its name; may be given several times.", metavar="NAME")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Keep what is measured.", metavar="FILE")] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Measure what FILE has, and fail if something got slower.", metavar="FILE"),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Run the same in PyTorch, in turn: torch.", metavar="LIBRARY")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, wider intervals.")] = False,
) -> None:
    """Measure operations and whole training steps.

    They are shown with their share of the device's best rates. Times are medians with 95% confidence
    intervals. With --compare, the exit status is 1 when a case got slower by more than noise and 5%.
    """
    from penstock.bench import bench as measure

    if not measure(device or (), only or (), save, compare, against, quick):
        raise typer.Exit(1)
