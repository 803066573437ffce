"""Gradients that several jitted calls add up: in place, and under budgets that hold little of them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_budget import Counted
from test_hosted_state import NETWORKS, card, clean  # noqa: F401  (a fixture)
from test_offload import offloading

import penstock as ps
from penstock import Device
from penstock.errors import OutOfDeviceMemory


class Run:
    """A network that trains with the gradients of three batches a step, in calls of their own."""

    def __init__(self, device: Device, network: str, memory: int | None = None) -> None:
        ps.random.manual_seed(5)
        make, dtype, rule = NETWORKS[network]
        self.device = device
        self.model, self._loss_of = make(device, dtype)
        self.optimizer = rule(self.model.parameters())
        self.part = ps.jit(memory=memory)(self._part)
        self.update = ps.jit(memory=memory)(self._update)

    def _part(self, x: ps.Tensor) -> ps.Tensor:
        loss = self._loss_of(x)
        self.optimizer.backward(loss)
        return loss

    def _update(self) -> None:
        self.optimizer.step()

    def batch(self, number: int) -> ps.Tensor:
        rng = np.random.default_rng(number)
        return ps.asarray(rng.standard_normal((16, 64)).astype(np.float32), device=self.device)

    def train(self, steps: range = range(3)) -> list[bytes]:
        losses = []
        for number in steps:
            losses += [self.part(self.batch(3 * number + at)).numpy().tobytes() for at in range(3)]
            self.update()
        return losses

    @property
    def bits(self) -> list[bytes]:
        state = [array.tobytes() for array in self.optimizer.state_dict().values()]
        return state + [parameter.numpy().tobytes() for parameter in self.model.parameters()]

    def smallest(self) -> tuple[int, int, int]:
        """Of the first part of a step, of those after it, and of the update."""
        first = ps.memory.plan(self.part, self.batch(0)).smallest_bytes
        self.part(self.batch(0))
        return (
            first,
            ps.memory.plan(self.part, self.batch(0)).smallest_bytes,
            ps.memory.plan(self.update).smallest_bytes,
        )


@cache
def known(kind: str, network: str) -> tuple[Device, int, int, Any]:
    """A device, the smallest budget, the bytes of state with gradients, and losses and bits without."""
    device = offloading(kind)
    run = Run(device, network)
    expected = run.train(), run.bits
    least = max(run.smallest())
    clean(device)
    state = device.memory_stats().live_bytes
    del run
    clean(device)
    return device, least, state, expected


@pytest.mark.slow("host-far")
@pytest.mark.parametrize("network", ["momentum", "masters"])
@pytest.mark.parametrize("kind", ["opencl-device", "host-far", "host-late"])
def test_gradients_accumulate_under_a_budget_with_the_same_bits(
    kind: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, least, state, expected = known(kind, network)
    assert least < 0.5 * state
    for limit in (least, random.Random(network).randint(least, state)):
        device.trim()
        with monkeypatch.context() as patch:
            counted = Counted(device, patch)
            run = Run(device, network)
            with ps.memory.budget(limit):
                losses = run.train(range(1))  # which begins with all of it on the device
                counted.peak = counted.nbytes
                assert (losses + run.train(range(1, 3)), run.bits) == expected
                assert counted.peak <= limit
            del run
            clean(device)


@given(share=st.floats(0, 1), network=st.sampled_from(["momentum", "masters"]))
@settings(max_examples=examples(12, 5))
def test_so_they_do_under_any_budget(share: float, network: str) -> None:
    device, least, state, expected = known("opencl-device", network)
    limit = int(least + share * state)
    run = Run(device, network)
    losses = run.train(range(1))
    with ps.memory.budget(limit):
        losses += run.train(range(1, 3))
        stats = device.memory_stats()
        assert stats.live_bytes + stats.pooled_bytes <= limit
    assert (losses, run.bits) == expected
    del run
    clean(device)


@pytest.mark.parametrize("network", ["momentum", "masters"])
def test_one_byte_less_is_refused_before_anything_runs(network: str) -> None:
    device, least, _, expected = known("opencl-device", network)
    run = Run(device, network, least - 1)
    with pytest.raises(OutOfDeviceMemory, match="smallest budget") as refused:
        run.train()
    assert refused.value.smallest == least
    del refused  # its traceback refers to gradients
    for number in (1, 2):
        run.part(run.batch(number))  # what was refused was the update, and all else fits
    del run
    clean(device)
    run = Run(device, network)
    assert (run.train(), run.bits) == expected
    del run
    clean(device)


def test_a_gradient_is_written_over_the_one_before(device: Device) -> None:
    weight = ps.asarray(np.arange(12, dtype=np.float32), device=device).requires_grad_()

    @ps.jit
    def part(x: ps.Tensor) -> ps.Tensor:
        loss = ps.sum(weight * x)
        loss.backward()
        return loss

    x = ps.asarray(np.linspace(0, 1, 12, dtype=np.float32), device=device)
    part(x)
    part(x)
    assert weight.grad is not None
    before = weight.grad._node.value.place
    part(x)
    assert weight.grad._node.value.place == before
    held = weight.grad
    part(x)
    np.testing.assert_array_equal(held.numpy(), 3 * x.numpy())
    np.testing.assert_array_equal(weight.grad.numpy(), 4 * x.numpy())
    total = weight.grad * 1.0  # recorded, and computed after the next call
    del held
    part(x)
    np.testing.assert_array_equal(total.numpy(), 4 * x.numpy())
    np.testing.assert_array_equal(weight.grad.numpy(), 5 * x.numpy())


def test_a_function_may_return_the_gradient_before(device: Device) -> None:
    weight = ps.asarray(np.arange(12, dtype=np.float32), device=device).requires_grad_()

    @ps.jit
    def part(x: ps.Tensor) -> ps.Tensor | None:
        before = weight.grad
        ps.sum(weight * x).backward()
        return before

    x = ps.asarray(np.linspace(0, 1, 12, dtype=np.float32), device=device)
    assert part(x) is None
    for times in (1, 2, 3):
        before = part(x)
        assert before is not None
        np.testing.assert_array_equal(before.numpy(), times * x.numpy())
        assert weight.grad is not None
        np.testing.assert_array_equal(weight.grad.numpy(), (times + 1) * x.numpy())


def test_gradients_at_the_host_are_read_like_any_other(card: Device) -> None:  # noqa: F811
    free = Run(card, "momentum")
    for at in range(2):
        free.part(free.batch(at))
    expected = [parameter.grad.numpy().tobytes() for parameter in free.model.parameters()]
    del free
    clean(card)
    _, least, *_ = known("opencl-device", "momentum")
    run = Run(card, "momentum", least)
    for at in range(2):
        run.part(run.batch(at))
    gradients = [parameter.grad for parameter in run.model.parameters()]
    assert any(gradient._node.value.hosted for gradient in gradients)
    assert [gradient.numpy().tobytes() for gradient in gradients] == expected
    total = sum(ps.sum(gradient * gradient).item() for gradient in gradients)
    arrays = [np.frombuffer(given, np.float32).astype(np.float64) for given in expected]
    assert total == pytest.approx(sum(float((array**2).sum()) for array in arrays), rel=1e-5)
