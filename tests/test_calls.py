"""Graphs that are recorded once and called again: gradients, updates, and functions of several operations."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import surface

import penstock as ps
from penstock import Device, nn, optim
from penstock.config import Settings
from penstock.drivers.host import HostDriver
from penstock.execution.realize import executables
from penstock.execution.single import single
from penstock.graph import elementwise, reducing
from penstock.graph.calls import CALL, RESULT, call, inline, subgraph_between
from penstock.graph.node import Node, placeholder, topological
from penstock.graph.reference import by_parts
from penstock.graph.shaping import reshape
from penstock.tensor import core
from penstock.tensor.autograd import custom_vjp
from penstock.tensor.dtypes import float32

F = nn.functional

pytestmark = surface


def array(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def calls(*tensors: ps.Tensor) -> int:
    """The number of calls in the graphs of tensors."""
    return sum(node.primitive is CALL for node in topological([tensor._node for tensor in tensors]))


# Graphs


def spread(x: Node, y: Node) -> Node:
    total = reducing.sum_(elementwise.multiply(x, y), (0,))
    return elementwise.add(total, elementwise.like(total, 3.0))


def test_a_call_is_what_it_stands_for() -> None:
    leaves = [placeholder((4,), float32) for _ in range(2)]
    made = subgraph_between(dict.fromkeys(leaves), [spread(*leaves), elementwise.exp(leaves[1])])
    assert made is not None
    subgraph, taken = made
    assert taken == leaves
    assert [node.shape for node in subgraph.outputs] == [(), (4,)]

    def through_call(x: Node, y: Node) -> Node:
        total, power = call(subgraph, [y, x])
        assert {total.primitive, power.primitive} == {RESULT}
        (result,) = inline([elementwise.add(power, reducing.expand(_reshaped(total), (4,)))])
        assert not any(node.primitive in (CALL, RESULT) for node in topological([result]))
        return result

    def plain(x: Node, y: Node) -> Node:
        return elementwise.add(elementwise.exp(x), reducing.expand(_reshaped(spread(y, x)), (4,)))

    a, b = array(4), array(4, seed=1)
    np.testing.assert_array_equal(by_parts(through_call, a, b), by_parts(plain, a, b))


def _reshaped(node: Node) -> Node:
    return reshape(node, (1,))


def test_a_subgraph_with_calls_inside_has_none_itself() -> None:
    x = placeholder((4,), float32)
    inner = subgraph_between({x: None}, [elementwise.exp(x)])
    assert inner is not None
    (power,) = call(inner[0], [x])
    outer = subgraph_between({x: None}, [elementwise.negative(power)])
    assert outer is not None
    assert [node.primitive.name for node in topological(outer[0].outputs)][1:] == ["exp", "negative"]


def test_what_reads_a_value_of_its_own_is_no_subgraph() -> None:
    x, other = placeholder((4,), float32), placeholder((4,), float32)
    assert subgraph_between({x: None}, [elementwise.add(x, other)]) is None


# Gradients


def test_gradients_of_an_equal_graph_are_not_recorded_again(device: Device) -> None:
    for turn in range(3):
        a = array(5, 7, seed=turn)
        x = ps.asarray(a, device=device).requires_grad_()
        ps.sum(ps.tanh(x) * (turn + 0.5)).backward()
        assert x.grad is not None
        assert calls(x.grad) == 1
        assert len(device.subgraphs) == 1
        np.testing.assert_allclose(x.grad.numpy(), (1 - np.tanh(a) ** 2) * (turn + 0.5), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("read_first", [False, True])
def test_a_loss_that_was_read_has_the_same_gradients(device: Device, read_first: bool) -> None:
    result = []
    for _ in range(2):
        x = ps.asarray(array(6), device=device).requires_grad_()
        loss = ps.sum(ps.exp(x) * x)
        if read_first:
            loss.item()
        loss.backward()
        assert x.grad is not None
        result.append(x.grad.numpy())
    np.testing.assert_array_equal(result[0], result[1])
    np.testing.assert_allclose(result[0], np.exp(array(6)) * (1 + array(6)), rtol=1e-5)


def test_what_differs_is_recorded_anew(device: Device) -> None:
    """Another function, another shape, another tensor that requires a gradient, another exponent."""

    def gradient(function: Callable[..., ps.Tensor], x: ps.Tensor, y: ps.Tensor) -> Any:
        ps.sum(function(x, y)).backward()
        return [None if t.grad is None else t.grad.numpy() for t in (x, y)]

    a, b = np.abs(array(3, 4)) + 1, np.abs(array(3, 4, seed=1)) + 1
    cases: list[tuple[Callable[..., ps.Tensor], Callable[..., Any]]] = [
        (lambda x, y: x * y, lambda a, b: (b, a)),
        (lambda x, y: x / y, lambda a, b: (1 / b, -a / b**2)),
        (lambda x, y: x**2 + y, lambda a, b: (2 * a, np.ones_like(b))),
        (lambda x, y: x**3 + y, lambda a, b: (3 * a**2, np.ones_like(b))),
        (lambda x, y: ps.concat([x[:1], y[1:]]) * 1, lambda a, b: _rows(a, b, 1)),
        (lambda x, y: ps.concat([x[:2], y[2:]]) * 1, lambda a, b: _rows(a, b, 2)),
    ]
    for _ in range(2):
        for function, wanted in cases:
            for x_too, y_too in ((True, True), (True, False), (False, True)):
                x, y = (ps.asarray(v, device=device) for v in (a, b))
                x.requires_grad_(x_too)
                y.requires_grad_(y_too)
                got = gradient(function, x, y)
                for value, right, needed in zip(got, wanted(a, b), (x_too, y_too), strict=True):
                    assert (value is not None) == needed
                    if needed:
                        np.testing.assert_allclose(value, right, rtol=1e-5)


def _rows(a: Any, b: Any, first: int) -> tuple[Any, Any]:
    x, y = np.zeros_like(a), np.zeros_like(b)
    x[:first], y[first:] = 1, 1
    return x, y


def test_gradients_of_gradients_are_not_lost() -> None:
    x = ps.asarray(array(4)).requires_grad_()
    second = ps.grad(lambda x: ps.sum(ps.grad(lambda x: ps.sum(x**3))(x)))
    np.testing.assert_allclose(second(x).numpy(), 6 * array(4), rtol=1e-5)


def test_a_function_that_holds_tensors_is_not_kept() -> None:
    device = ps.default_device()
    held = ps.asarray(array(1000))
    reference = weakref.ref(held)
    before = len(device.subgraphs)
    x = ps.asarray(array(1000)).requires_grad_()
    loss = ps.sum(custom_vjp(x * held, [x], lambda g, *_, held=held: [g * held]))
    loss.backward()
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), array(1000))
    del loss, held
    x.grad = None
    x = x.detach()
    gc.collect()
    assert reference() is None
    assert len(device.subgraphs) <= before + 1  # of `x * held`


def test_recorded_graphs_hold_no_memory(device: Device) -> None:
    def turn() -> None:
        x = ps.asarray(array(256, 64), device=device).requires_grad_()
        ps.sum(F.softmax(x * 2) * x).backward()
        assert x.grad is not None
        x.grad.numpy()
        F.gelu(x.detach()).numpy()

    turn()
    gc.collect()
    device.sync()
    held = device.memory_stats().live_bytes
    turn()
    gc.collect()
    device.sync()
    assert device.memory_stats().live_bytes == held
    assert len(device.subgraphs) >= 2


# Steps


def trained(device: Device, jitted: bool, make: Callable[..., optim.Optimizer], steps: int = 6) -> list[Any]:
    ps.random.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8, device=device), nn.GELU(), nn.Linear(8, 2, device=device))
    optimizer = make(model.parameters())

    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = ps.jit(step) if jitted else step
    losses = []
    for number in range(steps):
        x, y = (ps.asarray(array(16, n, seed=number), device=device) for n in (5, 2))
        losses.append(run(x, y).numpy())
        optimizer.lr = 0.01 / (1 + number)
    return [*losses, *model.state_dict().values(), *optimizer.state_dict().values()]


MAKERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, clip_norm=0.5),
}


@pytest.mark.slow("webgpu", "sgd", "adam")
@pytest.mark.parametrize("name", MAKERS)
def test_a_loop_without_jit_gives_the_bits_of_the_jitted_step(device: Device, name: str) -> None:
    for got, wanted in zip(
        trained(device, False, MAKERS[name]), trained(device, True, MAKERS[name]), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_a_repeated_step_is_one_program(device: Device) -> None:
    trained(device, False, MAKERS["adam"], steps=2)
    before = len(executables(device)._programs)
    trained(device, False, MAKERS["adam"], steps=4)  # of another model, whose steps are the same
    assert len(executables(device)._programs) == before


def test_settings_that_change_between_steps_take_effect() -> None:
    weight = ps.asarray(np.ones(4, np.float32)).requires_grad_()
    optimizer = optim.SGD([weight], lr=1.0)

    def step() -> np.ndarray[Any, Any]:
        before = weight.numpy()
        ps.sum(weight * 10).backward()
        optimizer.step()
        return before - weight.numpy()

    np.testing.assert_allclose(step(), 10, rtol=1e-6)
    optimizer.clip_norm = 1.0
    np.testing.assert_allclose(np.linalg.norm(step()), 1, rtol=1e-5)
    optimizer.clip_norm = None
    optimizer._settings[0]["weight_decay"] = 0.5
    held = weight.numpy()
    np.testing.assert_allclose(step(), 10 + 0.5 * held, rtol=1e-6)
    optimizer.lr = 0.5
    held = weight.numpy()
    np.testing.assert_allclose(step(), 0.5 * (10 + 0.5 * held), rtol=1e-6)


def test_an_optimizer_of_the_users_own_is_asked_in_every_step() -> None:
    class Own(optim.SGD):
        factor = 1.0

        def _update(self, at: int, value: ps.Tensor, grad: ps.Tensor) -> dict[str, ps.Tensor]:
            return {"value": value - grad * self.factor}

    weight = ps.asarray(np.zeros(3, np.float32)).requires_grad_()
    optimizer = Own([weight], lr=1.0)
    for factor in (1.0, 2.0, 4.0):
        optimizer.factor = factor
        before = weight.numpy()
        ps.sum(weight).backward()
        optimizer.step()
        np.testing.assert_array_equal(before - weight.numpy(), factor)


def test_steps_with_gradients_of_some_parameters() -> None:
    a, b = (ps.asarray(np.ones(3, np.float32)).requires_grad_() for _ in range(2))
    optimizer = optim.Adam([a, b], lr=0.1)
    for which in ((a,), (a, b), (b,), (a, b), (a,)):
        before = a.numpy(), b.numpy()
        for tensor in which:
            ps.sum(tensor * tensor).backward()
        optimizer.step()
        for tensor, old in zip((a, b), before, strict=True):
            moved = not np.array_equal(tensor.numpy(), old)
            assert moved == any(tensor is other for other in which)


# Functions


FUNCTIONS: dict[str, Callable[[ps.Tensor], ps.Tensor]] = {
    "softmax": lambda x: F.softmax(x, axis=0),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, "tanh"),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-3),
    "var": lambda x: ps.var(x, axis=1, correction=1.0),
    "row": lambda x: x + x[0],
    "stack of products": lambda x: x[None] @ x.T[None],
    "vector": lambda x: x @ x[0],
}


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_give_the_bits_that_they_give_with_gradients(device: Device, name: str) -> None:
    """If a gradient passes, every operation is recorded."""
    function = FUNCTIONS[name]
    for seed in range(3):
        x = ps.asarray(array(40, 33, seed=seed), device=device)
        plain = function(x)
        assert calls(plain) == (name != "stack of products")  # which is a single operation
        tracked = function(ps.asarray(array(40, 33, seed=seed), device=device).requires_grad_())
        assert calls(tracked) == 0
        np.testing.assert_array_equal(plain.numpy(), tracked.numpy())


def test_other_arguments_are_other_functions() -> None:
    x = ps.asarray(array(5, 7))
    for correction in (0.0, 1.0, -0.0):
        np.testing.assert_allclose(
            ps.var(x, correction=correction).numpy(), array(5, 7).var(ddof=int(correction)), rtol=1e-5
        )
    for axis in (0, 1, None, (0, 1)):
        np.testing.assert_allclose(
            ps.mean(x, axis=axis).numpy(), array(5, 7).mean(axis=axis), rtol=1e-5, atol=1e-6
        )
    with pytest.raises(IndexError, match="axis 2"):
        ps.mean(x, axis=2)
    for zero in (np.float32(0.0), np.float32(-0.0), 0.0, -0.0, np.float64(-0.0)):
        filled = ps.nan_to_num(ps.asarray([ps.nan]), nan=zero)
        assert np.signbit(filled.numpy()) == np.signbit(zero)


# Single operations


def test_single_operations_are_told_apart(device: Device) -> None:
    """By the operation, its attributes, shapes, dtypes, and by which inputs are the same."""
    a, b = array(6, 6), array(6, 6, seed=1)
    for _ in range(3):
        x, y = ps.asarray(a, device=device), ps.asarray(b, device=device)
        whole = ps.asarray(np.arange(36).reshape(6, 6), device=device)
        for got, wanted in (
            (x + y, a + b),
            (y + x, b + a),
            (x + x, a + a),
            (x - y, a - b),
            (x * 2, a * 2),
            (x * -0.0, a * np.float32(-0.0)),
            (x * 0.0, a * np.float32(0.0)),
            (2 - x, 2 - a),
            (x - 2, a - 2),
            (whole * 2, np.arange(36).reshape(6, 6) * 2),
            (x[1:], a[1:]),
            (x[2:], a[2:]),
            (x[::-1], a[::-1]),
            (x[:, 3], a[:, 3]),
            (x > y, a > b),
            (x.astype(ps.int32), a.astype(np.int32)),
            (x.astype(ps.float16), a.astype(np.float16)),
            (ps.max(x, axis=0), a.max(0)),
            (ps.max(x, axis=1), a.max(1)),
            (ps.take(x, ps.asarray(np.array([4, 0]), device=device), axis=0), a[[4, 0]]),
        ):
            values = got.numpy()
            if device.capabilities.contracts:  # fused multiply-add rounds only once
                np.testing.assert_allclose(values, wanted, rtol=1e-6, atol=1e-6)
                np.testing.assert_array_equal(np.signbit(values), np.signbit(wanted))
                continue
            np.testing.assert_array_equal(values, wanted)
            assert values.tobytes() == np.ascontiguousarray(wanted, values.dtype).tobytes()


def test_small_expressions_are_told_apart(device: Device) -> None:
    """By how operations are nested, which inputs and constants are the same, and their order."""
    a, b, c = (array(4, 4, seed=seed) for seed in range(3))
    half = a.astype(np.float16)
    for turn in range(3):
        x, y, z = (ps.asarray(values, device=device) for values in (a, b, c))
        added = np.float32(turn)  # another number each time
        for got, wanted in (
            ((x + y) * z, (a + b) * c),
            (x + y * z, a + b * c),
            ((x + y) * x, (a + b) * a),
            ((x + y) * y, (a + b) * b),
            ((x + x) * y, (a + a) * b),
            (F.relu(x) + turn, np.maximum(a, 0) + added),
            (F.relu(x) + y, np.maximum(a, 0) + b),
            (F.relu(x + y), np.maximum(a + b, 0)),
            (F.relu(x) * -0.0, np.maximum(a, 0) * np.float32(-0.0)),
            (x.T + turn, a.T + added),
            (x * 2 + 2, a * 2 + 2),
            (x * 2 + 3, a * 2 + 3),
            (x * 3 + 2, a * 3 + 2),
            (ps.where(x > 0, x, y), np.where(a > 0, a, b)),
            (ps.where(x > y, x, 0), np.where(a > b, a, 0)),
            ((x.astype(ps.float16) * 2).astype(ps.float32) * 2, (half * 2).astype(np.float32) * 2),
            (ps.concat([ps.concat([x, y]), z, x]), np.concatenate([a, b, c, a])),
            (ps.concat([ps.concat([x, y, z]), x]), np.concatenate([a, b, c, a])),
            (ps.concat([ps.concat([x, y], axis=1), ps.concat([z, x], axis=1)]), np.block([[a, b], [c, a]])),
            ((x + y)[1], (a + b)[1]),
            ((x + y)[1:, 2], (a + b)[1:, 2]),
            (x[1] + y[2], a[1] + b[2]),
            (x[2] + y[1], a[2] + b[1]),
            (x + y[0], a + b[0]),
            (x + y[:, :1], a + b[:, :1]),
            (x.detach() + y, a + b),
        ):
            values = got.numpy()
            if device.capabilities.contracts:  # fused multiply-add rounds only once
                np.testing.assert_allclose(values, wanted, rtol=1e-6, atol=1e-6)
                np.testing.assert_array_equal(np.signbit(values), np.signbit(wanted))
            else:
                np.testing.assert_array_equal(values, wanted)
                assert values.tobytes() == np.ascontiguousarray(wanted, values.dtype).tobytes()


def test_a_bad_index_is_refused_however_often(device: Device) -> None:
    x = ps.asarray(array(6), device=device)
    for index in (5, 6, 2, 6, 6):
        result = ps.take(x, ps.asarray(np.array([index]), device=device))
        if index == 6:
            with pytest.raises(ps.errors.BadIndex, match="index 6"):
                result.numpy()
        else:
            assert result.item() == array(6)[index]


def test_it_can_be_seen_and_switched_off() -> None:
    device = Device.over(HostDriver(), Settings(reuse_graphs=False))
    x = ps.asarray(array(6, 6), device=device).requires_grad_()
    plain = F.softmax(x.detach())
    ps.sum(F.softmax(x)).backward()
    assert x.grad is not None
    assert calls(plain, x.grad) == 0
    assert "recorded before" not in ps.explain(plain)
    assert not device.subgraphs
    other = F.softmax(ps.asarray(array(6, 6), device=Device.over(HostDriver())))
    pending = [node for node in topological([plain._node]) if node.value is None]
    recorded = sum(not node.primitive.is_identity for node in pending)
    assert ps.explain(other).endswith(f"; {recorded} operations were recorded before")
    np.testing.assert_array_equal(plain.numpy(), other.numpy())


def test_other_threads_see_parameters_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = ps.asarray(np.ones(4, np.float32)).requires_grad_()
    optimizer = optim.Adam([weight], lr=0.1, weight_decay=0.25)  # which no other test has recorded
    ps.sum(weight * 2).backward()

    def state() -> list[Any]:
        return [weight.grad, *(tensor._actual_node for tensor in optimizer._all())]

    before, seen, record = state(), [], optim.Optimizer._record_step

    def watched(twin: optim.Optimizer) -> None:
        record(twin)
        seen.append(all(now is then for now, then in zip(state(), before, strict=True)))

    monkeypatch.setattr(optim.Optimizer, "_record_step", watched)
    optimizer.step()
    assert seen == [True]
    assert weight.grad is None
    assert not weight.device.updated
    np.testing.assert_allclose(weight.numpy(), 0.9, rtol=1e-4)


def test_nothing_is_computed_while_something_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is pending: its inputs have no values yet."""
    monkeypatch.setattr(core, "MAX_PENDING_BYTES", 100)
    monkeypatch.setattr(core, "MAX_DEPTH", 2)
    device = Device.over(HostDriver())
    a = array(33, 9, seed=5)
    x = ps.asarray(a, device=device).requires_grad_()
    optimizer = optim.AdamW([x], lr=0.1, clip_norm=1.0)
    for _ in range(2):
        before = x.numpy()
        wanted = np.exp(before - before.max(1, keepdims=True))
        wanted /= wanted.sum(1, keepdims=True)
        np.testing.assert_allclose(F.softmax(x.detach()).numpy(), wanted, rtol=1e-5)
        ps.sum(F.gelu(F.softmax(x)) * x).backward()
        optimizer.step()
        assert np.all(np.abs(x.numpy() - before) > 0)


