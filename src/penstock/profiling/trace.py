"""A profile as a trace for Perfetto (ui.perfetto.dev) and Chrome: the JSON of Chrome's trace events.

Every device is a process with a track for each of its queues, and the host is a process with a track for each
thread that waited, copied or computed. Times are in microseconds from the start of the profile.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.files import atomic_file
from penstock.memory.trace import Action
from penstock.profiling.records import EventRecord

_QUEUES = ("compute", "incoming", "outgoing")
_HOST = 1  # the process ID of the host; devices follow
_OWNERS = 8  # lines with a counter of their own
Entry = dict[str, Any]


@dataclass(frozen=True)
class DeviceTrace:
    """A device in a trace; seconds are from the start of the profile."""

    name: str
    description: str
    events: Sequence[EventRecord]
    samples: Sequence[tuple[float, int, int]]  # seconds, live and pooled bytes
    actions: Sequence[Action]  # whose seconds are those of `perf_counter`
    held_before: Mapping[str, int]  # by owner, before the first of the actions
    dropped: int


def write(
    path: str | os.PathLike[str], devices: Sequence[DeviceTrace], start: float, about: Mapping[str, Any]
) -> None:
    """Write a trace. `start` is the start of the profile, `about` is written in addition to the events."""
    whole = {
        "traceEvents": sorted(entries(devices, start), key=_order),
        "displayTimeUnit": "ms",
        "otherData": about,
    }
    with atomic_file(Path(path)) as file:
        file.write(json.dumps(whole, default=str).encode())


def plain(records: Iterable[Any]) -> list[dict[str, Any]]:
    """Records as values for JSON."""
    return [asdict(record) for record in records]


def _order(entry: Entry) -> tuple[bool, float, float]:
    """The order of events: names first, then by time, an enclosing event before those inside it."""
    return entry["ph"] != "M", entry.get("ts", 0.0), -entry.get("dur", 0.0)


def entries(devices: Sequence[DeviceTrace], start: float) -> Iterator[Entry]:
    """All events of a trace, in any order."""
    threads: dict[str, int] = {}
    yield from _named(_HOST, "host", _HOST)
    for number, device in enumerate(devices, _HOST + 1):
        yield from _named(number, f"{device.name}: {device.description}", number)
        for track, queue in enumerate(_QUEUES, 1):
            yield _metadata("thread_name", number, track, {"name": queue})
        for event in device.events:
            if event.track in _QUEUES:
                yield _slice(event, number, 1 + _QUEUES.index(event.track))
                continue
            if event.track not in threads:
                threads[event.track] = len(threads) + 1
                yield _metadata("thread_name", _HOST, threads[event.track], {"name": event.track})
            yield _slice(event, _HOST, threads[event.track])
        for seconds, live, pooled in device.samples:
            yield _counter("memory", number, seconds, {"live": live, "pooled": pooled})
        yield from _by_owner(device, number, start)
        if device.dropped:
            note = f"{device.dropped} earlier events of {device.name} are not kept"
            first = min((event.start for event in device.events), default=0.0)
            yield {"ph": "i", "s": "p", "name": note, "pid": number, "tid": 1, "ts": _microseconds(first)}


def _named(process: int, name: str, place: int) -> Iterator[Entry]:
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": place})


def _metadata(what: str, process: int, thread: int, args: Entry) -> Entry:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _slice(event: EventRecord, process: int, thread: int) -> Entry:
    seconds = event.end - event.start
    args: Entry = {"device": event.device}
    if event.detail:
        args["why" if event.kind == "wait" else "shapes"] = event.detail
    if event.nbytes:
        args["bytes"] = event.nbytes
    if event.nbytes and seconds:
        args["GB/s"] = round(event.nbytes / seconds / 1e9, 3)
    if event.operations and seconds:
        args["GFLOP/s"] = round(event.operations / seconds / 1e9, 3)
    start = _microseconds(event.start)
    return {
        "ph": "X",
        "name": f"wait: {event.name}" if event.kind == "wait" else event.name,
        "cat": event.kind,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": round(max(_microseconds(event.end) - start, 0.0), 3),
        "args": args,
    }


def _by_owner(device: DeviceTrace, process: int, start: float) -> Iterator[Entry]:
    """The bytes that lines of code hold over time, for the lines that hold the most."""
    held, most = Counter(device.held_before), Counter(device.held_before)
    for action in device.actions:
        held[action.block.site] += action.block.nbytes if action.out else -action.block.nbytes
        most[action.block.site] = max(most[action.block.site], held[action.block.site])
    shown = {site: f"memory of {_short(site)}" for site, _ in most.most_common(_OWNERS)}
    held = Counter(device.held_before)
    for site in shown:
        yield _counter(shown[site], process, 0.0, {"bytes": max(held[site], 0)})
    for action in device.actions:
        site = action.block.site
        held[site] += action.block.nbytes if action.out else -action.block.nbytes
        if site in shown:
            yield _counter(shown[site], process, action.seconds - start, {"bytes": max(held[site], 0)})


def _short(site: str) -> str:
    """A line of code with the last two parts of its path, since there is little room for counters' names."""
    return "/".join(site.split(os.sep)[-2:])


def _counter(name: str, process: int, seconds: float, values: Entry) -> Entry:
    return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": _microseconds(seconds), "args": values}


def _microseconds(seconds: float) -> float:
    """Microseconds since the start, to a nanosecond; never negative, though converted times are imprecise."""
    return round(max(seconds, 0.0) * 1e6, 3)
