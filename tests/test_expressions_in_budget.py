"""Budgets for expressions outside of jitted functions, and for the device `auto`: met, or refused before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_budget import Counted
from test_dispatch import made
from test_hosted_state import NETWORKS, clean
from test_offload import offloading

import penstock as ps
from penstock import Device
from penstock.errors import OutOfDeviceMemory

OFFLOADING = ["opencl-device", "host-far", "host-late"]


def chain(x: ps.Tensor, weight: ps.Tensor) -> ps.Tensor:
    """The gradient of a chain of products, all of which the backward pass needs."""
    weight = weight.detach().requires_grad_()
    value = x
    for _ in range(8):
        value = ps.tanh(value @ weight)
    ps.sum(value).backward()
    assert weight.grad is not None
    return weight.grad


def given_to(device: Device) -> tuple[ps.Tensor, ps.Tensor]:
    rows = np.random.default_rng(3).standard_normal((512, 64)).astype(np.float32)
    return ps.asarray(rows, device=device), ps.asarray(np.eye(64, dtype=np.float32), device=device)


def smallest(compute: Callable[[], Any]) -> int:
    """Of budgets that would do."""
    with ps.memory.budget(1), pytest.raises(OutOfDeviceMemory, match="smallest budget") as refused:
        compute()
    assert refused.value.smallest is not None
    return refused.value.smallest


def check(device: Device, counted: Device, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """An expression under a budget: same bits, no more memory; a byte less than the least is refused."""
    expected = chain(*given_to(device)).numpy().tobytes()
    clean(device)
    counted.trim()
    with monkeypatch.context() as patch:
        memory = Counted(counted, patch)
        x = given_to(device)
        chain(*x).numpy()
        free = memory.peak
        clean(device)
        device.trim()
        least = smallest(lambda: chain(*x).numpy())
        assert least < 0.75 * free
        launched = memory.nbytes
        with ps.memory.budget(least - 1), pytest.raises(OutOfDeviceMemory, match="smallest budget"):
            chain(*x).numpy()
        assert memory.nbytes <= launched  # nothing ran
        for limit in (least, int(least + share * (free - least))):
            device.trim()
            memory.peak = 0
            with ps.memory.budget(limit):
                assert chain(*x).numpy().tobytes() == expected
            assert memory.peak <= limit


@pytest.mark.parametrize("kind", ["host", "opencl-mapped", *OFFLOADING])
def test_an_expression_fits_or_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = offloading(kind) if kind in OFFLOADING else Device.over(DRIVERS[kind](), SMALL)
    check(device, device, monkeypatch, 0.4)
    device.close()


@pytest.mark.parametrize("kind", ["opencl-mapped", "opencl-device"])
def test_so_does_auto(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = made(kind)
    check(auto, auto.members[0], monkeypatch, 0.4)
    auto.close()


@pytest.mark.parametrize("kind", ["opencl-mapped", "opencl-device"])
def test_a_jitted_function_on_auto_fits_or_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = made(kind)
    x = given_to(auto)
    step = ps.jit(chain)
    expected = step(*x).numpy().tobytes()
    clean(auto)
    least = smallest(lambda: step(*x))
    memory = [Counted(member, monkeypatch) for member in auto.members]
    for counted, member in zip(memory, auto.members, strict=True):
        counted.nbytes = member.memory_stats().live_bytes
    with ps.memory.budget(least - 1), pytest.raises(OutOfDeviceMemory, match="smallest budget"):
        step(*x)
    for limit in (least, least + 50_000):
        with ps.memory.budget(limit):
            assert step(*x).numpy().tobytes() == expected
            assert all(counted.peak <= limit for counted in memory)
    assert step(*x).numpy().tobytes() == expected
    auto.close()


def trained(device: Device, limit: int | None, steps: int = 2) -> list[bytes]:
    """Losses and parameters of steps without `jit`."""
    ps.random.manual_seed(5)
    make, dtype, rule = NETWORKS["momentum"]
    model, loss_of = make(device, dtype)
    optimizer = rule(model.parameters())
    bits = []
    for number in range(steps):
        rows = np.random.default_rng(number).standard_normal((16, 64)).astype(np.float32)
        x = ps.asarray(rows, device=device)
        if limit is None:
            loss = loss_of(x)
            loss.backward()
            optimizer.step()
        else:
            with ps.memory.budget(limit):
                loss = loss_of(x)
                loss.backward()
                optimizer.step()
                stats = device.memory_stats()
                assert stats.live_bytes + stats.pooled_bytes <= limit
        bits.append(loss.numpy().tobytes())
    return bits + [parameter.numpy().tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", OFFLOADING)
def test_training_without_jit_keeps_state_at_the_host(kind: str) -> None:
    device = offloading(kind)
    expected = trained(device, None)
    clean(device)
    with pytest.raises(OutOfDeviceMemory, match="smallest budget") as refused:
        trained(device, 1)
    least = refused.value.smallest
    assert least is not None
    del refused
    clean(device)
    assert least < 223_744  # the bytes of parameters and momentum
    for limit in (least, 2 * least):
        assert trained(device, limit) == expected
        clean(device)
    with pytest.raises(OutOfDeviceMemory, match="smallest budget"):
        trained(device, least - 1)
    device.close()


def test_inputs_larger_than_the_budget_come_one_after_the_other() -> None:
    device = offloading("opencl-device")
    arrays = [np.random.default_rng(seed).standard_normal((256, 256)).astype(np.float32) for seed in range(4)]
    tensors = [ps.asarray(array, device=device) for array in arrays]

    def total() -> ps.Tensor:
        return sum((ps.sum(tensor @ tensor) for tensor in tensors), ps.zeros((), device=device))

    expected = total().numpy()
    clean(device)
    least = smallest(lambda: total().numpy())
    assert least < 3 * arrays[0].nbytes
    with ps.memory.budget(least):
        assert total().numpy().tobytes() == expected.tobytes()
        stats = device.memory_stats()
        assert stats.live_bytes + stats.pooled_bytes <= least
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    device.close()


def test_a_small_expression_that_was_planned_for_a_limit() -> None:
    """It expects its inputs at the host, where those of later times do not lie."""
    device = offloading("opencl-device")
    arrays = [np.arange(1 << 16, dtype=np.float32) % (3 + number) for number in range(4)]
    tensors = [ps.asarray(array, device=device) for array in arrays]
    for limit in (5 * arrays[0].nbytes, None, 5 * arrays[0].nbytes):
        device.limit_bytes = limit
        for x, y in ((0, 1), (2, 3), (1, 2)):
            total = (ps.cumulative_sum(tensors[x]) + tensors[y]).realize().numpy()
            np.testing.assert_array_equal(total, np.cumsum(arrays[x]) + arrays[y])
    device.close()


@given(share=st.floats(0, 1), kind=st.sampled_from(OFFLOADING))
@settings(max_examples=examples(12, 4), deadline=None)
def test_an_expression_has_the_same_bits_under_any_budget(share: float, kind: str) -> None:
    device = offloading(kind)
    x = given_to(device)
    expected = chain(*x).numpy().tobytes()
    least = smallest(lambda: chain(*x).numpy())
    limit = int(least * (1 + 2 * share))
    with ps.memory.budget(limit):
        assert chain(*x).numpy().tobytes() == expected
        stats = device.memory_stats()
        assert stats.live_bytes + stats.pooled_bytes <= limit
    device.close()
