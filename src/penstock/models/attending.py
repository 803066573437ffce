"""How the layers of a model attend: to the positions of their own input, or to a cache of keys and values.

A block gets an `Attention`, which knows the positions of the tokens, and gives it queries, keys and values.
So a block is the same in training, over a prompt, and over a single token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.layers import Where
from penstock.tensor.arithmetic import logical_and, minimum, where
from penstock.tensor.assigning import with_rows
from penstock.tensor.core import Tensor
from penstock.tensor.creation import arange
from penstock.tensor.dtypes import int32
from penstock.tensor.manipulation import broadcast_to, reshape, stack
from penstock.tensor.paged_attention import paged_attention

if TYPE_CHECKING:
    from penstock.models.rotary import Rotary


@dataclass(frozen=True)
class CacheShape:
    """What a layer keeps of each position: keys and values of so many heads."""

    heads: int
    head_size: int
    window: int | None = None  # how many positions its queries attend to; None: all


class Attention:
    """Attention to the positions of the input itself, each to those before it.

    Queries, keys and values have the shape (batch, heads, length, head size).
    """

    cached = False  # whether keys and values come from a cache

    def __init__(self, positions: Tensor, lengths: Tensor) -> None:
        """The `positions` of the input, (batch, length), and the `lengths` of whole sequences, (batch,)."""
        self.positions, self.lengths = positions, lengths
        self._angles: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def angles(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The angles by which a rotary embedding turns these positions; all layers share them."""
        if rotary not in self._angles:
            self._angles[rotary] = rotary.angles(self.positions, self.lengths)
        return self._angles[rotary]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """The attended values of a layer."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scale,
            enable_gqa=True,
            window=window,
            softcap=softcap,
        )


def whole(batch: int, length: int, device: Where) -> Attention:
    """Attention of whole sequences from their first position on, as in training."""
    positions = broadcast_to(arange(length, dtype=int32, device=device), (batch, length))
    return Attention(positions, positions[:, -1] + 1)


class CachedAttention(Attention):
    """Attention to the keys and values that are cached, after those of the input were written there.

    A cache is the memory of a layer: (2, slots, heads, capacity, head size), with its keys first. Slot b has
    the sequence of row b. Only the rows of new positions are written.
    """

    cached = True

    def __init__(
        self,
        caches: list[Tensor],
        shapes: list[CacheShape],
        starts: Tensor,
        counts: Tensor,
        lengths: Tensor,
        length: int,
        reach: int,
        fresh: bool,
    ) -> None:
        """The input has `length` positions, of which row b takes `counts[b]`, from `starts[b]` on.

        Queries attend to the first `reach` positions of the cache. With `fresh`, all sequences start here,
        and the cache is only written.
        """
        capacity = caches[0].shape[3]
        slots = starts.shape[0]
        own = arange(length, dtype=int32, device=starts.device)
        positions = reshape(starts, (slots, 1)) + own
        # Rows of padding stay inside of tables of positions; what they compute is not used.
        super().__init__(minimum(positions, capacity - 1), lengths)
        self._caches, self._shapes = caches, shapes
        self._slots, self._capacity, self._reach, self._fresh = slots, capacity, reach, fresh
        inside = logical_and(own < reshape(counts, (slots, 1)), positions < capacity)
        self._written = where(inside, positions, -1)
        self._rows: dict[int, Tensor] = {}
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Write the keys and values of a layer, and attend to all that its sequences have by now."""
        self._write(layer, key, value)
        if self._fresh:
            return super().attend(layer, query, key, value, scale, window, softcap)
        if query.shape[2] == 1:
            return self._attend_last(layer, query, scale, window, softcap)
        keys, values = (self._caches[layer][side, :, :, : self._reach] for side in range(2))
        return F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=self._mask(window),
            scale=scale,
            enable_gqa=True,
            softcap=softcap,
        )

    def _attend_last(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention of the last position of each sequence; a slot is a page of its capacity."""
        slots, heads, _, size = query.shape
        pages = reshape(arange(slots, dtype=int32, device=query.device), (slots, 1))
        rows = reshape(query, (slots, heads, size))
        lengths = self.positions[:, 0] + 1
        attended = paged_attention(rows, self._caches[layer], pages, lengths, scale, window, softcap)
        return reshape(attended, query.shape)

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        cache, (slots, heads, length, size) = self._caches[layer], key.shape
        rows = reshape(stack([key, value]), (2 * slots * heads * length, size))
        flat = reshape(cache, (2 * slots * heads * self._capacity, size))
        cache._rebind(reshape(with_rows(flat, self._index(heads, length), rows), cache.shape))

    def _index(self, heads: int, length: int) -> Tensor:
        """Where in a cache the rows of new keys and values go; -1 where there is no position for them."""
        if heads not in self._rows:
            count = 2 * self._slots * heads
            each = reshape(
                arange(count, dtype=int32, device=self.positions.device), (2, self._slots, heads, 1)
            )
            position = reshape(self._written, (1, self._slots, 1, length))
            index = where(position >= 0, each * self._capacity + position, -1)
            self._rows[heads] = reshape(index, (count * length,))
        return self._rows[heads]

    def _mask(self, window: int | None) -> Tensor:
        """Which cached positions each query attends to."""
        if window not in self._masks:
            slots, length = self.positions.shape
            keys = arange(self._reach, dtype=int32, device=self.positions.device)
            own = reshape(self.positions, (slots, 1, length, 1))
            seen = keys <= own
            if window is not None and window < self._reach:
                seen = logical_and(seen, keys > own - window)
            self._masks[window] = seen
        return self._masks[window]
