"""An automatic profile of a few steps of every run, for the report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from penstock.compiler.launches import timeline
from penstock.errors import PenstockError
from penstock.measuring.step_rates import step_rates
from penstock.profiling import profile
from penstock.profiling.profiles import Profile
from penstock.report import Certificate, PlannedStep
from penstock.runtime import Device
from penstock.tensor.jit import schedules

_WARM = 3  # steps before it: they compile, and capture graphs if the device has them
_STEPS = 3  # that are profiled; fewer if an evaluation or a checkpoint comes before


def planned_step(
    device: Device, train_step: Callable[..., Any] | None, batches: int
) -> tuple[Certificate | None, PlannedStep | None]:
    """The plan of a training step, and what is predicted of a step of several batches."""
    known = schedules(train_step) if train_step else []
    if not known:
        return None, None
    rates = step_rates(device, measure=False)
    seconds = batches * rates.seconds(*timeline(known[0], device.capabilities)) if rates else None
    return Certificate.of(known[0].plan), PlannedStep.of(known[0], device.held_bytes(), seconds)


class Window:
    """Starts a profile after the first steps of a process, and ends it a few steps later."""

    def __init__(self, device: Device, steps: int) -> None:
        """`steps`: how many are to be done. A single step is not profiled, since it compiles."""
        self._device = device
        self._first = min(_WARM, steps - 1)
        self._done = 0
        self._profile: Profile | None = None

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Discard a profile that has not ended."""
        if self._profile is not None:
            with suppress(PenstockError):  # the exception that is being raised is more important
                self._profile.__exit__(kind, error, where)

    @property
    def due(self) -> bool:
        """Whether the profile starts before the next step."""
        return self._done == self._first > 0

    def begin(self) -> None:
        """Start, after the device has finished what is pending."""
        self._profile = profile(device=self._device).__enter__()

    def after_step(self, last: bool) -> tuple[Profile, int] | None:
        """End, if it is time: the profile, and how many steps it has. `last`: no step follows directly."""
        self._done += 1
        seen = self._done - self._first
        if self._profile is None or not (last or seen >= _STEPS):
            return None
        ended, self._profile = self._profile, None
        ended.__exit__(None, None, None)
        return ended, seen
