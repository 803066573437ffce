"""How the layers of a model attend: to the positions of their own input, or to pages of keys and values.

A block gets an `Attention`, which knows the positions of the tokens, and gives it queries, keys and values.
So a block is the same in training, over a prompt, and over a single token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.layers import Where
from penstock.tensor.arithmetic import maximum, minimum, where
from penstock.tensor.assigning import with_rows
from penstock.tensor.attention import paged_attention, paged_step
from penstock.tensor.core import Tensor
from penstock.tensor.creation import arange
from penstock.tensor.dtypes import int32
from penstock.tensor.indexing import looked_up
from penstock.tensor.manipulation import broadcast_to, reshape, stack

if TYPE_CHECKING:
    from penstock.models.rotary import Rotary


@dataclass(frozen=True)
class CacheShape:
    """What a layer keeps of each position: keys and values of so many heads."""

    heads: int
    head_size: int
    window: int | None = None  # how many positions its queries attend to; None: all
    steady: int | None = None  # keys depend on the length of sequences with more positions; None: never


class Attention:
    """Attention to the positions of the input itself, each to those before it.

    Queries, keys and values have the shape (batch, heads, length, head size).
    """

    cached = False  # whether keys and values come from a cache

    def __init__(self, positions: Tensor, lengths: Tensor) -> None:
        """The `positions` of the input, and the `lengths` of sequences there, both (batch, length)."""
        self.positions, self.lengths = positions, lengths
        self._angles: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def angles(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The angles by which a rotary embedding turns these positions; all layers share them."""
        if rotary not in self._angles:
            self._angles[rotary] = rotary.angles(self.positions, self.lengths)
        return self._angles[rotary]

    def queries(self, layer: int) -> Attention:
        """The positions whose output of a layer is used, which are those of its queries: all."""
        return self

    def taken(self, layer: int, x: Tensor) -> Tensor:
        """What is at these positions of the layer's input, (batch, length, width)."""
        return x

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """The attended values of a layer; `dropout` is that of attention weights, in training."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=True,
            window=window,
            softcap=softcap,
        )


def whole(batch: int, length: int, device: Where) -> Attention:
    """Attention of whole sequences from their first position on, as in training."""
    positions = broadcast_to(arange(length, dtype=int32, device=device), (batch, length))
    return Attention(positions, broadcast_to(positions[:, -1:] + 1, (batch, length)))


class PagedAttention(Attention):
    """Attention to the keys and values in pages, after those of the input were written there.

    The pages of a layer are (2, pages, heads, page size, head size), with keys first. A row of `table` has
    the pages of its sequence, in the order of their positions. Only the rows of new positions are written.
    Of the last layer, only the last position of each row is used: nothing else is computed after its keys
    and values.
    """

    cached = True

    def __init__(
        self,
        caches: list[Tensor],
        table: Tensor,
        starts: Tensor,
        counts: Tensor,
        firsts: Tensor,
        length: int,
        fresh: bool,
        context: int,
    ) -> None:
        """The input has `length` positions, of which row b takes `counts[b]`, from `starts[b]` on.

        A sequence had at least `firsts[b]` positions when they were computed first. With `fresh`, all
        sequences start here, and pages are only written.
        """
        rows = starts.shape[0]
        own = arange(length, dtype=int32, device=starts.device)
        positions = reshape(starts, (rows, 1)) + own
        inside = own < reshape(counts, (rows, 1))
        # Padding is at the last position of its sequence, so that it reads nothing that is not written, and
        # stays inside of tables; what it computes is not used.
        reach = table.shape[1] * caches[0].shape[3]
        last = reshape(starts + counts - 1, (rows, 1))
        positions = minimum(maximum(minimum(positions, last), 0), min(context, reach) - 1)
        firsts = reshape(firsts, (rows, 1))
        super().__init__(positions, maximum(firsts, positions + 1))
        self._caches, self._table, self._fresh = caches, table, fresh
        self._last: Attention = self
        if length > 1:
            end = minimum(maximum(last, 0), min(context, reach) - 1)
            self._last = Attention(end, maximum(firsts, end + 1))
            self._at = arange(rows, dtype=int32, device=starts.device) * length + maximum(counts - 1, 0)
        self._inside = inside
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def queries(self, layer: int) -> Attention:
        """See `Attention`."""
        return self._last if layer == len(self._caches) - 1 else self

    def taken(self, layer: int, x: Tensor) -> Tensor:
        """See `Attention`."""
        if self.queries(layer) is self:
            return x
        rows, length, width = x.shape
        return reshape(looked_up(reshape(x, (rows * length, width)), self._at), (rows, 1, width))

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Write the keys and values of a layer, and attend to all that its sequences have by now."""
        assert not dropout, "pages are for generation, in which nothing is dropped"
        self._write(layer, key, value)
        queries = self.queries(layer)
        if self._fresh and queries is self:
            return super().attend(layer, query, key, value, scale, window, softcap)
        pages = self._caches[layer]
        return paged_attention(query, pages, self._table, queries.positions, scale, window, softcap)

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        cache, size = self._caches[layer], key.shape[-1]
        rows = reshape(stack([key, value]), (2 * key.size // size, size))
        flat = reshape(cache, (cache.size // size, size))
        cache._rebind(reshape(with_rows(flat, self._index(cache.shape), rows), cache.shape))

    def _index(self, shape: tuple[int, ...]) -> Tensor:
        """Where in a layer's pages the rows of new keys and values go; -1 where there is no position."""
        if shape not in self._rows:
            _, pages, heads, page, _ = shape
            rows, length = self.positions.shape
            device = self.positions.device
            width = self._table.shape[1]
            first = reshape(arange(rows, dtype=int32, device=device) * width, (rows, 1))
            pages_of_rows = reshape(self._table, (rows * width,))
            place = looked_up(pages_of_rows, first + self.positions // page) * (heads * page)
            place = reshape(place + self.positions % page, (1, rows, 1, length))
            side = reshape(arange(2, dtype=int32, device=device) * (pages * heads * page), (2, 1, 1, 1))
            head = reshape(arange(heads, dtype=int32, device=device) * page, (1, 1, heads, 1))
            index = where(reshape(self._inside, (1, rows, 1, length)), place + side + head, -1)
            self._rows[shape] = reshape(index, (2 * rows * heads * length,))
        return self._rows[shape]


class StepAttention(Attention):
    """Attention of a single new position of each sequence to its pages, and to that position itself.

    The pages and their table are those of `PagedAttention`.
    """

    cached = True

    def __init__(
        self,
        caches: list[Tensor],
        table: Tensor,
        starts: Tensor,
        slots: Tensor,
        context: int,
        counters: Tensor,
    ) -> None:
        """Row b is at position `starts[b]`, unless `slots[b]` is negative: then it has no sequence.

        `counters` are zeros that kernels count with.
        """
        positions = reshape(starts, (starts.shape[0], 1))
        super().__init__(positions, positions + 1)
        # Positions are in range; here for programs to see, so that they check nothing. What else is computed
        # from positions does not wait until these are in memory.
        reach = table.shape[1] * caches[0].shape[3]
        self.places = minimum(maximum(positions, 0), min(context, reach) - 1)
        self._caches, self._table, self._slots, self._counters = caches, table, slots, counters

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Write the key and value of each row, and attend to all that its sequence has by now."""
        assert not dropout, "pages are for generation, in which nothing is dropped"
        given = (self._caches[layer], self._table, self.places, self._slots)
        mixed, pages = paged_step(query, key, value, *given, scale, window, softcap, self._counters)
        self._caches[layer]._rebind(pages)
        return mixed