@pytest.mark.parametrize("reads", [False, True])
def test_a_loop_without_an_optimizer_repeats_one_program(device: Device, reads: bool) -> None:
    x = np.linspace(-1, 1, 20, dtype=np.float32)
    given, w = ps.asarray(x, device=device), ps.zeros((), device=device).requires_grad_()
    wanted, counts = np.float32(0), []
    for _ in range(12):
        w.grad = None
        loss = ps.mean((given * w - given * 3) ** 2)
        loss.backward()
        with ps.no_grad():
            assert w.grad is not None
            w -= w.grad * 0.3
        if reads:
            loss.item()
        wanted -= np.float32(0.3) * np.mean(2 * (x * wanted - x * 3) * x)
        counts.append(len(executables(device)._programs))
    assert 1 <= counts[-1] == counts[3] <= 2  # the first step begins with zeros that are not computed yet
    np.testing.assert_allclose(w.numpy(), wanted, rtol=1e-4)


# Similar calls that differ


def parameter(*values: float) -> ps.Tensor:
    return ps.asarray(np.array(values, np.float32)).requires_grad_()


KEYWORDS: dict[str, Callable[..., ps.Tensor]] = {
    "affine": lambda x, w, b: F.affine(x, scale=w[0], shift=b),
    "linear": lambda x, w, b: F.linear(x, weight=w, bias=b),
    "layer norm": lambda x, w, b: F.layer_norm(x, b.shape, w[0], b),
    "attention": lambda x, w, b: F.scaled_dot_product_attention(
        ps.reshape(x, (1, 1, 4, 4)), value=ps.reshape(w, (1, 1, 4, 4)), key=ps.reshape(w + b, (1, 1, 4, 4))
    ),
}


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", KEYWORDS)
def test_tensors_by_name(device: Device, name: str) -> None:
    x, w, b = (
        ps.asarray(array(*shape, seed=seed), device=device)
        for seed, shape in enumerate([(4, 4), (4, 4), (4,)])
    )
    expected = ps.jit(KEYWORDS[name])(x, w, b).numpy()
    for _ in range(2):
        np.testing.assert_allclose(KEYWORDS[name](x, w, b).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_what_was_computed_without_gradients_is_a_constant() -> None:
    x = parameter(1, 2, 3)
    with ps.no_grad():
        mean = ps.mean(x)
    ps.sum(x * mean).backward()
    assert x.grad is not None
    assert x.grad.numpy().tolist() == [2, 2, 2]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_a_gradient_is_a_value(reuse: bool, given: bool) -> None:
    device = Device.over(HostDriver(), Settings(reuse_graphs=reuse))
    x = ps.asarray(np.array([1.0, 2, 3], np.float32), device=device).requires_grad_()
    for _ in range(2):
        x.grad = None
        if given:
            (x**3).backward(ps.ones(3, device=device))
        else:
            ps.sum(x**3).backward()
        first, x.grad = x.grad, None
        assert first is not None
        ps.sum(first * x).backward()
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), [3, 12, 27])
    device.close()


