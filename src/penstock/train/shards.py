"""The shards of a checkpoint: safetensors files, of which each rank writes one.

A checkpoint's own file is written after all of its shards, and lists them with their checksums; shards that
no checkpoint lists belong to none. Their names never come again, so that no shard is written over.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from penstock.data.files import written_whole
from penstock.distributed.pieces import Piece, PiecedArrays
from penstock.errors import CheckpointError
from penstock.files import open_regular, parse_json
from penstock.models.weights import header_of, tensors_in
from penstock.printable import shown

Array = npt.NDArray[Any]
_NAME = re.compile(r"shard-(\d{8,})-[0-9a-f]{8}-\d+-of-\d+\.safetensors")
_PIECE = re.compile(r"(.+)\[(\d+):(\d+)\]")  # the name of an array, and its items
_FORMAT = "penstock shard 1"
_CHUNK = 1 << 20  # bytes


def name_of(step: int, token: str, rank: int, size: int) -> str:
    """The file of a rank's shard; `token` is eight random digits, the same of all shards of a checkpoint."""
    return f"shard-{step:08}-{token}-{rank}-of-{size}.safetensors"


def storable(array: Array) -> Array:
    """The same values, float16 and bfloat16 as float32, which NumPy knows."""
    return np.asarray(array, np.float32 if array.dtype.itemsize == 2 else None, order="C")


def write_shard(path: Path, pieces: Sequence[Piece], check: Callable[[str, Array], None]) -> str:
    """Write pieces of arrays, of which one tensor at a time is in the host's memory; their checksum.

    `check` is given the items of each piece, and may raise.
    """
    kinds = [
        (f"{piece.name}[{piece.start}:{piece.stop}]", _stored_dtype(piece), (piece.stop - piece.start,))
        for piece in pieces
    ]
    shapes = {piece.name: piece.shape for piece in pieces}
    header = header_of(kinds, {"format": _FORMAT, "shapes": json.dumps(shapes)})
    total = zlib.crc32(header)
    with written_whole(path) as file:
        file.write(header)
        for _, group in itertools.groupby(pieces, key=lambda piece: id(piece.tensor)):
            values: Array | None = None
            for piece in group:
                values = piece.tensor.numpy().reshape(-1) if values is None else values
                array = storable(values[piece.offset : piece.offset + piece.stop - piece.start])
                check(piece.name, array)
                content = array.tobytes()
                total = zlib.crc32(content, total)
                file.write(content)
    return f"{total:08x}"


def _stored_dtype(piece: Piece) -> np.dtype[Any]:
    dtype = np.dtype(piece.tensor._node.dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def read_shards(folder: Path, sums: Mapping[str, str], common: Mapping[str, Array]) -> PiecedArrays:
    """The arrays in shards, and others, which are whole; CheckpointError if anything is missing or damaged.

    The files are read through once for their checksums, and mapped.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[tuple[int, Array]]] = {}
    for name, array in common.items():
        shapes[name], pieces[name] = array.shape, [(0, array.reshape(-1))]
    for file, wanted in sums.items():
        path = folder / file
        try:
            known = _NAME.fullmatch(file) and _sum(path) == wanted
        except OSError as error:
            raise CheckpointError(f"the shard {path} cannot be read: {error.strerror}") from None
        if not known:
            raise CheckpointError(f"the shard {path} is damaged: its checksum is wrong")
        _add(path, shapes, pieces)
    try:
        return PiecedArrays(shapes, {name: sorted(parts, key=_first) for name, parts in pieces.items()})
    except ValueError as error:
        raise CheckpointError(f"the shards in {folder} do not belong together: {error}") from None


def _first(piece: tuple[int, Array]) -> int:
    return piece[0]


def _add(path: Path, shapes: dict[str, tuple[int, ...]], pieces: dict[str, list[tuple[int, Array]]]) -> None:
    """Add what is in a shard, whose checksum is right."""
    try:
        with safe_open(path, "numpy") as file:
            own = parse_json((file.metadata() or {})["shapes"])
        stored = list(tensors_in(path))
        data = np.memmap(path, np.uint8, "r")  # a single one: a process has a limited number
        for name, tensor in stored:
            match = _PIECE.fullmatch(name)
            if match is None:
                raise ValueError(f"it has {shown(name)}")
            array = np.frombuffer(data, tensor.numpy_dtype, tensor.shape[0], tensor.offset)
            shapes[match[1]] = tuple(map(int, own[match[1]]))
            pieces.setdefault(match[1], []).append((int(match[2]), array))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path} is no shard of a checkpoint: {error}") from None


def _sum(path: Path) -> str:
    total = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            total = zlib.crc32(chunk, total)
    return f"{total:08x}"


def remove_unlisted(folder: Path, listed: Mapping[int, Sequence[str] | None]) -> None:
    """Remove shards that no checkpoint lists, by its step; None for a checkpoint that cannot be read."""
    with suppress(OSError):
        for path in list(folder.glob("shard-*.safetensors")):
            match = _NAME.fullmatch(path.name)
            files = listed.get(int(match[1]), ()) if match else None
            if files is not None and path.name not in files:
                with suppress(OSError):
                    path.unlink()
