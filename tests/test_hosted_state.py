"""State at the host between steps: models larger than the budget train, with the same bits."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, SMALL, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_budget import Counted, steps, trained
from test_offload import LINKS, Steps, offloading, pinned_sizes
from test_schedule import TARGETS

import penstock as ps
from penstock import Device, nn, optim
from penstock.compiler.pipeline import compile_graph, prepare
from penstock.compiler.schedule import Copy, Schedule
from penstock.compiler.simulate import simulate
from penstock.compiler.target import Budget, Target
from penstock.errors import DeviceError, OutOfDeviceMemory
from penstock.execution.structure import Structure
from penstock.plan.prefetching import prefetched
from penstock.plan.recomputing import sequels
from penstock.plan.sequences import HOLD, IN, OUT, Link, Sequel, State, Task

# Sequences as pure functions


@st.composite
def steps_with_state(draw: st.DrawFn) -> tuple[Steps, State, frozenset[int]]:
    """Random steps, in which some of the given values have a next value, and others are only read.

    Some results are state, too, that no given value was before.
    """
    tasks, nbytes, kept = draw(steps())
    last = {value: at for at, task in enumerate(tasks) for value in task.reads}
    results = [value for value in kept if value > 1]
    state: dict[int, int | None] = {}
    for value in sorted({0, 1} & last.keys()):
        free = [new for new in results if new not in state.values() and nbytes[new] == nbytes[value]]
        state[value] = draw(st.sampled_from([None, *free]))
    others = [value for value in results if value not in state.values()]
    new = draw(st.frozensets(st.sampled_from(others))) if others else frozenset()
    return (tasks, nbytes, kept), state, new


def check_sequel(sequel: Sequel, case: Steps, state: State, new: frozenset[int]) -> int:
    """Whether all is where it is read; the most that is live, counted one by tensor, and state that stays."""
    tasks, nbytes, kept = case
    results = {result for value in sequel.hosted if (result := state[value]) is not None}
    results |= sequel.results & new
    assert results == sequel.results
    here = {0, 1} - sequel.hosted
    there = set(sequel.hosted)
    numbers = {
        number
        for run in sequel.runs
        for number in (run.writes if run.task != OUT else ())
        if sequel.value_of[number] != number or number not in kept or number in results
    }
    born, last = {}, {}
    for at, run in enumerate(sequel.runs):
        source, target = (there, here) if run.task == IN else (here, there if run.task == OUT else here)
        assert source.issuperset(run.reads)
        target.update(run.writes)
        last.update(dict.fromkeys((*run.reads, *run.writes), at))
        born.update(dict.fromkeys(run.writes, at))
    for value in results:  # the host has them in the end
        assert any(run.task == OUT and sequel.value_of[run.reads[0]] == value for run in sequel.runs)
    size = [nbytes[value] for value in sequel.value_of]
    most = 0
    for at, run in enumerate(sequel.runs):
        task = tasks[run.task] if run.task >= 0 else Task((), ())
        live = {number for number in numbers if born[number] <= at <= last[number]}
        saved, taken = 0, set[int]()
        for number, over in zip(run.writes, task.over, strict=False):
            dying = [run.reads[k] for k in over if run.reads[k] in numbers and last[run.reads[k]] == at]
            free = [k for k in dying if size[k] >= size[number] and k not in taken]
            if number in numbers and free:
                taken.add(free[0])
                saved += size[number]
        most = max(most, sum(size[number] for number in live) + task.scratch - saved)
    stays = (state.keys() - sequel.hosted) | (new - sequel.results)
    return most + sum(nbytes[value] for value in stays)


@given(steps_with_state(), LINKS)
def test_sequences_with_state_at_the_host_take_less_and_less_memory(
    case: tuple[Steps, State, frozenset[int]], link: Link
) -> None:
    (tasks, nbytes, kept), state, new = case
    tasks = [task._replace(price=None) for task in tasks]  # nothing is computed again
    found = list(sequels(tasks, range(len(tasks)), nbytes, kept, link, state, new))
    assert not found[0].hosted
    assert not found[0].results
    for sequel in found:
        assert check_sequel(sequel, (tasks, nbytes, kept), state, new) == sequel.peak_bytes
        early = prefetched(sequel, tasks, nbytes, link)
        without = [run for run in early.runs if run.task not in (IN, HOLD)]
        assert without == [run for run in sequel.runs if run.task != IN]
        assert check_sequel(early, (tasks, nbytes, kept), state, new) <= sequel.peak_bytes
    peaks = [sequel.peak_bytes for sequel in found]
    assert peaks == sorted(set(peaks), reverse=True)


def test_what_is_used_once_goes_before_what_is_used_often() -> None:
    """0 is a parameter, which three steps read; 1 is a moment, which only the last tensor reads."""
    update = Task((0, 1, 4), (5, 6), over=((0,), (1,)))
    tasks = [Task((0,), (2,)), Task((0, 2), (3,)), Task((3,), (4,)), update]
    nbytes = [8, 8, 1, 10, 1, 8, 8]
    found = list(sequels(tasks, range(4), nbytes, frozenset({0, 1, 5, 6}), Link(0.1, 0.1), {0: 5, 1: 6}))
    assert next(sequel.hosted for sequel in found if sequel.hosted) == {1}


# The pass on graphs


@pytest.mark.parametrize("target", TARGETS)
def test_a_schedule_with_state_at_the_host_computes_the_same(target: str) -> None:
    wanted, _ = trained(6, 24, 8)  # so few rows that the weights are most of it
    structure = Structure(wanted, checked=False)
    nodes, inputs = prepare(wanted, structure.inputs)
    new = {node.inputs[0]: at for at, node in enumerate(wanted) if at}  # the weights, after the loss
    aliases = {new[node]: at for at, node in enumerate(structure.inputs) if node in new}
    size = wanted[1].nbytes

    def within(limit: int) -> Schedule:
        budget = Budget(
            limit, len(aliases) * size, 1, frozenset(aliases.values()), lambda hosted: len(hosted) * size
        )
        target_ = Target.of(TARGETS[target], budget, 1.0)
        return compile_graph(nodes, inputs, structure.numbers, target_, aliases)

    arrays = [node.value for node in structure.inputs]
    free = within(1 << 30)
    expected = [array.tobytes() for array in simulate(free, arrays, structure.constants(), aliases)]
    with pytest.raises(OutOfDeviceMemory, match="kept between steps") as refused:
        within(1)
    least = refused.value.smallest
    assert least is not None
    assert least < len(aliases) * size
    for limit in (least, (least + len(aliases) * size) // 2, len(aliases) * size):
        schedule = within(limit)
        hosted = schedule.hosted
        assert hosted
        assert hosted <= set(aliases.values())
        assert schedule.taken_bytes + (len(aliases) - len(hosted)) * size <= limit
        for at in hosted:  # each comes in at least once, and its next value goes out once
            buffers = (
                schedule.inputs[at],
                schedule.results[next(new for new in aliases if aliases[new] == at)],
            )
            copies = [step for step in schedule.steps if isinstance(step, Copy)]
            assert any(step.source[0] == buffers[0] for step in copies if step.way == "in")
            assert sum(step.target[0] == buffers[1] for step in copies if step.way == "out") == 1
        over = {
            wanted: at
            for wanted, at in aliases.items()
            if schedule.may_alias(schedule.results[wanted], 1 + at)
        }
        assert [
            array.tobytes() for array in simulate(schedule, arrays, structure.constants(), over)
        ] == expected
    with pytest.raises(OutOfDeviceMemory):
        within(least - 1)


# On devices


def perceptron(device: Device, dtype: ps.DType) -> tuple[Any, Callable[[ps.Tensor], ps.Tensor]]:
    layers = [nn.Linear(a, b, device=device) for a, b in pairwise([64, 96, 96, 96, 32])]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    model.to(dtype)
    return model, lambda x: ps.mean(model(x.astype(dtype)).astype(ps.float32) ** 2)


def gpt(device: Device, dtype: ps.DType) -> tuple[Any, Callable[[ps.Tensor], ps.Tensor]]:
    model = nn.GPT(vocab_size=61, context=8, width=32, layers=1, heads=2, device=device)
    model.to(dtype)
    return model, lambda tokens: model.loss(tokens[:, :-1], tokens[:, 1:])


class Run:
    """A network that trains."""

    def __init__(self, device: Device, network: str, memory: int | None = None) -> None:
        ps.random.manual_seed(5)
        make, dtype, rule = NETWORKS[network]
        self.device, self._network = device, network
        self.model, self._loss_of = make(device, dtype)
        self.optimizer: optim.Optimizer = rule(self.model.parameters())
        self.step = ps.jit(self._step, memory=memory) if memory else ps.jit(self._step)

    def _step(self, x: ps.Tensor) -> ps.Tensor:
        loss = self._loss_of(x)
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss

    def batch(self, number: int) -> ps.Tensor:
        rng = np.random.default_rng(number)
        if self._network == "gpt":
            return ps.asarray(rng.integers(0, 61, (4, 9)).astype(np.int32), device=self.device)
        return ps.asarray(rng.standard_normal((16, 64)).astype(np.float32), device=self.device)

    def train(self, batches: range = range(4)) -> list[bytes]:
        return [self.step(self.batch(number)).numpy().tobytes() for number in batches]

    @property
    def bits(self) -> dict[str, bytes]:
        """Of all parameters, moments and masters."""
        state = {name: array.tobytes() for name, array in self.optimizer.state_dict().items()}
        return state | {
            f"{at}": tensor.numpy().tobytes() for at, tensor in enumerate(self.model.parameters())
        }

    @property
    def state_bytes(self) -> int:
        tensors = [*self.model.parameters(), *self.optimizer._all()]
        return sum(tensor._node.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())

    @property
    def hosted(self) -> int:
        """How many tensors the step has at the host."""
        (captures,) = self.step._captured.values()
        return len(captures[0].program.schedule.hosted)

    def plan(self) -> Any:
        return ps.memory.plan(self.step, self.batch(0))


NETWORKS: dict[str, Any] = {
    "momentum": (perceptron, ps.float32, lambda given: optim.SGD(given, lr=1e-2, momentum=0.9)),
    "masters": (perceptron, ps.bfloat16, lambda given: optim.AdamW(given, lr=1e-2)),
    "gpt": (gpt, ps.float32, lambda given: optim.AdamW(given, lr=1e-2, clip_norm=1.0)),
}


@pytest.fixture(params=["opencl-device", "host-far", "host-late", *CUDA_KINDS])
def far(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = offloading(request.param)
    yield made
    made.close()


@pytest.fixture
def card() -> Iterator[Device]:
    made = offloading("opencl-device")
    yield made
    made.close()


def clean(device: Device) -> None:
    gc.collect()
    device.cleanup()


def least_of(device: Device, network: str) -> int:
    least: int = Run(device, network).plan().smallest_bytes
    clean(device)
    return least


@pytest.mark.slow("host-far")
@pytest.mark.parametrize("network", ["momentum", "masters"])
def test_a_model_larger_than_the_budget_trains_with_the_same_bits(
    far: Device, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_larger(far, network, monkeypatch)


@pytest.mark.slow
def test_so_does_a_gpt(card: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_larger(card, "gpt", monkeypatch)


def check_larger(far: Device, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = Run(far, network)
    expected = free.train(), free.bits
    state = free.state_bytes
    del free
    clean(far)
    plan = Run(far, network).plan()
    clean(far)
    least, most = plan.smallest_bytes, plan.unlimited_bytes
    assert least < 0.75 * state
    assert plan.budgets[-1].moved
    assert plan.budgets[-1].host_bytes > state - least
    assert "kept between steps" in plan.budgets[-1].text
    for limit in {least, random.Random(network).randint(least, state)}:
        run = Run(far, network, limit)  # made without a limit, so that the first step begins with all of it
        first = run.train(range(1))
        with monkeypatch.context() as patch:
            stats = far.memory_stats()
            assert stats.live_bytes + stats.pooled_bytes <= limit
            counted = Counted(far, patch)
            counted.nbytes = stats.live_bytes + stats.pooled_bytes
            assert first + run.train(range(1, 4)) == expected[0]
            assert counted.peak <= limit
        assert run.hosted
        assert run.bits == expected[1]
        del run
        clean(far)
    run = Run(far, network, least - 1)
    with pytest.raises(OutOfDeviceMemory, match="smallest budget") as refused:
        run.train(range(1))
    assert refused.value.smallest == least
    assert most > least


@given(share=st.floats(0, 1), network=st.sampled_from(["momentum", "masters"]))
@settings(max_examples=examples(12, quick=3))
def test_so_it_does_under_any_budget(share: float, network: str) -> None:
    device, plan, expected = known(network)
    limit = int(plan.smallest_bytes + share * (plan.unlimited_bytes - plan.smallest_bytes))
    run = Run(device, network)
    losses = run.train(range(1))
    with ps.memory.budget(limit):  # from the second step on
        losses += run.train(range(1, 4))
        stats = device.memory_stats()
        assert stats.live_bytes + stats.pooled_bytes <= limit
    assert (losses, run.bits) == expected
    del run
    clean(device)


@cache
def known(network: str) -> tuple[Device, Any, Any]:
    """A device, for which kernels are compiled once, a plan, and losses and bits without a budget."""
    device = offloading("opencl-device")
    run = Run(device, network)
    expected = run.train(), run.bits
    plan = run.plan()
    del run
    clean(device)
    return device, plan, expected


@pytest.mark.parametrize("room", [0, 1 << 16])
def test_under_a_limit_state_begins_at_the_host(
    room: int, card: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Run(card, "momentum")
    expected = free.train(), free.bits
    weights = sum(parameter._node.nbytes for parameter in free.model.parameters())
    del free
    clean(card)
    limit = least_of(card, "momentum") + room
    assert (limit < weights) == (not room)  # the momentum is as large as they are
    counted = Counted(card, monkeypatch)
    card.limit_bytes = limit
    run = Run(card, "momentum")
    assert (run.train(), run.bits) == expected
    assert counted.peak <= limit  # from the first moment on
    assert run.hosted


def test_state_at_the_host_is_read_and_set_like_any_other(card: Device) -> None:
    free = Run(card, "masters")
    free.train(range(3))
    expected, bits = free.optimizer.state_dict(), free.bits
    after = free.train(range(3, 5)), free.bits
    del free
    clean(card)
    run = Run(card, "masters", least_of(card, "masters"))
    run.train(range(3))
    assert run.hosted > 8
    tensors = [tensor for tensor in run.optimizer._all() if tensor._node.value.hosted and tensor.ndim]
    assert len(tensors) > 4
    at_the_host = {id(tensor): tensor.numpy().copy() for tensor in tensors}
    # An expression, an index, a NumPy array, and another device.
    for tensor in (tensors[0], tensors[-1]):
        array = at_the_host[id(tensor)]
        np.testing.assert_array_equal((tensor * 2).numpy(), array * np.asarray(2, array.dtype))
        np.testing.assert_allclose(
            ps.sum(tensor).numpy(), array.astype(np.float64).sum(), rtol=1e-2, atol=1e-2
        )
        np.testing.assert_array_equal(tensor[0].numpy(), array[0])
        np.testing.assert_array_equal(np.asarray(tensor), array)
        np.testing.assert_array_equal(tensor.to("host").numpy(), array)
        np.testing.assert_array_equal(tensor.numpy_async().wait(), array)
    state = run.optimizer.state_dict()
    assert {name: np.asarray(array).tobytes() for name, array in state.items()} == {
        name: np.asarray(array).tobytes() for name, array in expected.items()
    }
    assert run.bits == bits
    model = run.model.state_dict()
    assert (run.train(range(3, 5)), run.bits) == after
    run.optimizer.load_state_dict(state)
    run.model.load_state_dict(model)
    assert run.bits == bits
    assert (run.train(range(3, 5)), run.bits) == after


def test_what_somebody_still_holds_keeps_its_value(card: Device) -> None:
    free = Run(card, "momentum")
    free.train(range(2))
    old = free.bits
    free.train(range(2, 4))
    expected = free.bits
    del free
    clean(card)
    run = Run(card, "momentum", least_of(card, "momentum") + (1 << 14))
    run.train(range(2))
    moments = enumerate(run.optimizer._state["velocity"])
    held = {f"velocity.{at}": part.detach() for at, part in moments if part._node.value.hosted}
    assert len(held) > 2
    run.train(range(2, 4))
    assert run.bits == expected
    assert all(tensor.numpy().tobytes() == old[name] for name, tensor in held.items())


def test_other_programs_use_it_and_without_a_budget_it_comes_home(card: Device) -> None:
    expected = Run(card, "momentum")
    losses = expected.train(range(6))
    limit = least_of(card, "momentum")
    run = Run(card, "momentum")
    loss_of = ps.jit(lambda x: run._loss_of(x))
    values = []
    for number in range(6):
        with ps.memory.budget(limit + (1 << 19)):  # the other network is there too
            values.append(run.step(run.batch(number)).numpy().tobytes())
            assert (
                loss_of(run.batch(number)).numpy().tobytes()
                == run._loss_of(run.batch(number)).numpy().tobytes()
            )
    assert values == losses
    run.train(range(1))
    assert not any(tensor._node.value.hosted for tensor in run.optimizer._all())
    expected.train(range(1))
    assert run.bits == expected.bits


def test_a_step_allocates_no_pinned_memory(far: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(far, "momentum", least_of(far, "momentum"))
    run.train(range(2))
    assert run.hosted
    pinned = pinned_sizes(far, monkeypatch)
    run.train(range(2, 5))
    assert not pinned


def test_a_copy_that_fails_is_told_and_nothing_is_lost_before(
    card: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Run(card, "momentum")
    expected = free.train(), free.bits
    del free
    clean(card)
    run = Run(card, "momentum", least_of(card, "momentum"))
    losses = run.train(range(2))
    before = run.bits

    def refused(*args: object) -> Any:
        raise DeviceError("no copy today")

    with monkeypatch.context() as patch:
        patch.setattr(card.driver, "write", refused)
        with pytest.raises(DeviceError, match="no copy today"):
            run.step(run.batch(2))  # the batch itself was there before
    assert run.bits == before
    assert (losses + run.train(range(2, 4)), run.bits) == expected


def test_what_the_host_reads_of_a_step_frees_nothing_on_the_device(far: Device) -> None:
    """Flags of targets out of range are in pinned memory: the smallest budget has room for the rest."""
    ps.random.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16, device=far), nn.Tanh(), nn.Linear(16, 4, device=far))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)

    def step(x: ps.Tensor, targets: ps.Tensor) -> ps.Tensor:
        loss = nn.functional.cross_entropy(model(x), targets)
        optimizer.backward(loss)
        optimizer.step()
        return loss.detach()

    rng = np.random.default_rng(0)
    x = ps.asarray(rng.standard_normal((8, 12)).astype(np.float32), device=far)
    targets = ps.asarray(rng.integers(0, 4, 8), device=far)
    least = ps.memory.plan(ps.jit(step), x, targets).smallest_bytes
    inside = ps.jit(step, memory=least)
    loss = inside(x, targets)
    for _ in range(2):
        loss = inside(x, targets)  # while that of the last call is held, which the budget counts
    assert loss.item() > 0


def test_where_the_memory_is_the_hosts_state_stays() -> None:
    device = Device.over(DRIVERS["opencl-mapped"](), SMALL)
    plan = Run(device, "momentum").plan()
    assert not any(row.moved for row in plan.budgets)
    assert plan.smallest_bytes > plan.held_bytes
    device.close()
