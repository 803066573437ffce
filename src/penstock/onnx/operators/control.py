"""If, Loop and Scan, unrolled: which graph runs how often is known on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.registry import Call, Value, on_host, operator


@operator("If", host=(0,))
def if_(call: Call, condition: Any) -> Any:
    """What the graph of the condition gives."""
    return tuple(call.run(call.get("then_branch" if condition.item() else "else_branch"), ()))


@operator("Loop", since=1, host=(0, 1))
def loop(call: Call, count: Any, condition: Any, *carried: Value) -> Any:
    """The last values that a graph hands on, and all that it gives besides, stacked."""
    body = call.get("body")
    most = None if count is None else int(count.item())
    go_on = condition is None or bool(condition.item())
    values, kept = list(carried), list[list[Value]]()
    step = 0
    while go_on and (most is None or step < most):
        results = call.run(body, [np.asarray(step, np.int64), np.asarray(True), *values])
        go_on = bool(on_host(results[0], call.node, 1).item())
        values = results[1 : 1 + len(carried)]
        kept.append(results[1 + len(carried) :])
        step += 1
    if not kept and len(body.outputs) > 1 + len(carried):
        raise call.refuse("a loop that never runs and gathers values", "give a count of 1 or more")
    return (*values, *(_stacked(call, list(column)) for column in zip(*kept, strict=True)))


def _stacked(call: Call, values: list[Value], axis: int = 0) -> Value:
    if all(isinstance(value, np.ndarray) for value in values):
        return np.stack(values, axis=axis)
    tensors = [call.tensor(value) if isinstance(value, np.ndarray) else value for value in values]
    return ps.stack(tensors, axis=axis)


@operator("Scan", since=9)
def scan(call: Call, *inputs: Any) -> Any:
    """The last state, and all that a graph gives for the parts of the inputs, stacked."""
    count = call.get("num_scan_inputs")
    states, scanned = list(inputs[:-count]), inputs[-count:]
    axes = call.get("scan_input_axes", [0] * count)
    backward = call.get("scan_input_directions", [0] * count)
    sequences = [
        ps.unstack(ps.flip(x, axis=axis) if back else x, axis=axis)
        for x, axis, back in zip(scanned, axes, backward, strict=True)
    ]
    kept: list[list[Value]] = []
    for parts in zip(*sequences, strict=True):
        results = call.run(call.get("body"), [*states, *parts])
        states = results[: len(states)]
        kept.append(results[len(states) :])
    if not kept:
        raise call.refuse("a sequence of length 0", "give a longer one")
    outputs = len(kept[0])
    out_axes = call.get("scan_output_axes", [0] * outputs)
    reverse = call.get("scan_output_directions", [0] * outputs)
    stacked = [
        _stacked(call, list(column)[::-1] if back else list(column), axis)
        for column, axis, back in zip(zip(*kept, strict=True), out_axes, reverse, strict=True)
    ]
    return (*states, *stacked)
