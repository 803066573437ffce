"""`penstock devices`: the devices of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import penstock
from penstock.errors import PenstockError, SettingError
from penstock.formatting import format_bandwidth, format_bytes, format_flops, format_seconds
from penstock.terminal import cell, phase, say, show, table, write_json


def devices(
    name: Annotated[str | None, typer.Argument(help="Only this device, or the first of a driver.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compute a few of everything, and compare it with NumPy.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Discard what was measured on this machine, and remeasure it."),
    ] = False,
    rates: Annotated[
        Path | None,
        typer.Option(help="Describe the device NAME in a file, for plans on other machines.", metavar="FILE"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the list as JSON, for other programs.")
    ] = False,
) -> None:
    """List, check or measure the devices of this machine.

    They are listed with the best first. The rates of devices, the placements of `auto`, and the choice of a
    library's kernels are measured once and kept. --measure discards all of it; the rates are measured now,
    the rest when it is needed.
    """
    if sum((check, measure, rates is not None, as_json)) > 1:
        raise SettingError("--check, --measure, --rates and --json cannot be combined; give only one of them")
    default = penstock.default_device()
    chosen = [penstock.registry.find(name)] if name else penstock.devices()
    console = Console()
    if check:
        wrong = [device.name for device in chosen if not _check(device, console)]
        if wrong:
            raise PenstockError(f"{' and '.join(wrong)} did not compute what NumPy computes")
        return
    if measure:
        _measure(chosen, console)
        return
    if rates is not None:
        _describe(chosen[0] if name else default, rates, console)
        return
    marked = [device for device in chosen if device is default or device in default.members]
    if as_json:
        write_json([_plain(device, device in marked) for device in chosen])
        return
    rows = table(("name", "device", "kind", "memory", "units", "interface"))
    for device in chosen:
        can = device.capabilities
        memory = format_bytes(can.total_bytes) + (" shared" if can.shared_memory else "")
        mark = " *" if device in marked else ""
        cells = (device.name + mark, can.description, can.kind, memory, str(can.compute_units), can.api)
        rows.add_row(*map(cell, cells))
    show(console, rows)
    which = "the default" if default.dispatcher is None else "the default, auto, chooses among these"
    say(console, f"* {which}; set PENSTOCK_DEVICE to another name to change it", style="dim")


def _plain(device: penstock.Device, default: bool) -> dict[str, object]:
    """A device as plain values."""
    can = device.capabilities
    return {
        "name": device.name,
        "description": can.description,
        "kind": can.kind,
        "default": default,
        "total_bytes": can.total_bytes,
        "shared_memory": can.shared_memory,
        "compute_units": can.compute_units,
        "interface": can.api,
    }


def _measure(devices: Sequence[penstock.Device], console: Console) -> None:
    """Remeasure devices, and print their rates."""
    from penstock.measuring.ceilings import Ceilings
    from penstock.measuring.quiet import Watch
    from penstock.measuring.rates import machine_rates
    from penstock.tuning_cache import forget_everything

    forget_everything()
    watch = Watch()
    progress = Console(stderr=True)
    with phase(progress, "measuring small programs"):
        rates = machine_rates(devices, remeasure=True)
    for device in devices:
        ceilings = Ceilings(device)
        with phase(progress, f"measuring {device.name}"):
            moved, computed = ceilings.bandwidth(), ceilings.operations("float32")
        if device not in rates or moved is None or computed is None:
            say(console, f"{device.name}: it could not be measured")
            continue
        reached = f"{format_bandwidth(moved)}, {format_flops(computed)} in float32"
        small = format_seconds(rates[device].program)
        say(console, f"{device.name}: {reached}, {small} for a small program")
    if watch.busy():
        say(console, "the machine was busy: rates may be higher when it is not", style="dim")


def _describe(device: penstock.Device, path: Path, console: Console) -> None:
    """Write what a device can do, its memory and its rates to a file."""
    from penstock.drivers.description import description_text
    from penstock.files import atomic_file
    from penstock.measuring.step_rates import step_rates

    if path.suffix != ".toml":
        raise SettingError(f"the file of a device is named like card.toml, and {path} was given")
    if device.capabilities.kind not in ("gpu", "cpu"):
        raise SettingError(f"a file describes a GPU or a CPU with kernels of its own, and not {device.name}")
    with phase(Console(stderr=True), f"measuring {device.name}"):
        measured = step_rates(device)
    if measured is None:
        raise PenstockError(f"{device.name} could not be measured")
    with atomic_file(path) as file:
        file.write(description_text(device.capabilities, measured).encode())
    say(console, f"{device.name}: {path}; on any machine: penstock plan --device {path.name}")


def _check(device: penstock.Device, console: Console) -> bool:
    """Print the result of each check of a device; whether all are right."""
    from penstock.checking import check

    can = device.capabilities
    about = f"{device.name}: {can.description}, {can.api}"
    say(console, about)
    right = True
    for finding in check(device):
        verdict = f"WRONG: {finding.problem}" if finding.problem else f"right, {finding.seconds:.1f} s"
        style = "red" if finding.problem else "green"
        line = f"  {finding.what:<20} {verdict}"
        say(console, line, style)
        right = right and not finding.problem
    verdict = "it computes what NumPy computes" if right else "do not use it: please report the lines above"
    say(console, f"  {'verdict':<20} {verdict}\n")
    return right
