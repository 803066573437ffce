"""Sequences: a prompt with the tokens after it, when these stop, and where its keys and values are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.data.tokenizer import StreamDecoder, TextStream
from penstock.models.paging import digests
from penstock.models.sampling import Sampling, seed_words

if TYPE_CHECKING:
    from penstock.models.model import LanguageModel


_BEFORE = 8  # ids of a prompt, which tell whether there is a space before what follows


class Piece(NamedTuple):
    """A token as it is generated. The text is what it completes, and may be empty."""

    index: int  # type: ignore[assignment] # of the prompt; hides a method of tuples that nobody needs
    id: int  # -1: there is no further token, since the request was cancelled
    text: str
    logprob: float | None = None
    finish_reason: str | None = None  # of the last piece: see `Completion`
    top_logprobs: Sequence[tuple[int, float]] = ()  # of the likeliest tokens, if asked for


@dataclass
class Completion:
    """What was generated after a prompt.

    `finish_reason`: "stop" if it ended with a stop token or string, "length" if it has as many tokens as were
    asked for, "cancelled" if it was. A stop token is the last of the ids, and the text ends before a stop
    string. `top_logprobs` has, for each token, ids of the likeliest with their log-probabilities.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"
    top_logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        if piece.id >= 0:
            self.ids.append(piece.id)
        self.text += piece.text
        if piece.logprob is not None:
            self.logprobs.append(piece.logprob)
        if piece.top_logprobs:
            self.top_logprobs.append(piece.top_logprobs)
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason


@dataclass(frozen=True)
class Wanted:
    """What a request asks for beside its prompt."""

    max_tokens: int
    setting: Sampling
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: frozenset[int] = frozenset()


class TokenSequence:
    """A prompt with what was generated after it."""

    def __init__(self, model: LanguageModel, index: int, prompt: Sequence[int], wanted: Wanted) -> None:
        self.index, self.ids, self.setting = index, array("i", prompt), wanted.setting
        self.max_tokens, self.prompt_length = wanted.max_tokens, len(prompt)
        self.seed = seed_words(wanted.seed)
        self.finish_reason: str | None = None
        self._stop, self._stop_tokens = wanted.stop, wanted.stop_tokens
        self._decoder = None if model.tokenizer is None else model.tokenizer.stream()
        if isinstance(self._decoder, TextStream):
            self._decoder.follow(prompt[-_BEFORE:])
        self._textless = model.vocab_size  # the first id that has no text: a model may have more ids
        if isinstance(self._decoder, StreamDecoder) and model.tokenizer is not None:
            self._textless = model.tokenizer.vocab_size
        self._held = ""  # text that may be the beginning of a stop string
        # What a scheduler knows of it. Positions count from `origin`, the first token that is attended to.
        self.order = -1  # of arrival
        self.origin = 0
        self.first = 0  # tokens that there were when the sequence got its origin
        self.target = 0  # positions to compute before the next token can be drawn
        self.computed = 0  # positions whose keys and values are written, or will be by a step on its way
        self.asked = 0  # tokens that are here, or on their way
        self.slot = -1
        self.pages: list[int] = []
        self.published = 0  # pages that others may share
        self._digests: list[bytes] = []

    def begin(self, limit: int) -> None:
        """Start, with the last `limit` tokens; also after the older tokens were dropped."""
        self.origin = max(len(self.ids) - limit, 0)
        self.first = len(self.ids) - self.origin
        self._digests = []

    @property
    def length(self) -> int:
        """How many tokens are attended to."""
        return len(self.ids) - self.origin

    def digests(self, size: int, count: int) -> list[bytes]:
        """Those of its first `count` pages, or of as many as are full."""
        if len(self._digests) < min(count, self.length // size):
            tokens = self.ids[self.origin : self.origin + count * size]
            self._digests = digests(tokens, size, self._digests)
        return self._digests[:count]

    def push(self, token: int, logprob: float | None = None, top: Sequence[tuple[int, float]] = ()) -> Piece:
        """The piece of a further token, given what was computed for it; it has what was asked for."""
        self.ids.append(token)
        if token in self._stop_tokens:
            self.finish_reason = "stop"
        elif len(self.ids) - self.prompt_length == self.max_tokens:
            self.finish_reason = "length"
        text = "" if self._decoder is None else self._text(token, self._decoder)
        asked = self.setting
        logprob = logprob if asked.logprobs else None
        return Piece(self.index, token, text, logprob, self.finish_reason, tuple(top[: asked.top_logprobs]))

    def _text(self, token: int, decoder: TextStream | StreamDecoder) -> str:
        """The text that a further token completes; a stop string in it ends the sequence."""
        text = self._held
        if token not in self._stop_tokens and token < self._textless:
            text += decoder.push([token])
        if self.finish_reason:
            text += decoder.finish()
        if not self._stop:
            return text
        ends = [place for string in self._stop if (place := text.find(string)) >= 0]
        if ends:
            text, self.finish_reason = text[: min(ends)], "stop"
        self._held = "" if self.finish_reason else _beginning(text, self._stop)
        return text[: len(text) - len(self._held)]


def _beginning(text: str, stop: Sequence[str]) -> str:
    """The longest end of a text that a stop string begins with; not the whole string."""
    longest = ""
    for string in stop:
        end = text[max(len(text) - len(string) + 1, 0) :]
        at = end.find(string[0])  # at most tokens it is not there, and little was done
        while at >= 0 and not string.startswith(end[at:]):
            at = end.find(string[0], at + 1)
        if 0 <= at < len(end) - len(longest):
            longest = end[at:]
    return longest
