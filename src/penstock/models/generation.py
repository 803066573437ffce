"""Generation: prompts in, tokens out, until each sequence has enough of them or comes to a stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.models.decoders import Decoder, Decoders, Step, bucket
from penstock.models.sampling import Sampling

if TYPE_CHECKING:
    from penstock.models.model import LanguageModel

Prompt = str | Sequence[int]

_CAPACITY = 64  # the smallest bucket of positions that a cache has memory for
_SAMPLING = tuple(setting.name for setting in fields(Sampling))
_OWN = ("stop", "stop_tokens", "seed")


@dataclass(frozen=True)
class Piece:
    """A token as it is generated. The text is what it completes, and may be empty."""

    index: int  # of the prompt
    id: int
    text: str
    logprob: float | None = None
    finish_reason: str | None = None  # of the last piece: see `Completion`


@dataclass
class Completion:
    """What was generated after a prompt.

    `finish_reason`: "stop" if it ended with a stop token or string, "length" if it has as many tokens as were
    asked for. A stop token is the last of the ids, and the text ends before a stop string.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"


def completed(model: LanguageModel, prompts: Any, max_tokens: int, options: dict[str, Any]) -> Any:
    """All that follows a prompt, or each of several."""
    single, many = _prompts(prompts)
    results = [Completion() for _ in many]
    for piece in streamed(model, many, max_tokens, options):
        result = results[piece.index]
        result.ids.append(piece.id)
        result.text += piece.text
        if piece.logprob is not None:
            result.logprobs.append(piece.logprob)
        if piece.finish_reason is not None:
            result.finish_reason = piece.finish_reason
    return results[0] if single else results


def streamed(model: LanguageModel, prompts: Any, max_tokens: int, options: dict[str, Any]) -> Iterator[Piece]:
    """The pieces that follow prompts, as they are generated."""
    many = _prompts(prompts)[1]
    if max_tokens < 0:
        raise ValueError(f"max_tokens is 0 or more, and {max_tokens} was given")
    settings, stop, stop_tokens, seeds = _options(model, options, len(many))
    sequences = [
        _Sequence(model, index, _ids(model, prompt), max_tokens, stop, stop_tokens)
        for index, prompt in enumerate(many)
    ]
    if not sequences or not max_tokens:
        return iter(())
    return _pieces(model, sequences, [settings] * len(many), seeds)


def _pieces(
    model: LanguageModel, sequences: list[_Sequence], settings: list[Sampling], seeds: list[int | None]
) -> Iterator[Piece]:
    needed = max(len(sequence.ids) + sequence.max_tokens for sequence in sequences)
    if model._decoders is None:
        vars(model)["_decoders"] = Decoders()
    decoders = model._decoders
    assert decoders is not None
    slots = bucket(len(sequences), 1, 1 << 30)
    decoder = decoders.take(model, slots, bucket(needed, min(_CAPACITY, model.context), model.context))
    try:
        decoder.begin(settings, seeds)
        yield from _decoded(decoder, sequences)
    finally:
        decoders.give_back(decoder)


