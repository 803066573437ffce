"""Memory budgets: programs that can fit give the same bits; others are refused before they run."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, SMALL, WEBGPU_KINDS
from hypothesis import given
from hypothesis import strategies as st
from test_random_graphs import grown
from test_schedule import CPU, TARGETS, plain

import penstock as ps
from penstock import Device, nn, optim
from penstock.compiler.pipeline import compile_graph, prepare
from penstock.compiler.schedule import Schedule
from penstock.compiler.simulate import simulate
from penstock.compiler.target import Budget, Target
from penstock.drivers.driver import Capabilities
from penstock.drivers.rates import StepRates
from penstock.errors import OutOfDeviceMemory, SettingError
from penstock.execution import rates as execution_rates
from penstock.execution.structure import Structure
from penstock.graph import contraction, elementwise, reducing
from penstock.graph.gradient import gradients
from penstock.graph.node import Node
from penstock.plan.order import Work, deferred
from penstock.plan.recomputing import Search, least_peak, sequels
from penstock.plan.sequences import OUT, Sequel, Task

# Sequences as pure functions


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Task], list[int], frozenset[int]]:
    """Random steps, each of which reads some of the values before it; the first two values are given."""
    choice = random.Random(draw(st.integers(0, 1 << 32)))
    nbytes = [choice.randint(1, 8), choice.randint(1, 8)]
    tasks: list[Task] = []
    for _ in range(draw(st.integers(1, 30))):
        known = range(len(nbytes))
        recent = [value for value in known if value >= len(nbytes) - 4]
        reads = {choice.choice(recent), choice.choice(known)}
        writes = range(len(nbytes), len(nbytes) + choice.choice((1, 1, 2)))
        nbytes += [choice.choice((0, 1, 4, 16, 64)) for _ in writes]
        price = None if choice.random() < 0.1 else float(choice.randint(1, 9))
        over = tuple(tuple(range(len(reads))) if choice.random() < 0.5 else () for _ in writes)
        tasks.append(Task(tuple(reads), tuple(writes), (), over, choice.randint(0, 8), price))
    ends = {choice.randrange(2, len(nbytes)) for _ in range(2)} | {len(nbytes) - 1}
    return tasks, nbytes, frozenset({0, 1} | ends)


def live_bytes(sequel: Sequel, tasks: list[Task], nbytes: list[int], kept: frozenset[int]) -> int:
    """The peak of live bytes on the device in a run, counted naively; values at the host do not count."""
    last: dict[int, int] = {}
    for at, run in enumerate(sequel.runs):
        last.update(dict.fromkeys((*run.reads, *(run.writes if run.task != OUT else ())), at))
    size = [nbytes[value] for value in sequel.value_of]
    live: set[int] = set()
    most = 0
    for at, run in enumerate(sequel.runs):
        writes = run.writes if run.task != OUT else ()
        own = {value for value in writes if not (value == sequel.value_of[value] and value in kept)}
        task = tasks[run.task] if run.task >= 0 else Task((), ())
        saved, taken = 0, set[int]()
        for value, over in zip(writes, task.over, strict=False):
            dying = [run.reads[k] for k in over if run.reads[k] in live and last[run.reads[k]] == at]
            free = [k for k in dying if size[k] >= size[value] and k not in taken]
            if value in own and free:
                taken.add(free[0])
                saved += size[value]
        live |= own
        most = max(most, sum(size[value] for value in live) + task.scratch - saved)
        live = {value for value in live if last[value] > at}
    return most


@given(steps())
def test_sequences_compute_the_same_with_less_and_less_memory(
    case: tuple[list[Task], list[int], frozenset[int]],
) -> None:
    tasks, nbytes, kept = case
    result = list(sequels(tasks, range(len(tasks)), nbytes, kept))
    assert [run.task for run in result[0].runs] == list(range(len(tasks)))
    assert not result[0].again
    for sequel in result:
        there = {0, 1}
        for run in sequel.runs:
            task = tasks[run.task]
            assert there.issuperset(run.reads)
            assert tuple(sequel.value_of[value] for value in run.reads) == task.reads
            assert tuple(sequel.value_of[value] for value in run.writes) == task.writes
            there.update(run.writes)
        counts = [sum(run.task == number for run in sequel.runs) for number in range(len(tasks))]
        assert all(count == 1 or tasks[number].price is not None for number, count in enumerate(counts))
        assert sorted(sequel.again) == sorted(
            number for number, count in enumerate(counts) for _ in range(count - 1)
        )
        assert sequel.peak_bytes == live_bytes(sequel, tasks, nbytes, kept)
    peaks = [sequel.peak_bytes for sequel in result]
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] >= least_peak(tasks, nbytes, kept, {}, frozenset())


def test_a_chain_and_its_way_back_needs_a_part_of_the_memory() -> None:
    """As in training: each value of a chain is read again, the last first."""
    length = 24
    tasks = [Task((at,), (at + 1,)) for at in range(length)]
    back = length
    for at in range(length, 0, -1):
        tasks.append(Task((back, at), (back + 1,)))
        back += 1
    nbytes = [1] * (back + 1)
    result = list(sequels(tasks, range(len(tasks)), nbytes, frozenset({0, back})))
    assert result[0].peak_bytes > length
    assert result[-1].peak_bytes <= length // 2
    assert result[-1].price <= 3 * length


def test_the_least_memory_is_known_after_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = [0]
    unfolded = Search.unfolded

    def counted(self: Search, *args: Any) -> Any:
        tries[0] += 1
        return unfolded(self, *args)

    monkeypatch.setattr(Search, "unfolded", counted)
    count = 100  # small values, all of which wait while a large one is there
    tasks = [Task((0,), (1 + at,)) for at in range(count)]
    tasks.append(Task((0,), (count + 1,)))
    tasks += [Task((1 + at, count + 1 + at), (count + 2 + at,)) for at in range(count)]
    nbytes, kept = [1] * (2 * count + 2), frozenset({0, 2 * count + 1})
    nbytes[count + 1] = count
    by_price = list(sequels(tasks, range(len(tasks)), nbytes, kept))
    most, tries[0] = tries[0], 0
    at_any_price = list(sequels(tasks, range(len(tasks)), nbytes, kept, at_any_price=True))
    assert tries[0] < most / 4
    assert at_any_price[-1].peak_bytes <= by_price[-1].peak_bytes


def test_what_is_dear_to_compute_again_stays() -> None:
    """A dear step makes a small value, a cheap step a large value of it, which the last step reads again."""
    tasks = [
        Task((0,), (1,), price=100.0),
        Task((1,), (2,)),
        Task((2,), (3,)),
        Task((3,), (4,)),
        Task((4, 2), (5,)),
    ]
    result = list(sequels(tasks, range(5), [1, 8, 64, 64, 64, 1], frozenset({0, 5})))
    assert result[1].again == (1,)
    assert result[1].price == 1
    assert result[1].peak_bytes == result[0].peak_bytes - 64 + 8


def test_not_all_ways_to_compute_a_value_again_are_looked_at() -> None:
    """Each value of a tower is computed of the two below it, and costs as much to keep as both of them."""
    height = 60
    tasks = [Task((max(at - 1, 0), max(at - 2, 0)), (at,), price=1e-12) for at in range(1, height)]
    nbytes = [1, 1]
    while len(nbytes) < height:
        nbytes.append(nbytes[-1] + nbytes[-2])
    tasks += [Task((height - 1 + at,), (height + at,)) for at in range(3)]
    tasks.append(Task((height, height + 2), (height + 3,)))
    nbytes += [4 * nbytes[-1]] * 3 + [1]
    result = list(sequels(tasks, range(len(tasks)), nbytes, frozenset({0, height + 3})))
    assert result[-1].again == (height - 1,)
    assert result[-1].peak_bytes < result[0].peak_bytes


def test_other_results_of_what_runs_again_are_dropped_with_it() -> None:
    """As in a block: a step makes 1 and 2, of which 3 is computed; the way back reads 3, and then 1."""
    tasks = [Task((0,), (1, 2), price=0.75), Task((2,), (3,)), Task((3,), (4,)), Task((4,), (5,))]
    tasks += [Task((5,), (6,)), Task((6, 3), (7,)), Task((7, 1), (8,))]
    result = list(sequels(tasks, range(7), [1, 32, 32, 64, 64, 64, 1, 1, 1], frozenset({0, 8})))
    assert result[0].peak_bytes == 32 + 64 + 64 + 64
    assert result[1].again == (0, 1)
    assert result[1].peak_bytes == 1 + 32 + 32 + 64  # where they are computed again


@given(steps())
def test_deferred_steps_stand_before_their_readers(
    case: tuple[list[Task], list[int], frozenset[int]],
) -> None:
    tasks, nbytes, kept = case
    order = deferred(range(len(tasks)), [Work(task.reads, task.writes) for task in tasks], nbytes, kept)
    assert sorted(order) == list(range(len(tasks)))
    there = {0, 1}
    for number in order:
        assert there.issuperset(tasks[number].reads)
        there.update(tasks[number].writes)


def test_a_step_waits_until_its_large_result_is_needed() -> None:
    # 0 makes a large value from the input for 3; 1 and 2 do not use it.
    works = [Work((0,), (1,)), Work((0,), (2,)), Work((2,), (3,)), Work((1, 3), (4,))]
    assert deferred(range(4), works, [1, 100, 5, 5, 1], frozenset({0, 4})) == [1, 2, 0, 3]
    # But not if that would keep a larger value alive.
    works = [Work((0,), (5,)), *works[1:3], Work((5,), (1,)), works[3]]
    assert deferred(range(5), works, [1, 100, 5, 5, 1, 200], frozenset({0, 4}))[-1] == 4


# The pass on graphs


def trained(layers: int, width: int, rows: int) -> tuple[list[Node], dict[int, int]]:
    """The new weights of a deep network after a step, and which old weights they replace."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> Node:
        return plain(rng.standard_normal(shape).astype(np.float32) / 8)

    x = matrix(rows, width)
    weights = [matrix(width, width) for _ in range(layers)]
    for weight in weights:
        weight.tracked = True
    value = x
    for weight in weights:
        value = elementwise.tanh(contraction.matmul(value, weight))
    loss = reducing.sum_(elementwise.multiply(value, value), (0, 1))
    result = gradients(loss, elementwise.like(loss, 1.0), weights)
    new = [elementwise.subtract(weight, g) for weight, g in zip(weights, result, strict=True)]
    return [loss, *new], {}


