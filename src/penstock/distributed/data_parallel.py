"""Data-parallel training: ranks compute gradients of parts of a batch, and take the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import lcm
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.collectives.engine import Operation
from penstock.collectives.world import communicator
from penstock.config import parse_bytes
from penstock.distributed.buckets import Bucket, buckets_of_groups, squares
from penstock.distributed.collective import Chain, broadcast, chain
from penstock.distributed.dividing import DividedParameters
from penstock.distributed.pieces import Piece, own_pieces
from penstock.distributed.running import RunningStatistics
from penstock.distributed.sharding import MULTIPLE, ShardedOptimizer, why_not_sharded
from penstock.distributed.shares import Values, means, part_of
from penstock.errors import SettingError
from penstock.formatting import format_bytes
from penstock.graph.node import leaf
from penstock.memory.budgeting import plan
from penstock.nn.functional.normalization import changing
from penstock.optim.optimizer import Optimizer
from penstock.runtime import Device
from penstock.stream.future import Future
from penstock.tensor.arithmetic import sqrt
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, outside_capture, realize_together, resolve
from penstock.tensor.creation import zeros
from penstock.tensor.dtypes import float32
from penstock.tensor.jit import jit
from penstock.tensor.manipulation import astype, concat
from penstock.tensor.random import default_generator
from penstock.tensor.recording import no_grad
from penstock.tensor.reduction import sum as sum_

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
    the parameters, and gets the others; with `zero=2`, it also gets only its part of the gradients. With
    `zero=3`, it keeps only its part of the parameters, too: jitted functions gather them layer by layer, and
    they have values elsewhere in `with optimizer.gathered():`. With `zero="auto"`, the first call of `train`
    takes the least stage whose plan keeps to the device's memory budget; see `choose`.

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
        zero: int | Literal["auto"] = 0,
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
        if zero not in (0, 1, 2, 3, "auto"):
            raise SettingError(f"zero is 0, 1, 2, 3 or auto, and {zero!r} was given")
        self.optimizer, self.zero = optimizer, 0
        self._exact, self._chooses = exact, zero == "auto"
        self._model_parameters = list(optimizer.parameters)
        self.shards = shards if exact else self._group.size  # of a global batch
        self.own_shards = self.shards // self._group.size  # of this rank
        self._bucket_bytes = parse_bytes(bucket)
        self._layouts: dict[tuple[int, ...], list[Bucket]] = {}  # by the parameters that have a gradient
        # Sums of 1, 2, 4, ... shards that wait for as many others, by level; and the last shard's own.
        self._levels: list[list[Tensor]] = []
        self._current: list[Tensor] = []
        self._sums: list[Tensor] = []  # of gradients over ranks, in rows, from their exchange to their norm
        self._is_last = True  # whether the shard is the last of this rank
        self._waiting = 0  # how many levels wait for the last shard
        self._share = 1, self._group.size  # of the global batch that a loss is of
        self._fold = jit(self._folded)
        self._take_first()
        self._sharded: ShardedOptimizer | None = None
        self._divided: DividedParameters | None = None
        self._operation: Operation = "tree_reduce" if exact else "all_reduce"
        self.statistics = RunningStatistics(self.shards, self._operation, _MOST_SHARDS)
        self._enter(0 if zero == "auto" else zero)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet set
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    # The stage of sharding

    def _enter(self, stage: int) -> None:
        """Divide what ranks keep, from a lower stage on."""
        if not stage:
            self.optimizer.exchange = self._summed
            if self._exact and "scale" not in self.optimizer._numbers:
                self.optimizer.norm = self._norm  # type: ignore[method-assign]
        elif self._sharded is None:
            pieces = max(self.shards, self._group.size)
            self._sharded = ShardedOptimizer(self.optimizer, self._group, pieces, self._bucket_bytes)
            self.optimizer = self._sharded.inner
        if stage >= 2:
            self._operation = "tree_scatter" if self._exact else "reduce_scatter"
        if stage == 3:
            assert self._sharded is not None
            self._divided = DividedParameters(self._sharded, self._model_parameters)
            self.statistics.in_turn = True
        self.zero = stage

    @property
    def device(self) -> Device:
        """The device of the parameters."""
        return self._model_parameters[0].device

    @property
    def chooses(self) -> bool:
        """Whether the stage is to be chosen yet."""
        return self._chooses

    def choose(self, step: Callable[..., Any], *args: Any, memory: int | str | None = None) -> str:
        """With zero="auto", take a stage for a jitted step with these arguments; in words, what it was.

        It is the least stage whose plan keeps to the memory budget on every rank without recomputing
        anything, or else 3. The budget is `memory`, if it comes into force only after this, or else that of
        the device. Without a budget, alone, or for an optimizer whose state cannot be divided, the stage is
        0. Later calls change nothing, and return an empty text.
        """
        if not self._chooses:
            return ""
        self._chooses = False
        limit = self.device.limit_bytes if memory is None else parse_bytes(memory)
        if limit is None or self._group.size == 1 or why_not_sharded(self.optimizer):
            return ""
        needs: list[str] = []
        for stage in range(4):
            if stage == 1:
                state = self.optimizer.state_dict()  # perhaps of a checkpoint
                self._enter(1)
                self.load_state_dict(state)
            elif stage:
                self._enter(stage)
            own = plan(step, *args).unlimited_bytes + self._waiting_bytes()
            needed = int(self._group.run("all_gather", np.array([own])).max())
            needs.append(f"zero={stage} takes {format_bytes(needed)}")
            if needed <= limit:
                break
        how = "" if needed <= limit else ", where some values are recomputed"
        return f"zero={self.zero} for {format_bytes(limit)}{how}: {', '.join(needs)}"

    def _waiting_bytes(self) -> int:
        """What the sums of gradients take that wait for other shards of this rank."""
        if self.own_shards == 1:
            return 0
        sets = 1 + self.own_shards.bit_length()  # one for each doubling, the last shard's, and the next's
        rows = self._layout(dict(enumerate(self._model_parameters)))
        divisor = self._group.size if self.zero == 3 else 1
        return sets * sum(row.length for row in rows) * 4 // divisor

    # The optimizer

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, of a loss that is the mean over the samples of a shard."""
        size, total = self._share
        if (capturing := capture.get()) is not None:
            capturing.assume(lambda: self._share)
            if self._divided is not None:
                self._divided.note(loss._node)
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
            rows = self._kept_rows(grads)
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
            raise SettingError("with zero=1, 2 and 3, every parameter needs a gradient in every step")
        links = chain()
        self._sharded.step(self._rows(grads, links), links)
        self.zero_grad()
        if self._divided is not None and capture.get() is not None:
            self._divided.renew()
            return
        self._sharded.publish(links)
        if self._divided is not None:
            self._divided.settle()
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
        with self.gathered("host"):
            (self._sharded or self.optimizer).load_state_dict(state)
            if self._divided is not None:
                self._divided.settle()

    @contextmanager
    def gathered(self, device: Device | str | None = None) -> Iterator[None]:
        """In a block, which all ranks enter, parameters are whole, whatever the stage of sharding.

        They are on their device, which needs the memory for it, or on another, such as "host". Values that
        they get in the block, by `load_state_dict` or by steps, are kept.
        """
        if self._divided is None:
            yield
            return
        with self._divided.gathered(None if device is None else resolve(device)):
            yield

    def pieces(self, model: Mapping[str, Tensor]) -> Iterator[Piece]:
        """What this rank writes of the model's tensors and of the state, by names of a checkpoint."""
        tensors = {f"model.{name}": tensor for name, tensor in model.items()}
        if self._divided is not None:
            assert self._sharded is not None
            position = {id(tensor): at for at, tensor in enumerate(self._model_parameters)}
            names: dict[int, list[str]] = {}
            for name, tensor in tensors.items():
                if id(tensor) in position:
                    names.setdefault(position[id(tensor)], []).append(name)
            yield from self._sharded.parameter_pieces(names)
            tensors = {name: tensor for name, tensor in tensors.items() if id(tensor) not in position}
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
        if self._group.size > 1 and self._group.engine.reaches:
            with no_grad():
                for tensor in [*self._model_parameters, *self.optimizer._masters.values()]:
                    first = broadcast(tensor.detach()).realize()._node
                    tensor._become(leaf(first.value, first.shape, first.dtype))  # the row is not kept

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
        if self._chooses:
            with self.sharing(sizes[0], sum(sizes)):
                self.choose(step, *(part_of(part, 0, self.shards) for part in batch))
        for number in self.own():
            with self.sharing(sizes[number], sum(sizes)):
                result = step(*(part_of(part, number, self.shards) for part in batch))
            named = result if isinstance(result, Mapping) else {"": result}
            values.append({name: value.numpy_async() for name, value in named.items()})
        found = means(self._group, values, [[size] for size in sizes], in_turn=self.zero == 3)
        return Future(found.is_ready, lambda: None, lambda: _unnamed(found.wait().values))

    @property
    def own_numbers(self) -> range:
        """The numbers of the shards that this rank computes.

        With zero=3, ranks compute neighbours at the same time, and sum their gradients at once: a rank keeps
        a part of these sums. Otherwise a rank computes neighbours, and the sums of ranks come last.
        """
        rank, size = self._group.rank, self._group.size
        if self._divided is not None:
            return range(rank, self.shards, size)
        return range(rank * self.own_shards, (rank + 1) * self.own_shards)

    def own(self) -> Iterator[int]:
        """The same; a step follows each."""
        before = default_generator.state()
        try:
            for at, number in enumerate(self.own_numbers):
                self._is_last = at == self.own_shards - 1
                self._waiting = self.own_shards.bit_length() - 1 if self._is_last else 0
                _draw_from(before, number * _SHARD_BLOCKS)
                self.statistics.begin(at)
                changing.set(self.statistics.note)
                yield number
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
            multiple = lcm(MULTIPLE, self._group.size)
            groups = buckets_of_groups(grads, self.optimizer._group_of, self._bucket_bytes, multiple)
            self._layouts[present] = [bucket for rows in groups for bucket in rows]
        return self._layouts[present]

    def _summed(self, grads: dict[int, Tensor]) -> dict[int, Tensor]:
        """The sums of gradients over all shards of all ranks."""
        sums = self._rows(grads, chain())
        if self.optimizer.clip_norm is not None:
            self._sums = sums
        rows = zip(self._layout(grads), sums, strict=True)
        return {at: value for bucket, row in rows for at, value in bucket.unpacked(row).items()}

    def _norm(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of the gradients, in the order in which ranks with parts of them sum it."""
        sums, self._sums = self._sums, []
        return sqrt(sum_(concat([part for row in sums for part in squares(row, self.shards)])))

    def _rows(self, grads: Mapping[int, Tensor], links: Chain) -> list[Tensor]:
        """The same in rows, or with zero=2 this rank's parts of rows."""
        rows = self._kept_rows(grads)
        for level in self._levels[: self._waiting]:
            rows = [kept + row for kept, row in zip(level, rows, strict=True)]
        return rows if self._divided is not None else links.apply_all(self._operation, rows)

    def _kept_rows(self, grads: Mapping[int, Tensor]) -> list[Tensor]:
        """The gradients of a shard in rows; with zero=3, this rank's parts of their sums over ranks."""
        if self._divided is not None and capture.get() is not None:
            return self._divided.reduced(grads, self._operation, chain())
        rows = [bucket.packed(grads) for bucket in self._layout(grads)]
        return rows if self._divided is None else chain().apply_all(self._operation, rows)

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
