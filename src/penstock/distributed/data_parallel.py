"""Data-parallel training: ranks compute gradients of parts of a batch, and take the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from penstock.collectives.engine import Operation
from penstock.collectives.world import communicator
from penstock.config import parse_bytes
from penstock.distributed.buckets import Bucket, buckets
from penstock.distributed.collective import Chain, broadcast, chain
from penstock.distributed.pieces import Piece, own_pieces
from penstock.distributed.running import RunningStatistics
from penstock.distributed.sharding import ShardedOptimizer
from penstock.distributed.shares import Values, means, part_of
from penstock.errors import SettingError
from penstock.nn.functional.normalization import changing
from penstock.optim.optimizer import Optimizer
from penstock.stream.future import Future
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, outside_capture, realize_together
from penstock.tensor.creation import zeros
from penstock.tensor.dtypes import float32
from penstock.tensor.jit import jit
from penstock.tensor.manipulation import astype
from penstock.tensor.random import default_generator
from penstock.tensor.recording import no_grad

_MOST_SHARDS = 128
# A shard draws its random numbers from a range of the generator's counter of its own, and so does a step.
_SHARD_BLOCKS, _STEP_BLOCKS = 1 << 56, 1 << 32


class DataParallel(Optimizer):
    """An optimizer whose step takes the gradients of all ranks, so that all have the same weights.

    A global batch has a fixed number of `shards`, whatever the number of ranks, which divides it. The
    gradients of shards are summed along a fixed tree, so that the number of ranks changes no bit. With
    `exact=False` a rank computes its part of the batch at once, and sums are in the order of the engine.
    `bucket` is how much is exchanged at a time, while the backward pass goes on.

    With `zero=1`, each rank keeps a part of the optimizer's state and of master weights, updates that part of
    the parameters, and gets the others; with `zero=2`, it also gets only its part of the gradients.

    >>> weight = ps.nn.Parameter(ps.zeros(2))
    >>> optimizer = ps.distributed.DataParallel(ps.optim.SGD([weight], lr=1.0), shards=2)
    >>> @ps.jit
    ... def step(x):
    ...     loss = (weight * x).mean()
    ...     optimizer.backward(loss)
    ...     optimizer.step()
    ...     return loss
    >>> float(optimizer.train(step, ps.ones((4, 2))).wait())
    0.0
    >>> weight.tolist()
    [-0.5, -0.5]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        shards: int = 8,
        exact: bool = True,
        zero: int = 0,
        bucket: int | str = "4MiB",
    ) -> None:
        self._group = communicator()
        if isinstance(optimizer, DataParallel) or not isinstance(optimizer, Optimizer):
            raise SettingError(f"DataParallel takes an optimizer, and {type(optimizer).__name__} was given")
        if not 1 <= shards <= _MOST_SHARDS or shards & (shards - 1):
            raise SettingError(f"shards is a power of 2 up to {_MOST_SHARDS}, and {shards} was given")
        if exact and shards % self._group.size:
            raise SettingError(
                f"{self._group.size} ranks do not divide {shards} shards; take a power of 2 of ranks, more "
                "shards, or exact=False"
            )
        if zero not in (0, 1, 2):
            raise SettingError(f"zero is 0, 1 or 2, and {zero} was given")
        self.optimizer = optimizer
        self._model_parameters = list(optimizer.parameters)
        self.shards = shards if exact else self._group.size  # of a global batch
        self.own_shards = self.shards // self._group.size  # of this rank
        self._bucket_bytes = parse_bytes(bucket)
        self._layouts: dict[tuple[int, ...], list[Bucket]] = {}  # by the parameters that have a gradient
        # Sums of 1, 2, 4, ... shards that wait for as many others, by level; and the last shard's own.
        self._levels: list[list[Tensor]] = []
        self._current: list[Tensor] = []
        self._is_last = True  # whether the shard is the last of this rank
        self._waiting = 0  # how many levels wait for the last shard
        self._share = 1, self._group.size  # of the global batch that a loss is of
        self._fold = jit(self._folded)
        self._take_first()
        self._sharded: ShardedOptimizer | None = None
        self._operation: Operation = "tree_reduce" if exact else "all_reduce"
        self.statistics = RunningStatistics(self.shards, self._operation, _MOST_SHARDS)
        if zero == 2:
            self._operation = "tree_scatter" if exact else "reduce_scatter"
        if zero:
            pieces = max(self.shards, self._group.size)
            self._sharded = ShardedOptimizer(optimizer, self._group, pieces, self._bucket_bytes)
            self.optimizer = self._sharded.inner
        else:
            optimizer.exchange = self._summed

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet set
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    # The optimizer

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, of a loss that is the mean over the samples of a shard."""
        size, total = self._share
        if (capturing := capture.get()) is not None:
            capturing.assume(lambda: self._share)
        self.optimizer.backward(loss if size == total else loss * size / total)

    def step(self) -> None:
        """After the last shard of this rank, sum the gradients of all ranks and update; before, keep them."""
        if (capturing := capture.get()) is not None:
            capturing.assume(lambda: (self._is_last, self._waiting))
        if self._is_last and self._sharded is None:
            self.optimizer.step()
            return
        with no_grad():
            grads = {
                at: astype(tensor.grad, float32 if tensor._node.dtype.itemsize == 2 else tensor.dtype)
                for at, tensor in enumerate(self._model_parameters)
                if tensor.grad is not None
            }
            if self._is_last:
                self._step_parts(grads)
                return
            rows = [bucket.packed(grads) for bucket in self._layout(grads)]
            with outside_capture():
                self._current = self._current or self._room(rows)
            if [row.shape for row in rows] != [kept.shape for kept in self._current]:
                raise SettingError(
                    "other parameters have gradients than in the shards before; give all of them"
                )
            for kept, row in zip(self._current, rows, strict=True):
                kept._rebind(row)
        self.zero_grad()
        if capture.get() is None:
            realize_together(self._current, repeated=True)

    def _step_parts(self, grads: Mapping[int, Tensor]) -> None:
        """Update this rank's part of the parameters, and take the others."""
        assert self._sharded is not None
        if len(grads) < len(self._model_parameters):
            raise SettingError("with zero=1 and zero=2, every parameter needs a gradient in every step")
        links = chain()
        self._sharded.step(self._rows(grads, links), links)
        self.zero_grad()
        if capture.get() is None:
            realize_together(self._model_parameters, repeated=True)

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for tensor in self._model_parameters:
            tensor.grad = None

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """The state of the optimizer, which does not depend on the number of ranks."""
        return (self._sharded or self.optimizer).state_dict()

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Restore a `state_dict` of any number of ranks."""
        (self._sharded or self.optimizer).load_state_dict(state)

    def pieces(self, model: Mapping[str, Tensor]) -> Iterator[Piece]:
        """What this rank writes of the model's tensors and of the state, by names of a checkpoint."""
        tensors = {f"model.{name}": tensor for name, tensor in model.items()}
        if self._sharded is not None:
            for piece in self._sharded.pieces():
                yield replace(piece, name=f"optimizer.{piece.name}")
        else:
            state = {name: tensor for kind in self.optimizer._named() for name, tensor in kind.items()}
            tensors |= {f"optimizer.{name}": tensor for name, tensor in state.items()}
        yield from own_pieces(tensors, self._group.rank, self._group.size)

    def common_state(self) -> dict[str, npt.NDArray[Any]]:
        """The small part of the state that is not in `pieces`, and that every rank has."""
        return (self._sharded or self.optimizer)._counts_and_rates()

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        self.optimizer.lr = rate

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Refused: give the optimizer all of its groups first."""
        raise SettingError("add groups of parameters to the optimizer before DataParallel takes it")

    def vary(self, name: str) -> None:
        """See `Optimizer.vary`."""
        self.optimizer.vary(name)

    def _take_first(self) -> None:
        """Take the parameters of rank 0, and master weights of them."""
        if self._group.size > 1:
            with no_grad():
                for tensor in [*self._model_parameters, *self.optimizer._masters.values()]:
                    tensor._become(broadcast(tensor.detach())._node)

    # Training

    def train(self, step: Callable[..., Any], *batch: Any) -> Future[Any]:
        """Train on a global batch, which all ranks give: call a step with each shard of this rank's part.

        The step calls `backward` and `step`, and returns a tensor with the mean over its samples, or a dict
        of such. The future has the means over the global batch, as numbers.
        """
        values: list[Values] = []
        sizes = [len(part_of(batch[0], number, self.shards)) for number in range(self.shards)]
        if not all(sizes):
            raise SettingError(f"a batch of {sum(sizes)} samples is too small for {self.shards} shards")
        for number in self.own():
            with self.sharing(sizes[number], sum(sizes)):
                result = step(*(part_of(part, number, self.shards) for part in batch))
            named = result if isinstance(result, Mapping) else {"": result}
            values.append({name: value.numpy_async() for name, value in named.items()})
        found = means(self._group, values, [[size] for size in sizes])
        return Future(found.is_ready, lambda: None, lambda: _unnamed(found.wait().values))

    def own(self) -> Iterator[int]:
        """The numbers of the shards that this rank computes; a step follows each."""
        before = default_generator.state()
        first = self._group.rank * self.own_shards
        try:
            for at in range(self.own_shards):
                self._is_last = at == self.own_shards - 1
                self._waiting = self.own_shards.bit_length() - 1 if self._is_last else 0
                _draw_from(before, (first + at) * _SHARD_BLOCKS)
                self.statistics.begin(at)
                changing.set(self.statistics.note)
                yield first + at
                changing.set(None)
                self.statistics.end(at, self._is_last)
                if not self._is_last:
                    self._keep(at)
            before = {**before, "counter": (before["counter"] + _STEP_BLOCKS) % _SHARD_BLOCKS}
        except BaseException:  # also where the loop over this ends early
            self.statistics.undo()
            raise
        finally:
            self._is_last, self._waiting = True, 0
            changing.set(None)
            _draw_from(before, 0)

    @contextmanager
    def sharing(self, size: int, total: int) -> Iterator[None]:
        """In a block, losses are means over `size` of the `total` samples of a step."""
        self._share = size, total
        try:
            yield
        finally:
            self._share = 1, self._group.size

    # Sums

    def _layout(self, grads: Mapping[int, Tensor]) -> list[Bucket]:
        if self._sharded is not None:
            return self._sharded.rows
        present = tuple(sorted(grads))
        if present not in self._layouts:
            self._layouts[present] = buckets(grads, self._bucket_bytes, _MOST_SHARDS)
        return self._layouts[present]

    def _summed(self, grads: dict[int, Tensor]) -> dict[int, Tensor]:
        """The sums of gradients over all shards of all ranks."""
        rows = zip(self._layout(grads), self._rows(grads, chain()), strict=True)
        return {at: value for bucket, row in rows for at, value in bucket.unpacked(row).items()}

    def _rows(self, grads: Mapping[int, Tensor], links: Chain) -> list[Tensor]:
        """The same in rows, or with zero=2 this rank's parts of rows."""
        rows: list[Tensor] = []
        for number, bucket in enumerate(self._layout(grads)):
            row = bucket.packed(grads)
            for level in self._levels[: self._waiting]:
                row = level[number] + row
            rows.append(row)
        return links.apply_all(self._operation, rows)

    def _room(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Tensors for rows that are kept."""
        return [zeros(row.shape, dtype=row.dtype, device=row.device) for row in rows]

    def _keep(self, at: int) -> None:
        """Add the gradients of a shard to those that wait for it."""
        merged = ((at + 1) & -(at + 1)).bit_length() - 1  # how often 2 divides the number of shards so far
        while len(self._levels) <= merged:
            self._levels.append(self._room(self._current))
        self._fold(merged)

    def _folded(self, merged: int) -> None:
        for number, row in enumerate(self._current):
            for level in self._levels[:merged]:
                row = level[number] + row
            self._levels[merged][number]._rebind(row)


def _draw_from(state: Mapping[str, int], blocks: int) -> None:
    default_generator.set_state({**state, "counter": state["counter"] + blocks})


def _unnamed(values: Mapping[str, float]) -> Any:
    return values[""] if set(values) == {""} else dict(values)
