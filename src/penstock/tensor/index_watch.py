"""The worst indices of all calls of a jitted function, in tensors that every call changes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import BadIndex
from penstock.graph.bounds import Worst, unchecked, worst
from penstock.graph.elementwise import maximum
from penstock.graph.node import Node, Shape, leaf, topological
from penstock.runtime import Device
from penstock.stream.watching import Watched
from penstock.tensor.core import Tensor, outside_capture


class IndexWatch:
    """The worst of some indices so far, which the host looks at when it next reads anything."""

    def __init__(self, found: Worst, device: Device) -> None:
        self._verdict = found.verdict
        self._device = device
        with outside_capture():  # it outlives the capture, like any tensor from outside
            self.tensor = Tensor(self._nothing(found.node.shape), device)
        self._watched: Watched | None = None

    def ran(self) -> None:
        """Have a call looked at that was just recorded."""
        buffer = self.tensor._actual_node.value
        if self._watched is None or self._watched.buffer is not buffer:
            self._watched = Watched(buffer, self._verdict.dtype, self._judge)
        self._device.watch(self._watched)

    def _judge(self, values: npt.NDArray[Any]) -> BadIndex | None:
        error = self._verdict.judge(values)
        if error is not None:  # which is told once
            self.forget()
        return error

    def forget(self) -> None:
        """Begin anew: no index was bad."""
        self.tensor._actual_node = self._nothing(self.tensor._actual_node.shape)

    def _nothing(self, shape: Shape) -> Node:
        """The worst of no index."""
        dtype = self._verdict.dtype
        values = np.zeros(shape, dtype)
        buffer = self._device.upload(values, into=self._device.visible(values.nbytes))
        return leaf(buffer, shape, dtype)


def watched_indices(wanted: Sequence[Node], device: Device) -> list[IndexWatch]:
    """What watches the indices that some results are computed from.

    Called inside the function that is being captured, it has every call change the tensors of the watches.
    """
    watches = []
    for found in worst(unchecked(topological(wanted))):
        watch = IndexWatch(found, device)
        watch.tensor._node = maximum(watch.tensor._node, found.node)
        watches.append(watch)
    return watches