def test_parameters_that_share_a_gradient_and_then_do_not() -> None:
    a, b = parameter(1, 1, 1), parameter(1, 1, 1)
    optimizer = optim.SGD([a, b], lr=1.0)
    a.grad = b.grad = ps.full((3,), 0.5)
    optimizer.step()
    a.grad, b.grad = ps.full((3,), 0.25), ps.full((3,), -1.0)
    optimizer.step()
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([0.25] * 3, [1.5] * 3)


def test_a_parameter_that_is_its_own_gradient() -> None:
    for value in (1.0, 3.0):
        a, b = parameter(value), parameter(value)
        optimizer = optim.SGD([a], lr=0.5)
        a.grad = a.detach() if value == 3 else a
        optimizer.step()
        assert a.item() == value / 2
        other = optim.SGD([b], lr=0.5)
        b.grad = ps.full((1,), 1.0)
        other.step()
        assert b.item() == value - 0.5


def test_a_gradient_on_another_device_is_refused() -> None:
    device, elsewhere = (Device.over(HostDriver()) for _ in range(2))
    a = ps.ones(3, device=device).requires_grad_()
    with pytest.raises(ValueError, match="to_device"):
        a.grad = ps.ones(3, device=elsewhere)
    assert a.grad is None


def test_settings_as_lists() -> None:
    a, b = parameter(1, 2), parameter(1, 2)
    for tensor, betas in ((a, [0.9, 0.99]), (b, (0.9, 0.99))):
        optimizer = optim.Adam([tensor], lr=0.1, betas=betas)  # type: ignore[arg-type]
        ps.sum(tensor**2).backward()
        optimizer.step()
    assert a.numpy().tolist() == b.numpy().tolist()


