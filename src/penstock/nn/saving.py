"""Files with tensors in the safetensors format, which other libraries read, and which runs no code.

The structure around the tensors (dicts, lists, numbers, text) is JSON in the file's metadata; a file of
another library has none, and is read as a dict.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from penstock.errors import CheckpointError
from penstock.files import atomic_file, parse_json, require_regular
from penstock.printable import shown
from penstock.runtime import Device
from penstock.tensor.core import Tensor, from_numpy, resolve

_FORMAT = "penstock values 1"
_KEY = "values"  # of the metadata
# Values that JSON has no type for are a dict with one of these keys.
_TENSOR, _ARRAY, _TUPLE, _FLOAT, _DICT = "tensor", "array", "tuple", "float", "dict"


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Write a value to a file, atomically.

    A value is a tensor, an array, a module or an optimizer (of which the `state_dict` is saved), a number, a
    string, None, or a dict with strings as keys, a list or a tuple of values.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> ps.save({"x": ps.ones(2)}, path)
    >>> ps.load(path)["x"].tolist()
    [1.0, 1.0]
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    plan = _plan(value, "", arrays, ())
    metadata = {"format": _FORMAT, _KEY: json.dumps(plan)}
    content = to_safetensors({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata)
    with atomic_file(Path(path)) as file:
        file.write(content)


def load(path: str | os.PathLike[str], device: Device | str | None = None) -> Any:
    """Read what `save` wrote, or a dict of the arrays of any safetensors file; tensors go to `device`.

    A CheckpointError says why a file cannot be read.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "x.safetensors")
    >>> ps.save({"x": ps.arange(3)}, path)
    >>> ps.load(path)["x"].tolist()
    [0, 1, 2]
    """
    file = Path(path)
    try:
        require_regular(file)
        with safe_open(file, framework="numpy") as opened:
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
            metadata = opened.metadata() or {}
    except (OSError, SafetensorError, LookupError) as error:  # a LookupError: of a dtype that NumPy lacks
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if "shards" in metadata:
        raise CheckpointError(f"{file} is a checkpoint in shards; ps.train.load(path).model has its weights")
    if metadata.get("format") != _FORMAT:
        return arrays
    try:
        return _value(parse_json(metadata[_KEY]), arrays, resolve(device))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged: the description of its values cannot be read ({error})"
        ) from None


def _plan(value: Any, path: str, arrays: dict[str, npt.NDArray[Any]], above: tuple[int, ...]) -> Any:
    """The JSON of a value, with the names of its arrays, which are added to `arrays`."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
        if array.dtype.kind in "OUSMm":
            raise TypeError(f"{path or 'the value'} is an array of {array.dtype}, which cannot be saved")
        name = path or "value"
        while name in arrays:
            name += "_"
        arrays[name] = array
        return {_TENSOR if isinstance(value, Tensor) else _ARRAY: name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if id(value) in above:
        raise ValueError(f"{path or 'the value'} contains itself, and cannot be saved")
    inside = (*above, id(value))
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            wrong = next(key for key in value if not isinstance(key, str))
            raise TypeError(f"{path or 'the value'} has the key {wrong!r}; keys in a file are strings")
        parts = {key: _plan(part, _joined(path, key), arrays, inside) for key, part in value.items()}
        return {_DICT: parts}
    if isinstance(value, (list, tuple)):
        items = [_plan(part, _joined(path, str(at)), arrays, inside) for at, part in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    kind = type(value).__name__
    raise TypeError(
        f"{path or 'the value'} is of type {kind}, which cannot be saved; tensors, arrays, modules, numbers, "
        f"text, and dicts, lists and tuples of them can, and pickle saves anything"
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _value(plan: Any, arrays: Mapping[str, npt.NDArray[Any]], device: Device) -> Any:
    if isinstance(plan, list):
        return [_value(part, arrays, device) for part in plan]
    if not isinstance(plan, dict):
        return plan
    ((kind, part),) = plan.items()
    if kind == _TENSOR:
        return from_numpy(arrays[part], device)
    if kind == _ARRAY:
        return arrays[part]
    if kind == _DICT:
        return {name: _value(inside, arrays, device) for name, inside in part.items()}
    if kind == _TUPLE:
        return tuple(_value(inside, arrays, device) for inside in part)
    if kind == _FLOAT:
        return float(part)
    raise ValueError(f"a part of the unknown kind {shown(kind)}")
