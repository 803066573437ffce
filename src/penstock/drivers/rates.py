"""How fast a device gets through the launches of a program: what step times are predicted from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.drivers.driver import Cost

_LINK = 64.0  # bytes that kernels move while one crosses a PCI bus
# Of the time of a copy: by how much it slows the kernels beside it, as a GPT's training steps did on an H200.
BESIDE = 1 / 20


class Crossing(NamedTuple):
    """A copy to the host or from there, beside the launches of a program, which are numbered in order."""

    nbytes: int
    to_host: bool
    at: int  # how many launches stand before it
    after: int  # how many of these must have ended
    copies: tuple[int, ...]  # those that must have ended, by number
    before: int | None  # the first launch that waits for it


@dataclass(frozen=True)
class StepRates:
    """The rates that kernels reach inside a training step; per second, unless said otherwise."""

    bandwidth: float  # bytes that kernels read and write
    operations: Mapping[str, float]  # of products of matrices, by dtype; float32 is always there
    launch: float  # seconds that each launch takes beside its work
    link: float  # bytes between the memory of the host and that of the device
    attention: float = 1.0  # of the rate of products: the share that those inside of attention reach

    def seconds(self, launches: Sequence[Cost], copies: Sequence[Crossing] = ()) -> float:
        """About how long a program takes, with the time in which launches wait for copies.

        Launches follow one another: each takes time to start, and to move bytes or to multiply. Copies run
        beside them, one at a time in either direction.
        """
        ended = [0.0]  # when so many launches have ended
        waited_for: dict[int, float] = {}  # by launch
        sent, fetched = 0.0, 0.0  # until when the link is busy in each direction
        busy = sum(map(self.launch_seconds, launches))  # how long kernels run, slowed by copies beside them
        done: list[float] = []  # when each copy is
        waiting = iter([*copies, None])
        copy = next(waiting)
        for number in range(len(launches) + 1):
            while copy is not None and copy.at <= number:
                free = sent if copy.to_host else fetched
                start = max(free, ended[copy.after], *(done[other] for other in copy.copies))
                end = start + self.launch + copy.nbytes / self.link
                busy += BESIDE * (end - start)
                sent, fetched = (end, fetched) if copy.to_host else (sent, end)
                done.append(end)
                if copy.before is not None:
                    waited_for[copy.before] = max(end, waited_for.get(copy.before, 0.0))
                copy = next(waiting)
            if number < len(launches):
                start = max(ended[-1], waited_for.get(number, 0.0))
                ended.append(start + self.launch_seconds(launches[number]))
        return max(ended[-1], busy, sent, fetched)

    def launch_seconds(self, cost: Cost) -> float:
        """About how long a launch takes by itself: what it moves and what it multiplies, it does at once."""
        rate = self.product_rate(cost.product) * (self.attention if cost.attends else 1.0)
        multiplying = cost.operations / rate if cost.product else 0.0
        return self.launch + max(cost.nbytes / self.bandwidth, multiplying)

    @classmethod
    def usual(cls, gpu: bool, tf32: bool) -> StepRates:
        """Rates in relations that are usual, where only these count: a byte is moved in a unit of time."""
        if not gpu:
            return cls(1.0, {"float32": 16.0}, 64 << 10, 1 / _LINK)
        # An H200 multiplies 650 TFLOP/s in training steps, and moves 4 TB/s; data sheets promise more.
        half = dict.fromkeys(("float16", "bfloat16"), 160.0)
        operations = {"float32": 75.0 if tf32 else 20.0, **half}
        return cls(1.0, operations, 4 << 20, 1 / _LINK, attention=0.5)

    def product_rate(self, dtype: str) -> float:
        """Of products in a dtype; where nothing is known of it, that of float32."""
        return self.operations.get(dtype, self.operations["float32"])
