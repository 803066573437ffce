"""Which launches must follow which, against the definition, and programs that run in any order it permits."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from conftest import DRIVERS
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import Device, nn, optim
from penstock.drivers.host import HostDriver
from penstock.kernels.hazards import Range, Touched, orderings

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


def meet(one: Range, other: Range) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def conflict(first: Touched, second: Touched) -> bool:
    pairs = [(first.writes, second.reads), (first.writes, second.writes), (first.reads, second.writes)]
    return any(meet(a, b) for left, right in pairs for a in left for b in right)


def reached(after: list[list[int]]) -> list[set[int]]:
    """For each launch all that it follows."""
    found: list[set[int]] = []
    for needed in after:
        found.append(set(needed).union(*(found[one] for one in needed)))
    return found


@given(st.lists(launches, max_size=12))
def test_conflicts_and_nothing_else_are_ordered(touched: list[Touched]) -> None:
    found = reached(orderings(touched, {}))
    needed: list[set[int]] = [set() for _ in touched]
    for first, second in combinations(range(len(touched)), 2):
        if conflict(touched[first], touched[second]):
            needed[second] |= {first, *needed[first]}
    assert found == needed


@given(st.lists(launches, max_size=12))
def test_nothing_is_waited_for_twice(touched: list[Touched]) -> None:
    after = orderings(touched, {})
    found = reached(after)
    for needed in after:
        for one, other in combinations(needed, 2):
            assert one not in found[other]
            assert other not in found[one]


def test_a_result_in_the_place_of_an_input_waits_for_those_that_read_it() -> None:
    read, write = Touched(((1, 0, 8),), ((2, 0, 8),)), Touched((), ((3, 0, 8),))
    assert orderings([read, write], {}) == [[], []]
    assert orderings([read, write], {3: [1]}) == [[], [0]]


def test_any_order_that_is_permitted_gives_the_same_training() -> None:
    """The device runs the launches of a captured step in an order of its own, late, on poisoned memory."""
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

        batches = np.random.default_rng(0).integers(0, 31, (8, 3, 13))
        losses.append([step(ps.asarray(one, device=device)).item() for one in batches])
        device.close()
    assert losses[0] == losses[1]
