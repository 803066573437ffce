"""Profiles: where time and memory go, and how close each kernel comes to the device's best rates."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.runtime import Device

if TYPE_CHECKING:
    from penstock.profiling.profiles import Profile


def profile(path: str | os.PathLike[str] | None = None, *, device: Device | str | None = None) -> Profile:
    """Record everything that devices do inside a `with` block; at its end, write it to `path` as a trace.

    All devices are recorded, including those that are opened inside, unless one is named. The trace opens in
    ui.perfetto.dev. While a profile is on, programs are launched kernel by kernel, so that each is timed.

    >>> with ps.profile() as profile:
    ...     _ = (ps.ones(4) + 1).numpy()
    >>> len(profile.table()) > 0
    True
    """
    from penstock.profiling.profiles import Profile  # imported late: few programs need it

    return Profile(path, device=device)
