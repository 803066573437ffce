"""`ps.profile`: everything that devices do inside a `with` block, as records, tables and files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from penstock.measuring.ceilings import Ceilings
from penstock.measuring.workloads import measuring
from penstock.memory import snapshots
from penstock.profiling import trace
from penstock.profiling.evidence import Evidence, gathered
from penstock.profiling.recorder import KEPT, DeviceRecorder, Event, Total
from penstock.profiling.records import (
    CopyRecord,
    DeviceRecord,
    EventRecord,
    KernelRecord,
    OwnerRecord,
    WaitRecord,
)
from penstock.profiling.table import Contents, rendered
from penstock.registry import find
from penstock.runtime import Device, in_use, when_opened

AnyPath = str | os.PathLike[str]


class Profile:
    """What devices do between `__enter__` and `__exit__`, for all threads. It can be used once.

    Profiles may be nested, and overlap in several threads: each sees everything. Totals are exact; of single
    events, the last are kept.
    """

    def __init__(
        self, path: AnyPath | None = None, *, device: Device | str | None = None, kept: int = KEPT
    ) -> None:
        """`kept`: how many single events of each device to keep."""
        self._path = None if path is None else Path(path)
        self._chosen = find(device) if isinstance(device, str) else device
        self._kept = kept
        self._lock = threading.Lock()
        self._recorders: list[DeviceRecorder] = []
        self._ceilings: dict[DeviceRecorder, Ceilings] = {}
        self._process = os.getpid()
        self._start = self._end = self._epoch = 0.0
        self._state: Literal["new", "on", "over"] = "new"

    def __enter__(self) -> Profile:
        if self._state != "new":
            raise RuntimeError("a profile can be used once; make another with ps.profile()")
        if self._path is not None and not self._path.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder for the trace {str(self._path)!r}")
        if self._path is not None and self._path.is_dir():
            raise IsADirectoryError(f"the trace is a file, and {str(self._path)!r} is a folder")
        self._state, self._process = "on", os.getpid()
        try:
            if self._chosen is not None:
                for member in self._chosen.members:
                    self._attach(member)
            else:
                when_opened.append(self._attach)
                for device in list(in_use):
                    if not device.stream.unavailable:
                        self._attach(device)
        except BaseException:
            self._stop()
            raise
        # Only now, since devices first had to finish what was pending.
        self._start = time.perf_counter()
        self._epoch = time.time() - self._start
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            self._state = "over"  # in a forked child, where no device can be used
            return
        try:
            self._stop()
        finally:
            if self._path is not None:
                try:
                    self.save_trace(self._path)
                except OSError as trouble:
                    if error is None:
                        raise
                    error.add_note(f"the trace could not be written: {trouble}")

    def _attach(self, device: Device) -> None:
        if measuring.get():
            return
        with self._lock:
            if self._state == "on" and all(recorder.device is not device for recorder in self._recorders):
                recorder = DeviceRecorder(device, self._kept)
                recorder.begin()
                self._recorders.append(recorder)

    def _stop(self) -> None:
        if self._attach in when_opened:
            when_opened.remove(self._attach)
        errors = []
        with self._lock:
            self._state = "over"
            for recorder in self._recorders:
                try:
                    recorder.end()
                except Exception as trouble:  # the others have to end nevertheless
                    errors.append(trouble)
            self._end = time.perf_counter()
        if errors:
            raise errors[0]

    # Results

    @property
    def seconds(self) -> float:
        """The length of the profile, so far if it is on."""
        return (self._end if self._end else time.perf_counter()) - self._start if self._start else 0.0

    def kernels(self) -> list[KernelRecord]:
        """Every kernel, and what the host computed instead, the longest total time first.

        The first time on a device, this measures its best rates, in well under a second, and keeps them on
        disk. Inside the block, nothing is measured, and only finished commands are included.
        """
        records = [
            self._kernel(recorder, total)
            for recorder in self._recorders
            for total in recorder.totals("kernel")
        ]
        return sorted(records, key=lambda kernel: (-(kernel.seconds or 0.0), -kernel.calls))

    def copies(self) -> list[CopyRecord]:
        """Every direction of copies, separately for device and host."""
        return [
            CopyRecord(
                device=recorder.device.name,
                direction=total.name,  # type: ignore[arg-type]
                where=total.where,
                calls=total.calls,
                nbytes=total.nbytes,
                seconds=total.seconds if total.timed else None,
            )
            for recorder in self._recorders
            for total in recorder.totals("copy")
        ]

    def waits(self) -> list[WaitRecord]:
        """Every line of your code that waited for a device, the longest total time first."""
        records = [
            WaitRecord(recorder.device.name, total.name, total.detail, total.calls, total.seconds)
            for recorder in self._recorders
            for total in recorder.totals("wait")
        ]
        return sorted(records, key=lambda wait: -wait.seconds)

    def memory(self) -> list[OwnerRecord]:
        """Every line of your code that held device memory at the peak, or requested some, the most first."""
        records = [
            OwnerRecord(recorder.device.name, *row)
            for recorder in self._recorders
            for row in recorder.memory.owners()
        ]
        return sorted(records, key=lambda owner: (-owner.peak_bytes, -owner.allocated_bytes))

    def devices(self) -> list[DeviceRecord]:
        """Every device that was recorded."""
        return [self._device(recorder) for recorder in self._recorders]

    def ceilings(self) -> dict[str, dict[str, float]]:
        """The best rates of each device: `bytes` per second, and operations per second by dtype."""
        return {recorder.device.name: known.known() for recorder, known in self._ceilings.items()}

    def memory_samples(self) -> dict[str, list[tuple[float, int, int]]]:
        """Seconds from the start, live and pooled bytes, each time that a device finished something."""
        return {recorder.device.name: self._samples(recorder) for recorder in self._recorders}

    def evidence(self, measure: bool = True) -> list[Evidence]:
        """The evidence of every device for `ps.advise`. `measure`: whether unknown rates may be measured."""
        return [gathered(recorder, measure and self._state == "over") for recorder in self._recorders]

    def events(self) -> list[EventRecord]:
        """The last single events of every device, sorted by start."""
        records = [
            self._event(recorder, event) for recorder in self._recorders for event in recorder.kept_events()
        ]
        return sorted(records, key=lambda event: event.start)

    # Output

    def table(self, width: int | None = None) -> str:
        """Kernels, copies, waits and memory as tables, as wide as the terminal unless a width is given."""
        contents = Contents(
            self.seconds, self.devices(), self.kernels(), self.copies(), self.waits(), self.memory()
        )
        return rendered(contents, width)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        names = ", ".join(recorder.device.name for recorder in self._recorders)
        return f"<profile of {names or 'no device'}, {self._state}>"

    def save_trace(self, path: AnyPath) -> None:
        """Write a trace that ui.perfetto.dev opens: queues, waits, and memory over time.

        Besides the events, it has all totals, in `otherData`.
        """
        about = {
            "tool": "penstock",
            "seconds": self.seconds,
            "dropped_events": sum(recorder.dropped for recorder in self._recorders),
            "devices": trace.plain(self.devices()),
            "kernels": trace.plain(self._without_measuring()),
            "copies": trace.plain(self.copies()),
            "waits": trace.plain(self.waits()),
            "memory": trace.plain(self.memory()),
            "ceilings": self.ceilings(),
            "evidence": trace.plain(self.evidence(measure=False)),
        }
        trace.write(path, [self._trace(recorder) for recorder in self._recorders], self._start, about)

    def save_memory(self, path: AnyPath) -> None:
        """Write what happened to device memory, for PyTorch's memory viewer (pytorch.org/memory_viz)."""
        snapshots.write(
            path,
            [recorder.memory.history(recorder.device.name, self._epoch) for recorder in self._recorders],
        )

    # Records

    def _without_measuring(self) -> list[KernelRecord]:
        return [
            self._kernel(recorder, total, measure=False)
            for recorder in self._recorders
            for total in recorder.totals("kernel")
        ]

    def _kernel(self, recorder: DeviceRecorder, total: Total, measure: bool | None = None) -> KernelRecord:
        cost, mean = total.cost, total.seconds / total.timed if total.timed else None
        share, bound = None, ""
        if cost is not None and mean:
            if recorder not in self._ceilings:
                self._ceilings[recorder] = Ceilings(recorder.device)
            ceilings = self._ceilings[recorder]
            measure = self._state == "over" if measure is None else measure
            if measure and ceilings.operations(cost.product):
                ceilings.exceeded(cost.product, cost.operations / mean)
            least = ceilings.least_seconds(cost.operations, cost.nbytes, cost.product, measure)
            if least is not None:
                share = max(least) / mean
                bound = "compute" if least[0] > least[1] else "memory"
        return KernelRecord(
            device=recorder.device.name,
            name=total.name,
            shapes=total.detail,
            where=total.where,
            calls=total.calls,
            # If some calls failed, the mean of the others is used for them.
            seconds=mean * total.calls if mean is not None else None,
            least_seconds=total.least if total.timed else None,
            most_seconds=total.most if total.timed else None,
            operations=cost.operations if cost else None,
            read_bytes=cost.read_bytes if cost else None,
            written_bytes=cost.written_bytes if cost else None,
            share=share,
            bound=bound,  # type: ignore[arg-type]
        )

    def _device(self, recorder: DeviceRecorder) -> DeviceRecord:
        device, timed = recorder.device, recorder.device.driver.times
        busy = sum(total.seconds for total in recorder.totals("kernel") if total.where == "device")
        hits, misses = recorder.requests()
        return DeviceRecord(
            name=device.name,
            description=device.capabilities.description,
            timed=timed,
            busy_seconds=busy if timed else None,
            peak_bytes=recorder.memory.peak_bytes,
            pool_hits=hits,
            pool_misses=misses,
            dropped_events=recorder.dropped,
            dropped_actions=recorder.memory.dropped,
        )

    def _event(self, recorder: DeviceRecorder, event: Event) -> EventRecord:
        total, cost = event.total, event.total.cost
        return EventRecord(
            device=recorder.device.name,
            track=event.track,
            kind=total.kind,
            name=total.name,
            detail=total.detail,
            start=event.start - self._start,
            end=event.end - self._start,
            nbytes=cost.nbytes if cost else event.nbytes or None,
            operations=cost.operations if cost else None,
        )

    def _samples(self, recorder: DeviceRecorder) -> list[tuple[float, int, int]]:
        return [(at - self._start, live, pooled) for at, live, pooled in recorder.memory.samples]

    def _trace(self, recorder: DeviceRecorder) -> trace.DeviceTrace:
        log = recorder.memory
        events: Sequence[EventRecord] = [self._event(recorder, event) for event in recorder.kept_events()]
        return trace.DeviceTrace(
            name=recorder.device.name,
            description=recorder.device.capabilities.description,
            events=events,
            samples=self._samples(recorder),
            actions=list(log.actions),
            held_before=log.held_before(),
            dropped=recorder.dropped,
        )
