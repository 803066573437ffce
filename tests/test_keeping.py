"""What is read before a step is computed once: the backward pass takes what it needs of the forward pass."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_programs import host as host

import penstock as ps
from penstock import Device, nn, optim
from penstock.tensor import backward, keeping

F = nn.functional
pytestmark = pytest.mark.usefixtures("given_rates")  # which profiles would measure
ROWS, WIDTH, CLASSES = 96, 64, 10


class Network:
    """A classifier on a device, the same at each call, whose steps read something before the update."""

    def __init__(self, device: Device, read: str) -> None:
        rng = np.random.default_rng(0)
        self.read = read
        shapes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES))
        self.weights = [
            ps.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1), device=device)
            for shape in shapes
        ]
        for weight in self.weights:
            weight.requires_grad = True
        self.optimizer = optim.Adam(self.weights, lr=0.01)
        self.x = ps.asarray(rng.standard_normal((ROWS, WIDTH), dtype=np.float32), device=device)
        self.y = ps.asarray(rng.integers(0, CLASSES, ROWS), device=device)

    def step(self) -> tuple[ps.Tensor, float | None]:
        first, second, third = self.weights
        logits = ps.tanh(F.relu(self.x @ first) @ second) @ third
        loss = F.cross_entropy(logits, self.y)
        number = None
        if self.read == "loss first":
            number = float(loss)
        loss.backward()
        if self.read == "loss":
            number = float(loss)
        if self.read == "accuracy":
            number = float(ps.mean(ps.astype(ps.argmax(logits, axis=1) == self.y, ps.float32)))
        self.optimizer.step()
        return loss, number


def operations(work: Callable[[], object], device: Device) -> int:
    """How many arithmetic operations are launched; those of matrix products dominate."""
    with ps.profile(device=device) as profile:
        work()
        device.sync()
    return sum((record.operations or 0) * record.calls for record in profile.kernels())


@pytest.mark.parametrize("read", ["loss first", "loss", "accuracy"])
def test_what_is_read_before_a_step_takes_no_second_forward_pass(device: Device, read: str) -> None:
    plain, reading = Network(device, "nothing"), Network(device, read)
    for _ in range(3):
        plain.step()
        reading.step()
    # The forward pass is a third of a step.
    assert operations(reading.step, device) < 1.1 * operations(plain.step, device)
    for expected, weight in zip(plain.weights, reading.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_loss_that_was_read_keeps_nothing_of_the_forward_pass_after_the_step(device: Device) -> None:
    held = {}
    for read in ("nothing", "loss"):
        network = Network(device, read)
        losses = [network.step()[0] for _ in range(3)]
        gc.collect()
        before = device.memory_stats().live_bytes
        losses += [network.step()[0] for _ in range(3)]
        gc.collect()
        held[read] = device.memory_stats().live_bytes - before
        del losses, network
    layer = ROWS * WIDTH * 4  # bytes that each step keeps for its gradients at least
    assert held["loss"] < held["nothing"] + layer


def test_gradients_of_a_value_that_was_read_are_those_of_one_that_was_not(device: Device) -> None:
    plain, reading = Network(device, "nothing"), Network(device, "nothing")
    for network in (plain, reading):
        first, second, third = network.weights
        hidden = ps.tanh(network.x @ first)
        for part in (hidden @ second, hidden * 2.0):  # two losses that share a part
            loss = ps.mean((part @ third) ** 2)
            if network is reading:
                assert float(loss) > 0
            loss.backward()
    for expected, weight in zip(plain.weights, reading.weights, strict=True):
        assert expected.grad is not None
        assert weight.grad is not None
        np.testing.assert_allclose(weight.grad.numpy(), expected.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_what_has_no_gradient_is_read_without_an_error(device: Device) -> None:
    weight = ps.asarray(np.ones((4, 4), np.float32), device=device)
    weight.requires_grad = True
    value = ps.sum(ps.sort(weight @ weight, axis=1)) * 2.0
    assert float(value) == 128.0
    with ps.no_grad():
        assert float(ps.sum(weight * 2.0) + 1.0) == 33.0


# Threads


class Interrupted:
    """A lock after each of whose uses something else comes before the thread goes on."""

    def __init__(self, lock: Any, other: Callable[[], object]) -> None:
        self._lock, self._other, self._depth = lock, other, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()
        if not self._depth:
            self._depth = 1  # nothing in between
            self._other()
            self._depth = 0


def doubled(device: Device) -> tuple[ps.Tensor, ps.Tensor, ps.Tensor]:
    """A value without a gradient, a loss whose gradient needs it, and what that gradient is of."""
    weight = ps.asarray(np.ones(6, np.float32), device=device).requires_grad_()
    value = ps.asarray(np.arange(6, dtype=np.float32), device=device) * 2
    return value, ps.sum(value * weight), weight


def test_a_value_that_another_thread_lets_go_of_while_it_is_read(host: Device) -> None:
    value, loss, _weight = doubled(host)
    assert float(loss) == 30
    host.running = Interrupted(host.running, lambda: keeping.release(host))  # type: ignore[assignment]
    assert value.numpy().tolist() == [0, 2, 4, 6, 8, 10]


def followed(function: Callable[..., Any], other: Callable[[], object]) -> Callable[..., Any]:
    """A function after which another thread does something, if it need not wait for this one."""

    def both(*given: Any, **options: Any) -> Any:
        result = function(*given, **options)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.1)
        return result

    return both


def test_a_value_that_another_thread_computes_before_it_is_kept(
    host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, loss, _weight = doubled(host)
    monkeypatch.setattr(keeping, "_needed", followed(keeping._needed, value.realize))
    assert float(loss) == 30
    keeping.release(host)
    assert value.numpy().tolist() == [0, 2, 4, 6, 8, 10]


def test_values_that_another_thread_lets_go_of_during_a_backward_pass(
    host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loss, weight = doubled(host)
    assert float(loss) == 30
    walk = followed(backward.topological, lambda: keeping.release(host))  # type: ignore[attr-defined]
    monkeypatch.setattr(backward, "topological", walk)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.numpy().tolist() == [0, 2, 4, 6, 8, 10]
