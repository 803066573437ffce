"""Adam's bias correction: for each parameter the powers of the betas, by how many gradients it has had."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.errors import CaptureError
from penstock.runtime import Device
from penstock.tensor.arithmetic import where
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, from_numpy, outside_capture

Arrays = Mapping[str, npt.NDArray[np.float32]]
NAMES = ("power1", "power2")


class BiasCorrection:
    """The powers of the betas of some parameters, which correct the moments for their start at 0.

    Parameters that had all their gradients in the same steps share their powers, so mostly there is one pair.
    """

    def __init__(self, betas: Sequence[float], parameters: int, device: Device) -> None:
        self._betas = tuple(betas)
        self._device = device
        self._group = [0] * parameters  # of each parameter
        self._powers = [self._pair(1.0, 1.0)]  # of each group
        self._divisions = 0  # how often the groups became others; a captured step is for one division

    @property
    def tensors(self) -> list[Tensor]:
        """All powers, for those who compute or move them together."""
        return [power for pair in self._powers for power in pair]

    def powers(self, parameter: int) -> list[Tensor]:
        """Both powers of a parameter."""
        return self._powers[self._group[parameter]]

    @property
    def groups(self) -> Sequence[int]:
        """The group of each parameter."""
        return self._group

    def divide(self, present: Collection[int]) -> None:
        """Have groups in which either all or none of the parameters are `present`, for a step of these."""
        for group in {self._group[parameter] for parameter in present}:
            self._divide(group, present)
        capturing = capture.get()
        if capturing is not None:
            capturing.assume(lambda: self._divisions)

    def advance(self, present: Collection[int], sound: Tensor | None) -> None:
        """Count a step, in which the parameters `present` had gradients that may not have been `sound`."""
        for group in {self._group[parameter] for parameter in present}:
            for power, beta in zip(self._powers[group], self._betas, strict=True):
                power._rebind(power * beta if sound is None else where(sound, power * beta, power))

    def state(self) -> dict[str, npt.NDArray[np.float32]]:
        """The powers of each parameter, by name."""
        pairs = [[power.item() for power in pair] for pair in self._powers]
        table = np.array([pairs[group] for group in self._group], np.float32)
        return dict(zip(NAMES, table.T, strict=True))

    def load(self, state: Arrays) -> None:
        """Go on from a state; one number for all parameters, as older checkpoints have it, will do."""
        columns = [np.broadcast_to(state[name], len(self._group)).tolist() for name in NAMES]
        pairs = list(zip(*columns, strict=True))
        distinct = list(dict.fromkeys(pairs))
        group = [distinct.index(pair) for pair in pairs]
        if group != self._group:
            self._group, self._divisions = group, self._divisions + 1
            self._powers = [self._pair(*pair) for pair in distinct]
        for old, pair in zip(self._powers, distinct, strict=True):
            for power, number in zip(old, pair, strict=True):
                power._become(self._number(number)._node)

    def _divide(self, group: int, present: Collection[int]) -> None:
        """Give those of a group that are not present powers of their own, of the same values."""
        absent = [at for at, own in enumerate(self._group) if own == group and at not in present]
        if not absent:
            return
        if capture.get() is not None and any(power._node.value is None for power in self._powers[group]):
            raise CaptureError(
                "two steps of one jitted function have gradients of different parameters; "
                "call optimizer.step() once outside of jit with each of them"
            )
        with outside_capture():  # they are not a captured function's own
            self._powers.append([self._number(power.item()) for power in self._powers[group]])
        for parameter in absent:
            self._group[parameter] = len(self._powers) - 1
        self._divisions += 1

    def _pair(self, *numbers: float) -> list[Tensor]:
        return [self._number(number) for number in numbers]

    def _number(self, number: float) -> Tensor:
        return from_numpy(np.array(number, np.float32), self._device)
