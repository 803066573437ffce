"""Values never change: arrays that share a tensor's memory are read-only."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import Device

DTYPES = ["bool", "int8", "uint64", "float16", "float32", "float64", "complex64"]


def shares_memory(device: Device) -> bool:
    x = ps.asarray([1.0], device=device).realize()
    return x._node.value.memory.host is not None


def refuses_writing(array: np.ndarray) -> None:
    """The array and all that it is a view of."""
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0
    base: Any = array
    while isinstance(base, np.ndarray):
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            base.flags.writeable = True
        base = base.base


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dlpack_view_without_a_copy_is_read_only(device: Device, dtype: str) -> None:
    array = np.array([[0, 1], [1, 1], [0, 1]]).astype(dtype)
    x = ps.asarray(array, device=device)
    if not shares_memory(device):
        with pytest.raises(BufferError, match="can only be copied"):
            np.from_dlpack(x, copy=False)
        return
    view = np.from_dlpack(x, copy=False)
    assert np.array_equal(view, array)
    refuses_writing(view)
    del x
    gc.collect()
    assert np.array_equal(view, array)


def test_consumers_that_cannot_read_the_mark_are_refused() -> None:
    x = ps.asarray([1.0, 2.0], device="host")
    for version in (None, (0, 8)):
        with pytest.raises(BufferError, match=r"read-only.*0\.8 was asked for; use copy=True"):
            x.__dlpack__(copy=False, max_version=version)
    bfloat = x.astype(ps.bfloat16)
    with pytest.raises(BufferError, match="read-only"):
        bfloat.__dlpack__(copy=False)
    assert "versioned" in repr(bfloat.__dlpack__(copy=False, max_version=(1, 0)))


COPIES: dict[str, Callable[[ps.Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "numpy_async": lambda x: x.numpy_async().wait(),
    "asarray": np.asarray,
    "array": np.array,
    "dlpack": np.from_dlpack,
    "dlpack copy": lambda x: np.from_dlpack(x, copy=True),
    "state_dict": lambda x: _state(x)["weight"],
}


def _state(x: ps.Tensor) -> dict[str, Any]:
    module = ps.nn.Module()
    module.weight = x
    return module.state_dict()


@pytest.mark.parametrize("name", COPIES)
def test_what_is_writable_is_a_copy(device: Device, name: str) -> None:
    x = ps.asarray(np.arange(4.0, dtype=np.float32), device=device)
    copied = COPIES[name](x)
    copied[:] = 9
    assert x.tolist() == [0, 1, 2, 3]
    assert (x * 2).tolist() == [0, 2, 4, 6]


def test_an_array_that_became_a_tensor_can_change(device: Device) -> None:
    array = np.arange(4.0, dtype=np.float32)
    tensors = [ps.asarray(array, device=device), ps.from_dlpack(array, device=device)]
    tensors.append(tensors[0] * array)
    expected = [array.copy(), array.copy(), array * array]
    array[:] = 9
    for tensor, values in zip(tensors, expected, strict=True):
        assert np.array_equal(tensor.numpy(), values)


def test_a_view_keeps_its_values_while_the_tensor_changes_in_place() -> None:
    x = ps.asarray([1.0, 2.0], device="host")
    view = np.from_dlpack(x, copy=False)
    add = ps.jit(lambda: x.__iadd__(1.0))
    x += 1
    add()
    add()
    assert view.tolist() == [1, 2]
    assert x.tolist() == [4, 5]


def test_a_view_of_a_buffer_is_writable_only_if_asked_for(device: Device) -> None:
    buffer = device.upload(np.arange(4, dtype=np.int32))
    with device.view(buffer, np.int32) as view:
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 9
        if device.capabilities.shared_memory:
            refuses_writing(view)
    with device.view(buffer, np.int32, writable=True) as view:
        view[0] = 9
    assert device.download(buffer, np.int32).wait().tolist() == [9, 1, 2, 3]
