"""Jitted functions whose results, arguments and tensors from outside are the same tensor, or share memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, WEBGPU_KINDS

import penstock as ps
from penstock import Device, Tensor

KINDS = ["host-late", "opencl-svm" if "opencl-svm" in DRIVERS else "opencl-device", *WEBGPU_KINDS]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param](), SMALL)
    yield made
    made.close()


def given(device: Device, *numbers: float) -> Tensor:
    return ps.asarray(np.array(numbers, np.float32), device=device)


@pytest.mark.parametrize("gradients", [False, True])
def test_an_argument_that_was_a_tensor_from_outside_need_not_be_at_the_next_call(
    device: Device, gradients: bool
) -> None:
    w, other = given(device, 1, 2, 3), given(device, 10, 20, 30)
    if gradients:
        w.requires_grad_()
        other.requires_grad_()
    add = ps.jit(lambda x: x + w)
    keep = ps.jit(lambda x, y: +w)
    for x in (w, other, w, other):
        assert add(x).tolist() == (x.numpy() + w.numpy()).tolist()
        assert keep(other, x).tolist() == [1, 2, 3]
    if gradients:
        ps.sum(keep(other, w) + keep(w, other)).backward()
        assert w.grad is not None
        assert w.grad.tolist() == [2, 2, 2]
        assert other.grad is None


def test_results_keep_what_is_written_over_later(device: Device) -> None:
    w, ones = given(device, 1, 2, 3), given(device, 1, 1, 1)

    @ps.jit
    def changed_and_given(x: Tensor) -> Tensor:
        w.__iadd__(x)
        return w

    passed = ps.jit(lambda x: (w, x, x + 1))
    change = ps.jit(lambda x: w.__iadd__(x) * 1)
    donate = ps.jit(donate=0)(lambda x: x * 100)
    kept = [changed_and_given(ones), changed_and_given(ones), *passed(w)[:2]]
    change(ones)
    changed_and_given(ones)
    kept += passed(w)[1:2]
    donate(w)
    expected = [[2, 3, 4], [3, 4, 5], [3, 4, 5], [3, 4, 5], [5, 6, 7]]
    assert [result.tolist() for result in kept] == expected


def test_a_gradient_for_a_value_that_its_tensor_no_longer_has_is_refused(device: Device) -> None:
    w = given(device, 1, 2, 3).requires_grad_()
    eager, jitted = ps.sum(w * w), ps.jit(lambda: ps.sum(w * w))()
    w.requires_grad_()  # as it is
    eager.backward()
    assert w.grad is not None
    assert w.grad.tolist() == [2, 4, 6]
    with ps.no_grad():
        w -= 1
    for value in (eager, jitted):
        with pytest.raises(ValueError, match=r"shape \(3,\) that requires a gradient was changed"):
            value.backward()
    assert w.grad.tolist() == [2, 4, 6]
    w.requires_grad_(False)
    eager.backward()  # which nobody asks for any more


def test_a_function_that_changes_a_leaf_is_refused_whatever_was_captured_before(device: Device) -> None:
    """A tensor that requires a gradient may be a leaf at one call, and a result at another."""
    w, x = given(device, 1, 2, 3), given(device, 1, 1, 1).requires_grad_()

    @ps.jit
    def change(y: Tensor) -> Tensor:
        w[...] = y * 2
        return y + 1

    change(x)  # w is a result, from here on
    change(x)
    assert w.requires_grad
    with ps.no_grad():
        w *= 1  # and now a leaf
    with pytest.raises(ValueError, match="requires a gradient cannot change"):
        change(x)
    assert w.tolist() == [2, 2, 2]


def test_a_donated_argument_that_is_a_result_as_it_is(device: Device) -> None:
    w, x = given(device, 0, 0, 0), given(device, 0.25, 0.5, 1)

    def change(a: Tensor) -> Tensor:
        w[...] = ps.tanh(a)
        return +a

    result = ps.jit(donate=0)(change)(x)
    assert result.tolist() == [0.25, 0.5, 1]
    np.testing.assert_allclose(w.numpy(), np.tanh([0.25, 0.5, 1]), rtol=1e-5)
