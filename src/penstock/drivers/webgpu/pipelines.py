"""Compiled WGSL kernels: their modules and pipelines.

A kernel's module depends on how a launch binds its buffers, so a kernel may have several pipelines, which are
created when a launch first needs them, or ahead of it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from penstock.drivers.driver import Grid, Kernel, Source, check_parameter_count, parameter_dtypes
from penstock.drivers.webgpu.native import NativeDevice, Owned
from penstock.drivers.webgpu.wgsl import SCALARS, KernelText, module_text, parse
from penstock.errors import CompileError, DeviceError
from penstock.lru import LRU

_MAX_PIPELINES = 32  # kept for a kernel, for different workgroup sizes and bindings of buffers
MAX_SCALAR_BYTES = 4096  # of a launch, in a uniform buffer
_FEW_BUFFERS = 4  # of a kernel: pipelines are created ahead for any of them in one memory


class Variant(NamedTuple):
    """What a pipeline of a kernel is specialized for."""

    group: Grid  # the workgroup size
    bindings: tuple[int, ...]  # for each buffer, the number of the first buffer in the same binding
    folded: bool  # whether the grid is too long for WebGPU and was folded into a rectangle
    windows: tuple[int, ...]  # for each buffer, how many bindings it takes; empty if all take 1


class Function:
    """A kernel: its text, the positions of its buffers and scalars, and its pipelines."""

    def __init__(self, text: KernelText, dtypes: Sequence[np.dtype[Any]]) -> None:
        self.text = text
        parameters = list(enumerate(text.parameters))
        self.buffer_positions = [position for position, parameter in parameters if parameter.is_buffer]
        self.scalar_positions = [position for position, parameter in parameters if not parameter.is_buffer]
        self.buffer_types = [buffer.type for buffer in text.buffers]
        scalars = {scalar.name: number for number, scalar in enumerate(text.scalars)}
        # For each buffer, the index of the scalar that is its offset, or None.
        self.offset_scalars = [scalars.get(f"{buffer.name}_place") for buffer in text.buffers]
        self.pipelines: LRU[Variant, Owned] = LRU(_MAX_PIPELINES)
        self._dtypes = [dtypes[position] for position in self.scalar_positions]
        self._formats = [struct.Struct(text.scalar_format(folded)) for folded in (False, True)]
        self.scalar_bytes = [form.size for form in self._formats]

    def packed(self, scalars: list[Any], folded: bool) -> bytes:
        """The bytes of scalars in the layout of the kernel."""
        form = self._formats[folded]
        try:
            return form.pack(*scalars)
        except (struct.error, OverflowError):  # a value that NumPy rounds or wraps
            with np.errstate(all="ignore"):
                for position, dtype in enumerate(self._dtypes):
                    scalars[position] = np.asarray(scalars[position]).astype(dtype).item()
            return form.pack(*scalars)


class Pipelines:
    """Compiles kernels: modules at once, and pipelines when a launch needs them."""

    def __init__(
        self, native: NativeDevice, immediate_bytes: int, binding_bytes: int, lock: threading.RLock
    ) -> None:
        self._native = native
        self._immediate_bytes = immediate_bytes
        self._binding_bytes = binding_bytes
        self._lock = lock

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        """See `Driver.compile`."""
        if not isinstance(source, str):
            raise CompileError("a WebGPU device takes WGSL as text, and functions were given")
        self._native.require_alive()
        dtypes = {name: parameter_dtypes(name, signature) for name, signature in signatures.items()}
        texts = parse(source)
        kernels = {}
        for name, signature in signatures.items():
            if name not in texts:
                raise CompileError(f"the source has no kernel {name!r}; there are {sorted(texts)}")
            _check_signature(texts[name], signature)
            function = Function(texts[name], dtypes[name])
            separate = tuple(range(len(function.buffer_types)))
            self._module(function, Variant((1,), separate, False, ()))  # for the compiler's messages
            kernels[name] = Kernel(name, signature, function)
        return kernels

    def create_ahead(self, function: Function, group: Grid) -> None:
        """Create the pipelines of a kernel for its launches, but very large ones, of workgroups of a size."""
        for bindings in _arrangements(function.buffer_types):
            self.pipeline(function, Variant(tuple(group), bindings, False, ()))

    def needs_uniform(self, scalar_bytes: int) -> bool:
        """Whether scalars of so many bytes are passed in a uniform buffer, since immediates hold fewer."""
        return scalar_bytes > self._immediate_bytes

    def pipeline(self, function: Function, variant: Variant) -> Owned:
        """A pipeline of a kernel, from the cache or new."""
        with self._lock:
            pipeline = function.pipelines.use(variant)
        if pipeline is None:  # without the lock: it takes milliseconds
            pipeline = self._new_pipeline(function, variant)
            with self._lock:
                function.pipelines[variant] = pipeline
        return pipeline

    def _new_pipeline(self, function: Function, variant: Variant) -> Owned:
        nbytes = function.scalar_bytes[variant.folded]
        uniform = self.needs_uniform(nbytes)
        if uniform and nbytes > MAX_SCALAR_BYTES:
            raise DeviceError(f"{nbytes} bytes of scalars; a kernel may have {MAX_SCALAR_BYTES} here")
        module = self._module(function, variant)
        firsts, windows = set(variant.bindings), variant.windows
        count = sum(windows[first] for first in firsts) if windows else len(firsts)
        return self._native.pipeline(function.text.name, module, count, None if uniform else nbytes)

    def _module(self, function: Function, variant: Variant) -> Owned:
        uniform = self.needs_uniform(function.scalar_bytes[variant.folded])
        try:
            text = module_text(
                function.text,
                variant.group,
                variant.bindings,
                variant.folded,
                uniform,
                variant.windows,
                self._binding_bytes,
            )
        except CompileError as error:
            raise DeviceError(
                f"a binding has at most {self._binding_bytes} bytes on {self._native.name}: {error}"
            ) from None
        return self._native.module(function.text.name, text)


def _arrangements(types: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """The bindings of buffers of these types: each in a memory of its own, or several in an arena."""
    numbers = range(len(types))
    yield tuple(numbers)
    most = len(types) if len(types) <= _FEW_BUFFERS else 0
    for count in range(2, most + 1):
        for inside in combinations(numbers, count):
            if len({types[number] for number in inside}) == 1:
                yield tuple(inside[0] if number in inside else number for number in numbers)


def _check_signature(kernel: KernelText, signature: Sequence[str]) -> None:
    check_parameter_count(kernel.name, len(kernel.parameters), signature)
    for parameter, kind in zip(kernel.parameters, signature, strict=True):
        if not (kind.endswith("*") if parameter.is_buffer else SCALARS[parameter.type][0] == kind):
            raise CompileError(
                f"parameter {parameter.name!r} of kernel {kernel.name!r} is {parameter.type}, "
                f"and the signature says {kind!r}"
            )
