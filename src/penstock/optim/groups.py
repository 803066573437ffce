"""Parameter groups with their settings, and settings that change between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import CaptureError
from penstock.runtime import Device
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, from_numpy

Settings = dict[str, Any]
_BETAS = ("beta1", "beta2")  # the two settings in `betas`


class Varied:
    """A setting of all groups as a tensor, so that a captured step reads its present value."""

    def __init__(self, numbers: Sequence[float], device: Device) -> None:
        self.numbers = [float(number) for number in numbers]
        self._device = device
        self.tensor = self._uploaded()

    def set(self, group: int, number: float) -> None:
        """Change the value of a group; jitted steps are not captured again."""
        if capture.get() is not None:
            raise CaptureError(
                "a setting of an optimizer was changed inside a jitted function, which would happen only "
                "when it is captured; change it between the calls"
            )
        self.numbers[group] = float(number)
        self.tensor._become(self._uploaded()._node)

    def of(self, group: int) -> Tensor:
        """The value of a group, as a tensor without axes."""
        return self.tensor if len(self.numbers) == 1 else self.tensor[group]

    def _uploaded(self) -> Tensor:
        single = len(self.numbers) == 1
        return from_numpy(np.array(self.numbers[0] if single else self.numbers, np.float32), self._device)


class ParamGroup(MutableMapping[str, Any]):
    """Parameters and their settings, with PyTorch's names: `params`, `lr`, and those of the optimizer.

    A change of `lr` needs no new capture of a jitted step. Other settings are constants of a capture, so a
    change captures the step again, unless a scheduler varies them.

    >>> optimizer = ps.optim.SGD([ps.nn.Parameter(ps.zeros(2))], lr=0.1)
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """

    def __init__(
        self, number: int, params: list[Tensor], settings: Settings, varied: Mapping[str, Varied]
    ) -> None:
        self._number, self._params = number, params
        self._settings, self._varied = settings, varied
        self._more: dict[str, Any] = {}  # values that schedulers store here

    def __getitem__(self, name: str) -> Any:
        if name == "params":
            return self._params
        if name == "betas" and _BETAS[0] in self._settings:
            return tuple(self[beta] for beta in _BETAS)
        if name in self._varied:
            return self._varied[name].numbers[self._number]
        return self._settings[name] if name in self._settings else self._more[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "betas" and _BETAS[0] in self._settings:
            for beta, number in zip(_BETAS, value, strict=True):
                self[beta] = number
        elif name in self._varied:
            self._varied[name].set(self._number, value)
        elif name in self._settings:
            self._settings[name] = type(self._settings[name])(value)
        elif name == "initial_lr":
            self._more[name] = value
        else:
            raise KeyError(f"a group has {', '.join(self)}, of which params are fixed; {name!r} was given")

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name!r} cannot be removed from a parameter group")

    def __iter__(self) -> Iterator[str]:
        others = [name for name in self._settings if name not in _BETAS]
        betas = ["betas"] if _BETAS[0] in self._settings else []
        return iter(["params", "lr", *others, *betas, *self._more])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.items() if name != "params"}
        return f"ParamGroup({len(self._params)} parameters, {shown})"


def flat(settings: Mapping[str, Any]) -> Settings:
    """Settings with `betas` split into `beta1` and `beta2`."""
    result: Settings = {}
    for name, value in settings.items():
        if name == "betas":
            first, second = value
            result |= {_BETAS[0]: float(first), _BETAS[1]: float(second)}
        else:
            result[name] = value if isinstance(value, (bool, str)) or value is None else float(value)
    return result
