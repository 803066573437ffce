"""DLPack of bfloat16, which NumPy has no code for: NumPy takes and gives the same bytes as 16-bit words.

In a capsule, the code of a type is one byte of the struct behind it, which is changed on the way.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.graph.dtypes import bfloat16

_UNSIGNED, _BFLOAT = 1, 4  # DLDataTypeCode
# Where the code is, by the capsule's name: behind a pointer, the device and the number of axes; the newer
# struct has its version, two pointers and flags before them.
_CODE_OFFSETS = {b"dltensor": 20, b"dltensor_versioned": 52}

_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def exported(array: npt.NDArray[Any], max_version: tuple[int, int] | None, **options: Any) -> Any:
    """The capsule of an array. What is only for reading goes to those who know DLPack's mark for it."""
    if not array.flags.writeable and (max_version is None or max_version[0] < 1):
        raise BufferError(
            f"values that are not copied are read-only, which DLPack can say from version 1.0 on, and "
            f"{'.'.join(map(str, max_version or (0, 8)))} was asked for; use copy=True or copy=None"
        )
    options["max_version"] = max_version
    if array.dtype != bfloat16:
        return array.__dlpack__(**options)
    capsule = array.view(np.uint16).__dlpack__(**options)
    _code(capsule).value = _BFLOAT
    return capsule


def imported(x: Any) -> npt.NDArray[Any]:
    """The array of an object that speaks DLPack."""
    words = _Words(x)
    array = np.from_dlpack(words)
    return array.view(bfloat16) if words.bfloat16 else array


class _Words:
    """An object whose bfloat16, if it is of such, NumPy takes for words."""

    def __init__(self, x: Any) -> None:
        self._x = x
        self.bfloat16 = False

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._x.__dlpack__(**options)
        code = _code(capsule)
        self.bfloat16 = code.value == _BFLOAT
        if self.bfloat16:
            code.value = _UNSIGNED
        return capsule


def _code(capsule: Any) -> ctypes.c_uint8:
    name = _name_of(capsule)
    return ctypes.c_uint8.from_address(_pointer_of(capsule, name) + _CODE_OFFSETS[name])
