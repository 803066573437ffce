"""Learning-rate schedulers with PyTorch's names.

A rate depends only on the initial rate and the number of steps, so a restored state continues exactly. Call
`step()` outside of jitted functions: a captured training step reads the present rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import CaptureError
from penstock.optim.optimizer import Optimizer
from penstock.tensor.capture import capture

Function = Callable[[int], float]


class LRScheduler:
    """The base of schedulers: the rates of all groups as a function of the number of steps."""

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a scheduler is for an optimizer, and {type(optimizer).__name__} was given")
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_lrs: list[float] = [group["initial_lr"] for group in optimizer.param_groups]
        self.last_epoch = last_epoch
        self.step()

    def rate(self, base: float, epoch: int, group: int) -> float:
        """The rate of a group with the initial rate `base` after `epoch` steps."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The present rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self) -> None:
        """Advance by a step, and set the rates."""
        _outside_jit()
        self.last_epoch += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain numbers."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, and set its rates."""
        if set(state) != set(self.state_dict()) or len(state["base_lrs"]) != len(self.base_lrs):
            wanted = f"{sorted(self.state_dict())} for {len(self.base_lrs)} groups"
            raise ValueError(f"the state of a scheduler has {wanted}, and {sorted(state)} were given")
        self.last_epoch, self.base_lrs = int(state["last_epoch"]), [float(lr) for lr in state["base_lrs"]]
        self._apply()

    def _apply(self) -> None:
        present, known = len(self.optimizer.param_groups), len(self.base_lrs)
        if present != known:
            raise ValueError(
                f"a scheduler for {known} groups, and there are {present}; make another scheduler"
            )
        for at, group in enumerate(self.optimizer.param_groups):
            group["lr"] = self.rate(self.base_lrs[at], self.last_epoch, at)


def _check_steps(name: str, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"{name} is 1 or more, and {steps} was given")


def _outside_jit() -> None:
    if capture.get() is not None:
        raise CaptureError("scheduler.step() is called between the calls of a jitted function, not inside")


class LambdaLR(LRScheduler):
    """The initial rate times a function of the number of steps, or a function for each group."""

    def __init__(
        self, optimizer: Optimizer, lr_lambda: Function | Sequence[Function], last_epoch: int = -1
    ) -> None:
        count = len(optimizer.param_groups)
        self.lr_lambdas = [lr_lambda] * count if callable(lr_lambda) else list(lr_lambda)
        if len(self.lr_lambdas) != count:
            raise ValueError(f"{count} groups need as many functions, and {len(self.lr_lambdas)} were given")
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        return base * self.lr_lambdas[group](epoch)


class MultiplicativeLR(LambdaLR):
    """Multiplies the rate by a function of the number of steps at each step."""

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        return base * math.prod(self.lr_lambdas[group](number) for number in range(1, epoch + 1))


