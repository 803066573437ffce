"""A run: cases on devices are measured, shown, saved and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.bench.case import Case, sizes_for
from penstock.bench.ceilings import measure_ceilings
from penstock.bench.comparing import compare
from penstock.bench.errors import BenchmarkError
from penstock.bench.operations import operations
from penstock.bench.peer import Torch
from penstock.bench.results import DeviceResults, Hardware, Measured, Results, load, versions
from penstock.bench.sampling import FULL, QUICK, Effort, measure
from penstock.bench.steps import steps
from penstock.bench.view import open_console, progress, show_comparison, show_results
from penstock.errors import DeviceNotFound
from penstock.registry import default_device, find, use
from penstock.runtime import Device
from penstock.terminal import say


def cases_for(device: Device) -> list[Case]:
    """All cases, in the sizes for a device."""
    return [*operations(sizes_for(device.capabilities)), *steps()]


def run(
    device: Device,
    only: Sequence[str] = (),
    peer: Torch | None = None,
    effort: Effort = FULL,
    tell: Callable[[str], None] = lambda doing: None,
) -> DeviceResults:
    """Measure cases on a device, by name or by name and size; all, if none is given."""
    cases = _chosen(cases_for(device), only)
    with _as_default(device):
        tell("measuring the ceilings")
        ceilings = measure_ceilings(device, effort.ceiling_seconds)
        measured, left_out = measure(cases, device, peer, effort, tell)
    # A case faster than the large product shows that other load slowed the product down.
    most = max([ceilings.flops, *(case.flops / min(case.seconds) for case in measured)])
    return DeviceResults(Hardware.of(device), replace(ceilings, flops=most), measured, left_out)


def bench(
    devices: Sequence[str] = (),
    only: Sequence[str] = (),
    save: Path | None = None,
    base: Path | None = None,
    against: str | None = None,
    quick: bool = False,
) -> bool:
    """The command `penstock bench`; whether nothing got slower than in the file `base`.

    That file also selects devices and cases, unless they are given.
    """
    if against not in (None, "torch"):
        raise BenchmarkError(f"--against knows torch, and {against!r} was given")
    before = None if base is None else load(base)
    chosen = _devices(devices, before, str(base))
    peers = [Torch(device) if against else None for device in chosen]
    for device in chosen:  # first, so that an error comes early
        _chosen(cases_for(device), only)
        if before is not None:
            before.of(Hardware.of(device), str(base))
    wanted = [*only] if only or before is None else _still_there(before.only, chosen, str(base))
    results = Results(versions(peers[0]), wanted, [])
    console = open_console()
    say(console, _listed(results.versions))
    if before is not None and before.versions != results.versions:
        say(console, f"{base}: {_listed(before.versions)}")
    effort = QUICK if quick else FULL
    slower = 0
    for device, peer in zip(chosen, peers, strict=True):
        with progress(console) as tell:
            measured = run(device, wanted, peer, effort, tell)
            if before is not None:
                known = before.of(measured.hardware, str(base)).measured
                asked = [case for case in known if not only or case.name in only or case.label in only]
                measured = _looked_twice(measured, asked, device, peer, effort, tell)
        results.devices.append(measured)
        show_results(console, measured)
        if before is not None:
            comparison = compare(asked, measured.measured)
            show_comparison(console, comparison, str(base))
            slower += len(comparison.slower)
    if save is not None:
        results.save(save)
        say(console, f"\nkept in {save}; penstock bench --compare {save} measures against it")
    return not slower


def _looked_twice(
    first: DeviceResults,
    before: list[Measured],
    device: Device,
    peer: Torch | None,
    effort: Effort,
    tell: Callable[[str], None],
) -> DeviceResults:
    """The results, with more samples of the cases that seem to be slower.

    The machine may have been busy during all samples. If the second look has other times, the interval of all
    samples is wide, and no longer says that the case got slower.
    """
    slower = {change.label for change in compare(before, first.measured).slower}
    cases = [case for case in cases_for(device) if case.label in slower]
    if not cases:
        return first
    with _as_default(device):
        again, _ = measure(cases, device, peer, effort, tell)
    more = {case.label: case for case in again}
    return replace(
        first,
        measured=[
            case.with_more(more[case.label]) if case.label in more else case for case in first.measured
        ],
    )


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _still_there(only: Sequence[str], devices: Sequence[Device], source: str) -> list[str]:
    """The names of an older run's cases that still exist."""
    cases = [case for device in devices for case in cases_for(device)]
    there = [name for name in only if any(name in (case.name, case.label) for case in cases)]
    if only and not there:
        raise BenchmarkError(f"{source} has only {', '.join(only)}, and no such case is left")
    return there


def _devices(names: Sequence[str], base: Results | None, source: str) -> list[Device]:
    """The given devices, or those of the file, or the default device."""
    if names:
        return list(dict.fromkeys(find(name) for name in names))
    if base is None:
        return [default_device()]
    try:
        return [find(device.hardware.name) for device in base.devices]
    except DeviceNotFound as error:
        there = ", ".join(str(device.hardware) for device in base.devices)
        raise BenchmarkError(f"{source} was measured on {there}; {error}") from None


def _chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases given by name, or by name and size; all, if none is given."""
    for name in only:
        if not any(name in (case.name, case.label) for case in cases):
            names = ", ".join(dict.fromkeys(case.name for case in cases))
            raise BenchmarkError(f"there is no case {name!r}; the cases are {names}")
    return [case for case in cases if not only or case.name in only or case.label in only]


@contextmanager
def _as_default(device: Device) -> Iterator[None]:
    """Make a device the default: random values of parameters are drawn on the default device."""
    before = default_device()
    use(device)
    try:
        yield
    finally:
        use(before)
