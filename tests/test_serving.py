"""`penstock serve` by the `openai` client, against what the model generates without a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import served
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from served import PATIENCE, Served

import penstock as ps
from penstock.models import Engine, LanguageModel, TextTokenizer
from penstock.serving import delivery

MESSAGES: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello ☃"}]
LONG = 3000  # tokens that take seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return ps.models.load(folder, device="host")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Served]:
    """A server for the tests that leave it as it was, which its metrics and its log say at the end."""
    with Served(folder, "--slots", "8", "--request-bytes", "64KiB") as server:
        yield server
        figures = server.wait_until(lambda figures: not figures["sequences_running"])
        assert figures["pages_used"] == figures["sequences_waiting"] == 0
        ended = figures["sequences_finished_total"] + figures["sequences_cancelled_total"]
        assert figures["sequences_total"] == ended
        assert server.log == ""


# Answers


def test_a_text_is_continued_as_without_a_server(shared: Served, model: LanguageModel) -> None:
    client = shared.client()
    for prompt, options in (
        ("once upon", {"temperature": 0.0, "max_tokens": 30}),
        ([5, 6, 7], {"temperature": 0.0, "max_tokens": 3}),
        ("a", {"temperature": 0.9, "top_p": 0.8, "seed": 11, "max_tokens": 25}),
    ):
        wanted = model.generate(prompt, **options)  # type: ignore[call-overload]
        answer = client.completions.create(model="tiny", prompt=prompt, **options)  # type: ignore[call-overload]
        assert answer.choices[0].text == wanted.text
        assert answer.choices[0].finish_reason == wanted.finish_reason == "length"
        assert answer.usage.completion_tokens == len(wanted.ids)
        assert answer.model == "tiny"


def test_several_prompts_and_choices_have_successive_seeds(shared: Served, model: LanguageModel) -> None:
    prompts = ["abc", "d"]
    wanted = model.generate([prompt for prompt in prompts for _ in range(3)], 12, seed=5)
    answer = shared.client().completions.create(model="tiny", prompt=prompts, n=3, seed=5, max_tokens=12)
    assert [choice.text for choice in answer.choices] == [each.text for each in wanted]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4 + 2, "with the token that begins each, counted once"


def test_a_conversation_follows_the_chat_template(shared: Served, model: LanguageModel) -> None:
    assert isinstance(model.tokenizer, TextTokenizer)
    ids = model.tokenizer.chat(MESSAGES)
    wanted = model.generate(ids, 40, temperature=0)
    parts = [{"type": "text", "text": "hello ☃"}]
    for last in ("hello ☃", parts):
        messages = [MESSAGES[0], {"role": "user", "content": last}]
        answer = shared.client().chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_completion_tokens=40
        )
        assert answer.choices[0].message.content == wanted.text
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 40)
    again = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "more"}]
    shared.client().chat.completions.create(model="tiny", messages=again, max_tokens=1)


def test_stops_end_an_answer(shared: Served, model: LanguageModel) -> None:
    whole = model.generate("stop", 40, temperature=0).text
    stop = whole[7:9]
    assert stop.isprintable()
    wanted = model.generate("stop", 40, temperature=0, stop=[stop, "never"])
    answer = shared.client().completions.create(
        model="tiny", prompt="stop", temperature=0, max_tokens=40, stop=[stop, "never"]
    )
    assert answer.choices[0].text == wanted.text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_tokens(shared: Served, model: LanguageModel) -> None:
    client = shared.client()
    wanted = model.generate("log", 15, temperature=0, logprobs=True)
    asked: Any = {"model": "tiny", "temperature": 0, "max_tokens": 15}
    whole = client.completions.create(prompt="log", logprobs=0, **asked).choices[0].logprobs
    assert whole is not None
    assert whole.token_logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    pieces = list(model.stream("log", 15, temperature=0))
    starts = [sum(len(piece.text) for piece in pieces[:at]) for at in range(15)]
    assert whole.text_offset == starts
    streamed = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(prompt="log", logprobs=0, stream=True, **asked)
    ]
    assert [offset for part in streamed if part for offset in part.text_offset or ()] == starts
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, **asked).choices[0].logprobs
    assert isinstance(model.tokenizer, TextTokenizer)
    told = model.generate(model.tokenizer.chat(MESSAGES), 15, temperature=0, logprobs=True)
    assert chat is not None
    assert chat.content is not None
    assert [token.logprob for token in chat.content] == pytest.approx(told.logprobs, abs=1e-4)
    for token, number in zip(chat.content, told.ids, strict=True):
        assert token.token == model.tokenizer.name(number)
        assert token.bytes is None or bytes(token.bytes).decode() == token.token


def test_special_tokens_have_names_among_log_probabilities(shared: Served, model: LanguageModel) -> None:
    asked: Any = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 5}
    named: set[str] = set()
    for letter in "abcdefghijklmnopqrstuvwxyz":
        (told,) = shared.client().completions.create(prompt=letter, **asked).choices[0].logprobs.top_logprobs
        named |= set(told)
    assert "" not in named
    assert named & {"<s>", "</s>"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens_come_with_log_probabilities(
    shared: Served, model: LanguageModel, stream: bool
) -> None:
    assert isinstance(model.tokenizer, TextTokenizer)
    asked: Any = {"model": "tiny", "temperature": 1.2, "seed": 3, "max_tokens": 9, "stream": stream}
    options: Any = {"temperature": 1.2, "seed": 3, "logprobs": True, "top_logprobs": 4}
    client, name = shared.client(), model.tokenizer.name
    answer = client.completions.create(prompt="log", logprobs=4, **asked)
    parts = [part.choices[0].logprobs for part in (answer if stream else [answer])]
    told = [each for part in parts if part for each in part.top_logprobs]
    wanted = model.generate("log", 9, **options)
    for got, likeliest, token, logprob in zip(
        told, wanted.top_logprobs, wanted.ids, wanted.logprobs, strict=True
    ):
        by_text = {name(number): value for number, value in reversed([*likeliest, (token, logprob)])}
        assert got == pytest.approx(by_text, abs=1e-4)
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=4, **asked)
    parts = [part.choices[0].logprobs for part in (answer if stream else [answer])]
    tokens = [token for part in parts if part for token in part.content]
    wanted = model.generate(model.tokenizer.chat(MESSAGES), 9, **options)
    for got, likeliest, number in zip(tokens, wanted.top_logprobs, wanted.ids, strict=True):
        assert got.token == name(number)
        assert [top.token for top in got.top_logprobs] == [name(number) for number, _ in likeliest]
        values = [value for _, value in likeliest]
        assert [top.logprob for top in got.top_logprobs] == pytest.approx(values, abs=1e-4)


def test_a_stream_is_the_answer_in_pieces(shared: Served) -> None:
    client = shared.client()
    asked: Any = {"model": "tiny", "temperature": 0.7, "seed": 3, "n": 2, "max_tokens": 40}
    whole = client.chat.completions.create(messages=MESSAGES, **asked)
    usage: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=usage, **asked)
    )
    for number, choice in enumerate(whole.choices):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == number]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    text = client.completions.create(prompt="x", **asked)
    streamed = ["", ""]
    for chunk in client.completions.create(prompt="x", stream=True, **asked):
        for part in chunk.choices:
            streamed[part.index] += part.text
    assert streamed == [choice.text for choice in text.choices]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_token_is_an_event_of_its_own(shared: Served, model: LanguageModel, path: str) -> None:
    """However many are written together; a part of a character has none."""
    assert isinstance(model.tokenizer, TextTokenizer)
    asked: Any = {"temperature": 0.9, "seed": 4, "max_tokens": 60}
    chats = path.endswith("chat/completions")
    ids = model.tokenizer.chat(MESSAGES) if chats else model.tokenizer.encode("events")
    wanted = [piece.text for piece in model.stream(ids, 60, temperature=0.9, seed=4)]
    text = shared.ask(
        path, {**asked, **({"messages": MESSAGES} if chats else {"prompt": "events"}), "stream": True}
    )[1]
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: {")]
    choices = [json.loads(event)["choices"][0] for event in events]
    if chats:
        assert choices.pop(0)["delta"] == {"role": "assistant", "content": ""}
    told = [choice["delta"]["content"] if chats else choice["text"] for choice in choices]
    assert told == [piece for piece in wanted[:-1] if piece] + wanted[-1:]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(told) - 1) + ["length"]
    keys = [list(choice) for choice in choices]
    assert keys == keys[:1] * len(keys)
    assert text.endswith("data: [DONE]\n\n")


def test_a_stream_comes_while_it_is_generated(shared: Served) -> None:
    stream = shared.client().completions.create(model="tiny", prompt="y", max_tokens=LONG, stream=True)
    next(iter(stream))
    assert shared.figures()["sequences_running"] == 1
    stream.close()
    shared.wait_until(lambda figures: figures["sequences_running"] == figures["pages_used"] == 0)


@pytest.mark.parametrize("clients", [12, pytest.param(48, marks=pytest.mark.slow)])
def test_clients_at_the_same_time_get_their_own_answers(
    shared: Served, model: LanguageModel, clients: int
) -> None:
    prompts = [f"{'a shared beginning of some length ' * (number % 3)}{number}" for number in range(clients)]
    lengths = [3 + 7 * number % 40 for number in range(clients)]
    assert isinstance(model.tokenizer, TextTokenizer)
    alone = model.generate(prompts, 42, temperature=0.8, seed=0)  # and its successors for the others
    wanted = [model.tokenizer.decode(each.ids[:length]) for each, length in zip(alone, lengths, strict=True)]

    def answered(number: int) -> str:
        asked: Any = {
            "prompt": prompts[number],
            "max_tokens": lengths[number],
            "temperature": 0.8,
            "seed": number,
        }
        if number % 2:
            return shared.client().completions.create(model="tiny", **asked).choices[0].text
        chunks = shared.client().completions.create(model="tiny", stream=True, **asked)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(clients) as pool:
        assert list(pool.map(answered, range(clients))) == wanted


def test_streams_take_turns_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a delivery that took long, further tokens wait, but neither first tokens nor ends do."""
    clock = itertools.count()
    monkeypatch.setattr(delivery, "_LONGEST", 1e6)

    async def main() -> None:
        ways = delivery.Delivery()
        cheap, dear, late, urgent = (asyncio.Event() for _ in range(4))
        for event in (cheap, dear):
            ways.ready(event, False)
            assert not event.is_set()
            await asyncio.wait_for(event.wait(), PATIENCE)
            monkeypatch.setattr(time, "thread_time", lambda: next(clock))  # a second between two calls
        await asyncio.sleep(0)
        ways.ready(late, False)
        ways.ready(urgent, True)
        assert urgent.is_set()
        await asyncio.sleep(0.01)
        assert not late.is_set()

    asyncio.run(main())


