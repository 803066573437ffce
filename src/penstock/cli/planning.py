"""`penstock plan`: what a training step would take."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import penstock
from penstock.cli.settings import Changes, with_settings
from penstock.config import parse_bytes
from penstock.errors import SettingError
from penstock.formatting import format_bytes
from penstock.terminal import phase, say, write_json

if TYPE_CHECKING:
    from penstock.execution.memory_plan import MemoryPlan


@with_settings(without=("steps", "seed", "checkpoint_every", "lr"))
def plan(
    changes: Changes,
    fit: Annotated[
        str | None, typer.Option(help="The largest that the budget holds: batch or context.", metavar="WHAT")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="What several ranks take that share the batch.", metavar="N", min=1)
    ] = None,
    link: Annotated[str, typer.Option(help="The link between ranks.", metavar="RATE")] = "400Gb/s",
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for other programs.")] = False,
) -> None:
    """Show what a training step takes under each memory budget.

    That is in bytes and in time, and no step runs. With --fit, the largest batch or context that fits into
    --memory, or into the device, is looked for. With --ranks, time, memory and efficiency of several devices
    are predicted, from the rates of one and of the link between them. --device may name a file that describes
    a device that is not here, such as card.toml, which `penstock devices NAME --rates card.toml` writes where
    it is.
    """
    from penstock.train.building import settled
    from penstock.train.config import Config
    from penstock.train.planning import largest_fit, plan_ranks, plan_step

    settings = settled(changes.applied(Config()))
    if fit not in (None, "batch", "context"):
        raise SettingError(f"--fit is batch or context, and {fit!r} was given")
    if settings.run.device:
        penstock.use(settings.run.device)
    if ranks is not None:
        with phase(Console(stderr=True), "planning"):
            scaling = plan_ranks(settings, ranks, link)
        if as_json:
            write_json(asdict(scaling) | {"step_seconds": scaling.step_seconds})
        else:
            say(Console(), str(scaling))
        return
    memory = settings.run.memory
    limit = parse_bytes(memory) if memory else penstock.default_device().capabilities.total_bytes
    console, progress = Console(), Console(stderr=True)
    if fit is not None:

        def tried(size: int, fits: bool) -> None:
            say(progress, f"{fit} {size}: {'fits' if fits else 'too large'}", style="dim")

        settings, planned = largest_fit(settings, limit, "batch" if fit == "batch" else "context", tried)
    else:
        with phase(progress, "planning"):
            planned = plan_step(settings)
    with phase(progress, f"measuring {planned.device}, once"):
        verdict = planned.verdict(limit)
    if as_json:
        write_json(_plain(planned, limit) | {"batch": settings.data.batch, "context": settings.model.context})
        return
    if fit is not None:
        size = settings.data.batch if fit == "batch" else settings.model.context
        say(console, f"the largest {fit} inside {format_bytes(limit)}: {size}")
    say(console, str(planned))
    say(console, verdict)


def _plain(planned: MemoryPlan, limit: int) -> dict[str, object]:
    """A plan as plain values, in bytes and seconds."""
    seconds = planned.step_seconds or [None] * len(planned.budgets)
    return {
        "device": planned.device,
        "limit_bytes": limit,
        "held_bytes": planned.held_bytes,
        "smallest_bytes": planned.smallest_bytes,
        "unlimited_bytes": planned.unlimited_bytes,
        "fits": planned.smallest_bytes <= limit,
        "too_large": list(planned.unlimited.too_large),
        "budgets": [
            {
                "budget_bytes": row.budget_bytes,
                "arena_bytes": row.arena_bytes,
                "host_bytes": row.host_bytes,
                "extra_work": row.extra_work,
                "step_seconds": time,
                "recomputed": dict(row.recomputed),
                "moved": dict(row.moved),
            }
            for row, time in zip(planned.budgets, seconds, strict=True)
        ],
    }