def test_a_tensor_whose_value_is_asked_for() -> None:
    x = ps.asarray(array(4, 5))
    for axis in (1, 0, 1):
        np.testing.assert_array_equal(
            ps.mean(x, axis=ps.asarray(axis)).numpy(), ps.mean(x, axis=axis).numpy()
        )
        np.testing.assert_array_equal(F.softmax(x, ps.asarray(axis)).numpy(), F.softmax(x, axis).numpy())
    for correction in (0.0, 1.0):
        expected = ps.var(x, correction=correction).numpy()
        assert ps.var(x, correction=ps.asarray(correction)).numpy() == expected


def test_a_scalar_of_a_raw_kernel_in_a_checkpoint() -> None:
    line = "out[i] = alpha * x[i];"
    times = ps.raw_kernel(
        "times",
        {"opencl": line, "cuda": line, "wgsl": line},
        inputs=("x",),
        outputs={"out": "x"},
        scalars={"alpha": "float32"},
    )
    x = parameter(1, 2, 3)
    for alpha in (2.0, 5.0):

        def function(x: ps.Tensor, alpha: float = alpha) -> ps.Tensor:
            with ps.no_grad():
                constant = times(x, alpha=alpha)
            return x * constant

        x.grad = None
        ps.sum(ps.checkpoint(function, x)).backward()
        assert x.grad is not None
        assert x.grad.numpy().tolist() == [alpha, 2 * alpha, 3 * alpha]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_parts_of_complex_constants_keep_their_sign(device: Device, zero: float) -> None:
    for sign in (zero, -zero, zero):
        root = ps.sqrt(ps.full((3,), complex(-1, sign), dtype=ps.complex64, device=device)).numpy()
        np.testing.assert_array_equal(root, np.sqrt(np.full(3, complex(-1, sign), np.complex64)))


