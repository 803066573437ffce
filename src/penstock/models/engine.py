"""The engine: many requests at once, each with its own prompt and options, that come and go at any time."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from penstock.config import parse_bytes
from penstock.errors import EngineClosed, PenstockError, PenstockWarning, QueueFull
from penstock.formatting import format_bytes
from penstock.models.decoders import Decoder
from penstock.models.generation import Prompt, prompt_ids, wanted_of
from penstock.models.paging import PAGE, most_pages, page_bytes, pages_of
from penstock.models.programs import Bucket
from penstock.models.scheduling import Scheduler
from penstock.models.sequences import Completion, Piece, TokenSequence
from penstock.tensor.core import resolve

if TYPE_CHECKING:
    from penstock.models.model import LanguageModel

_SHARE = 2  # of the memory that is free, keys and values take at most this part


@dataclass(frozen=True)
class EngineStats:
    """What an engine does, and has done so far.

    `pages_used` are those of running requests; others may hold prefixes that later requests share.
    `prefix_tokens` were not computed, thanks to such a prefix.
    """

    slots: int
    running: int
    waiting: int
    pages: int
    pages_used: int
    page_bytes: int
    requests: int
    finished: int
    cancelled: int
    preempted: int
    prompt_tokens: int
    generated_tokens: int
    prefix_tokens: int
    steps: int
    programs: int


class Request:
    """A prompt that an engine continues. Iteration gives the pieces as they come, as often as it is done."""

    def __init__(self, engine: Engine, id: int, sequence: TokenSequence) -> None:
        self.id, self.prompt_tokens = id, list(sequence.ids)
        self._engine, self._sequence = engine, sequence
        self._lock = threading.RLock()  # whose own methods are faster than those of a condition
        self._changed, self._waiting = threading.Condition(self._lock), 0  # and how many threads wait for it
        self._pieces: list[Piece] = []
        self._callbacks: list[Callable[[Piece | Exception], None]] = []
        self._completion: Completion | None = None
        self._error: Exception | None = None
        self._done = sequence.max_tokens == 0

    @property
    def done(self) -> bool:
        """Whether no further piece will come."""
        return self._done

    def __iter__(self) -> Iterator[Piece]:
        at = 0
        while True:
            with self._changed:
                self._wait_for(lambda: self._done or len(self._pieces) > at)  # noqa: B023 - called here
                pieces, done = self._pieces[at:], self._done
            yield from pieces
            at += len(pieces)
            if done:
                if self._error is not None:
                    raise self._error
                return

    def result(self) -> Completion:
        """Wait for the end: all that was generated."""
        with self._changed:
            self._wait_for(lambda: self._done)
            if self._error is not None:
                raise self._error
            if self._completion is None:
                self._completion = Completion()
                for piece in self._pieces:
                    self._completion.add(piece)
        return self._completion

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._waiting += 1
        try:
            self._changed.wait_for(condition)
        finally:
            self._waiting -= 1

    def cancel(self) -> None:
        """End it before the next step; its last piece then has the finish_reason "cancelled"."""
        self._engine._cancel(self)

    def on_piece(self, callback: Callable[[Piece | Exception], None]) -> None:
        """Call a function with each piece, those that came before too, and with the error if it fails.

        It is called by the engine's thread, and should return at once. The last piece has a finish_reason.
        """
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
            for piece in self._pieces:
                callback(piece)
            if self._error is not None:
                callback(self._error)

    def _add(self, piece: Piece) -> None:
        with self._lock:
            self._pieces.append(piece)
            self._done = piece.finish_reason is not None
            self._tell(piece)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error, self._done = error, True
            self._tell(error)

    def _tell(self, news: Piece | Exception) -> None:
        if self._waiting:
            self._changed.notify_all()
        callbacks = self._callbacks
        if self._done:  # a callback that holds its request would keep both until Python looks for cycles
            self._callbacks = []
        for callback in tuple(callbacks):
            try:
                callback(news)
            except Exception as error:  # which is no reason to end all other requests
                callbacks.remove(callback)
                warnings.warn(
                    f"a callback of request {self.id} failed and is not called again: {error!r}",
                    PenstockWarning,
                    stacklevel=2,
                )


class Engine:
    """Generates for up to `slots` requests at once, which join and leave between steps.

    `memory`, in bytes or such as "2GiB", is that of all keys and values, in pages. Without it, they get what
    all slots need for the model's whole context, but at most half of the device's memory that is not in use.
    Up to `queue` requests wait; `close` it at the end, or use it in a `with` block.

    >>> config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    >>> config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    >>> with ps.models.Engine(ps.models.build(config, device="host"), slots=4) as engine:
    ...     requests = [engine.submit([1, 2, token], max_tokens=5) for token in range(4)]
    ...     [len(request.result().ids) for request in requests]
    [5, 5, 5, 5]
    """

    def __init__(
        self, model: LanguageModel, slots: int = 64, memory: int | str | None = None, queue: int = 256
    ) -> None:
        if slots < 1 or queue < 1:
            raise ValueError(f"an engine has 1 slot and place for 1 request or more; {slots}, {queue} given")
        self._model, self._queue = model, queue
        self._page_bytes = page_bytes(model)
        self._decoder = Decoder(model, slots, self._page_count(slots, memory))
        self._scheduler = Scheduler(self._decoder, self._give)
        self._requests: dict[TokenSequence, Request] = {}  # those that are open
        self._arrived: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._to_prepare: deque[Bucket] = deque()
        self._all_to_prepare = 0
        self._submitted = self._finished = self._cancellations = 0
        self._closing = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()  # guards all of the above but the scheduler
        self._after_step: list[Callable[[], None]] = []
        self._decoder.begin()
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._work, name="penstock engine", daemon=True)
        self._thread.start()

    def _page_count(self, slots: int, memory: int | str | None) -> int:
        if memory is None:
            device = resolve(self._model.head_weight.device)
            stats = device.memory_stats()
            limit = stats.limit_bytes or device.capabilities.total_bytes
            free = max(limit - stats.live_bytes, 0) // _SHARE
            wanted = slots * pages_of(self._model.context)
            return max(min(free // self._page_bytes, wanted, most_pages(self._model)), 1)
        pages, most = parse_bytes(memory) // self._page_bytes, most_pages(self._model)
        if not 0 < pages <= most:
            sizes = [format_bytes(count * self._page_bytes) for count in (1, most)]
            raise ValueError(
                f"keys and values take {sizes[0]} to {sizes[1]}, and memory={memory!r} was given"
            )
        return pages

    # What others call

    def submit(self, prompt: Prompt, max_tokens: int = 128, **options: Any) -> Request:
        """Have a prompt continued, with the options of `LanguageModel.generate`; returns at once."""
        ids, wanted = prompt_ids(self._model, prompt), wanted_of(self._model, max_tokens, options)
        sequence = TokenSequence(self._model, 0, ids, wanted)
        self._check_size(len(ids), max_tokens)
        with self._changed:
            if self._closing:
                raise EngineClosed("the engine is closed") from self._failure
            if self._waiting() >= self._queue:
                raise QueueFull(f"{self._queue} requests are waiting already, as many as the queue takes")
            request = Request(self, self._submitted, sequence)
            self._submitted += 1
            if request.done:
                self._finished += 1
            else:
                self._requests[sequence] = request
                self._arrived.append(request)
                self._changed.notify_all()
        return request

    def _waiting(self) -> int:
        """How many requests wait; those that just came do not if there are slots for them."""
        scheduler = self._scheduler
        count = len(scheduler.waiting) + len(self._arrived)
        free = 0 if scheduler.blocked else self._decoder.slots - len(scheduler.running)
        return max(count - free, 0)

    def _check_size(self, prompt: int, max_tokens: int) -> None:
        positions = min(prompt + max_tokens, self._model.context)
        most = self._decoder.pages
        if pages_of(positions) > most:
            raise ValueError(
                f"a prompt of {prompt} tokens with up to {max_tokens} more takes {pages_of(positions)} pages "
                f"of {PAGE} positions, and the engine has {most}; give it memory of "
                f"{format_bytes(pages_of(positions) * self._page_bytes)} or more, or ask for less"
            )

    def stats(self) -> EngineStats:
        """What it does at present, and has done so far."""
        with self._changed:
            scheduler, counts = self._scheduler, self._scheduler.counts
            return EngineStats(
                slots=self._decoder.slots,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting) + len(self._arrived),
                pages=self._decoder.pages,
                pages_used=scheduler.pages.used,
                page_bytes=self._page_bytes,
                requests=self._submitted,
                finished=self._finished,
                cancelled=self._cancellations,
                preempted=counts.preempted,
                prompt_tokens=counts.prompt_tokens,
                generated_tokens=counts.generated_tokens,
                prefix_tokens=counts.prefix_tokens,
                steps=counts.steps,
                programs=len(self._decoder.programs),
            )

    def prepare(self) -> None:
        """Build programs that can take any step, and from then on all others in the background.

        So no request waits for a compiler for long. It returns at once; `preparing` says how far it is.
        Requests are taken meanwhile. On a device without a compiler, there is nothing to prepare.
        """
        device = self._decoder.device
        if device.capabilities.compiles and device.dispatcher is None:
            with self._changed:
                self._to_prepare.extend(self._decoder.covering(self._scheduler.most_tokens))
                self._all_to_prepare = len(self._to_prepare)
                self._changed.notify_all()

    def after_step(self, callback: Callable[[], None]) -> None:
        """Call a function after each step, and after requests were cancelled, in the engine's thread.

        It comes after the callbacks of all pieces of that step (`Request.on_piece`), and should not fail.
        """
        self._after_step.append(callback)

    @property
    def preparing(self) -> tuple[int, int]:
        """How many of the programs that `prepare` builds there are, and how many there will be."""
        with self._changed:
            return self._all_to_prepare - len(self._to_prepare), self._all_to_prepare

    @property
    def context(self) -> int:
        """The most positions of a request: the model's, or those of all pages if these are fewer."""
        return min(self._model.context, self._decoder.pages * PAGE)

    @property
    def failure(self) -> Exception | None:
        """What the engine has failed with, if it has; it takes no requests then."""
        return self._failure

    def close(self) -> None:
        """End; requests that are open fail with `EngineClosed`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # The engine's thread

    def _work(self) -> None:
        error: Exception = EngineClosed("the engine was closed before the request was complete")
        try:
            while self._take_news():
                if self._to_prepare:
                    self._prepare_next()
                if self._scheduler.busy:
                    self._scheduler.advance()
                for callback in self._after_step:
                    callback()
        except Exception as failure:  # whatever it is, nobody should wait for ever
            error = failure
        with self._changed:
            self._closing = True
            self._failure = None if isinstance(error, EngineClosed) else error
            open_requests = list(self._requests.values())
            self._requests.clear()
        self._decoder.programs.close()
        self._decoder.release()
        for request in open_requests:
            request._fail(error)

    def _prepare_next(self) -> None:
        try:
            self._decoder.cover(self._to_prepare[0])
        except PenstockError as error:  # of memory, perhaps: programs are built when they are needed, then
            warnings.warn(f"a program cannot be built ahead: {error}", PenstockWarning, stacklevel=2)
        with self._changed:
            self._to_prepare.popleft()

    def _take_news(self) -> bool:
        """Wait until there is something to do, and take requests in; False: the engine is closing."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closing
                    or self._arrived
                    or self._cancelled
                    or self._to_prepare
                    or self._scheduler.busy
                )
            )
            if self._closing:
                return False
            for request in self._arrived:
                self._scheduler.add(request._sequence)
            self._arrived.clear()
            cancelled = list(self._cancelled)
            self._cancelled.clear()
        for request in cancelled:
            if not request.done:
                self._scheduler.cancel(request._sequence)
                self._end(request, Piece(0, -1, "", finish_reason="cancelled"))
        return True

    def _cancel(self, request: Request) -> None:
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify_all()

    def _give(self, sequence: TokenSequence, piece: Piece) -> None:
        request = self._requests[sequence]
        if piece.finish_reason is None:
            request._add(piece)
        else:
            self._end(request, piece)

    def _end(self, request: Request, last: Piece) -> None:
        with self._changed:
            del self._requests[request._sequence]
            if last.finish_reason == "cancelled":
                self._cancellations += 1
            else:
                self._finished += 1
        request._add(last)
