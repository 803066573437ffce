"""A profile of a few steps of every run, which nobody has to ask for: the report shows what it found."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from penstock.errors import PenstockError
from penstock.profiling import profile
from penstock.profiling.profiles import Profile
from penstock.runtime import Device

_WARM = 3  # steps before it: they compile, and what is replayed becomes one launch where the device can
_STEPS = 3  # that are profiled, or fewer where something else than steps comes before


class Window:
    """Begins a profile before one of the steps of a process, and ends it a few later."""

    def __init__(self, device: Device, steps: int) -> None:
        """`steps`: how many are to be done. Of one alone there is no profile, as it compiles."""
        self._device = device
        self._first = min(_WARM, steps - 1)
        self._done = 0
        self._profile: Profile | None = None

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """A profile that has not ended is given up."""
        if self._profile is not None:
            with suppress(PenstockError):  # what is on its way is more important
                self._profile.__exit__(kind, error, where)

    @property
    def due(self) -> bool:
        """Whether it is to begin before the next step."""
        return self._done == self._first > 0

    def begin(self) -> None:
        """Begin, once the device has finished what is pending."""
        self._profile = profile(device=self._device).__enter__()

    def after_step(self, last: bool) -> tuple[Profile, int] | None:
        """End, if it is time to: the profile, and how many steps it saw. `last`: no step follows at once."""
        self._done += 1
        seen = self._done - self._first
        if self._profile is None or not (last or seen >= _STEPS):
            return None
        ended, self._profile = self._profile, None
        ended.__exit__(None, None, None)
        return ended, seen
