"""Copies that WebGPU does not support: of parts of words, and within a buffer.

A kernel does them. A word that is only partly overwritten is changed by atomic bit operations, so that the
other bytes stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.drivers.driver import Kernel
from penstock.drivers.webgpu.adapters import BUFFER_ALIGNMENT
from penstock.drivers.webgpu.launches import Launch
from penstock.drivers.webgpu.memory import WORD, Range, rounded
from penstock.drivers.webgpu.pipelines import Pipelines
from penstock.drivers.webgpu.wgsl import OFFSET_ALIGNMENT

_SOURCE = """
kernel copy_bytes(to: array<atomic<u32>>, source: array<atomic<u32>>, start: u32, origin: u32, count: u32) {
    let word = start / 4u + u32(GROUP_0 * THREADS + THREAD);
    if (4u * word >= start + count) { return; }
    var bits = 0u;
    var mask = 0u;
    for (var k = 0u; k < 4u; k++) {
        let byte = 4u * word + k;
        if (byte >= start && byte < start + count) {
            let at = origin + (byte - start);
            bits |= ((atomicLoad(&source[at / 4u]) >> (8u * (at % 4u))) & 255u) << (8u * k);
            mask |= 255u << (8u * k);
        }
    }
    if (mask == 0xffffffffu) {
        atomicStore(&to[word], bits);
    } else {
        atomicAnd(&to[word], ~mask);
        atomicOr(&to[word], bits);
    }
}
"""
_SIGNATURE = ("uint32*", "uint32*", "uint32", "uint32", "uint32")
_GROUP = 64


class ByteCopies:
    """Creates the launches of such copies."""

    def __init__(self, pipelines: Pipelines, binding_bytes: int) -> None:
        self._pipelines = pipelines
        self._binding_bytes = binding_bytes
        self._kernel: Kernel | None = None

    def launches(
        self, target: Range, target_offset: int, source: Range, source_offset: int, nbytes: int
    ) -> Iterator[Launch]:
        """The launches of a copy; several if a buffer is larger than a binding."""
        if self._kernel is None:
            self._kernel = self._pipelines.compile(_SOURCE, {"copy_bytes": _SIGNATURE})["copy_bytes"]
        most = self._binding_bytes
        large = max(target.size, source.size) > most
        # The parts are small enough that source and target in the same buffer either fit into a single
        # binding, or are so far apart that their bindings do not overlap.
        step = rounded(most // 4, OFFSET_ALIGNMENT) if large else nbytes
        for done in range(0, nbytes, step):
            count = min(step, nbytes - done)
            to, start = target_offset + done, source_offset + done
            words = -(-(to % WORD + count) // WORD)
            args: list[Any] = [target, source, to, start, count]
            if large:
                args = _narrowed(target, source, to, start, count, most)
            yield Launch(self._kernel.native, (-(-words // _GROUP),), (_GROUP,), args)


def _narrowed(target: Range, source: Range, to: int, start: int, count: int, most: int) -> list[Any]:
    """The arguments of a copy, which bind no more of large buffers than is copied."""
    first, last = min(to, start), max(to, start) + count
    same = target.serial == source.serial
    if same and last - first // OFFSET_ALIGNMENT * OFFSET_ALIGNMENT <= most - BUFFER_ALIGNMENT:
        both = target.part(first, last)
        return [both, both, to - both.offset, start - both.offset, count]
    there, here = target.part(to, to + count), source.part(start, start + count)
    return [there, here, to - there.offset, start - here.offset, count]
