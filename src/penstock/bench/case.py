"""Cases of benchmarks: their sizes, and the two sides that can run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.bench.peer import Torch
from penstock.drivers.driver import Capabilities
from penstock.runtime import Device
from penstock.tensor.creation import asarray
from penstock.tensor.jit import jit

Call = Callable[[], object]  # records the work once; it need not wait
Array = npt.NDArray[Any]
Way = Literal["device", "upload", "download"]  # which ceilings apply: the device's, or those of copies

_GPU_BYTES = 4 << 30  # memory for the sizes of GPUs, with a margin


@dataclass(frozen=True)
class Case:
    """A thing to measure.

    Operations are additions, multiplications and functions such as exp, each counted once. Bytes are the
    minimum that has to move: inputs read once, outputs written once. Neither depends on the implementation.
    """

    name: str
    size: str
    flops: float
    nbytes: float
    penstock: Callable[[Device], Call]
    torch: Callable[[Torch], Call]
    way: Way = "device"

    @property
    def label(self) -> str:
        """The name and the size, which are unique."""
        return f"{self.name} {self.size}"


@dataclass(frozen=True)
class Sizes:
    """The sizes of operations: large enough that launches do not matter, except where they should."""

    items: int  # of a vector
    rows: int  # of matrices that are worked on row by row
    columns: int
    products: tuple[tuple[int, int, int], ...]  # rows, columns and inner length
    batch: tuple[int, int]  # how many square products, and their length
    attention: tuple[int, int, int, int]  # batch, heads, length and width of a head
    embedding: tuple[int, int, int]  # words, width and how many are looked up
    copied: int  # bytes


_FOR_CPU = Sizes(
    items=4 << 20,
    rows=4096,
    columns=1024,
    products=((64, 64, 64), (256, 256, 256), (1024, 1024, 1024), (2048, 1536, 384)),
    batch=(64, 128),
    attention=(4, 6, 256, 64),
    embedding=(16000, 384, 4096),
    copied=16 << 20,
)
_FOR_GPU = Sizes(  # beyond the caches of the largest
    items=32 << 20,
    rows=32768,
    columns=1024,
    products=((64, 64, 64), (256, 256, 256), (1024, 1024, 1024), (2048, 1536, 384), (4096, 4096, 4096)),
    batch=(512, 128),
    attention=(16, 16, 1024, 64),
    embedding=(50000, 768, 65536),
    copied=64 << 20,
)


def sizes_for(capabilities: Capabilities) -> Sizes:
    """The sizes for a device."""
    large = capabilities.kind == "gpu" and capabilities.total_bytes >= _GPU_BYTES
    return _FOR_GPU if large else _FOR_CPU


def operation(
    name: str,
    size: str,
    flops: float,
    nbytes: float,
    inputs: Callable[[], Sequence[Array]],
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
) -> Case:
    """A case of a function of tensors; PyTorch's function takes its module first."""

    def penstock(device: Device) -> Call:
        tensors = [asarray(array, device=device) for array in inputs()]
        function = jit(ours)
        return lambda: function(*tensors)

    def torch(peer: Torch) -> Call:
        tensors = [peer.tensor(array) for array in inputs()]
        return lambda: theirs(peer.module, *tensors)

    return Case(name, size, flops, nbytes, penstock, torch)


def drawn(*shape: int) -> Array:
    """Numbers from 0 to 1, the same in every run."""
    return np.random.default_rng(0).random(shape, np.float32)


def drawn_ids(count: int, shape: tuple[int, ...]) -> Array:
    """Integers below a count, the same in every run."""
    return np.random.default_rng(1).integers(0, count, shape)
