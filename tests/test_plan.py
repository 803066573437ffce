"""The memory planner: live values share no byte, reuse in place is legal, and little memory is wasted."""

from __future__ import annotations

import random
import runpy
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.arena import Plan, Value, plan
from penstock.plan.order import Work, least_deferred, ordered

UNIT = 256  # bytes
graphs = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/planner_graphs.py")))


def units(nbytes: int, alignment: int = UNIT) -> int:
    return -(-nbytes // alignment)


def check(values: list[Value], alignment: int, made: Plan) -> None:
    """Check all guarantees of a plan, by comparing every pair and every step."""
    assert len(made.offsets) == len(values)
    assert all(offset >= 0 and offset % alignment == 0 for offset in made.offsets)
    places = [
        range(offset // alignment, offset // alignment + units(value.nbytes, alignment))
        for value, offset in zip(values, made.offsets, strict=True)
    ]
    takeovers = []  # (dead, heir)
    for item, other in combinations(range(len(values)), 2):
        dead, heir = sorted((item, other), key=lambda i: values[i].born)
        both_live = values[heir].born <= values[dead].dies
        if both_live and max(places[item].start, places[other].start) < min(
            places[item].stop, places[other].stop
        ):
            assert dead in values[heir].may_alias
            assert values[dead].dies == values[heir].born
            assert places[dead].start == places[heir].start
            assert len(places[heir]) <= len(places[dead])
            takeovers.append((dead, heir))
    assert max(Counter(dead for dead, _ in takeovers).values(), default=1) == 1
    assert max(Counter(heir for _, heir in takeovers).values(), default=1) == 1

    live = [
        len(
            {
                unit
                for value, place in zip(values, places, strict=True)
                if value.born <= step <= value.dies
                for unit in place
            }
        )
        for step in {value.born for value in values} | {value.dies for value in values}
    ]
    assert made.lower_bound == max(live, default=0) * alignment
    assert made.arena_bytes == max((place.stop for place in places if place), default=0) * alignment
    assert made.lower_bound <= made.arena_bytes
    assert made.gap == pytest.approx(made.arena_bytes / made.lower_bound - 1 if made.lower_bound else 0.0)


@st.composite
def lifetimes(draw: st.DrawFn) -> list[Value]:
    """Values at steps that need not be consecutive; many may reuse each other's memory in place."""
    nbytes = st.one_of(st.sampled_from([0, 1, UNIT, 2 * UNIT, 3 * UNIT]), st.integers(0, 40 * UNIT))
    stretch, first = draw(st.integers(1, 1000)), draw(st.integers(-1000, 1000))
    spans = draw(st.lists(st.tuples(nbytes, st.integers(0, 12), st.integers(0, 6)), max_size=25))
    values = [Value(n, first + born * stretch, first + (born + life) * stretch) for n, born, life in spans]
    dying: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        dying.setdefault(value.dies, []).append(i)
    for i, value in enumerate(values):
        candidates = [k for k in dying.get(value.born, []) if k != i]
        if candidates:
            over = draw(st.lists(st.sampled_from(candidates), unique=True, max_size=4))
            values[i] = value._replace(may_alias=tuple(over))
    return values


@settings(max_examples=400, deadline=None)
@given(lifetimes(), st.sampled_from([1, 64, UNIT]))
def test_no_two_live_values_share_a_byte(values: list[Value], alignment: int) -> None:
    made = plan(values, alignment)
    check(values, alignment, made)
    assert plan(values, alignment) == made


@pytest.mark.parametrize(
    "values",
    [
        graphs.gpt_values(1),
        graphs.mlp_values(12),
        graphs.branching_values(1, 150),
        graphs.branching_values(2, 400),
    ],
)
def test_graphs_are_planned_without_conflicts(values: list[Value]) -> None:
    check(values, UNIT, plan(values, UNIT))


def test_early_steps_that_are_deferred_do_not_decide_between_orders() -> None:
    """The greedy order has few large values at once, but begins with all that is small."""
    steps = [Work((0,), (1,)), Work((0,), (2,)), Work((1,), (3,)), Work((2,), (4,))]
    steps += [Work((1,), (5,)), Work((2,), (6,)), Work((3, 4), (7,)), Work((5, 6), (8,))]
    steps += [Work((0,), (9 + at,)) for at in range(60)]
    steps += [Work((8, 9 + at), (69 + at,)) for at in range(60)]
    nbytes, kept = [1, 100, 100, *[10] * 4, 1, 1, *[5] * 60, *[1] * 60], frozenset({0, 7, 8, *range(69, 129)})

    def both_at_once(order: list[int]) -> bool:
        return max(order.index(0), order.index(1)) < min(
            max(map(order.index, ends)) for ends in ((2, 4), (3, 5))
        )

    assert both_at_once(ordered(steps, nbytes, kept))
    order = least_deferred(steps, nbytes, kept)
    assert sorted(order) == list(range(len(steps)))
    assert not both_at_once(order)
    assert order.index(8) > order.index(7)


def test_nothing_needs_nothing() -> None:
    assert plan([], UNIT) == Plan((), 0, 0)
    assert plan([Value(0, 0, 5), Value(0, 2, 3, (0,))], UNIT) == Plan((0, 0), 0, 0)
    assert plan([], UNIT).gap == 0.0


def test_values_without_bytes_take_none() -> None:
    made = plan([Value(0, 0, 9), Value(UNIT, 0, 9), Value(0, 9, 9, (1,)), Value(1, 9, 9, (0,))], UNIT)
    assert made.arena_bytes == made.lower_bound == 2 * UNIT
    assert made.offsets[0] == made.offsets[2] == 0


def test_sizes_are_rounded_up() -> None:
    assert plan([Value(1, 0, 0), Value(UNIT + 1, 0, 0)], UNIT).arena_bytes == 3 * UNIT


def in_units(*spans: tuple[int, int, int] | tuple[int, int, int, tuple[int, ...]]) -> list[Value]:
    return [Value(n * UNIT, *rest) for n, *rest in spans]  # type: ignore[arg-type]


def test_a_result_is_written_over_its_dead_input() -> None:
    made = plan(in_units((4, 0, 1), (4, 1, 2, (0,)), (4, 2, 3, (1,))), UNIT)
    assert made == Plan((0, 0, 0), 4 * UNIT, 4 * UNIT)


def test_without_leave_both_are_kept() -> None:
    assert plan(in_units((4, 0, 1), (4, 1, 2)), UNIT).arena_bytes == 8 * UNIT


def test_one_value_takes_a_place() -> None:
    made = plan(in_units((4, 0, 1), (4, 1, 2, (0,)), (4, 1, 2, (0,))), UNIT)
    assert made.arena_bytes == made.lower_bound == 8 * UNIT


@pytest.mark.parametrize(
    ("sizes", "best"),
    [((9, 3, 5), 1), ((9, 2, 5), 2), ((9, 2, 2), 0), ((3, 3, 9), 0)],
    ids=["equal", "smallest", "only", "first"],
)
def test_the_place_that_fits_best_is_taken(sizes: tuple[int, ...], best: int) -> None:
    values = in_units(*((size, 0, 1) for size in sizes), (3, 1, 1, (0, 1, 2)))
    made = plan(values, UNIT)
    assert made.offsets[3] == made.offsets[best]
    assert made.arena_bytes == sum(sizes) * UNIT


def test_a_place_too_small_is_not_taken() -> None:
    assert plan(in_units((3, 0, 1), (4, 1, 1, (0,))), UNIT).arena_bytes == 7 * UNIT


def test_a_small_value_does_not_hold_a_large_place_that_others_need() -> None:
    made = plan(in_units((10, 0, 1), (1, 1, 3, (0,)), (10, 2, 3)), UNIT)
    assert made.arena_bytes == made.lower_bound == 11 * UNIT


def test_what_still_lives_is_not_written_over() -> None:
    made = plan(in_units((4, 0, 3), (4, 1, 2, (0,))), UNIT)
    assert made.arena_bytes == 8 * UNIT


def test_an_heir_of_this_step_is_not_taken_over() -> None:
    values = in_units((4, 0, 1), (4, 1, 1, (0,)), (4, 1, 2, (1,)))
    check(values, UNIT, plan(values, UNIT))


def test_takeovers_lower_the_bound() -> None:
    values = graphs.gpt_values(2)
    kept = [value._replace(may_alias=()) for value in values]
    assert plan(values, UNIT).lower_bound < plan(kept, UNIT).lower_bound


@pytest.mark.parametrize(
    "shape",
    [
        (1,),
        (6,),
        (155,),
        (2, 1, 64, 128, 4, 50257),
        (12, 2, 1024, 768, 12, 50257),
        (24, 1, 512, 1024, 16, 32000),
    ],
)
def test_gpts_waste_less_than_one_percent(shape: tuple[int, ...]) -> None:
    assert plan(graphs.gpt_values(*shape), UNIT).gap < 0.01


@pytest.mark.parametrize(
    ("layers", "batch", "widths"),
    [
        (1, 64, (784, 10)),
        (5, 64, (784, 512, 2048, 1000)),
        (20, 256, (784, 300, 10)),
        (50, 512, (64, 1024, 333)),
        (1100, 64, (784, 512, 2048, 1000)),
    ],
)
def test_mlps_waste_less_than_one_percent(layers: int, batch: int, widths: tuple[int, ...]) -> None:
    assert plan(graphs.mlp_values(layers, batch, widths), UNIT).gap < 0.01


@pytest.mark.parametrize(("count", "seeds"), [(100, 10), (300, 10), (1000, 10), (3000, 10), (10_000, 3)])
def test_random_graphs_mostly_waste_less_than_one_percent(count: int, seeds: int) -> None:
    """For most graphs: for some, the bounded search finds no plan so close to the bound."""
    gaps = sorted(plan(graphs.branching_values(seed, count), UNIT).gap for seed in range(seeds))
    assert gaps[seeds * 8 // 10 - 1] < 0.01
    assert gaps[-1] < 0.03


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_order_of_steps_is_possible_and_needs_no_more_than_the_given_one(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(1, 40)
    steps = [
        Work(tuple({draw.randrange(number) for _ in range(draw.randrange(4))} if number else ()), (number,))
        for number in range(count)
    ]
    nbytes = [draw.randrange(1000) for _ in range(count)]
    kept = frozenset(number for number in range(count) if draw.random() < 0.2)
    order = ordered(steps, nbytes, kept)
    assert sorted(order) == list(range(count))
    place = {number: at for at, number in enumerate(order)}
    assert all(place[value] < place[number] for number in order for value in steps[number].reads)
    assert live(order, steps, nbytes, kept) <= live(range(count), steps, nbytes, kept)


def live(order: Iterable[int], steps: list[Work], nbytes: list[int], kept: frozenset[int]) -> int:
    """The peak of live bytes, counted naively."""
    done, most = [], 0
    numbers = list(order)
    for at, number in enumerate(numbers):
        done.append(number)
        rest = {value for later in numbers[at:] for value in steps[later].reads}
        most = max(most, sum(nbytes[v] for v in done if v not in kept and (v in rest or v == number)))
    return most


def test_parts_of_a_sum_are_done_one_after_the_other() -> None:
    # Four large parts (0-3), each to one of a chain of sums (4-7) that begins with the last part.
    steps = [Work((), (part,)) for part in range(4)]
    steps += [Work((3 - at, 3 + at) if at else (3,), (4 + at,)) for at in range(4)]
    assert ordered(steps, [100] * 4 + [1] * 4, frozenset({7})) == [3, 4, 2, 5, 1, 6, 0, 7]
