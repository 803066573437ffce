"""Calls and steps of tokens that are like the last: they do less on the host, and compute the same."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from typing import Any

import model_cases as cases
import numpy as np
import pytest
from conftest import DRIVERS
from test_road import Counted

import penstock as ps
from penstock import Device
from penstock.models import LanguageModel, Sampling, scheduling
from penstock.models.decoders import RECENT, Decoder
from penstock.models.sequences import TokenSequence, Wanted
from penstock.tensor.repeating import Repeated

SIZES = {**cases.LLAMA, "vocab_size": 40, "max_position_embeddings": 128, "initializer_range": 0.3}
MOST_CALLS = 110  # of Python functions in a step beside its launches, whatever the number of layers


class Sums:
    """A jitted function that adds a product to two tensors in place."""

    def __init__(self, device: Device) -> None:
        self.weight = ps.asarray(np.array([[1, 2], [3, 4]], np.float32), device=device)
        self.total = ps.zeros((2,), device=device)
        self.count = ps.zeros((2,), dtype=ps.int32, device=device)
        self.x = ps.asarray(np.array([1, 10], np.float32), device=device)

        @ps.jit
        def add(x: ps.Tensor) -> None:
            self.total += x @ self.weight
            self.count += 1

        self.add: Any = add
        for _ in range(2):
            add(self.x)
        self.again: Repeated = add.repeated(self.x)

    def check(self, calls: int, more: float = 0.0) -> None:
        np.testing.assert_array_equal(self.total.numpy(), calls * np.array([31, 42]) + more)
        np.testing.assert_array_equal(self.count.numpy(), [calls, calls])


@pytest.fixture
def sums(device: Device) -> Sums:
    made = Sums(device)
    if made.again is None:
        pytest.fail("a function that changes tensors in place can be repeated")
    return made


def test_a_repeated_call_computes_the_same(sums: Sums) -> None:
    assert [sums.again() for _ in range(5)] == [True] * 5
    sums.check(7)
    sums.add(sums.x)
    assert not sums.again(), "since another run was the last"
    sums.check(8)


def test_a_repeated_call_refuses_what_has_changed(sums: Sums) -> None:
    assert sums.again()
    sums.weight += 1
    assert not sums.again()
    sums.add(sums.x)
    sums.check(4, more=11)


def test_a_repeated_call_overwrites_nothing_that_others_need(sums: Sums) -> None:
    before = sums.total.detach()
    assert not sums.again()
    sums.add(sums.x)
    np.testing.assert_array_equal(before.numpy(), [62, 84])
    sums.check(3)


def test_functions_with_results_are_not_repeated(device: Device) -> None:
    x = ps.ones((2,), device=device)
    double: Any = ps.jit(lambda x: x + x)
    double(x)
    assert double.repeated(x) is None


# Steps of tokens


@pytest.fixture(scope="module", params=[name for name in ("opencl-svm", "opencl-device") if name in DRIVERS])
def model(request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    device = Device.over(DRIVERS[request.param]())
    ps.random.manual_seed(3)
    made = ps.models.build(SIZES, device=device)
    made.eval()
    yield made
    gc.collect()
    device.close()


def test_functions_that_write_the_same_integers_are_repeated_in_turn(device: Device) -> None:
    count = ps.zeros((2,), dtype=ps.int32, device=device)

    def add(x: ps.Tensor) -> None:
        nonlocal count
        count += x

    given = [ps.asarray(np.full(2, value, np.int32), device=device) for value in (1, 10)]
    functions: list[Any] = [ps.jit(add), ps.jit(add)]
    for _ in range(2):
        for function, x in zip(functions, given, strict=True):
            function(x)
    again = [function.repeated(x) for function, x in zip(functions, given, strict=True)]
    assert [each() for _ in range(3) for each in again] == [True] * 6
    np.testing.assert_array_equal(count.numpy(), [55, 55])
    count[0] = 0  # another node, in other memory perhaps
    functions[0](given[0])
    np.testing.assert_array_equal(count.numpy(), [1, 56])


def test_prompts_are_repeated_in_the_memory_of_those_before(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 2, 3], [9] * 9, [30, 4], [5] * 15]
    monkeypatch.setattr(Repeated, "of", lambda captured, arguments: None)
    slow = [model.generate(prompt, 5, temperature=0, stop_tokens=()).ids for prompt in prompts]
    monkeypatch.undo()
    repeated: list[int] = []
    call = Repeated.__call__
    monkeypatch.setattr(
        Repeated, "__call__", lambda self: repeated.append(self._arguments[0].ndim) or call(self)
    )
    kept: list[Any] = []
    for turn in range(3):
        fast = [model.generate(prompt, 5, temperature=0, stop_tokens=()).ids for prompt in prompts]
        assert fast == slow
        if turn == 1:  # others have the memory of pages: the programs run on other pages
            device: Any = model.head_weight.device
            kept = [device.empty(nbytes) for _, nbytes in device.pool.idle()]
    del kept
    device = model.head_weight.device
    if not device.capabilities.shared_memory:
        assert repeated.count(2) >= 8, "steps of prompts"


def test_steps_are_repeated_until_a_sequence_needs_a_page(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 2, 3], [4] * 20, [5, 6]]
    repeated: list[bool] = []
    call = Repeated.__call__

    def noted(self: Repeated) -> bool:
        repeated.append(call(self))
        return repeated[-1]

    monkeypatch.setattr(Repeated, "__call__", noted)
    fast = [each.ids for each in model.generate(prompts, 40, temperature=0, stop_tokens=())]
    assert all(repeated)
    assert len(repeated) > 28
    monkeypatch.setattr(Repeated, "of", lambda captured, arguments: None)
    vars(model)["_decoders"] = None  # which knows the last steps
    repeated.clear()
    slow = [each.ids for each in model.generate(prompts, 40, temperature=0, stop_tokens=())]
    assert not repeated
    assert fast == slow


def test_sequences_that_leave_and_get_pages_change_the_step_in_place(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {(1, 2, 3): 40, (4,) * 20: 9, (5, 6): 23, (7, 8, 9): 30, (10,): 37}
    alone = [model.generate(list(ids), count, temperature=0).ids for ids, count in wanted.items()]
    decoder = Decoder(model, 8, 40)
    decoder.begin()
    given: list[list[int]] = [[] for _ in wanted]
    scheduler = scheduling.Scheduler(decoder, lambda sequence, piece: given[sequence.index].append(piece.id))
    built: list[int] = []
    first = Decoder._first_tokens
    monkeypatch.setattr(
        Decoder, "_first_tokens", lambda self, rows: built.append(len(rows)) or first(self, rows)
    )
    for number, (ids, count) in enumerate(wanted.items()):
        scheduler.add(TokenSequence(model, number, list(ids), Wanted(count, Sampling(temperature=0))))
    while scheduler.busy:
        scheduler.advance()
    assert given == alone
    assert scheduler.pages.used == 0
    if not model.head_weight.device.capabilities.shared_memory:
        # Programs of 8, 4, 2 rows and of one, each also after the step of prompts.
        assert len(built) <= 6, built
    decoder.release()


def test_weights_that_change_during_generation_take_effect(model: LanguageModel) -> None:
    pieces = model.stream([1, 2, 3], 30, temperature=0, stop_tokens=())
    first = [next(pieces).id for _ in range(8)]
    weight, ids = model.head_weight, []
    before = ps.asarray(weight.numpy(), device=weight.device)
    try:
        with ps.no_grad():
            weight.copy_(before * 0)  # so that all logits are equal, and the likeliest token is the first
        ids = [piece.id for piece in pieces]
    finally:
        with ps.no_grad():
            weight.copy_(before)
    assert len(first) + len(ids) == 30
    assert ids[-16:] == [0] * 16
    assert any(first)


def test_a_step_of_tokens_takes_few_python_calls(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = model.head_weight.device
    decoder, ids = Decoder(model, 1, 8), []
    decoder.begin()
    scheduler = scheduling.Scheduler(decoder, lambda sequence, piece: ids.append(piece.id))
    scheduler.add(TokenSequence(model, 0, [1, 2], Wanted(60, Sampling(temperature=0))))
    for _ in range(4):
        scheduler.advance()
    replay = device.driver.replay
    counted = Counted(device, monkeypatch)

    def replayed(*args: Any) -> Any:
        counted._launching = True
        try:
            return replay(*args)
        finally:
            counted._launching = False

    monkeypatch.setattr(device.driver, "replay", replayed)
    usual = statistics.median(counted.of(scheduler.advance) for _ in range(20))
    assert usual <= MOST_CALLS + (
        0 if device.capabilities.shared_memory else 40
    )  # a copy takes further calls
    while scheduler.busy:
        scheduler.advance()
    assert len(ids) == 60
    assert scheduler.pages.used == 0
    decoder.release()


def test_tokens_stay_until_they_are_read() -> None:
    assert scheduling._AHEAD + 1 < RECENT
