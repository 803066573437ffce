"""Step-dependent scalars of each parameter, which depend on how many gradients it has had.

The number of steps and the powers of Adam's betas are such scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.errors import CaptureError
from penstock.runtime import Device
from penstock.tensor.arithmetic import where
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, from_numpy, outside_capture

Arrays = Mapping[str, npt.NDArray[np.float32]]
Rule = Callable[
    [int, Sequence[Tensor]], Sequence[Tensor]
]  # from a parameter and its scalars to the next scalars


class Counts:
    """The scalars of parameters, by name.

    Parameters of the same kind that had their gradients in the same steps are a cohort, which shares its
    scalars. Usually there is a single cohort.
    """

    def __init__(self, first: Mapping[str, float], kinds: Sequence[Hashable], device: Device) -> None:
        self.names = tuple(first)
        self._device = device
        known = list(dict.fromkeys(kinds))
        self._kinds = tuple(known.index(kind) for kind in kinds)  # of each parameter
        self._cohort = list(self._kinds)  # of each parameter
        self._scalars = [[self._scalar(value) for value in first.values()] for _ in known]  # of each cohort
        self._divisions = 0  # how often cohorts have changed; a captured step depends on it

    @property
    def tensors(self) -> list[Tensor]:
        """All scalars, for computing or moving them together."""
        return [number for cohort in self._scalars for number in cohort]

    def of(self, parameter: int) -> list[Tensor]:
        """The scalars of a parameter, in the order of their names."""
        return self._scalars[self._cohort[parameter]]

    @property
    def cohorts(self) -> Sequence[int]:
        """The cohort of each parameter."""
        return self._cohort

    def divide(self, present: Collection[int]) -> None:
        """Split cohorts for a step in which only the parameters `present` have gradients."""
        for cohort in {self._cohort[parameter] for parameter in present}:
            self._divide(cohort, present)
        capturing = capture.get()
        if capturing is not None:
            capturing.assume(lambda: self._divisions)

    def advance(self, present: Collection[int], sound: Tensor | None, rule: Rule) -> None:
        """Advance the scalars of the parameters `present`; if gradients may overflow, only where `sound`."""
        for cohort, parameter in {self._cohort[parameter]: parameter for parameter in present}.items():
            scalars = self._scalars[cohort]
            for scalar, new in zip(scalars, list(rule(parameter, scalars)), strict=True):
                scalar._rebind(new if sound is None else where(sound, new, scalar))

    def state(self) -> dict[str, npt.NDArray[np.float32]]:
        """The scalars of each parameter, by name."""
        rows = [[number.item() for number in cohort] for cohort in self._scalars]
        table = np.array([rows[cohort] for cohort in self._cohort], np.float32)
        return dict(zip(self.names, table.T, strict=True))

    def load(self, state: Arrays) -> None:
        """Restore a state; older checkpoints have a single scalar for all parameters."""
        columns = [np.broadcast_to(state[name], len(self._cohort)).tolist() for name in self.names]
        rows = list(zip(self._kinds, *columns, strict=True))
        distinct = list(dict.fromkeys(rows))
        cohort = [distinct.index(row) for row in rows]
        if cohort != self._cohort or len(distinct) != len(self._scalars):
            self._cohort, self._divisions = cohort, self._divisions + 1
            self._scalars = [[self._scalar(number) for number in row[1:]] for row in distinct]
        for old, row in zip(self._scalars, distinct, strict=True):
            for tensor, number in zip(old, row[1:], strict=True):
                tensor._become(self._scalar(number)._node)

    def _divide(self, cohort: int, present: Collection[int]) -> None:
        """Move the absent parameters of a cohort to a new cohort with the same values."""
        absent = [at for at, other in enumerate(self._cohort) if other == cohort and at not in present]
        if not absent:
            return
        if capture.get() is not None and any(number._node.value is None for number in self._scalars[cohort]):
            raise CaptureError(
                "two steps in a jitted function have gradients of different parameters; "
                "call optimizer.step() once outside of jit with each of them"
            )
        with outside_capture():  # they outlive the capture
            self._scalars.append([self._scalar(number.item()) for number in self._scalars[cohort]])
        for parameter in absent:
            self._cohort[parameter] = len(self._scalars) - 1
        self._divisions += 1

    def _scalar(self, number: float) -> Tensor:
        return from_numpy(np.array(number, np.float32), self._device)
