"""Safetensors files: weights are read where they lie in the mapped file, and written tensor by tensor.

So neither reading nor writing has a model in the memory of the host.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from penstock.errors import CheckpointError
from penstock.files import atomic_file, open_regular, parse_json, read_text, require_regular
from penstock.printable import shown
from penstock.tensor.core import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES: dict[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {str(np.dtype(dtype)): name for name, dtype in _DTYPES.items()}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # names of files that may hold weights
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_WORD = struct.Struct("<Q")  # the length of the header


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def array(self) -> npt.NDArray[Any]:
        """Its values, mapped from the file."""
        dtype = self.numpy_dtype
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)
        mapped = np.memmap(self.path, dtype, "r", self.offset, self.shape)
        return np.asarray(mapped)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Its dtype as NumPy has it; CheckpointError if NumPy has none."""
        if self.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.path} has weights of {shown(self.dtype)}, and {', '.join(_DTYPES)} are known"
            )
        return np.dtype(_DTYPES[self.dtype])


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by name: in `model.safetensors`, or in the files of an index."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}{_others(folder)}")
        return dict(tensors_in(folder / SINGLE))
    try:
        places = parse_json(read_text(folder / INDEX))["weight_map"]
        files = sorted(set(places.values()))
        names = [Path(file).name == file for file in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error!r}") from None
    if not all(names):
        raise CheckpointError(f"{folder / INDEX} names files outside of its folder: {shown(files)}")
    result: dict[str, StoredTensor] = {}
    for file in files:
        # Another file may have an older tensor of the same name.
        result |= {
            name: tensor for name, tensor in tensors_in(folder / file) if places.get(name, file) == file
        }
    missing = sorted(set(places) - set(result))
    if missing:
        raise CheckpointError(
            f"{folder / INDEX} lists {missing[0]}, which {places[missing[0]]} does not have"
        )
    return result


def _others(folder: Path) -> str:
    """What a message says of files that may hold the weights in another way."""
    names = sorted(path.name for path in folder.glob("*") if path.suffix in _WEIGHTS)
    return f"; it has {', '.join(names[:3])}" if names else ""


def tensors_in(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a file with their names, after a check of its header."""
    try:
        require_regular(path)
        with safe_open(path, framework="numpy"):  # checks the header, its offsets and sizes
            pass
        with open_regular(path) as file:
            (length,) = _WORD.unpack(file.read(_WORD.size))
            header = parse_json(file.read(length).decode())
    except (OSError, SafetensorError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    for name, entry in header.items():
        if name != "__metadata__":
            start = _WORD.size + length + entry["data_offsets"][0]
            yield name, StoredTensor(path, entry["dtype"], tuple(entry["shape"]), start)


def write_tensors(folder: Path, weights: Sequence[tuple[str, Tensor, bool]], shard_bytes: int) -> None:
    """Write tensors with their names; those that are marked are transposed. Several files if need be."""
    shards: list[list[tuple[str, Tensor, bool]]] = [[]]
    filled = 0
    for weight in weights:
        size = weight[1]._node.nbytes
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += size
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        (folder / INDEX).unlink(missing_ok=True)
        _remove_shards(folder, set())
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / file, shard)
        places |= dict.fromkeys((name for name, _, _ in shard), file)
    total = sum(tensor._node.nbytes for _, tensor, _ in weights)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    with atomic_file(folder / INDEX) as file_:
        file_.write((json.dumps(index, indent=2) + "\n").encode())
    (folder / SINGLE).unlink(missing_ok=True)
    _remove_shards(folder, set(places.values()))


def _remove_shards(folder: Path, written: set[str]) -> None:
    """Remove the files of an earlier model in a folder."""
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in written:
            path.unlink()


def write_file(path: Path, weights: Sequence[tuple[str, Tensor, bool]]) -> None:
    """Write tensors with their names into a file; those that are marked are transposed."""
    kinds = [
        (name, np.dtype(tensor._node.dtype), tensor.shape[::-1] if transposed else tensor.shape)
        for name, tensor, transposed in weights
    ]
    with atomic_file(path) as file:
        file.write(header_of(kinds, {"format": "pt"}))
        for _, tensor, transposed in weights:
            array = tensor.numpy()
            file.write(np.ascontiguousarray(array.T if transposed else array).view(np.uint8).data)


def header_of(
    tensors: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """What a file begins with, before the bytes of tensors with these names, dtypes and shapes."""
    header: dict[str, Mapping[str, Any]] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[str(dtype)], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return _WORD.pack(len(text)) + text
