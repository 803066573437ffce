"""Programs of an engine that are built before requests come, and in the background while they run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from conftest import until
from served import in_process
from test_engine import built
from test_generation import byte_level

import penstock as ps
from penstock.errors import DeviceError
from penstock.models import Engine, TextTokenizer
from penstock.models.decoders import Decoder
from penstock.models.programs import Bucket, Programs, bucket, covering
from penstock.models.sampling import Needs
from penstock.serving import generation

EVERYTHING = Needs(*[True] * len(Needs._fields))


@pytest.mark.parametrize(
    ("slots", "context", "tokens"), [(64, 2048, 512), (64, 4096, 2048), (5, 100, 64), (1, 8, 32)]
)
def test_few_buckets_cover_every_step(slots: int, context: int, tokens: int) -> None:
    shortest = min(16, context)
    chosen = list(covering(slots, context, tokens, 16, 8))
    assert len(chosen) <= 9
    assert not any(a.covers(b) for a, b in product(chosen, chosen) if a is not b)
    steps = [(rows, 0) for rows in range(1, slots + 1)]
    for rows, length in product(range(1, slots + 1), range(1, min(tokens, context) + 1)):
        if rows == 1 or bucket(rows, 1, slots) * bucket(length, 16, 1 << 30) <= tokens:
            steps.append((rows, length))
    for rows, length in steps:
        of_step = (bucket(rows, 1, slots), bucket(length, shortest, context) if length else 0, 8)
        for needs in (Needs(), Needs(draws=True), EVERYTHING):
            assert any(each.covers(Bucket(*of_step, length > 0, needs)) for each in chosen), of_step


def test_another_program_takes_a_step_until_its_own_is_built() -> None:
    may_go, planned = threading.Event(), []

    def compiling(program: Any, chosen: Bucket) -> Callable[[], None]:
        planned.append(chosen.rows)
        if chosen.rows == 3:
            raise DeviceError("no memory")

        def compile_all() -> None:
            may_go.wait()
            if chosen.rows == 4:
                raise DeviceError("no compiler")

        return compile_all

    programs = Programs(lambda chosen: object(), compiling)
    small, large = Bucket(2, 0, 4, False, Needs()), Bucket(8, 0, 16, False, EVERYTHING)
    assert programs.take(small)[0] == small, "without programs that cover others, each is built at once"
    programs.cover(large)
    wanted, planned_first = small._replace(width=16), small._replace(width=16, rows=3)
    assert programs.take(planned_first)[0] == large
    for rows in (2, 2, 4, 3):
        assert programs.take(wanted._replace(rows=rows))[0] == large
    assert planned == [3, 2], "one at a time, and nothing again that failed"
    assert programs.take(wanted._replace(length=16))[0].length == 16, "nothing covers prompts"
    may_go.set()
    for rows, taken in ((2, wanted), (4, large), (4, large), (3, large)):
        if programs._coming is not None:
            programs._coming[2].exception()  # waits
        assert programs.take(wanted._replace(rows=rows))[0] == taken, "no step fails with what is for later"
    assert planned == [3, 2, 4]
    programs.close()


def test_the_program_that_most_steps_needed_is_built_first() -> None:
    may_go, planned = threading.Semaphore(0), []

    def compiling(program: Any, chosen: Bucket) -> Callable[[], None]:
        planned.append(chosen.rows)
        return lambda: may_go.acquire() and None

    programs = Programs(lambda chosen: object(), compiling)
    programs.cover(Bucket(64, 0, 16, False, EVERYTHING))
    programs.cover(Bucket(64, 16, 16, False, EVERYTHING))

    def take(rows: int, length: int = 0, **needs: bool) -> Bucket:
        return programs.take(Bucket(rows, length, 16, False, Needs(**needs)))[0]

    def build() -> None:
        assert programs._coming is not None
        may_go.release()
        programs._coming[2].result()

    for rows in (1, 2, 4, 4, 8, 8, 8, 8, 1, 1, 1, 1, 1):
        assert take(rows).rows == 64
    build()
    assert (take(1).rows, take(4).rows, planned) == (1, 64, [1, 8])
    build()
    assert (take(8).rows, take(2).rows, planned) == (8, 8, [1, 8, 4])
    build()
    # A prompt whose token is not drawn takes the program of those whose token is.
    assert (take(2, 16).rows, planned) == (64, [1, 8, 4, 2])
    build()
    assert (take(2, 16).rows, planned) == (64, [1, 8, 4, 2, 2])
    build()
    assert take(2, 16, draws=True) == take(2, 16) == Bucket(2, 16, 16, False, Needs(draws=True))
    programs.close()


def test_a_prepared_engine_gives_the_tokens_of_others() -> None:
    device = ps.Device.over(_opencl())
    model = built(device)
    plain, drawn = {"temperature": 0}, {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_logprobs": 2}
    with Engine(model, slots=4) as engine:
        before = [engine.submit(list(range(1, n)), 6, **plain) for n in (3, 20, 40)]
        before += [engine.submit(list(range(1, n)), 6, **drawn) for n in (3, 20, 40)]
        wanted = [request.result() for request in before]
    with Engine(model, slots=4) as engine:
        engine.prepare()
        requests = [engine.submit(list(range(1, n)), 6, **plain) for n in (3, 20, 40)]
        requests += [engine.submit(list(range(1, n)), 6, **drawn) for n in (3, 20, 40)]
        assert [request.result().ids for request in requests] == [each.ids for each in wanted]
        until(lambda: engine.preparing[0] >= engine.preparing[1] or engine.failure)
        assert engine.failure is None
        pages = [id(cache._node.value) for cache in engine._decoder._caches]
        again = [engine.submit(list(range(2, n)), 6, **drawn) for n in (5, 9, 39)]
        assert all(len(request.result().top_logprobs) == 6 for request in again)
        # A program that is built meanwhile must not keep steps from writing pages in place.
        assert [id(cache._node.value) for cache in engine._decoder._caches] == pages
        assert engine.stats().programs >= engine.preparing[1] == 3
    device.close()


def _opencl() -> Any:
    from conftest import DRIVERS

    return DRIVERS["opencl-device"]()


def test_temporaries_of_a_prompt_do_not_grow_with_what_is_before_it() -> None:
    device = ps.Device.over(_opencl())
    model = built(device, max_position_embeddings=32768)
    decoder = Decoder(model, 1, 2048)
    decoder.begin()
    taken = {}
    for length, pages in ((256, 512), (256, 2048), (512, 512), (512, 2048)):
        bucket = Bucket(1, length, pages, False, Needs())
        arrays = [ps.zeros(array.shape, dtype=ps.int32, device=device) for array in decoder._arrays(bucket)]
        with ps.no_grad():
            plan = decoder._program(bucket).memory_plan(*arrays, ps.zeros((5, 1), device=device))
        taken[length, pages] = plan.unlimited.arena_bytes
    for length in (256, 512):
        assert taken[length, 2048] - taken[length, 512] <= 4 * 2048, "a table of pages at most"
    assert taken[512, 2048] <= 2.1 * taken[256, 512]
    assert taken[512, 2048] < 512 * 32768, "bytes, fewer than scores"
    device.close()


def test_health_says_starting_until_programs_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    covered = threading.Semaphore(0)
    monkeypatch.setattr(Decoder, "cover", lambda self, chosen: covered.acquire())
    device = ps.Device.over(_opencl())
    model = built(device, vocab_size=258)
    model.tokenizer = TextTokenizer(byte_level())
    with Engine(model, slots=2) as engine, in_process(engine, model) as client:
        assert client.get("/health").json() == {"status": "ok"}
        engine.prepare()
        answer = client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "starting")
        assert answer.json()["programs"] == {"built": 0, "all": 3}
        covered.release(3)
        while client.get("/health").status_code != 200:
            assert engine.failure is None
    device.close()


def test_a_quiet_stream_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_QUIET_SECONDS", 0.02)
    first, step = threading.Event(), Decoder.tokens

    def slow(self: Decoder, sequences: Any) -> Any:
        first.wait(0.2)  # by no one: a step that takes its time
        return step(self, sequences)

    monkeypatch.setattr(Decoder, "tokens", slow)
    model = built("host", vocab_size=258)
    model.tokenizer = TextTokenizer(byte_level())
    asked = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    with Engine(model, slots=2) as engine, in_process(engine, model) as client:
        lines = client.post("/v1/completions", json={**asked, "stream": True}).text.split("\n\n")
        assert ": waiting" in lines
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        whole = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        assert text == whole