def _decoded(decoder: Decoder, sequences: list[_Sequence]) -> Iterator[Piece]:
    """Keep one step ahead of what is read, so that the device does not wait for the host."""
    limit = decoder.capacity
    pending: deque[Step] = deque([decoder.prompts({each.index: each.ids[-limit:] for each in sequences})])
    asked = [1] * len(sequences)  # tokens of each that are on their way or here
    while pending:
        going = [
            each.index for each in sequences if not each.finish_reason and asked[each.index] < each.max_tokens
        ]
        full = [index for index in going if decoder.lengths[index] >= limit]
        if full and len(pending) == 1:
            yield from _taken(pending.popleft(), sequences)
            full = [index for index in full if not sequences[index].finish_reason]
            if full:  # the older half is dropped
                pending.append(
                    decoder.prompts({index: sequences[index].ids[-max(limit // 2, 1) :] for index in full})
                )
            going = full
        elif going:
            pending.append(decoder.tokens(going))
        for index in going:
            asked[index] += 1
        if pending and (len(pending) > 1 or not going):
            yield from _taken(pending.popleft(), sequences)


def _taken(step: Step, sequences: list[_Sequence]) -> Iterator[Piece]:
    ids = step.ids.wait().tolist()
    logprobs = None if step.logprobs is None else step.logprobs.wait().tolist()
    for slot in step.slots:
        if not sequences[slot].finish_reason:
            yield sequences[slot].push(ids[slot], None if logprobs is None else logprobs[slot])


class _Sequence:
    """A prompt with what was generated after it, and when it stops."""

    def __init__(
        self,
        model: LanguageModel,
        index: int,
        prompt: list[int],
        max_tokens: int,
        stop: Sequence[str],
        stop_tokens: frozenset[int],
    ) -> None:
        self.index, self.ids, self.max_tokens = index, prompt, max_tokens
        self.finish_reason: str | None = None
        self._stop, self._stop_tokens = stop, stop_tokens
        self._decoder = None if model.tokenizer is None else model.tokenizer.stream()
        self._count = 0
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int, logprob: float | None) -> Piece:
        """The piece of a further token."""
        self.ids.append(token)
        self._count += 1
        text = self._held
        if token in self._stop_tokens:
            self.finish_reason = "stop"
            text += self._decoder.finish() if self._decoder else ""
        else:
            text += self._decoder.push([token]) if self._decoder else ""
            if self._count == self.max_tokens:
                self.finish_reason = "length"
                text += self._decoder.finish() if self._decoder else ""
        ends = [place for string in self._stop if (place := text.find(string)) >= 0]
        if ends:
            text, self.finish_reason = text[: min(ends)], "stop"
        self._held = "" if self.finish_reason else _beginning(text, self._stop)
        return Piece(self.index, token, text[: len(text) - len(self._held)], logprob, self.finish_reason)


def _beginning(text: str, stop: Sequence[str]) -> str:
    """The longest end of a text that a stop string begins with."""
    longest = max(map(len, stop), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in stop):
            return text[-length:]
    return ""


def _options(
    model: LanguageModel, options: Mapping[str, Any], count: int
) -> tuple[Sampling, Sequence[str], frozenset[int], list[int | None]]:
    """Settings, stop strings and tokens, and seeds."""
    unknown = sorted(set(options) - {*_SAMPLING, *_OWN})
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; there are {', '.join((*_SAMPLING, *_OWN))}")
    defaults = model.generation_config
    chosen = {name: value for name, value in options.items() if name in _SAMPLING and value is not None}
    if defaults.get("do_sample"):
        usual = {name: defaults.get(name) for name in _SAMPLING}
        chosen = {name: value for name, value in usual.items() if value is not None} | chosen
        chosen["top_k"] = chosen.get("top_k") or None  # 0 is none in Hugging Face's files
    stop = options.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if stop and model.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the model has none; give stop_tokens")
    if not all(stop):
        raise ValueError("a stop string has a character or more")
    tokens = options.get("stop_tokens")
    if tokens is None:
        tokens = defaults.get("eos_token_id", model.config.get("eos_token_id"))
    tokens = [] if tokens is None else [tokens] if isinstance(tokens, int) else tokens
    return Sampling(**chosen), stop, frozenset(tokens), _seeds(options.get("seed"), count)


def _seeds(seed: int | Sequence[int] | None, count: int) -> list[int | None]:
    """A seed for each sequence: those that are given, or successors of one."""
    if seed is None:
        return [None] * count
    seeds = [seed + index for index in range(count)] if isinstance(seed, int) else list(seed)
    if len(seeds) != count or any(each < 0 for each in seeds):
        raise ValueError(f"a seed is 0 or more, or there are as many as prompts, {count}; {seed} was given")
    return list(seeds)


def _prompts(prompts: Any) -> tuple[bool, list[Prompt]]:
    """Whether a single prompt was given, and a list of prompts."""
    if isinstance(prompts, str):
        return True, [prompts]
    given = list(prompts)
    if all(isinstance(item, (int, np.integer)) for item in given):
        return True, [given]
    return False, given


def _ids(model: LanguageModel, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError("the model has no tokenizer, so that a prompt is a list of token ids")
        ids = [int(token) for token in model.tokenizer.encode(prompt)]
    else:
        ids = [int(token) for token in np.asarray(prompt).reshape(-1)]
    if not ids or not all(0 <= token < model.vocab_size for token in ids):
        most = model.vocab_size - 1
        raise ValueError(f"a prompt has token ids from 0 to {most}, and {ids[:8]} was given")
    return ids
