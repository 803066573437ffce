"""Independent steps, and the order of steps that overwrite values, as pure functions."""

from __future__ import annotations

import random

import pytest

from penstock.plan import turns
from penstock.plan.order import Work, ordered
from penstock.plan.turns import Memory, in_turns

SIZE = 1000


def together(
    steps: list[Work], alike: list[str | None], kept: set[int] | frozenset[int] = frozenset(), most: int = 64
) -> list[list[int]]:
    count = 1 + max(value for step in steps for value in (*step.reads, *step.writes))
    return in_turns(steps, alike, [SIZE] * count, frozenset(kept), most)


def test_independent_steps_that_are_alike_run_together() -> None:
    steps = [Work((0,), (1,)), Work((0,), (2,)), Work((0,), (3,)), Work((1, 2, 3), (4,))]
    assert together(steps, ["map", "row", "map", "map"]) == [[1], [0, 2], [3]]
    assert together(steps, [None] * 4) == [[0], [1], [2], [3]]
    assert together(steps, ["map"] * 4, most=2) == [[0], [1, 2], [3]]
    assert in_turns([], [], [], frozenset(), 2) == []


def test_partial_sums_of_many_values_take_two_turns() -> None:
    steps, parts = [], 20
    for number in range(parts):  # a value, the sums of its parts, and their sum
        at = 3 * number
        steps += [Work((), (at,)), Work((at,), (at + 1,)), Work((at + 1,), (at + 2,))]
    steps.append(Work(tuple(range(2, 3 * parts, 3)), (3 * parts,)))
    result = together(steps, ["product", "row", "row"] * parts + ["map"])
    assert [len(bundle) for bundle in result] == [parts, parts, parts, 1]


def updates(parts: int) -> list[Work]:
    """Products that leave a gradient, each with its update."""
    return [work for at in range(parts) for work in (Work((), (at,)), Work((at,), (parts + at,)))]


def test_what_waits_for_others_takes_little_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 32
    outputs = set(range(parts, 2 * parts))
    alike: list[str | None] = [None, "map"] * parts
    assert together(updates(parts), alike, outputs)[-1] == list(range(1, 2 * parts, 2)), "all at the end"
    monkeypatch.setattr(turns, "_LITTLE", 3 * SIZE)
    result = together(updates(parts), alike, outputs)
    assert max(map(len, result)) == 4, "one gradient is live anyway, and three more may be"
    assert len(result) == parts + parts // 4


def test_where_there_is_room_beside_activations_more_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_LITTLE", 0)
    parts = 8
    activations = range(2 * parts, 4 * parts)
    forward = [Work((), (at,)) for at in activations]
    backward = [
        Work((*work.reads, *activations[at :: 2 * parts]), work.writes)
        for at, work in enumerate(updates(parts))
    ]
    alike: list[str | None] = [*[None] * (2 * parts), *[None, "map"] * parts]
    result = together(forward + backward, alike, set(range(parts, 2 * parts)))
    assert len(result[-1]) == parts, "a gradient takes the place of two activations"


def test_what_is_large_does_not_wait_until_it_is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    alike: list[str | None] = [None, "map"] * 4
    monkeypatch.setattr(turns, "_HOT", SIZE - 1)
    assert together(updates(4), alike, {4, 5, 6, 7}) == [[at] for at in range(8)]
    # With nothing between them it does not get cold.
    steps = [*updates(4)[::2], *updates(4)[1::2]]
    assert together(steps, [None] * 4 + ["map"] * 4, {4, 5, 6, 7}) == [[0], [1], [2], [3], [4, 5, 6, 7]]


