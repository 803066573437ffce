"""Values that lie in the memory of others: slices that need no command, and what must not be shared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import penstock as ps
from penstock import Device, optim
from penstock.compiler.schedule import Schedule
from penstock.execution.run_buffers import RunBuffers


def matrix(device: Device, rows: int = 64, columns: int = 128) -> tuple[np.ndarray[Any, Any], ps.Tensor]:
    values = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    return values, ps.asarray(values, device=device)


def requests(device: Device) -> int:
    """How often memory was asked for so far."""
    stats = device.pool.stats()
    return stats.hits + stats.misses


@pytest.mark.parametrize(
    "key", [5, -1, slice(2, 10), (3, slice(0, 64)), (slice(4, 5), slice(None)), (slice(8, 16), None)], ids=str
)
def test_items_that_follow_one_another_are_not_copied(device: Device, key: Any) -> None:
    values, x = matrix(device)
    before = requests(device)
    part = x[key].realize()
    assert requests(device) == before
    np.testing.assert_array_equal(part.numpy(), values[key])
    np.testing.assert_array_equal((part * 2).numpy(), values[key] * 2)
    del x
    np.testing.assert_array_equal(part.numpy(), values[key])  # it keeps the memory


@pytest.mark.parametrize("key", [(slice(None), 3), slice(None, None, -1), slice(0, 8, 2)], ids=str)
def test_items_that_lie_apart_are_copied(device: Device, key: Any) -> None:
    values, x = matrix(device)
    before = requests(device)
    part = x[key].realize()
    assert requests(device) > before
    np.testing.assert_array_equal(part.numpy(), values[key])


def test_parts_of_parts_and_of_sums(device: Device) -> None:
    values, x = matrix(device)
    rows = (x + x)[16:32].realize()
    np.testing.assert_array_equal(rows[4:8][1].realize().numpy(), 2 * values[21])


def test_an_update_in_place_does_not_change_a_part(device: Device) -> None:
    values, x = matrix(device)

    @ps.jit
    def double() -> None:
        x[:] = x * 2

    for step in range(3):
        row = x[3].realize()
        double()
        np.testing.assert_array_equal(row.numpy(), values[3] * 2**step)
    np.testing.assert_array_equal(x.numpy(), values * 8)


def test_a_parameter_stays_with_the_others(device: Device) -> None:
    """An optimizer has gathered them in one allocation; a part of one is copied."""
    first, second = (matrix(device)[1].requires_grad_() for _ in range(2))
    optimizer = optim.SGD([first, second], lr=0.1, momentum=0.9)

    @ps.jit
    def step() -> None:
        ps.sum(first * second).backward()
        optimizer.step()

    for _ in range(3):
        step()
    whole = first._node.value.whole
    if whole is first._node.value:
        return  # of its own on this device
    row = first.detach()[3].realize()
    step()
    assert first._node.value.whole is whole
    assert not np.array_equal(row.numpy(), first.numpy()[3])


def test_under_a_limit_a_part_keeps_only_its_own_bytes(device: Device) -> None:
    values, x = matrix(device, 1024)
    x.device.limit_bytes = "64 MiB"
    try:
        row = x[3].realize()
        assert row._node.value.whole.nbytes == values[3].nbytes
    finally:
        x.device.limit_bytes = None
    np.testing.assert_array_equal(row.numpy(), values[3])


def test_kernels_do_not_depend_on_where_a_batch_lies(device: Device) -> None:
    """Horizontally fused kernels are compiled for an arrangement of buffers in allocations."""
    _, data = matrix(device)
    other, schedule = device.empty(1024), SimpleNamespace(outputs=range(2, 2), results=())
    state = RunBuffers(cast(Schedule, schedule), fused=[0, 1])
    arrangements = {state.arrange([data[at : at + 8].realize()._node.value, other]) for at in (0, 8, 48)}
    assert len(arrangements) == 1
    whole = data._node.value
    together = state.arrange([whole.part(0, 256), whole.part(1024, 256)])
    assert together not in arrangements
