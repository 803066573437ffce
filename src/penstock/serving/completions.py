"""`/v1/completions`: texts that are continued."""

from __future__ import annotations

from typing import Any

from penstock.data import Tokenizer
from penstock.errors import PenstockError
from penstock.models import Piece, TextTokenizer
from penstock.serving.answers import token_text
from penstock.serving.errors import refused
from penstock.serving.fields import Fields, is_integer
from penstock.serving.parameters import Asked, Target, parameters_of, tokens_left

_MOST_LOGPROBS = 5  # as OpenAI's
_USUAL_TOKENS = 16  # OpenAI's default
_KINDS = "a string, a list of strings, a list of token ids, or a list of such lists"


def asked(target: Target, body: Any) -> Asked:
    """What the body of a request asks for."""
    fields = Fields(body)
    prompts = _prompts(target, fields)
    logprobs = fields.integer("logprobs", 0, _MOST_LOGPROBS)
    fields.only("echo", (False,))
    fields.only("suffix", ("",))
    parameters = parameters_of(fields, target.name, logprobs is not None, logprobs or 0)
    fields.only("best_of", (parameters.n,), "it can only be equal to n")
    fields.nothing_else()
    lengths = [
        tokens_left(target.context, prompt, parameters.max_tokens, _USUAL_TOKENS) for prompt in prompts
    ]
    return Asked(prompts, lengths, parameters)


class Texts:
    """Answers to `/v1/completions`."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: TextTokenizer | Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(self, pieces: list[Piece], logprobs: bool) -> dict[str, Any]:
        """A choice, without its index."""
        return {**self._told(pieces, logprobs, 0), "finish_reason": pieces[-1].finish_reason}

    def beginning(self) -> dict[str, Any] | None:
        """What a stream says of a choice before its first token."""
        return None

    def part(self, piece: Piece, logprobs: bool, offset: int) -> dict[str, Any]:
        """What a stream says of a further token; the text before it has `offset` characters."""
        return self._told([piece], logprobs, offset)

    def _told(self, pieces: list[Piece], logprobs: bool, offset: int) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        return {"text": text, "logprobs": self._logprobs(pieces, offset) if logprobs else None}

    def _logprobs(self, pieces: list[Piece], offset: int) -> dict[str, Any]:
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece.text)
        return {
            "tokens": [token_text(self._tokenizer, piece.id) for piece in pieces],
            "token_logprobs": [piece.logprob for piece in pieces],
            "top_logprobs": [self._likeliest(piece) for piece in pieces] if pieces[0].top_logprobs else None,
            "text_offset": offsets,
        }

    def _likeliest(self, piece: Piece) -> dict[str, float | None]:
        """By their texts, the likeliest tokens; the token itself is always among them."""
        result: dict[str, float | None] = {}
        for token, logprob in (*piece.top_logprobs, (piece.id, piece.logprob)):
            result.setdefault(token_text(self._tokenizer, token), logprob)
        return result


def _prompts(target: Target, fields: Fields) -> list[list[int]]:
    given = fields.take("prompt")
    if given is None:
        raise refused(f"prompt is missing: {_KINDS}", "prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and all(map(is_integer, given))):
        given = [given]
    if not isinstance(given, list) or not given:
        raise fields.wrong("prompt", _KINDS, given)
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append(_encoded(target.tokenizer, prompt))
        elif isinstance(prompt, list) and all(map(is_integer, prompt)):
            prompts.append(prompt)
        else:
            raise fields.wrong("prompt", _KINDS, given)
    most = target.vocab_size - 1
    for prompt in prompts:
        if not prompt:
            raise refused("a prompt has a token or more, and an empty prompt was given", "prompt")
        if min(prompt) < 0 or max(prompt) > most:
            raise refused(f"token ids are from 0 to {most}, and a prompt has others", "prompt")
    return prompts


def _encoded(tokenizer: TextTokenizer | Tokenizer, text: str) -> list[int]:
    """The token ids of a prompt."""
    try:
        return [int(token) for token in tokenizer.encode(text)]
    except (PenstockError, ValueError) as error:  # characters that the tokenizer does not know
        raise refused(f"the prompt cannot be tokenized: {error}", "prompt") from None
