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


# Slices that a gradient passes through, of a matrix with 90 rows of 71 items, from the integer on.
TRAINED: dict[str, Callable[[Any, int], Any]] = {
    "row": lambda x, i: x[i],
    "rows": lambda x, i: x[i : i + 3],
    "column": lambda x, i: x[:, i],
    "block": lambda x, i: x[i + 1 : i + 31, i : i + 11],
    "backwards": lambda x, i: x[i + 9 : i : -2, ::-1],
    "third columns": lambda x, i: x[2:5, i : i + 10 : 3],
    "of a product": lambda x, i: (x * 2)[i, 3:],
    "twice": lambda x, i: x[i : i + 20][1, i : i + 5],
}


@pytest.mark.parametrize("name", TRAINED)
def test_few_programs_train_what_a_slice_takes(device: Device, programs: list[object], name: str) -> None:
    part = TRAINED[name]
    (array, factors), (x, y) = matrices(device)
    x.requires_grad_()
    optimizer = ps.optim.SGD([x], lr=0.25)
    made = []
    for i in range(60):
        programs.clear()
        ps.sum(part(x, i) * part(y, i)).backward()
        optimizer.step()
        change, taken = np.zeros_like(array), np.arange(array.size).reshape(array.shape)
        twice = 2 if name == "of a product" else 1
        change.reshape(-1)[part(taken, i) // twice] = twice * part(factors, i)
        array = array - np.float32(0.25) * change
        made.append(len(programs))
        if name != "of a product":  # where a product may be rounded or not
            np.testing.assert_array_equal(x.numpy(), array)
        np.testing.assert_allclose(x.numpy(), array, rtol=1e-6)
    assert sum(made) <= 12, made
    assert not any(made[30:]), made


def mlp(device: Device) -> tuple[Any, ps.optim.Optimizer]:
    ps.random.manual_seed(3)
    model = ps.nn.Sequential(
        ps.nn.Linear(12, 16, device=device), ps.nn.Tanh(), ps.nn.Linear(16, 5, device=device)
    )
    return model, ps.optim.Adam(model.parameters(), lr=1e-2)


def test_few_programs_train_on_batches_of_an_array(device: Device, programs: list[object]) -> None:
    rng = np.random.default_rng(0)
    x = ps.asarray(rng.standard_normal((70, 12), dtype=np.float32), device=device)
    targets = ps.asarray(rng.integers(0, 5, 70), device=device)
    model, optimizer = mlp(device)
    made, means = [], []
    for _ in range(3):
        programs.clear()
        losses = []
        for start in range(0, 70, 8):  # the last batch is smaller
            inputs, wanted = x[start : start + 8], targets[start : start + 8]
            loss = ps.nn.functional.cross_entropy(model(inputs), wanted)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        made.append(len(programs))
        means.append(np.mean(losses))
    assert means[2] < means[1] < means[0]
    assert made[0] <= 9, made  # those of the first three batches, and of the last
    assert made[1:] == [0, 0], made


@pytest.mark.parametrize("shuffled", [False, True])
def test_what_batches_are_taken_of_is_computed_once(
    device: Device, programs: list[object], shuffled: bool
) -> None:
    """Pending values of which no loop reads more than a batch at once."""
    array = np.random.default_rng(0).standard_normal((199, 12), dtype=np.float32)
    given = ps.asarray(array, device=device)
    x = (given - ps.mean(given, axis=0)) / ps.std(given, axis=0)
    expected = (array - array.mean(0)) / array.std(0)
    order = ps.random.Generator(1, device).permutation(199)
    model, optimizer = mlp(device)
    made, seen = [], []
    for start in range(0, 192, 8):
        programs.clear()
        at = order[start : start + 8] if shuffled else slice(start, start + 8)
        ps.mean(model(x[at]) ** 2).backward()
        optimizer.step()
        made.append(len(programs))
        seen += [at.numpy()] if shuffled else [np.arange(199)[at]]
    assert len({*np.concatenate(seen).tolist()}) == 192
    assert not any(made[12:]), made
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_batches_of_an_array_give_the_bits_of_a_jitted_step(device: Device) -> None:
    rng = np.random.default_rng(0)
    x = ps.asarray(rng.standard_normal((41, 12), dtype=np.float32), device=device)
    y = ps.asarray(rng.standard_normal((41, 5), dtype=np.float32), device=device)

    def trained(wrap: Callable[[Any], Any]) -> bytes:
        model, optimizer = mlp(device)

        def step(start: int) -> ps.Tensor:
            difference = model(x[start : start + 9]) - y[start : start + 9]
            loss = ps.mean(difference * difference)
            loss.backward()
            optimizer.step()
            return loss

        step = wrap(step)
        losses = [step(start) for start in range(0, 32, 4)]
        values = [*losses, *model.parameters()]
        return b"".join(tensor.numpy().tobytes() for tensor in values)

    assert trained(lambda step: step) == trained(ps.jit)


@pytest.mark.parametrize("axis", [0, 1])
def test_few_programs_train_on_windows_of_tokens(device: Device, programs: list[object], axis: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 11, (40, 40))
    tokens = ps.asarray(ids, device=device)
    ps.random.manual_seed(4)
    table = ps.nn.Embedding(11, 8, device=device)
    head = ps.nn.Linear(8, 11, device=device)
    optimizer = ps.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
    made = []
    for i in range(16):
        programs.clear()
        window = tokens[2 * i : 2 * i + 6] if axis == 0 else tokens[:6, 2 * i : 2 * i + 6]
        before, after = window[:, :-1], window[:, 1:]
        loss = ps.nn.functional.cross_entropy(head(table(before)).reshape(-1, 11), after.reshape(-1))
        loss.backward()
        optimizer.step()
        made.append(len(programs))
        at = ids[2 * i : 2 * i + 6] if axis == 0 else ids[:6, 2 * i : 2 * i + 6]
        np.testing.assert_array_equal(window.numpy(), at)
    assert sum(made) <= 12, made
    assert not any(made[8:]), made


def test_what_a_checkpoint_recomputes_starts_where_it_did(device: Device) -> None:
    (array, factors), (x, y) = matrices(device)
    x.requires_grad_()
    for i in range(8):
        x.grad = None
        ps.checkpoint(lambda x, i=i: ps.sum((x[i] * y[i + 1]) ** 2), x).backward()
        expected = np.zeros_like(array)
        expected[i] = 2 * array[i] * factors[i + 1] ** 2
        np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-5)


def test_an_update_is_undone_nowhere_by_slices_that_move(device: Device) -> None:
    """Old values of parameters are kept for those who hold them, while programs write in their place."""
    _, (x, y) = matrices(device)
    x.requires_grad_()
    optimizer = ps.optim.SGD([x], lr=0.5)
    held = []
    for i in range(8):
        held.append((x.detach(), x.numpy().copy()))
        ps.sum(x[i] * y[i]).backward()
        optimizer.step()
    for tensor, array in held:
        np.testing.assert_array_equal(tensor.numpy(), array)