def test_what_nobody_expected_ends_its_own_request_alone(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    submit, taken = Engine.submit, []

    def fail(engine: Engine, prompt: Any, **options: Any) -> Any:
        if len(prompt) == 3:  # with the token that begins every text
            raise RuntimeError("something else")
        taken.append(submit(engine, prompt, **options))
        return taken[-1]

    def broken(engine: Engine) -> Any:
        raise RuntimeError("no figures")

    monkeypatch.setattr(Engine, "submit", fail)
    with Engine(model, slots=2) as engine, served.in_process(engine, model) as client:
        for stream in (False, True):
            asked: Any = {"max_tokens": 2, "stream": stream}
            answer = client.post(TEXT, json={"prompt": "a!", **asked})
            assert (answer.status_code, is_error(answer.json())) == (500, True)
            assert client.post(TEXT, json={"prompt": "a", **asked}).status_code == 200
        assert client.post(TEXT, json={"prompt": ["a", "a!"], "max_tokens": 50}).status_code == 500
        assert taken[-1].result().finish_reason == "cancelled", "the prompts of a request are one"
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "stats", broken)
            assert client.get("/metrics").status_code == 500
        assert client.get("/metrics").status_code == 200
    log = capfd.readouterr().err
    assert (log.count("RuntimeError: something"), log.count("RuntimeError: no figures")) == (3, 1)


