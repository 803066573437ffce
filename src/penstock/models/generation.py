"""Generation: prompts in, tokens out, until each sequence has enough of them or comes to a stop."""

from __future__ import annotations

import struct
import threading
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import PenstockWarning
from penstock.models.decoders import Decoder
from penstock.models.paging import pages_of, token_array
from penstock.models.programs import bucket
from penstock.models.sampling import Sampling
from penstock.models.scheduling import Scheduler
from penstock.models.sequences import Completion, Piece, TokenSequence, Wanted

if TYPE_CHECKING:
    from penstock.models.model import LanguageModel

Prompt = str | Sequence[int]

_CAPACITY = 64  # the smallest bucket of positions that a cache has memory for
_SAMPLING = tuple(setting.name for setting in fields(Sampling))
_OWN = ("stop", "stop_tokens", "seed")


def completed(model: LanguageModel, prompts: Any, max_tokens: int, options: dict[str, Any]) -> Any:
    """All that follows a prompt, or each of several."""
    single, many = _prompts(prompts)
    results = [Completion() for _ in many]
    for piece in streamed(model, many, max_tokens, options):
        results[piece.index].add(piece)
    return results[0] if single else results


def streamed(model: LanguageModel, prompts: Any, max_tokens: int, options: dict[str, Any]) -> Iterator[Piece]:
    """The pieces that follow prompts, as they are generated."""
    many = _prompts(prompts)[1]
    seeds = _seeds(options.get("seed"), len(many))
    wanted = wanted_of(model, max_tokens, {**options, "seed": None})
    asked = [
        (prompt_ids(model, prompt), wanted if seed is None else replace(wanted, seed=seed))
        for prompt, seed in zip(many, seeds, strict=True)
    ]
    return _pieces(model, asked) if asked and max_tokens else iter(())


def _pieces(model: LanguageModel, asked: Sequence[tuple[array[int], Wanted]]) -> Iterator[Piece]:
    """The pieces that follow token ids."""
    needed = max(len(ids) + wanted.max_tokens for ids, wanted in asked)
    if model._decoders is None:
        vars(model)["_decoders"] = Decoders()
    decoders = model._decoders
    assert decoders is not None
    slots = bucket(len(asked), 1, 1 << 30)
    positions = bucket(needed, min(_CAPACITY, model.context), model.context)
    pieces: deque[Piece] = deque()

    def begun(decoder: Decoder) -> Scheduler:
        """A scheduler of all sequences, whose first step the decoder has."""
        decoder.begin()
        scheduler = Scheduler(decoder, lambda sequence, piece: pieces.append(piece), prompts_first=True)
        for number, (ids, wanted) in enumerate(asked):
            scheduler.add(TokenSequence(model, number, ids, wanted))
        scheduler.advance()
        return scheduler

    decoder = decoders.take(model, slots, slots * pages_of(positions))
    try:
        scheduler = begun(decoder)
        if not decoder.serves(model):  # found out while the device computes
            decoder.release()
            pieces.clear()
            decoder = Decoder(model, slots, slots * pages_of(positions))
            scheduler = begun(decoder)
        while True:
            while pieces:
                yield pieces.popleft()
            if not scheduler.busy:
                break
            scheduler.advance()
    finally:
        decoders.give_back(decoder)


class Decoders:
    """The decoder of a model's last generation, kept for the next; copies of a model have none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: Decoder | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoders:
        return Decoders()

    def __reduce__(self) -> tuple[type[Decoders], tuple[()]]:
        return Decoders, ()

    def take(self, model: LanguageModel, slots: int, pages: int) -> Decoder:
        """A decoder that nobody else uses."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None and idle.takes(model, slots, pages):
            return idle
        return Decoder(model, slots, pages)

    def give_back(self, decoder: Decoder) -> None:
        """Keep a decoder for the next generation, without its memory."""
        decoder.release()
        with self._lock:
            self._idle = decoder


