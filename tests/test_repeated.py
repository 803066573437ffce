"""Operations that were recorded before, on other values: the same results and errors as the first time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL

import penstock as ps
from penstock import Device
from penstock.errors import OutOfDeviceMemory
from penstock.execution.realize import executables
from penstock.graph.node import Node
from penstock.tensor import core

# Of two arrays of the same shape, 9 x 7 and float32, by Penstock and NumPy.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "both the same": lambda x, y: x * x,
    "row": lambda x, y: x - y[:1],
    "column": lambda x, y: y[:, 2:3] - x,
    "other dtype": lambda x, y: x + (y > 1),
    "compare": lambda x, y: x < y,
    "integer": lambda x, y: x * 2,
    "number first": lambda x, y: 1.5 - x,
    "comparison with a number": lambda x, y: x <= 0.25,
    "conversion": lambda x, y: x.astype(np.float64),
    "transpose": lambda x, y: x.T,
    "transpose and a number": lambda x, y: x.T - 2.5,
    "a number and a transpose": lambda x, y: 2.5 - y.T,
    "a product of a product": lambda x, y: (x * 3.0) * 3.0,
    "first row": lambda x, y: x[0],
    "a row": lambda x, y: x[3],
    "last row": lambda x, y: y[-1],
    "rows": lambda x, y: x[2:5],
    "a block": lambda x, y: x[1:4, ::2],
    "backwards": lambda x, y: x[::-1],
    "nothing": lambda x, y: x[4:4],
    "an item": lambda x, y: x[8, 6],
    "product": lambda x, y: (x > 0.5).astype(np.float32) @ (y > 0.5).astype(np.float32).T,
    "three axes": lambda x, y: x.reshape((3, 3, 7)),
    "limits": lambda x, y: x.clip(-0.5, 0.75),
    "a lower limit": lambda x, y: x.clip(0, None),
    "equal limits": lambda x, y: x.clip(0.5, 0.5),
    "a value twice": lambda x, y: (x - y) * x,
    "a pending value twice": lambda x, y: (x - y) * (x - y) + y,
    "a view of a view": lambda x, y: x[2:, 1:].T[3] - 0.5,
    "an inserted axis": lambda x, y: x[:, None] < y[:4, None, :][0],
    "columns by index": lambda x, y: x[:, y[0, :3].argsort(axis=0)],
    "another shape and a number": lambda x, y: x.reshape((7, 9)) + 2.0,
    "a mask": lambda x, y: x[y > 0.25],
    "rows by a mask": lambda x, y: x[y[:, 0] > 0.25],
    "a NumPy number": lambda x, y: (x - np.float32(2.5)) * np.float32(0.5),
    "a NumPy array": lambda x, y: x + np.arange(7, dtype=np.float32),
}
# The same by functions of both namespaces.
FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "limits of another tensor": lambda np, x, y: np.clip(x, y - 1, y + 1),
    "stack": lambda np, x, y: np.stack([x, y], axis=1),
    "a stack of the same": lambda np, x, y: np.stack([x, x]),
    "two numbers": lambda np, x, y: np.where(x > y, 1.5, -2.5),
    "where": lambda np, x, y: np.where(x > 0, x, y),
    "where, of a number": lambda np, x, y: np.where(x > y, x, np.float32(0.5) if np is not ps else 0.5),
    "an inserted first axis": lambda np, x, y: np.expand_dims(x, axis=0) - y,
    "what is true anywhere": lambda np, x, y: np.any((x > 1) & ~(y < 0), axis=0),
    "lower triangle": lambda np, x, y: np.tril(x, k=-1),
    "upper triangle": lambda np, x, y: np.triu(y),
    "repeated items": lambda np, x, y: np.repeat(x, 3, axis=1),
    "rolled": lambda np, x, y: np.roll(x, 2, axis=0),
    "tiled": lambda np, x, y: np.tile(x, (2, 1, 3)),
    "diagonal": lambda np, x, y: np.diagonal(x, 1),
    "close": lambda np, x, y: np.isclose(x, y, 0.5),
    "outer product": lambda np, x, y: np.outer(x[0], y[1]) if np is not ps else ps.outer(x[0], y[1]),
    "along an axis": lambda np, x, y: np.take_along_axis(x, np.argsort(y, axis=1), axis=1),
    "greatest": lambda np, x, y: x.max(axis=1) if np is not ps else ps.max(x, dim=1)[0],
    "two greatest": lambda np, x, y: -np.sort(-x, axis=1)[:, :2] if np is not ps else ps.topk(x, 2)[0],
}
OPERATIONS |= {
    name: partial(lambda function, x, y: function(ps if isinstance(x, ps.Tensor) else np, x, y), function)
    for name, function in FUNCTIONS.items()
}
# The same of what is pending, and has the same bits on the host.
PENDING: dict[str, Callable[[Any, Any], Any]] = {
    name: partial(lambda apply, x, y: apply(x + 0.25, abs(y)), apply) for name, apply in OPERATIONS.items()
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", ["values", "pending"])
def test_results_are_those_of_the_first_time(device: Device, kind: str, name: str) -> None:
    operation = (OPERATIONS if kind == "values" else PENDING)[name]
    rng = np.random.default_rng(0)
    for _ in range(12):
        a, b = (rng.standard_normal((9, 7), dtype=np.float32) for _ in range(2))
        x, y = ps.asarray(a, device=device), ps.asarray(b, device=device)
        result, expected = operation(x, y).realize(), np.asarray(operation(a, b))
        assert result.shape == expected.shape
        np.testing.assert_array_equal(result.numpy(), expected)
        assert not result.requires_grad


def test_numbers_are_told_apart(device: Device) -> None:
    x, whole = ps.asarray([1.0, -2.0], device=device), ps.asarray([1, -2], device=device)
    for _ in range(4):
        assert [math.copysign(1, item) for item in (x * 0.0).tolist()] == [1, -1]
        assert [math.copysign(1, item) for item in (x * -0.0).tolist()] == [-1, 1]
        assert (whole + 2).dtype is ps.int64
        assert (whole + 2.0).dtype is ps.float32
        assert (whole + True).tolist() == [2, -1]
        assert (x - 1).tolist() == [0.0, -3.0]
        assert (1 - x).tolist() == [0.0, 3.0]
        assert (x * math.inf).tolist() == [math.inf, -math.inf]
    for number in range(40):
        assert (x * number).tolist() == [number, -2.0 * number]


def test_equal_constants_of_an_expression(device: Device) -> None:
    """Which are one argument of its kernel, and are two where they differ."""
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = ps.asarray(a, device=device)
    for first, second in ((2.0, 2.0), (2.0, 3.0), (3.0, 3.0), (3.0, 2.0)) * 3:
        np.testing.assert_array_equal(((x.T * first) + second).numpy(), a.T * first + second)
        np.testing.assert_array_equal((ps.nn.functional.relu(x) + 0.0).numpy(), a)


@pytest.mark.parametrize("number_first", [False, True])
@pytest.mark.parametrize("number", [0.0, 6.0, 2.0])
def test_a_number_and_a_function_with_constants_of_its_own(
    device: Device, number: float, number_first: bool
) -> None:
    """The number may be equal to one of them, and is then the same argument of the kernel."""
    a = np.linspace(-3, 9, 12, dtype=np.float32).reshape(3, 4)
    x, expected = ps.asarray(a, device=device), np.clip(a, 0, 6)
    for other in (*[number] * 12, 3.0, 0.0, 6.0, number, -1.5):
        result = ps.nn.functional.relu6(x)
        result = other - result if number_first else result - other
        wanted = other - expected if number_first else expected - other
        np.testing.assert_array_equal(result.realize().numpy(), wanted, f"{other} after {number}")


def test_limits_are_told_apart(device: Device) -> None:
    a = np.array([math.nan, -math.inf, -7.0, -0.0, 0.0, 5e-9, 1, 2**25 + 2, math.inf], np.float32)
    x, whole = ps.asarray(a, device=device), ps.asarray([-300, -1, 0, 70, 500], device=device)
    limits = (0.0, -0.0, 1, 2**24, 2**25 + 1, 0.1, math.inf, -math.inf, math.nan, None)
    for _ in range(3):
        for least in limits:
            for most in limits:
                low, high = (None if limit is None else np.float32(limit) for limit in (least, most))
                expected = a if low is None else np.maximum(a, low)
                expected = expected if high is None else np.minimum(expected, high)
                np.testing.assert_array_equal(ps.clip(x, least, most).numpy(), expected, f"{least}, {most}")
        assert ps.clip(whole, -1, 2.5).tolist() == [-1, -1, 0, 2, 2]
        assert ps.clip(whole, -(10**30), 10**30).tolist() == whole.tolist()
        assert [math.copysign(1, item) for item in ps.clip(x[3:5], 0.0, 1.0).tolist()] == [-1, 1]


def test_indices_are_checked_where_others_were_in_range(device: Device) -> None:
    x = ps.asarray(np.arange(12, dtype=np.float32).reshape(3, 4), device=device)
    functional = ps.nn.functional
    for _ in range(3):
        for last in (3, -1, 2, 0, -4):
            index = np.array([[0, last], [1, 2], [last, 1]])
            taken = ps.take_along_axis(x, ps.asarray(index, device=device), axis=1)
            np.testing.assert_array_equal(taken.numpy(), np.take_along_axis(x.numpy(), index, axis=1))
        for wrong in (4, -5):
            with pytest.raises(IndexError, match="take_along_axis"):
                ps.take_along_axis(x, ps.asarray([[0], [wrong], [1]], device=device), axis=1).numpy()
        for wrong, good in ((4, 3), (-1, 2)):
            targets = ps.asarray([0, good, 1], device=device)
            bad = ps.asarray([0, wrong, 1], device=device)
            picked = x.numpy()[range(3), targets.numpy()]
            np.testing.assert_array_equal(functional.nll_loss(x, targets, reduction="none").numpy(), -picked)
            assert functional.cross_entropy(x, targets).item() > 0
            assert ps.one_hot(targets, 4)[1].tolist() == [int(at == good) for at in range(4)]
            for refused in (functional.nll_loss, functional.cross_entropy):
                with pytest.raises(IndexError):
                    refused(x, bad).numpy()
            with pytest.raises(IndexError, match="one_hot"):
                ps.one_hot(bad, 4).numpy()
        ignored = ps.asarray([0, -100, 1], device=device)
        both = ps.asarray([0, 1], device=device)
        rows = ps.asarray(x.numpy()[[0, 2]], device=device)
        np.testing.assert_allclose(
            functional.cross_entropy(x, ignored).item(), functional.cross_entropy(rows, both).item(), 1e-6
        )


def test_expressions_of_values_and_numbers_that_may_be_the_same(device: Device) -> None:
    """What is the same is one argument of a program, and another program takes what differs."""
    arrays = [np.linspace(-3, 9, 12, dtype=np.float32).reshape(3, 4) + shift for shift in range(3)]
    tensors = [ps.asarray(array, device=device) for array in arrays]
    for first, second, third in ((0, 1, 2), (0, 0, 1), (1, 2, 2), (0, 1, 0), (2, 2, 2)) * 4:
        a, b, c = (arrays[at] for at in (first, second, third))
        x, y, z = (tensors[at] for at in (first, second, third))
        np.testing.assert_array_equal(ps.maximum(x * y, z).numpy(), np.maximum(a * b, c))
        np.testing.assert_array_equal(ps.where(x > y, y, z).numpy(), np.where(a > b, b, c))
        for number, other in ((1.0, 1.0), (1.0, 2.0), (0.0, -0.0), (math.nan, math.nan), (math.nan, 1.0)):
            got = ps.copysign(ps.maximum(x - number, z), other).numpy()
            np.testing.assert_array_equal(got, np.copysign(np.maximum(a - np.float32(number), c), other))


def test_assignments_again(device: Device) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    x, row = ps.asarray(a, device=device), ps.asarray([7.0, 8.0, 9.0, 10.0], device=device)
    whole = ps.asarray(a.astype(np.int8), device=device)
    for value in (1.0, -0.0, math.nan, 2, True, 2**60, np.float64(0.5)) * 2:
        for step in range(3):
            x[step] = a[step] = value
            x[step, 1:] = a[step, 1:] = value
            x[..., step] = row[1:]
            a[..., step] = row.numpy()[1:]
            mask = a > 8 + step
            x[ps.asarray(mask, device=device)] = a[mask] = value
            np.testing.assert_array_equal(x.numpy(), a)
            np.testing.assert_array_equal(np.signbit(x.numpy()), np.signbit(a))
    for _ in range(3):
        whole[0] = -128
        whole[1, :2] = True
        with pytest.raises(OverflowError):
            whole[1] = 128
        assert whole.tolist() == [[-128] * 4, [1, 1, 6, 7], [8, 9, 10, 11]]
        with pytest.raises(ValueError, match="broadcast"):
            x[0] = ps.zeros(3, device=device)
        with pytest.raises(IndexError):
            x[3] = 1.0


def test_values_that_are_read_are_copies(device: Device) -> None:
    x = ps.asarray([[1.0, 2.0], [3.0, 4.0]], device=device)
    for _ in range(12):
        for tensor in (x, x + x, (x + x) * 0.5):
            tensor.numpy()[:] = 0
        assert float((x + x)[1, 1]) == 8.0
        assert (x * 2.0).tolist() == [[2, 4], [6, 8]]
    assert x.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("operation", [lambda x: x * 2.5, lambda x: 2.5 - x])
def test_a_number_and_the_value_of_a_function(device: Device, operation: Callable[[Any], Any]) -> None:
    """The constants of what computed a value are no constants of what is computed from it."""
    a = np.linspace(-3, 9, 12, dtype=np.float32).reshape(3, 4)
    for _ in range(12):
        value = ps.nn.functional.relu6(ps.asarray(a, device=device)).realize()
        np.testing.assert_array_equal(operation(value).realize().numpy(), operation(np.clip(a, 0, 6)))


def test_errors_are_those_of_the_first_time(device: Device) -> None:
    x, small = ps.asarray([1.0, 2.0], device=device), ps.asarray([1, 2], dtype=ps.int8, device=device)
    for _ in range(4):
        assert (small + 1).tolist() == [2, 3]
        assert (small < 5).tolist() == [True, True]
        assert (small < 1000).tolist() == [True, True]
        assert (small > 1000).tolist() == [False, False]
        with pytest.raises(OverflowError, match="1000"):
            small + 1000
        with pytest.raises(ValueError, match="T is for matrices"):
            _ = x.T
        with pytest.raises(TypeError, match="bitwise_and does not take float32"):
            x & x
        with pytest.raises(ValueError, match="tensors are on"):
            x + ps.ones(2, device="host")
        with pytest.raises(IndexError):
            x[2]


def test_tuples_are_told_apart_by_their_items(device: Device) -> None:
    """Also where they are equal, as (1,), (1.0,) and (True,) are."""
    x = ps.asarray(np.arange(12, dtype=np.float32).reshape(3, 4), device=device)
    for _ in range(3):
        assert ps.mean(x, axis=(1,)).tolist() == [1.5, 5.5, 9.5]
        assert ps.mean(x, axis=(0, 1)).item() == 5.5
        assert ps.linalg.tensordot(x, x, axes=((0, 1), (0, 1))).item() == 506
        for wrong in ((1.0,), (0, 1.0), (np.float64(1),)):
            with pytest.raises(TypeError, match="axis"):
                ps.mean(x, axis=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="axis"):
            ps.linalg.tensordot(x, x, axes=((0, 1.0), (0, 1)))  # type: ignore[arg-type]


def test_views_refuse_what_they_refused_the_first_time(device: Device) -> None:
    """Equal numbers of other types are told apart."""
    value = ps.ones((2, 3), device=device).realize()
    for x in (value, value * 2.0) * 2:
        assert ps.reshape(x, (3, 2)).shape == ps.reshape(x, (3, -1)).shape == (3, 2)
        assert ps.permute_dims(x, (1, 0)).shape == (3, 2)
        with pytest.raises(TypeError, match="integer"):
            ps.reshape(x, (3.0, 2.0))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="integer"):
            ps.permute_dims(x, (1.0, 0.0))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="6 items"):
            ps.reshape(x, (4, 2))
        with pytest.raises(ValueError, match="not an order"):
            ps.permute_dims(x, (1, 1))
        with pytest.raises(ValueError, match="do not fit"):
            x @ x


def test_long_chains_of_what_is_repeated_are_computed_on_the_way(device: Device) -> None:
    x = ps.ones((4, 4), device=device).realize()
    weight = ps.ones((4, 4), device=device).realize()
    for _ in range(2 * core.MAX_DEPTH):
        x = ps.permute_dims(ps.nn.functional.sigmoid(x @ weight), (1, 0))[:, :4]
        assert x._node.depth <= core.MAX_DEPTH or x._node.value is not None
    assert x.shape == (4, 4)


def test_gradients_pass_where_values_came_before(device: Device) -> None:
    value = ps.asarray([[1.0, 2.0], [3.0, 4.0]], device=device)
    for _ in range(3):
        assert (value.T * 3.0).tolist() == [[3, 9], [6, 12]]
        assert value[1].tolist() == [3, 4]
    x = ps.asarray([[1.0, 2.0], [3.0, 4.0]], device=device).requires_grad_()
    ps.sum(x.T * 3.0 + x[1] + ps.exp(x) * 0.0).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[3, 3], [5, 5]]
    with ps.no_grad():
        assert not (x * 3.0).requires_grad
    assert (x * 3.0).requires_grad


def test_a_profile_sees_what_is_repeated(device: Device) -> None:
    x, y = ps.ones((9, 7), device=device).realize(), ps.ones((9, 7), device=device).realize()
    for _ in range(12):
        (x + y).realize()
    with ps.profile(device=device) as profile:
        (x + y).realize()
    (evidence,) = profile.evidence(measure=False)
    assert sum(line.runs for line in evidence.runs) == 1


@pytest.mark.parametrize("kind", sorted({*DRIVERS} & {"opencl-device", "host-far"}))
def test_what_is_repeated_is_planned_for_a_limit(kind: str) -> None:
    device = Device.over(DRIVERS[kind](), SMALL)
    x, y = (ps.ones((256, 256), device=device).realize() for _ in range(2))
    for _ in range(12):
        (x + y).realize()
    device.sync()
    device.limit_bytes = device.memory_stats().live_bytes + (64 << 10)
    device.trim()
    with pytest.raises(OutOfDeviceMemory):
        (x + y).realize()
    device.limit_bytes = None
    assert float(ps.sum((x + y).realize())) == 2 * 256 * 256
    device.close()


def test_a_pending_input_that_is_computed_first(device: Device) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = ps.asarray(a, device=device)
    for computes in (False, False, False, True, False, True):
        turned = x.T
        result = turned + 1.0
        if computes:
            turned.realize()
        np.testing.assert_array_equal(result.numpy(), a.T + 1)
        np.testing.assert_array_equal(turned.numpy(), a.T)


@pytest.mark.parametrize("kind", sorted(DRIVERS))
def test_threads_repeat_the_same_operations(kind: str) -> None:
    device = Device.over(DRIVERS[kind](), SMALL)
    a = np.arange(63, dtype=np.float32).reshape(9, 7)
    x = ps.asarray(a, device=device)
    wrong: list[Any] = []

    def work(number: int) -> None:
        for step in range(30):
            got = ((x.T + float(number)).numpy(), x[step % 9].numpy(), (x * number).numpy())
            wanted = a.T + np.float32(number), a[step % 9], a * np.float32(number)
            wrong.extend(pair for pair in zip(got, wanted, strict=True) if not np.array_equal(*pair))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    device.close()


def test_graphs_that_are_not_reused() -> None:
    device = Device.over(DRIVERS["host-far"](), replace(SMALL, reuse_graphs=False))
    x = ps.asarray([[1.0, 2.0], [3.0, 4.0]], device=device)
    for _ in range(3):
        assert (x.T * 2.0).tolist() == [[2, 6], [4, 8]]
        assert x[1].tolist() == [3, 4]
    assert not device.subgraphs
    assert not device.examples
    device.close()


def test_a_node_like_others_keeps_no_value(device: Device) -> None:
    """What they are made like has stand-ins for inputs."""
    x, y = ps.ones((9, 7), device=device).realize(), ps.ones((9, 7), device=device).realize()
    for _ in range(3):
        made = (x + y).realize()
    node: Node = made._node
    assert node.like is not None
    assert x._node not in node.like.node.inputs
    assert node.inputs == ()


NUMBERED: dict[str, Callable[[ps.Tensor, int], ps.Tensor]] = {
    "bernoulli": lambda x, k: ps.random.Generator(0, x.device).bernoulli(0.01 * k, x.shape),
    "integers": lambda x, k: ps.random.Generator(0, x.device).integers(0, 100 + k, x.shape),
    "uniform": lambda x, k: ps.random.Generator(0, x.device).uniform(x.shape, 0, 100 + k),
    "normal": lambda x, k: ps.random.Generator(0, x.device).normal(x.shape, 0, 100 + k),
    "dropout": lambda x, k: ps.nn.functional.dropout(x, 0.01 * k),
    "clip": lambda x, k: ps.clip(ps.exp(x), 0, 0.1 * k),
    "tril": lambda x, k: ps.tril(ps.exp(x), k),
    "isclose": lambda x, k: ps.isclose(ps.exp(x), x, atol=0.01 * k),
    "norm": lambda x, k: ps.linalg.vector_norm(x, ord=2.5 + k),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_other_numbers_are_the_same_program(device: Device, name: str) -> None:
    x = ps.asarray(np.random.default_rng(0).random((70, 60)).astype(np.float32), device=device)
    own, function = executables(device), NUMBERED[name]
    for k in (1, 2, 3):
        function(x, k).numpy()
    before = len(own._programs)
    for k in range(4, 12):
        function(x, k).numpy()
    assert len(own._programs) == before
