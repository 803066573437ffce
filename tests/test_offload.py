"""Values that move to the host and back inside a step: the same bits in less memory, and never more of it."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, SMALL
from hypothesis import given
from hypothesis import strategies as st
from test_budget import (
    Counted,
    batch,
    check_any_graph,
    live_bytes,
    planned,
    smallest,
    start,
    steps,
    trained,
    training,
)
from test_schedule import CPU, TARGETS

import penstock as ps
from penstock import Device, tuning_cache
from penstock.compiler.schedule import Copy
from penstock.compiler.simulate import simulate
from penstock.compiler.target import Budget
from penstock.drivers.driver import Bytes, Event, Memory, Queue
from penstock.errors import DeviceError, OutOfDeviceMemory
from penstock.measuring import ceilings
from penstock.plan import recomputing
from penstock.plan.deals import Deals
from penstock.plan.prefetching import prefetched
from penstock.plan.recomputing import Search, sequels
from penstock.plan.sequences import HOLD, IN, OUT, Link, Sequel, Task

Steps = tuple[list[Task], list[int], frozenset[int]]
LINKS = st.sampled_from([Link(0.01, 0.1), Link(0.5, 0.1), Link(10.0, 1.0)])

# Sequences as pure functions


def check_order(sequel: Sequel, tasks: list[Task]) -> None:
    """Every value exists when it is read, and each run reads and writes the values of its task."""
    there, hosted = {0, 1}, set[int]()
    for run in sequel.runs:
        if run.task == HOLD:
            assert there.issuperset(run.reads)
        elif run.task < 0:
            (read,), (written,) = run.reads, run.writes
            assert sequel.value_of[read] == sequel.value_of[written]
            source, target = (there, hosted) if run.task == OUT else (hosted, there)
            assert read in source
            target.add(written)
        else:
            task = tasks[run.task]
            assert there.issuperset(run.reads)
            assert tuple(sequel.value_of[value] for value in run.reads) == task.reads
            assert tuple(sequel.value_of[value] for value in run.writes) == task.writes
            there.update(run.writes)


@given(steps(), LINKS)
def test_sequences_with_copies_compute_the_same_with_less_and_less_memory(case: Steps, link: Link) -> None:
    tasks, nbytes, kept = case
    result = list(sequels(tasks, range(len(tasks)), nbytes, kept, link))
    assert not result[0].moves
    for sequel in result:
        check_order(sequel, tasks)
        counts = [sum(run.task == number for run in sequel.runs) for number in range(len(tasks))]
        assert all(count == 1 or tasks[number].price is not None for number, count in enumerate(counts))
        assert sequel.peak_bytes == live_bytes(sequel, tasks, nbytes, kept)
        assert sequel.peak_bytes == max(sequel.load)
    peaks = [sequel.peak_bytes for sequel in result]
    assert peaks == sorted(set(peaks), reverse=True)


@given(steps(), LINKS)
def test_an_early_copy_never_raises_the_peak(case: Steps, link: Link) -> None:
    tasks, nbytes, kept = case
    for sequel in sequels(tasks, range(len(tasks)), nbytes, kept, link):
        early = prefetched(sequel, tasks, nbytes, link)
        check_order(early, tasks)
        assert live_bytes(early, tasks, nbytes, kept) <= sequel.peak_bytes
        without = [run for run in early.runs if run.task not in (IN, HOLD)]
        assert without == [run for run in sequel.runs if run.task != IN]  # nothing else moves


@given(steps(), LINKS | st.none())
def test_what_is_known_of_the_sequence_before_changes_nothing(case: Steps, link: Link | None) -> None:
    """A sequence begins as the one before, and deals are looked for only where something has changed."""
    tasks, nbytes, kept = case
    first, *others = sorted(kept - {0, 1})
    nbytes[1] = nbytes[first]  # state, and its next value
    used = {value for task in tasks for value in task.reads}
    state = {value: new for value, new in {0: None, 1: first}.items() if link and value in used}
    new = frozenset(others[:1]) if link else frozenset[int]()
    search = tasks, range(len(tasks)), nbytes, kept, link, state, new
    unfolded = Search.unfolded

    def alone(self: Search, dropped: Any, stays: Any, most: float = math.inf, before: Any = None) -> Any:
        return unfolded(self, dropped, stays, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputing, "_NOTED", 1)
        result = list(sequels(*search))
        patch.setattr(Search, "unfolded", alone)
        patch.setattr(recomputing, "Deals", lambda *arguments: Deals(*arguments[:4]))
        assert list(sequels(*search)) == result


def there_and_back(length: int) -> tuple[list[Task], list[int], frozenset[int]]:
    """As in training: each value of a chain is read again, the last first."""
    tasks = [Task((at,), (at + 1,)) for at in range(length)]
    for at in range(length, 0, -1):
        tasks.append(Task((len(tasks), at), (len(tasks) + 1,)))
    return tasks, [1] * (len(tasks) + 1), frozenset({0, len(tasks)})


def test_the_price_decides_between_moving_and_computing_again() -> None:
    tasks, nbytes, kept = there_and_back(24)
    order = range(len(tasks))
    quick = sequels(tasks, order, nbytes, kept, Link(0.1, 0.0))
    small = next(sequel for sequel in quick if sequel.peak_bytes <= 4)
    assert not small.again
    assert small.moves
    assert small.price < 1  # the copies run beside the steps
    slow = list(sequels(tasks, order, nbytes, kept, Link(1000.0, 0.0)))
    half = next(sequel for sequel in slow if sequel.peak_bytes <= 13)
    assert half.again
    assert not half.moves


def test_a_value_comes_back_as_early_as_its_copy_takes() -> None:
    """0 makes a value that 9 reads; the steps between need little memory but at one of them."""
    tasks = [Task((0,), (1,)), *(Task((0 if at == 1 else at,), (at + 1,)) for at in range(1, 9))]
    tasks.append(Task((1, 9), (10,)))
    nbytes = [1, 4, 1, 1, 10, 1, 1, 1, 1, 1, 1]
    link = Link(0.5, 0.0)  # so that a copy of 4 bytes takes as long as 2 steps
    *_, sequel = sequels(tasks, range(len(tasks)), nbytes, frozenset({0, 10}), link)
    early = prefetched(sequel, tasks, nbytes, link)
    at = [run.task for run in early.runs]
    assert at.index(9) - at.index(IN) == 3  # before 7 and 8
    assert at.index(HOLD) - at.index(OUT) == 3  # after 1 and 2
    assert live_bytes(early, tasks, nbytes, frozenset({0, 10})) == sequel.peak_bytes


# The pass on graphs


@pytest.mark.slow("gpu", "cuda", "webgpu")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("link", [1.0, 40.0])
def test_a_trained_network_moves_values_and_has_the_same_bits(target: str, link: float) -> None:
    within, structure = planned(trained(8, 24, 96)[0], TARGETS[target], link)
    free = within(None)
    arrays = [node.value for node in structure.inputs]
    expected = [array.tobytes() for array in simulate(free, arrays, structure.constants())]
    recomputing, _ = planned(trained(8, 24, 96)[0], TARGETS[target], None)
    least, without = smallest(within), smallest(recomputing)
    assert least <= without  # equal where all can be computed again, at any price
    choice = random.Random(target)
    last = free.taken_bytes + 1
    for limit in sorted({free.taken_bytes, least, *choice.choices(range(least, last), k=4)}, reverse=True):
        schedule = within(Budget(limit))
        assert schedule.taken_bytes <= min(limit, last)  # a smaller budget never takes more
        last = schedule.taken_bytes
        assert [array.tobytes() for array in simulate(schedule, arrays, structure.constants())] == expected
        assert bool(schedule.moved) == ("to the host, to save memory" in str(schedule))
        assert bool(schedule.moved) == bool(schedule.host_bytes) == ("back from the host" in str(schedule))
    assert within(Budget(least)).moved
    tried = "all is recomputed or moved to the host" if least < without else "all is recomputed"
    with pytest.raises(OutOfDeviceMemory, match=tried) as refused:
        within(Budget(least - 1))
    assert refused.value.smallest == least


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(3))
def test_so_does_any_graph(seed: int, target: str) -> None:
    check_any_graph(seed, target, 1.0)


def test_all_that_is_moved_lies_in_one_memory_of_the_host() -> None:
    within, _ = planned(trained(8, 24, 96)[0], CPU, 1.0)
    schedule = within(Budget(smallest(within)))
    copies = [step for step in schedule.steps if isinstance(step, Copy)]
    (host,) = {at for at, buffer in enumerate(schedule.buffers) if buffer.role == "host"}
    for step in copies:
        there, here = (step.target, step.source) if step.way == "out" else (step.source, step.target)
        assert there[0] == host
        assert here[0] in schedule.arenas
    assert host not in schedule.arenas
    assert schedule.host_bytes <= sum(step.nbytes for step in schedule.moved)


# On devices

# The first replays graphs, in any order that their edges permit.
FAR = ("host-far", "host-late", "opencl-device", *CUDA_KINDS)


def offloading(kind: str, link: float = 1.0) -> Device:
    """A device that claims to have its own memory, and a link to the host."""
    driver = DRIVERS[kind]()
    driver.capabilities = replace(driver.capabilities, offloads=True)
    device = Device.over(driver, SMALL)
    device.link_cost = link
    return device


@pytest.fixture(params=FAR)
def far(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = offloading(request.param)
    yield made
    made.close()


def matrices(device: Device) -> tuple[ps.Tensor, ps.Tensor]:
    """So large on a GPU that copies cost less than products."""
    rng = np.random.default_rng(0)
    rows, width = (3000, 640) if device.capabilities.kind == "gpu" else (300, 64)
    x, w = (rng.standard_normal((length, width)).astype(np.float32) for length in (rows, width))
    return ps.asarray(x, device=device), ps.asarray(w / np.float32(width**0.5), device=device)


def deep(x: ps.Tensor, w: ps.Tensor) -> ps.Tensor:
    """The gradient of a chain of products, all of which the backward pass needs."""
    w = w.detach().requires_grad_()
    for _ in range(6):
        x = ps.tanh(x @ w)
    ps.sum(x).backward()
    assert w.grad is not None
    return w.grad


def least_of(device: Device) -> int:
    return ps.memory.plan(ps.jit(deep), *matrices(device)).smallest_bytes


def moved_by(step: Callable[..., ps.Tensor]) -> int:
    (captures,) = step._captured.values()  # type: ignore[attr-defined]
    return len(captures[0].program.schedule.moved)


@pytest.mark.slow("host-far", "opencl-device")
def test_training_moves_values_and_has_the_same_bits(far: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_training(far, "mlp", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAR if not kind.startswith("host")])  # far fewer groups
def test_so_does_a_gpt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = offloading(kind, 20.0)
    check_training(device, "gpt", monkeypatch)
    device.close()


def check_training(device: Device, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = training(device, network)
    _, step = start(device, network, None)
    plan = ps.memory.plan(step, ps.asarray(batch(network, 0), device=device))
    del _, step
    least, most = plan.smallest_bytes, plan.unlimited_bytes
    assert plan.budgets[-1].moved
    assert plan.budgets[-1].host_bytes > 0
    assert "moved to the host: " in str(plan)
    peaks = []
    choice = random.Random(network)
    for limit in sorted({most - 1, choice.randint(least, most), least}, reverse=True):
        gc.collect()
        device.cleanup()
        with monkeypatch.context() as patch:
            before = device.memory_stats()
            counted = Counted(device, patch)
            counted.nbytes = before.live_bytes + before.pooled_bytes
            device.limit_bytes = limit  # from the start: the model may be larger than what its steps take
            assert training(device, network) == expected
            device.limit_bytes = None
        peaks.append(counted.peak)
        assert counted.peak <= limit
    assert peaks == sorted(peaks, reverse=True)
    gc.collect()
    device.cleanup()
    with pytest.raises(OutOfDeviceMemory, match="smallest budget") as refused:
        training(device, network, least - 1)
    assert refused.value.smallest == least


def pinned_sizes(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each allocation of pinned memory from now on."""
    pinned: list[int] = []
    allocate = device.driver.allocate

    def counted(nbytes: int, pinned_memory: bool = False, **more: bool) -> Memory:
        if pinned_memory or more.get("pinned"):
            pinned.append(nbytes)
        return allocate(nbytes, pinned_memory, **more)

    monkeypatch.setattr(device.driver, "allocate", counted)
    return pinned


