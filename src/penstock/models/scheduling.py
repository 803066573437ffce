"""Which sequences a step computes: they join when there is a slot and memory, and leave at their end.

If memory runs out, the sequence that came last gives its pages up, waits before all others, and is computed
again later: its tokens depend on its seed and their positions only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.models.decoders import Decoder, Step
from penstock.models.paging import PAGE, Pages, pages_of
from penstock.models.programs import bucket
from penstock.models.sequences import Piece, TokenSequence

_AHEAD = 2  # steps that are submitted before the one before them is read: fewer than `RECENT`
_PATIENCE = 16  # steps of tokens that a prompt waits for others, at most
CHUNK, CPU_CHUNK = 2048, 512  # tokens of a step of prompts: on a GPU, and elsewhere
_ALONE = 2  # times as many on a GPU where no tokens wait for that step


@dataclass
class Counts:
    """What a scheduler has done so far."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_tokens: int = 0
    preempted: int = 0
    steps: int = 0


class Scheduler:
    """Sequences that wait, and those that are computed with a decoder."""

    def __init__(
        self, decoder: Decoder, give: Callable[[TokenSequence, Piece], None], prompts_first: bool = False
    ) -> None:
        """`give` is called with each piece as soon as it is known.

        Prompts wait for each other while tokens are computed, as a step of prompts takes about as long as
        one of tokens, however few they are; unless `prompts_first`: then all of a batch start together.
        """
        self.decoder, self.pages, self.counts = decoder, Pages(decoder.pages), Counts()
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []
        self.blocked = False  # whether the next sequence waits for pages, although there is a slot
        self._give = give
        self._slots = list(reversed(range(decoder.slots)))  # which are free
        self._pending: deque[Step] = deque()  # steps on their way
        self._arrivals = 0
        self._prompts_first = prompts_first
        self._waited, self._idle = 0, 0  # steps of tokens since the last prompts, and slots idle in these
        # Tokens that a step takes at most of a prompt, and of all prompts with padding.
        chunk = CHUNK * (_ALONE if prompts_first else 1)
        self.most_tokens = chunk if decoder.device.capabilities.kind == "gpu" else min(CHUNK, CPU_CHUNK)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self.running or self._pending)

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for its turn."""
        sequence.order = self._arrivals
        self._arrivals += 1
        sequence.begin(self.decoder.context)
        self.counts.prompt_tokens += sequence.prompt_length
        self.waiting.append(sequence)

    def cancel(self, sequence: TokenSequence) -> None:
        """End a sequence, wherever it is."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "cancelled"
            if sequence.slot >= 0:
                self._leave(sequence)
            else:
                self.waiting.remove(sequence)

    def advance(self) -> None:
        """Submit a step, and read those before it that are done, so that the device waits for no host."""
        self._admit()
        self.blocked = bool(self.waiting and self._slots)
        step = self._next()
        if step is not None:
            self.counts.steps += 1
            self._pending.append(step)
        if self._pending and (step is None or len(self._pending) > _AHEAD):
            self._read(self._pending.popleft())
        while self._pending and self._pending[0].mail.is_ready():
            self._read(self._pending.popleft())

    def _next(self) -> Step | None:
        """The next step, of prompts or of tokens."""
        prompts = self._prompts()
        if not prompts or self._wait_for_more(len(prompts)):
            if going := self._going():
                self._waited += 1
                self._idle += len(prompts)
                return self.decoder.tokens(going)
            prompts = self._prompts()
        if not prompts:
            return None
        self._waited = self._idle = 0
        return self._take_prompts(prompts)

    def _prompts(self) -> list[TokenSequence]:
        return [sequence for sequence in self.running if sequence.computed < sequence.target]

    def _wait_for_more(self, prompts: int) -> bool:
        """Whether a step of prompts costs the other sequences more than it cost these to wait so far."""
        others = len(self.running) - prompts
        return not self._prompts_first and self._waited < _PATIENCE and self._idle < others

    # Joining and leaving

    def _admit(self) -> None:
        while self.waiting and self._slots and not self._enough():
            sequence = self.waiting[0]
            target = sequence.length
            known, coming = self._known(sequence, (target - 1) // PAGE)  # the last token is always computed
            if coming:
                return
            shared = self.pages.share(known)
            more = pages_of(min(target + 1, self.decoder.context)) - len(shared)
            left = self.pages.available - more
            # Each sequence is looked at only where pages are so few that it may matter.
            if left < len(self.running) and left < sum(map(self._may_grow, self.running)):
                self.pages.give_back(shared)
                return
            self.waiting.popleft()
            sequence.pages = shared + self.pages.take(more)
            sequence.slot = self._slots.pop()
            sequence.target, sequence.computed = target, len(shared) * PAGE
            sequence.published = len(shared)
            sequence.asked = len(sequence.ids) - sequence.prompt_length
            self.counts.prefix_tokens += sequence.computed
            self.decoder.admit(sequence)
            self.running.append(sequence)

    def _enough(self) -> bool:
        """Whether the device has two steps of a batch's prompts to take before it needs to know of others."""
        if not self._prompts_first:
            return False
        return sum(each.target - each.computed for each in self._prompts()) >= 2 * self.most_tokens

    def _may_grow(self, sequence: TokenSequence) -> bool:
        """Whether a sequence may need a further page, which should be there when it does."""
        most = sequence.length + sequence.max_tokens - sequence.asked
        return len(sequence.pages) < pages_of(min(most, self.decoder.context))

    def _known(self, sequence: TokenSequence, most: int) -> tuple[list[bytes], bool]:
        """The digests of its first pages that are known, and whether a prompt will soon have the next one.

        Of up to `most` pages; no more digests are computed than it takes.
        """
        known: list[bytes] = []
        others = self._prompts()
        if not others and not self.pages.knows_any:
            return known, False
        while (digest := self._digest(sequence, len(known), most)) and self.pages.knows(digest):
            known.append(digest)
        at = len(known)
        return known, digest is not None and any(
            self._digest(other, at, other.target // PAGE) == digest for other in others
        )

    def _digest(self, sequence: TokenSequence, page: int, most: int) -> bytes | None:
        """That of one of the first `most` pages, if it can be shared."""
        digests = self._prefix(sequence, page + 1)[page:] if page < most else []
        return digests[0] if digests else None

    def _leave(self, sequence: TokenSequence) -> None:
        self.running.remove(sequence)
        self.pages.give_back(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.pages, sequence.slot = [], -1

    def _wait_again(self, sequence: TokenSequence) -> None:
        self._leave(sequence)
        self.waiting.appendleft(sequence)

    # Steps

    def _take_prompts(self, prompts: list[TokenSequence]) -> Step:
        """A step with the next part of one prompt or several."""
        parts: list[tuple[TokenSequence, int]] = []
        longest, most = 0, self.most_tokens
        mixes = self.decoder.from_pages
        for sequence in prompts:
            if not mixes and (sequence.computed == 0) != (prompts[0].computed == 0):
                continue  # those that start have programs of their own
            count = min(sequence.target - sequence.computed, most)
            longest = max(longest, count)
            together = bucket(len(parts) + 1, 1, self.decoder.slots) * bucket(longest, 16, 1 << 30)
            if parts and together > most:
                break
            parts.append((sequence, count))
        step = self.decoder.prompts(parts)
        for sequence, count in parts:
            sequence.computed += count
            sequence.asked += sequence.computed == sequence.target
            self._publish(sequence)
        return step

    def _going(self) -> list[TokenSequence]:
        """The sequences that take a token next, with pages for it."""
        while True:
            going = [
                sequence
                for sequence in self.running
                if sequence.computed >= sequence.target and sequence.asked < sequence.max_tokens
            ]
            full = [sequence for sequence in going if sequence.computed >= self.decoder.context]
            short = [sequence for sequence in going if sequence.computed >= len(sequence.pages) * PAGE]
            if not full and len(short) <= self.pages.available:
                break
            if self._pending:  # sequences may end with what is on its way
                self._read(self._pending.popleft())
                continue
            for sequence in sorted(full, key=lambda sequence: -sequence.order):
                sequence.begin(max(self.decoder.context // 2, 1))
                self._wait_again(sequence)
            if not full:
                self._wait_again(max(self.running, key=lambda sequence: sequence.order))
                self.counts.preempted += 1
        if short:
            self._add_pages(short, going)
        for sequence in going:
            sequence.computed += 1
            sequence.asked += 1
        return going

    def _add_pages(self, short: list[TokenSequence], going: list[TokenSequence]) -> None:
        """Give a page to each sequence that is short of it.

        If there are plenty, also to those that soon will be: then tables change for all at the same steps,
        and the steps between these are alike.
        """
        soon = [
            sequence
            for sequence in going
            if 0 < len(sequence.pages) * PAGE - sequence.computed < PAGE and self._may_grow(sequence)
        ]
        taking = [*short, *soon]
        if len(taking) > self.pages.available // 2:
            taking = short
        for sequence, page in zip(taking, self.pages.take(len(taking)), strict=True):
            self.decoder.add_page(sequence, page)

    def _read(self, step: Step) -> None:
        """Wait for the tokens of a step, and give them to their sequences."""
        ids = step.mail.wait().take(step.places).tolist()
        logprobs = None if step.logprobs is None else step.logprobs.wait().tolist()
        top = None
        if step.top_ids is not None and step.top_logprobs is not None:
            top = step.top_ids.wait().tolist(), step.top_logprobs.wait().tolist()
        for row, sequence in enumerate(step.rows):
            if sequence is None or sequence.finish_reason:
                continue
            logprob = None if logprobs is None else logprobs[row]
            likeliest = [] if top is None else list(zip(top[0][row], top[1][row], strict=True))
            piece = sequence.push(ids[row], logprob, likeliest)
            self.counts.generated_tokens += 1
            if sequence.length >= (sequence.published + 1) * PAGE:
                self._publish(sequence)
            if sequence.finish_reason:
                self._leave(sequence)
            self._give(sequence, piece)

    def _publish(self, sequence: TokenSequence) -> None:
        """Let others share the pages that are full."""
        known = min(sequence.computed, sequence.length) // PAGE
        if known > sequence.published:
            prefix = self._prefix(sequence, known)[sequence.published :]
            for page, digest in zip(sequence.pages[sequence.published : known], prefix, strict=False):
                self.pages.publish(page, digest)
            sequence.published = known

    def _prefix(self, sequence: TokenSequence, count: int) -> list[bytes]:
        """The digests of the pages that can be shared, of the first `count`."""
        steady = self.decoder.steady
        return sequence.digests(PAGE, min(count, steady // PAGE)) if sequence.first <= steady else []
