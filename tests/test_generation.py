"""Generation: sampling on the device, stops, streams, tokenizers, chunks of prompts, and memory."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import model_cases as cases
import numpy as np
import pytest
import tokenizers
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

import penstock as ps
from penstock.errors import CheckpointError
from penstock.models import LanguageModel, Sampling, TextTokenizer, scheduling
from penstock.models.decoders import PAGE, Decoder
from penstock.models.sampling import needs_of, numbers_of, sample, seed_words
from penstock.models.sequences import TokenSequence, Wanted
from penstock.train.loading import stream_text

SIZES = {**cases.LLAMA, "vocab_size": 40, "num_hidden_layers": 1, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    ps.random.manual_seed(3)
    made = ps.models.build({**SIZES, "initializer_range": 0.3}, device="host")
    made.eval()
    return made


# Sampling


def drawn(logits: np.ndarray, setting: Sampling, count: int, seen: np.ndarray | None = None) -> np.ndarray:
    """Tokens of one row of logits, with seeds from 0 on."""
    tiled = np.tile(logits.astype(np.float32), (count, 1))
    seeds = np.stack([seed_words(seed) for seed in range(count)])
    result = sample(
        *(ps.asarray(array, device="host") for array in (tiled, numbers_of([setting] * count), seeds)),
        ps.asarray(np.full(count, 7, np.int32), device="host"),
        None if seen is None else ps.asarray(np.tile(seen, (count, 1)), device="host"),
        needs_of([setting]),
    )
    return result.ids.numpy()


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-300])
def test_the_coldest_draw_takes_the_likeliest(temperature: float) -> None:
    logits = np.array([-300.0, -2.5, 400.0, 399.99, -1.0])
    assert set(drawn(logits, Sampling(temperature=temperature), 8)) == {2}


@pytest.mark.parametrize("temperature", [1e39, np.inf])
def test_the_hottest_draw_takes_any(temperature: float) -> None:
    logits = np.array([-300.0, -2.5, 400.0, 399.99, -1.0])
    assert set(drawn(logits, Sampling(temperature=temperature), 99)) == {0, 1, 2, 3, 4}


def probabilities(logits: np.ndarray, setting: Sampling) -> np.ndarray:
    """By the definitions: temperature, then top_k, then top_p, then min_p."""
    scaled = logits / setting.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[: setting.top_k]
    weights = np.exp(scaled[kept] - scaled[kept].max())
    weights /= weights.sum()
    if setting.top_p is not None:
        kept = kept[: int(np.searchsorted(np.cumsum(weights), setting.top_p)) + 1]
    if setting.min_p is not None:
        kept = kept[np.exp(scaled[kept] - scaled.max()) >= setting.min_p]
    result = np.zeros(len(logits))
    result[kept] = np.exp(scaled[kept] - scaled[kept].max())
    return result / result.sum()


@pytest.mark.parametrize(
    "setting",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.7),
        Sampling(min_p=0.2, temperature=2.0),
        Sampling(temperature=1.5, top_k=6, top_p=0.8, min_p=0.15),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_their_probabilities(setting: Sampling) -> None:
    logits = np.random.default_rng(2).normal(0, 1.5, 12)
    count, wanted = 8000, probabilities(logits, setting)
    ids = drawn(logits, setting, count)
    counts = np.bincount(ids, minlength=12)
    assert not counts[wanted == 0].any()
    expected = wanted[wanted > 0] * count
    distance = ((counts[wanted > 0] - expected) ** 2 / expected).sum()
    assert distance < 2 * len(expected) + 20, "chi-squared, far beyond what chance would give"


def test_temperature_zero_and_a_single_candidate_are_the_likeliest() -> None:
    logits = np.random.default_rng(0).normal(size=30)
    best = int(logits.argmax())
    for setting in (Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=1.0)):
        assert set(drawn(logits, setting, 20)) == {best}


def test_a_penalty_makes_what_was_seen_less_likely() -> None:
    logits = np.array([2.0, 1.9, -0.1, -0.2])
    seen = np.array([True, False, True, False])
    assert set(drawn(logits, Sampling(temperature=0, repetition_penalty=1.2), 1, seen)) == {1}
    wanted = np.where(seen, np.where(logits > 0, logits / 4, logits * 4), logits)
    counts = np.bincount(drawn(logits, Sampling(repetition_penalty=4.0), 4000, seen), minlength=4) / 4000
    np.testing.assert_allclose(counts, np.exp(wanted) / np.exp(wanted).sum(), atol=0.03)


def test_a_penalty_counts_the_prompt_and_what_was_drawn(model: LanguageModel) -> None:
    prompt = [3, 9, 9, 21]
    result = model.generate(prompt, 12, temperature=0, repetition_penalty=1.8).ids
    ids = list(prompt)
    for token in result:
        logits = model(ps.asarray([ids], device="host")).numpy()[0, -1]
        seen = np.isin(np.arange(40), ids)
        penalized = np.where(seen, np.where(logits > 0, logits / 1.8, logits * 1.8), logits)
        assert token == int(penalized.argmax())
        ids.append(token)


def test_log_probabilities_are_those_of_the_model(model: LanguageModel) -> None:
    result = model.generate([5, 6], 6, temperature=0.7, top_k=5, seed=1, logprobs=True)
    logits = model(ps.asarray([[5, 6, *result.ids]], device="host")).numpy()[0, 1:-1].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(result.logprobs, logs[np.arange(6), result.ids], atol=1e-4)
    assert model.generate([5, 6], 2).logprobs == []
    # The likeliest tokens: others of the batch may have asked for none, or for fewer.
    settings: Any = {"temperature": 0.7, "top_k": 5, "seed": 1}
    top = model.generate([5, 6], 6, top_logprobs=7, **settings)
    assert top.ids == result.ids
    order = np.argsort(-logs, axis=-1, kind="stable")[:, :7]
    assert [[token for token, _ in likeliest] for likeliest in top.top_logprobs] == order.tolist()
    values = [[value for _, value in likeliest] for likeliest in top.top_logprobs]
    np.testing.assert_allclose(values, np.take_along_axis(logs, order, axis=-1), atol=1e-4)
    assert model.generate([5, 6], 2, logprobs=True).top_logprobs == []
    with pytest.raises(ValueError, match="top_logprobs is 0 to 20, and 21 was given"):
        model.generate([5, 6], 2, top_logprobs=21)


def test_a_sequence_depends_on_its_seed_and_not_on_the_batch(model: LanguageModel) -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    together = model.generate(prompts, 15, seed=[7, 8, 9], temperature=1.3)
    alone = [model.generate(prompts[k], 15, seed=7 + k, temperature=1.3).ids for k in range(3)]
    assert [each.ids for each in together] == alone
    assert alone[0] != model.generate(prompts[0], 15, seed=10, temperature=1.3).ids
    several = model.generate([[1, 2]] * 4, 15, seed=3, temperature=1.3)
    assert len({tuple(each.ids) for each in several}) == 4, "successive seeds"
    assert several[0].ids == model.generate([1, 2], 15, seed=np.int64(3), temperature=1.3).ids


# Prompts, stops and streams


def by_whole_model(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(ps.asarray([ids], device="host")).numpy()[0, -1].argmax()))
    return ids[len(prompt) :]


def test_long_prompts_are_taken_in_chunks(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "CHUNK", 16)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 40, length).tolist() for length in (50, 3, 16, 33)]
    result = model.generate(prompts, 5, temperature=0, logprobs=True)
    for prompt, completion in zip(prompts, result, strict=True):
        assert completion.ids == by_whole_model(model, prompt, 5)
        alone = model.generate(prompt, 5, temperature=0, logprobs=True)
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_prompts_wait_for_each_other_while_tokens_are_computed(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    prompts = Decoder.prompts
    monkeypatch.setattr(
        Decoder, "prompts", lambda self, parts: taken.append(len(parts)) or prompts(self, parts)
    )
    decoder = Decoder(model, 8, 64)
    decoder.begin()
    scheduler = scheduling.Scheduler(decoder, lambda sequence, piece: None)

    def add(number: int) -> None:
        wanted = Wanted(60, Sampling(temperature=0))
        scheduler.add(TokenSequence(model, number, [number + 1, 2, 3], wanted))
        scheduler.advance()

    add(0)
    assert taken == [1], "nobody else would lose anything"
    for number in range(1, 6):
        add(number)
    while sum(taken) < 6:
        scheduler.advance()
    before, steps = list(taken), scheduler.counts.steps
    add(6)
    add(7)
    while sum(taken) < 8:
        scheduler.advance()
    assert taken == [*before, 2], "in one step"
    assert scheduler.counts.steps - steps <= scheduling._PATIENCE + 2
    decoder.release()


def test_beyond_the_context_the_older_half_is_dropped(model: LanguageModel) -> None:
    prompt = np.random.default_rng(1).integers(0, 40, 126).tolist()
    result = model.generate([prompt, [7]], 6, temperature=0)
    ids = prompt + by_whole_model(model, prompt, 3)  # the last of them after 128 positions
    assert result[0].ids[:3] == ids[126:]
    assert result[0].ids[3:] == by_whole_model(model, ids[-64:], 3)
    assert result[1].ids == by_whole_model(model, [7], 6)


def test_stop_tokens_end_their_sequence_only(model: LanguageModel) -> None:
    prompts = [[1, 2], [30, 31]]
    free = model.generate(prompts, 20, temperature=0)
    stop = free[0].ids[4]
    assert stop not in free[0].ids[:4]
    result = model.generate(prompts, 20, temperature=0, stop_tokens=[stop])
    assert (result[0].ids, result[0].finish_reason) == (free[0].ids[:5], "stop")
    other = free[1].ids
    cut = other.index(stop) + 1 if stop in other else 20
    assert result[1].ids == other[:cut]
    model.generation_config = {"eos_token_id": stop}
    assert model.generate(prompts[0], 20, temperature=0).ids == free[0].ids[:5]
    model.generation_config = {}


def test_a_stream_gives_what_generate_does(model: LanguageModel) -> None:
    prompts = [[1, 2], [3]]
    pieces = list(model.stream(prompts, 6, temperature=0))
    whole = model.generate(prompts, 6, temperature=0)
    for index, completion in enumerate(whole):
        assert [piece.id for piece in pieces if piece.index == index] == completion.ids
    assert Counter(piece.finish_reason for piece in pieces) == {None: 10, "length": 2}
    assert list(model.stream([1], 0)) == []


def test_generation_config_is_the_default(model: LanguageModel) -> None:
    model.generation_config = {"do_sample": True, "top_k": 1, "temperature": 0.9}
    likeliest = by_whole_model(model, [2, 3], 5)
    assert model.generate([2, 3], 5).ids == likeliest
    assert model.generate([2, 3], 40, temperature=3.0, top_k=40, seed=1).ids[:5] != likeliest
    model.generation_config = {"do_sample": False, "top_k": 40}
    assert model.generate([2, 3], 5).ids == likeliest
    assert model.generate([2, 3], 40, temperature=3.0, seed=1).ids[:5] != likeliest
    model.generation_config = {"repetition_penalty": 5.0}
    penalized = model.generate([2, 3], 20, temperature=0).ids
    assert penalized != model.generate([2, 3], 20, temperature=0, repetition_penalty=1.0).ids
    model.generation_config = {}
    assert penalized == model.generate([2, 3], 20, temperature=0, repetition_penalty=5.0).ids


def test_settings_of_generation_that_are_not_followed_are_named(model: LanguageModel, tmp_path: Path) -> None:
    harmless = {"no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": None, "max_length": 20}
    harmless |= {"token_healing": False, "penalty_alpha": None}
    model.generation_config = harmless
    model.save(tmp_path / "plain")
    ps.models.load(tmp_path / "plain")  # without a warning
    model.generation_config = {**harmless, "no_repeat_ngram_size": 3, "suppress_tokens": [7], "top_h": 0.5}
    model.save(tmp_path / "other")
    message = "not follow suppress_tokens, top_h, no_repeat_ngram_size of"
    with pytest.warns(ps.errors.PenstockWarning, match=message) as warned:
        ps.models.load(tmp_path / "other")
    assert warned[0].filename == __file__  # the line that loads
    model.generation_config = {}


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([50], {}, r"token ids from 0 to 39, and \[50\] was given"),
        ([[1], [2, -1]], {}, r"token ids from 0 to 39, and \[2, -1\] was given"),
        ([[1, 1 << 40]], {}, r"token ids from 0 to 39, and \[1, 1099511627776\] was given"),
        (np.array([[1.5, 2.0]]), {}, r"token ids from 0 to 39, and \[1.5, 2.0\] was given"),
        ([1, "text"], {}, r"token ids from 0 to 39, and \[1, 'text'\] was given"),
        ([[]], {}, r"token ids from 0 to 39, and \[\] was given"),
        ("text", {}, "the model has no tokenizer"),
        ([1], {"stop": "x"}, "stop strings need a tokenizer"),
        ([1], {"min_p": 2.0}, r"min_p is in \[0, 1\], and 2.0"),
        ([1], {"repetition_penalty": 0.0}, "a repetition_penalty is more than 0"),
        ([1], {"seed": [1, 2]}, "as many as prompts, 1"),
        ([1], {"seed": 1.5}, "a seed is an integer of 0 or more"),
        ([1], {"top_logprobs": 2.5}, "top_logprobs is 0 to 20, and 2.5"),
        ([1], {"repetition_penalty": np.inf}, "a repetition_penalty is more than 0, and inf"),
        ([1], {"top_k": 2.5}, "top_k is an integer of 1 or more, and 2.5"),
        ([1], {"max_tokens": 2.5}, "max_tokens is an integer of 0 or more, and 2.5 was given"),
        ([1], {"stop_tokens": "</s>"}, "stop tokens are token ids, and '</s>' was given"),
        ([1], {"temperature": "hot"}, "temperature is a number, and 'hot' was given"),
    ],
)
def test_what_makes_no_sense_is_named(
    model: LanguageModel, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(prompts, **{"max_tokens": 4} | options)
    with pytest.raises(TypeError, match="there is no option 'top_q'; there are temperature"):
        model.generate([1], 4, top_q=1)


@pytest.mark.parametrize("damaged", [{"do_sample": True, "top_p": "x"}, {"eos_token_id": [[2]]}])
def test_a_damaged_generation_config_is_named(model: LanguageModel, damaged: dict[str, Any]) -> None:
    model.generation_config = damaged
    with pytest.raises(ValueError, match=r"top_p is a number, and 'x'|token ids, and \[\[2\]\] was given"):
        model.generate([1], 4)
    model.generation_config = {}


def test_a_tensor_is_a_prompt_as_an_array_is(model: LanguageModel) -> None:
    wanted = model.generate([2, 3], 5, temperature=0)
    assert model.generate(ps.asarray([2, 3]), 5, temperature=0) == wanted
    assert model.generate(ps.asarray([[2, 3]]), 5, temperature=0) == [wanted]


# Programs and memory


def test_there_is_a_program_for_each_bucket_and_not_for_each_length() -> None:
    model = ps.models.build(SIZES, device="host")
    captured = []
    for length in range(3, 12):
        model.generate([1] * length, 20, temperature=0)
        assert model._decoders is not None
        decoder = model._decoders._idle
        captured.append(sorted(bucket.length for bucket, _ in decoder.programs))
    assert captured == [[0, 16]] * 9
    assert all(len(program._captured) == 1 for _, program in decoder.programs)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2"])
def test_of_the_last_layer_only_the_last_positions_of_prompts_are_computed(case: str) -> None:
    config = cases.CONFIGS[case]
    model = ps.models.build(config, device="opencl:0")
    prompts = [[1] * 9, [2] * 5]
    model.generate(prompts, 2, temperature=0)
    (schedule,) = (
        program.schedules()[0] for bucket, program in model._decoders._idle.programs if bucket.length
    )
    hidden = config.get("intermediate_size", 4 * config.get("n_embd", 0))
    nodes = [node for step in schedule.groups for node in step.group.nodes]
    rows = [node.size // hidden for node in nodes if node.primitive.name == "matmul" and hidden in node.shape]
    layers = len(model.blocks)
    assert sorted(rows) == [2] * (len(rows) // layers) + [2 * 16] * (len(rows) - len(rows) // layers)


@pytest.mark.parametrize("device", ["host", "opencl:0"])
def test_pages_are_written_in_place_and_given_back(device: str) -> None:
    model = ps.models.build(SIZES, device=device)
    decoder = Decoder(model, 2, 4)
    made: list[int] = []
    scheduler = scheduling.Scheduler(decoder, lambda sequence, piece: made.append(piece.id))
    decoder.begin()
    for cache in decoder._caches:  # before they are written, they may hold anything
        cache._become(ps.full(cache.shape, np.nan, dtype=cache.dtype, device=device).realize()._node)
    for prompt in ([1, 2, 3], [4]):
        scheduler.add(TokenSequence(model, 0, prompt, Wanted(4, Sampling(temperature=0))))
    scheduler.advance()
    places = [cache._node.value.place for cache in decoder._caches]
    while scheduler.busy:
        scheduler.advance()
    assert [cache._node.value.place for cache in decoder._caches] == places
    pages = decoder._caches[0].numpy()
    assert pages.shape == (2, 4, 2, PAGE, 8)
    filled = np.isfinite(pages).all(axis=(0, 2, 4))
    assert sorted(filled.sum(axis=1).tolist()) == [0, 0, 4, 6], "the positions of each sequence"
    alone = [model.generate(prompt, 4, temperature=0).ids for prompt in ([1, 2, 3], [4])]
    assert sorted(made) == sorted(alone[0] + alone[1])
    decoder.release()
    assert all(cache._node.value is None for cache in decoder._caches)


def test_a_model_that_generated_is_freed_at_once() -> None:
    model = ps.models.build(SIZES, device="host")
    model.generate([1, 2], 3, temperature=0)
    weight = weakref.ref(model.head_weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_what_is_replaced_in_a_model_that_generated_is_used() -> None:
    ps.random.manual_seed(4)
    model: Any = ps.models.build({**SIZES, "initializer_range": 0.5}, device="host")
    model.generate([2, 3], 6, temperature=0)
    idle = model._decoders._idle
    model.generate([2, 3], 6, temperature=0)
    assert model._decoders._idle is idle, "nothing was replaced"
    before = model.generate([2, 3], 6, temperature=0).ids
    model.lm_head.weight = ps.nn.Parameter(-model.lm_head.weight.detach())
    assert model.generate([2, 3], 6, temperature=0).ids == by_whole_model(model, [2, 3], 6) != before
    other: Any = ps.models.build({**SIZES, "initializer_range": 0.5}, device="host")
    model.layers[0] = other.layers[0]
    assert model.generate([2, 3], 6, temperature=0).ids == by_whole_model(model, [2, 3], 6)
    larger: Any = ps.models.build({**SIZES, "vocab_size": SIZES["vocab_size"] + 9}, device="host")
    model.embed_tokens, model.lm_head = larger.embed_tokens, larger.lm_head
    model.vocab_size = larger.vocab_size
    prompt = [model.vocab_size - 1]
    assert len(model.generate(prompt, 3, temperature=0, repetition_penalty=1.5).ids) == 3


# Text


def byte_level(special: bool = False) -> tokenizers.Tokenizer:
    """Bytes as tokens, with a token that begins every text if it is asked for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if special:
        made.add_special_tokens(["<s>", "</s>"])
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return made


