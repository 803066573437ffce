"""A schedule run by NumPy, without a device, in memory that is poisoned before and after its use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from penstock.compiler.schedule import Copy, Location, Schedule, Step
from penstock.fusion.views import base
from penstock.graph.node import Array, Node
from penstock.graph.reference import computed
from penstock.kernels.lower import constants
from penstock.kernels.source import ALIGNMENT

_POISON = 0xA5


def simulate(
    schedule: Schedule,
    inputs: Sequence[Array],
    scalars: Sequence[Any] = (),
    aliases: Mapping[int, int] | None = None,
) -> list[Array]:
    """The bytes of the wanted values. `aliases` names wanted values that are written over inputs.

    The steps of a turn may run in any order; here the last runs first.
    """
    memory = [np.full(buffer.nbytes, _POISON, np.uint8) for buffer in schedule.buffers]
    for at, array in zip(schedule.inputs, inputs, strict=True):
        memory[at] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).copy()
    for wanted, given in (aliases or {}).items():
        memory[schedule.results[wanted]] = memory[schedule.inputs[given]]
    for _, turn in groupby(schedule.steps, lambda step: step.turn):
        for step in reversed(list(turn)):
            for (buffer, offset), array in _written(step, memory, scalars):
                memory[buffer][offset * ALIGNMENT :][: array.nbytes] = np.frombuffer(
                    array.tobytes(), np.uint8
                )
    return [memory[at] for at in schedule.results]


def _written(
    step: Step | Copy, memory: Sequence[Array], scalars: Sequence[Any]
) -> list[tuple[Location, Array]]:
    """What a step writes, and where."""
    if isinstance(step, Copy):
        buffer, offset = step.source
        return [(step.target, memory[buffer][offset * ALIGNMENT :][: step.nbytes].copy())]
    group = step.group
    count = len(group.outputs)
    given = zip(group.inputs, step.locations[count:], strict=False)
    known = {node: _value(base(node), location, memory).reshape(node.shape) for node, location in given}
    values = (scalars[at] for at in step.constants)
    named = dict(zip(constants(group), values, strict=False))
    for node in group.nodes:
        attributes = {name: named.get((node, name), value) for name, value in node.attributes.items()}
        known[node] = computed(node, [known[parent] for parent in node.inputs], attributes)
    scratch = step.locations[count + len(group.inputs) :]
    sizes = step.lowering.scratch if step.lowering is not None else ()
    poisoned = [np.full(nbytes, _POISON, np.uint8) for nbytes in sizes]
    outputs = [np.ascontiguousarray(known[node]) for node in group.outputs]
    return [*zip(step.locations, outputs, strict=False), *zip(scratch, poisoned, strict=True)]


def _value(node: Node, location: Location, memory: Sequence[Array]) -> Array:
    buffer, offset = location
    stored = memory[buffer][offset * ALIGNMENT :][: node.nbytes]
    return stored.copy().view(node.dtype).reshape(node.shape)
