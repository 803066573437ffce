"""What it costs to move a value to the host and back, beside what kernels do in that time."""

from __future__ import annotations

from contextvars import Context

from penstock.drivers.rates import StepRates
from penstock.measuring.ceilings import Ceilings
from penstock.runtime import Device

_USUAL = 64.0  # of GPUs on a PCI bus, where nothing is known and there is no room to measure


def link_cost(device: Device) -> float:
    """How many bytes kernels could move while one byte crosses to the host or back."""
    described: StepRates | None = device.driver.rates
    if described is not None:  # by a file, for a device that is not there
        return described.bandwidth / described.link
    ceilings = Ceilings(device)
    # In a context of its own: this may be asked for while a function is captured.
    memory, link = Context().run(lambda: (ceilings.bandwidth(), ceilings.link()))
    return memory / link if memory and link else _USUAL