def sentence_pieces() -> tokenizers.Tokenizer:
    """As Llama 2 has it: words with a mark for the space before them, and bytes for other characters."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd", "▁w"]
    vocabulary = {word: at for at, word in enumerate(dict.fromkeys(words))}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "w")], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
@pytest.mark.parametrize("text", ["hello world", "  two  spaces", "h", "éß\n☃ low", "🦫 hello"])
def test_streamed_text_is_the_whole_text(make: Any, text: str) -> None:
    tokenizer = TextTokenizer(make())
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids)
    assert tokenizer.decode(ids).strip() == text.strip()


@pytest.mark.parametrize("prompt", ["hello", "hello ", "é", ""])
def test_a_prompt_and_what_follows_are_the_text_of_all_ids(prompt: str) -> None:
    tokenizer = TextTokenizer(sentence_pieces())
    model: Any = SimpleNamespace(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    before, after = tokenizer.encode(prompt), tokenizer.encode("hello world")
    sequence = TokenSequence(model, 0, before, Wanted(len(after), Sampling()))
    text = "".join(sequence.push(token).text for token in after)
    assert tokenizer.decode(before) + text == tokenizer.decode([*before, *after])
    assert text == (" hello world" if before else "hello world")


def test_samples_of_a_run_keep_the_space_before_their_first_word() -> None:
    tokenizer = TextTokenizer(sentence_pieces())
    model = ps.models.build({**SIZES, "vocab_size": tokenizer.vocab_size}, device="host")
    weights = {name: np.zeros(tensor.shape, np.float32) for name, tensor in model.named_parameters()}
    weights |= {
        name: np.ones_like(array) for name, array in weights.items() if "norm" in name or "emb" in name
    }
    weights["lm_head.weight"][tokenizer.encode("hello w", special=False)[-1]] = 1
    model.load_state_dict(weights)
    sample = "".join(stream_text(model, tokenizer, tokenizer.encode("hello"), 2, temperature=0))
    assert sample == " w w"


@pytest.fixture
def talking() -> LanguageModel:
    """A model with a tokenizer, which is wound up to repeat "abcdef" for ever."""
    tokenizer = TextTokenizer(byte_level(special=True), {"bos_token": "<s>"})
    model = ps.models.build({**SIZES, "vocab_size": 258, "num_hidden_layers": 1}, device="host")
    model.tokenizer = tokenizer
    weights = {name: np.zeros(tensor.shape, np.float32) for name, tensor in model.named_parameters()}
    weights |= {name: np.ones_like(array) for name, array in weights.items() if "norm" in name}
    letters = tokenizer.encode("abcdef", special=False)
    for at, token in enumerate(letters):
        weights["embed_tokens.weight"][token, at] = 1
        weights["lm_head.weight"][letters[(at + 1) % 6], at] = 1
    model.load_state_dict(weights)
    return model


def test_text_in_and_text_out(talking: LanguageModel) -> None:
    result = talking.generate("cab", 8, temperature=0)
    assert result.text == "cdefabcd"
    assert talking.tokenizer is not None
    assert talking.tokenizer.encode("a")[0] == 256, "what begins a text"
    several = talking.generate(["a", "abcde"], 3, temperature=0)
    assert [each.text for each in several] == ["bcd", "fab"]


def test_ids_that_the_tokenizer_does_not_have_are_without_text(talking: LanguageModel) -> None:
    assert isinstance(talking.tokenizer, TextTokenizer)
    *prompt, last = talking.tokenizer.encode("abcd", special=False)
    talking.tokenizer = ps.data.ByteTokenizer()  # 256 ids, and the model has two more
    head = talking.head_weight.numpy().copy()
    head[257], head[last] = head[last], 0
    talking.load_state_dict(talking.state_dict() | {"lm_head.weight": head})
    result = talking.generate(prompt, 1, temperature=0)
    assert (result.ids, result.text) == ([257], "")


def test_stop_strings_end_the_text_before_them(talking: LanguageModel) -> None:
    result = talking.generate("a", 20, temperature=0, stop=["fab", "zz"])
    assert (result.text, result.finish_reason) == ("bcde", "stop")
    pieces = list(talking.stream("a", 20, temperature=0, stop="fab"))
    assert [piece.text for piece in pieces] == ["b", "c", "d", "e", "", "", ""], "nothing of a stop is shown"
    talking.generation_config = {"stop_strings": "de"}
    assert talking.generate("a", 6, temperature=0).text == "bc"
    assert talking.generate("a", 6, temperature=0, stop=[]).text == "bcdefa", "none, if so asked"
    talking.generation_config = {}
    unfinished = talking.generate("a", 6, temperature=0, stop=["fabulous"])
    assert (unfinished.text, unfinished.finish_reason) == ("bcdefa", "length")


@given(st.text("ab", min_size=1, max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1))
@settings(max_examples=examples(200, 40), deadline=None)
def test_what_may_be_the_beginning_of_a_stop_string_is_held_back_and_no_more(
    text: str, stop: list[str]
) -> None:
    tokenizer = TextTokenizer(byte_level())
    model: Any = SimpleNamespace(tokenizer=tokenizer, vocab_size=256)
    sequence = TokenSequence(model, 0, [0], Wanted(20, Sampling(), stop=stop))
    shown = ""
    for count, token in enumerate(tokenizer.encode(text), 1):
        shown += sequence.push(token).text
        known = text[:count]
        if ends := [known.find(string) for string in stop if string in known]:
            assert (shown, sequence.finish_reason) == (known[: min(ends)], "stop")
            return
        held = [start for start in range(count + 1) if any(s.startswith(known[start:]) for s in stop)]
        assert (shown, sequence.finish_reason) == (known[: min(held)], None)


def test_a_chat_template_makes_the_prompt(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    model = ps.models.build({**SIZES, "vocab_size": 258}, device="host")
    model.tokenizer = TextTokenizer(byte_level(special=True), {"bos_token": {"content": "<s>"}}, template)
    model.save(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {
        path.name for path in tmp_path.iterdir()
    }
    tokenizer = ps.models.load(tmp_path, device="host").tokenizer
    assert isinstance(tokenizer, TextTokenizer)
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 256
    assert tokenizer.decode(ids) == "user: hi\nassistant:"
    settings = {"chat_template": "{{ raise_exception('no system') }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = ps.models.load(tmp_path, device="host").tokenizer
    with pytest.raises(CheckpointError, match="does not take these messages: no system"):
        tokenizer.chat([])
    with pytest.raises(CheckpointError, match="there is no chat template"):
        TextTokenizer(byte_level()).chat([])


@pytest.mark.parametrize(
    "damaged", [[1], {"chat_template": 5}, {"chat_template": ["x", {"name": "default"}]}], ids=str
)
def test_damaged_settings_of_a_tokenizer_are_named(damaged: Any, tmp_path: Path) -> None:
    model = ps.models.build({**SIZES, "vocab_size": 258}, device="host")
    model.tokenizer = TextTokenizer(byte_level())
    model.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(damaged))
    with pytest.raises(CheckpointError, match=r"json is an object, not \[1\]|chat_template is a text, not"):
        ps.models.load(tmp_path, device="host")


def test_a_chat_template_finds_what_transformers_gives_it() -> None:
    def text(template: str) -> str:
        tokenizer = TextTokenizer(byte_level(), template=template)
        return tokenizer.decode(tokenizer.chat([{"role": "assistant", "content": "é<"}]))

    answers = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration %}!{% endfor %}"
    assert text(answers) == "é<!"
    assert text("{% if tools is not none or documents is not none %}tools{% endif %}.") == "."
    assert (
        text("{{ messages[0] | tojson(ensure_ascii=true) }}")
        == r'{"role": "assistant", "content": "\u00e9<"}'
    )
    assert text("{{ messages[0].content | tojson }}") == '"é<"'


def test_a_chat_template_may_fail_in_any_way() -> None:
    with pytest.raises(CheckpointError, match=r"does not take these messages: .* by zero"):
        TextTokenizer(byte_level(), template="{{ 1 // 0 }}").chat([])


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    ps.models.build(SIZES, device="host").save(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json holds no usable tokenizer"):
        ps.models.load(tmp_path, device="host")
