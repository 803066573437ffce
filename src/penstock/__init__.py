"""Penstock: neural networks on any GPU, inside a memory budget that you set.

The namespace follows the Python array API standard, version 2024.12.
"""

import typing as _typing
from importlib import import_module as _import_module
from importlib.metadata import version as _version
from math import e, inf, nan, pi

from penstock import data, errors, functions, memory, models, names, nn, optim, testing
from penstock.advising import Advice, advise
from penstock.drivers.rates import StepRates as _StepRates
from penstock.execution.rates import provide_rates as _provide_rates
from penstock.functions import *  # noqa: F403 - what the table of names gives
from penstock.memory.buffer import Buffer
from penstock.nn.quantizing import quantize
from penstock.nn.saving import load, save
from penstock.profiling import profile
from penstock.registry import cleanup, commit, default_device, devices, sync, use
from penstock.registry import provide_auto as _provide_auto
from penstock.runtime import Device
from penstock.runtime import measure_link_with as _measure_link_with
from penstock.stream.future import Future, FutureState
from penstock.tensor import fft, linalg, random
from penstock.tensor import infix as _infix  # noqa: F401 - which gives operators to tensors
from penstock.tensor.autograd import checkpoint, grad, value_and_grad
from penstock.tensor.core import Tensor
from penstock.tensor.creation import asarray, from_dlpack, meshgrid
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
from penstock.tensor.info import (
    __array_namespace_info__,
    can_cast,
    explain,
    finfo,
    iinfo,
    isdtype,
    result_type,
)
from penstock.tensor.jit import jit
from penstock.tensor.linear import matmul_batch
from penstock.tensor.manipulation import broadcast_arrays, expand_dims, matrix_transpose
from penstock.tensor.own_kernels import kernel
from penstock.tensor.raw_kernels import raw_kernel
from penstock.tensor.recording import no_grad
from penstock.tensor.searching import (
    searchsorted,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)

__version__ = _version("penstock")
__array_api_version__ = "2024.12"
newaxis = None
double, half, long, short = float64, float16, int64, int16
float, int = float32, int32  # PyTorch's names of dtypes; they shadow Python's here


def _auto_device() -> Device:
    from penstock.dispatch import auto_device  # imported late: it takes time, and few programs use it

    return auto_device()


_provide_auto(_auto_device)


def _link_cost(device: Device) -> _typing.Any:
    from penstock.measuring.link import link_cost  # imported late, for the same reasons

    return link_cost(device)


_measure_link_with(_link_cost)


def _step_rates(device: Device, dtypes: _typing.Iterable[str]) -> _StepRates | None:
    from penstock.measuring.step_rates import step_rates  # imported late, for the same reasons

    return step_rates(device, dtypes)


_provide_rates(_step_rates)


if _typing.TYPE_CHECKING:
    from penstock import distributed, onnx, train
    from penstock.train import Trainer
else:  # type checkers report missing names themselves

    def __getattr__(name: str) -> object:
        if name in (
            "distributed",
            "onnx",
            "train",
        ):  # imported late: few programs use them, and they take their time
            return _import_module(f"penstock.{name}")
        if name == "Trainer":
            return _import_module("penstock.train").Trainer
        if name.startswith("_"):
            raise AttributeError(f"penstock has no {name!r}")
        raise names.missing(name, __all__)


__all__ = [
    "Advice",
    "Buffer",
    "Device",
    "Future",
    "FutureState",
    "Tensor",
    "Trainer",
    "__array_namespace_info__",
    "advise",
    "asarray",
    "bfloat16",
    "bool",
    "broadcast_arrays",
    "can_cast",
    "checkpoint",
    "cleanup",
    "commit",
    "complex64",
    "complex128",
    "data",
    "default_device",
    "devices",
    "distributed",
    "double",
    "e",
    "errors",
    "expand_dims",
    "explain",
    "fft",
    "finfo",
    "float",
    "float16",
    "float32",
    "float64",
    "from_dlpack",
    "grad",
    "half",
    "iinfo",
    "inf",
    "int",
    "int8",
    "int16",
    "int32",
    "int64",
    "isdtype",
    "jit",
    "kernel",
    "linalg",
    "load",
    "long",
    "matmul_batch",
    "matrix_transpose",
    "memory",
    "meshgrid",
    "models",
    "nan",
    "newaxis",
    "nn",
    "no_grad",
    "onnx",
    "optim",
    "pi",
    "profile",
    "quantize",
    "random",
    "raw_kernel",
    "result_type",
    "save",
    "searchsorted",
    "short",
    "sync",
    "testing",
    "train",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "use",
    "value_and_grad",
]
__all__ += functions.__all__


def __dir__() -> list[str]:
    """The names for users: those of the parts that they are made of are left out."""
    return [*__all__, "__array_api_version__", "__version__"]
