"""Optimizers by the formulas of their papers; groups; schedulers; the same bits jitted, not, and resumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS

import penstock as ps
from penstock import Device, optim
from penstock.errors import CaptureError

OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))
STEPS = 7


@pytest.fixture(scope="module", params=[OPENCL, "host-late", *CUDA_KINDS, *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


SHAPES = [(3, 4), (3,)]
FIRST = [random(*shape, seed=at) for at, shape in enumerate(SHAPES)]
SLOPES = [
    [random(*shape, seed=10 * step + at + 5) for at, shape in enumerate(SHAPES)] for step in range(STEPS)
]
RATES = (0.05, 0.02)  # of two groups


class Training:
    """Two parameters in two groups, with gradients that are given."""

    def __init__(
        self, make: Callable[..., optim.Optimizer], device: Any = "host", jitted: bool = False
    ) -> None:
        self.device = device
        self.weights = [ps.asarray(array, device=device).requires_grad_() for array in FIRST]
        groups = [{"params": [w], "lr": rate} for w, rate in zip(self.weights, RATES, strict=True)]
        self.optimizer = make(groups)
        self.step = ps.jit(self._step) if jitted else self._step

    def _step(self, *grads: ps.Tensor) -> None:
        (ps.sum(self.weights[0] * grads[0]) + ps.sum(self.weights[1] * grads[1])).backward()
        self.optimizer.step()

    def run(self, steps: range = range(STEPS)) -> list[list[np.ndarray]]:
        trajectory = []
        for number in steps:
            self.step(*(ps.asarray(grad, device=self.device) for grad in SLOPES[number]))
            trajectory.append([w.numpy() for w in self.weights])
        return trajectory


# A rule: (parameter, gradient, rate, state that it changes, number of the step) -> the next parameter


def moments(g: Any, s: dict[str, Any], betas: Any = (0.9, 0.999)) -> tuple[Any, Any]:
    s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
    s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g * g
    return s["m"], s["v"]


def dampened(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    g = g + 0.1 * p
    s["b"] = g if t == 1 else 0.9 * s["b"] + 0.7 * g
    return p - lr * s["b"]


def nesterov(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    s["b"] = 0.9 * s.get("b", 0) + g
    return p - lr * (g + 0.9 * s["b"])


def adamax(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    m, _ = moments(g, s)
    s["u"] = np.maximum(0.999 * s.get("u", 0), np.abs(g) + 1e-8)
    return p - lr / (1 - 0.9**t) * m / s["u"]


def amsgrad(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    m, v = moments(g, s, (0.9, 0.5))
    s["most"] = np.maximum(s.get("most", 0), v)
    return p * (1 - lr * 0.3) - lr * m / (1 - 0.9**t) / (np.sqrt(s["most"]) / math.sqrt(1 - 0.5**t) + 1e-8)


def nadam(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    m, v = moments(g, s)
    now, after = (0.9 * (1 - 0.5 * 0.96 ** (k * 0.004)) for k in (t, t + 1))
    s["mu"] = s.get("mu", 1) * now
    spread = np.sqrt(v / (1 - 0.999**t)) + 1e-8
    return p - lr * ((1 - now) / (1 - s["mu"]) * g + after / (1 - s["mu"] * after) * m) / spread


def radam(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    m, v = moments(g, s, (0.9, 0.9))
    most = 2 / (1 - 0.9) - 1
    length = most - 2 * t * 0.9**t / (1 - 0.9**t)
    if length <= 5:
        return p - lr * m / (1 - 0.9**t)
    ratio = math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
    return p - lr * m / (1 - 0.9**t) * ratio * math.sqrt(1 - 0.9**t) / (np.sqrt(v) + 1e-8)


def rmsprop(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    s["v"] = 0.9 * s.get("v", 0) + 0.1 * g * g
    s["a"] = 0.9 * s.get("a", 0) + 0.1 * g
    s["b"] = 0.5 * s.get("b", 0) + g / (np.sqrt(s["v"] - s["a"] ** 2) + 1e-8)
    return p - lr * s["b"]


def adagrad(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    s["sum"] = s.get("sum", 0.2) + g * g
    return p - lr / (1 + (t - 1) * 0.1) * g / (np.sqrt(s["sum"]) + 1e-10)


def adadelta(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    s["v"] = 0.9 * s.get("v", 0) + 0.1 * g * g
    step = np.sqrt(s.get("d", 0) + 1e-6) / np.sqrt(s["v"] + 1e-6) * g
    s["d"] = 0.9 * s.get("d", 0) + 0.1 * step * step
    return p - lr * step


def adafactor(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    share, square = t**-0.8, g * g
    if g.ndim == 2:
        rows, columns = square.mean(1, keepdims=True), square.mean(0, keepdims=True)
        s["r"] = s.get("r", 0) * (1 - share) + rows * share
        s["c"] = s.get("c", 0) * (1 - share) + columns * share
        estimate = s["r"] * s["c"] / s["r"].mean()
    else:
        s["r"] = s.get("r", 0) * (1 - share) + square * share
        estimate = s["r"]
    step = g / np.sqrt(estimate)
    size = min(lr, 1 / math.sqrt(t)) * max(math.sqrt((p * p).mean()), 1e-3)
    return p - size / max(1, math.sqrt((step * step).mean())) * step


def lion(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    m = s.get("m", 0)
    step = np.sign(0.9 * m + 0.1 * g)
    s["m"] = 0.99 * m + 0.01 * g
    return p * (1 - lr * 0.3) - lr * step


def lamb(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
    m, v = moments(g, s)
    step = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.01 * p
    return p - lr * math.sqrt((p * p).sum() / (step * step).sum()) * step


RULES: dict[str, tuple[Callable[..., optim.Optimizer], Callable[..., Any]]] = {
    "dampened": (lambda p: optim.SGD(p, momentum=0.9, dampening=0.3, weight_decay=0.1), dampened),
    "nesterov": (lambda p: optim.SGD(p, momentum=0.9, nesterov=True), nesterov),
    "adamax": (optim.Adamax, adamax),
    "amsgrad": (lambda p: optim.AdamW(p, betas=(0.9, 0.5), weight_decay=0.3, amsgrad=True), amsgrad),
    "nadam": (optim.NAdam, nadam),
    "radam": (lambda p: optim.RAdam(p, betas=(0.9, 0.9)), radam),
    "rmsprop": (lambda p: optim.RMSprop(p, alpha=0.9, momentum=0.5, centered=True), rmsprop),
    "adagrad": (lambda p: optim.Adagrad(p, lr_decay=0.1, initial_accumulator_value=0.2), adagrad),
    "adadelta": (optim.Adadelta, adadelta),
    "adafactor": (optim.Adafactor, adafactor),
    "lion": (lambda p: optim.Lion(p, weight_decay=0.3), lion),
    "lamb": (optim.LAMB, lamb),
}


def by_formula(rule: Callable[..., Any]) -> list[list[np.ndarray]]:
    values, states = [array.astype(np.float64) for array in FIRST], [{}, {}]
    trajectory = []
    for number, grads in enumerate(SLOPES, 1):
        values = [
            rule(p, g.astype(np.float64), rate, state, number)
            for p, g, rate, state in zip(values, grads, RATES, states, strict=True)
        ]
        trajectory.append(values)
    return trajectory


def close(result: Any, wanted: Any) -> None:
    for row, expected in zip(result, wanted, strict=True):
        for value, formula in zip(row, expected, strict=True):
            np.testing.assert_allclose(value, formula, rtol=3e-5, atol=1e-5)


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", RULES)
def test_trajectories_are_those_of_the_formulas(name: str, device: Device) -> None:
    make, rule = RULES[name]
    close(Training(make, device, jitted=True).run(), by_formula(rule))


@pytest.mark.parametrize("name", [*RULES, "muon"])
def test_bits_are_the_same_jitted_and_not_and_after_a_state(name: str) -> None:
    make = RULES[name][0] if name in RULES else lambda p: optim.Muon(p[:1])
    whole, jitted = Training(make).run(), Training(make, jitted=True).run()
    for row, other in zip(whole, jitted, strict=True):
        for a, b in zip(row, other, strict=True):
            np.testing.assert_array_equal(a, b)
    first, second = Training(make), Training(make, jitted=True)
    first.run(range(3))
    with ps.no_grad():
        for new, old in zip(second.weights, first.weights, strict=True):
            new[...] = ps.asarray(old.numpy(), device="host")
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    for row, other in zip(second.run(range(3, STEPS)), whole[3:], strict=True):
        for a, b in zip(row, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", ["dampened", "amsgrad", "adagrad", "adafactor"])
def test_a_group_that_is_added_begins_with_a_state_of_its_own(name: str, jitted: bool) -> None:
    make, rule = RULES[name]
    alone, both = Training(lambda groups: make(groups[:1]), jitted=jitted), 3
    alone.run(range(both))
    scheduler = optim.lr_scheduler.LambdaLR(alone.optimizer, lambda _: 1.0)
    group = alone.optimizer.param_groups[0]
    with ps.no_grad():
        alone.weights[1][...] = ps.asarray(FIRST[1], device="host")
    alone.weights[1].grad = None  # which nothing has let go of so far
    alone.optimizer.add_param_group({"params": alone.weights[1], "lr": RATES[1]})
    assert alone.optimizer.param_groups[0] is group
    assert len(alone.optimizer.param_groups) == 2
    result = alone.run(range(both, STEPS))
    whole = by_formula(rule)[both:]
    value, state = FIRST[1].astype(np.float64), {}
    for number, (row, expected) in enumerate(zip(result, whole, strict=True), 1):
        value = rule(value, SLOPES[both + number - 1][1].astype(np.float64), RATES[1], state, number)
        close([row], [[expected[0], value]])
    assert scheduler.get_last_lr() == [RATES[0], RATES[1]]
    with pytest.raises(ValueError, match="a scheduler for 1 groups, and there are 2; make another"):
        scheduler.step()
    again = alone.optimizer.state_dict()
    alone.optimizer.load_state_dict(again)


def test_a_group_that_is_added_has_the_settings_of_the_optimizer() -> None:
    first, second, third = (ps.zeros(3, device="host").requires_grad_() for _ in range(3))
    optimizer = optim.AdamW([first], lr=0.3, betas=(0.5, 0.6), weight_decay=0.25)
    optimizer.add_param_group({"params": [second], "weight_decay": 0.0})
    assert dict(optimizer.param_groups[1]) == {**dict(optimizer.param_groups[0])} | {
        "params": [second],
        "weight_decay": 0.0,
    }
    with pytest.raises(ValueError, match="a parameter was given twice"):
        optimizer.add_param_group({"params": [first]})
    with pytest.raises(ValueError, match=r"a group has params and may have lr.*'decay'"):
        optimizer.add_param_group({"params": [third], "decay": 1.0})
    with pytest.raises(CaptureError, match="inside a jitted function"):
        ps.jit(lambda: optimizer.add_param_group({"params": [third]}))()
    assert len(optimizer.param_groups) == 2


def test_groups_of_adagrad_may_begin_with_sums_of_their_own() -> None:
    first, second = (ps.ones(1, device="host").requires_grad_() for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "initial_accumulator_value": 3.0}]
    optimizer = optim.Adagrad(groups, lr=1.0)
    (first + second).sum().backward()
    optimizer.step()
    np.testing.assert_allclose([first.item(), second.item()], [0, 0.5], atol=1e-6)
    with pytest.raises(ValueError, match="settings are 0 or more"):
        optim.Adagrad([first], initial_accumulator_value=-1)


def test_muon_makes_steps_of_one_size_along_all_axes() -> None:
    weight = ps.zeros((6, 4), device="host").requires_grad_()
    optimizer = optim.Muon([weight], lr=1.0, weight_decay=0.0)
    grad = random(6, 4, seed=3) * np.array([10, 1, 1, 1], np.float32)
    ps.sum(weight * ps.asarray(grad, device="host")).backward()
    optimizer.step()
    left, _, right = np.linalg.svd(grad, full_matrices=False)
    sizes = np.diag(left.T @ -weight.numpy() @ right.T) / math.sqrt(6 / 4)
    assert (sizes > 0.6).all()
    assert (sizes < 1.3).all()
    with pytest.raises(ValueError, match=r"Muon is for matrices, and a parameter of shape \(2,\)"):
        optim.Muon([ps.zeros((2,)).requires_grad_()])


def test_groups_have_settings_of_their_own() -> None:
    def make(groups: Any) -> optim.Optimizer:
        groups[0] |= {"betas": (0.5, 0.9), "weight_decay": 0.5}
        return optim.AdamW(groups, eps=1e-3, weight_decay=0.0)

    training = Training(make, jitted=True)
    first, second = training.optimizer.param_groups
    assert (first["betas"], second["betas"]) == ((0.5, 0.9), (0.9, 0.999))
    assert (first["lr"], second["lr"]) == RATES
    assert list(first) == ["params", "lr", "weight_decay", "eps", "amsgrad", "betas"]
    result = training.run()

    def rule(betas: Any, decay: float) -> Any:
        def adamw(p: Any, g: Any, lr: float, s: dict[str, Any], t: int) -> Any:
            m, v = moments(g, s, betas)
            spread = np.sqrt(v / (1 - betas[1] ** t)) + 1e-3
            return p * (1 - lr * decay) - lr * m / (1 - betas[0] ** t) / spread

        return adamw

    expected = zip(by_formula(rule((0.5, 0.9), 0.5)), by_formula(rule((0.9, 0.999), 0.0)), strict=True)
    close(result, [[a[0], b[1]] for a, b in expected])
    with pytest.raises(KeyError, match="of which params are fixed; 'rate' was given"):
        first["rate"] = 1


def test_a_rate_of_a_group_captures_nothing_anew_and_another_setting_does() -> None:
    weight = ps.ones((2,), device="host").requires_grad_()
    optimizer = optim.SGD([weight], lr=0.5)
    captures = []

    @ps.jit
    def step() -> None:
        captures.append(None)
        ps.sum(weight).backward()
        optimizer.step()

    step()
    optimizer.param_groups[0]["lr"] = 0.25
    step()
    assert weight.tolist() == [0.25, 0.25]
    assert len(captures) == 1
    optimizer.param_groups[0]["weight_decay"] = 1.0
    step()
    assert weight.tolist() == [0.25 - 0.25 * 1.25] * 2
    assert len(captures) == 2


def test_frozen_parameters_stay() -> None:
    layer = ps.nn.Linear(2, 2, device="host")
    layer.weight.requires_grad_(False)
    before = layer.weight.tolist()
    optimizer = optim.Adam(layer.parameters(), lr=0.1)
    ps.sum(layer(ps.ones((1, 2), device="host"))).backward()
    optimizer.step()
    assert layer.weight.tolist() == before
    layer.requires_grad_()
    ps.sum(layer(ps.ones((1, 2), device="host"))).backward()
    optimizer.step()
    assert layer.weight.tolist() != before


# Schedulers

Make = Callable[[optim.Optimizer], Any]
SCHEDULERS: dict[str, tuple[Make, Callable[[int], float]]] = {
    "step": (lambda o: optim.lr_scheduler.StepLR(o, 3, 0.5), lambda t: 0.5 ** (t // 3)),
    "multi": (
        lambda o: optim.lr_scheduler.MultiStepLR(o, [2, 5, 5], 0.5),
        lambda t: 0.5 ** sum(t >= mark for mark in (2, 5, 5)),
    ),
    "exponential": (lambda o: optim.lr_scheduler.ExponentialLR(o, 0.9), lambda t: 0.9**t),
    "constant": (lambda o: optim.lr_scheduler.ConstantLR(o, 0.25, 4), lambda t: 0.25 if t < 4 else 1),
    "linear": (
        lambda o: optim.lr_scheduler.LinearLR(o, 0.5, 1.0, 4),
        lambda t: 0.5 + 0.5 * min(t, 4) / 4,
    ),
    "polynomial": (
        lambda o: optim.lr_scheduler.PolynomialLR(o, 8, 2.0),
        lambda t: (1 - min(t, 8) / 8) ** 2,
    ),
    "cosine": (
        lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 6),
        lambda t: (1 + math.cos(math.pi * t / 6)) / 2,
    ),
    "restarts": (
        lambda o: optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
        lambda t: (1 + math.cos(math.pi * (t / 3 if t < 3 else (t - 3) / 6 if t < 9 else (t - 9) / 12))) / 2,
    ),
    "lambda": (lambda o: optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)), lambda t: 1 / (t + 1)),
    "multiplicative": (lambda o: optim.lr_scheduler.MultiplicativeLR(o, lambda t: 0.9), lambda t: 0.9**t),
    "sequential": (
        lambda o: optim.lr_scheduler.SequentialLR(
            o, [optim.lr_scheduler.LinearLR(o, 0.5, 1.0, 4), optim.lr_scheduler.ExponentialLR(o, 0.5)], [4]
        ),
        lambda t: 0.5 + 0.5 * t / 4 if t < 4 else 0.5 ** (t - 4),
    ),
    "chained": (
        lambda o: optim.lr_scheduler.ChainedScheduler(
            [optim.lr_scheduler.ConstantLR(o, 0.25, 4), optim.lr_scheduler.ExponentialLR(o, 0.5)]
        ),
        lambda t: (0.25 if t < 4 else 1) * 0.5**t,
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_follow_their_schedule_and_go_on_from_a_state(name: str) -> None:
    make, factor = SCHEDULERS[name]
    optimizers = [Training(lambda p: optim.SGD(p)).optimizer for _ in range(2)]
    scheduler, again = (make(optimizer) for optimizer in optimizers)
    for epoch in range(12):
        wanted = [rate * factor(epoch) for rate in RATES]
        assert scheduler.get_last_lr() == pytest.approx(wanted, rel=1e-12, abs=1e-15)
        again.load_state_dict(scheduler.state_dict())
        assert [group["lr"] for group in optimizers[1].param_groups] == scheduler.get_last_lr()
        scheduler.step()


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_one_cycle_of_rate_and_momentum(kind: str) -> None:
    weight = ps.ones((2,), device="host").requires_grad_()
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(optim, kind)([weight], lr=0.1, **settings)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=11, anneal_strategy="linear")
    captures = []

    @ps.jit
    def step() -> None:
        captures.append(None)
        ps.sum(weight * weight).backward()
        optimizer.step()

    rates, momenta = [], []
    for number in range(11):
        group = optimizer.param_groups[0]
        rates.append(group["lr"])
        momenta.append(group["momentum"] if kind == "SGD" else group["betas"][0])
        step()
        if number < 10:
            scheduler.step()
    up = 0.3 * 11 - 1
    assert rates[0] == pytest.approx(0.5 / 25)
    assert rates[2] == pytest.approx(0.02 + 0.48 * 2 / up)
    assert rates[-1] == pytest.approx(0.5 / 25e4)
    assert momenta[0] == momenta[-1] == pytest.approx(0.95)
    assert min(momenta) == pytest.approx(0.85, abs=0.02)
    assert len(captures) == 1
    assert weight.numpy()[0] < 1
    with pytest.raises(ValueError, match="for 11 steps, and more were taken"):
        scheduler.step()


def test_a_cycled_beta_corrects_the_bias_as_if_it_had_always_been() -> None:
    weight = ps.ones((2,), device="host").requires_grad_()
    optimizer = optim.Adam([weight], lr=0.1, betas=(0.9, 0.99))
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
    value, mean, square = 1.0, 0.0, 0.0
    for number in range(1, 13):
        rate, (first, second) = optimizer.lr, optimizer.param_groups[0]["betas"]
        mean, square = first * mean + (1 - first) * value, second * square + (1 - second) * value**2
        ((weight * weight).sum() * 0.5).backward()
        optimizer.step()
        size = rate / (1 - first**number)
        value -= size * mean / (math.sqrt(square / (1 - second**number)) + 1e-8)
        assert weight.tolist() == pytest.approx([value] * 2, rel=1e-5)
        if number < 12:
            scheduler.step()


def test_a_sequence_may_go_on_from_the_rate_before() -> None:
    optimizer = optim.SGD([ps.ones((2,), device="host").requires_grad_()], lr=1.0)
    parts = [
        optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.1),
        optim.lr_scheduler.StepLR(optimizer, 1, 0.25),
    ]
    scheduler = optim.lr_scheduler.SequentialLR(optimizer, parts, [2, 4])
    rates = []
    for _ in range(6):
        rates.append(optimizer.lr)
        scheduler.step()
    assert rates == pytest.approx([1, 0.5, 0.05, 0.005, 1, 0.25])


@pytest.mark.parametrize(
    ("mode", "threshold", "metrics", "kept"),
    [
        ("min", "rel", (-1.0, -0.95), True),  # PyTorch's share of a negative metric
        ("min", "rel", (-1.0, -0.85), False),
        ("max", "abs", (-1.0, -0.95), False),
        ("max", "abs", (-1.0, -0.85), True),
        ("max", "rel", (math.inf, 2.0), False),
        ("min", "abs", (-math.inf, -9.0), False),
        ("min", "abs", (math.nan, math.nan), False),
    ],
)
def test_what_a_plateau_is(mode: str, threshold: str, metrics: tuple[float, float], kept: bool) -> None:
    weights = [ps.ones((2,), device="host").requires_grad_() for _ in range(2)]
    optimizer = optim.SGD([{"params": [weight]} for weight in weights], lr=1.0)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, 0.0, 0, 0.1, threshold, min_lr=[0.5, 0.25]
    )
    scheduler.step(0.0 if math.isnan(metrics[0]) else metrics[0])
    scheduler.step(metrics[1])
    assert scheduler.get_last_lr() == ([1, 1] if kept else [0.5, 0.25])


def test_a_plateau_lowers_the_rate() -> None:
    optimizer = optim.SGD([ps.ones((2,), device="host").requires_grad_()], lr=1.0)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, cooldown=1)
    seen = []
    for loss in (5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 1.0, 1.0):
        scheduler.step(loss)
        seen.append(optimizer.lr)
    assert seen == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    again = optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    again.load_state_dict(scheduler.state_dict())
    assert again.state_dict() == scheduler.state_dict()


def test_what_schedulers_refuse() -> None:
    optimizer = optim.SGD([ps.ones((2,), device="host").requires_grad_()], lr=1.0)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ps.errors.CaptureError, match="between the calls of a jitted function"):
        ps.jit(lambda x: (scheduler.step(), x)[1])(ps.ones((1,), device="host"))
    with pytest.raises(ValueError, match="cycle_momentum is for optimizers with momentum or betas"):
        optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    with pytest.raises(TypeError, match="for an optimizer, and float was given"):
        optim.lr_scheduler.ExponentialLR(0.1, 0.5)  # type: ignore[arg-type]
    for make, message in (
        (lambda: optim.lr_scheduler.StepLR(optimizer, 0), "step_size is 1 or more, and 0"),
        (lambda: optim.lr_scheduler.LinearLR(optimizer, total_iters=0), "total_iters is 1 or more, and 0"),
        (lambda: optim.lr_scheduler.PolynomialLR(optimizer, 0), "total_iters is 1 or more, and 0"),
        (lambda: optim.lr_scheduler.CosineAnnealingLR(optimizer, 0), "T_max is 1 or more, and 0"),
        (lambda: optim.lr_scheduler.ConstantLR(optimizer, 2.0), "factor is from 0 to 1, and 2"),
        (
            lambda: optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=[0.1, 0.2]),
            "1 groups need as many min_lr, and 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(ValueError, match="nesterov needs a momentum, and no dampening"):
        optim.SGD([ps.ones((2,)).requires_grad_()], nesterov=True)