def planned(
    wanted: list[Node], can: Capabilities, link_cost: float | None = None
) -> tuple[Callable[[Budget | None], Schedule], Structure]:
    structure = Structure(wanted, checked=False)
    nodes, inputs = prepare(wanted, structure.inputs)

    def within(budget: Budget | None) -> Schedule:
        return compile_graph(nodes, inputs, structure.numbers, Target.of(can, budget, link_cost))

    return within, structure


def smallest(within: Callable[[Budget | None], Schedule]) -> int:
    with pytest.raises(OutOfDeviceMemory) as raised:
        within(Budget(1))
    assert raised.value.smallest is not None
    return raised.value.smallest


@pytest.mark.parametrize("target", TARGETS)
def test_a_trained_network_under_any_budget_has_the_same_bits(target: str) -> None:
    wanted, _ = trained(8, 24, 96)
    within, structure = planned(wanted, TARGETS[target])
    free = within(None)
    arrays = [node.value for node in structure.inputs]
    expected = [array.tobytes() for array in simulate(free, arrays, structure.constants())]
    least = smallest(within)
    assert least < 0.7 * free.taken_bytes
    choice = random.Random(target)
    last = free.taken_bytes + 1
    for limit in sorted({free.taken_bytes, least, *choice.choices(range(least, last), k=4)}, reverse=True):
        schedule = within(Budget(limit))
        assert schedule.taken_bytes <= min(limit, last)  # a smaller budget never takes more
        last = schedule.taken_bytes
        assert bool(schedule.recomputed) == ("once more to save memory" in str(schedule))
        assert [array.tobytes() for array in simulate(schedule, arrays, structure.constants())] == expected
    assert within(Budget(least)).recomputed
    with pytest.raises(OutOfDeviceMemory):
        within(Budget(least - 1))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(3))
