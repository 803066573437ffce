"""Answers as OpenAI's interface has them: a JSON object, or a stream of events that build it up."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol

from penstock.models import Piece
from penstock.serving.errors import as_json
from penstock.serving.generation import Generation
from penstock.serving.parameters import Asked

DONE = "data: [DONE]\n\n"
ALIVE = ": waiting\n\n"  # a comment, which clients skip


class Shape(Protocol):
    """How an endpoint's answers look."""

    prefix: str  # of their ids
    object: str
    chunk_object: str

    def whole(self, pieces: list[Piece], logprobs: bool) -> dict[str, Any]:
        """A choice, without its index."""

    def beginning(self) -> dict[str, Any] | None:
        """What a stream says of a choice before its first token."""

    def part(self, pieces: list[Piece], logprobs: bool, offset: int) -> dict[str, Any]:
        """What a stream says of further tokens; the text before them has `offset` characters."""


class Answer:
    """The answer to a request."""

    def __init__(self, shape: Shape, name: str, asked: Asked, generation: Generation) -> None:
        self._shape, self._asked, self._generation = shape, asked, generation
        self._logprobs = bool(asked.parameters.options["logprobs"])
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
            {"index": number, **self._shape.whole(pieces, self._logprobs)}
            for number, pieces in enumerate(choices)
        ]
        return {**self._head, "object": self._shape.object, "choices": shaped, "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """The same as it comes, as server-sent events."""
        beginning = self._shape.beginning()
        if beginning is not None:
            for number in range(self._generation.count):
                yield self._event(number, beginning, None)
        offsets = [0] * self._generation.count
        async for arrived in self._generation.pieces():
            self._tokens += len(arrived)
            parts: dict[int, list[Piece]] = {}
            for number, piece in arrived:
                parts.setdefault(number, []).append(piece)
            events = [self._part(number, pieces, offsets) for number, pieces in parts.items()]
            if text := "".join(events) if arrived else ALIVE:
                yield text
        if self._asked.parameters.include_usage:
            yield self._chunk([], self._usage())
        yield DONE

    def _part(self, number: int, pieces: list[Piece], offsets: list[int]) -> str:
        length, finish_reason = sum(len(piece.text) for piece in pieces), pieces[-1].finish_reason
        if not (length or finish_reason or self._logprobs):
            return ""  # a part of a character
        part = self._shape.part(pieces, self._logprobs, offsets[number])
        offsets[number] += length
        return self._event(number, part, finish_reason)

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
