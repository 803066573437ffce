"""The launches of convolutions on a CUDA device, with sizes as constants.

The batch is an argument, and kernels are named by their text: those of one batch serve another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.graph.convolution_reference import Geometry
from penstock.graph.dtypes import bfloat16, float16
from penstock.graph.implicit_convolution import IMPLICIT_TRANSPOSE, IMPLICIT_WEIGHT, window_of
from penstock.graph.node import Node
from penstock.kernels.source import KernelSource, digest, head
from penstock.kernels.templates.launches import Launch, Lowering

_LOCAL_BYTES = 48 << 10
_LINE_BYTES = 128  # of a cache
_STEP_BYTES = 64  # of a row in a stage, channels of an item of a window, unless these are whole lines
_DIRECT_THREADS, _DIRECT_PIXELS = 128, 4
_WEIGHT_THREADS = 256  # of the direct gradient by a weight
_WEIGHT_ITEMS = 9  # of a window, whose sums a thread has
_SUM_ITEMS, _SUM_THREADS = 32, 256  # of a workgroup that adds up splits
_WAVES = 2  # workgroups that share sums over pixels, for each that runs at once
_LEAST_PIXELS = 256  # of a split


@dataclass(frozen=True)
class _Tile:
    """The rows and columns of a workgroup, and the warps that share them."""

    rows: int
    columns: int
    warps: tuple[int, int]
    resident: int  # workgroups that a multiprocessor should have room for

    @property
    def threads(self) -> int:
        return 32 * math.prod(self.warps)


# By the bytes of an item. Where a warp has 16 rows and 64 columns of 16-bit items, four multiply together.
_TILES = {
    2: (_Tile(128, 64, (8, 1), 3), _Tile(128, 32, (4, 1), 4)),
    4: (_Tile(128, 128, (2, 4), 2), _Tile(128, 64, (2, 2), 3), _Tile(128, 32, (4, 1), 4)),
}
# The same for the gradient by a weight.
_WEIGHT_TILES = {
    2: (_Tile(64, 128, (4, 2), 3), _Tile(32, 128, (1, 4), 4)),
    4: (_Tile(128, 64, (4, 2), 2), _Tile(64, 96, (2, 3), 4), _Tile(32, 96, (1, 3), 5)),
}
_STEP_PIXELS = (32, 16)  # of a stage: the first of which there are three stages


def convolution_kernels(group: Group, capabilities: Capabilities) -> Lowering:
    """The launches of a convolution, its transpose, or its gradient by the weight."""
    (node,) = group.nodes
    writer = _Writer(node, capabilities)
    if node.primitive is IMPLICIT_WEIGHT:
        return writer.weight_tiles() if node.attributes["tiled"] else writer.weight_direct()
    return writer.tiles() if node.attributes["tiled"] else writer.direct()


class _Writer:
    """Writes the launches of a node."""

    def __init__(self, node: Node, capabilities: Capabilities) -> None:
        self._node, self._units = node, capabilities.compute_units
        self._geometry: Geometry = node.attributes["geometry"]
        self._by_weight = node.primitive is IMPLICIT_WEIGHT
        tiled = node.attributes["tiled"]
        self._sizes = node.attributes["sizes"] if self._by_weight else window_of(node.inputs[1], tiled)
        self._image = node.inputs[0]
        self._result = node.inputs[1] if self._by_weight else node  # the pixels for which windows are read
        groups = self._geometry.groups
        self._channels, self._outputs = (value.shape[-1] // groups for value in (self._image, self._result))
        self._inner = math.prod(self._sizes) * self._channels  # items of the windows of a group
        self._pixels = math.prod(self._result.shape[:-1])
        self._item_bytes = node.dtype.itemsize
        self._type = {bfloat16: "Bfloat16", float16: "Float16"}.get(node.dtype, "Float32")
        self._bits = "uint16" if self._item_bytes == 2 else "uint32"

    # The kernels

    def tiles(self) -> Lowering:
        """A launch of tiles of pixels and channels."""
        tile = _fitting(_TILES[self._item_bytes], self._outputs, lambda tile: tile.columns)
        step = self._step_bytes(tile)
        stages = _stages(step * (tile.rows + tile.columns))
        phases, pixels = 1, self._pixels
        if self._node.primitive is IMPLICIT_TRANSPOSE:
            along = zip(self._result.shape[1:-1], self._geometry.stride, strict=True)
            phases = math.prod(self._geometry.stride)
            pixels = self._result.shape[0] * math.prod(-(-length // stride) for length, stride in along)
        parts = -(-self._outputs // tile.columns) * phases * self._geometry.groups
        arguments = f"{tile.rows}, {tile.columns}, {tile.warps[0]}, {tile.warps[1]}, {step}, {stages}"
        call = f"convolution_tiles<TYPE, SHAPE, {arguments}>(out, x, y, batch);"
        grid = -(-pixels // tile.rows) * parts
        return Lowering((self._launch("tiles", call, grid, tile.threads, tile.resident),))

    def direct(self) -> Lowering:
        """A launch in which a thread sums up the products of its pixels."""
        width = self._width(16 // self._item_bytes)
        lines = math.prod(self._result.shape[:-2])
        runs = -(-self._result.shape[-2] // _DIRECT_PIXELS)
        tasks = lines * runs * (self._result.shape[-1] // width)
        call = f"convolution_direct<TYPE, SHAPE, {width}, {_DIRECT_PIXELS}>(out, x, y, batch);"
        grid = -(-tasks // _DIRECT_THREADS)
        return Lowering((self._launch("direct", call, grid, _DIRECT_THREADS, 1),))

    def weight_tiles(self) -> Lowering:
        """A launch for sums over parts of the pixels, and a launch that adds them up."""
        tile = _fitting(_WEIGHT_TILES[self._item_bytes], self._outputs, lambda tile: tile.rows)
        tiles = -(-self._outputs // tile.rows) * -(-self._inner // tile.columns) * self._geometry.groups
        line = sum(_line_bytes(side, self._item_bytes) for side in (tile.rows, tile.columns))
        pixels = next(pixels for pixels in _STEP_PIXELS if _stages(pixels * line) >= 3)
        stages = _stages(pixels * line)
        splits, share = self._splits(tiles, tile.resident, pixels)
        arguments = f"{tile.rows}, {tile.columns}, {tile.warps[0]}, {tile.warps[1]}, {pixels}, {stages}"
        call = f"convolution_weight_tiles<TYPE, SHAPE, {arguments}>(out, x, y, batch, share);"
        return self._summed("weight_tiles", call, tiles, splits, share, tile.threads, tile.resident)

    def weight_direct(self) -> Lowering:
        """The same, where threads sum up the products of their pixels."""
        width = self._width(4)
        runs = 1 << min(32, self._result.shape[-1] // width).bit_length() - 1
        items = min(self._inner, _WEIGHT_ITEMS)
        tiles = -(-(self._result.shape[-1] // width) // runs) * -(-self._inner // items)
        splits, share = self._splits(tiles, 4, 1)
        arguments = f"{width}, {_WEIGHT_THREADS // runs}, {runs}, {items}"
        call = f"convolution_direct_weight<TYPE, SHAPE, {arguments}>(out, x, y, batch, share);"
        return self._summed("weight_direct", call, tiles, splits, share, _WEIGHT_THREADS, 1)

    def _step_bytes(self, tile: _Tile) -> int:
        """The bytes of a row in a stage: a line, if channels of 4 bytes fill lines and two stages fit."""
        fills = self._item_bytes == 4 and self._channels * self._item_bytes % _LINE_BYTES == 0
        return _LINE_BYTES if fills and _stages(_LINE_BYTES * (tile.rows + tile.columns)) > 1 else _STEP_BYTES

    # Launches

    def _width(self, most: int) -> int:
        """The neighbouring channels of a thread: several only if a group has a single channel."""
        single = self._channels == self._outputs == 1 and self._result.shape[-1] % most == 0
        return most if single else 1

    def _splits(self, tiles: int, resident: int, pixels: int) -> tuple[int, int]:
        """How many workgroups share the pixels of a tile, and how many pixels each has."""
        wanted = -(-_WAVES * resident * self._units // tiles)
        share = max(-(-self._pixels // wanted), min(_LEAST_PIXELS, self._pixels))
        share = -(-share // pixels) * pixels
        return -(-self._pixels // share), share

    def _summed(
        self, name: str, call: str, tiles: int, splits: int, share: int, threads: int, resident: int
    ) -> Lowering:
        """The launch of all splits, which writes to scratch, and the launch that adds up what they wrote."""
        size = self._node.size
        parts = self._launch(name, call, tiles * splits, threads, resident, "float32", 3, {"share": share})
        sums = f"convolution_sum_splits<TYPE, {size}>(out, x, splits);"
        grid = -(-size // _SUM_ITEMS)
        read = {"x": "float32"}
        whole = self._kernel("sum", sums, {"out": self._bits}, read, ("splits",), grid, _SUM_THREADS, 1)
        summed = Launch(whole, (0, 3), (splits,), operations=size * splits)
        return Lowering((parts, summed), (4 * size * splits,))

    def _launch(
        self,
        name: str,
        call: str,
        grid: int,
        threads: int,
        resident: int,
        out: str = "",
        number: int = 0,
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> Launch:
        """A launch that reads both inputs and writes the buffer of this number; `sizes`: more arguments."""
        inputs, sizes = {"x": self._bits, "y": self._bits}, {"batch": self._image.shape[0], **sizes}
        outputs = {"out": out or self._bits}
        source = self._kernel(name, call, outputs, inputs, tuple(sizes), grid, threads, resident)
        operations = self._node.primitive.operations_of(self._node)
        return Launch(source, (number, 1, 2), tuple(sizes.values()), operations=operations)

    def _kernel(
        self,
        name: str,
        call: str,
        outputs: Mapping[str, str],
        inputs: Mapping[str, str],
        sizes: tuple[str, ...],
        grid: int,
        threads: int,
        resident: int,
    ) -> KernelSource:
        constants = self._constants()
        name = f"convolution_{name}_{digest(f'{constants} {call} {self._type} {threads} {resident}')}"
        shape = f"shape_of_{name}"
        call = call.replace("TYPE", f"convolving::{self._type}").replace("SHAPE", shape)
        struct = f"struct {shape} {{ static constexpr int {constants}; }};\n"
        written, read = ([(dtype, given) for given, dtype in side.items()] for side in (outputs, inputs))
        scalars = ("int32",) * len(sizes)
        opening = head(name, written, read, list(zip(scalars, sizes, strict=True)))
        text = f"{struct}{opening}    convolving::{call}\n}}\n"
        dtypes = (*outputs.values(), *inputs.values())
        return KernelSource(name, text, dtypes, scalars, (grid,), (threads,), resident=resident)

    def _constants(self) -> str:
        """The sizes as constants of a type. Images of fewer than three axes have axes of length 1 before."""
        geometry, axes = self._geometry, len(self._sizes)

        def three(prefix: str, numbers: tuple[int, ...], missing: int) -> dict[str, int]:
            whole = (missing,) * (3 - axes) + tuple(numbers)
            return {prefix + letter: number for letter, number in zip("DHW", whole, strict=True)}

        apart = tuple(
            step // math.gcd(step, dilation)
            for step, dilation in zip(geometry.stride, geometry.dilation, strict=True)
        )
        constants = {
            "TRANSPOSED": int(self._node.primitive is IMPLICIT_TRANSPOSE),
            "GROUPS": geometry.groups,
            "IN": self._channels,
            "OUT": self._outputs,
            **three("", self._image.shape[1:-1], 1),
            **three("O", self._result.shape[1:-1], 1),
            **three("K", self._sizes, 1),
            **three("S", geometry.stride, 1),
            **three("A", geometry.dilation, 1),
            **three("P", tuple(before for before, _ in geometry.padding), 0),
            **three("E", apart, 1),
        }
        return ", ".join(f"{constant} = {number}" for constant, number in constants.items())


def _fitting(tiles: Sequence[_Tile], length: int, side: Callable[[_Tile], int]) -> _Tile:
    """The first tile along a side of which little is empty, or the last."""
    fits = (tile for tile in tiles if -length % side(tile) * 8 <= length)
    return next(fits, tiles[-1])


def _line_bytes(width: int, item_bytes: int) -> int:
    """The bytes of local memory that the channels of a pixel take: see `Lines` in `tiles.cu`."""
    return -(-width // 64) * 128 if item_bytes == 2 else 4 * width + 32


def _stages(nbytes: int) -> int:
    """How many stages of so many bytes fit into local memory: at most four, as more hide nothing else."""
    return min(4, _LOCAL_BYTES // nbytes)
