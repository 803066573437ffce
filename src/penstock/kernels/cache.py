"""Compiled kernels, by the structure of the groups that they compute."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from penstock.drivers.driver import Kernel
from penstock.errors import CompileError
from penstock.fusion.groups import Group
from penstock.kernels.attention.kernels import ATTENTION_PRELUDE
from penstock.kernels.dialects import DIALECTS, dialect_of
from penstock.kernels.lower import Lowering, without_sizes, write
from penstock.kernels.raw_source import refused
from penstock.kernels.sizes import MOST_WRITTEN_OUT, Sizes
from penstock.kernels.source import KernelSource, digest
from penstock.lru import LRU
from penstock.runtime import Device

_MAX_KERNELS = 512
_LEAST_TOGETHER = 4  # kernels of one text: NVRTC takes about as long to start as for three of them


class KernelCache:
    """The kernels of one device; bounded, it forgets what was not used for longest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.sizes = Sizes()
        self._written = LRU[Hashable, Lowering | None](_MAX_KERNELS)
        self._kernels = LRU[str, Kernel](_MAX_KERNELS)  # by names, which end in a digest

    def lowering(self, group: Group) -> Lowering | None:
        """The source of a group; None where the device has no kernel for it."""
        key = group.structure
        if key not in self._written:
            self._written[key] = self._write(group, key)
        return self._written.use(key)

    def _write(self, group: Group, key: tuple[Any, ...]) -> Lowering | None:
        can, before = self._device.capabilities, self.sizes.shapes_before(without_sizes(key), key)
        varied = before >= MOST_WRITTEN_OUT
        written = write(group, can, digest(repr((key, varied))), varied)
        if written is None or written.function is not None:
            return written
        if group.kind.has_varied_kernel and before == MOST_WRITTEN_OUT - 1:
            compared = write(group, can, digest(repr((key, True))), varied=True)  # with the next shape
            assert compared is not None
            self.sizes.learn(compared.launches[0].source)
        launches = tuple(self.sizes.launch(launch, varied) for launch in written.launches)
        return replace(written, launches=launches)

    def kernels(self, sources: Sequence[KernelSource], functions: Mapping[str, Any]) -> list[Kernel]:
        """The kernels of sources, in order; those that `functions` names are compiled from the function."""
        found = {
            source.name: self._kernels[source.name] for source in sources if source.name in self._kernels
        }
        new = {source.name: source for source in sources if source.name not in found}
        called = [source for name, source in new.items() if name in functions]
        written = [source for name, source in new.items() if name not in functions]
        if called:
            by_name = {source.name: functions[source.name] for source in called}
            found |= self._device.compile(by_name, _signatures(called))
        for source in written:
            if source.complete:
                found |= self._by_itself(source)
        if together := [source for source in written if not source.complete]:
            found |= self._compiled(together)
        self._kernels.update(found)
        return [found[source.name] for source in sources]

    def _by_itself(self, source: KernelSource) -> dict[str, Kernel]:
        """A kernel of the user's own."""
        try:
            return self._device.compile(source.text, _signatures([source]))
        except CompileError as error:
            raise refused(source, error) from None

    def _compiled(self, sources: Sequence[KernelSource]) -> dict[str, Kernel]:
        """Kernels from text. A compiler takes longer to start than for a kernel, so many are one text."""
        dialect = dialect_of(self._device.capabilities)
        if dialect.one_kernel_modules:
            texts = [whole_text([source], dialect.name) for source in sources]
            found = [
                self._device.compile(text, _signatures([source]))
                for text, source in zip(texts, sources, strict=True)
            ]
            return {name: kernel for kernels in found for name, kernel in kernels.items()}
        parts = _parts(sources) if dialect.compiles_side_by_side else [sources]
        texts = [whole_text(part, dialect.name) for part in parts]
        if len(parts) == 1:
            return self._device.compile(texts[0], _signatures(sources))
        with ThreadPoolExecutor(len(parts)) as threads:
            compiled = threads.map(self._device.compile, texts, map(_signatures, parts))
            return {name: kernel for kernels in compiled for name, kernel in kernels.items()}


def _parts(sources: Sequence[KernelSource]) -> list[list[KernelSource]]:
    """Sources in parts of about the same length, for compilers that run side by side."""
    count = min(os.cpu_count() or 1, -(-len(sources) // _LEAST_TOGETHER))
    parts: list[list[KernelSource]] = [[] for _ in range(count)]
    lengths = [0] * count
    for source in sorted(sources, key=lambda one: (-len(one.text), one.name)):
        shortest = lengths.index(min(lengths))
        parts[shortest].append(source)
        lengths[shortest] += len(source.text)
    return parts


def _signatures(sources: Sequence[KernelSource]) -> dict[str, tuple[str, ...]]:
    return {source.name: source.signature for source in sources}


def whole_text(sources: Sequence[KernelSource], language: str) -> str:
    """The texts of kernels after the words that they use."""
    return DIALECTS[language].whole_text(sources, {"attention_": ATTENTION_PRELUDE})
