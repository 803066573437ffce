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
from penstock.kernels.attention.prelude import ATTENTION_PRELUDE
from penstock.kernels.convolution.prelude import CONVOLUTION_PRELUDE
from penstock.kernels.dialects import DIALECTS, dialect_of
from penstock.kernels.lower import Lowering, without_shape, without_sizes, write
from penstock.kernels.raw_source import refused
from penstock.kernels.sizes import MOST_WRITTEN_OUT, Sizes
from penstock.kernels.source import KernelSource, digest
from penstock.lru import LRU
from penstock.runtime import Device
from penstock.tuning_cache import TuningCache

_MAX_KERNELS = 512
_LEAST_TOGETHER = 4  # kernels of a text: NVRTC takes about as long to start as for three of them


class KernelCache:
    """The kernels of a device: a bounded cache that drops the least recently used.

    Any thread may lower groups, and ask what is missing; `kernels` are made while `Device.running` is held.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        dialect = dialect_of(device.capabilities).name if device.capabilities.compiles else "numpy"
        self.kept = TuningCache(f"sizes of {dialect} kernels")
        self.sizes = Sizes(self.kept)
        self._lowerings = LRU[Hashable, Lowering | None](_MAX_KERNELS)
        self._shared = LRU[Hashable, Lowering | None](_MAX_KERNELS)  # of single operations
        self._on_disk = LRU[str, bool](_MAX_KERNELS)  # names of shared kernels that need no compiler
        self._kernels = LRU[str, Kernel](_MAX_KERNELS)  # by names, which end in a digest

    def lowering(self, group: Group) -> Lowering | None:
        """The lowering of a group; None where the device has no kernel for it."""
        key = group.structure
        lowering = self._lowerings.use(key)
        if lowering is None and key not in self._lowerings:
            lowering = self._lowerings[key] = self._lower(group, key)
        return lowering

    def _lower(self, group: Group, key: tuple[Any, ...]) -> Lowering | None:
        can, before = self._device.capabilities, self.sizes.shapes_before(without_sizes(key), key)
        varied = before >= MOST_WRITTEN_OUT
        lowering = write(group, can, digest(repr((key, varied))), varied)
        if lowering is None or lowering.function is not None:
            return lowering
        # A GPU's loops serve many sizes as they are.
        is_other = group.kind.has_varied_kernel and (can.vector_width > 1 or not group.kind.has_loops)
        if is_other and before == MOST_WRITTEN_OUT - 1:
            compared = write(group, can, digest(repr((key, True))), varied=True)  # with the next shape
            assert compared is not None
            self.sizes.learn(compared.launches[0].source)
        launches = tuple(self.sizes.launch(launch, varied) for launch in lowering.launches)
        return replace(lowering, launches=launches)

    def shared_lowering(self, group: Group) -> Lowering | None:
        """The lowering of a group of one operation, to kernels that programs with other shapes share."""
        flat = without_shape(group) if self._device.capabilities.vector_width == 1 else None
        key = flat or group.structure, self.sizes.learned
        known = self._shared.use(key)
        if known is None and key not in self._shared:
            known = self._shared_lowering(group)
            if key[1] != self.sizes.learned:  # the next may be another kernel, which fits more sizes
                return known
            if flat and (known is None or known.launches[0].scalars != (group.outputs[0].size,)):
                return known  # it does not take the size as an argument
            self._shared[key] = known
        return known if known is None or not flat else _resized(known, group.outputs[0].size)

    def _shared_lowering(self, group: Group) -> Lowering | None:
        ending = digest(repr(group.structure))
        lowering = write(group, self._device.capabilities, ending, varied=True, shared=True)
        if lowering is None or lowering.function is not None:
            return lowering
        return replace(lowering, launches=tuple(map(self.sizes.shared, lowering.launches)))

    def kernels(self, sources: Sequence[KernelSource], functions: Mapping[str, Any]) -> list[Kernel]:
        """The kernels of sources, in order; those in `functions` are made from the function."""
        new = self._new(sources)
        kernels = {
            source.name: self._kernels[source.name] for source in sources if source.name in self._kernels
        }
        if called := [source for source in new if source.name in functions]:
            by_name = {source.name: functions[source.name] for source in called}
            kernels |= self._device.compile(by_name, _signatures(called))
        kernels |= self.compiled([source for source in new if source.name not in kernels])
        self._kernels.update(kernels)
        return [kernels[source.name] for source in sources]

    def _new(self, sources: Sequence[KernelSource]) -> list[KernelSource]:
        """The sources that have no kernel yet, without duplicates."""
        return [*{source.name: source for source in sources if source.name not in self._kernels}.values()]

    def missing(self, sources: Sequence[KernelSource]) -> list[KernelSource]:
        """The sources that need a compiler: they are neither in memory nor on disk."""
        new = [source for source in self._new(sources) if source.name not in self._on_disk]
        missing: list[KernelSource] = []
        for part in self._parts(new):
            if not self._device.driver.has_compiled(self._text(part)):
                missing += part
            elif part[0].alone:
                self._on_disk[part[0].name] = True
        return missing

    def compiled(self, sources: Sequence[KernelSource]) -> dict[str, Kernel]:
        """Compile kernels from text, by name. They are not kept here: any thread may compile."""
        parts = self._parts(sources)
        if len(parts) > 1 and dialect_of(self._device.capabilities).compiles_side_by_side:
            with ThreadPoolExecutor(len(parts)) as threads:
                kernels = [*threads.map(self._compile, parts)]
        else:
            kernels = [*map(self._compile, parts)]
        return {name: kernel for part in kernels for name, kernel in part.items()}

    def compile_ahead(self, sources: Sequence[KernelSource]) -> None:
        """Compile kernels that are not needed yet, to disk only. Any thread may do that."""
        for part in self._parts(sources):
            groups = {source.name: source.group for source in part}
            self._device.driver.compile_ahead(self._text(part), _signatures(part), groups)

    def keep(self, kernels: Mapping[str, Kernel]) -> None:
        """Keep kernels that were compiled before they are needed."""
        self._kernels.update(kernels)

    def _parts(self, sources: Sequence[KernelSource]) -> list[list[KernelSource]]:
        """Sources that are compiled together: a compiler takes longer to start than for a kernel."""
        alone = [[source] for source in sources if source.complete or source.alone]
        together = [source for source in sources if not (source.complete or source.alone)]
        if not together:
            return alone
        dialect = dialect_of(self._device.capabilities)
        if dialect.one_kernel_modules:
            return alone + [[source] for source in together]
        alike = [[source for source in together if dialect.contracts(source) == may] for may in (False, True)]
        divide = _side_by_side if dialect.compiles_side_by_side else lambda sources: [sources]
        return alone + [part for sources in alike if sources for part in divide(sources)]

    def _text(self, part: Sequence[KernelSource]) -> str:
        if part[0].complete:
            return part[0].text
        return whole_text(part, dialect_of(self._device.capabilities).name)

    def _compile(self, part: Sequence[KernelSource]) -> dict[str, Kernel]:
        try:
            return self._device.compile(self._text(part), _signatures(part))
        except CompileError as error:
            if part[0].complete:  # a kernel of the user's own
                raise refused(part[0], error) from None
            raise


def _side_by_side(sources: Sequence[KernelSource]) -> list[list[KernelSource]]:
    """Sources in parts of about the same length, for compilers that run in parallel."""
    count = min(os.cpu_count() or 1, -(-len(sources) // _LEAST_TOGETHER))
    parts: list[list[KernelSource]] = [[] for _ in range(count)]
    lengths = [0] * count
    for source in sorted(sources, key=lambda source: (-len(source.text), source.name)):
        shortest = lengths.index(min(lengths))
        parts[shortest].append(source)
        lengths[shortest] += len(source.text)
    return parts


def _resized(lowering: Lowering, size: int) -> Lowering:
    """The launch of a GPU's map whose only argument is its size, for another size."""
    (launch,) = lowering.launches
    grid = (-(-size // launch.source.group[0]),)
    return replace(
        lowering, launches=(replace(launch, source=replace(launch.source, grid=grid), scalars=(size,)),)
    )


def _signatures(sources: Sequence[KernelSource]) -> dict[str, tuple[str, ...]]:
    return {source.name: source.signature for source in sources}


def whole_text(sources: Sequence[KernelSource], language: str) -> str:
    """The texts of kernels after the preludes that they use."""
    return DIALECTS[language].whole_text(
        sources, {"attention_": ATTENTION_PRELUDE, "convolution_": CONVOLUTION_PRELUDE}
    )
