"""Compiled kernels, by the structure of the groups that they compute."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from penstock.device.driver import Kernel
from penstock.errors import CompileError
from penstock.fusion.groups import Group
from penstock.kernels.attention import ATTENTION_PRELUDE
from penstock.kernels.philox import PHILOX
from penstock.kernels.raw_source import refused
from penstock.kernels.sizes import MOST_WRITTEN_OUT, Sizes
from penstock.kernels.source import (
    ANGLES_PRELUDE,
    CUDA_HALVES_PRELUDE,
    CUDA_PRELUDE,
    FUNCTIONS_PRELUDE,
    HALVES_PRELUDE,
    OPENCL_PRELUDE,
    VECTOR_PRELUDE,
    KernelSource,
    digest,
)
from penstock.kernels.thread_prelude import THREAD_PRELUDES, THREAD_WORDS
from penstock.kernels.wgsl_prelude import functions_for
from penstock.kernels.writer import Written, without_sizes, write
from penstock.lru import LRU
from penstock.runtime import Device

_MAX_KERNELS = 512
_LEAST_TOGETHER = 4  # kernels of one text: NVRTC takes about as long to start as for three of them


class KernelCache:
    """The kernels of one device; bounded, it forgets what was not used for longest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.sizes = Sizes(device.capabilities.language)
        self._written = LRU[Hashable, Written | None](_MAX_KERNELS)
        self._kernels = LRU[str, Kernel](_MAX_KERNELS)  # by names, which end in a digest

    def written(self, group: Group) -> Written | None:
        """The source of a group; None where the device has no kernel for it."""
        key = group.structure
        if key not in self._written:
            self._written[key] = self._write(group, key)
        return self._written.use(key)

    def _write(self, group: Group, key: tuple[Any, ...]) -> Written | None:
        can, before = self._device.capabilities, self.sizes.shapes_before(without_sizes(key), key)
        varied = before >= MOST_WRITTEN_OUT
        written = write(group, can, digest(repr((key, varied))), varied)
        if written is None or written.function is not None or group.kind == "attention":
            return written
        if group.kind == "matmul" and before == MOST_WRITTEN_OUT - 1:
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
        language = self._device.capabilities.language
        if language == "wgsl":  # whose modules are made one by one, by what each kernel is launched with
            texts = [whole_text([source], language) for source in sources]
            found = [
                self._device.compile(text, _signatures([source]))
                for text, source in zip(texts, sources, strict=True)
            ]
            return {name: kernel for kernels in found for name, kernel in kernels.items()}
        parts = _parts(sources) if language == "cuda" else [sources]
        texts = [whole_text(part, language) for part in parts]
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
    if language == "wgsl":
        text = "\n".join(source.text for source in sources)
        return f"{functions_for(text)}\n{text}"
    # Chains change words of the prelude, so they come last.
    texts = sorted((_text(source, language) for source in sources), key=lambda text: "chain_group" in text)
    text = "\n".join(texts)
    cuda = language == "cuda"
    halves = CUDA_HALVES_PRELUDE if cuda else HALVES_PRELUDE
    optional = {
        "exp_8(": FUNCTIONS_PRELUDE,
        "tanh_8(": FUNCTIONS_PRELUDE,
        "sin_8(": ANGLES_PRELUDE,
        "cos_8(": ANGLES_PRELUDE,
        "tan_8(": ANGLES_PRELUDE,
        "loose_": VECTOR_PRELUDE,
        "BFLOAT16": halves,
        "round_half": halves,
        "_halves_": halves,
        "philox(": PHILOX,
        **dict.fromkeys(THREAD_WORDS, THREAD_PRELUDES.get(language, "")),
        "attention_": ATTENTION_PRELUDE,
    }
    if cuda:
        optional["half *"] = halves
    used = dict.fromkeys(part for word, part in optional.items() if word in text)
    return "\n".join([CUDA_PRELUDE if cuda else OPENCL_PRELUDE, *used, text])


def _text(source: KernelSource, language: str) -> str:
    """A kernel's text. CUDA has to be told how many threads a group has, or gives each too many registers."""
    if language != "cuda":
        return source.text
    numbers = [math.prod(source.group), *([source.resident] if source.resident > 1 else ())]
    bounds = f"KERNEL __launch_bounds__({', '.join(map(str, numbers))}) {source.name}("
    return source.text.replace(f"KERNEL {source.name}(", bounds)
