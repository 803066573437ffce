"""The element types of ONNX, as dtypes of NumPy that Penstock has too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from penstock.errors import OnnxError, UnsupportedModel

_T = onnx.TensorProto
_KNOWN = {
    _T.BOOL,
    *(_T.INT8, _T.INT16, _T.INT32, _T.INT64),
    *(_T.UINT8, _T.UINT16, _T.UINT32, _T.UINT64),
    *(_T.BFLOAT16, _T.FLOAT16, _T.FLOAT, _T.DOUBLE, _T.COMPLEX64, _T.COMPLEX128),
}


def dtype_of(element_type: int, what: str) -> np.dtype[Any]:
    """The dtype of an element type; `what` has it, which an error says."""
    if element_type not in _KNOWN:
        try:
            name = _T.DataType.Name(element_type).lower()
        except ValueError as error:
            raise OnnxError(
                f"{what} has the element type {element_type}, which ONNX does not have"
            ) from error
        raise UnsupportedModel(
            f"{what} is of {name}, which Penstock does not have; it has bool, integers of 8 to 64 bits, "
            f"bfloat16, float16, float32, float64 and complex types",
            reason=f"dtype {name}",
        )
    dtype: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(element_type))
    return dtype


def array_of(tensor: onnx.TensorProto, what: str) -> npt.NDArray[Any]:
    """The values of a tensor in a file."""
    dtype_of(tensor.data_type, what)
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except ValueError as error:
        raise OnnxError(f"the values of {what} cannot be read: {error}") from error
