"""Summary of a model: its layers with the shapes of their results and their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.nn.module import Module, evaluating
from penstock.tensor.core import Tensor
from penstock.tensor.recording import no_grad, only_recording


@dataclass(frozen=True)
class Row:
    """A module of a model."""

    path: str  # empty for the model itself
    kind: str
    depth: int
    output: str  # the shape of its result, or of its results
    parameters: int  # including those of modules inside it, each once


@dataclass(frozen=True)
class Summary:
    """The modules of a model in the order of their calls; `str()` is a table."""

    rows: tuple[Row, ...]
    parameters: int
    trained: int  # parameters that are not frozen
    parameter_bytes: int
    buffer_bytes: int

    def __str__(self) -> str:
        cells = [("layer", "output", "parameters")]
        for row in self.rows:
            name = f"{row.path.rsplit('.', 1)[-1]}: {row.kind}" if row.path else row.kind
            cells.append((f"{'  ' * row.depth}{name}", row.output, f"{row.parameters:,}"))
        widths = [max(len(line[column]) for line in cells) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in cells]
        lines.insert(1, "-" * len(lines[0]))
        frozen = self.parameters - self.trained
        bytes_text = f"{self.parameter_bytes:,} bytes, and {self.buffer_bytes:,} of buffers"
        lines += ["", f"{self.parameters:,} parameters ({frozen:,} frozen) in {bytes_text}"]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def summary(model: Module, *inputs: Any, **named_inputs: Any) -> Summary:
    """The modules of a model and the shapes of their results for inputs; records, and computes nothing.

    >>> ps.nn.summary(ps.nn.Linear(3, 2), ps.zeros((4, 3))).parameters
    8
    """
    paths = {id(module): path for path, module in model.named_modules()}
    called: dict[int, tuple[int, Any]] = {}  # by module, in the order of the first calls
    handles = []
    depth = 0

    def before(module: Module, _: Any) -> None:
        nonlocal depth
        called.setdefault(id(module), (depth, None))
        depth += 1

    def after(module: Module, _: Any, result: Any) -> None:
        nonlocal depth
        depth -= 1
        called[id(module)] = (called[id(module)][0], result)

    modules = {id(module): module for module in model.modules()}
    for module in modules.values():
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        with no_grad(), evaluating(), only_recording():
            model(*inputs, **named_inputs)
    finally:
        for handle in handles:
            handle.remove()
    rows = [
        Row(paths[key], type(modules[key]).__name__, at, _shapes(result), _size(modules[key].parameters()))
        for key, (at, result) in called.items()
    ]
    parameters = model.parameters()
    return Summary(
        tuple(rows),
        _size(parameters),
        _size([tensor for tensor in parameters if tensor.requires_grad]),
        sum(tensor._node.nbytes for tensor in parameters),
        sum(tensor._node.nbytes for tensor in model.buffers()),
    )


def _size(tensors: list[Tensor]) -> int:
    return sum(tensor.size for tensor in tensors)


def _shapes(result: Any) -> str:
    if isinstance(result, Tensor):
        return str(list(result.shape))
    if isinstance(result, Mapping):
        return "{" + ", ".join(f"{name}: {_shapes(part)}" for name, part in result.items()) + "}"
    if isinstance(result, (list, tuple)):
        return "(" + ", ".join(map(_shapes, result)) + ")"
    return type(result).__name__
