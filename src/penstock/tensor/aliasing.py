"""Which results of a captured function are written over what they replace: values, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.tensor.core import Tensor
from penstock.tensor.tracing import Origin

if TYPE_CHECKING:
    from penstock.tensor.replay import Captured


class Aliasing:
    """Which outputs of a program may take the memory of which inputs."""

    def __init__(self, captured: Captured, may_overwrite: Callable[[int, int], bool] | None) -> None:
        self.may = may_overwrite or (lambda output, at: False)
        changes = captured.changes
        outside = {
            id(origin.outside): captured.results + at
            for at, origin in enumerate(changes.values)
            if origin.outside is not None and at not in changes.histories
        }
        # Tensors whose new value can overwrite the old: input, tensor, output, position in `wanted`.
        self.in_place: list[tuple[int, Tensor, int, int]] = []
        for number, source in enumerate(captured.inputs):
            if isinstance(source, Origin) and source.outside is not None and id(source.outside) in outside:
                where = outside[id(source.outside)]
                output = captured.wanted[where]
                if isinstance(output, int) and self.may(output, number):
                    self.in_place.append((number, source.outside, output, where))
        self.gradients = list(self._gradients(captured))
        self.tensors = [tensor for _, tensor, _, _ in self.in_place]
        self.numbers = [number for number, *_ in (*self.in_place, *self.gradients)]
        self.replaced_inputs = {output: number for number, _, output, _ in self.in_place}
        self.replaced_inputs |= {output: number for number, _, output in self.gradients}
        # Those that can keep their node. Integers cannot: a node holds the known range of an index.
        self.kept = {where for _, tensor, _, where in self.in_place if tensor.dtype.kind not in "iu"}
        self.others = [where for where in range(len(captured.wanted)) if where not in self.kept]

    def _gradients(self, captured: Captured) -> Iterator[tuple[int, Tensor, int]]:
        """Gradients that replace others, over which they may be written: input, tensor, output."""
        new = [origin.outside for origin, assigned in captured.changes.grads if assigned is True]
        first = captured.results + len(captured.changes.values)
        where = {id(owner): first + at for at, owner in enumerate(new) if owner is not None}
        for number, source in enumerate(captured.inputs):
            of = source.gradient_of if isinstance(source, Origin) else None
            if of is None or of.outside is None or id(of.outside) not in where or source in captured.wanted:
                continue
            output = captured.wanted[where[id(of.outside)]]
            if isinstance(output, int) and self.may(output, number):
                yield number, of.outside, output
