"""Where time and memory go: profiles, with what each kernel reaches of the device's best."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.runtime import Device

if TYPE_CHECKING:
    from penstock.profiling.profiles import Profile


def profile(path: str | os.PathLike[str] | None = None, *, device: Device | str | None = None) -> Profile:
    """Note everything that devices do inside a `with` block; written to `path` at its end, as a trace.

    All opened devices are noted, and those that are opened inside, unless one is named. The trace opens in
    ui.perfetto.dev. While a profile is on, programs are launched kernel by kernel, so that each is timed.
    """
    from penstock.profiling.profiles import Profile  # imported late: few programs need it

    return Profile(path, device=device)
