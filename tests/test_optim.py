"""Optimizers: their trajectories are PyTorch's, stored by tests/data/make_reference.py."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS

import penstock as ps
from penstock import Device, optim
from penstock.tensor import backward

REFERENCE = np.load(Path(__file__).parent / "data" / "reference.npz")
OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))
STEPS = 12
ROWS = 64  # of predictions


@pytest.fixture(scope="module", params=[OPENCL, "host-late", *CUDA_KINDS, *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


class Training:
    """The problem of the reference: two parameters, and a batch for every step."""

    def __init__(
        self,
        make: Callable[[ps.Tensor, ps.Tensor], optim.Optimizer],
        device: Device | None = None,
        dtype: Any = ps.float32,
        wrap: Callable[[Any], Any] = ps.jit,
    ) -> None:
        self.device = device or ps.default_device()
        self.dtype = dtype
        self.weight, self.bias = (
            ps.asarray(REFERENCE[f"optim.{name}"], device=self.device, dtype=dtype).requires_grad_()
            for name in ("weight", "bias")
        )
        self.optimizer = make(self.weight, self.bias)
        self.captures = 0
        self._step = wrap(self._one)

    def _one(self, x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        self.captures += 1
        loss = self.loss(x, y)
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss

    def loss(self, x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        difference = ps.tanh(x @ self.weight.T + self.bias) - y
        return ps.mean(difference.astype(ps.float32) ** 2) * 4

    def batch(self, number: int) -> tuple[ps.Tensor, ps.Tensor]:
        arrays = (REFERENCE[f"optim.{name}"][number] for name in "xy")
        return tuple(ps.asarray(array, device=self.device, dtype=self.dtype) for array in arrays)  # type: ignore

    def step(self, number: int) -> None:
        self._step(*self.batch(number))

    def parameters(self) -> np.ndarray:
        both = [tensor.numpy().astype(np.float32).reshape(-1) for tensor in (self.weight, self.bias)]
        return np.concatenate(both)

    def run(self, steps: range = range(STEPS), schedule: optim.Schedule | None = None) -> np.ndarray:
        rows = []
        for number in steps:
            if schedule is not None:
                self.optimizer.lr = schedule(number)
            self.step(number)
            rows.append(self.parameters())
        return np.stack(rows)


OPTIMIZERS: dict[str, Callable[[ps.Tensor, ps.Tensor], optim.Optimizer]] = {
    "sgd": lambda w, b: optim.SGD([w, b], lr=0.1),
    "sgd_decay": lambda w, b: optim.SGD([w, b], lr=0.1, weight_decay=0.1),
    "momentum": lambda w, b: optim.SGD([w, b], lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda w, b: optim.Adam([w, b], lr=0.02),
    "adam_decay": lambda w, b: optim.Adam([w, b], lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1),
    "adamw": lambda w, b: optim.AdamW([w, b], lr=0.02, betas=(0.9, 0.95), weight_decay=0.3),
    "groups": lambda w, b: optim.AdamW(
        [{"params": [w], "weight_decay": 0.5}, {"params": [b]}], lr=0.02, weight_decay=0.0
    ),
    "clip": lambda w, b: optim.SGD([w, b], lr=0.1, clip_norm=2.0),
    "schedule": lambda w, b: optim.AdamW([w, b], lr=0.05, weight_decay=0.2),
}
SCHEDULES = {"schedule": optim.cosine(0.05, steps=10, warmup=3, least=0.01)}
PAST_THE_END = {"schedule": 10}  # PyTorch's cosine goes up again after its end


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectories_are_pytorchs(name: str, device: Device) -> None:
    steps = PAST_THE_END.get(name, STEPS)
    training = Training(OPTIMIZERS[name], device)
    result = training.run(range(steps), SCHEDULES.get(name))
    np.testing.assert_allclose(result, REFERENCE[f"optim.{name}"][:steps], rtol=1e-5, atol=2e-6)
    assert training.captures == 1
    assert training.weight.grad is None
    assert training.weight.requires_grad


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_are_the_same_without_jit(name: str) -> None:
    steps = PAST_THE_END.get(name, STEPS)
    result = Training(OPTIMIZERS[name], wrap=lambda step: step).run(range(steps), SCHEDULES.get(name))
    np.testing.assert_allclose(result, REFERENCE[f"optim.{name}"][:steps], rtol=1e-5, atol=2e-6)


# Rates


@pytest.mark.parametrize("scaled", [False, True])
def test_steps_without_jit_leave_nothing_pending(scaled: bool) -> None:
    """Otherwise each step would be recomputed with the next, and keep its whole history alive."""
    dtype = ps.float16 if scaled else ps.float32
    w = ps.asarray(np.ones((4, 3), np.float32)).astype(dtype).realize().requires_grad_()
    optimizer = optim.AdamW([w], lr=0.1)
    for number in range(3):
        loss = (w * (number + 1)).sum()
        other = (w * w).sum()  # its gradient is not needed
        if scaled:
            optimizer.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        pending = [
            name for state in optimizer._named() for name, value in state.items() if value._node.value is None
        ]
        assert not pending
        assert w._node.value is not None
        assert loss._node.value is not None
        assert other._node.value is None


def test_schedules_are_pytorchs() -> None:
    cosine = optim.cosine(0.05, steps=10, warmup=3, least=0.01)
    np.testing.assert_allclose([cosine(k) for k in range(11)], REFERENCE["optim.rates"], rtol=1e-6)
    assert cosine(500) == pytest.approx(0.01), "after its end it stays where it is"
    constant = optim.constant(0.4, warmup=3)
    assert [constant(k) for k in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert optim.constant(0.4)(0) == 0.4
    assert optim.cosine(1.0, steps=4)(0) == 1.0
    with pytest.raises(ValueError, match="a warm-up of 5 does not fit into 4 steps"):
        optim.cosine(1.0, steps=4, warmup=5)


def test_another_rate_captures_nothing_anew() -> None:
    training = Training(OPTIMIZERS["sgd"])
    before = training.parameters()
    training.step(0)
    first = training.parameters() - before
    for rate in (0.05, 0.0, 0.1):
        training.optimizer.lr = rate
        assert training.optimizer.lr == rate
        now = training.parameters()
        training.step(0)
        assert (np.abs(training.parameters() - now).max() == 0) == (rate == 0)
    assert training.captures == 1
    assert np.abs(first).max() > 0


def test_gradients_add_up_until_the_step() -> None:
    whole, parts = (Training(OPTIMIZERS["sgd"], wrap=lambda step: step) for _ in range(2))
    x, y = whole.batch(0)
    whole.loss(x, y).backward()
    for half in (slice(0, 3), slice(3, 6)):
        (parts.loss(x[half], y[half]) * 0.5).backward()
    for training in (whole, parts):
        training.optimizer.step()
    np.testing.assert_allclose(whole.parameters(), parts.parameters(), rtol=1e-5)


def test_parameters_without_a_gradient_stay() -> None:
    training = Training(lambda w, b: optim.AdamW([w, b], lr=0.1, weight_decay=0.5))
    before = training.bias.tolist()
    ps.sum(training.weight * 2).backward()
    training.optimizer.step()
    assert training.bias.tolist() == before
    assert (training.weight.numpy() != REFERENCE["optim.weight"]).all()
    training.optimizer.step()  # without any gradient at all
    training.weight.grad = ps.ones((3, 4))
    training.optimizer.zero_grad()
    assert training.weight.grad is None


def test_the_norm_is_that_of_all_gradients_together() -> None:
    grads = [ps.asarray(np.array([3.0, 0.0], np.float32)), ps.asarray(np.array([[4.0]], np.float32))]
    assert optim.Optimizer.norm(grads).item() == 5


# Half precision


@pytest.mark.parametrize("dtype", [ps.float16, ps.bfloat16], ids=str)
def test_halves_have_float32_masters(dtype: Any) -> None:
    training = Training(OPTIMIZERS["adamw"], dtype=dtype)
    result = training.run()
    rounding = 2**-10 if dtype == ps.float16 else 2**-7
    np.testing.assert_allclose(result, REFERENCE["optim.adamw"], rtol=rounding, atol=0.03)
    assert training.weight.dtype == dtype
    state = training.optimizer.state_dict()
    assert state["master.0"].dtype == np.float32
    assert state["mean.0"].dtype == np.float32
    rounded = state["master.0"].astype(training.weight.numpy().dtype)
    np.testing.assert_array_equal(rounded, training.weight.numpy())
    assert ("scale" in state) == (dtype == ps.float16)
    assert training.captures == 1


@pytest.mark.parametrize("dtype", [ps.float16, ps.bfloat16], ids=str)
def test_masters_keep_what_is_too_small_for_a_half(dtype: Any) -> None:
    weight = ps.ones((4,), dtype=dtype).requires_grad_()
    optimizer = optim.SGD([weight], lr=2.0**-14)

    @ps.jit
    def step() -> None:
        optimizer.backward(ps.sum(weight * -1.0))
        optimizer.step()

    for _ in range(256):
        step()
    assert weight.astype(ps.float32).tolist() == [1 + 256 * 2.0**-14] * 4, (
        "each step alone would be rounded away"
    )


@pytest.mark.parametrize("wrap", [lambda step: step, ps.jit], ids=["plain", "jit"])
def test_an_overflow_halves_the_scale_and_changes_nothing_else(wrap: Callable[[Any], Any]) -> None:
    training = Training(OPTIMIZERS["adamw"], dtype=ps.float16, wrap=wrap)
    training.step(0)
    before, parameters = training.optimizer.state_dict(), training.parameters()
    assert before["scale"] == 2.0**15
    x, y = training.batch(1)
    y[0, 0] = math.inf
    training._step(x, y)
    after = training.optimizer.state_dict()
    assert after["scale"] == 2.0**14
    assert after["good_steps"] == 0
    np.testing.assert_array_equal(training.parameters(), parameters)
    for name in set(before) - {"scale", "good_steps"}:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    training.step(1)
    assert (training.parameters() != parameters).any(), "and the next step goes on"
    assert training.optimizer.state_dict()["good_steps"] == 1


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_the_scale_has_a_floor_and_the_next_good_step_is_sound(name: str) -> None:
    training = Training(OPTIMIZERS[name], dtype=ps.float16)
    training.step(0)
    parameters = training.parameters()
    x, y = training.batch(1)
    y[0, 0] = math.inf
    for _ in range(170):  # a scale without a floor is 0 after 165
        training._step(x, y)
    assert training.optimizer.state_dict()["scale"] == 1
    np.testing.assert_array_equal(training.parameters(), parameters)
    training.step(1)
    assert np.isfinite(training.parameters()).all()
    assert (training.parameters() != parameters).any()


def test_the_scale_grows_after_a_thousand_good_steps() -> None:
    training = Training(lambda w, b: optim.SGD([w, b], lr=0.0), dtype=ps.float16)
    state = training.optimizer.state_dict()
    state |= {"good_steps": np.float32(998), "scale": np.float32(64)}
    training.optimizer.load_state_dict(state)
    scales = []
    for _ in range(3):
        training.step(0)
        scales.append(float(training.optimizer.state_dict()["scale"]))
    assert scales == [64, 128, 128]


# Checkpoints


@pytest.mark.parametrize(
    ("name", "dtype"), [("momentum", ps.float32), ("adamw", ps.float32), ("adamw", ps.float16)], ids=str
)
def test_a_loaded_state_goes_on_bit_by_bit(name: str, dtype: Any) -> None:
    first, second = (Training(OPTIMIZERS[name], dtype=dtype) for _ in range(2))
    first.run(range(5))
    saved = first.optimizer.state_dict()
    with ps.no_grad():
        for new, old in ((second.weight, first.weight), (second.bias, first.bias)):
            new[...] = ps.asarray(old.numpy(), dtype=dtype)
    first.optimizer.lr = 0.5  # a state includes the present rate
    second.optimizer.load_state_dict(saved)
    first.optimizer.load_state_dict(saved)
    assert first.optimizer.lr == second.optimizer.lr
    np.testing.assert_array_equal(first.run(range(5, STEPS)), second.run(range(5, STEPS)))


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    adam = Training(OPTIMIZERS["adam"])
    adam.step(0)
    before = adam.optimizer.state_dict()
    other = Training(OPTIMIZERS["momentum"]).optimizer.state_dict()
    with pytest.raises(ValueError, match=r"the state of another optimizer: \['mean.0'"):
        adam.optimizer.load_state_dict(other)
    wrong = {name: np.ones(np.shape(array)) for name, array in before.items()}
    wrong["square.1"] = np.zeros(7)
    with pytest.raises(ValueError, match=r"square.1 has shape \(3,\), and \(7,\)"):
        adam.optimizer.load_state_dict(wrong)
    for name, array in adam.optimizer.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


# Errors


def test_what_cannot_be_optimized_is_named() -> None:
    weight = ps.ones((2,)).requires_grad_()
    with pytest.raises(ValueError, match="needs a parameter"):
        optim.SGD([])
    with pytest.raises(ValueError, match="given twice"):
        optim.SGD([weight, weight])
    with pytest.raises(ValueError, match="given twice"):
        optim.SGD([{"params": [weight]}, {"params": [weight]}])
    with pytest.raises(TypeError, match="tensors that require a gradient"):
        optim.SGD([ps.ones((2,))])
    with pytest.raises(TypeError, match="tensors that require a gradient"):
        optim.Adam([np.ones(2)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="lr is 0 or more"):
        optim.SGD([weight], lr=-1)
    with pytest.raises(ValueError, match="clip_norm above 0"):
        optim.SGD([weight], clip_norm=0)
    with pytest.raises(ValueError, match=r"betas are in \[0, 1\)"):
        optim.AdamW([weight], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"momentum is in \[0, 1\), and 1"):
        optim.SGD([weight], momentum=1)
    with pytest.raises(ValueError, match=r"settings are 0 or more, and \{'weight_decay': -0.5\}"):
        optim.AdamW([{"params": [weight], "weight_decay": -0.5}])
    with pytest.raises(ValueError, match=r"may have lr, momentum, .*; \['params', 'rate'\] were given"):
        optim.SGD([{"params": [weight], "rate": 0.5}])
    with pytest.raises(ValueError, match="has params"):
        optim.SGD([{"weight_decay": 0.5}])
    with pytest.raises(TypeError, match="a list of tensors, and a single tensor"):
        optim.SGD(weight)
    far = ps.ones((2,), device="host").requires_grad_()
    with pytest.raises(ValueError, match="on one device, and the parameters are on host and "):
        optim.SGD([weight, far])


@pytest.mark.usefixtures("given_rates")
def test_small_predictions_that_are_in_use_are_computed_with_the_step(device: Device) -> None:
    assert not kernels_of_predictions(device)


@pytest.mark.usefixtures("given_rates")
def test_others_are_computed_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_SMALL_BYTES", ROWS * 8 * 4 - 1)
    device = Device.over(DRIVERS[OPENCL]())
    assert kernels_of_predictions(device)
    device.close()


def kernels_of_predictions(device: Device) -> list[Any]:
    """What runs when predictions are read after a step, with the values of the old parameters."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 16), dtype=np.float32)
    weight = rng.standard_normal((16, 8), dtype=np.float32)
    parameter = ps.asarray(weight, device=device)
    parameter.requires_grad = True
    updates = optim.SGD([parameter], lr=0.1)
    given = ps.asarray(x, device=device)
    for _ in range(2):
        before = parameter.numpy()
        predictions = ps.tanh(given @ parameter)
        ps.mean(predictions * predictions).backward()
        updates.step()
        assert not np.array_equal(parameter.numpy(), before)
    with ps.profile(device=device) as profile:
        values = predictions.numpy()
    np.testing.assert_allclose(values, np.tanh(x @ before), rtol=1e-4, atol=1e-5)
    return profile.kernels()


def test_a_step_without_jit_writes_moments_over_the_old(device: Device) -> None:
    """So a step takes new memory for the parameters only, unless somebody refers to the old moments."""
    size = 512
    weight = ps.asarray(np.full((size, size), 0.5, np.float32), device=device)
    weight.requires_grad = True
    updates = optim.Adam([weight], lr=0.1)

    def step() -> int:
        """The bytes beyond those before the step, at their peak."""
        ps.sum(weight * weight).backward()
        gc.collect()  # what other tests left must not be freed in between
        device.sync()
        device.pool.reset_peak()
        held = device.memory_stats().live_bytes
        updates.step()
        return device.memory_stats().peak_bytes - held

    for _ in range(3):
        step()
    (moment, *_) = [tensor for tensor in updates._all() if tensor.shape == weight.shape][1:]
    before = moment.numpy()
    twice = moment * 2  # not computed yet: it refers to the old moment
    with_reference = step()
    np.testing.assert_array_equal(twice.numpy(), 2 * before)
    del twice
    assert step() == with_reference - weight.size * 4
