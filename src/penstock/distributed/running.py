"""Running statistics, which the shards of a batch change: each from the same values, and then their mean."""

from __future__ import annotations

from penstock.collectives.engine import Operation
from penstock.distributed.buckets import buckets
from penstock.distributed.collective import chain
from penstock.tensor.core import Tensor, outside_capture, realize_together
from penstock.tensor.dtypes import float32
from penstock.tensor.manipulation import astype
from penstock.tensor.recording import no_grad

_ONE_ROW = 1 << 62  # bytes: statistics are small


class RunningStatistics:
    """The statistics that a step changes, for all ranks the same, whatever their number.

    Floating-point values become the mean over shards, along a tree; counts are the same for every shard.
    """

    def __init__(self, shards: int, operation: Operation, multiple: int) -> None:
        """`operation` sums rows, whose lengths are divided by `multiple`."""
        self._shards, self._operation, self._multiple = shards, operation, multiple
        self.in_turn = False  # whether ranks compute neighbouring shards at the same time
        self._tensors: list[Tensor] = []  # in the order in which a step changes them
        self._before: list[Tensor] = []  # their values before the step
        self._sums: list[list[Tensor]] = []  # of 1, 2, 4, ... shards that wait for as many others

    def note(self, tensor: Tensor) -> None:
        """Take note of a tensor that is about to change."""
        if not self.has(tensor):
            with outside_capture():
                self._before.append(tensor.detach())
            self._tensors.append(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Whether it is a statistic that a step has changed."""
        return any(tensor is known for known in self._tensors)

    def begin(self, at: int) -> None:
        """Begin a shard, by its number of this rank: with the values before the step."""
        if at == 0:
            self._before = [tensor.detach() for tensor in self._tensors]
            self._sums.clear()
        self.undo()

    def undo(self) -> None:
        """Take the values before the step."""
        with no_grad():
            for tensor, before in zip(self._tensors, self._before, strict=True):
                tensor._rebind(before)

    def end(self, at: int, last: bool) -> None:
        """End a shard; after the last of this rank, take the mean over those of all ranks."""
        if not self._tensors:
            return
        with no_grad():
            values = {
                number: astype(tensor, float32 if tensor._node.dtype.itemsize == 2 else tensor.dtype)
                for number, tensor in enumerate(self._tensors)
                if tensor._node.dtype.kind == "f"
            }
            layout = buckets(values, _ONE_ROW, self._multiple)
            rows = [bucket.packed(values) for bucket in layout]
            if self.in_turn:
                rows = chain().apply_all(self._operation, rows)
            done = at + 1
            while done % 2 == 0:
                rows = [left + right for left, right in zip(self._sums.pop(), rows, strict=True)]
                done //= 2
            realize_together(rows)
            if not last:
                self._sums.append(rows)
                return
            if not self.in_turn:
                rows = chain().apply_all(self._operation, rows)
            for bucket, row in zip(layout, rows, strict=True):
                for number, value in bucket.unpacked(row * (1 / self._shards)).items():
                    self._tensors[number]._rebind(astype(value, self._tensors[number].dtype))
            realize_together(self._tensors, repeated=True)
