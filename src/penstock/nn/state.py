"""Loading values into the tensors of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.graph.node import leaf
from penstock.nn.tree import all_paths
from penstock.tensor.core import Tensor, from_numpy
from penstock.tensor.dlpack import imported

if TYPE_CHECKING:
    from penstock.nn.module import Module


class Differences(NamedTuple):
    """Names that only the module, or only the state, has."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def read(tensors: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
    """The values of tensors by name."""
    futures = {name: tensor.numpy_async() for name, tensor in tensors.items()}
    return {name: future.wait() for name, future in futures.items()}


def load(module: Module, state: Mapping[str, Any], strict: bool) -> Differences:
    """Load a state into a module, all values or none."""
    tensors = module.saved_tensors()
    given = _by_first_names(module, tensors, state)
    missing, unknown = sorted(set(tensors) - set(given)), sorted(set(given) - set(tensors))
    if strict and (missing or unknown):
        raise KeyError(f"the state lacks {missing or 'nothing'} and has {unknown or 'nothing'} beyond it")
    arrays = {name: as_array(given[name]) for name in tensors if name in given}
    for name, array in arrays.items():
        if array.shape != tensors[name].shape:
            raise ValueError(f"{name} has shape {tensors[name].shape}, and {array.shape} was given")
    for name, array in arrays.items():
        tensor = tensors[name]
        assign(tensor, from_numpy(array.astype(tensor._node.dtype.numpy), tensor.device))
    return Differences(missing, unknown)


def _by_first_names(
    module: Module, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> dict[str, Any]:
    """A state with the first names of shared tensors: PyTorch's states have all their names."""
    if set(state) == set(tensors):
        return dict(state)
    first = {id(tensor): name for name, tensor in tensors.items()}
    others = {path: first[id(tensor)] for path, tensor in all_paths(module) if id(tensor) in first}
    result: dict[str, Any] = {}
    for name, value in state.items():
        shared = others.get(name, name)
        if shared in result and not np.array_equal(as_array(result[shared]), as_array(value), equal_nan=True):
            raise ValueError(
                f"{name} is the same tensor as {shared} in this module, and the state has two values"
            )
        result[shared] = value
    return result


def as_array(value: Any) -> npt.NDArray[Any]:
    """A value of a state (an array, a tensor, or a tensor of PyTorch) as a NumPy array."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    plain = value.detach() if hasattr(value, "detach") else value
    return np.array(imported(plain.cpu() if hasattr(plain, "cpu") else plain))


def assign(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor another value, of any shape and dtype."""
    value.realize()
    value._node.value.shared = True
    tensor._become(leaf(value._node.value, value.shape, value._node.dtype))