class StepLR(LRScheduler):
    """Multiplies the rate by `gamma` every `step_size` steps."""

    def __init__(
        self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        _check_steps("step_size", step_size)
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        return float(base * self.gamma ** (epoch // self.step_size))


class MultiStepLR(LRScheduler):
    """Multiplies the rate by `gamma` at each of the `milestones`."""

    def __init__(
        self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones, self.gamma = sorted(Counter(milestones).elements()), gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        return float(base * self.gamma ** bisect_right(self.milestones, epoch))


class ExponentialLR(LRScheduler):
    """Multiplies the rate by `gamma` at every step."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        return float(base * self.gamma**epoch)


class ConstantLR(LRScheduler):
    """The initial rate times `factor` for the first `total_iters` steps, and then unchanged."""

    def __init__(
        self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5, last_epoch: int = -1
    ) -> None:
        if not 0 <= factor <= 1:
            raise ValueError(f"factor is from 0 to 1, and {factor} was given")
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        return base * (self.factor if epoch < self.total_iters else 1.0)


class LinearLR(LRScheduler):
    """The initial rate times a factor that goes linearly from `start_factor` to `end_factor`."""

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        if not 0 < start_factor <= 1 or not 0 <= end_factor <= 1:
            raise ValueError(f"factors are up to 1, and {start_factor} and {end_factor} were given")
        _check_steps("total_iters", total_iters)
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        done = min(epoch, self.total_iters) / self.total_iters
        return base * (self.start_factor + (self.end_factor - self.start_factor) * done)


class PolynomialLR(LRScheduler):
    """Decays to 0 within `total_iters` steps, by a power of the remaining share of steps."""

    def __init__(
        self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1
    ) -> None:
        _check_steps("total_iters", total_iters)
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        return float(base * (1 - min(epoch, self.total_iters) / self.total_iters) ** self.power)


class CosineAnnealingLR(LRScheduler):
    """Follows a cosine from the initial rate to `eta_min` at `T_max` steps, and back."""

    def __init__(
        self,
        optimizer: Optimizer,
        T_max: int,  # noqa: N803 - PyTorch's name
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        _check_steps("T_max", T_max)
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * epoch / self.T_max)) / 2


class CosineAnnealingWarmRestarts(LRScheduler):
    """Follows half a cosine down to `eta_min` repeatedly, each time `T_mult` times as long as before."""

    def __init__(
        self,
        optimizer: Optimizer,
        T_0: int,  # noqa: N803 - PyTorch's name
        T_mult: int = 1,  # noqa: N803 - PyTorch's name
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if T_0 < 1 or T_mult < 1:
            raise ValueError(f"T_0 and T_mult are 1 or more, and {T_0} and {T_mult} were given")
        self.T_0, self.T_mult, self.eta_min = T_0, T_mult, eta_min
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        length = self.T_0
        if self.T_mult == 1:
            epoch %= length
        while epoch >= length:
            epoch, length = epoch - length, length * self.T_mult
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * epoch / length)) / 2


class OneCycleLR(LRScheduler):
    """Rises to `max_lr` and falls far below the initial rate, while momentum does the opposite."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        total = total_steps if total_steps is not None else (epochs or 0) * (steps_per_epoch or 0)
        if total < 1:
            raise ValueError("OneCycleLR needs total_steps, or epochs and steps_per_epoch, of 1 or more")
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"anneal_strategy is 'cos' or 'linear', and {anneal_strategy!r} was given")
        self.total_steps, self._cos = total, anneal_strategy == "cos"
        count = len(optimizer.param_groups)
        self.max_lrs = [float(max_lr)] * count if isinstance(max_lr, (int, float)) else list(max_lr)
        self._first, self._last = 1 / div_factor, 1 / (div_factor * final_div_factor)
        top, end = pct_start * total - 1, total - 1
        # The end of each phase, and its start and end values by index: 0 initial, 1 maximum, 2 final.
        self._phases: list[tuple[float, int, int]] = [(top, 0, 1)]
        self._phases += [(2 * top, 1, 0), (end, 0, 2)] if three_phase else [(end, 1, 2)]
        self._momenta = (max_momentum, base_momentum, max_momentum)
        self._momentum = self._varied(optimizer) if cycle_momentum else None
        super().__init__(optimizer, last_epoch)

    @staticmethod
    def _varied(optimizer: Optimizer) -> str:
        group = optimizer.param_groups[0]
        name = "beta1" if "betas" in group else "momentum"
        if not group.get(name):
            raise ValueError("cycle_momentum is for optimizers with momentum or betas; set it to False")
        optimizer.vary(name)
        return name

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        most = self.max_lrs[group]
        return self._between((most * self._first, most, most * self._last), epoch)

    def _between(self, values: tuple[float, float, float], epoch: int) -> float:
        if epoch > self.total_steps - 1:
            raise ValueError(f"OneCycleLR is for {self.total_steps} steps, and more were taken")
        start = 0.0
        for end, source, target in self._phases:
            if epoch <= end or end == self._phases[-1][0]:
                done = (epoch - start) / (end - start)
                share = (1 - math.cos(math.pi * done)) / 2 if self._cos else done
                return values[source] + (values[target] - values[source]) * share
            start = end
        raise AssertionError("the last phase ends with the last step")

    def _apply(self) -> None:
        super()._apply()
        if self._momentum is not None:
            for group in self.optimizer.param_groups:
                group[self._momentum] = self._between(self._momenta, self.last_epoch)


class SequentialLR(LRScheduler):
    """Schedulers in sequence, each starting from its own step 0 at its milestone.

    A `MultiplicativeLR` goes on from the rate before its milestone, and others from the initial rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[LRScheduler],
        milestones: Sequence[int],
        last_epoch: int = -1,
    ) -> None:
        if len(milestones) != len(schedulers) - 1 or list(milestones) != sorted(milestones):
            raise ValueError(
                f"{len(schedulers)} schedulers need {len(schedulers) - 1} milestones, in order: {milestones}"
            )
        _check_of(optimizer, schedulers)
        self.schedulers, self.milestones = list(schedulers), list(milestones)
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        at = bisect_right(self.milestones, epoch)
        start = self.milestones[at - 1] if at else 0
        part = self.schedulers[at]
        if start and isinstance(part, MultiplicativeLR):
            base = self.rate(base, start - 1, group) * part.lr_lambdas[group](0)
        return part.rate(base, epoch - start, group)


class ChainedScheduler(LRScheduler):
    """Several schedulers together: the product of their factors of the initial rate."""

    def __init__(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None = None) -> None:
        if not schedulers:
            raise ValueError("a chain needs a scheduler")
        target = schedulers[0].optimizer if optimizer is None else optimizer
        _check_of(target, schedulers)
        self.schedulers = list(schedulers)
        super().__init__(target)

    def rate(self, base: float, epoch: int, group: int) -> float:
        """See `LRScheduler`."""
        if not base:
            return 0.0
        return base * math.prod(part.rate(base, epoch, group) / base for part in self.schedulers)


def _check_of(optimizer: Optimizer, schedulers: Sequence[LRScheduler]) -> None:
    for scheduler in schedulers:
        if scheduler.optimizer is not optimizer:
            raise ValueError(f"a {type(scheduler).__name__} is of another optimizer")


class ReduceLROnPlateau:
    """Multiplies the rate by `factor` when a metric has not improved for more than `patience` steps.

    An improvement is by more than `threshold`, or than that share of the best metric. `min_lr` is a number,
    or one for each group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            raise ValueError(
                f"mode is min or max and threshold_mode rel or abs; {mode!r}, {threshold_mode!r} were given"
            )
        if not 0 <= factor < 1:
            raise ValueError(f"factor is from 0 to less than 1, and {factor} was given")
        count = len(optimizer.param_groups)
        self.min_lrs = [float(min_lr)] * count if isinstance(min_lr, (int, float)) else list(min_lr)
        if len(self.min_lrs) != count:
            raise ValueError(f"{count} groups need as many min_lr, and {len(self.min_lrs)} were given")
        self.optimizer, self.factor, self.patience = optimizer, factor, patience
        self.eps, self.cooldown = eps, cooldown
        self._sign = 1 if mode == "min" else -1
        self._relative, self._threshold = threshold_mode == "rel", threshold
        self.best = math.inf * self._sign
        self.num_bad_epochs = self.cooldown_counter = self.last_epoch = 0

    def get_last_lr(self) -> list[float]:
        """The present rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, metrics: Any) -> None:
        """Advance by a step with its metric."""
        _outside_jit()
        value = float(metrics)
        self.last_epoch += 1
        if self._better(value):
            self.best, self.num_bad_epochs = value, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
        if self.num_bad_epochs > self.patience:
            for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
                lower = max(group["lr"] * self.factor, least)
                if group["lr"] - lower > self.eps:
                    group["lr"] = lower
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def _better(self, value: float) -> bool:
        if self._relative:  # as in PyTorch, which lets a negative metric get worse by its share
            wanted = self.best * (1 - self._sign * self._threshold)
        else:
            wanted = self.best - self._sign * self._threshold
        return value * self._sign < wanted * self._sign

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain numbers."""
        names = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
        return {name: getattr(self, name) for name in names} | {"lr": self.get_last_lr()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, and set its rates."""
        if set(state) != set(self.state_dict()):
            wanted = sorted(self.state_dict())
            raise ValueError(f"the state of this scheduler has {wanted}, and {sorted(state)} were given")
        for group, rate in zip(self.optimizer.param_groups, state["lr"], strict=True):
            group["lr"] = rate
        for name in set(state) - {"lr"}:
            setattr(self, name, state[name])
