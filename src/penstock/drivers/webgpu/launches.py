"""Launches as WebGPU dispatches: pipelines, bind groups and scalars."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from wgpu.backends.wgpu_native import ffi

from penstock.drivers.driver import Capabilities, Grid
from penstock.drivers.webgpu.adapters import Adapter
from penstock.drivers.webgpu.c_types import TYPES
from penstock.drivers.webgpu.memory import Range
from penstock.drivers.webgpu.native import NativeBuffer, NativeDevice, Owned
from penstock.drivers.webgpu.pipelines import Function, Pipelines, Variant
from penstock.drivers.webgpu.wgsl import OFFSET_ALIGNMENT
from penstock.errors import DeviceError
from penstock.lru import LRU

_MAX_GROUPS = 4096  # bind groups kept for later launches

Part = tuple[int, int, int]  # a bound range of a memory: its serial number, offset, bytes
Parts = tuple[Part, ...]
# Pipeline, bind group, scalars, their bytes, whether they go through a uniform buffer, groups in each axis.
Dispatch = tuple[Owned, Owned, Any, int, bool, int, int, int]


@dataclass(slots=True, eq=False)
class Launch:
    """A kernel with its arguments."""

    function: Function
    grid: Grid
    group: Grid
    args: list[Any]
    dispatch: Dispatch | None = None  # None after an argument has changed


class BindGroups:
    """Bind groups by what they bind, until one of their memories is freed. At most `_MAX_GROUPS`."""

    def __init__(self, native: NativeDevice, lock: threading.RLock) -> None:
        self._native = native
        self._lock = lock
        self.known: LRU[Parts, Owned] = LRU(_MAX_GROUPS)
        self.by_memory: dict[int, set[Parts]] = {}  # by the memory's serial number

    def get(self, parts: Parts, buffers: Sequence[NativeBuffer]) -> Owned:
        """The bind group of parts of buffers, from the cache or new."""
        with self._lock:
            group = self.known.use(parts)
            if group is None:
                bound = [
                    (buffer, offset, size) for buffer, (_, offset, size) in zip(buffers, parts, strict=True)
                ]
                group = self._native.group(bound)
                if self.known.full:
                    self._unlink(next(iter(self.known)))
                for serial, _, _ in parts:
                    self.by_memory.setdefault(serial, set()).add(parts)
                self.known[parts] = group
            return group

    def forget(self, serial: int) -> None:
        """Remove the bind groups of a memory."""
        for parts in self.by_memory.pop(serial, ()):
            self.known.pop(parts, None)
            self._unlink(parts)

    def _unlink(self, parts: Parts) -> None:
        for serial, _, _ in parts:
            if serial in self.by_memory:
                self.by_memory[serial].discard(parts)


class Binder:
    """Creates the dispatches of launches."""

    def __init__(
        self, adapter: Adapter, capabilities: Capabilities, pipelines: Pipelines, groups: BindGroups
    ) -> None:
        limits = adapter.limits
        self._max_groups_per_axis = limits["maxComputeWorkgroupsPerDimension"]
        self._group_limits = (
            limits["maxComputeInvocationsPerWorkgroup"],
            *(limits[f"maxComputeWorkgroupSize{axis}"] for axis in "XYZ"),
        )
        self._max_buffers = capabilities.max_buffers
        self._binding_bytes = capabilities.binding_bytes
        self._pipelines = pipelines
        self._groups = groups

    def dispatch(self, launch: Launch) -> Dispatch:
        """Create a launch's dispatch with its present arguments."""
        function, args = launch.function, launch.args
        sizes, folded = _sizes(launch.grid, launch.group, self._max_groups_per_axis, self._group_limits)
        scalars = [args[position] for position in function.scalar_positions]
        bindings, windows, parts, buffers = [], [], [], []
        first: dict[tuple[Part, str], int] = {}
        most = self._binding_bytes
        for number, part in enumerate(self._bound_parts(function, args)):
            given: Range = args[function.buffer_positions[number]]
            serial, start, size = part
            offset_scalar = function.offset_scalars[number]
            if offset_scalar is not None:
                scalars[offset_scalar] += (given.offset - start) // OFFSET_ALIGNMENT
            windows.append(1 if size <= most else -(-size // most))
            key = (part, function.buffer_types[number])
            if key not in first:
                first[key] = number
                for offset in range(0, size, most):
                    parts.append((serial, start + offset, min(most, size - offset)))
                    buffers.append(given.buffer)
            bindings.append(first[key])
        divided = len(parts) > len(first)
        if len(parts) > self._max_buffers:
            what = f"parts of memories, of at most {most} bytes each" if divided else "memories"
            raise DeviceError(f"{len(parts)} {what}; a kernel may have {self._max_buffers} here")
        variant = Variant(launch.group, tuple(bindings), folded, tuple(windows) if divided else ())
        pipeline = self._pipelines.pipeline(function, variant)
        if folded:
            scalars += [sizes[0], *_folding(launch.grid)]
        nbytes = function.scalar_bytes[folded]
        packed = ffi.new(TYPES["uint8_t[]"], function.packed(scalars, folded)) if nbytes else None
        group = self._groups.get(tuple(parts), buffers)
        launch.dispatch = (
            pipeline, group, packed, nbytes, self._pipelines.needs_uniform(nbytes), *sizes
        )  # fmt: skip
        return launch.dispatch

    def _bound_parts(self, function: Function, args: Sequence[Any]) -> list[Part]:
        """For each buffer, what is bound for it: a range of its memory, or the whole."""
        parts: list[Part] = []
        large: dict[tuple[int, str], list[int]] = {}  # the buffers in each memory larger than a binding
        for number, position in enumerate(function.buffer_positions):
            given: Range = args[position]
            if function.offset_scalars[number] is None:
                parts.append((given.serial, given.offset, given.size))
            elif given.buffer.nbytes <= self._binding_bytes:
                # The whole memory, so that all buffers in it share a binding.
                parts.append((given.serial, 0, given.buffer.nbytes))
            else:
                parts.append((given.serial, given.offset, given.size))
                large.setdefault((given.serial, function.buffer_types[number]), []).append(number)
        for indices in large.values():
            _join_overlapping(parts, indices)
        return parts


def _join_overlapping(parts: list[Part], indices: Sequence[int]) -> None:
    """Merge parts of a memory that overlap, because WebGPU permits no two bindings of the same bytes."""
    together: list[int] = []
    start = end = 0
    for number in sorted(indices, key=lambda number: parts[number][1]):
        serial, begin, size = parts[number]
        if begin >= end:
            together, start = [], begin
        together.append(number)
        end = max(end, begin + size)
        for joined in together:
            parts[joined] = (serial, start, end - start)


@lru_cache(maxsize=1024)
def _sizes(
    grid: Grid, group: Grid, longest: int, limits: tuple[int, ...]
) -> tuple[tuple[int, int, int], bool]:
    """The workgroups of a dispatch in each axis, and whether the grid was folded into a rectangle."""
    most, *sizes = limits
    threads, groups = math.prod(group), math.prod(grid)
    fits = all(1 <= size <= limit for size, limit in zip(group, sizes, strict=False)) and threads <= most
    if not 1 <= len(grid) == len(group) <= 3 or min(grid) < 1 or not fits:
        raise DeviceError(
            f"grid and group need 1 to 3 positive sizes each, a group at most {most} threads, and "
            f"at most {', '.join(map(str, sizes))} in its axes"
        )
    if max(grid) <= longest:
        x, y, z = (*grid, 1, 1)[:3]
        return (x, y, z), False
    rows = -(-groups // longest)
    if rows > longest or groups >= 1 << 31:
        raise DeviceError(f"a grid of {groups} groups; at most {min(longest**2, (1 << 31) - 1)} are possible")
    return (-(-groups // rows), rows, 1), True


def _folding(grid: Grid) -> tuple[int, int, int]:
    """What a kernel needs to know about a folded grid: the number of workgroups, and its first two axes."""
    x, y, z = (*grid, 1, 1)[:3]
    return x * y * z, x, y