def test_so_has_any_graph(seed: int, target: str) -> None:
    check_any_graph(seed, target)


def check_any_graph(seed: int, target: str, *link: float) -> None:
    """Budgets of a random graph hold, and it computes the same bits."""
    _, wanted = grown(seed, 60, 0, plain)
    within, structure = planned(wanted, TARGETS[target], *link)
    arrays = [node.value for node in structure.inputs]
    free = within(None)
    expected = [array.tobytes() for array in simulate(free, arrays, structure.constants())]
    least = smallest(within)
    for limit in {least, (least + free.taken_bytes) // 2}:
        schedule = within(Budget(limit))
        assert schedule.taken_bytes <= limit
        assert [array.tobytes() for array in simulate(schedule, arrays, structure.constants())] == expected


def test_nothing_changes_where_the_plan_fits() -> None:
    within, _ = planned(trained(4, 16, 32)[0], CPU)
    free = within(None)
    assert within(Budget(free.taken_bytes)) == free
    assert within(Budget(free.taken_bytes + 7, 7)) == free


def test_a_refusal_names_what_is_large() -> None:
    within, _ = planned(trained(4, 16, 32)[0], CPU)
    with pytest.raises(OutOfDeviceMemory) as raised:
        within(Budget(5000, 3000))
    text = str(raised.value)
    for part in ("5000 bytes", f"{raised.value.smallest} bytes", "float32[32, 16]", "A smaller batch"):
        assert part in text


# On devices


class Counted:
    """The bytes that a device's driver has allocated, and their peak; without pinned memory."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = device.driver
        allocate, free = driver.allocate, driver.free
        self.nbytes = self.peak = 0
        ours: set[int] = set()

        def counted_allocate(nbytes: int, pinned: bool = False) -> Any:
            memory = allocate(nbytes, pinned)
            if not pinned:
                ours.add(memory.serial)
                self.nbytes += memory.nbytes
                self.peak = max(self.peak, self.nbytes)
            return memory

        def counted_free(memory: Any) -> None:
            if memory.serial in ours:
                ours.remove(memory.serial)
                self.nbytes -= memory.nbytes
            free(memory)

        monkeypatch.setattr(driver, "allocate", counted_allocate)
        monkeypatch.setattr(driver, "free", counted_free)


def mlp(device: Device) -> tuple[Any, Callable[[ps.Tensor], ps.Tensor]]:
    widths = [24, 32, 32, 32, 32, 8]
    layers = [nn.Linear(a, b, device=device) for a, b in pairwise(widths)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    return model, lambda x: ps.mean(model(x) ** 2)


def gpt(device: Device) -> tuple[Any, Callable[[ps.Tensor], ps.Tensor]]:
    layers = 1 if device.capabilities.language == "numpy" else 2  # where each operation is planned by itself
    model = nn.GPT(vocab_size=61, context=16, width=32, layers=layers, heads=2, dropout=0.1, device=device)
    return model, lambda tokens: model.loss(tokens[:, :-1], tokens[:, 1:])


NETWORKS = {"mlp": mlp, "gpt": gpt}
FAR = ("host-far", "opencl-device", *CUDA_KINDS, *WEBGPU_KINDS)  # memory of their own, for which budgets are
OPTIMIZERS: dict[str, Any] = {"mlp": partial(optim.SGD, momentum=0.9), "gpt": optim.AdamW}


def batch(network: str, number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    if network == "gpt":
        return rng.integers(0, 61, (8, 17)).astype(np.int32)
    return rng.standard_normal((160, 24)).astype(np.float32)


def start(device: Device, network: str, memory: int | None) -> tuple[Any, Any]:
    """A network and its jitted step."""
    ps.random.manual_seed(5)
    model, loss_of = NETWORKS[network](device)
    optimizer = OPTIMIZERS[network](model.parameters(), lr=1e-2, clip_norm=1.0)

    @ps.jit(memory=memory)
    def step(x: ps.Tensor) -> ps.Tensor:
        loss = loss_of(x)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    return model, step


def training(device: Device, network: str, memory: int | None = None) -> list[bytes]:
    """The bits of the losses, and of the parameters after three steps."""
    before = device.limit_bytes
    if memory is not None and device.capabilities.offloads:
        device.limit_bytes = memory  # so that state which the budget has no room for is made at the host
    try:
        model, step = start(device, network, memory)
        bits = [step(ps.asarray(batch(network, at), device=device)).numpy().tobytes() for at in range(3)]
        return bits + [parameter.numpy().tobytes() for parameter in model.parameters()]
    finally:
        device.limit_bytes = before


@pytest.mark.slow("opencl-mapped", "opencl-device", "host", "host-far", "webgpu")
def test_training_under_any_budget_has_the_same_bits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_training(device, "mlp", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("device", FAR, indirect=True)
def test_so_has_a_gpt(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_training(device, "gpt", monkeypatch)


def check_training(device: Device, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = training(device, network)
    _, step = start(device, network, None)
    plan = ps.memory.plan(step, ps.asarray(batch(network, 0), device=device))
    del _, step
    least, most = plan.smallest_bytes, plan.unlimited_bytes
    assert least < 0.9 * most
    peaks = []
    for limit in (random.Random(network).randint(least, most), least):
        gc.collect()
        device.cleanup()
        with monkeypatch.context() as patch:
            before = device.memory_stats()
            counted = Counted(device, patch)
            counted.nbytes = before.live_bytes + before.pooled_bytes
            assert training(device, network, limit) == expected
        peaks.append(counted.peak)
        assert counted.peak <= limit
    assert peaks[1] <= peaks[0]
    gc.collect()
    device.cleanup()
    with pytest.raises(OutOfDeviceMemory, match="smallest budget"):
        training(device, network, least - 1)


# The surface


@pytest.fixture
def host() -> Iterator[Device]:
    made = Device.over(DRIVERS["host"](), SMALL)
    yield made
    made.close()


def chain(x: ps.Tensor) -> ps.Tensor:
    """The gradient of a chain of values, all of which the backward pass needs."""
    x = x.detach().requires_grad_()
    value = x
    for _ in range(8):
        value = ps.tanh(value)
    ps.sum(value).backward()
    assert x.grad is not None
    return x.grad


SHAPE = (300, 100)
NBYTES = 4 * 300 * 100


def given_to(device: Device) -> ps.Tensor:
    return ps.asarray(np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32), device=device)


def test_all_ways_to_set_a_budget_mean_the_same(host: Device) -> None:
    x = given_to(host)
    expected = ps.jit(chain)(x).numpy()
    limit = ps.memory.plan(ps.jit(chain), x).smallest_bytes

    def recomputed(call: Any) -> int:
        gc.collect()
        np.testing.assert_array_equal(call(x).numpy(), expected)
        (captures,) = call._captured.values()
        return len(captures[0].program.schedule.recomputed)

    counts = [recomputed(ps.jit(chain)), recomputed(ps.jit(chain, memory=limit))]
    with ps.memory.budget(limit):
        counts.append(recomputed(ps.jit(chain)))
        with ps.memory.budget("1GiB"):  # the smaller budget holds
            assert host.limit_bytes == limit
            counts.append(recomputed(ps.jit(chain)))
    assert host.limit_bytes is None
    host.limit_bytes = limit
    counts.append(recomputed(ps.jit(chain)))
    host.limit_bytes = None
    assert counts[0] == 0
    assert len(set(counts[1:])) == 1
    assert counts[1] > 0


def test_a_budget_serves_several_blocks_and_calls(host: Device) -> None:
    small = ps.memory.budget(1 << 20)
    for _ in range(2):
        with small:
            with small, ps.memory.budget("1GiB"):
                assert host.limit_bytes == 1 << 20
            assert host.limit_bytes == 1 << 20
        assert host.limit_bytes is None

    @small
    def limit() -> int | None:
        return host.limit_bytes

    assert [limit(), limit()] == [1 << 20, 1 << 20]
    with pytest.raises(ZeroDivisionError), small:
        1 / 0  # noqa: B018
    assert host.limit_bytes is None


def test_a_jitted_function_may_get_a_budget(host: Device) -> None:
    x = given_to(host)
    step = ps.jit(chain)
    expected, plan = step(x).numpy(), ps.memory.plan(step, x)
    inside = ps.jit(step, memory=plan.smallest_bytes)
    assert inside.__name__ == "chain"
    assert inside(x).numpy().tobytes() == expected.tobytes()
    with pytest.raises(OutOfDeviceMemory):
        ps.jit(step, memory=plan.smallest_bytes - 1)(x)


def test_budgets_of_several_threads_begin_and_end_at_any_time(host: Device) -> None:
    interval, errors = sys.getswitchinterval(), []

    def run(limit: int) -> None:
        try:
            for _ in range(20_000):
                with ps.memory.budget(limit):
                    assert host.limit_bytes <= limit
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(limit,)) for limit in (1 << 40, 1 << 41, 1 << 42)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(20_000):
            assert host.limit_bytes is None or host.limit_bytes >= 1 << 40
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert host.limit_bytes is None


def test_a_function_is_planned_anew_where_the_budget_changes(host: Device) -> None:
    x = given_to(host)
    step = ps.jit(chain)
    free = step(x).numpy()
    host.cleanup()
    with ps.memory.budget(ps.memory.plan(step, x).smallest_bytes):
        small = step(x).numpy()
        assert host.memory_stats().planned_bytes < 6 * NBYTES
    again = step(x).numpy()
    assert host.memory_stats().planned_bytes > 6 * NBYTES
    assert free.tobytes() == small.tobytes() == again.tobytes()


def test_so_it_is_where_more_is_live_than_before(host: Device) -> None:
    x = given_to(host)
    plan = ps.memory.plan(ps.jit(chain), x)
    step = ps.jit(chain, memory=plan.unlimited_bytes)
    free = step(x).numpy()
    held = ps.zeros((2, *SHAPE), device=host).realize()
    assert step(x).numpy().tobytes() == free.tobytes()
    assert host.memory_stats().live_bytes <= plan.unlimited_bytes
    del held


def test_an_expression_is_planned_within_a_budget_too(host: Device) -> None:
    x = given_to(host)
    free = chain(x).numpy()
    host.cleanup()
    peaks = []
    for limit in (None, "1MiB"):
        host.limit_bytes = limit
        host.pool.reset_peak()
        assert chain(x).numpy().tobytes() == free.tobytes()
        peaks.append(host.memory_stats().peak_bytes)
        host.cleanup()
    assert peaks[1] <= 1 << 20 < peaks[0]


def test_what_is_given_is_checked(host: Device) -> None:
    with pytest.raises(SettingError, match="is not a size in bytes"):
        ps.jit(chain, memory="much")
    with pytest.raises(SettingError), ps.memory.budget(-1):
        pass
    with pytest.raises(TypeError, match=r"under @ps\.jit has a memory plan"):
        ps.memory.plan(chain, given_to(host))
    assert host.limit_bytes is None


def test_a_plan_runs_nothing_and_is_a_table(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = StepRates(1e9, {"float32": 1e10}, 1e-6, 1e9)
    monkeypatch.setattr(execution_rates, "step_rates", lambda device, dtypes: rates)
    x = given_to(host)
    total = ps.zeros((), device=host)

    @ps.jit
    def counting(x: ps.Tensor) -> ps.Tensor:
        total[...] = total + 1
        return chain(x)

    plan = ps.memory.plan(counting, x)
    assert total.item() == 0
    budgets = [row.budget_bytes for row in plan.budgets]
    works = [row.extra_work for row in plan.budgets]
    assert budgets == sorted(set(budgets), reverse=True)
    assert works == sorted(works)
    assert works[0] == 0 < works[-1]
    times = plan.step_seconds
    assert times is not None
    assert list(times) == sorted(times)
    assert times[0] == rates.seconds(plan.budgets[0].launches) < times[-1]
    heading, columns, *rows = str(plan).splitlines()
    assert "on host-plain" in heading
    assert columns.split() == ["budget", "temporaries", "step", "more", "work", "recomputed"]
    assert len(rows) == len(budgets)
    assert rows[0].endswith("nothing")
    assert "tanh" in rows[-1]
    assert "is enough" in plan.verdict(plan.unlimited_bytes)
    assert "will do, with at most" in plan.verdict(plan.smallest_bytes)
    least = plan.smallest_bytes
    assert f"is too little: {least} bytes" in plan.verdict(least - 1)
    limits = (plan.unlimited_bytes, plan.smallest_bytes, plan.smallest_bytes - 1)
    assert [plan.fits(limit) for limit in limits] == [True, True, False]
