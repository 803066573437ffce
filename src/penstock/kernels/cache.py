"""Compiled kernels, by the structure of the groups that they compute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from penstock.device.driver import Kernel
from penstock.fusion.groups import Group
from penstock.kernels.philox import PHILOX
from penstock.kernels.source import (
    FUNCTIONS_PRELUDE,
    HALVES_PRELUDE,
    OPENCL_PRELUDE,
    VECTOR_PRELUDE,
    KernelSource,
    digest,
)
from penstock.kernels.writer import Written, structure, write
from penstock.runtime import Device

_MAX_KERNELS = 512


class KernelCache:
    """The kernels of one device; bounded, it forgets what was not used for longest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._written: OrderedDict[Hashable, Written | None] = OrderedDict()
        self._kernels: OrderedDict[str, Kernel] = OrderedDict()  # by names, which end in a digest

    def written(self, group: Group) -> Written | None:
        """The source of a group; None where the device has no kernel for it."""
        key = structure(group)
        if key not in self._written:
            self._written[key] = write(group, self._device.capabilities, digest(repr(key)))
        _touch(self._written, key)
        return self._written[key]

    def kernels(self, sources: Sequence[KernelSource], functions: Mapping[str, Any]) -> list[Kernel]:
        """The kernels of sources, or on the host of functions by name. What is new is compiled at once.

        A compiler takes longer to start than for a kernel, so all new kernels are one text.
        """
        found = {
            source.name: self._kernels[source.name] for source in sources if source.name in self._kernels
        }
        new = {source.name: source for source in sources if source.name not in found}
        if new:
            # Chains change words of the prelude, so they come last.
            texts = sorted((source.text for source in new.values()), key=lambda text: "chain_group" in text)
            text = "\n".join(texts)
            whole: Any = {name: functions[name] for name in new if name in functions}
            whole = whole or _with_prelude(text)
            found |= self._device.compile(whole, {name: source.signature for name, source in new.items()})
        for name, kernel in found.items():
            self._kernels[name] = kernel
            _touch(self._kernels, name)
        return [found[source.name] for source in sources]


def _with_prelude(text: str) -> str:
    """The text after the words that it uses."""
    optional = {
        "exp_8(": FUNCTIONS_PRELUDE,
        "tanh_8(": FUNCTIONS_PRELUDE,
        "loose_": VECTOR_PRELUDE,
        "BFLOAT16": HALVES_PRELUDE,
        "round_half": HALVES_PRELUDE,
        "philox(": PHILOX,
    }
    used = dict.fromkeys(part for word, part in optional.items() if word in text)
    return "\n".join([OPENCL_PRELUDE, *used, text])


def _touch(table: OrderedDict[Any, Any], key: Hashable) -> None:
    table.move_to_end(key)
    if len(table) > _MAX_KERNELS:
        table.popitem(last=False)
