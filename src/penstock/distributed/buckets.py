"""Gradients as a few long rows, so that ranks exchange few messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from penstock.tensor.arithmetic import multiply
from penstock.tensor.core import Tensor
from penstock.tensor.creation import zeros
from penstock.tensor.manipulation import concat, reshape
from penstock.tensor.reduction import sum as sum_

_FEW = 8  # values of a bucket that are large: each is a message of its own


@dataclass(frozen=True)
class Bucket:
    """Parameters whose values lie side by side in a row; `length` has room for them in whole shards."""

    positions: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    length: int

    def packed(self, values: Mapping[int, Tensor]) -> Tensor:
        """The row of some values by position."""
        parts = [reshape(values[at], (-1,)) for at in self.positions]
        rest = self.length - sum(part.size for part in parts)
        if rest:
            parts.append(zeros((rest,), dtype=parts[0].dtype, device=parts[0].device))
        return concat(parts) if len(parts) > 1 else parts[0]

    def unpacked(self, row: Tensor) -> dict[int, Tensor]:
        """The values of a row by position."""
        values: dict[int, Tensor] = {}
        start = 0
        for at, shape in zip(self.positions, self.shapes, strict=True):
            end = start + prod(shape)
            values[at] = reshape(row[start:end], shape)
            start = end
        return values


def buckets_of_groups(
    values: Mapping[int, Tensor], group_of: Sequence[int], most_bytes: int, multiple: int
) -> list[list[Bucket]]:
    """Buckets for each group of parameters of an optimizer."""
    groups: dict[int, dict[int, Tensor]] = {}
    for at in sorted(values):
        groups.setdefault(group_of[at], {})[at] = values[at]
    return [buckets(groups[group], most_bytes, multiple) for group in sorted(groups)]


def squares(row: Tensor, pieces: int) -> list[Tensor]:
    """The sums of the squares of pieces of a row."""
    length = row.size // pieces
    parts = [row[number * length : (number + 1) * length] for number in range(pieces)]
    return [reshape(sum_(multiply(part, part)), (1,)) for part in parts]


def buckets(values: Mapping[int, Tensor], most_bytes: int, multiple: int) -> list[Bucket]:
    """Buckets of about so many bytes, in the order in which a backward pass gives the gradients.

    A large value has a bucket to itself, which needs no copy; small ones share theirs.
    """
    result: list[Bucket] = []
    group: list[int] = []
    nbytes = 0
    for at in sorted(values, reverse=True):
        own = values[at].size * values[at]._node.dtype.itemsize
        if own * _FEW >= most_bytes:
            result.append(_bucket([at], values, multiple))
            continue
        if group and (nbytes >= most_bytes or values[group[0]].dtype != values[at].dtype):
            result.append(_bucket(group, values, multiple))
            group, nbytes = [], 0
        group.append(at)
        nbytes += own
    return [*result, _bucket(group, values, multiple)] if group else result


def _bucket(group: Sequence[int], values: Mapping[int, Tensor], multiple: int) -> Bucket:
    shapes = tuple(values[at].shape for at in group)
    length = sum(map(prod, shapes))
    return Bucket(tuple(group), shapes, -(-length // multiple) * multiple)
