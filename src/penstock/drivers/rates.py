"""How fast a device gets through the launches of a program: what step times are predicted from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.drivers.driver import Cost


@dataclass(frozen=True)
class StepRates:
    """The rates that kernels reach inside a training step; per second, unless said otherwise."""

    bandwidth: float  # bytes that kernels read and write
    operations: Mapping[str, float]  # of products of matrices, by dtype; float32 is always there
    launch: float  # seconds that each launch takes beside its work
    link: float  # bytes between the memory of the host and that of the device

    def seconds(self, launches: Iterable[Cost]) -> float:
        """About how long launches take that follow one another: to start, to move bytes, to multiply."""
        result = 0.0
        for cost in launches:
            result += self.launch + cost.nbytes / self.bandwidth
            if cost.product:
                result += cost.operations / self.product_rate(cost.product)
        return result

    def product_rate(self, dtype: str) -> float:
        """Of products in a dtype; where nothing is known of it, that of float32."""
        return self.operations.get(dtype, self.operations["float32"])
