"""Compiles CUDA C with NVRTC, or takes the code from disk, and loads it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from cuda.bindings import nvrtc

from penstock.drivers.binaries import Binaries
from penstock.drivers.cuda.calls import CudaError, checked
from penstock.drivers.driver import BEGIN_EARLY, NO_CONTRACTION, WAIT_FIRST, Handles, check_parameter_count
from penstock.errors import CompileError

SLOT = 8  # bytes of an argument in a launch's block; no scalar has more
# The format of a scalar for `struct`, by NumPy's type code.
_FORMATS = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}
_FORMATS |= {"f2": "e", "f4": "f", "f8": "d"}

_WAITING = 90  # the first architecture, sm_90, whose kernels can wait for others

_import_lock = threading.Lock()


def compile_text(text: str, architecture: str) -> bytes:
    """CUDA C compiled for an architecture such as `sm_90`. Raises CompileError with NVRTC's message."""
    # Imported late: it takes a quarter of a second, and code on disk needs no compiler. With a lock: a second
    # thread would see the module before it is initialized.
    with _import_lock:
        from cuda.core import Program, ProgramOptions

    try:
        # Minimal: without declarations of textures and the like, which take NVRTC 5 ms.
        contracts = not text.startswith(NO_CONTRACTION)
        program = Program(text, "c++", ProgramOptions(arch=architecture, minimal=True, fma=contracts))
        return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda.core has no public class for it
        raise CompileError(f"NVRTC refused the source:\n{error}") from None


class Compiler:
    """Compiles and loads kernels."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self.binaries = Binaries()
        self.modules = Handles()

    def functions(
        self,
        text: str,
        signatures: Mapping[str, Sequence[str]],
        dtypes: Mapping[str, Sequence[np.dtype[Any]]],
    ) -> dict[str, Function]:
        """The kernels of a text by name. Raises CompileError, or CudaError if CUDA refuses the code."""
        module = _Module(self._code(text), self.modules)
        return {
            name: Function(
                module,
                name,
                signature,
                dtypes[name],
                waits=self._begins_with(BEGIN_EARLY, text, name),
                waits_first=self._begins_with(WAIT_FIRST, text, name),
            )
            for name, signature in signatures.items()
        }

    def _begins_with(self, words: str, text: str, name: str) -> bool:
        """Whether the body of a kernel begins with words that have a meaning on this device."""
        body = text.partition(f" {name}(")[2].partition("{")[2]
        return body.startswith(words) and int(self._architecture[3:].rstrip("a")) >= _WAITING

    def has(self, text: str) -> bool:
        """Whether the compiled code of a text is on disk."""
        return self.binaries.has(self._key(text))

    def compile_ahead(self, text: str) -> None:
        """Compile a text to disk. Python goes on in other threads meanwhile."""
        if not self.has(text):
            self._code(text)

    def _key(self, text: str) -> str:
        return f"{nvrtc.nvrtcVersion()[1:]} {self._architecture}\n{text}"

    def _code(self, text: str) -> bytes:
        """The compiled code of a text for this device, from disk if it is there."""
        key = self._key(text)
        code = self.binaries.get(key)
        if code is None:
            code = compile_text(text, self._architecture)
            self.binaries.put(key, code)
        return code


class _Module:
    """A loaded module, unloaded with its last kernel."""

    def __init__(self, code: bytes, handles: Handles) -> None:
        self.native = checked(cu.cuModuleLoadData(code))
        self._handles = handles
        handles.open.add(id(self))

    def __del__(self) -> None:
        if hasattr(self, "native") and not self._handles.abandoned:
            cu.cuModuleUnload(self.native)
            self._handles.open.discard(id(self))


class Function:
    """A loaded kernel, and the formats of its arguments."""

    def __init__(
        self,
        module: _Module,
        name: str,
        signature: Sequence[str],
        dtypes: Sequence[np.dtype[Any]],
        *,
        waits: bool,
        waits_first: bool,
    ) -> None:
        self.waits = waits  # for the kernels that it depends on, so that it may be launched while they run
        self.waits_first = waits_first  # before it reads anything, so it may follow any kernel in this way
        try:
            self.native = checked(cu.cuModuleGetFunction(module.native, name.encode()))
        except CudaError as error:
            raise CompileError(f"the source has no kernel {name!r} ({error})") from None
        self._module = module
        kinds = [
            ("u8" if kind.endswith("*") else dtype.str[1:])
            for kind, dtype in zip(signature, dtypes, strict=True)
        ]
        self.formats = [struct.Struct(_FORMATS[kind]) for kind in kinds]
        # All arguments together, each in its slot.
        self.format = struct.Struct(
            "=" + "".join(f"{_FORMATS[kind]}{SLOT - int(kind[1:])}x" for kind in kinds)
        )
        self.dtypes = dtypes
        sizes: list[int] = []
        while not (answer := cu.cuFuncGetParamInfo(self.native, len(sizes)))[0]:
            sizes.append(answer[2])
        check_parameter_count(name, len(sizes), signature)
        for position, (size, form) in enumerate(zip(sizes, self.formats, strict=True)):
            if size != form.size:
                raise CompileError(
                    f"parameter {position} of kernel {name!r} has {size} bytes, and {signature[position]!r} "
                    f"has {form.size}"
                )
