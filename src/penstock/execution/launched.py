"""What an executable launches: a single kernel, or what it launched in its last run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.compiler.schedule import Copy
from penstock.kernels.source import ALIGNMENT
from penstock.memory.buffer import Buffer
from penstock.stream.program import CopyEnds, Program
from penstock.stream.queue import Uses
from penstock.stream.recorder import Launch


@dataclass(frozen=True, slots=True)
class DirectLaunch:
    """A launch that gets all arguments at each run: the sources of the arguments in order."""

    command: Launch
    touched: Callable[[Sequence[Buffer]], Sequence[Buffer]]  # the buffers that it takes, of those of a run
    scalars: list[int]
    constants: Sequence[int]


class RepeatedRun(NamedTuple):
    """What was launched in a run, and where its buffers lay."""

    program: Program
    uses: Uses
    places: Sequence[tuple[int, int]]  # the list itself says which run it was
    arenas: Sequence[tuple[int, int]]


def ends(step: Copy, buffers: Sequence[Buffer]) -> CopyEnds:
    """Where a copy goes and comes from, of the buffers of a run."""
    (target, to), (source, start) = step.target, step.source
    return CopyEnds(buffers[target], to * ALIGNMENT, buffers[source], start * ALIGNMENT)
