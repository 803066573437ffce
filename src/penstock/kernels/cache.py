"""Compiled kernels, by the structure of the groups that they compute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.device.driver import Kernel
from penstock.fusion.groups import Group
from penstock.kernels.philox import PHILOX
from penstock.kernels.source import HALVES_PRELUDE, OPENCL_PRELUDE, VECTOR_PRELUDE
from penstock.kernels.writer import Written, structure, write
from penstock.runtime import Device

_MAX_KERNELS = 512


@dataclass(frozen=True)
class Compiled:
    """A group's launches and their kernels."""

    written: Written
    kernels: tuple[Kernel, ...]


class KernelCache:
    """The kernels of one device; bounded, it forgets what was not used for longest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: OrderedDict[Hashable, Compiled | None] = OrderedDict()
        self._count = 0  # of kernels so far, which makes their names differ

    def compiled(self, groups: Sequence[Group]) -> list[Compiled | None]:
        """The kernels of each group; None where the device has none for it. What is new is compiled at once."""
        keys = [structure(group) for group in groups]
        new: dict[Hashable, Written] = {}
        for key, group in zip(keys, groups, strict=True):
            if key not in self._known and key not in new:
                self._count += 1
                written = write(group, self._device.capabilities, self._count)
                if written is None:
                    self._known[key] = None
                else:
                    new[key] = written
        self._known.update(self._compile(new))
        result = [self._known[key] for key in keys]
        for key in keys:
            self._known.move_to_end(key)
        while len(self._known) > _MAX_KERNELS:
            self._known.popitem(last=False)
        return result

    def _compile(self, new: Mapping[Hashable, Written]) -> Iterator[tuple[Hashable, Compiled]]:
        """A compiler takes longer to start than for a kernel, so all kernels are one source."""
        sources = {launch.source.name: launch.source for one in new.values() for launch in one.launches}
        if not sources:
            return
        functions = {one.launches[0].source.name: one.function for one in new.values() if one.function}
        signatures = {name: source.signature for name, source in sources.items()}
        text = "\n".join(source.text for source in sources.values())
        random = PHILOX if "philox(" in text else ""
        whole = functions or OPENCL_PRELUDE + VECTOR_PRELUDE + random + text
        kernels = self._device.compile(whole, signatures)  # type: ignore[arg-type]
        for key, written in new.items():
            yield key, Compiled(written, tuple(kernels[one.source.name] for one in written.launches))
