"""Compiled kernels by the structure of what they compute, and whether compiling is worth its time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from penstock.device.driver import Kernel
from penstock.fusion.groups import Group
from penstock.kernels.map_kernel import map_kernel, structure, vector_width
from penstock.runtime import Device

MIN_ITEMS = 1 << 15  # a smaller output is computed sooner by the host than a kernel is launched
_MAX_KERNELS = 256
_MAX_SEEN = 4096


class KernelCache:
    """The kernels of one device; both tables are bounded, and forget what was not used for longest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernels: OrderedDict[Hashable, tuple[Kernel, int]] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def kernel(self, group: Group) -> tuple[Kernel, int] | None:
        """The kernel of a group and the items of one thread; None where compiling would not pay.

        It does not for a small output, nor for what is seen for the first time.
        """
        if group.output.size < MIN_ITEMS:
            return None
        key = structure(group)
        if key in self._kernels:
            self._kernels.move_to_end(key)
            return self._kernels[key]
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)
            return None
        width = vector_width(group, self._device.capabilities.vector_width)
        source, signature = map_kernel(group, "map_items", width)
        kernel = self._device.compile(source, {"map_items": signature})["map_items"]
        self._kernels[key] = kernel, width
        if len(self._kernels) > _MAX_KERNELS:
            self._kernels.popitem(last=False)
        return self._kernels[key]
