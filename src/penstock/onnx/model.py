"""A model from an ONNX file as a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.constants import Sorted, floating, sort_constants
from penstock.onnx.reading import Input, Read
from penstock.onnx.registry import Value
from penstock.tensor.operands import note_constant


class OnnxModel(ps.nn.Module):
    """A model that was read from an ONNX file.

    Call it with its inputs in their order, or by their names: tensors, NumPy arrays or Python numbers. It
    gives the output, or a tuple of several. Its parameters are the floating-point initializers, by their
    names in the file.
    """

    def __init__(self, model: Read, device: ps.Device) -> None:
        self.inputs = {given.name: given for given in model.inputs}
        self.outputs = model.graph.outputs
        known: Sorted = sort_constants(model.graph, self.inputs.values(), model.initializers, device)
        self._graph, self._on_host = known.graph, known.on_host
        self._device = device
        self._values: dict[str, ps.Tensor] = {
            name: ps.asarray(array, device=device)
            for arrays in (known.parameters, known.buffers, known.constants)
            for name, array in arrays.items()
        }
        self._values |= {name: ps.nn.Parameter(self._values[name]) for name in known.parameters}
        self._initializers = (*known.parameters, *known.buffers)
        self._unsaved = frozenset(known.constants)

    def _own_parts(self) -> Mapping[str, Any]:
        return self._values

    def extra_repr(self) -> str:
        """Its inputs, its outputs, and how many nodes it has."""
        inputs = ", ".join(map(_described, self.inputs.values()))
        return f"{inputs} -> {', '.join(self.outputs)}, {len(self._graph.steps)} nodes"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output, or a tuple of several."""
        given = self._named(args, kwargs)
        device = self._device_of(given.values())
        lengths: dict[str, tuple[int, str]] = {}
        values: dict[str, Value] = {
            name: self._checked(self.inputs[name], value, device, lengths) for name, value in given.items()
        }
        values.update((name, self._values[name]) for name in self._initializers)
        results = self._graph.run(values, device, self._values)
        tensors = [
            ps.asarray(value, device=device) if isinstance(value, np.ndarray) else value for value in results
        ]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs by their names."""
        names = list(self.inputs)
        if len(args) > len(names):
            raise TypeError(
                f"the model has {len(names)} inputs ({', '.join(names)}), and {len(args)} were given"
            )
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.inputs:
                raise TypeError(f"the model has no input {name!r}; it has {', '.join(names) or 'none'}")
            if name in given:
                raise TypeError(f"input {name!r} was given twice, by position and by name")
            given[name] = value
        missing = [name for name in names if name not in given]
        if missing:
            raise TypeError(f"the model's inputs {', '.join(missing)} were not given")
        return given

    def _device_of(self, given: Iterable[Any]) -> ps.Device:
        tensors = [value for value in (*given, *self._values.values()) if isinstance(value, ps.Tensor)]
        return tensors[0].device if tensors else self._device

    def _checked(
        self, said: Input, value: Any, device: ps.Device, lengths: dict[str, tuple[int, str]]
    ) -> Value:
        """An input that fits what the model says of it; `lengths` has those that names stand for."""
        if isinstance(value, (ps.Tensor, np.ndarray)):
            if np.dtype(value.dtype) != said.dtype:
                raise TypeError(
                    f"input {said.name!r} is of {said.dtype}, and {np.dtype(value.dtype)} was given; "
                    f"convert it first"
                )
        else:
            value = _converted(said, value)
        _check_shape(said, tuple(value.shape), lengths)
        if isinstance(value, ps.Tensor):
            return value
        note_constant(value)
        return value if said.name in self._on_host else ps.asarray(value, device=device)


def _converted(said: Input, value: Any) -> Any:
    """Python numbers, or another library's array, in the dtype of the model."""
    try:
        made = np.asarray(value)
        converted = made.astype(said.dtype)
        if not floating(said.dtype) and not np.array_equal(converted, made):
            raise TypeError(f"{value!r} cannot become {said.dtype}")
        return converted
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"input {said.name!r} is a tensor, a NumPy array or numbers of {said.dtype}: {error}"
        ) from error


def _check_shape(said: Input, shape: tuple[int, ...], lengths: dict[str, tuple[int, str]]) -> None:
    if said.shape is None:
        return
    fits = len(shape) == len(said.shape)
    for wanted, length in zip(said.shape, shape, strict=False):
        if isinstance(wanted, str):
            before, where = lengths.setdefault(wanted, (length, said.name))
            if before != length and fits:
                raise ValueError(
                    f"{wanted!r} is {before} in input {where!r} and {length} in {said.name!r}: shape {shape}"
                )
        elif wanted is not None and wanted != length:
            fits = False
    if not fits:
        raise ValueError(f"input {_described(said)} was given the shape {shape}")


def _described(said: Input) -> str:
    if said.shape is None:
        return f"{said.name}: {said.dtype}"
    return f"{said.name}: {said.dtype}[{', '.join('?' if n is None else str(n) for n in said.shape)}]"
