"""The messages of out-of-memory errors."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import OutOfDeviceMemory
from penstock.formatting import format_bytes
from penstock.memory.ledger import DeviceMemory

Owners = Sequence[tuple[str, int]]  # lines of the user's code, and the bytes that each holds


def out_of_memory(
    name: str,
    stats: DeviceMemory,
    total: int,
    nbytes: int,
    cause: OutOfDeviceMemory,
    owners: Owners | None,
) -> OutOfDeviceMemory:
    """The error of a device without space for `nbytes`; without `owners`, it tells how to list them."""
    free = max(total - stats.live_bytes, 0)
    lines = [
        f"{name} cannot give {nbytes} bytes ({format_bytes(nbytes)}): "
        f"{format_bytes(stats.live_bytes)} live, {format_bytes(stats.pooled_bytes)} pooled, "
        f"{format_bytes(free)} free of {format_bytes(total)}"
        f"{'' if stats.limit_bytes is None else ', the limit set for it'}. {cause}."
    ]
    if owners is None:
        lines.append(f"Set PENSTOCK_TRACE_MEMORY=1 to see which lines hold what is live on {name}.")
    return OutOfDeviceMemory(
        "\n".join([*lines, *_held(owners or ())]),
        asked=nbytes,
        live=stats.live_bytes,
        pooled=stats.pooled_bytes,
        free=free,
        owners=list(owners or ()),
    )


def with_owners(error: OutOfDeviceMemory, owners: Owners) -> OutOfDeviceMemory:
    """The error with the lines of the user's code that hold the most memory."""
    return OutOfDeviceMemory(
        "\n".join([str(error), *_held(owners)]),
        asked=error.asked,
        live=error.live,
        free=error.free,
        owners=list(owners),
        smallest=error.smallest,
    )


def _held(owners: Owners) -> list[str]:
    return [f"{format_bytes(held):>12}  {site}" for site, held in owners]
