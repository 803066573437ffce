"""What is read before a step is computed once: the backward pass takes what it needs of the forward pass."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

import penstock as ps
from penstock import Device, nn, optim

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
