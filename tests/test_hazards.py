"""Which launches must follow which, against the definition, and programs that run in any order it permits."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from conftest import DRIVERS, examples
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import CPU, compiled, plain

import penstock as ps
from penstock import Device, nn, optim
from penstock.compiler.launches import arranged, dependencies, launch_parts
from penstock.compiler.schedule import Copy
from penstock.drivers.host import HostDriver
from penstock.graph import contraction, elementwise
from penstock.kernels.concatenation import Call
from penstock.kernels.hazards import Range, Touched, orderings
from penstock.kernels.sizes import Sizes
from penstock.kernels.source import ALIGNMENT
from penstock.tuning_cache import TuningCache

ranges = st.builds(
    lambda memory, start, size: (memory, start, start + size),
    st.integers(0, 1),
    st.integers(0, 6),
    st.integers(1, 4),
)
launches = st.builds(
    lambda reads, writes: Touched(tuple(reads), tuple(writes)),
    st.lists(ranges, max_size=3),
    st.lists(ranges, max_size=2),
)


def meet(first: Range, second: Range) -> bool:
    return first[0] == second[0] and first[1] < second[2] and second[1] < first[2]


def conflict(first: Touched, second: Touched) -> bool:
    pairs = [(first.writes, second.reads), (first.writes, second.writes), (first.reads, second.writes)]
    return any(meet(a, b) for left, right in pairs for a in left for b in right)


def reached(after: list[list[int]]) -> list[set[int]]:
    """For each launch, all launches that it has to follow."""
    result: list[set[int]] = []
    for needed in after:
        result.append(set(needed).union(*(result[node] for node in needed)))
    return result


@given(st.lists(launches, max_size=12))
def test_conflicts_and_nothing_else_are_ordered(touched: list[Touched]) -> None:
    result = reached(orderings(touched, {}))
    needed: list[set[int]] = [set() for _ in touched]
    for first, second in combinations(range(len(touched)), 2):
        if conflict(touched[first], touched[second]):
            needed[second] |= {first, *needed[first]}
    assert result == needed


@given(st.lists(launches, max_size=12))
def test_nothing_is_waited_for_twice(touched: list[Touched]) -> None:
    after = orderings(touched, {})
    result = reached(after)
    for needed in after:
        for value, other in combinations(needed, 2):
            assert value not in result[other]
            assert other not in result[value]


def test_a_result_in_the_place_of_an_input_waits_for_those_that_read_it() -> None:
    read, write = Touched(((1, 0, 8),), ((2, 0, 8),)), Touched((), ((3, 0, 8),))
    assert orderings([read, write], {}) == [[], []]
    assert orderings([read, write], {3: [1]}) == [[], [0]]


def test_merged_kernels_follow_copies_from_their_scratch() -> None:
    """The scratch of a gradient of an embedding, in the place of a value that is on its way to the host."""
    rows, index = np.ones((32, 8), np.float32), np.arange(32, dtype=np.int32) % 5
    given = [plain(rows * at) for at in range(2)]
    wanted = [
        elementwise.exp(contraction.scatter_add(values, plain(index), length))
        for values, length in zip(given, (5, 7), strict=True)
    ]
    schedule, _ = compiled(wanted, CPU)
    scratch = {part for step in schedule.groups for call in step.calls for part in call.scratch}
    ((launch,),) = arranged(launch_parts(schedule, CPU), schedule, CPU, None, Sizes(TuningCache("")))
    assert isinstance(launch, Call)
    assert scratch
    assert set(launch.scratch) == scratch
    for arena, start, end in scratch:
        copy = Copy(0, (len(schedule.buffers), 0), (arena, start // ALIGNMENT), end - start, "out")
        assert dependencies(schedule, [copy, launch], {}) == [[], [0]]


def test_any_order_that_is_permitted_gives_the_same_training() -> None:
    """The device runs the launches of a captured step in any permitted order, late, on poisoned memory."""
    losses = []
    for driver in (HostDriver(), DRIVERS["host-far"]()):
        device = Device.over(driver)
        ps.random.manual_seed(5)
        model = nn.GPT(vocab_size=31, context=12, width=16, layers=2, heads=2, device=device)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, clip_norm=1.0)

        @ps.jit
        def step(tokens: ps.Tensor, model: nn.GPT = model, optimizer: optim.AdamW = optimizer) -> ps.Tensor:
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            return loss

        batches = np.random.default_rng(0).integers(0, 31, (examples(8, quick=4), 3, 13))
        losses.append([step(ps.asarray(batch, device=device)).item() for batch in batches])
        device.close()
    assert losses[0] == losses[1]
