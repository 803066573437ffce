"""Penstock: neural networks on any GPU, inside a memory budget that you set.

The namespace follows the Python array API standard, version 2024.12.
"""

from importlib.metadata import version as _version
from math import e, inf, nan, pi

from penstock import data, errors, memory, nn, optim, testing
from penstock.advising import Advice, advise
from penstock.memory.buffer import Buffer
from penstock.profiling import profile
from penstock.registry import cleanup, commit, default_device, devices, sync, use
from penstock.registry import provide_auto as _provide_auto
from penstock.runtime import Device
from penstock.stream.future import Future, FutureState
from penstock.tensor import arithmetic as _arithmetic
from penstock.tensor import random
from penstock.tensor.arithmetic import *  # noqa: F403 - its __all__ is that of the package
from penstock.tensor.autograd import checkpoint, grad, value_and_grad
from penstock.tensor.core import Tensor, explain
from penstock.tensor.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from penstock.tensor.dtypes import (
    bfloat16,
    complex64,
    complex128,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from penstock.tensor.dtypes import (
    bool_ as bool,
)
from penstock.tensor.info import __array_namespace_info__, can_cast, finfo, iinfo, isdtype, result_type
from penstock.tensor.jit import jit
from penstock.tensor.linear import matmul, matmul_batch, tensordot, vecdot
from penstock.tensor.manipulation import (
    astype,
    broadcast_arrays,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    matrix_transpose,
    moveaxis,
    permute_dims,
    repeat,
    reshape,
    roll,
    squeeze,
    stack,
    take,
    take_along_axis,
    tile,
    unstack,
)
from penstock.tensor.own_kernels import kernel
from penstock.tensor.raw_kernels import raw_kernel
from penstock.tensor.recording import no_grad
from penstock.tensor.reduction import (
    all,
    any,
    argmax,
    argmin,
    count_nonzero,
    cumulative_prod,
    cumulative_sum,
    diff,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from penstock.tensor.searching import (
    argsort,
    nonzero,
    searchsorted,
    sort,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)

__version__ = _version("penstock")
__array_api_version__ = "2024.12"
newaxis = None


def _auto_device() -> Device:
    from penstock.dispatch import auto_device  # imported late: few programs use it, and it takes its time

    return auto_device()


_provide_auto(_auto_device)

__all__ = [
    "Advice",
    "Buffer",
    "Device",
    "Future",
    "FutureState",
    "Tensor",
    "__array_namespace_info__",
    "advise",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "asarray",
    "astype",
    "bfloat16",
    "bool",
    "broadcast_arrays",
    "broadcast_to",
    "can_cast",
    "checkpoint",
    "cleanup",
    "commit",
    "complex64",
    "complex128",
    "concat",
    "count_nonzero",
    "cumulative_prod",
    "cumulative_sum",
    "data",
    "default_device",
    "devices",
    "diff",
    "e",
    "empty",
    "empty_like",
    "errors",
    "expand_dims",
    "explain",
    "eye",
    "finfo",
    "flip",
    "float16",
    "float32",
    "float64",
    "from_dlpack",
    "full",
    "full_like",
    "grad",
    "iinfo",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "isdtype",
    "jit",
    "kernel",
    "linspace",
    "matmul",
    "matmul_batch",
    "matrix_transpose",
    "max",
    "mean",
    "memory",
    "meshgrid",
    "min",
    "moveaxis",
    "nan",
    "newaxis",
    "nn",
    "no_grad",
    "nonzero",
    "ones",
    "ones_like",
    "optim",
    "permute_dims",
    "pi",
    "prod",
    "profile",
    "random",
    "raw_kernel",
    "repeat",
    "reshape",
    "result_type",
    "roll",
    "searchsorted",
    "sort",
    "squeeze",
    "stack",
    "std",
    "sum",
    "sync",
    "take",
    "take_along_axis",
    "tensordot",
    "testing",
    "tile",
    "tril",
    "triu",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "use",
    "value_and_grad",
    "var",
    "vecdot",
    "zeros",
    "zeros_like",
]
__all__ += _arithmetic.__all__