# Around them


def test_the_model_is_listed(shared: Served) -> None:
    client = shared.client()
    assert [entry.id for entry in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'; the model here is 'tiny'"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'"):
        client.completions.create(model="gpt-4", prompt="a")
    assert shared.ask("/health")[:2] == (200, {"status": "ok"})


def test_prometheus_reads_the_metrics(shared: Served) -> None:
    before = shared.figures()
    shared.client().completions.create(model="tiny", prompt="abc", n=2, max_tokens=9)
    after = shared.figures()
    grown = {name: value - before[name] for name, value in after.items()}
    assert grown["prompt_tokens_total"] == 8
    assert grown["generated_tokens_total"] == 18
    assert grown["sequences_finished_total"] == grown["time_to_first_token_seconds_count"] == 2
    assert grown["time_per_token_seconds_count"] == 16
    assert after["pages"] > 0
    assert after["slots"] == 8
    _, text, headers = shared.ask("/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    requests = {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for sample in families["penstock_http_requests"].samples
    }
    assert requests["/v1/completions", "200"] >= 1
    assert requests["/metrics", "200"] >= 2
    for family in families.values():
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            (count,) = [sample.value for sample in family.samples if sample.name.endswith("_count")]
            assert counts == sorted(counts)
            assert counts[-1] == count


# What is refused

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def is_error(tree: Any) -> bool:
    """Whether an answer is an error as OpenAI's interface has it."""
    error = tree["error"]
    return set(error) == {"message", "type", "param", "code"} and all(
        error[key] is None or isinstance(error[key], str) for key in error
    )


@pytest.mark.parametrize(
    ("path", "changed", "param"),
    [
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": ""}, None),  # a token that begins every text
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [258]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [10**30]}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"max_tokens": True}, "max_tokens"),
        (TEXT, {"max_tokens": 1.5}, "max_tokens"),
        (TEXT, {"max_tokens": 10**400}, "max_tokens"),
        (TEXT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (TEXT, {"temperature": -1}, "temperature"),
        (TEXT, {"temperature": "hot"}, "temperature"),
        (TEXT, {"top_p": 0}, "top_p"),
        (TEXT, {"top_p": 2}, "top_p"),
        (TEXT, {"n": 0}, "n"),
        (TEXT, {"n": 129}, "n"),
        (TEXT, {"n": 128, "prompt": ["a", "b", "c"]}, "n"),
        (TEXT, {"seed": -1}, "seed"),
        (TEXT, {"seed": 2**63}, "seed"),
        (TEXT, {"stop": 3}, "stop"),
        (TEXT, {"stop": ["a", ""]}, "stop"),
        (TEXT, {"stop": ["a"] * 17}, "stop"),
        (TEXT, {"stream": "yes"}, "stream"),
        (TEXT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (TEXT, {"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        (TEXT, {"logprobs": 6}, "logprobs"),
        (TEXT, {"echo": True}, "echo"),
        (TEXT, {"suffix": "end"}, "suffix"),
        (TEXT, {"best_of": 2}, "best_of"),
        (TEXT, {"presence_penalty": 0.5}, "presence_penalty"),
        (TEXT, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (TEXT, {"logit_bias": {"50256": -100}}, "logit_bias"),
        (TEXT, {"unheard_of": 1}, "unheard_of"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": ["hello"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(
    shared: Served, path: str, changed: dict[str, Any], param: str | None
) -> None:
    whole: dict[str, Any] = {"prompt": "a"} if path == TEXT else {"messages": MESSAGES}
    status, tree, _ = shared.ask(path, {"max_tokens": 1, **whole, **changed})
    if param is None:
        assert status == 200
        return
    assert status == 400
    assert is_error(tree)
    assert tree["error"]["param"] == param
    assert param.rpartition(".")[2].rpartition("]")[2] in tree["error"]["message"]


def test_what_asks_for_nothing_is_accepted(shared: Served) -> None:
    nothing: Any = {
        "n": 1,
        "echo": False,
        "best_of": 1,
        "suffix": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "user": "somebody",
    }
    assert shared.ask(TEXT, {"prompt": "a", "max_tokens": 1, **nothing})[0] == 200
    nothing = {"tools": [], "response_format": {"type": "text"}, "store": False, "top_logprobs": 0}
    assert shared.ask(CHAT, {"messages": MESSAGES, "max_tokens": 1, **nothing})[0] == 200


def test_what_does_not_fit_the_context_is_refused(shared: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="context of 4096 tokens: the prompt has 4101") as raised:
        shared.client().completions.create(model="tiny", prompt="x" * 4100)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="the prompt has 4, and 4093 more were asked for"):
        shared.client().completions.create(model="tiny", prompt="xyz", max_tokens=4093)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 10000 + b"}",
        b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"a":' * 9000 + b"1" + b"}" * 9000,
        b'{"\\ud800": 1}',
        b'{"prompt": "a", "\\ud800": "\\udfff"}',
        b'{"prompt": "a", "stop": "\\ud800", "n": 0}',
    ],
    ids=lambda body: repr(body[:30]),
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_hostile_bodies_are_refused(shared: Served, path: str, body: bytes) -> None:
    status, tree, _ = shared.ask(path, body)
    assert status == 400
    assert is_error(tree)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
NAMES = """
model prompt messages n stop stream stream_options max_tokens max_completion_tokens temperature top_p top_k
min_p repetition_penalty seed logprobs top_logprobs echo suffix best_of user tools logit_bias
"""
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), JUNK | st.just("user"))


@settings(max_examples=examples(200, quick=50))
@given(
    path=st.sampled_from([TEXT, CHAT]),
    body=st.dictionaries(st.sampled_from(NAMES.split()) | st.text(max_size=5), JUNK, max_size=5),
    messages=st.lists(MESSAGE, max_size=3),
    valid=st.booleans(),
)
def test_any_body_has_an_answer_in_the_format(
    shared: Served, path: str, body: dict[str, Any], messages: list[Any], valid: bool
) -> None:
    kept = {"prompt": "a"} if path == TEXT else {"messages": MESSAGES if valid else messages}
    whole = {**body, **kept} if valid else {**kept, **body}
    status, tree, _ = shared.ask(path, {"max_tokens": 2, **whole})
    assert status in (200, 400, 404)
    if status == 200 and not whole.get("stream"):
        assert tree["choices"]
    elif status != 200:
        assert is_error(tree)


@settings(max_examples=examples(100, quick=20))
@given(
    body=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode(errors="surrogatepass"))
)
def test_bytes_that_are_no_request_are_refused(shared: Served, body: bytes) -> None:
    status, tree, _ = shared.ask(TEXT, body)
    assert status == 400
    assert is_error(tree)


