"""`/v1/chat/completions`: conversations, by the model's chat template."""

from __future__ import annotations

from typing import Any

from penstock.data import Tokenizer
from penstock.errors import PenstockError
from penstock.models import Piece, TextTokenizer
from penstock.models.sampling import MOST_TOP
from penstock.serving.answers import token_text
from penstock.serving.errors import refused
from penstock.serving.fields import Fields
from penstock.serving.parameters import Asked, Target, parameters_of, tokens_left

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = "a string, or a list of parts such as {'type': 'text', 'text': '...'}"
# Keys that are not supported, and their values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "verbosity": (),
    "web_search_options": (),
}


def has_chat(tokenizer: TextTokenizer | Tokenizer) -> bool:
    """Whether there is a chat template."""
    return isinstance(tokenizer, TextTokenizer) and bool(tokenizer.template)


def asked(target: Target, body: Any) -> Asked:
    """What the body of a request asks for."""
    fields = Fields(body)
    messages = _messages(fields)
    logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, MOST_TOP)
    if top_logprobs and not logprobs:
        raise refused("top_logprobs are given with logprobs, which is not true", "top_logprobs")
    for key, harmless in _UNSUPPORTED.items():
        fields.only(key, harmless)
    for key in ("safety_identifier", "prompt_cache_key"):  # which change no answer, as `user`
        fields.text(key)
    parameters = parameters_of(fields, target.name, logprobs, top_logprobs or 0)
    fields.nothing_else()
    tokenizer = target.tokenizer
    if not has_chat(tokenizer):
        raise refused("the model has no chat template; /v1/completions continues a text with it", "messages")
    assert isinstance(tokenizer, TextTokenizer)
    try:
        prompt = tokenizer.chat(messages)
    except PenstockError as error:  # such as roles that do not alternate
        raise refused(str(error), "messages") from None
    except Exception as error:  # a template is a program, and may fail in any way
        raise refused(f"the chat template fails with these messages: {error!r}", "messages") from None
    if not prompt:
        raise refused("the chat template makes an empty prompt of these messages", "messages")
    return Asked([prompt], [tokens_left(target.context, prompt, parameters.max_tokens, None)], parameters)


class Messages:
    """Answers to `/v1/chat/completions`."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: TextTokenizer | Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(self, pieces: list[Piece], logprobs: bool) -> dict[str, Any]:
        """A choice, without its index."""
        text = "".join(piece.text for piece in pieces)
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(pieces) if logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }

    def beginning(self) -> dict[str, Any] | None:
        """What a stream says of a choice before its first token."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, piece: Piece, logprobs: bool, offset: int) -> dict[str, Any]:
        """What a stream says of a further token."""
        return {"delta": {"content": piece.text}, "logprobs": self._logprobs([piece]) if logprobs else None}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        return {"content": [self._token(piece) for piece in pieces], "refusal": None}

    def _token(self, piece: Piece) -> dict[str, Any]:
        likeliest = [self._with_logprob(*pair) for pair in piece.top_logprobs]
        return {**self._with_logprob(piece.id, piece.logprob), "top_logprobs": likeliest}

    def _with_logprob(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = token_text(self._tokenizer, token)
        # A token may be a part of a character: then its bytes are not told.
        content = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": content}


def _messages(fields: Fields) -> list[dict[str, str]]:
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise fields.wrong("messages", "a list with a message or more", given)
    return [_message(Fields(message, f"messages[{at}]")) for at, message in enumerate(given)]


def _message(fields: Fields) -> dict[str, str]:
    role = fields.text("role") or ""
    if role not in _ROLES:
        raise fields.wrong("role", "system, developer, user or assistant", role)
    message = {"role": _ROLES[role], "content": _content(fields)}
    name = fields.text("name")
    for key in ("tool_calls", "annotations"):
        fields.only(key, ([],))
    for key in ("refusal", "audio", "function_call"):
        fields.only(key, ())
    fields.nothing_else()
    return message if name is None else {**message, "name": name}


def _content(fields: Fields) -> str:
    given = fields.take("content")
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise fields.wrong("content", _PARTS, given)
    texts = []
    for part in given:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise fields.wrong("content", _PARTS, part)
        texts.append(part["text"])
    return "\n".join(texts)