def wanted_of(model: LanguageModel, max_tokens: int, options: Mapping[str, Any]) -> Wanted:
    """What options ask for; those that are not given are the model's."""
    if not isinstance(max_tokens, Integral) or max_tokens < 0:  # no sequence has 2.5 tokens, and ends
        raise ValueError(f"max_tokens is an integer of 0 or more, and {max_tokens!r} was given")
    unknown = sorted(set(options) - {*_SAMPLING, *_OWN})
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; there are {', '.join((*_SAMPLING, *_OWN))}")
    defaults = model.generation_config
    chosen = {name: value for name, value in options.items() if name in _SAMPLING and value is not None}
    if defaults.get("do_sample"):
        usual = {name: defaults.get(name) for name in _SAMPLING}
        chosen = {name: value for name, value in usual.items() if value is not None} | chosen
        chosen["top_k"] = chosen.get("top_k") or None  # 0 is none in Hugging Face's files
    else:
        if defaults.get("do_sample") is not None:
            chosen.setdefault("temperature", 0.0)
        if (
            penalty := defaults.get("repetition_penalty")
        ) is not None:  # the likeliest token depends on it, too
            chosen.setdefault("repetition_penalty", penalty)
    stop = _stop_strings(model, options)
    tokens = options.get("stop_tokens")
    if tokens is None:
        tokens = defaults.get("eos_token_id", model.config.get("eos_token_id"))
    tokens = [] if tokens is None else [tokens] if isinstance(tokens, Integral) else tokens
    try:
        ends = frozenset(index(token) for token in tokens)
    except TypeError:  # a text would end nothing
        raise ValueError(f"stop tokens are token ids, and {tokens!r} was given") from None
    seed = _seeds(options.get("seed"), 1)[0]
    return Wanted(max_tokens, Sampling(**chosen), seed, stop, ends)


def _stop_strings(model: LanguageModel, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that are given, or else the model's."""
    stop = options.get("stop")
    if stop is None:
        stop = model.generation_config.get("stop_strings") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if stop and model.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the model has none; give stop_tokens")
    if not all(isinstance(string, str) and string for string in stop):
        raise ValueError(f"a stop string is a text of a character or more, and {stop!r} was given")
    return stop


def _seeds(seed: int | Sequence[int] | None, count: int) -> list[int | None]:
    """A seed for each sequence: those that are given, or successors of one."""
    if seed is None:
        return [None] * count
    if isinstance(seed, Integral):
        seeds = [int(seed) + at for at in range(count)]
    else:
        seeds = list(seed) if isinstance(seed, Iterable) else []
    if len(seeds) != count or not all(isinstance(each, Integral) and each >= 0 for each in seeds):
        raise ValueError(
            f"a seed is an integer of 0 or more, or there are as many as prompts, {count}; {seed} was given"
        )
    return [int(each) for each in seeds]


def _prompts(prompts: Any) -> tuple[bool, list[Prompt]]:
    """Whether a single prompt was given, and a list of prompts."""
    if isinstance(prompts, str):
        return True, [prompts]
    given = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)  # a tensor's items are tensors
    if not given or isinstance(given[0], (int, np.integer)):
        return True, [given]
    return False, given


def prompt_ids(model: LanguageModel, prompt: Prompt) -> array[int]:
    """The token ids of a prompt."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError("the model has no tokenizer, so that a prompt is a list of token ids")
        prompt = [int(token) for token in model.tokenizer.encode(prompt)]
    given = prompt if isinstance(prompt, list) else np.asarray(prompt).reshape(-1).tolist()
    try:
        ids = token_array(given)
    except struct.error:
        ids = array("i")
    # As an unsigned number, an id that is negative is the largest.
    if not ids or np.frombuffer(ids, np.uint32).max() >= model.vocab_size:
        most = model.vocab_size - 1
        raise ValueError(f"a prompt has token ids from 0 to {most}, and {given[:8]} was given")
    if len(ids) > model.context:
        warnings.warn(
            f"a prompt has {len(ids)} tokens, and the model reads the last {model.context} of them",
            PenstockWarning,
            stacklevel=2,
        )
    return ids