def test_paths_methods_and_types_that_there_are_not(shared: Served) -> None:
    for path, method, headers, status in (
        ("/v1/nothing", "GET", {}, 404),
        ("/v1/embeddings", "POST", {}, 404),
        (TEXT, "GET", {}, 405),
        ("/health", "DELETE", {}, 405),
        (TEXT, "POST", {"Content-Type": "text/plain"}, 415),
        (TEXT, "POST", {"Content-Type": ""}, 415),
        ("/health", "GET", {"Host": "attacker.example"}, 403),
        (TEXT, "POST", {"Host": "attacker.example:8000"}, 403),
    ):
        answer = shared.ask(
            path, b'{"prompt": "a"}' if method == "POST" else None, method=method, headers=headers
        )
        assert answer[0] == status, (path, method, headers)
        assert is_error(answer[1])
    for host in ("localhost", "localhost:8000", "127.0.0.1", "[::1]:80", "192.168.0.1:8000"):
        assert shared.ask("/health", headers={"Host": host})[0] == 200


def test_a_request_that_is_too_large_is_not_read(shared: Served) -> None:
    body = json.dumps({"prompt": "x" * (64 << 10)}).encode()
    status, tree, _ = shared.ask(TEXT, body)
    assert status == 413
    assert is_error(tree)
    assert "65,536 bytes" in tree["error"]["message"]
    with pytest.raises(openai.APIStatusError) as raised:
        shared.client().completions.create(model="tiny", prompt="y" * (1 << 20))
    assert raised.value.status_code == 413
    connection = shared.connection()
    chunks = iter([body[:1000], body[1000:]])
    connection.request("POST", TEXT, chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * (1 << 17),
    ],
    ids=lambda sent: repr(sent[:20]),
)
def test_what_is_no_http_is_refused(shared: Served, sent: bytes) -> None:
    with socket.create_connection((shared.host, shared.port), PATIENCE) as connection:
        connection.sendall(sent)
        with suppress(ConnectionResetError):  # by a server that does not read on
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 4")
    assert shared.ask("/health")[0] == 200


def test_a_client_that_leaves_before_it_has_asked_is_forgotten(shared: Served) -> None:
    def left() -> int:
        counts = re.findall(r'path="/v1/completions",status="499"} (\d+)', shared.ask("/metrics")[1])
        return int(counts[0]) if counts else 0

    before = left()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((shared.host, shared.port), PATIENCE) as connection:
        connection.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"prompt": "'.encode())
    shared.wait_until(lambda figures: left() > before)
