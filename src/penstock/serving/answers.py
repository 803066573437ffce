"""Answers as OpenAI's interface has them: a JSON object, or a stream of events that build it up."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol

from penstock.data import Tokenizer
from penstock.models import Piece, TextTokenizer
from penstock.serving.errors import as_json
from penstock.serving.generation import Generation
from penstock.serving.parameters import Asked

DONE = "data: [DONE]\n\n"
ALIVE = ": waiting\n\n"  # a comment, which clients skip
_TEXT = "\0"  # in the place of a text: no name of a model has it


def token_text(tokenizer: TextTokenizer | Tokenizer, token: int) -> str:
    """What log-probabilities call a token: its text, which a special token has too."""
    return tokenizer.name(token) if isinstance(tokenizer, TextTokenizer) else tokenizer.decode([token])


class Shape(Protocol):
    """How an endpoint's answers look."""

    prefix: str  # of their ids
    object: str
    chunk_object: str

    def whole(self, pieces: list[Piece], logprobs: bool) -> dict[str, Any]:
        """A choice, without its index."""

    def beginning(self) -> dict[str, Any] | None:
        """What a stream says of a choice before its first token."""

    def part(self, piece: Piece, logprobs: bool, offset: int) -> dict[str, Any]:
        """What a stream says of a further token; the text before it has `offset` characters."""


class Answer:
    """The answer to a request."""

    def __init__(self, shape: Shape, name: str, asked: Asked, generation: Generation) -> None:
        self._shape, self._asked, self._generation = shape, asked, generation
        self.logprobs = bool(asked.parameters.options["logprobs"])
        self._head = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self._tokens = 0

    async def whole(self) -> dict[str, Any]:
        """All of it."""
        choices: list[list[Piece]] = [[] for _ in range(self._generation.count)]
        async for arrived in self._generation.pieces():
            for number, piece in arrived:
                choices[number].append(piece)
            self._tokens += len(arrived)
        shaped = [
            {"index": number, **self._shape.whole(pieces, self.logprobs)}
            for number, pieces in enumerate(choices)
        ]
        return {**self._head, "object": self._shape.object, "choices": shaped, "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """The same as it comes, as server-sent events; those that have come together are one text.

        The last text ends with `DONE`.
        """
        choices = [_Choice(self, number) for number in range(self._generation.count)]
        text, beginning = "", self._shape.beginning()
        if beginning is not None:
            text = "".join(self._event(choice.number, beginning, None) for choice in choices)
        async for arrived in self._generation.pieces():
            self._tokens += len(arrived)
            text += "".join([choices[number].event(piece) for number, piece in arrived]) if arrived else ALIVE
            if text and self._generation.unfinished:
                yield text
                text = ""
        if self._asked.parameters.include_usage:
            text += self._chunk([], self._usage())
        yield text + DONE

    def event(self, number: int, piece: Piece, offset: int) -> str:
        """The event of a further token of a choice; the text before it has `offset` characters."""
        part = self._shape.part(piece, self.logprobs, offset)
        return self._event(number, part, piece.finish_reason)

    def around_text(self, number: int) -> tuple[str, str]:
        """What an event of a choice has before and after its text, without log-probabilities."""
        event = self._event(number, self._shape.part(Piece(0, 0, _TEXT), False, 0), None)
        before, _, after = event.partition(as_json(_TEXT))
        return before, after

    def _event(self, number: int, part: dict[str, Any], finish_reason: str | None) -> str:
        return self._chunk([{"index": number, **part, "finish_reason": finish_reason}], None)

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> str:
        chunk: dict[str, Any] = {**self._head, "object": self._shape.chunk_object, "choices": choices}
        if self._asked.parameters.include_usage:
            chunk["usage"] = usage
        return f"data: {as_json(chunk)}\n\n"

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._asked.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
        }


class _Choice:
    """A choice of a stream. Its events differ in their texts alone but for the last: they are made once."""

    def __init__(self, answer: Answer, number: int) -> None:
        self._answer, self.number = answer, number
        self._offset = 0  # characters so far
        self._before, self._after = answer.around_text(number)

    def event(self, piece: Piece) -> str:
        """The event of a further token; empty where that is but a part of a character."""
        text = piece.text
        if piece.finish_reason or self._answer.logprobs:
            event = self._answer.event(self.number, piece, self._offset)
            self._offset += len(text)
            return event
        return f"{self._before}{json.dumps(text)}{self._after}" if text else ""
