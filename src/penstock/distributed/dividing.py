"""Parameters in parts (ZeRO-3): a rank keeps its part of each, and gathers whole parameters for their uses.

Between steps a parameter has no value. A jitted function that uses it gathers the row that it is in, and
keeps that until its last use; the backward pass gathers it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from penstock.distributed.collective import Chain, chain
from penstock.distributed.refetching import Backward
from penstock.distributed.sharding import ShardedOptimizer
from penstock.errors import SettingError
from penstock.graph import elementwise
from penstock.graph.node import Node, leaf
from penstock.runtime import Device
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, from_numpy
from penstock.tensor.manipulation import astype
from penstock.tensor.recording import no_grad
from penstock.tensor.tracing import MadeInside

_WHY = (
    "with zero=3 each rank has a part of this parameter: its value is there in functions under @ps.jit that "
    "all ranks call, and in `with optimizer.gathered():`, which all ranks enter"
)


class _Inside:
    """What a captured function has gathered so far: the values of rows, and the losses of backward passes."""

    def __init__(self, owner: DividedParameters) -> None:
        self._owner = owner
        self.values: dict[int, dict[int, Tensor]] = {}  # by row, and by parameter
        self.losses: list[Node] = []

    def after_capture(self) -> None:
        """Without a step after it, the backward pass gathers parameters for gradients that are kept."""
        if self.losses:
            self._owner.keep_gradients()

    def before_replay(self) -> None:
        """See `Capture.part`."""

    def after_failure(self) -> None:
        """See `Capture.part`."""


class DividedParameters:
    """The parameters of a sharded optimizer, of which this rank keeps only what the optimizer updates."""

    def __init__(self, sharded: ShardedOptimizer, parameters: Sequence[Tensor]) -> None:
        self._sharded, self._parameters = sharded, parameters
        self._device: Device = parameters[0].device
        self._row_of = {at: number for number, row in enumerate(sharded.rows) for at in row.positions}
        self._known: dict[int, Node] | None = None  # in `gathered`: the values that were gathered
        self._divide()

    # Outside of jitted functions

    @contextmanager
    def gathered(self, device: Device | None = None) -> Iterator[None]:
        """In a block, which all ranks enter, parameters are whole, on their device or another.

        Other values that parameters get in the block are taken at its end.
        """
        if capture.get() is not None:
            raise SettingError("gathered() is for use outside of jitted functions, which gather parameters")
        if self._known is not None:  # in another block
            yield
            return
        arrays = self._sharded.whole_values()
        try:
            self._publish(arrays, self._device if device is None else device)
            yield
            self._sharded.take(self._changed())
        finally:
            self._known = None
            self._divide()

    def _changed(self) -> dict[int, npt.NDArray[Any]]:
        """Values that parameters were given since they were gathered."""
        known = self._known or {}
        changed = [at for at, node in known.items() if self._parameters[at]._actual_node is not node]
        return {at: self._parameters[at].numpy() for at in changed}

    def settle(self) -> None:
        """Note that the optimizer has the values of parameters, if these are whole."""
        if self._known is not None:
            self._known = {at: tensor._actual_node for at, tensor in enumerate(self._parameters)}

    def _publish(self, arrays: Mapping[int, npt.NDArray[Any]], device: Device) -> None:
        for at, tensor in enumerate(self._parameters):
            tensor.device = device
            tensor._become(from_numpy(arrays[at], device)._node)
        self._known = {}
        self.settle()

    def _divide(self) -> None:
        """Free the parameters."""
        for at, tensor in enumerate(self._parameters):
            tensor.device = self._device
            value = MadeInside(SettingError, _WHY, lambda at=at: self._made(at))  # type: ignore[misc]
            tensor._become(leaf(value, tensor.shape, tensor.dtype))

    # Inside of jitted functions

    def _made(self, at: int) -> Node:
        """The whole value of a parameter in the function that is captured."""
        inside, number = self._inside(), self._row_of[at]
        if number not in inside.values:
            with no_grad():
                inside.values[number] = self._fetched(number, chain())
        return elementwise.stop(inside.values[number][at]._node)

    def _fetched(self, number: int, links: Chain) -> dict[int, Tensor]:
        """The whole values of a row, gathered once more."""
        bucket = self._sharded.rows[number]
        dtype = self._parameters[bucket.positions[0]]._actual_node.dtype
        return bucket.unpacked(links.fetch(astype(self._sharded.parts[number].detach(), dtype)))

    def _inside(self) -> _Inside:
        capturing = capture.get()
        assert capturing is not None, "values are made inside jitted functions"
        inside: _Inside = capturing.part((DividedParameters, id(self)), lambda: _Inside(self))
        return inside

    def note(self, loss: Node) -> None:
        """Remember a loss whose backward pass follows in the function that is captured."""
        if any(not isinstance(tensor._actual_node.value, MadeInside) for tensor in self._parameters):
            raise SettingError(
                "with zero=3 a jitted step gathers parameters, and here they have values: load weights in "
                "`with optimizer.gathered():`, and call the step outside of it"
            )
        self._inside().losses.append(loss)

    def reduced(self, grads: Mapping[int, Tensor], operation: Any, links: Chain) -> list[Tensor]:
        """This rank's parts of the sums of gradients over ranks, by row.

        What the backward pass needs of parameters is gathered again for it, in turns with the sums.
        """
        rows = self._sharded.rows
        results: dict[int, Tensor] = {}
        for number, own in self._again(grads, links):
            (results[number],) = links.apply_all(operation, [rows[number].packed(own)])
        return [results[number] for number in range(len(rows))]

    def keep_gradients(self) -> None:
        """Have gradients that outlast the captured function read parameters that are gathered for them."""
        with no_grad():
            used = [at for at, number in self._row_of.items() if number in self._inside().values]
            grads = {at: grad for at in used if (grad := self._parameters[at].grad) is not None}
            for _, own in self._again(grads, chain()):
                for at, grad in own.items():
                    self._parameters[at].grad = grad

    def _again(self, grads: Mapping[int, Tensor], links: Chain) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """Gradients by row, in the order of the backward pass, from parameters that are gathered again."""
        nodes = {at: grad._node for at, grad in grads.items()}
        made = {self._parameters[at]._node: at for at in grads}
        losses = self._inside().losses  # none, if the backward pass was not that of the optimizer
        backward = Backward(losses, made, self._row_of if links.group.exchanges and losses else {})
        members: dict[int, list[int]] = {}
        for at in grads:
            members.setdefault(self._row_of[at], []).append(at)
        order = sorted(members, key=lambda number: max(nodes[at].depth for at in members[number]))
        needs = [backward.needs([nodes[at] for at in members[number]]) for number in order]
        for turn, number in enumerate(order):
            for needed in needs[turn : turn + 2]:  # of these, and of the next
                self._fetch_again(needed, backward, links)
            yield number, {at: Tensor(backward.on(nodes[at]), self._device) for at in members[number]}

    def _fetch_again(self, needed: Collection[int], backward: Backward, links: Chain) -> None:
        for number in needed:
            if number not in backward.fetched:
                backward.take(number, {at: x._node for at, x in self._fetched(number, links).items()})

    def renew(self) -> None:
        """After an update inside a jitted function: later uses in it gather the new values."""
        capturing, inside = capture.get(), self._inside()
        assert capturing is not None
        inside.values.clear()
        inside.losses.clear()
        for tensor in self._parameters:
            capturing.forget(tensor)
