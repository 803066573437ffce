"""Slices whose starts differ from run to run: one program serves all of them, with the bits of views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import DRIVERS

import penstock as ps
from penstock import Device
from penstock.config import Settings
from penstock.execution.executable import Executable
from penstock.execution.host_program import HostProgram

Array = npt.NDArray[Any]

# Expressions of a matrix and an integer, as NumPy writes them too.
EXPRESSIONS: dict[str, Callable[[Any, Any, int], Any]] = {
    "row": lambda x, y, i: x[i],
    "item": lambda x, y, i: x[i][2],
    "sum of rows": lambda x, y, i: x[i] + y[i],
    "rows": lambda x, y, i: x[i : i + 3],
    "column": lambda x, y, i: x[:, i],
    "block": lambda x, y, i: x[i : i + 40, 1 : 1 + 16] * 2,
    "backwards": lambda x, y, i: x[i + 9 : i : -2, ::-1] - 1,
    "diagonal": lambda x, y, i: x[i, i],
    "of a sum": lambda x, y, i: (x + y)[i + 1 : i + 7, i],
    "transposed": lambda x, y, i: x.T[i : i + 5] * y.T[i + 1 : i + 6],
}


def matrices(device: Device, shape: tuple[int, int] = (90, 71)) -> tuple[list[Array], list[ps.Tensor]]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for _ in range(2)]
    return arrays, [ps.asarray(array, device=device) for array in arrays]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The programs of kernels and of NumPy that were made."""
    result: list[object] = []

    def noted(kind: type) -> Callable[..., None]:
        make = kind.__init__

        def init(self: object, *args: Any, **kwargs: Any) -> None:
            result.append(self)
            make(self, *args, **kwargs)

        return init

    for kind in (Executable, HostProgram):
        monkeypatch.setattr(kind, "__init__", noted(kind))
    return result


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_one_program_serves_all_starts(device: Device, programs: list[object], name: str) -> None:
    expression = EXPRESSIONS[name]
    arrays, tensors = matrices(device)
    for i in range(1, 7):
        np.testing.assert_array_equal(expression(*tensors, i).numpy(), expression(*arrays, i))
    programs.clear()
    for i in range(7, 50):
        np.testing.assert_array_equal(expression(*tensors, i).numpy(), expression(*arrays, i))
    assert len(programs) <= 1, programs  # the kernels, where NumPy computed it at first


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_jitted_function_gives_the_same_bits(device: Device, name: str) -> None:
    expression = EXPRESSIONS[name]
    _, tensors = matrices(device)
    for i in range(1, 6):
        single = ps.tanh(expression(*tensors, i)).numpy()
        jitted = ps.jit(lambda x, y, i=i: ps.tanh(expression(x, y, i)))(*tensors).numpy()
        assert single.tobytes() == jitted.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("kind", sorted({*DRIVERS} & {"opencl-svm", "webgpu"}))
def test_the_same_slice_is_taken_again_with_other_numbers(kind: str, dtype: type) -> None:
    """A number is an argument too, and may have the bits of a start."""
    device = Device.over(DRIVERS[kind](), Settings(compile_ahead=False))
    array = np.arange(90 * 71).reshape(90, 71).astype(dtype)
    x = ps.asarray(array, device=device)
    for i in range(1, 7):
        for number in map(type(array.item(0)), (3, i, i, 7, 5, i, 9, 3)):
            rows, column = (x[i : i + 3] * number).realize(), (x[:, i] + number).realize()
            np.testing.assert_array_equal(rows.numpy(), array[i : i + 3] * number)
            np.testing.assert_array_equal(column.numpy(), array[:, i] + number)
    device.close()


@pytest.mark.parametrize("name", ["rows by a matrix", "columns by a matrix", "sum", "sum of rows"])
def test_sums_are_added_up_in_the_same_order(device: Device, name: str) -> None:
    """A product may depend on strides, and a sum on a GPU on what its kernel reads."""
    functions: dict[str, Callable[[Any, Any, int], Any]] = {
        "rows by a matrix": lambda x, y, i: x[i : i + 40] @ y.T,
        "columns by a matrix": lambda x, y, i: x[:, i : i + 3].T @ y,
        "sum": lambda x, y, i: ps.sum(x[i : i + 40] * y[:40]),
        "sum of rows": lambda x, y, i: ps.sum(x[:, i : i + 50], axis=1),
    }
    function = functions[name]
    _, tensors = matrices(device)
    for i in range(1, 6):
        single = function(*tensors, i).numpy()
        jitted = ps.jit(lambda x, y, i=i: function(x, y, i))(*tensors).numpy()
        assert single.tobytes() == jitted.tobytes()


def test_rows_of_a_small_matrix_are_multiplied_by_one_program(device: Device, programs: list[object]) -> None:
    """As in training outside of a jitted function; where sums depend on what a kernel reads, it is not so."""
    if device.capabilities.vector_width == 1 or not device.capabilities.compiles:
        pytest.skip("a GPU, or NumPy")
    arrays, (x, y) = matrices(device)
    for i in range(1, 30):
        if i == 7:
            programs.clear()
        result = x[i : i + 40] @ y.T
        np.testing.assert_allclose(result.numpy(), arrays[0][i : i + 40] @ arrays[1].T, rtol=1e-4, atol=1e-4)
    assert len(programs) <= 1


def test_gradients_pass_through_slices_with_other_starts(device: Device) -> None:
    arrays, (x, y) = matrices(device)
    x.requires_grad_()
    for i in range(1, 8):
        x.grad = None
        ps.sum(x[i] * y[i + 1]).backward()
        assert x.grad is not None
        expected = np.zeros_like(arrays[0])
        expected[i] = arrays[1][i + 1]
        np.testing.assert_array_equal(x.grad.numpy(), expected)


def test_indices_are_checked_where_slices_move(device: Device) -> None:
    arrays, (x, _) = matrices(device)
    index = ps.asarray(np.array([1, 3]), device=device)
    bad = ps.asarray(np.array([1, 90]), device=device)
    for i in range(1, 8):
        np.testing.assert_array_equal(x[i : i + 20][index].numpy(), arrays[0][i : i + 20][[1, 3]])
    with pytest.raises(IndexError):
        x[9:29][bad].numpy()
