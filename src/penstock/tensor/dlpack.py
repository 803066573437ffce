"""DLPack for bfloat16, whose type code NumPy does not know.

NumPy exchanges the bytes as uint16, and the type code, a byte of the capsule's struct, is changed here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.graph.dtypes import bfloat16

_UNSIGNED, _BFLOAT = 1, 4  # DLDataTypeCode
# The offset of the type code in bytes, by the capsule's name: after a pointer, the device and the number of
# axes; the versioned struct starts with a version, two pointers and flags.
_CODE_OFFSETS = {b"dltensor": 20, b"dltensor_versioned": 52}

_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def exported(array: npt.NDArray[Any], max_version: tuple[int, int] | None, **options: Any) -> Any:
    """The capsule of an array; a BufferError if it is read-only and the consumer's version cannot tell."""
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
    """The array of an object that supports DLPack."""
    words = _AsWords(x)
    array = np.from_dlpack(words)
    return array.view(bfloat16) if words.bfloat16 else array


class _AsWords:
    """Wraps an object for NumPy; bfloat16 appears as uint16, and `bfloat16` tells so."""

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
