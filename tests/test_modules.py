"""Modules as people write them: parts in containers, cycles, new weights; Adam's counts of each parameter."""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import nn, optim


class Holder(nn.Module):
    """A module with given parts."""

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: ps.Tensor) -> ps.Tensor:
        for parameter in self.parameters():
            x = x * ps.sum(parameter)
        return x


def weight(*values: float) -> ps.Tensor:
    return ps.asarray(np.array(values, np.float32)).requires_grad_()


CONTAINERS: dict[str, tuple[Any, list[str]]] = {
    "list": (lambda part: [part(), part()], ["0", "1"]),
    "tuple": (lambda part: (part(), None, part()), ["0", "2"]),
    "dict": (lambda part: {"a": part(), "b": 3, 7: part()}, ["a", "7"]),
    "ordered dict": (lambda part: OrderedDict(z=part(), a=part()), ["z", "a"]),
    "dict of lists": (lambda part: {"a": [part(), (part(),)]}, ["a.0", "a.1.0"]),
    "list of dicts": (lambda part: [{"deep": {"er": [part()]}}], ["0.deep.er.0"]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_parts_are_found_in_containers_at_any_depth(name: str) -> None:
    make, paths = CONTAINERS[name]
    tensors = Holder(parts=make(lambda: weight(1.0, 2.0)))
    assert [path for path, _ in tensors.named_parameters()] == [f"parts.{path}" for path in paths]
    layers = Holder(parts=make(lambda: nn.Linear(2, 2, bias=False)))
    assert [path for path, _ in layers.named_parameters()] == [f"parts.{path}.weight" for path in paths]
    assert len(list(layers.modules())) == 1 + len(paths)
    assert not any(module.training for module in layers.eval().modules())


@pytest.mark.parametrize("name", CONTAINERS)
def test_parameters_in_containers_are_trained_saved_and_loaded(name: str) -> None:
    make, _ = CONTAINERS[name]
    model = Holder(parts=make(lambda: weight(0.5, 1.5)))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = model.state_dict()
    ps.sum(model(ps.ones((1,)))).backward()
    optimizer.step()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(not np.array_equal(after[key], before[key]) for key in before)
    model.load_state_dict(before)
    assert all(np.array_equal(model.state_dict()[key], before[key]) for key in before)


@pytest.mark.parametrize("kind", [set, frozenset, deque, lambda parts: dict.fromkeys(parts).keys()])
def test_containers_without_names_for_their_parts_are_refused(kind: Any) -> None:
    for part in (weight(1.0), nn.Linear(1, 1)):
        model = Holder(parts=kind([part]))
        for use in (model.parameters, model.state_dict, model.eval, lambda m=model: m(ps.ones((1,)))):
            with pytest.raises(
                TypeError, match=r"parts is a \w+, whose items have no names; use a list or a dict"
            ):
                use()
    assert Holder(words=kind(["a", "b"])).parameters() == []


def test_names_that_meet_are_refused() -> None:
    model = Holder(parts={1: weight(1.0), "1": weight(2.0)})
    with pytest.raises(ValueError, match=r"two tensors of Holder have the name 'parts\.1'"):
        model.state_dict()


def test_modules_and_containers_that_hold_themselves() -> None:
    model = Holder(first=weight(1.0))
    model.me = model
    model.child = Holder(weight=weight(2.0), parent=model)
    loop: list[Any] = [weight(3.0)]
    loop.append(loop)
    table: dict[str, Any] = {"loop": loop}
    table["table"] = table
    model.table = table
    assert list(model.state_dict()) == ["first", "child.weight", "table.loop.0"]
    assert list(model.modules()) == [model, model.child]
    assert model.child.parameters()[0] is model.child.weight
    assert model.eval() is model
    assert not model.child.training
    assert model(ps.ones((1,))).item() == 6
    model.load_state_dict({name: array * 2 for name, array in model.state_dict().items()})
    assert model(ps.ones((1,))).item() == 48


def test_a_shared_part_has_its_first_name() -> None:
    shared = nn.Linear(2, 2, bias=False)
    model = Holder(a=shared, b=[shared, shared.weight])
    assert list(model.state_dict()) == ["a.weight"]
    assert len(list(model.modules())) == 2


class Counting(nn.Module):
    """Layers, and a parameter of the module itself, with random values."""

    def __init__(self) -> None:
        self.layers = {"a": nn.Linear(3, 3), "b": [nn.Embedding(4, 3), nn.LayerNorm(3)]}
        self.own = ps.random.normal((3,)).requires_grad_()

    def forward(self, ids: ps.Tensor) -> ps.Tensor:
        embedding, norm = self.layers["b"]  # type: ignore[misc]
        result: ps.Tensor = norm(self.layers["a"](embedding(ids))) * self.own  # type: ignore[operator]
        return result


def test_fresh_weights_are_computed_once() -> None:
    model = Counting()
    assert all(tensor._node.value is None for tensor in (model.own, model.layers["a"].weight))  # type: ignore
    ids = ps.asarray([0, 3])
    first = model(ids).numpy()
    values = {id(tensor): tensor._node.value for tensor in model.parameters()}
    assert None not in values.values()
    assert np.array_equal(model(ids).numpy(), first)
    assert all(tensor._node.value is values[id(tensor)] for tensor in model.parameters())
    model.own = ps.random.normal((3,)).requires_grad_()  # a fresh one in a model that was used
    model(ids)
    assert model.own._node.value is not None


def test_fresh_weights_are_the_same_inside_jit_and_outside() -> None:
    ids = ps.asarray([0, 3])
    ps.random.manual_seed(5)
    inside = ps.jit(Counting())
    result = inside(ids).numpy()
    ps.random.manual_seed(5)
    np.testing.assert_allclose(Counting()(ids).numpy(), result, rtol=1e-5, atol=1e-6)


# Adam counts the gradients of each parameter


def adam_by_numpy(gradients: list[float | None], lr: float = 0.1) -> list[float]:
    """A parameter that begins at 1, by the formulas of the paper, in float64."""
    value, mean, square, count, trajectory = 1.0, 0.0, 0.0, 0, []
    for gradient in gradients:
        if gradient is not None:
            count += 1
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            corrected = square / (1 - 0.999**count)
            value -= lr * mean / (1 - 0.9**count) / (corrected**0.5 + 1e-8)
        trajectory.append(value)
    return trajectory


SLOPES = {"a": 0.5, "b": -2.0, "c": 0.125}
# Which parameters have a gradient in each step: some begin late, some pause.
STEPS = ["a", "a", "ab", "ab", "b", "abc", "ab", "abc", "c", "a", "abc", "abc"]


class Sparse:
    """Three parameters, of which each step uses some."""

    def __init__(self, jitted: bool) -> None:
        self.parameters = {name: weight(1.0) for name in SLOPES}
        self.optimizer = optim.Adam(self.parameters.values(), lr=0.1)
        self.step = ps.jit(self._step) if jitted else self._step

    def _step(self, names: str) -> ps.Tensor:
        loss = ps.asarray(0.0)
        for name in names:
            loss = loss + ps.sum(self.parameters[name] * SLOPES[name])
        loss.backward()
        self.optimizer.step()
        return loss

    def values(self) -> list[float]:
        return [tensor.item() for tensor in self.parameters.values()]


EXPECTED = np.transpose(
    [adam_by_numpy([slope if name in step else None for step in STEPS]) for name, slope in SLOPES.items()]
)


@pytest.mark.parametrize("jitted", [False, True])
def test_adam_counts_the_steps_of_each_parameter(jitted: bool) -> None:
    training = Sparse(jitted)
    result = []
    for names in STEPS:
        training.step(names)
        result.append(training.values())
    np.testing.assert_allclose(result, EXPECTED, atol=1e-4)


@pytest.mark.parametrize("jitted", [False, True])
def test_adam_goes_on_bit_by_bit_from_every_step(jitted: bool) -> None:
    whole = Sparse(jitted)
    states, result = [], []
    for names in STEPS:
        states.append((whole.values(), whole.optimizer.state_dict()))
        whole.step(names)
        result.append(whole.values())
    for start in (1, 4, 9):
        values, state = states[start]
        again = Sparse(jitted)
        with ps.no_grad():
            for tensor, value in zip(again.parameters.values(), values, strict=True):
                tensor[...] = value
        again.optimizer.load_state_dict(state)
        for step, names in enumerate(STEPS[start:], start):
            again.step(names)
            assert again.values() == result[step]


def test_a_state_with_one_count_for_all_parameters_is_taken() -> None:
    """As in older checkpoints, with a count for all parameters."""
    first, second = Sparse(False), Sparse(False)
    first.step("abc")
    state = first.optimizer.state_dict()
    assert state["power1"].shape == (3,)
    with ps.no_grad():
        for tensor, value in zip(second.parameters.values(), first.values(), strict=True):
            tensor[...] = value
    second.optimizer.load_state_dict(state | {name: state[name][0] for name in ("power1", "power2")})
    for names in STEPS:
        first.step(names)
        second.step(names)
    assert first.values() == second.values()
    with pytest.raises(ValueError, match=r"power1 has one of the shapes .* and shape \(2,\) was given"):
        second.optimizer.load_state_dict(state | {"power1": np.ones(2, np.float32)})
    with pytest.raises(ValueError, match=r"power2 has one of the shapes .* and nothing was given"):
        second.optimizer.load_state_dict({name: array for name, array in state.items() if name != "power2"})


def test_two_steps_of_different_parameters_in_one_jitted_function_are_refused_by_name() -> None:
    training = Sparse(False)

    @ps.jit
    def both() -> ps.Tensor:
        training._step("abc")
        return training._step("a")

    with pytest.raises(ps.errors.CaptureError, match=r"call optimizer.step\(\) once outside of jit"):
        both()
    reference = Sparse(False)
    for names in ("abc", "a"):
        training._step(names)
        reference._step(names)
    both()
    for names in ("abc", "a"):
        reference._step(names)
    np.testing.assert_allclose(training.values(), reference.values(), rtol=1e-6)


# Generating does not change a model's mode


def dropping() -> nn.GPT:
    ps.random.manual_seed(4)
    return nn.GPT(vocab_size=9, context=6, width=8, layers=1, heads=2, dropout=0.5)


@pytest.mark.parametrize("training", [True, False])
def test_overlapping_generations_leave_the_mode_alone(training: bool) -> None:
    model = dropping().train(training)
    expected = model.generate([1, 2], 4, temperature=0).ids
    streams = [model.stream([1, 2], 4, temperature=0) for _ in range(2)]
    first, second = ((piece.id for piece in pieces) for pieces in streams)
    result = [[next(first)], [next(second)]]
    assert [module.training for module in model.modules()] == [training] * len(list(model.modules()))
    result[0] += first
    result[1] += second
    assert result == [expected, expected], "neither has dropout, whatever the mode"
    assert [module.training for module in model.modules()] == [training] * len(list(model.modules()))
    abandoned = model.stream([1, 2], 4)
    next(abandoned)
    assert model.training is training


def test_a_training_step_beside_a_generation_has_dropout() -> None:
    model, ids = dropping(), ps.asarray([[1, 2, 3]])
    generation = model.stream([1, 2], 4, temperature=0)
    next(generation)
    step = ps.jit(model.features)
    draws = [step(ids).numpy() for _ in range(2)]
    assert not np.array_equal(*draws)
    next(generation)
    assert not np.array_equal(step(ids).numpy(), draws[1])
    model.eval()
    assert np.array_equal(step(ids).numpy(), step(ids).numpy())
    model.train()
    assert not np.array_equal(step(ids).numpy(), step(ids).numpy())


def test_generations_in_threads_leave_the_mode_alone() -> None:
    model = dropping()
    expected = model.generate([1, 2], 3, temperature=0).ids
    with ThreadPoolExecutor(3) as pool:
        result = list(pool.map(lambda _: model.generate([1, 2], 3, temperature=0).ids, range(3)))
    assert result == [expected] * 3
    assert model.training
