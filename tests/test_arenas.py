"""Arenas of limited size: plans against the definition, and training on a device with such a limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from conftest import DRIVERS, gpt_losses, opencl_threads
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import Device, nn
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
    result = plan_arenas(values, UNIT, most)
    assert all(plan.arena_bytes <= most for plan in result.plans)
    for value, other in combinations(range(len(values)), 2):
        a, b = values[value], values[other]
        if result.arena_of[value] != result.arena_of[other] or a.dies < b.born or b.dies < a.born:
            continue
        start, end = result.offsets[value], result.offsets[value] + a.nbytes
        assert end <= result.offsets[other] or result.offsets[other] + b.nbytes <= start


@given(st.lists(lives, min_size=1, max_size=40))
def test_what_fits_into_one_arena_stays_there(values: list[Value]) -> None:
    result, whole = plan_arenas(values, UNIT, 1 << 20), plan(values, UNIT)
    assert result.plans == (whole,)
    assert result.offsets == whole.offsets


def test_several_arenas_take_little_more_than_one() -> None:
    random = np.random.default_rng(0)
    births = np.sort(random.integers(0, 300, 600)).tolist()
    values = [
        Value(int(random.integers(1, 1 << 16)), born, born + int(random.integers(0, 60))) for born in births
    ]
    whole = plan(values, 256)
    result = plan_arenas(values, 256, whole.arena_bytes // 6)
    assert len(result.plans) <= 8
    assert result.gap < 0.2


@given(st.lists(lives, min_size=1, max_size=40), st.integers(1, 12))
def test_a_value_larger_than_an_arena_has_one_to_itself_while_it_lives(
    values: list[Value], most: int
) -> None:
    result = plan_arenas(values, UNIT, most * UNIT, 400)
    for item, other in combinations(range(len(values)), 2):
        a, b = values[item], values[other]
        if result.arena_of[item] == result.arena_of[other] and a.dies >= b.born and b.dies >= a.born:
            start, end = result.offsets[item], result.offsets[item] + a.nbytes
            assert end <= result.offsets[other] or result.offsets[other] + b.nbytes <= start
    for bank, item in enumerate(result.plans):
        inside = [value for value, of in zip(values, result.arena_of, strict=True) if of == bank]
        times = {-(-value.nbytes // (most * UNIT)) for value in inside}
        assert item.arena_bytes <= most * UNIT or (len(times) == 1 and item.arena_bytes <= 400)


def test_large_values_take_turns_and_take_places() -> None:
    lives = [Value(300, 0, 2), Value(290, 2, 4, (0,)), Value(280, 3, 6), Value(300, 5, 7), Value(900, 8, 9)]
    result = plan_arenas(lives, UNIT, 160, 1000)
    assert result.arena_of[0] == result.arena_of[1] == result.arena_of[3] != result.arena_of[2]
    assert result.arena_of[4] not in result.arena_of[:4], "others would be as large as it"
    assert result.offsets == (0,) * 5
    assert [plan.arena_bytes for plan in result.plans] == [0, 300, 280, 900]


def test_a_value_larger_than_any_arena_is_named() -> None:
    with pytest.raises(ValueError, match="1008 bytes"):
        plan_arenas([Value(1000, 0, 1)], UNIT, 512)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host-far", "opencl-threads"])
def test_training_in_small_arenas_is_the_same(kind: str) -> None:
    losses = []
    for most in (None, 80 << 10):
        driver = opencl_threads() if kind == "opencl-threads" else DRIVERS[kind]()
        if most is not None:
            driver.capabilities = replace(driver.capabilities, max_allocation_bytes=most)
        device = Device.over(driver)
        result, jitted = gpt_losses(device, layers=2, batches=3)
        losses.append(result)
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
        driver = opencl_threads()
        driver.capabilities = replace(driver.capabilities, max_allocation_bytes=most)
        device = Device.over(driver)
        given = [ps.asarray(array, device=device) for array in (x, weight)]

        def loss(x: ps.Tensor, weight: ps.Tensor, device: Device = device) -> ps.Tensor:
            return nn.functional.linear_cross_entropy(x, weight, ps.asarray(target, device=device))

        value, gradients = ps.jit(ps.value_and_grad(loss, (0, 1)))(*given)
        losses.append([value.numpy(), *(gradient.numpy() for gradient in gradients)])
        device.close()
    for item, other in zip(*losses, strict=True):
        np.testing.assert_allclose(item, other, rtol=1e-4, atol=1e-6)


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


@pytest.mark.usefixtures("optimized")
def test_items_of_several_dtypes_take_turns_in_one_memory() -> None:
    """In one kernel: 64-bit indices, and then the rows at these indices in the memory of the indices."""
    rng = np.random.default_rng(0)
    x, up = rng.standard_normal((24, 5, 7), np.float32), rng.standard_normal((24, 3, 11), np.float32)
    rows, columns = (np.arange(3) * 5 / 3).astype(int), (np.arange(11) * 7 / 11).astype(int)
    wanted = np.zeros_like(x)
    np.add.at(wanted, (slice(None), rows[:, None], columns), up)
    device = Device.over(DRIVERS["opencl-device"]())

    def index(count: int, of: int) -> ps.Tensor:
        numbers = ps.arange(count, dtype=ps.float32, device=device)
        return ps.minimum(ps.floor(numbers * (of / count)), of - 1).astype(ps.int32)

    tensor = ps.asarray(x, device=device).requires_grad_()
    out = ps.take(ps.take(tensor, index(3, 5), axis=1), index(11, 7), axis=2)
    ps.sum(out * ps.asarray(up, device=device)).backward()
    np.testing.assert_array_equal(out.numpy(), x[:, rows[:, None], columns])
    assert tensor.grad is not None
    np.testing.assert_array_equal(tensor.grad.numpy(), wanted)
    device.close()
