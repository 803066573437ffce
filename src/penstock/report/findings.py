"""The results of a profile as a page shows them: from a profile, a trace, or the file of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.advising import Advice, advise
from penstock.data.files import written_whole
from penstock.errors import ReportError
from penstock.files import MOST_OF_A_TRACE, parse_json, read_text
from penstock.profiling.records import CopyRecord, DeviceRecord, KernelRecord, OwnerRecord, WaitRecord
from penstock.report.planned_step import PlannedStep

if TYPE_CHECKING:
    from penstock.plan.arenas import ArenaPlan
    from penstock.profiling.profiles import Profile

FILE = "profile.json"  # inside the folder of a run
_FORMAT = "penstock profile 1"
_MOST_SAMPLES = 400  # of a device's memory
_FIRST_DEVICE = 2  # the process ID of the first device in a trace; the host is 1

Sample = tuple[float, int, int]  # seconds, live and pooled bytes
T = TypeVar("T")


@dataclass(frozen=True)
class Certificate:
    """The memory of a step's temporaries by their plan, and a lower bound of it."""

    arena_bytes: int
    lower_bound: int
    arenas: int

    @classmethod
    def of(cls, plan: ArenaPlan) -> Certificate:
        """The certificate of a plan."""
        return cls(plan.arena_bytes, plan.lower_bound, len(plan.plans))

    @property
    def gap(self) -> float:
        """The share by which the plan exceeds the lower bound."""
        return (self.arena_bytes - self.lower_bound) / max(self.lower_bound, 1)


@dataclass(frozen=True)
class Findings:
    """A finished profile, with the advice from it."""

    seconds: float
    devices: list[DeviceRecord]
    kernels: list[KernelRecord]  # the longest time first
    copies: list[CopyRecord]
    waits: list[WaitRecord]
    memory: list[OwnerRecord]
    ceilings: dict[str, dict[str, float]]  # by device: `bytes` per second, operations by dtype
    samples: dict[str, list[Sample]]  # by device
    advice: list[Advice]
    steps: tuple[int, int] | None = None  # the first and the last step of a run that was profiled
    certificate: Certificate | None = None  # of the run's training step
    planned: PlannedStep | None = None

    def save(self, path: Path) -> None:
        """Write them for `load`."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        with written_whole(path) as file:
            file.write(text.encode())


def of_profile(
    profile: Profile,
    steps: tuple[int, int] | None = None,
    certificate: Certificate | None = None,
    planned: PlannedStep | None = None,
) -> Findings:
    """The findings of a profile; measures the device's best rates if they are unknown."""
    kernels = profile.kernels()
    return Findings(
        seconds=profile.seconds,
        devices=profile.devices(),
        kernels=kernels,
        copies=profile.copies(),
        waits=profile.waits(),
        memory=profile.memory(),
        ceilings=profile.ceilings(),
        samples={name: _thinned(samples) for name, samples in profile.memory_samples().items()},
        advice=advise(profile),
        steps=steps,
        certificate=certificate,
        planned=planned,
    )


def load(path: Path) -> Findings:
    """The findings that `save` wrote; a ReportError says why a file is not valid."""
    tree = _read(path)
    if tree.get("format") != _FORMAT:
        raise ReportError(f"{path} is no profile of a run; its format is {tree.get('format')!r}")
    try:
        steps, certificate, planned = tree.get("steps"), tree.get("certificate"), tree.get("planned")
        return Findings(
            **_totals(tree),
            samples=_samples(tree["samples"]),
            advice=_records(Advice, tree["advice"]),
            steps=None if steps is None else (int(steps[0]), int(steps[1])),
            certificate=None if certificate is None else Certificate(**certificate),
            planned=None if planned is None else _planned(planned),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f"{path} is damaged, or of another version of Penstock ({_reason(error)})"
        ) from None


def of_trace(path: Path) -> Findings:
    """The findings in a trace that `ps.profile` saved; a ReportError says why a file is not valid."""
    tree = _read(path)
    about = tree.get("otherData")
    if not isinstance(about, dict) or about.get("tool") != "penstock":
        raise ReportError(
            f"{path} is no trace of ps.profile; give the folder of a run, or a file that "
            "ps.profile('trace.json') has written"
        )
    try:
        totals = _totals(about)
        samples: dict[str, list[Sample]] = {device.name: [] for device in totals["devices"]}
        names = list(samples)
        for event in tree["traceEvents"]:
            if event.get("ph") == "C" and event.get("name") == "memory":
                args = event["args"]
                of_device = samples[names[event["pid"] - _FIRST_DEVICE]]
                of_device.append((event["ts"] / 1e6, int(args["live"]), int(args["pooled"])))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f"{path} is damaged, or of another version of Penstock ({_reason(error)})"
        ) from None
    thinned = {name: _thinned(own) for name, own in samples.items()}
    return Findings(**totals, samples=thinned, advice=advise(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = parse_json(read_text(path, MOST_OF_A_TRACE))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ReportError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ReportError(f"{path} is no profile: it holds {type(tree).__name__} and no object")
    return tree


def _totals(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a trace has as well."""
    ceilings = tree.get("ceilings", {})  # which traces of older versions lack
    kernels = _records(KernelRecord, tree["kernels"])
    return {
        "seconds": float(tree["seconds"]),
        "devices": _records(DeviceRecord, tree["devices"]),
        "kernels": sorted(kernels, key=lambda kernel: (-(kernel.seconds or 0.0), -kernel.calls)),
        "copies": _records(CopyRecord, tree["copies"]),
        "waits": _records(WaitRecord, tree["waits"]),
        "memory": _records(OwnerRecord, tree["memory"]),
        "ceilings": {
            str(device): {str(what): float(rate) for what, rate in rates.items()}
            for device, rates in ceilings.items()
        },
    }


def _records(kind: type[T], rows: Sequence[Mapping[str, Any]]) -> list[T]:
    """Records from JSON; fields of later versions are ignored."""
    kinds = {item.name: str(item.type) for item in fields(kind)}  # type: ignore[arg-type]
    for row in rows:
        for name, wanted in kinds.items():
            if not _fits(row[name], wanted):
                raise ValueError(f"{name} is {row[name]!r}")
    return [kind(**{name: row[name] for name in kinds}) for row in rows]


def _fits(value: object, annotation: str) -> bool:
    """Whether a value of JSON has the type of a record's field."""
    if value is None:
        return annotation.endswith("None")
    allowed: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
    return isinstance(value, allowed.get(annotation.partition(" |")[0], (str,)))


def _planned(tree: Mapping[str, Any]) -> PlannedStep:
    moments = [(int(turn), int(live), int(gone), int(again)) for turn, live, gone, again in tree["moments"]]
    seconds = tree["seconds"]
    return PlannedStep(
        moments,
        int(tree["recomputed"]),
        int(tree["peak_bytes"]),
        None if seconds is None else float(seconds),
    )


def _samples(tree: Mapping[str, Any]) -> dict[str, list[Sample]]:
    return {
        str(device): [(float(at), int(live), int(pooled)) for at, live, pooled in samples]
        for device, samples in tree.items()
    }


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """As many samples as a chart has room for: of successive samples, that with the most live bytes."""
    size = -(-len(samples) // _MOST_SAMPLES) or 1
    return [max(samples[at : at + size], key=lambda pair: pair[1]) for at in range(0, len(samples), size)]


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
