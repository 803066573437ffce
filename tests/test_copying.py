"""How long kernels wait for copies, by hand and by bounds; and what smaller budgets take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_budget import planned, trained
from test_random_graphs import grown
from test_schedule import TARGETS, plain

from penstock.compiler.budget import fit
from penstock.compiler.compilation import Compilation
from penstock.compiler.pipeline import TARGET_PASSES, budget_levels, prepare
from penstock.compiler.taking import taken_bytes
from penstock.compiler.target import Budget, Target
from penstock.drivers.driver import Cost
from penstock.drivers.rates import BESIDE, Crossing, StepRates
from penstock.errors import OutOfDeviceMemory
from penstock.execution.structure import Structure
from penstock.graph.node import Node
from penstock.plan.copying import Traffic, Window, elapsed
from penstock.plan.prefetching import prefetched
from penstock.plan.sequences import HOLD, IN, OUT, Link, Run, Sequel, Task

PLAIN = StepRates(1.0, {"float32": 1.0}, 0.0, 1.0)  # a byte takes a second, here and on the link


def kernels(*nbytes: int) -> list[Cost]:
    return [Cost(0, size, 0, "") for size in nbytes]


# Predicted times of steps


def test_copies_beside_kernels_take_little_time_until_somebody_waits_for_them() -> None:
    launches = kernels(10, 10, 10)
    assert PLAIN.seconds(launches) == 30
    sent = Crossing(5, True, 1, 1, (), None)
    assert PLAIN.seconds(launches, [sent]) == 30 + 5 * BESIDE
    assert PLAIN.seconds(launches, [sent._replace(nbytes=25)]) == 35  # a step ends when its last copy has
    fetched = Crossing(25, False, 2, 0, (0,), 2)  # after it was sent, and before the last kernel
    assert PLAIN.seconds(launches, [sent._replace(nbytes=25), fetched]) == 10 + 25 + 25 + 10
    assert PLAIN.seconds(launches, [fetched._replace(copies=())]) == 25 + 10
    two = [fetched._replace(copies=()), fetched._replace(copies=())]
    assert PLAIN.seconds(launches, two) == 2 * 25 + 10  # one after the other
    both = [sent._replace(nbytes=25), fetched._replace(copies=())]
    assert PLAIN.seconds(launches, both) == 35  # beside each other


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Cost], list[Crossing]]:
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    copies: list[Crossing] = []
    for at in sorted(draw(st.lists(st.integers(0, len(sizes)), max_size=6))):
        before = draw(st.none() | st.integers(at, len(sizes) - 1)) if at < len(sizes) else None
        others = st.sets(st.sampled_from(range(len(copies)))) if copies else st.just(set[int]())
        after, size = draw(st.integers(0, at)), draw(st.integers(0, 9))
        copies.append(Crossing(size, draw(st.booleans()), at, after, tuple(draw(others)), before))
    return kernels(*sizes), copies


@given(programs())
def test_a_step_takes_as_long_as_its_kernels_and_copies_at_most(
    case: tuple[list[Cost], list[Crossing]],
) -> None:
    launches, copies = case
    computing = sum(cost.nbytes for cost in launches)
    there = sum(copy.nbytes for copy in copies if copy.to_host)
    back = sum(copy.nbytes for copy in copies if not copy.to_host)
    assert max(computing, there, back) <= PLAIN.seconds(launches, copies) <= computing + there + back
    slower = [replace(PLAIN, link=link).seconds(launches, copies) for link in (2.0, 1.0, 0.5)]
    assert slower == sorted(slower)


# Times by which the search decides


def unfolded(runs: list[Run], load: list[int], hosted: frozenset[int] = frozenset()) -> Any:
    return SimpleNamespace(runs=runs, load=np.array(load), hosted=hosted, value_of=range(8))


def test_kernels_wait_for_what_they_read_and_for_room() -> None:
    tasks, nbytes, link = [Task((), (0,), price=10.0)] * 3, [4] * 8, Link(1.0, 0.0)
    first, second, third = (Run(number, (), (number,)) for number in range(3))
    send, fetch = Run(OUT, (0,), (3,)), Run(IN, (3,), (4,))
    assert elapsed(unfolded([first, second, third], [4, 4, 4]), tasks, nbytes, link) == 30
    assert elapsed(unfolded([first, send], [4, 4]), tasks, nbytes, link) == 10 + 4
    moved = [first, send, second, fetch, third]
    # No room for an earlier copy back, and room for one: it begins when the host has the value.
    assert elapsed(unfolded(moved, [4, 4, 0, 4, 4]), tasks, nbytes, link) == 30 + 4
    assert elapsed(unfolded(moved, [4, 4, 0, 4, 8]), tasks, nbytes, link) == 30 + 2 * 4 * BESIDE
    # The second kernel needs the memory that is being sent.
    assert elapsed(unfolded([first, send, second], [4, 4, 4]), tasks, nbytes, link) == 10 + 4 + 10
    # State is at the host from the start, and to begin a copy takes the time of kernels.
    state = unfolded([Run(IN, (3,), (4,)), first], [4, 4], frozenset({3}))
    assert elapsed(state, tasks, nbytes, link) == 4 + 10
    assert elapsed(unfolded([first, send], [4, 4]), tasks, nbytes, Link(1.0, 0.5)) == 10 + 0.5 + 4


def test_copies_of_state_run_in_both_directions_at_once() -> None:
    """Updates that take less time than their copies, with memory for three values: two are on their way."""
    tasks = [Task((), (0,), price=1.0), *(Task((at,), (6 + at,), price=1.0) for at in range(1, 6))]
    runs, load = [Run(0, (), (0,))], [12]
    for at in range(1, 6):
        fetch, send = Run(IN, (at,), (20 + at,)), Run(OUT, (6 + at,), (30 + at,))
        runs, load = [*runs, fetch, Run(at, (20 + at,), (6 + at,)), send], [*load, 4, 4, 4]
    value_of = (*range(20), *range(10), *range(6, 16))
    sequel = Sequel(tuple(runs), value_of, 12, 0.0, (), tuple(load), frozenset(range(1, 6)))
    early = prefetched(sequel, tasks, [12] + [4] * 16, Link(1.0, 0.0)).runs
    ran = {run.task: at for at, run in enumerate(early) if run.task >= 0}
    fetched = {run.reads[0]: at for at, run in enumerate(early) if run.task == IN}
    held = {run.reads[0] - 6: at for at, run in enumerate(early) if run.task == HOLD}
    for at in range(1, 5):
        assert fetched[at + 1] < ran[at]
        assert held[at] > ran[at + 1]


def test_a_copy_costs_what_its_window_is_too_short_for() -> None:
    until = np.array([0.0, 10.0, 20.0, 30.0])
    free = Traffic([], until)
    assert 0 < free.wait(Window(0, 2, 5.0)) < 0.5  # beside kernels, it costs little but never nothing
    assert free.wait(Window(0, 1, 15.0)) == 5
    busy = Traffic([Window(0, 1, 8.0), Window(1, 3, 20.0)], until)
    assert busy.wait(Window(0, 1, 5.0)) == 3
    assert busy.wait(Window(1, 2, 5.0)) == 5  # the link is busy until the end
    assert busy.wait(Window(0, 3, 2.0)) == pytest.approx(2 / 64)  # two seconds are left


# Budgets


def all_that_fit(wanted: list[Node], target: str, link: float | None, shares: int) -> int:
    """Check what budgets get, from the smallest that would do to none, and what is refused; the smallest."""
    structure = Structure(wanted, checked=False)
    state = Compilation(*prepare(wanted, structure.inputs), structure.numbers, {})
    can = TARGETS[target]
    for transform in TARGET_PASSES[: TARGET_PASSES.index(fit)]:
        state = transform(state, Target.of(can))

    def within(limit: int) -> tuple[int, float]:
        target = Target.of(can, Budget(limit), link)
        planned = fit(state, target)
        return taken_bytes(planned, target), planned.extra

    with pytest.raises(OutOfDeviceMemory) as refused:
        within(1)
    least, most = refused.value.smallest or 0, taken_bytes(state, Target.of(can))
    limits = [least + (most - least) * share // shares for share in range(shares + 1)]
    sizes, prices = zip(*map(within, limits), strict=True)
    assert all(size <= limit for size, limit in zip(sizes, limits, strict=True))
    assert list(sizes) == sorted(sizes)
    assert list(prices) == sorted(prices, reverse=True)
    assert prices[-1] == 0
    with pytest.raises(OutOfDeviceMemory) as refused:
        within(least - 1)
    assert refused.value.smallest == least
    return least


@pytest.mark.parametrize("link", [None, 1.0, 64.0])
@pytest.mark.parametrize("target", TARGETS)
def test_a_larger_budget_gets_nothing_dearer_and_a_smaller_one_takes_no_more(
    target: str, link: float | None
) -> None:
    for layers, width, rows in ((6, 24, 8), (5, 16, 64)):
        all_that_fit(trained(layers, width, rows)[0], target, link, 16)


@given(
    seed=st.integers(0, 1 << 20),
    target=st.sampled_from(sorted(TARGETS)),
    link=st.sampled_from([None, 1.0, 16.0, 64.0]),
)
@settings(max_examples=examples(20, quick=4))
def test_so_it_is_for_any_graph(seed: int, target: str, link: float | None) -> None:
    """And the table of all budgets has less memory for more work in each row, and such budgets will do."""
    _, wanted = grown(seed, 60, 0, plain)
    least = all_that_fit(wanted, target, link, 6)
    within, structure = planned(wanted, TARGETS[target], link)
    nodes, inputs = prepare(wanted, structure.inputs)
    table = budget_levels(nodes, inputs, structure.numbers, Target.of(TARGETS[target], None, link))
    levels = [table.first(), *table.less()]
    sizes, works = [level.taken_bytes for level in levels], [level.extra_work for level in levels]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == least
    assert works == sorted(works)
    assert all(within(Budget(size)).taken_bytes <= size for size in sizes)
    assert least <= table.least() <= sizes[0]
    fitting = (least - 1, *sizes, table.least())
    assert [table.fits(limit) for limit in fitting] == [False] + [True] * (len(fitting) - 1)