def test_no_tensor_has_pinned_memory_of_its_own(far: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = start(far, "mlp", None)
    x = ps.asarray(batch("mlp", 0), device=far)
    limit = ps.memory.plan(step, x).smallest_bytes
    del step
    _, step = start(far, "mlp", limit)
    pinned = pinned_sizes(far, monkeypatch)
    step(x)
    far.sync()
    assert moved_by(step) > 1
    slabs = len(pinned)
    for _ in range(3):
        step(x)
        far.sync()
    (captures,) = step._captured.values()
    schedule = captures[0].program.schedule
    # One block for what is moved inside the step, and a few for state, which had been in as many.
    assert slabs == len(pinned) < len(schedule.hosted) + bool(schedule.host_bytes)
    assert max(pinned) >= schedule.host_bytes


def test_memory_of_the_host_is_given_back(far: Device) -> None:
    given = matrices(far)
    step = ps.jit(deep, memory=least_of(far))
    step(*given).numpy()
    assert moved_by(step)
    far.cleanup()
    assert far.memory_stats().staging_bytes == 0
    assert step(*given).numpy().tobytes() == ps.jit(deep)(*given).numpy().tobytes()


def test_copies_follow_arenas_that_are_elsewhere(far: Device) -> None:
    given = matrices(far)
    expected = ps.jit(deep)(*given).numpy()
    step = ps.jit(deep, memory=least_of(far))
    for _ in range(3):  # from the second time on as a graph
        first = step(*given).numpy()
    before = far.layers().scratch[0].place, far.layers().host_memory(1).place
    far.trim()
    far.layers().host_memory(1 << 20)
    again = step(*given).numpy()
    assert before[0] != far.layers().scratch[0].place
    assert before[1] != far.layers().host_memory(1).place
    assert first.tobytes() == again.tobytes() == expected.tobytes()


def test_a_profile_sees_the_copies(far: Device) -> None:
    given = matrices(far)
    step = ps.jit(deep, memory=least_of(far))
    expected = ps.jit(deep)(*given).numpy()
    step(*given)
    far.sync()
    with ps.profile(device=far) as profile:
        result = step(*given)
        far.sync()
    np.testing.assert_array_equal(result.numpy(), expected)
    counts = {copy.direction: copy.calls for copy in profile.copies()}
    assert counts["download"] == moved_by(step)
    assert counts["upload"] >= moved_by(step)


def test_a_copy_that_fails_is_told_and_the_next_step_is_right(
    far: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = matrices(far)
    step = ps.jit(deep, memory=least_of(far))
    expected = ps.jit(deep)(*given).numpy()
    read = far.driver.read

    def refused(*args: object) -> Event:
        raise DeviceError("no copy today")

    with monkeypatch.context() as patch:
        patch.setattr(far.driver, "read", refused)
        with pytest.raises(DeviceError, match="no copy today"):
            step(*given)
    assert far.driver.read == read
    np.testing.assert_array_equal(step(*given).numpy(), expected)


def test_copies_have_queues_of_their_own_and_wait_for_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    device = offloading("host-late")
    given = matrices(device)
    step = ps.jit(deep, memory=least_of(device))
    step(*given)
    device.sync()
    driver, used = device.driver, []
    write, read = driver.write, driver.read

    def writing(queue: Queue, memory: Memory, offset: int, source: Bytes, waits: list[Event] | None) -> Event:
        used.append(("in", queue is driver.incoming, bool(waits)))
        return write(queue, memory, offset, source, waits)

    def reading(queue: Queue, target: Bytes, memory: Memory, offset: int, waits: list[Event] | None) -> Event:
        used.append(("out", queue is driver.outgoing, bool(waits)))
        return read(queue, target, memory, offset, waits)

    monkeypatch.setattr(driver, "write", writing)
    monkeypatch.setattr(driver, "read", reading)
    step(*given)
    device.sync()
    assert {way for way, _, _ in used} == {"in", "out"}
    assert all(own and waits for _, own, waits in used)
    device.close()


def test_where_the_memory_is_the_hosts_nothing_is_moved() -> None:
    for kind, make in DRIVERS.items():
        device = Device.over(make(), SMALL)
        if device.capabilities.kind != "gpu" or device.capabilities.shared_memory:
            assert not device.capabilities.offloads, kind
            assert device.link_cost is None, kind
        if kind == "host-far":
            plan = ps.memory.plan(ps.jit(deep), *matrices(device))
            assert plan.budgets[-1].recomputed
            assert not any(row.moved for row in plan.budgets)
        device.close()


def test_the_price_of_moving_is_that_of_the_link_beside_the_memory(
    given_rates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: dict[str, float | None] = {"bytes": 2e12, "link both ways": 5e10}
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: rates[what])
    assert measured_link("host-far") == 40.0
    rates["link both ways"] = None  # as where a limit leaves no room to measure in
    tuning_cache.forget_everything()
    assert measured_link("host-far") == 64.0


def measured_link(kind: str) -> float | None:
    device = offloading(kind)
    del device.link_cost
    cost = device.link_cost
    device.close()
    return cost


def test_expressions_tell_what_is_moved(far: Device) -> None:
    given = matrices(far)
    free = deep(*given).numpy()
    least = least_of(far)
    far.cleanup()
    with ps.memory.budget(least):
        assert "to the host, to save memory" in ps.explain(deep(*given))
        assert deep(*given).numpy().tobytes() == free.tobytes()
