"""Arenas of a largest size: plans against the definition, and training on a device that has no larger one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from conftest import DRIVERS, gpt_losses
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import Device, nn
from penstock.drivers.opencl import OpenCLDriver, find_devices
from penstock.errors import OutOfDeviceMemory
from penstock.plan.arena import Value, plan
from penstock.plan.arenas import plan_arenas

UNIT = 16
lives = st.builds(
    lambda nbytes, born, length: Value(nbytes, born, born + length),
    st.integers(1, 400),
    st.integers(0, 20),
    st.integers(0, 8),
)


@given(st.lists(lives, min_size=1, max_size=40), st.integers(400, 2000))
def test_no_two_values_share_a_byte_while_both_live(values: list[Value], most: int) -> None:
    found = plan_arenas(values, UNIT, most)
    assert all(one.arena_bytes <= most for one in found.plans)
    for one, other in combinations(range(len(values)), 2):
        a, b = values[one], values[other]
        if found.arena_of[one] != found.arena_of[other] or a.dies < b.born or b.dies < a.born:
            continue
        start, end = found.offsets[one], found.offsets[one] + a.nbytes
        assert end <= found.offsets[other] or found.offsets[other] + b.nbytes <= start


@given(st.lists(lives, min_size=1, max_size=40))
def test_what_fits_into_one_arena_stays_there(values: list[Value]) -> None:
    found, whole = plan_arenas(values, UNIT, 1 << 20), plan(values, UNIT)
    assert found.plans == (whole,)
    assert found.offsets == whole.offsets


def test_several_arenas_take_little_more_than_one() -> None:
    random = np.random.default_rng(0)
    births = np.sort(random.integers(0, 300, 600)).tolist()
    values = [
        Value(int(random.integers(1, 1 << 16)), born, born + int(random.integers(0, 60))) for born in births
    ]
    whole = plan(values, 256)
    found = plan_arenas(values, 256, whole.arena_bytes // 6)
    assert len(found.plans) <= 8
    assert found.gap < 0.2


@given(st.lists(lives, min_size=1, max_size=40), st.integers(1, 12))
def test_a_value_larger_than_an_arena_has_one_to_itself_while_it_lives(
    values: list[Value], most: int
) -> None:
    found = plan_arenas(values, UNIT, most * UNIT, 400)
    for one, other in combinations(range(len(values)), 2):
        a, b = values[one], values[other]
        if found.arena_of[one] == found.arena_of[other] and a.dies >= b.born and b.dies >= a.born:
            start, end = found.offsets[one], found.offsets[one] + a.nbytes
            assert end <= found.offsets[other] or found.offsets[other] + b.nbytes <= start
    for bank, one in enumerate(found.plans):
        inside = [value for value, of in zip(values, found.arena_of, strict=True) if of == bank]
        times = {-(-value.nbytes // (most * UNIT)) for value in inside}
        assert one.arena_bytes <= most * UNIT or (len(times) == 1 and one.arena_bytes <= 400)


def test_large_values_take_turns_and_take_places() -> None:
    lives = [Value(300, 0, 2), Value(290, 2, 4, (0,)), Value(280, 3, 6), Value(300, 5, 7), Value(900, 8, 9)]
    found = plan_arenas(lives, UNIT, 160, 1000)
    assert found.arena_of[0] == found.arena_of[1] == found.arena_of[3] != found.arena_of[2]
    assert found.arena_of[4] not in found.arena_of[:4], "others would be as large as it"
    assert found.offsets == (0,) * 5
    assert [one.arena_bytes for one in found.plans] == [0, 300, 280, 900]


def test_a_value_larger_than_any_arena_is_named() -> None:
    with pytest.raises(ValueError, match="1008 bytes"):
        plan_arenas([Value(1000, 0, 1)], UNIT, 512)


@pytest.mark.slow("opencl-threads")
@pytest.mark.parametrize("kind", ["host-far", "opencl-threads"])
def test_training_in_small_arenas_is_the_same(kind: str) -> None:
    losses = []
    for most in (None, 80 << 10):
        driver = OpenCLDriver(find_devices()[0], kind) if kind == "opencl-threads" else DRIVERS[kind]()
        if kind == "opencl-threads":
            driver.capabilities = replace(driver.capabilities, vector_width=1)
        if most is not None:
            driver.capabilities = replace(driver.capabilities, max_allocation_bytes=most)
        device = Device.over(driver)
        found, jitted = gpt_losses(device, layers=2, batches=5)
        losses.append(found)
        if most is not None:
            (captured,) = next(iter(jitted._captured.values()))
            assert len(captured.program.plan.plans) > 2
        device.close()
    assert losses[0] == losses[1]


def test_logits_of_many_rows_are_computed_in_parts_that_fit() -> None:
    random = np.random.default_rng(0)
    x, weight = (
        random.normal(size=(300, 8)).astype(np.float32),
        random.normal(size=(50, 8)).astype(np.float32),
    )
    target = random.integers(0, 50, 300)
    losses = []
    for most in (1 << 30, 16 << 10):  # all logits have 60,000 bytes
        driver = OpenCLDriver(find_devices()[0], "opencl-threads")
        driver.capabilities = replace(driver.capabilities, vector_width=1, max_allocation_bytes=most)
        device = Device.over(driver)
        given = [ps.asarray(one, device=device) for one in (x, weight)]

        def loss(x: ps.Tensor, weight: ps.Tensor, device: Device = device) -> ps.Tensor:
            return nn.functional.linear_cross_entropy(x, weight, ps.asarray(target, device=device))

        value, gradients = ps.jit(ps.value_and_grad(loss, (0, 1)))(*given)
        losses.append([value.numpy(), *(one.numpy() for one in gradients)])
        device.close()
    for one, other in zip(*losses, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_result_on_the_way_that_is_too_large_is_named() -> None:
    driver = DRIVERS["host-far"]()
    driver.capabilities = replace(driver.capabilities, max_allocation_bytes=1 << 16)
    device = Device.over(driver)
    x = ps.ones((1 << 12,), device=device)

    @ps.jit
    def far(x: ps.Tensor) -> ps.Tensor:
        return ps.sum(ps.cumulative_sum(ps.reshape(x, (-1, 1)) * ps.reshape(x, (1, -1)), axis=0))

    with pytest.raises(OutOfDeviceMemory, match=r"float32\[4096, 4096\].*in parts"):
        far(x)
    device.close()
