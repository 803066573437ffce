"""The engine: requests that come, go and are cancelled at any time give what each prompt gives alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import model_cases as cases
import numpy as np
import pytest
from conftest import DRIVERS, WEBGPU_KINDS, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import DeviceError, EngineClosed, QueueFull
from penstock.models import Engine, LanguageModel, Piece, Request, Sampling, scheduling
from penstock.models.decoders import Decoder
from penstock.models.paging import PAGE, Pages, page_bytes
from penstock.models.sequences import TokenSequence, Wanted

SIZES = {**cases.LLAMA, "vocab_size": 40, "num_hidden_layers": 1, "max_position_embeddings": 96}
CONTEXT = 96


def built(device: Any, **changes: Any) -> LanguageModel:
    ps.random.manual_seed(3)
    model = ps.models.build({**SIZES, "initializer_range": 0.3, **changes}, device=device)
    model.eval()
    return model


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return built("host")


@pytest.fixture(
    scope="module", params=["opencl-device", *(pytest.param(k, marks=pytest.mark.slow) for k in WEBGPU_KINDS)]
)
def compiled(request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    """A model on a device that compiles its programs."""
    device = ps.Device.over(DRIVERS[request.param]())
    yield built(device)
    gc.collect()
    device.close()


def by_whole_model(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens, by the logits of the whole sequence each time."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(ps.asarray([ids], device=model.head_weight.device)).numpy()[0, -1].argmax()))
    return ids[len(prompt) :]


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 40, length).tolist() for length in lengths]


# Whatever comes and goes


class Script:
    """Sequences in a scheduler, driven step by step: when each comes, and when it is cancelled."""

    def __init__(self, decoder: Decoder, slots: int, pages: int) -> None:
        self.ids: dict[TokenSequence, list[int]] = {}
        self.scheduler = scheduling.Scheduler(decoder, self._give)
        # Fewer than the decoder has, whose programs serve all scripts.
        self.scheduler.pages = Pages(pages)
        self.scheduler._slots = list(range(slots))

    def _give(self, sequence: TokenSequence, piece: Piece) -> None:
        self.ids[sequence].append(piece.id)

    def add(self, sequence: TokenSequence) -> None:
        self.ids[sequence] = []
        self.scheduler.add(sequence)

    def check(self) -> None:
        """Every page is free, or used by exactly those sequences that have it in their list."""
        scheduler, pages = self.scheduler, self.scheduler.pages
        users = Counter(page for sequence in scheduler.running for page in sequence.pages)
        assert pages.used == len(users)
        assert [users[page] for page in range(pages.count)] == pages._users
        assert sorted([*pages._free, *pages._unused, *users]) == list(range(pages.count))
        assert len({sequence.slot for sequence in scheduler.running}) == len(scheduler.running)
        assert all(not sequence.pages and sequence.slot < 0 for sequence in scheduler.waiting)


# A request: its prompt's length, tokens asked for, the step before which it comes, and is cancelled.
REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.integers(1, 12),
        st.integers(0, 12),
        st.none() | st.integers(0, 20),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)


@pytest.fixture(scope="module")
def decoder(model: LanguageModel) -> Decoder:
    made = Decoder(model, 4, 12)
    made.begin()
    return made


@given(REQUESTS, st.integers(1, 4), st.integers(4, 12))
@settings(max_examples=examples(30, 8), deadline=None)
def test_sequences_that_come_and_go_get_the_tokens_that_they_get_alone(
    model: LanguageModel, decoder: Decoder, requests: list[Any], slots: int, pages: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "CHUNK", 16)  # so that there are few programs, and prompts of several steps
        run_script(Script(decoder, slots, pages), model, requests)


@cache
def alone_ids(model: LanguageModel, prompt: tuple[int, ...]) -> list[int]:
    return model.generate(list(prompt), 12, temperature=0).ids


def run_script(script: Script, model: LanguageModel, requests: list[Any]) -> None:
    common = prompts_of([40], 9)[0]  # the beginning of several prompts
    sequences = []
    for number, (length, tokens, _, _, shares) in enumerate(requests):
        prompt = common[:length] if shares else prompts_of([length], number)[0]
        wanted = Wanted(tokens, Sampling(temperature=0))
        sequences.append(TokenSequence(model, number, prompt, wanted))
    step, left = 0, set(range(len(requests)))
    while left or script.scheduler.busy:
        for number in sorted(left):
            if requests[number][2] <= step:
                script.add(sequences[number])
                left.discard(number)
        for number, sequence in enumerate(sequences):
            if requests[number][3] == step and sequence in script.ids:
                script.scheduler.cancel(sequence)
        script.scheduler.advance()
        script.check()
        step += 1
        assert step < 2000
    assert script.scheduler.pages.used == 0
    for number, sequence in enumerate(sequences):
        tokens = requests[number][1]
        prompt = sequence.ids[: sequence.prompt_length]
        alone = alone_ids(model, tuple(prompt))
        ids = script.ids[sequence]
        assert ids == alone[: len(ids) if sequence.finish_reason == "cancelled" else tokens]


def test_requests_together_on_a_device_that_compiles(compiled: LanguageModel, model: LanguageModel) -> None:
    prompts = prompts_of([3, 40, 10, 40, 5])
    prompts[3] = prompts[1][:35] + prompts[3][35:]
    with Engine(compiled, slots=2, memory=9 * page_bytes(compiled)) as engine:
        requests = [engine.submit(prompt, 12, temperature=0) for prompt in prompts]
        results = [request.result() for request in requests]
        stats = engine.stats()
    assert [result.ids for result in results] == [by_whole_model(model, prompt, 12) for prompt in prompts]
    assert (stats.pages_used, stats.finished, stats.generated_tokens) == (0, 5, 60)
    assert stats.prefix_tokens == 32


def test_a_sequence_that_gave_its_pages_up_goes_on_with_the_same_tokens(model: LanguageModel) -> None:
    prompts = prompts_of([30, 30, 30])
    with Engine(model, slots=3, memory=7 * page_bytes(model)) as engine:
        requests = [engine.submit(prompt, 40, temperature=1.1, seed=at) for at, prompt in enumerate(prompts)]
        results = [request.result().ids for request in requests]
        stats = engine.stats()
    assert stats.preempted > 0
    alone = model.generate(prompts, 40, temperature=1.1, seed=0)
    assert results == [each.ids for each in alone]


def test_a_long_sequence_drops_its_older_half_and_others_do_not_mind(model: LanguageModel) -> None:
    long, short = prompts_of([90, 20])
    with Engine(model, slots=2) as engine:
        requests = [engine.submit(long, 20, temperature=0), engine.submit(short, 12, temperature=0)]
        ids = [request.result().ids for request in requests]
    first = by_whole_model(model, long, CONTEXT - 90 + 1)
    assert ids[0][: len(first)] == first
    again = by_whole_model(model, (long + first)[-CONTEXT // 2 :], 10)
    assert ids[0][len(first) : len(first) + 10] == again
    assert ids[1] == by_whole_model(model, short, 12)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_keys_that_depend_on_the_length_are_computed_again_as_they_were(scaling: str) -> None:
    ropes: dict[str, dict[str, Any]] = {
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "longrope": {
            "rope_type": "longrope",
            "original_max_position_embeddings": 32,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    }
    model = built(
        "host", max_position_embeddings=32 if scaling == "dynamic" else 64, rope_scaling=ropes[scaling]
    )
    assert model.context == 64
    prompts = prompts_of([20, 40, 20])
    prompts[1][:20] = prompts[0]
    with Engine(model, slots=3, memory=6 * page_bytes(model)) as engine:
        requests = [engine.submit(prompt, 20, temperature=0) for prompt in prompts]
        ids = [request.result().ids for request in requests]
        assert engine.stats().preempted > 0
    assert ids == [model.generate(prompt, 20, temperature=0).ids for prompt in prompts]


# Pages and prefixes


def test_a_prefix_is_computed_once(model: LanguageModel) -> None:
    prefix, *ends = prompts_of([50, 7, 9, 3])
    with Engine(model, slots=4) as engine:
        first = engine.submit(prefix + ends[0], 5, temperature=0).result()
        assert engine.stats().prefix_tokens == 0
        others = [engine.submit(prefix + end, 5, temperature=0) for end in ends[1:]]
        ids = [request.result().ids for request in others]
        assert engine.stats().prefix_tokens == 2 * (50 // PAGE) * PAGE
        # What was generated can be continued, too.
        more = engine.submit([*prefix, *ends[0], *first.ids, 1, 2], 4, temperature=0).result()
        stats = engine.stats()
    assert stats.prefix_tokens == 2 * 48 + (57 + 5 - 1) // PAGE * PAGE
    assert stats.pages_used == 0
    assert first.ids == by_whole_model(model, prefix + ends[0], 5)
    assert ids == [by_whole_model(model, prefix + end, 5) for end in ends[1:]]
    assert more.ids == by_whole_model(model, [*prefix, *ends[0], *first.ids, 1, 2], 4)


def test_equal_prompts_that_come_together_are_computed_once(model: LanguageModel) -> None:
    prompt = prompts_of([50])[0]
    with Engine(model, slots=4) as engine:
        requests = [engine.submit(prompt, 6, temperature=1.0, seed=at) for at in range(4)]
        results = [request.result().ids for request in requests]
        assert engine.stats().prefix_tokens == 3 * 48
    assert results == [model.generate(prompt, 6, temperature=1.0, seed=at).ids for at in range(4)]


@pytest.mark.parametrize("mixes", [True, False])
def test_prompts_of_which_others_know_the_beginning_wait_for_no_step_of_their_own(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, mixes: bool
) -> None:
    taken: list[list[bool]] = []  # of each step, of which prompts the beginning was known
    prompts = Decoder.prompts

    def take(decoder: Decoder, parts: Any) -> Any:
        taken.append([sequence.computed > 0 for sequence, _ in parts])
        return prompts(decoder, parts)

    monkeypatch.setattr(Decoder, "prompts", take)
    decoder = Decoder(model, 4, 24)
    decoder.from_pages = mixes
    decoder.begin()
    script = Script(decoder, 4, 24)
    prefix, *ends = prompts_of([PAGE, 2, 5, 3, 9])
    given = [prefix + ends[0], ends[1], prefix + ends[2], ends[3]]
    for together in ([given[0]], given):
        sequences = [
            TokenSequence(model, at, ids, Wanted(4, Sampling(temperature=0)))
            for at, ids in enumerate(together)
        ]
        for sequence in sequences:
            script.add(sequence)
        while script.scheduler.busy:
            script.scheduler.advance()
            script.check()
    steps = [[True, False, True, False]] if mixes else [[True, True], [False, False]]
    assert taken == [[False], *steps]
    for sequence, ids in zip(sequences, given, strict=True):
        assert script.ids[sequence] == by_whole_model(model, ids, 4)
    decoder.release()


def test_a_sequence_that_leaves_has_only_its_slot_uploaded(
    compiled: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(compiled, 4, 24)
    if not decoder._replaces:
        pytest.skip("what steps are given is not replaced here")
    decoder.begin()
    script, uploaded = Script(decoder, 4, 24), list[tuple[int, ...]]()
    upload = ps.Device.upload

    def noted(device: ps.Device, array: Any, **options: Any) -> Any:
        uploaded.append(array.shape)
        return upload(device, array, **options)

    prompts = prompts_of([3, 4, 5, 6])
    for at, tokens in enumerate((9, 3, 9, 6)):
        wanted = Wanted(tokens, Sampling(temperature=0))
        script.add(TokenSequence(compiled, at, prompts[at], wanted))
    while script.scheduler.counts.steps < 2:
        script.scheduler.advance()
    monkeypatch.setattr(ps.Device, "upload", noted)
    while len(script.scheduler.running) > 3:
        script.scheduler.advance()
    script.scheduler.advance()
    assert uploaded == [(4,)], "the slots, once"
    while script.scheduler.busy:
        script.scheduler.advance()
    for prompt, ids in zip(prompts, script.ids.values(), strict=True):
        assert ids == by_whole_model(compiled, prompt, len(ids))
    decoder.release()


def test_memory_is_exactly_what_was_given(compiled: LanguageModel) -> None:
    device = ps.asarray(0, device=compiled.head_weight.device).device
    page = page_bytes(compiled)
    assert page == 2 * 2 * PAGE * 8 * 4, "keys and values, heads, positions, items, bytes"
    device.sync()
    before = device.memory_stats().live_bytes
    engine = Engine(compiled, slots=2, memory=7 * page + page // 2)
    assert engine.stats().pages == 7
    assert 0 <= device.memory_stats().live_bytes - before - 7 * page < 1024, "and a few numbers of each slot"
    engine.submit([1, 2, 3], 4).result()
    engine.close()
    del engine
    gc.collect()
    device.sync()
    assert device.memory_stats().live_bytes - before < 7 * page


def test_only_the_pages_of_a_sequence_are_read(
    compiled: LanguageModel, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "CHUNK", 32)
    prompt = prompts_of([60])[0]
    page = page_bytes(compiled)
    with Engine(compiled, slots=1, memory=4000 * page) as engine:
        assert engine.submit(prompt, 4, temperature=0).result().ids == by_whole_model(model, prompt, 4)
        programs = {bucket: program.schedules()[0] for bucket, program in engine._decoder.programs}
    lengths = [bucket.length for bucket in programs]
    continued = [bucket for bucket in programs if not bucket.fresh]
    assert sorted(lengths) in ([0, 32], [0, 32, 32]), "on a CPU, a prompt that starts reads its pages too"
    assert sorted(bucket.length for bucket in continued) == [0, 32]
    assert max(schedule.plan.arena_bytes for schedule in programs.values()) < 100 * page
    for bucket in continued:
        steps = str(programs[bucket]).splitlines()
        attends = ["[paged_attention]" in step or "paged_step" in step for step in steps]  # the last on a GPU
        assert sum(attends) == len(compiled.cache_shapes)


# Interface


def test_pieces_come_as_they_are_generated(model: LanguageModel) -> None:
    with Engine(model, slots=2) as engine:
        request = engine.submit([1, 2, 3], 6, temperature=0, logprobs=True)
        pieces = list(request)
        assert [piece.id for piece in pieces] == request.result().ids == by_whole_model(model, [1, 2, 3], 6)
        assert [piece.finish_reason for piece in pieces] == [None] * 5 + ["length"]
        assert [piece.logprob for piece in pieces] == request.result().logprobs
        assert request.prompt_tokens == [1, 2, 3]
        told: list[Any] = []
        request.on_piece(told.append)
        assert told == pieces, "those that came before, too"
        plain = engine.submit([4], 2)
        assert (plain.id, plain.result().logprobs) == (1, [])
        assert engine.submit([4], 0).result().ids == []


def test_each_request_has_its_own_options(model: LanguageModel) -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0, "repetition_penalty": 1.9, "stop_tokens": list(range(0, 40, 9))},
        {"temperature": 1.4, "seed": 5, "top_k": 7, "top_p": 0.9},
        {"temperature": 1.5, "seed": 2, "logprobs": True},
    ]
    alone = [model.generate([5, 6, 7], 20, **option) for option in options]
    with Engine(model, slots=2) as engine:
        requests = [engine.submit([5, 6, 7], 20, **option) for option in options]
        together = [request.result() for request in requests]
    for own, other in zip(alone, together, strict=True):
        assert (own.ids, own.finish_reason) == (other.ids, other.finish_reason)
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-5)


class Slow:
    """Steps that wait for a permit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.permits = threading.Semaphore(0)
        advance = scheduling.Scheduler.advance

        def slowly(scheduler: scheduling.Scheduler) -> None:
            self.permits.acquire()
            advance(scheduler)

        monkeypatch.setattr(scheduling.Scheduler, "advance", slowly)

    def free(self) -> None:
        self.permits.release(100_000)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.free()  # so that the engine can end, whatever happened