def test_many_values_are_no_small_expression() -> None:
    values = [ps.asarray(np.full(1, number, np.float32)) for number in range(200)]
    assert single(ps.concat(values)._node) is None
    assert ps.concat(values).numpy().tolist() == [*range(200)]


@pytest.mark.parametrize("pending", [False, True])
def test_a_function_that_is_known_depends_on_all_of_its_arguments(device: Device, pending: bool) -> None:
    for shape in ((3, 4), (4, 3)):
        values = array(*shape)
        given = [dict[str, Any](), {"axis": 0}, {"axis": 1}, {"axis": (0, 1)}, {"axis": 0, "keepdims": True}]
        for arguments in given * 2:
            x = ps.asarray(values, device=device)
            x = x + x if pending else x
            for ours, numpy in ((ps.sum, np.sum), (ps.max, np.max), (ps.var, np.var)):
                expected = numpy(2 * values if pending else values, **arguments)
                np.testing.assert_allclose(ours(x, **arguments).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_function_that_is_known_passes_gradients_where_they_are_recorded(device: Device) -> None:
    x = ps.asarray(array(3, 4), device=device)
    ps.sum(x, axis=1).realize()
    x.requires_grad = True
    with ps.no_grad():
        rows = ps.sum(x, axis=1)
    assert not rows.requires_grad
    np.testing.assert_allclose(rows.numpy(), x.numpy().sum(1), rtol=1e-5)
    total = ps.sum(ps.sum(x, axis=1) * 2)
    total.backward()
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), np.full((3, 4), 2, np.float32))
