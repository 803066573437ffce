"""The sync ledger: every time that the host waited for the device, where, why and how long."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from penstock.callsite import user_line

MAX_SITES = 1000  # lines of code that are counted separately; later lines share an entry
OTHER = "(other lines)"


@dataclass(frozen=True, slots=True)
class WaitSite:
    """The waits that a line of the user's code caused."""

    where: str  # file:line
    why: str  # sync, download, view, back-pressure, staging, out of memory, profile
    count: int
    seconds: float


class WaitLedger:
    """Counts the waits of a device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[tuple[str, str], tuple[int, float]] = {}

    def add(self, why: str, seconds: float) -> str:
        """Note a wait that the caller's line caused, and return that line."""
        key = (user_line(), why)
        with self._lock:
            if key not in self._sites and len(self._sites) >= MAX_SITES:
                key = (OTHER, why)
            count, total = self._sites.get(key, (0, 0.0))
            self._sites[key] = (count + 1, total + seconds)
        return key[0]

    def sites(self) -> list[WaitSite]:
        """Every line that waited, the costliest first."""
        with self._lock:
            items = list(self._sites.items())
        rows = [WaitSite(where, why, count, seconds) for (where, why), (count, seconds) in items]
        return sorted(rows, key=lambda row: -row.seconds)

    @property
    def count(self) -> int:
        """How often the host waited."""
        return sum(site.count for site in self.sites())

    @property
    def seconds(self) -> float:
        """How long the host waited in total."""
        return sum(site.seconds for site in self.sites())

    def clear(self) -> None:
        """Reset all counts."""
        with self._lock:
            self._sites.clear()
