"""Decoders: the pages of keys and values of all sequences, and the programs that extend them.

There is a program for each bucket of sequences, of new tokens and of pages that are attended to, not for each
length: see `programs`. The last tokens and the lengths of sequences are on the device: a step needs nothing
of the step before it from the host, and gives it token ids.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.graph.dtypes import DType
from penstock.graph.node import leaf
from penstock.graph.paged_attention import on_tensor_cores, reads_pages
from penstock.lru import LRU
from penstock.models.adjoining import adjoin
from penstock.models.attending import PagedAttention, StepAttention
from penstock.models.paging import PAGE, most_pages, pages_of
from penstock.models.programs import Bucket, Programs, bucket, covering, jitted, weakly
from penstock.models.sampling import Needs, Sampling, needs_of, numbers_of, sample
from penstock.models.sequences import TokenSequence
from penstock.nn.module import evaluating
from penstock.nn.tree import tensors_inside
from penstock.stream.future import Future
from penstock.tensor.arithmetic import logical_and, maximum, minimum, where
from penstock.tensor.assigning import with_rows
from penstock.tensor.core import Tensor, from_numpy, resolve
from penstock.tensor.creation import arange, ones, zeros
from penstock.tensor.dtypes import bool_, float32, int32, uint32
from penstock.tensor.gathering import Reused
from penstock.tensor.indexing import looked_up
from penstock.tensor.manipulation import astype, reshape
from penstock.tensor.recording import no_grad
from penstock.tensor.reduction import max as max_
from penstock.tensor.repeating import Repeated

if TYPE_CHECKING:
    from penstock.models.model import LanguageModel

# Log-probabilities of tokens, ids of the likeliest, and their log-probabilities, if they were asked for.
Others = tuple[Tensor | None, ...]

RECENT = 8  # positions of a sequence, the last, whose tokens the host can read
_COUNTERS = 128  # for each sequence, with which kernels count workgroups: as many as it has heads, or fewer
_SHORTEST = 16  # the smallest bucket of new tokens
_CONTROL, _SEED = 7, 5  # numbers of each row of a step of prompts, and which of them begin its seed
# The smallest tables of pages. Those of prompts that continue are small where all of their pages are read;
# otherwise, a wide table costs nothing but its own memory. Larger tables are powers of 4 of these.
_TIGHT, _WIDE = 4, 128
_MOST_PROMPTED = 16  # programs of prompts whose last run may be repeated
_COVERED = 512  # pages of a sequence up to which an engine has programs from the beginning


class Step(NamedTuple):
    """The tokens of a step on their way to the host: for each row, the sequence that gets one, and where."""

    rows: Sequence[TokenSequence | None]
    places: Sequence[int]  # of their tokens in the mail
    mail: Future[npt.NDArray[Any]]  # to be read before the next but `RECENT` - 1 steps are submitted
    logprobs: Future[npt.NDArray[Any]] | None = None
    top_ids: Future[npt.NDArray[Any]] | None = None
    top_logprobs: Future[npt.NDArray[Any]] | None = None


class _Again(NamedTuple):
    """A step of tokens that may be repeated: its rows, some of which have no sequence any more."""

    rows: Sequence[TokenSequence | None]
    taken: Bucket
    repeated: Repeated
    paged: bool = False  # whether a sequence has got a page since


class _Prompted(NamedTuple):
    """The last run of a program of prompts: what it was given, in memory that the next may replace."""

    given: Tensor
    numbers: Tensor
    repeated: Repeated | None


class Decoder:
    """Memory for keys and values of up to `slots` sequences: `pages` pages, or as many as there can be."""

    def __init__(self, model: LanguageModel, slots: int, pages: int) -> None:
        adjoin(model)
        weight = model.head_weight
        self.slots, self.pages, self.context = slots, min(pages, most_pages(model)), model.context
        self._asked = pages
        self.device, self._dtype, self._vocab_size = resolve(weight.device), weight.dtype, model.vocab_size
        self._tensors = [weakref.ref(tensor) for tensor in tensors_inside(model)]
        self._model = weakref.ref(model)  # which may have this decoder, and is freed together with it
        self._shapes = model.cache_shapes
        # Up to so many positions, keys are those of every sequence with the same tokens.
        self.steady = min((shape.steady or model.context for shape in self._shapes), default=0)
        # Whether prompts read of their pages what they attend to alone; on CPUs and tensor cores, also when
        # they start: so one program takes those that start and those that continue.
        can = self.device.capabilities
        given = [(weight.dtype, shape.head_size, can) for shape in self._shapes]
        self._wide = all(reads_pages(*each) for each in given)
        fused = can.vector_width > 1 or all(on_tensor_cores(*each) for each in given)
        self.from_pages = self._wide and fused
        # Whether what steps are given may be replaced where it lies: if the host shared that memory, it would
        # wait for the last step, and `auto` may have moved it.
        self._replaces = not can.shared_memory and self.device.dispatcher is None
        pages_of_layers = [(2, self.pages, shape.heads, PAGE, shape.head_size) for shape in self._shapes]
        self._pages = Reused(pages_of_layers, [weight.dtype] * len(self._shapes), self.device)
        self._caches = [self._empty((1,), weight.dtype) for _ in self._shapes]
        self._state = self._empty((slots, 2), int32)  # of each slot: its last token, and the positions before
        # The last tokens of each slot, by their positions modulo `RECENT`, in memory that the host sees where
        # there is such: steps that follow write to other places, so that nothing waits until it is read.
        self._mail = self._empty((slots, RECENT), int32)
        self._counters = self._empty((slots * _COUNTERS,), int32)
        self._seen = self._empty((1,), bool_)  # for each slot and token whether it occurs, if anybody asks
        self._batch: list[TokenSequence] | None = None  # the sequences of the last step, and their settings
        self._numbers, self._seeds, self._needs = self._state, self._state, Needs()
        self._pages_of_slots = np.zeros((slots, pages_of(model.context)), np.int32)
        self.programs = Programs(weakly(self._program), weakly(self._compiling))
        self._see = jitted(self._see_row)
        self._again: _Again | None = None  # the last step, if that was of tokens and may be repeated
        self._prompted = LRU[Bucket, _Prompted](_MOST_PROMPTED)
        self._known_settings: tuple[list[Sampling], int, Tensor] | None = None  # that steps were given last
        self._last: dict[str, tuple[npt.NDArray[Any], Tensor]] = {}  # what was uploaded last, by name

    def takes(self, model: LanguageModel, slots: int, pages: int) -> bool:
        """Whether it is for so many sequences and pages of a model of these sizes."""
        weight = model.head_weight
        own = (self.slots, self._asked, self.device, self._dtype, self._vocab_size, self.context)
        device, vocab_size = resolve(weight.device), model.vocab_size
        return own == (slots, pages, device, weight.dtype, vocab_size, model.context)

    def serves(self, model: LanguageModel) -> bool:
        """Whether the tensors of a model are still those that the programs have."""
        tensors = tensors_inside(model)
        same = len(tensors) == len(self._tensors)
        return same and all(known() is now for known, now in zip(self._tensors, tensors, strict=True))

    @property
    def _network(self) -> LanguageModel:
        model = self._model()
        assert model is not None, "who generates holds the model"
        return model

    def _empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        return zeros(shape, dtype=dtype, device=self.device)

    def begin(self) -> None:
        """Allocate the pages, of all layers together. Nothing is read of them before it is written."""
        for cache, node in zip(self._caches, self._pages.take(), strict=True):
            cache._become(node)
        if self._mail._node.value is None:
            mail = np.zeros((self.slots, RECENT), np.int32)
            buffer = self.device.upload(mail, into=self.device.visible(mail.nbytes))
            self._mail._become(leaf(buffer, mail.shape, int32))

    def release(self) -> None:
        """Give the memory of the pages back; the programs stay."""
        pages = [cache._node for cache in self._caches]
        for tensor in (*self._caches, self._seen):
            tensor._become(self._empty((1,), tensor.dtype)._node)
        self._pages.give_back(pages)
        self._batch = self._again = None

    # Steps

    def admit(self, sequence: TokenSequence) -> None:
        """Take a sequence, which has a slot and pages, into the batch."""
        self._pages_of_slots[sequence.slot, : len(sequence.pages)] = sequence.pages
        if sequence.setting.repetition_penalty == 1:
            return
        self._have_seen()
        row = np.zeros((1, self._vocab_size), np.bool_)
        row[0, sequence.ids] = True
        self._run(self._see, np.array([sequence.slot], np.int32), row)

    def _have_seen(self) -> None:
        """Have memory for the tokens of all slots."""
        if self._seen.size == 1:
            self._seen._become(self._empty((self.slots * self._vocab_size,), bool_)._node)

    def add_page(self, sequence: TokenSequence, page: int) -> None:
        """Give a sequence a further page."""
        if self._again is not None:
            self._again = self._again._replace(paged=True)
        self._pages_of_slots[sequence.slot, len(sequence.pages)] = page
        sequence.pages.append(page)

    def prompts(self, parts: Sequence[tuple[TokenSequence, int]]) -> Step:
        """Take the next tokens of prompts, so many of each; the next token of those that are complete."""
        self._again = None
        longest = max(count for _, count in parts)
        length = bucket(longest, min(_SHORTEST, self.context), self.context)
        sequences = [sequence for sequence, _ in parts]
        fresh = not self.from_pages and not any(sequence.computed for sequence in sequences)
        width = self._width(sequences, _WIDE if fresh or self._wide else _TIGHT)
        rows = bucket(len(parts), 1, self.slots)
        wanted = Bucket(rows, length, width, fresh, self._needs_of(sequences))
        taken, program = self.programs.take(wanted)
        (given,) = self._arrays(taken)
        ids, control, table = _parted(given, taken.length)
        complete: list[TokenSequence | None] = []
        places: list[int] = []
        for row, (sequence, count) in enumerate(parts):
            start = sequence.computed
            first = sequence.origin + start
            ids[row, :count] = np.frombuffer(sequence.ids, np.int32, count, first * ids.itemsize)
            ends = start + count == sequence.target
            control[row, :_SEED] = sequence.slot, start, count, sequence.first, ends
            control[row, _SEED:] = sequence.seed.view(np.int32)
            table[row] = self._pages_of_slots[sequence.slot, : taken.width]
            complete.append(sequence if ends else None)
            places.append(_place(sequence.slot, start + count))
        return self._step(complete, places, self._take(taken, program, given, sequences))

    def tokens(self, sequences: list[TokenSequence]) -> Step:
        """Append the token of the last step to each of these sequences; the next token of each.

        `computed` of each sequence counts that token already.
        """
        others: Others = ()
        rows = self._repeated(sequences)
        if rows is None:
            rows, others = sequences, self._first_tokens(sequences)
        places = [0 if each is None else _place(each.slot, each.computed) for each in rows]
        return self._step(rows, places, others)

    def _repeated(self, sequences: list[TokenSequence]) -> Sequence[TokenSequence | None] | None:
        """Take the last step once more, for those of its sequences that are left: its rows, if it can be."""
        again = self._again
        if again is not None and (again.paged or again.rows != sequences):
            again = self._changed(again, sequences)
        with evaluating():
            return again.rows if again is not None and again.repeated() else None

    def _changed(self, again: _Again, sequences: list[TokenSequence]) -> _Again | None:
        """The last step without rows that left, and with further pages, replaced in the device's memory."""
        taken, going = again.taken, set(sequences)
        rows = [each if each in going else None for each in again.rows]
        fits = taken.rows == bucket(len(sequences), 1, self.slots)
        fits = fits and taken.width >= self._width(sequences, _WIDE) and self._replaces
        if not fits or [each for each in rows if each is not None] != sequences:
            return None
        slots, table = self._token_arrays(taken, rows)
        table[slots < 0] = self._last["table"][0][slots < 0]  # not read: the table changes with pages alone
        for name, array in (("slots", slots), ("table", table)):
            last, tensor = self._last[name]
            if not np.array_equal(last, array):
                self.device.upload(array, into=tensor._node.value)
                self._last[name] = (array, tensor)
        self._again = again._replace(rows=rows, paged=False)
        return self._again

    def _token_arrays(
        self, taken: Bucket, rows: Sequence[TokenSequence | None]
    ) -> tuple[npt.NDArray[np.int32], ...]:
        """The slots of a step of tokens, and their pages; of those that it does not have, nothing is read."""
        slots, table = self._arrays(taken)
        slots[: len(rows)] = [-1 if each is None else each.slot for each in rows]
        own = slots >= 0
        table[own] = self._pages_of_slots[slots[own], : taken.width]
        return slots, table

    def _first_tokens(self, sequences: list[TokenSequence]) -> Others:
        """A step unlike the last; the next may be like it, if its program is the best for it."""
        rows = bucket(len(sequences), 1, self.slots)
        wanted = Bucket(rows, 0, self._width(sequences, _WIDE), False, self._needs_of(sequences))
        taken, program = self.programs.take(wanted)
        slots, table = self._token_arrays(taken, sequences)
        sampling = self._sampling(sequences, taken.rows)
        given = self._kept("slots", slots), self._kept("table", table), *sampling
        others: Others = self._run(program, *given)
        with no_grad(), evaluating():
            repeated = program.repeated(*given) if taken == wanted else None
        self._again = None if repeated is None else _Again(list(sequences), taken, repeated)
        return others

    def _arrays(self, taken: Bucket) -> tuple[npt.NDArray[np.int32], ...]:
        """What a step is given, before it has any sequence."""
        if not taken.length:
            return np.full(taken.rows, -1, np.int32), np.zeros((taken.rows, taken.width), np.int32)
        given = np.zeros((taken.rows, taken.length + _CONTROL + taken.width), np.int32)
        _parted(given, taken.length)[1][:, 0] = -1
        return (given,)

    def _width(self, sequences: Sequence[TokenSequence], least: int) -> int:
        """The bucket of pages of these sequences."""
        most = self._pages_of_slots.shape[1]
        longest = max(len(sequence.pages) for sequence in sequences)
        return bucket(longest, min(least, most), most, factor=4)

    def _needs_of(self, sequences: list[TokenSequence]) -> Needs:
        return self._needs if sequences == self._batch else needs_of([each.setting for each in sequences])

    def _sampling(self, sequences: list[TokenSequence], rows: int) -> tuple[Tensor, Tensor]:
        """The settings and seeds of these sequences on the device."""
        if sequences != self._batch or self._seeds.shape[0] != rows:
            self._needs = needs_of([sequence.setting for sequence in sequences])
            self._numbers = self._settings_of(sequences, rows)
            more = rows - len(sequences)
            seeds = [*(sequence.seed for sequence in sequences), *[np.zeros(2, np.uint32)] * more]
            self._seeds = from_numpy(np.stack(seeds), self.device)
            self._batch = list(sequences)
        return self._numbers, self._seeds

    def _settings_of(self, sequences: Sequence[TokenSequence], rows: int) -> Tensor:
        """The settings of sequences on the device, for so many rows."""
        settings = [sequence.setting for sequence in sequences]
        if self._known_settings is None or self._known_settings[:2] != (settings, rows):
            self._known_settings = settings, rows, self._kept("numbers", numbers_of(settings, rows))
        return self._known_settings[2]

    def _kept(self, name: str, array: npt.NDArray[Any]) -> Tensor:
        """An array on the device, where it already is if it did not change since the last step."""
        last = self._last.get(name)
        if last is None or not np.array_equal(last[0], array):
            last = self._last[name] = (array, from_numpy(array, self.device))
        return last[1]

    def _take(
        self, taken: Bucket, program: Any, given: npt.NDArray[np.int32], sequences: list[TokenSequence]
    ) -> Others:
        """Run a program of prompts: its last run once more, on other ids, if nothing else has changed."""
        numbers = self._settings_of(sequences, taken.rows)
        last = self._prompted.use(taken) if self._replaces else None
        same = last is None or last.numbers is numbers
        if last is None:
            tensor = from_numpy(given, self.device)
        else:
            self.device.upload(given, into=last.given._node.value)
            if last.repeated is not None and same:
                with evaluating():
                    if last.repeated():
                        return ()
            tensor = Tensor(leaf(last.given._node.value, given.shape, int32), self.device)
        others: Others = self._run(program, tensor, numbers)
        if self._replaces:
            with no_grad(), evaluating():
                repeated = program.repeated(tensor, numbers) if same else None
            self._prompted[taken] = _Prompted(tensor, numbers, repeated)
        return others

    def _run(self, program: Any, *arrays: Any) -> Any:
        given = [array if isinstance(array, Tensor) else from_numpy(array, self.device) for array in arrays]
        with no_grad(), evaluating():
            return program(*given)

    def _step(self, rows: Sequence[TokenSequence | None], places: list[int], others: Others) -> Step:
        read = (None if part is None else part.numpy_async() for part in others)
        return Step(rows, places, self._mailed(), *read)

    def _mailed(self) -> Future[npt.NDArray[Any]]:
        """The mail after the last step, without a copy where the host sees it."""
        return self.device.reading(self._mail._node.value, int32, (self.slots * RECENT,))

    # Programs

    def covering(self, tokens: int) -> list[Bucket]:
        """Buckets that can take all steps of up to so many tokens of prompts, and that of full batches."""
        most = self._pages_of_slots.shape[1]
        usual = Bucket(self.slots, 0, min(most, _WIDE), False, Needs(draws=True))
        return [*covering(self.slots, self.context, tokens, _SHORTEST, min(most, _COVERED)), usual]

    def cover(self, chosen: Bucket) -> None:
        """Build a program that may take the steps of others, and run it for no sequence."""
        self._again = None
        self._have_seen()
        numbers, seeds = self._sampling([], chosen.rows)
        given = [*self._arrays(chosen), numbers, *([] if chosen.length else [seeds])]
        self._run(self.programs.cover(chosen), *given)
        self._mailed().wait()

    def _program(self, chosen: Bucket) -> Any:
        if chosen.length:
            fixed = {"length": chosen.length, "fresh": chosen.fresh, "needs": chosen.needs}
            return jitted(self._take_prompts, **fixed)
        return jitted(self._take_token, needs=chosen.needs)

    def _compiling(self, program: Any, chosen: Bucket) -> Callable[[], None]:
        """What compiles the kernels of a program, in any thread."""
        given = [self._empty(array.shape, int32) for array in self._arrays(chosen)]
        given.append(self._empty(numbers_of((), chosen.rows).shape, float32))
        if not chosen.length:
            given.append(self._empty((chosen.rows, 2), uint32))
        with no_grad(), evaluating():
            compiles: Callable[[], None] = program.compiling(*given)
        return compiles

    # What the programs compute

    def _take_prompts(
        self, given: Tensor, numbers: Tensor, *, length: int, fresh: bool, needs: Needs
    ) -> Others:
        """A part of the prompts; sequences whose prompt it completes get a token."""
        ids, control, table = _parted(given, length)
        slots, starts, counts, firsts, ends = (control[:, k] for k in range(_SEED))
        seeds = astype(control[:, _SEED:], uint32)
        rows = ids.shape[0]
        attention = PagedAttention(self._caches, table, starts, counts, firsts, length, fresh, self.context)
        features = self._network.run(self._in_vocabulary(ids), attention)
        last = reshape(features, (rows, features.shape[-1]))
        return self._chosen(last, where(ends > 0, slots, -1), starts + counts, numbers, seeds, needs)

    def _take_token(
        self, slots: Tensor, table: Tensor, numbers: Tensor, seeds: Tensor, *, needs: Needs
    ) -> Others:
        """The token of the last step, in the slots that are given."""
        rows = slots.shape[0]
        inside = reshape(slots >= 0, (rows, 1))
        state = where(inside, looked_up(self._state, maximum(slots, 0)), 0)
        tokens = self._in_vocabulary(state[:, 0])
        attention = StepAttention(self._caches, table, state[:, 1], slots, self.context, self._counters)
        features = self._network.run(reshape(tokens, (rows, 1)), attention)
        flat = reshape(features, (rows, features.shape[-1]))
        # Of the places, which kernels have in memory: nothing may read the state when it is written.
        lengths = reshape(attention.places, (rows,)) + 1
        return self._chosen(flat, slots, lengths, numbers, seeds, needs)

    def _in_vocabulary(self, ids: Tensor) -> Tensor:
        """Ids that are known to be in range, so that no program checks them, and the host no result of it."""
        return minimum(maximum(ids, 0), self._vocab_size - 1)

    def _chosen(
        self,
        features: Tensor,
        slots: Tensor,
        lengths: Tensor,
        numbers: Tensor,
        seeds: Tensor,
        needs: Needs,
    ) -> Others:
        """Draw the next tokens, and note them for the slots that are not -1; what else was asked for."""
        logits = self._network.logits(features)
        seen = None
        if needs.penalizes:
            seen = looked_up(reshape(self._seen, (self.slots, self._vocab_size)), maximum(slots, 0))
        drawn = sample(logits, numbers, seeds, lengths, seen, needs)
        ids = drawn.ids
        if needs.penalizes:
            index = where(slots >= 0, slots * self._vocab_size + ids, -1)
            self._seen._rebind(with_rows(self._seen, index, ones(ids.shape, dtype=bool_, device=ids.device)))
        self._note(slots, ids, lengths)
        return drawn[1:]

    def _note(self, slots: Tensor, ids: Tensor, lengths: Tensor) -> None:
        """Have the last tokens and the lengths of slots in the state, and the tokens in the mail.

        By comparing all slots for each item: so neither waits for the other, and a launch writes both.
        """
        device = slots.device
        own = arange(self.slots, dtype=int32, device=device)
        same = reshape(own, (self.slots, 1, 1)) == slots
        place = reshape(arange(RECENT, dtype=int32, device=device), (RECENT, 1))
        is_token = reshape(arange(2, dtype=int32, device=device), (2, 1)) == 0
        # -1 where nothing is written: neither tokens nor lengths are negative.
        mail = max_(where(logical_and(same, place == lengths % RECENT), ids, -1), axis=2)
        state = max_(where(same, where(is_token, ids, lengths), -1), axis=2)
        self._mail._rebind(where(mail >= 0, mail, self._mail))
        self._state._rebind(where(state >= 0, state, self._state))

    def _see_row(self, slot: Tensor, row: Tensor) -> None:
        """Note all tokens of a sequence."""
        shape = (self.slots, self._vocab_size)
        self._seen._rebind(reshape(with_rows(reshape(self._seen, shape), slot, row), self._seen.shape))


def _parted(given: Any, length: int) -> tuple[Any, ...]:
    """The parts of what a step of prompts is given: ids, the numbers of each row, and the table of pages."""
    return given[:, :length], given[:, length : length + _CONTROL], given[:, length + _CONTROL :]


def _place(slot: int, position: int) -> int:
    """Where the mail has the token at a position of a slot."""
    return slot * RECENT + position % RECENT
