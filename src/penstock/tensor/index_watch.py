"""Index checks of jitted functions: tensors with the worst index so far, which every call updates."""

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
    """The worst index so far of some operations; the host checks it when it next reads any value."""

    def __init__(self, checked: Worst, device: Device) -> None:
        self._verdict = checked.verdict
        self._device = device
        with outside_capture():  # it outlives the capture
            self.tensor = Tensor(self._initial(checked.node.shape), device)
        self._watched: Watched | None = None

    def ran(self) -> None:
        """Have the result of a call checked that was just launched."""
        buffer = self.tensor._actual_node.value
        if self._watched is None or self._watched.buffer is not buffer:
            self._watched = Watched(buffer, self._verdict.dtype, self._judge)
        self._device.watch(self._watched)

    def _judge(self, values: npt.NDArray[Any]) -> BadIndex | None:
        error = self._verdict.judge(values)
        if error is not None:  # it is reported once
            self.forget()
        return error

    def forget(self) -> None:
        """Reset to no bad index."""
        self.tensor._actual_node = self._initial(self.tensor._actual_node.shape)

    def _initial(self, shape: Shape) -> Node:
        """The value before any index was checked."""
        dtype = self._verdict.dtype
        values = np.zeros(shape, dtype)
        buffer = self._device.upload(values, into=self._device.visible(values.nbytes))
        return leaf(buffer, shape, dtype)


def watched_indices(wanted: Sequence[Node], device: Device) -> list[IndexWatch]:
    """A watch for each dtype of the unchecked indices that results are computed from.

    Called during a capture, it also records the updates of the watches' tensors.
    """
    watches = []
    for bad in worst(unchecked(topological(wanted))):
        watch = IndexWatch(bad, device)
        watch.tensor._node = maximum(watch.tensor._node, bad.node)
        watches.append(watch)
    return watches