def test_a_reader_is_not_moved_behind_what_replaces_its_value() -> None:
    # Value 0 is given; step 1 replaces it, and step 0, which reads it, could run as late as step 2.
    steps = [Work((0,), (1,)), Work((0,), (2,), (0,)), Work((3,), (4,))]
    assert together(steps, ["map"] * 3, {0, 2, 3})[0] == [0]
    free = [step._replace(replaces=()) for step in steps]
    assert together(free, ["map"] * 3, {0, 2, 3}) == [[0, 1, 2]]


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_stay_right_and_within_their_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = random.Random(seed)
    monkeypatch.setattr(turns, "_LITTLE", choice.choice((0, 2000, 1 << 30)))
    given = choice.randint(1, 4)
    nbytes = [choice.randint(0, 900) for _ in range(given)]
    steps, alike, left = [], [], list(range(given))
    for _ in range(choice.randint(1, 60)):
        reads = tuple(choice.sample(range(len(nbytes)), min(len(nbytes), choice.randint(0, 3))))
        writes = tuple(range(len(nbytes), len(nbytes) + choice.randint(1, 2)))
        replaces = (left.pop(),) if left and choice.random() < 0.2 else ()
        nbytes += [choice.randint(0, 900) for _ in writes]
        steps.append(Work(reads, writes, replaces))
        alike.append(choice.choice((None, "map", "row")))
    kept = frozenset(range(given)) | set(choice.sample(range(len(nbytes)), len(nbytes) // 5))
    result = in_turns(steps, alike, nbytes, kept, 7)
    assert sorted(step for bundle in result for step in bundle) == list(range(len(steps)))
    turn = {step: number for number, bundle in enumerate(result) for step in bundle}
    for bundle in result:
        assert len(bundle) <= 7
        assert len({alike[step] for step in bundle}) == 1
        assert alike[bundle[0]] is not None or len(bundle) == 1
    writer = {value: number for number, step in enumerate(steps) for value in step.writes}
    for number, step in enumerate(steps):
        for value in step.reads:
            assert value not in writer or turn[writer[value]] < turn[number], "read before it is written"
        for value in step.replaces:
            for reader in range(number):
                assert value not in steps[reader].reads or turn[reader] < turn[number], (
                    "read after it is gone"
                )
    before = peak([[number] for number in range(len(steps))], steps, nbytes, kept)
    assert peak(result, steps, nbytes, kept) <= before + max(before // 16, turns._LITTLE)


@pytest.mark.parametrize("seed", range(60))
def test_with_what_is_overwritten_the_peak_does_not_grow(seed: int) -> None:
    choice = random.Random(seed)
    nbytes, steps, memory = [0], list[Work](), list[Memory]()
    for number in range(choice.randint(2, 40)):
        recent = range(max(0, number - 5), number + 1)
        reads = tuple(choice.sample(recent, min(len(recent), choice.randint(1, 2))))
        steps.append(Work(reads, (number + 1,)))
        over = (tuple(range(len(reads))),) if choice.random() < 0.8 else ()
        memory.append(Memory(over, choice.choice((0, 0, 500))))
        nbytes.append(choice.choice((0, 300, 300, 900)))
    kept = frozenset({0, len(steps)})
    alike = [choice.choice((None, "map", "row")) for _ in steps]
    result = in_turns(steps, alike, nbytes, kept, 7, memory)
    before = peak([[number] for number in range(len(steps))], steps, nbytes, kept, memory)
    assert peak(result, steps, nbytes, kept, memory) <= before


def test_a_value_that_is_overwritten_is_not_read_later() -> None:
    """Step 3 overwrites the large value that step 1 reads; step 1 may not wait for step 4, which is alike."""
    steps = [Work((0,), (1,)), Work((1,), (2,)), Work((0,), (3,)), Work((1, 3), (4,)), Work((0,), (5,))]
    alike: list[str | None] = [None, "map", None, None, "map"]
    nbytes, kept = [0, 900, 10, 10, 900, 10], frozenset({0, 2, 4, 5})
    memory = [Memory(), Memory(), Memory(), Memory(((0,),)), Memory()]
    assert in_turns(steps, alike, nbytes, kept - {4}, 2, memory) == [[at] for at in range(5)]
    assert in_turns(steps, alike, nbytes, kept - {4}, 2)[-1] == [1, 4]


def peak(
    turns: list[list[int]],
    steps: list[Work],
    nbytes: list[int],
    kept: frozenset[int],
    memory: list[Memory] | None = None,
) -> int:
    """The peak of live bytes in a turn; with `memory`, results of one reader overwrite what dies there."""
    live: dict[int, tuple[int, int]] = {}
    for turn, numbers in enumerate(turns):
        for number in numbers:
            live |= {value: (turn, turn) for value in steps[number].writes if value not in kept}
    for turn, numbers in enumerate(turns):
        for value in {value for number in numbers for value in steps[number].reads if value in live}:
            live[value] = (live[value][0], turn)
    sums = [
        sum(nbytes[value] for value, (born, dies) in live.items() if born <= turn <= dies)
        for turn in range(len(turns))
    ]
    for turn, numbers in enumerate(turns if memory else ()):
        for number in numbers:
            own = (memory or [])[number]
            others = {value for other in numbers if other != number for value in steps[other].reads}
            sums[turn] += own.scratch
            for result, over in zip(steps[number].writes, own.over, strict=False):
                given = {steps[number].reads[at] for at in over} & live.keys() - others
                dying = [value for value in given if live[value][1] == turn]
                if result not in kept and any(nbytes[value] >= nbytes[result] for value in dying):
                    sums[turn] -= nbytes[result]
    return max(sums, default=0)


# The order


def test_a_value_is_replaced_after_it_was_read() -> None:
    # A weight (0), its gradient (2) and its update (3), which could come before the weight is read once more.
    steps = [Work((1,), (2,)), Work((0, 2), (3,), (0,)), Work((0, 1), (4,)), Work((4,), (5,))]
    result = ordered(steps, [500, 10, 10, 500, 10, 10], frozenset({0, 1, 3, 5}))
    assert result.index(2) < result.index(1)


def test_two_that_replace_what_the_other_reads_still_run() -> None:
    steps = [Work((0, 1), (2,), (0,)), Work((0, 1), (3,), (1,))]
    assert sorted(ordered(steps, [8, 8, 8, 8], frozenset(range(4)))) == [0, 1]
