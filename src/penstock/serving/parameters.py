"""What a request asks for: the keys that completions and chats have in common, checked.

What is not supported is refused, unless its value asks for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.data import Tokenizer
from penstock.models import TextTokenizer
from penstock.serving.errors import ApiError, refused
from penstock.serving.fields import Fields

_MOST_TOKENS = 1 << 31  # more than any context
_MOST_CHOICES = 128  # of a prompt
_MOST_STOPS = 16
_PENALTIES = "repetition_penalty is"


@dataclass(frozen=True)
class Parameters:
    """How to answer prompts: `n` choices of each."""

    n: int
    max_tokens: int | None
    options: dict[str, Any]  # of `LanguageModel.generate`
    seed: int | None
    stream: bool
    include_usage: bool  # at the end of a stream


@dataclass(frozen=True)
class Target:
    """Who is asked: a model by its name, with as many positions for a prompt and its answer."""

    tokenizer: TextTokenizer | Tokenizer
    vocab_size: int
    name: str
    context: int


@dataclass(frozen=True)
class Asked:
    """Prompts with how many tokens may follow each, and how."""

    prompts: list[list[int]]
    lengths: list[int]
    parameters: Parameters


def parameters_of(fields: Fields, name: str, logprobs: bool, top_logprobs: int) -> Parameters:
    """Take the common keys; `name` is that of the model which is served."""
    _check_model(fields, name)
    stream = fields.boolean("stream")
    options = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 1e-6, 1),
        "top_k": fields.integer("top_k", 1, _MOST_TOKENS),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100),
        "stop": _stop(fields),
        "logprobs": logprobs,
        "top_logprobs": top_logprobs,
    }
    for key in ("presence_penalty", "frequency_penalty"):
        fields.only(key, (0, 0.0), _PENALTIES)
    fields.only("logit_bias", ({},))
    fields.text("user")  # says who asks, and changes no answer
    return Parameters(
        n=fields.integer("n", 1, _MOST_CHOICES) or 1,
        max_tokens=_max_tokens(fields),
        options={key: value for key, value in options.items() if value is not None},
        seed=fields.integer("seed", 0, (1 << 63) - 1),
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


def tokens_left(context: int, prompt: list[int], max_tokens: int | None, usual: int | None) -> int:
    """The tokens that may follow a prompt: as asked, or the usual number, or all that the context has."""
    room = context - len(prompt)
    asked = max_tokens or 1
    if asked > room:
        raise refused(
            f"there is a context of {context} tokens: the prompt has {len(prompt)}, "
            f"and {asked} more were asked for",
            code="context_length_exceeded",
        )
    return max_tokens or min(usual or room, room)


def no_model(given: str, name: str) -> ApiError:
    """The error of a model that is not there."""
    message = f"there is no model {given[:100]!r}; the model here is {name!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def _check_model(fields: Fields, name: str) -> None:
    given = fields.text("model")
    if given is not None and given != name:
        raise no_model(given, name)


def _max_tokens(fields: Fields) -> int | None:
    old, new = (fields.integer(key, 1, _MOST_TOKENS) for key in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise refused(
            f"max_tokens is {old} and max_completion_tokens is {new}: give one of them", "max_tokens"
        )
    return old if new is None else new


def _stop(fields: Fields) -> list[str] | None:
    value = fields.take("stop")
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    strings = isinstance(stops, list) and all(isinstance(each, str) and each for each in stops)
    if strings and len(stops) <= _MOST_STOPS:
        return list(stops)
    raise fields.wrong("stop", f"a string, or up to {_MOST_STOPS}, none of them empty", value)


def _include_usage(fields: Fields, stream: bool) -> bool:
    given = fields.take("stream_options")
    if given is None:
        return False
    if not stream:
        raise refused("stream_options are for streams, and stream is not true", "stream_options")
    options = Fields(given, "stream_options")
    include = options.boolean("include_usage")
    options.only("include_obfuscation", (False,))
    options.nothing_else()
    return include
