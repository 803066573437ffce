"""Learning rates as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]  # from a step to its rate


def constant(rate: float, warmup: int = 0) -> Schedule:
    """A constant rate, after a linear warm-up.

    >>> rate = ps.optim.constant(1.0, warmup=3)
    >>> [rate(step) for step in (0, 1, 5)]
    [0.25, 0.5, 1.0]
    """
    return lambda step: rate * min(1.0, (step + 1) / (warmup + 1))


def cosine(rate: float, steps: int, warmup: int = 0, least: float = 0.0) -> Schedule:
    """A linear warm-up, then half a cosine down to `least`.

    >>> rate = ps.optim.cosine(1.0, steps=10)
    >>> rate(0), round(rate(10), 4)
    (1.0, 0.0)
    """
    if not 0 <= warmup <= steps:
        raise ValueError(f"a warm-up of {warmup} does not fit into {steps} steps")

    def at(step: int) -> float:
        if step < warmup:
            return rate * (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return least + (rate - least) * 0.5 * (1 + math.cos(math.pi * done))

    return at
