"""The rates of a device in steps of training, from whoever measures them: that takes programs, from above."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.drivers.rates import StepRates
from penstock.runtime import Device

step_rates: Callable[[Device, Iterable[str]], StepRates | None]  # with the dtypes of products


def provide_rates(measured: Callable[[Device, Iterable[str]], StepRates | None]) -> None:
    """Register the function that measures a device."""
    global step_rates
    step_rates = measured
