"""Jitted functions and the state around them: tensors that share values, flags, Python values, attributes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, surface

import penstock as ps
from penstock import Device
from penstock.errors import CaptureError
from penstock.tensor.assigning import with_rows

pytestmark = surface

KINDS = [kind for kind in ("opencl-svm", "opencl-device", "host-far", "cuda", "webgpu") if kind in DRIVERS]


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


def at(device: Device, *values: Any) -> list[ps.Tensor]:
    return [ps.asarray(np.asarray(value, np.float32), device=device) for value in values]


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """The function jitted, and a list that grows whenever it is captured."""
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return ps.jit(counting), calls


SAME = {
    "copy": lambda w: ps.asarray(w, copy=True),
    "all items": lambda w: w[...],
    "positive": lambda w: +w,
    "astype": lambda w: ps.astype(w, ps.float32),
    "reshape": lambda w: ps.reshape(w, (3,)),
    "detach": lambda w: w.detach(),
    "from_dlpack": lambda w: ps.from_dlpack(w),
    "permute": lambda w: ps.permute_dims(w, (0,)),
}


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("how", SAME)
def test_tensors_with_one_value_are_two(device: Device, how: str, computed: bool) -> None:
    weight = ps.zeros((3,), device=device)
    if computed:
        weight.realize()
    twin = SAME[how](weight)
    same = twin is weight  # what needs no copy may be the tensor itself
    step = ps.jit(lambda: weight.__iadd__(1.0) - twin)
    assert [step().tolist()[0] for _ in range(3)] == ([0, 0, 0] if same else [1, 2, 3])
    back = ps.jit(lambda: twin.__iadd__(1.0) - weight)
    assert [back().tolist()[0] for _ in range(3)] == ([0, 0, 0] if same else [-2, -1, 0])


def test_a_twin_is_given_as_an_argument(device: Device) -> None:
    (weight,) = at(device, [1, 2])
    twin = ps.asarray(weight, copy=True)
    step = ps.jit(lambda x: weight.__iadd__(x) + 0)
    assert [step(twin).tolist() for _ in range(3)] == [[2, 4], [3, 6], [4, 8]]
    assert twin.tolist() == [1, 2]


# Arguments that are the same tensor, or a tensor that the function also uses from outside


def test_one_tensor_as_two_arguments_is_one(device: Device) -> None:
    def function(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        x += 1
        return y * 10

    jitted, calls = counted(function)
    for _ in range(2):
        x, y = at(device, [1], [5])
        assert jitted(x, y).tolist() == [50]
        assert (x.tolist(), y.tolist()) == ([2], [5])
        (x,) = at(device, [1])
        assert jitted(x, x).tolist() == [20]
        assert x.tolist() == [2]
    assert len(calls) == 2


def test_an_argument_that_the_function_also_finds_outside(device: Device) -> None:
    weight, other = at(device, [1], [5])

    def function(x: ps.Tensor) -> ps.Tensor:
        nonlocal weight
        weight += 1
        return x * 10

    jitted, calls = counted(function)
    assert jitted(other).tolist() == [50]
    assert jitted(weight).tolist() == [30]
    assert jitted(other).tolist() == [50]
    assert jitted(weight).tolist() == [50]
    assert weight.tolist() == [5]
    assert len(calls) == 2

    changing, calls = counted(lambda x: x.__iadd__(1) + weight)
    assert changing(weight).tolist() == [12]
    assert changing(other).tolist() == [12]
    assert changing(weight).tolist() == [14]
    assert (weight.tolist(), other.tolist(), len(calls)) == ([7], [6], 2)


# What a capture depends on


def test_a_parameter_that_requires_no_gradient_any_more(device: Device) -> None:
    first, second = (tensor.requires_grad_() for tensor in at(device, [1.0, 2.0], [3.0, 4.0]))

    @ps.jit
    def step() -> None:
        ps.sum(first * second).backward()

    step()
    first.requires_grad_(False)
    first.grad = second.grad = None
    step()
    assert first.grad is None
    assert second.grad is not None
    assert second.grad.tolist() == [1, 2]
    first.requires_grad = True
    step()
    assert first.grad is not None
    assert first.grad.tolist() == [3, 4]


def test_no_grad_at_the_first_call(device: Device) -> None:
    (weight,) = at(device, [1.0, 2.0])
    weight.requires_grad_()
    jitted = ps.jit(lambda x: ps.sum(x * weight))
    (x,) = at(device, [3.0, 4.0])
    with ps.no_grad():
        assert not jitted(x).requires_grad
    jitted(x).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 4]
    with ps.no_grad():
        assert not jitted(x).requires_grad


def test_a_shape_that_is_only_asked_for(device: Device) -> None:
    (outside, x) = at(device, [1, 2, 3], [1])
    jitted = ps.jit(lambda x: x * outside.shape[0])
    assert jitted(x).tolist() == [3]
    outside._become(at(device, [1, 2])[0]._node)
    assert jitted(x).tolist() == [2]


def test_a_gradient_that_was_there_before(device: Device) -> None:
    """A step adds to a gradient, whether there is one at its start or not."""
    (weight,) = at(device, [1.0, 2.0])
    weight.requires_grad_()
    optimizer = ps.optim.SGD([weight], lr=1.0)

    def function() -> None:
        optimizer.backward(ps.sum(weight))
        optimizer.step()

    step, calls = counted(function)
    step()
    assert weight.tolist() == [0, 1]
    ps.sum(weight * 3).backward()
    step()
    assert weight.tolist() == [-4, -3]
    step()
    assert weight.tolist() == [-5, -4]
    assert len(calls) == 2


def test_a_gradient_is_changed_where_it_is(device: Device) -> None:
    """Each call sees another gradient, and changes it."""
    (weight,) = at(device, [1.0, 2.0])
    weight.requires_grad_()

    @ps.jit
    def halve() -> None:
        assert weight.grad is not None
        weight.grad *= 0.5

    for factor in (2.0, 8.0):
        weight.grad = None
        ps.sum(weight * factor).backward()
        held = weight.grad
        halve()
        assert weight.grad is held
        assert held is not None
        assert held.tolist() == [factor / 2] * 2


def test_a_gradient_that_is_used_by_another_name(device: Device) -> None:
    (weight,) = at(device, [1.0, 2.0])
    weight.requires_grad_()
    ps.sum(weight * 3).backward()
    kept = weight.grad
    assert kept is not None
    total = ps.jit(lambda: kept + (weight.grad if weight.grad is not None else 0))
    assert total().tolist() == [6, 6]
    weight.grad = None
    ps.sum(weight * 5).backward()
    assert total().tolist() == [8, 8]


@dataclass(frozen=True)
class Scale:
    factor: Any


VALUES = [
    0.0,
    -0.0,
    0,
    False,
    1,
    1.0,
    True,
    1 + 0j,
    complex(1, -0.0),
    np.float32(1),
    np.float64(1),
    np.int64(1),
]


@pytest.mark.parametrize(
    "wrap", [lambda value: value, Scale, lambda value: (1, [value]), lambda v: frozenset([v])]
)
def test_python_values_that_are_equal_and_not_the_same(device: Device, wrap: Callable[[Any], Any]) -> None:
    seen: list[Any] = []

    @ps.jit
    def function(x: ps.Tensor, value: Any) -> ps.Tensor:
        seen.append(value)
        return x + 1

    (x,) = at(device, [1.0])
    for value in VALUES + VALUES:
        function(x, wrap(value))
    assert list(map(repr, seen)) == [repr(wrap(value)) for value in VALUES]


def test_the_sign_of_zero_is_computed_with(device: Device) -> None:
    divided = ps.jit(lambda x, by: x / by)
    (x,) = at(device, [1.0])
    assert [divided(x, by).tolist()[0] for by in (0.0, -0.0, 0.0)] == [np.inf, -np.inf, np.inf]


@pytest.mark.parametrize("make", [float, np.float32, np.float64, Scale, lambda text: complex(0, float(text))])
def test_a_fresh_nan_is_captured_once(device: Device, make: Callable[[Any], Any]) -> None:
    jitted, calls = counted(lambda x, value: x + 1)
    (x,) = at(device, [1.0])
    for _ in range(3):
        jitted(x, make("nan") if make is not Scale else Scale(float("nan")))
    assert len(calls) == 1


# Assignments inside a jitted function


class Layer(ps.nn.Module):
    def __init__(self, device: Device) -> None:
        (self.weight,) = at(device, [1.0, 2.0])
        self.count = 0
        self.last: Any = None

    def forward(self, x: ps.Tensor, what: str) -> ps.Tensor:
        if what == "count":
            self.count += 1
        elif what == "new":
            self.fresh = 1
        elif what == "tensor":
            self.last = x * 2
        elif what == "mode":
            self.eval()
        elif what == "in place":
            self.weight += 1  # assigns the present value
        return x * self.weight


@pytest.mark.parametrize("what", ["count", "new", "tensor", "mode"])
def test_attributes_assigned_inside_are_refused(device: Device, what: str) -> None:
    layer = Layer(device)
    (x,) = at(device, [1.0, 1.0])
    name = {"count": "count", "new": "fresh", "tensor": "last", "mode": "training"}[what]
    with pytest.raises(CaptureError, match=f"'{name}' of Layer was assigned inside a jitted function"):
        ps.jit(layer)(x, what)
    assert (layer.count, layer.last, hasattr(layer, "fresh"), layer.training) == (0, None, False, True)
    assert ps.jit(layer)(x, "nothing").tolist() == [1, 2]
    layer(x, what)  # outside nothing has changed


def test_changes_in_place_and_modules_made_inside_are_no_assignments(device: Device) -> None:
    layer = Layer(device)
    (x,) = at(device, [1.0, 1.0])
    jitted = ps.jit(layer)
    assert [jitted(x, "in place").tolist() for _ in range(2)] == [[2, 3], [3, 4]]
    made = ps.jit(lambda x: Layer(device)(x, "count"))
    assert [made(x).tolist() for _ in range(2)] == [[1, 2]] * 2


def test_a_tensor_that_was_kept_says_what_it_is(device: Device) -> None:
    kept: list[ps.Tensor] = []

    @ps.jit
    def function(x: ps.Tensor) -> ps.Tensor:
        kept[:] = [x, x * 2, ps.zeros(2, device=device)]
        return x + 1

    (x,) = at(device, [1.0, 2.0])
    assert function(x).tolist() == [2, 3]
    given, computed, constant = kept
    assert constant.tolist() == [0, 0]
    for tensor in (given, computed):
        for use in (
            tensor.numpy,
            tensor.tolist,
            (tensor * 3).realize,
            lambda tensor=tensor: (tensor + x).numpy(),
            lambda tensor=tensor: ps.jit(lambda x: x + tensor)(x),
            lambda tensor=tensor: function(tensor),
            lambda tensor=tensor: np.asarray(tensor),
            lambda tensor=tensor: np.from_dlpack(tensor),
        ):
            with pytest.raises(CaptureError, match="was made while a jitted function was captured"):
                use()


def test_a_flag_that_is_set_inside(device: Device) -> None:
    @ps.jit
    def function(x: ps.Tensor) -> ps.Tensor:
        x.requires_grad_()
        ps.sum(x * x).backward()
        assert x.grad is not None
        return x.grad

    for _ in range(2):
        (x,) = at(device, [1.0, 2.0])
        assert function(x).tolist() == [2, 4]
        assert x.requires_grad
        assert x.grad is not None
        assert x.grad.tolist() == [2, 4]
        function(x)
        assert x.grad.tolist() == [4, 8]


# Donated arguments


def test_what_was_recorded_of_a_donated_tensor_keeps_its_value(device: Device) -> None:
    step = ps.jit(lambda state: state * 2, donate=0)
    for record in (lambda x: x + 1, lambda x: x[1:], lambda x: ps.reshape(x, (2, -1)), lambda x: ps.sum(x)):
        array = np.arange(4096, dtype=np.float32)
        (state,) = at(device, array)
        pending = record(state)
        done = record(state).realize()
        twin = ps.asarray(state, copy=True)
        after = step(state)
        expected = record(ps.asarray(array, device=device)).numpy()
        np.testing.assert_array_equal(after.numpy(), array * 2)
        np.testing.assert_array_equal(pending.numpy(), expected)
        np.testing.assert_array_equal(done.numpy(), expected)
        np.testing.assert_array_equal(twin.numpy(), array)
        with pytest.raises(ValueError, match="donated"):
            state.numpy()


def test_a_donated_tensor_given_twice_and_found_outside(device: Device) -> None:
    (other,) = at(device, np.ones(4096))
    step = ps.jit(lambda state, x: state * 2 + x + other, donate=0)
    for _ in range(2):
        (state,) = at(device, np.full(4096, 3))
        assert step(state, state).numpy()[0] == 10
    assert step(other, at(device, np.ones(4096))[0]).numpy()[0] == 4
    with pytest.raises(ValueError, match="donated"):
        other.numpy()


# Bounded captures


def test_captures_that_fail_are_forgotten(device: Device) -> None:
    jitted = ps.jit(lambda x, value: x.numpy())
    for value in range(50):
        with pytest.raises(CaptureError):
            jitted(ps.ones(2, device=device), value)
    assert len(jitted._captured) == 0  # type: ignore[attr-defined]


def test_a_capture_keeps_no_value(device: Device) -> None:
    weight, x = at(device, np.ones(1000), np.ones(1000))
    step = ps.jit(lambda x: weight.__iadd__(x) * 2)
    step(x)
    node = weakref.ref(weight._node)
    value = weakref.ref(x._node.value)
    del x
    weight._rebind(weight * 2)
    gc.collect()
    assert node() is None or node().inputs == ()
    weight.realize()
    device.sync()
    gc.collect()
    assert value() is None


# Items


def _case(key: Any, value: Any, shape: tuple[int, ...] = (4, 3)) -> tuple[Any, Any, tuple[int, ...]]:
    return key, value, shape


MASK = np.array([[True, False, True], [False] * 3, [True] * 3, [False, True, False]])
ASSIGNED = {
    "a mask": _case(MASK, 7),
    "a mask of rows": _case(MASK[:, 0], 7),
    "a row for each": _case(MASK[:, 0], [1, 2, 3]),
    "a mask of columns": _case((slice(None), MASK[0]), 7),
    "a column for each": _case((slice(None), MASK[0]), [[1], [2], [3], [4]]),
    "a mask after an ellipsis": _case((..., MASK[0]), [[1], [2], [3], [4]]),
    "nothing": _case(np.zeros((4, 3), bool), 7),
    "rows": _case(np.array([2, 0]), [[1, 2, 3], [4, 5, 6]]),
    "rows twice": _case(np.array([2, 0, 2, 2]), np.arange(12).reshape(4, 3)),
    "negative rows": _case(np.array([-1, 1, -1]), np.arange(9).reshape(3, 3)),
    "one row": _case(np.array(2), [7, 8, 9]),
    "one item": _case((np.array(1), np.array(2)), 5),
    "pairs": _case((np.array([1, 3, 1]), np.array([2, 0, 2])), [5, 6, 7]),
    "an array and a number": _case((np.array([1, 3]), 1), [5, 6]),
    "an array and a slice": _case((slice(1, None), np.array([2, 2, 0])), np.arange(9).reshape(3, 3)),
    "arrays apart": _case((np.array([0, 1]), slice(None), np.array([1, 1])), 4, (2, 3, 2)),
    "no rows": _case(np.array([], np.int64), 7),
    "special values": _case(np.array([0, 3]), [[-0.0, np.nan, np.inf], [-np.inf, 1, -0.0]]),
}


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", ASSIGNED)
def test_items_are_assigned_inside(device: Device, name: str) -> None:
    key, value, shape = ASSIGNED[name]
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100
    expected = array.copy()
    expected[key] = np.asarray(value, np.float32)
    parts = key if isinstance(key, tuple) else (key,)
    arrays = [ps.asarray(part, device=device) for part in parts if isinstance(part, np.ndarray)]

    def assign(x: ps.Tensor, arrays: list[ps.Tensor], value: ps.Tensor) -> ps.Tensor:
        given = iter(arrays)
        inside = tuple(next(given) if isinstance(part, np.ndarray) else part for part in parts)
        x[inside if isinstance(key, tuple) else inside[0]] = value
        return x * 1

    given = ps.asarray(np.asarray(value, np.float32), device=device)
    for function in (assign, ps.jit(assign)):
        x = ps.asarray(array, device=device)
        result = function(x, arrays, given).numpy()
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))
        np.testing.assert_array_equal(x.numpy(), expected)


def test_replaced_rows_are_written_in_place(device: Device) -> None:
    table = ps.zeros((50, 4), device=device).realize()

    @ps.jit
    def put(index: ps.Tensor, rows: ps.Tensor) -> ps.Tensor:
        table._rebind(with_rows(table, index, rows))
        return table.sum()

    wanted, draw = np.zeros((50, 4), np.float32), np.random.default_rng(0)
    places = set()
    for step in range(4):
        index = draw.permutation(60)[:7].astype(np.int32)  # some are out of range
        rows = draw.integers(0, 9, (7, 4)).astype(np.float32)
        kept = table.detach() if step == 2 else None  # then the old values are still needed
        before = wanted.copy()
        wanted[index[index < 50]] = rows[index < 50]
        total = put(ps.asarray(index, device=device), ps.asarray(rows, device=device))
        assert total.item() == wanted.sum()
        np.testing.assert_array_equal(table.numpy(), wanted)
        if kept is not None:
            np.testing.assert_array_equal(kept.numpy(), before)
        if step in (0, 1):
            places.add(table._node.value.place)
    assert len(places) == 1, "in the memory of the table"


def test_gradients_of_replaced_rows(device: Device) -> None:
    draw = np.random.default_rng(0)
    index, slope = np.array([4, -1, 0, 9]), draw.random((9, 2)).astype(np.float32)
    x, rows = (ps.zeros(shape, device=device).requires_grad_() for shape in ((9, 2), (4, 2)))
    (with_rows(x, ps.asarray(index, device=device), rows) * ps.asarray(slope, device=device)).sum().backward()
    kept, taken = slope.copy(), np.zeros((4, 2), np.float32)
    kept[[4, 0]] = 0
    taken[[0, 2]] = slope[[4, 0]]
    assert x.grad is not None
    assert rows.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), kept)
    np.testing.assert_array_equal(rows.grad.numpy(), taken)


def test_gradients_of_assigned_items(device: Device) -> None:
    """The later of two values for an item gets the gradient; the old item gets none."""
    index = ps.asarray(np.array([2, 0, 2]), device=device)
    mask = ps.asarray(np.array([False, True, False, False]), device=device)
    factor = ps.asarray(np.array([1, 2, 3, 4], np.float32), device=device)

    def loss(x: ps.Tensor, values: ps.Tensor) -> ps.Tensor:
        y = x * 1
        y[index] = values
        y[mask] = values[0]
        return ps.sum(y * factor)

    x, values = at(device, [1, 2, 3, 4], [5, 6, 7])
    for function in (loss, ps.jit(loss)):
        by_x, by_values = ps.grad(function, argnums=(0, 1))(x, values)
        assert (by_x.tolist(), by_values.tolist()) == ([0, 0, 0, 4], [2, 1, 3])


def test_a_selection_inside_says_what_to_use(device: Device) -> None:
    (x,) = at(device, [1.0, 2.0, 3.0])
    for function in (
        lambda x: x[x > 1],
        lambda x: x[(x > 1).astype(ps.bool)] * 2,
        lambda x: ps.reshape(x, (3, 1))[x > 1, 0],
        lambda x: x.__setitem__(x > 1, ps.ones(2, device=device)),
    ):
        with pytest.raises(CaptureError, match=r"mask of shape \(3,\) has true values.*use where"):
            ps.jit(function)(x)
