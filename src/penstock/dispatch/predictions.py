"""Compares the times of programs with predictions, which tells whether rates were measured wrongly."""

from __future__ import annotations

from collections import deque

from penstock.runtime import Device

_FAR_OFF, _IN_A_ROW = 4.0, 3  # so many times as long, or as short, as predicted; for so many programs
_LEAST_SECONDS = 1e-4  # what is shorter says more of launches than of rates


class Predictions:
    """The last timed programs of each device, with the ratio of measured to predicted time."""

    def __init__(self) -> None:
        self._ratios: dict[Device, deque[float]] = {}

    def add(self, device: Device, predicted: float, measured: float) -> None:
        """One more program, with seconds; those without a measured time (infinity) do not count."""
        if _LEAST_SECONDS < measured < float("inf"):
            self._ratios.setdefault(device, deque(maxlen=_IN_A_ROW)).append(measured / predicted)

    def far_off(self) -> list[Device]:
        """The devices whose last programs all took far longer than predicted, or far shorter."""
        return [
            device
            for device, ratios in self._ratios.items()
            if len(ratios) == _IN_A_ROW and (min(ratios) > _FAR_OFF or max(ratios) < 1 / _FAR_OFF)
        ]