def until(condition: Any) -> None:
    """Wait for something that another thread does."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_a_full_queue_refuses(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    with Engine(model, slots=1, queue=2) as engine, slow:
        requests = [engine.submit([at + 1], 3, temperature=0) for at in range(3)]
        with pytest.raises(QueueFull, match="2 requests are waiting already"):
            engine.submit([9], 3)
        slow.free()
        assert [len(request.result().ids) for request in requests] == [3, 3, 3]
        assert engine.submit([9], 3).result().finish_reason == "length"


def test_a_cancelled_request_frees_its_pages(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    with Engine(model, slots=1) as engine, slow:
        running, waiting, kept = (engine.submit([at + 1], 50, temperature=0) for at in range(3))
        pieces = iter(running)
        slow.permits.release(4)
        ids = [next(pieces).id]
        running.cancel()
        waiting.cancel()
        slow.free()
        last = list(pieces)[-1]
        assert (last.id, last.text, last.finish_reason) == (-1, "", "cancelled")
        assert running.result().finish_reason == waiting.result().finish_reason == "cancelled"
        ids = running.result().ids
        assert 0 < len(ids) < 50
        alone = model.generate([[1], [3]], 50, temperature=0)
        assert ids == alone[0].ids[: len(ids)]
        assert waiting.result().ids == []
        assert kept.result().ids == alone[1].ids
        kept.cancel()  # which is late, and changes nothing
        assert kept.result().finish_reason == "length"
        stats = engine.stats()
        assert (stats.pages_used, stats.finished, stats.cancelled, stats.running) == (0, 1, 2, 0)


def test_what_can_never_fit_is_refused(model: LanguageModel) -> None:
    with Engine(model, slots=2, memory=3 * page_bytes(model)) as engine:
        with pytest.raises(ValueError, match=r"a prompt of 40 tokens with up to 20 more takes 4 pages of 16"):
            engine.submit([1] * 40, 20)
        with pytest.raises(ValueError, match="token ids from 0 to 39"):
            engine.submit([99])
        assert len(engine.submit([1] * 40, 8).result().ids) == 8
    with pytest.raises(ValueError, match=r"keys and values take 2.0 KiB to .*, and memory=100 was given"):
        Engine(model, memory=100)
    with pytest.raises(ValueError, match="an engine has 1 slot"):
        Engine(model, slots=0)


def test_a_function_is_called_after_the_pieces_of_each_step(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    told: list[Any] = []
    known: list[int] = []
    complete = threading.Event()

    def after() -> None:
        known.append(len(told))
        if len(told) == 12:
            complete.set()

    with Engine(model, slots=2) as engine, slow:
        engine.after_step(after)
        requests = [engine.submit([1, 2, token], 6) for token in (3, 4)]
        for request in requests:
            request.on_piece(told.append)
        slow.free()
        assert complete.wait(60)
        assert known == sorted(known)
        known.clear()
        cancelled = engine.submit([1, 2, 3], 1000)
        cancelled.on_piece(lambda piece: told.clear() if piece.finish_reason == "cancelled" else None)
        cancelled.cancel()
        cancelled.result()
    assert known[-1] == 0, "after requests were cancelled, too"


@pytest.mark.filterwarnings("ignore:a callback of request 0 failed")
def test_a_callback_that_fails_ends_nothing(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    called = []

    def fail(piece: Piece | Exception) -> None:
        called.append(piece)
        raise RuntimeError("the loop is closed")

    with Engine(model, slots=2) as engine, slow:
        requests = [engine.submit([1], 5), engine.submit([2], 5)]
        requests[0].on_piece(fail)
        slow.free()
        assert [len(request.result().ids) for request in requests] == [5, 5]
    assert len(called) == 1


def test_a_request_is_freed_at_its_end_although_a_callback_holds_it(model: LanguageModel) -> None:
    """Nobody waits for Python to look for cycles, which stops all requests of a server."""
    told: Counter[str | None] = Counter()

    def tell(request: Request, piece: Piece | Exception) -> None:
        told[piece.finish_reason if isinstance(piece, Piece) else type(piece).__name__] += request.id >= 0

    gc.disable()
    try:
        engine = Engine(model, slots=2)
        requests = [engine.submit([1], 3), engine.submit([2], 10**6), engine.submit([3], 10**6)]
        for request in requests:
            request.on_piece(partial(tell, request))
        requests[1].cancel()
        requests[0].result()
        requests[1].result()
        requests[0].on_piece(partial(tell, requests[0]))  # after its end
        engine.close()
        references = [weakref.ref(request) for request in requests]
        del requests, request
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
    assert (told["length"], told["cancelled"], told["EngineClosed"]) == (2, 1, 1)


def test_a_failure_reaches_everybody(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    engine = Engine(model, slots=2)
    requests = [engine.submit([at + 1], 50) for at in range(4)]
    told: list[Any] = []
    requests[3].on_piece(told.append)
    error = DeviceError("the device is lost")

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(Decoder, "tokens", fail)
    slow.free()
    for request in requests:
        with pytest.raises(DeviceError, match="the device is lost"):
            request.result()
    with pytest.raises(DeviceError):
        list(requests[0])
    assert told == [error]
    with pytest.raises(EngineClosed) as refused:
        engine.submit([1])
    assert refused.value.__cause__ is error
    engine.close()


def test_closing_ends_what_is_open(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    engine = Engine(model, slots=1)
    requests = [engine.submit([1], 50), engine.submit([2], 50)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    slow.free()
    closing.join()
    for request in requests:
        with pytest.raises(EngineClosed):
            request.result()
    with pytest.raises(EngineClosed, match="the engine is closed"):
        engine.submit([1])
    engine.close()


def test_many_threads_submit_read_and_cancel(model: LanguageModel) -> None:
    results: dict[int, list[int]] = {}
    with Engine(model, slots=3, memory=12 * page_bytes(model)) as engine:

        def work(number: int) -> None:
            for turn in range(4):
                key = 10 * number + turn
                request: Request = engine.submit([number, turn], 12, temperature=0)
                if turn == 2:
                    next(iter(request))
                    request.cancel()
                results[key] = [piece.id for piece in request if piece.id >= 0]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: engine.stats().running == 0)
        stats = engine.stats()
    assert stats.requests == 16 == stats.finished + stats.cancelled
    assert stats.pages_used == 0
    for number in range(4):
        for turn in range(4):
            ids = results[10 * number + turn]
            expected = model.generate([number, turn], 12, temperature=0).ids
            assert ids == expected[: len(ids)]
            assert turn == 2 or len(ids) == 12
