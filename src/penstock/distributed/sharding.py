"""Optimizer state in parts: each rank keeps and updates its part of every row of parameters (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import lcm, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.collectives.communicator import Communicator
from penstock.distributed.buckets import Bucket, buckets_of_groups, squares
from penstock.distributed.collective import Chain
from penstock.distributed.pieces import Piece, check_shapes, items_of
from penstock.errors import SettingError
from penstock.nn.parameter import Parameter
from penstock.optim.optimizer import Optimizer
from penstock.tensor.arithmetic import sqrt
from penstock.tensor.core import Tensor, from_numpy
from penstock.tensor.dtypes import float16, float32
from penstock.tensor.gathering import gathered_as
from penstock.tensor.manipulation import astype, concat, permute_dims, reshape
from penstock.tensor.recording import no_grad
from penstock.tensor.reduction import sum as sum_

Arrays = dict[str, npt.NDArray[Any]]
MULTIPLE = 128  # items: the length of a row depends on no usual number of ranks


def why_not_sharded(optimizer: Optimizer) -> str:
    """Why the state of an optimizer cannot be divided among ranks; empty if it can."""
    if not optimizer.elementwise:
        return (
            f"{type(optimizer).__name__} updates an item by others of its parameter, which ranks that keep "
            "parts of it do not have; use zero=0"
        )
    if any(tensor.dtype == float16 for tensor in optimizer.parameters):
        return "ranks scale the loss of float16 together only with zero=0; use bfloat16"
    return ""


class ShardedOptimizer:
    """An optimizer over this rank's parts of rows of parameters, in float32, in place of one over all.

    `pieces` is how many parts of a row the norm of gradients is summed in, whatever the number of ranks.
    """

    def __init__(self, whole: Optimizer, group: Communicator, pieces: int, bucket_bytes: int) -> None:
        if why := why_not_sharded(whole):
            raise SettingError(why)
        whole._state.clear()  # first, so that both need no room at a time
        self._group, self._pieces = group, pieces
        self._parameters = list(whole.parameters)
        self.rows: list[Bucket] = []
        groups: list[dict[str, Any]] = []
        masters = {at: whole._master(at).detach() for at in range(len(self._parameters))}
        self.parts: list[Tensor] = []  # this rank's, of rows
        given = dict(enumerate(self._parameters))
        layout = buckets_of_groups(given, whole._group_of, bucket_bytes, lcm(MULTIPLE, group.size))
        for settings, rows in zip(whole.param_groups, layout, strict=True):
            own = [self._own(row.packed(masters)) for row in rows]
            parts = [Parameter(part) for part in gathered_as(own, float32, whole._device)]  # no slices
            self.rows += rows
            self.parts += parts
            known = {name: settings[name] for name in settings if name != "initial_lr"}
            groups.append({**known, "params": parts})
        self.inner = type(whole)(groups, clip_norm=whole.clip_norm)  # type: ignore[call-arg]
        for name in whole._varied:
            self.inner.vary(name)
        for old, new in zip(whole.param_groups, self.inner.param_groups, strict=True):
            vars(old).update(vars(new), _more=old._more)  # schedulers have set initial_lr
        self.inner.param_groups = whole.param_groups
        self.inner.exchange = dict  # so that a step outside of jit, which exchanges norms, is recorded anew
        whole._masters.clear()

    def _own(self, row: Tensor) -> Tensor:
        """This rank's part of a row."""
        length = row.size // self._group.size
        return row[self._group.rank * length : (self._group.rank + 1) * length]

    def step(self, sums: Sequence[Tensor], links: Chain) -> None:
        """Update from sums of gradients, a row for each bucket or only this rank's part of it."""
        for part, row in zip(self.parts, sums, strict=True):
            part.grad = row if row.shape == part.shape else self._own(row)
        self.inner.norm = lambda grads: self._norm(grads, links)  # type: ignore[method-assign]
        self.inner.step()

    def publish(self, links: Chain) -> None:
        """Give the parameters the values of all ranks' parts."""
        with no_grad():
            for bucket, part in zip(self.rows, self.parts, strict=True):
                first = self._parameters[bucket.positions[0]]
                (row,) = links.apply_all("all_gather", [astype(part.detach(), first.dtype)])
                for at, value in bucket.unpacked(row).items():
                    self._parameters[at]._rebind(value)

    def _norm(self, grads: Sequence[Tensor], links: Chain) -> Tensor:
        """The norm of the gradients of all ranks, summed in the same order on any number of them."""
        size = self._group.size
        own = self._pieces // size
        sums = [part for grad in grads for part in squares(grad, own)]
        (row,) = links.apply_all("all_gather", [concat(sums)])
        joined = reshape(row, (size, len(grads), own))
        return sqrt(sum_(reshape(permute_dims(joined, (1, 0, 2)), (-1,))))

    # Checkpoints, which have the state of whole parameters

    def state_dict(self) -> Arrays:
        """The state of an optimizer over all parameters."""
        state = self.inner.state_dict()
        result: Arrays = {}
        for name in self.inner._state:
            whole = self._whole([state.pop(f"{name}.{at}") for at in range(len(self.rows))])
            result |= {f"{name}.{at}": array for at, array in whole.items()}
        masters = self._whole([part.numpy() for part in self.parts]) if self._narrow() else {}
        result |= {f"master.{at}": masters[at] for at in self._narrow()}
        return result | self._counts_and_rates()

    def _counts_and_rates(self) -> Arrays:
        """The part of the state that every rank has."""
        state = self.inner._counts_and_rates()
        row_of = {at: number for number, row in enumerate(self.rows) for at in row.positions}
        for name in self._counts():
            counts = state[name]
            state[name] = np.array([counts[row_of[at]] for at in range(len(self._parameters))])
        return state

    def pieces(self) -> Iterator[Piece]:
        """The rest of the state, as far as this rank has it."""
        narrow = self._narrow()
        kinds = dict(self.inner._state) | ({"master": self.parts} if narrow else {})
        for name, parts in kinds.items():
            for bucket, part in zip(self.rows, parts, strict=True):
                for at, shape, start, stop, offset in self._spans(bucket):
                    if name != "master" or at in narrow:
                        yield Piece(f"{name}.{at}", shape, start, stop, part, offset)

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Restore such a state, of any number of ranks; parameters that are not in it keep their values."""
        narrow = self._narrow()
        shapes = {
            f"{name}.{at}": tensor.shape
            for name in (*self.inner._state, *(["master"] if narrow else []))
            for at, tensor in enumerate(self._parameters)
            if name != "master" or at in narrow
        }
        check_shapes(state, shapes)

        def master(at: int, start: int, stop: int) -> npt.NDArray[Any]:
            if at in narrow:
                return items_of(state, f"master.{at}", start, stop)
            return self._parameters[at].numpy().reshape(-1)[start:stop]

        inner: Arrays = {}
        for name in self.inner._state:
            parts = self._cut(lambda at, *span, name=name: items_of(state, f"{name}.{at}", *span))
            inner |= {f"{name}.{number}": part for number, part in enumerate(parts)}
        for name in self._counts():
            table = np.broadcast_to(np.asarray(state[name]), len(self._parameters))
            inner[name] = np.array([table[row.positions[0]] for row in self.rows])
        rest = set(state) - set(shapes) - set(inner)
        self.inner.load_state_dict({**inner, **{name: state[name] for name in rest}})
        for part, array in zip(self.parts, self._cut(master), strict=True):
            part._become(from_numpy(array, part.device)._node)

    def _narrow(self) -> set[int]:
        """The parameters that have a master."""
        return {at for at, tensor in enumerate(self._parameters) if tensor.dtype != float32}

    # The parameters themselves, where ranks keep no others (ZeRO-3)

    def parameter_pieces(self, names: Mapping[int, Sequence[str]]) -> Iterator[Piece]:
        """This rank's pieces of parameters, by their positions, each under its names."""
        for bucket, part in zip(self.rows, self._values(), strict=True):
            for at, shape, start, stop, offset in self._spans(bucket):
                for name in names.get(at, ()):
                    yield Piece(name, shape, start, stop, part, offset)

    def _values(self) -> list[Tensor]:
        """This rank's parts of rows, in the dtypes of parameters."""
        dtypes = [self._parameters[row.positions[0]].dtype for row in self.rows]
        return [astype(part.detach(), dtype) for part, dtype in zip(self.parts, dtypes, strict=True)]

    def whole_values(self) -> dict[int, npt.NDArray[Any]]:
        """The values of all parameters, by position."""
        return self._whole([part.numpy() for part in self._values()])

    def take(self, values: Mapping[int, npt.NDArray[Any]]) -> None:
        """Take other values of some parameters, which all ranks give."""
        for bucket, part in zip(self.rows, self.parts, strict=True):
            if values.keys().isdisjoint(bucket.positions):
                continue
            array = part.numpy().copy()
            for at, _, start, stop, offset in self._spans(bucket):
                if at in values:
                    array[offset : offset + stop - start] = values[at].reshape(-1)[start:stop]
            part._become(from_numpy(array, part.device)._node)

    def _counts(self) -> Sequence[str]:
        return () if self.inner._counted is None else self.inner._counted.names

    def _whole(self, parts: Sequence[npt.NDArray[Any]]) -> dict[int, npt.NDArray[Any]]:
        """Arrays of all parameters from this rank's parts of rows, and those of the others."""
        result: dict[int, npt.NDArray[Any]] = {}
        for bucket, part in zip(self.rows, parts, strict=True):
            row = self._group.run("all_gather", part)
            start = 0
            for at, shape in zip(bucket.positions, bucket.shapes, strict=True):
                end = start + int(np.prod(shape, dtype=np.int64))
                result[at] = row[start:end].reshape(shape)
                start = end
        return result

    def _spans(self, bucket: Bucket) -> Iterator[tuple[int, tuple[int, ...], int, int, int]]:
        """Which items of which parameters are in this rank's part of a row, and from where on."""
        length = bucket.length // self._group.size
        low = self._group.rank * length
        before = 0
        for at, shape in zip(bucket.positions, bucket.shapes, strict=True):
            start, stop = (min(max(edge - before, 0), prod(shape)) for edge in (low, low + length))
            if start < stop:
                yield at, shape, start, stop, before + start - low
            before += prod(shape)

    def _cut(self, items: Callable[[int, int, int], npt.NDArray[Any]]) -> list[npt.NDArray[np.float32]]:
        """This rank's parts of rows, of which `items` gives some of each parameter."""
        parts = []
        for bucket in self.rows:
            part = np.zeros(bucket.length // self._group.size, np.float32)
            for at, _, start, stop, offset in self._spans(bucket):
                part[offset : offset + stop - start] = items(at, start, stop)
            parts.append(part)
        return parts
