"""What computes each operator of ONNX: functions by its name, and by the opset since which they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.errors import CaptureError, UnsupportedModel

if TYPE_CHECKING:
    from penstock.onnx.graph import Graph

# A tensor, or what the host knows: a constant, a shape, or what follows from them.
Value: TypeAlias = "ps.Tensor | npt.NDArray[Any]"
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Operator:
    """How an operator is computed, from an opset on."""

    function: Callable[..., Any]
    since: int
    folds: bool  # computed by NumPy where the host knows its inputs
    host: tuple[int, ...]  # inputs whose values are needed on the host, such as a shape
    lengths: bool  # needs only the shapes of its inputs
    statistics: tuple[int, ...]  # inputs that are measured, and not trained


_OPERATORS: dict[tuple[str, str], list[Operator]] = {}


def operator(
    *names: str,
    since: int = 7,
    folds: bool = False,
    host: Sequence[int] = (),
    lengths: bool = False,
    statistics: Sequence[int] = (),
    domain: str = "",
) -> Callable[[Function], Function]:
    """Have a function compute operators. It takes a `Call` and the inputs, and gives the outputs."""

    def register(function: Function) -> Function:
        row = Operator(function, since, folds or lengths, tuple(host), lengths, tuple(statistics))
        for name in names:
            _OPERATORS.setdefault((domain, name), []).append(row)
        return function

    return register


def choose(domain: str, name: str, opset: int) -> Operator | None:
    """How an operator of an opset is computed; None where nothing does."""
    known = [row for row in _OPERATORS.get((domain, name), ()) if row.since <= opset]
    return max(known, key=lambda row: row.since, default=None)


def oldest(domain: str, name: str) -> int | None:
    """The opset since which an operator is known; None for one that is not."""
    return min((row.since for row in _OPERATORS.get((domain, name), ())), default=None)


@dataclass(frozen=True)
class Node:
    """A node of a graph."""

    domain: str
    op_type: str
    opset: int
    name: str
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def operator(self) -> Operator:
        """How it is computed."""
        known = choose(self.domain, self.op_type, self.opset)
        assert known is not None, "a graph has no other nodes"
        return known

    def __str__(self) -> str:
        """The operator with its opset, and the node's name, for messages."""
        domain = f"{self.domain}." if self.domain else ""
        return f"{domain}{self.op_type} (opset {self.opset}), node {self.name or self.outputs[0]!r}"


@dataclass(frozen=True)
class Call:
    """What an operator's function may ask for besides its inputs."""

    node: Node
    device: ps.Device
    xp: Any  # numpy where the host knows all inputs, and else penstock
    run: Callable[[Graph, Sequence[Value]], list[Value]]  # a graph that is an attribute

    @property
    def opset(self) -> int:
        """The opset of the node's domain that the model was made for."""
        return self.node.opset

    def get(self, attribute: str, default: Any = None) -> Any:
        """The value of an attribute."""
        return self.node.attributes.get(attribute, default)

    def wants(self, output: int) -> bool:
        """Whether an output has a name."""
        return output < len(self.node.outputs) and bool(self.node.outputs[output])

    def tensor(self, array: npt.ArrayLike) -> ps.Tensor:
        """What the host knows, on the device."""
        return on_device(np.asarray(array), self.device)

    def refuse(self, reason: str, instead: str) -> UnsupportedModel:
        """The error for something that is not computed."""
        return UnsupportedModel(
            f"{self.node}: {reason} is not supported; {instead}", reason=f"{self.node.op_type}: {reason}"
        )


def on_device(array: npt.NDArray[Any], device: ps.Device) -> ps.Tensor:
    """A tensor with the values of an array, a constant in kernels where there is only one value."""
    items = 1 if not any(array.strides) else array.size
    if array.size and items == 1:
        return ps.full(array.shape, array.flat[0].item(), dtype=_dtype(array), device=device)
    return ps.asarray(array, device=device)


def _dtype(array: npt.NDArray[Any]) -> Any:
    return getattr(ps, array.dtype.name)


def on_host(value: Value, node: Node, position: int) -> npt.NDArray[Any]:
    """The values of an input that an operator needs on the host."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return value.numpy()
    except CaptureError as error:
        raise CaptureError(
            f"{node} needs the values of its input {node.inputs[position]!r} on the host, which cannot be "
            f"read inside a jitted function; give it as Python numbers, or call the model outside of ps.jit"
        ) from error
