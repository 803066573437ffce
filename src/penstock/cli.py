"""The command line: `penstock`."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

import penstock
from penstock.config import format_bytes
from penstock.errors import PenstockError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def penstock_command() -> None:
    """Train and run neural networks on any GPU, inside a memory budget that you set."""


@app.command("devices")
def list_devices() -> None:
    """List the devices of this machine, the best first."""
    default = penstock.default_device()
    table = Table("name", "device", "kind", "memory", "units", "interface", box=None, pad_edge=False)
    for device in penstock.devices():
        can = device.capabilities
        memory = format_bytes(can.total_bytes) + (" shared" if can.shared_memory else "")
        mark = " *" if device is default else ""
        table.add_row(device.name + mark, can.description, can.kind, memory, str(can.compute_units), can.api)
    console = Console()
    console.print(table)
    console.print("* the default; set PENSTOCK_DEVICE to another name to change it", style="dim")


def main() -> None:
    """Run the command line; Penstock's own errors become one line and exit status 1."""
    try:
        app()
    except PenstockError as error:
        Console(stderr=True).print(f"penstock: {error}", style="red", highlight=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
