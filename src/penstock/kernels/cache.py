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
        self._lowerings = LRU[Hashable, Lowering | None](_MAX_KERNELS)
        self._kernels = LRU[str, Kernel](_MAX_KERNELS)  # by names, which end in a digest

    def lowering(self, group: Group) -> Lowering | None:
        """The source of a group; None where the device has no kernel for it."""
        key = group.structure
        if key not in self._lowerings:
            self._lowerings[key] = self._lower(group, key)
        return self._lowerings.use(key)

    def _lower(self, group: Group, key: tuple[Any, ...]) -> Lowering | None:
        can, before = self._device.capabilities, self.sizes.shapes_before(without_sizes(key), key)
        varied = before >= MOST_WRITTEN_OUT
        lowering = write(group, can, digest(repr((key, varied))), varied)
        if lowering is None or lowering.function is not None:
            return lowering
        if group.kind.has_varied_kernel and before == MOST_WRITTEN_OUT - 1:
            compared = write(group, can, digest(repr((key, True))), varied=True)  # with the next shape
            assert compared is not None
            self.sizes.learn(compared.launches[0].source)
        launches = tuple(self.sizes.launch(launch, varied) for launch in lowering.launches)
        return replace(lowering, launches=launches)

    def kernels(self, sources: Sequence[KernelSource], functions: Mapping[str, Any]) -> list[Kernel]:
        """The kernels of sources, in order; those that `functions` names are compiled from the function."""
        kernels = {
            source.name: self._kernels[source.name] for source in sources if source.name in self._kernels
        }
        new = {source.name: source for source in sources if source.name not in kernels}
        if called := [source for name, source in new.items() if name in functions]:
            by_name = {source.name: functions[source.name] for source in called}
            kernels |= self._device.compile(by_name, _signatures(called))
        texts = [source for name, source in new.items() if name not in functions]
        for source in texts:
            if source.complete:
                kernels |= self._by_itself(source)
        if together := [source for source in texts if not source.complete]:
            kernels |= self._compiled(together)
        self._kernels.update(kernels)
        return [kernels[source.name] for source in sources]

    def _by_itself(self, source: KernelSource) -> dict[str, Kernel]:
        """A kernel of the user's own."""
        try:
            return self._device.compile(source.text, _signatures([source]))
        except CompileError as error:
            raise refused(source, error) from None

    def _compiled(self, sources: Sequence[KernelSource]) -> dict[str, Kernel]:
        """Kernels from text. A compiler takes longer to start than for a kernel, so many are one text."""
        dialect = dialect_of(self._device.capabilities)
        parts: Sequence[Sequence[KernelSource]] = [sources]
        if dialect.one_kernel_modules:
            parts = [[source] for source in sources]
        elif dialect.compiles_side_by_side:
            parts = _parts(sources)
        work = [whole_text(part, dialect.name) for part in parts], map(_signatures, parts)
        if len(parts) > 1 and dialect.compiles_side_by_side:
            with ThreadPoolExecutor(len(parts)) as threads:
                compiled = [*threads.map(self._device.compile, *work)]
        else:
            compiled = [*map(self._device.compile, *work)]
        return {name: kernel for kernels in compiled for name, kernel in kernels.items()}


def _parts(sources: Sequence[KernelSource]) -> list[list[KernelSource]]:
    """Sources in parts of about the same length, for compilers that run side by side."""
    count = min(os.cpu_count() or 1, -(-len(sources) // _LEAST_TOGETHER))
    parts: list[list[KernelSource]] = [[] for _ in range(count)]
    lengths = [0] * count
    for source in sorted(sources, key=lambda source: (-len(source.text), source.name)):
        shortest = lengths.index(min(lengths))
        parts[shortest].append(source)
        lengths[shortest] += len(source.text)
    return parts


def _signatures(sources: Sequence[KernelSource]) -> dict[str, tuple[str, ...]]:
    return {source.name: source.signature for source in sources}


def whole_text(sources: Sequence[KernelSource], language: str) -> str:
    """The texts of kernels after the words that they use."""
    return DIALECTS[language].whole_text(sources, {"attention_": ATTENTION_PRELUDE})
