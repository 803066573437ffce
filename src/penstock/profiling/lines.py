"""What each line of the user's code computes, sends and reads while a profile is on.

The number of lines, of remembered values and of compared items is bounded.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.callsite import user_call
from penstock.execution.executable import Executable
from penstock.fusion.views import base
from penstock.graph.node import Kind, Node
from penstock.kernels.costing import costs
from penstock.profiling.records import OTHER
from penstock.stream.recorder import Run

_MAX_LINES = 1000
_LARGE = 1 << 15  # items of a value from which on it matters that it is recomputed or stored
_COMPARED = 4096  # items; smaller arrays are not compared
_SAMPLE = 256  # items of an array that are compared
_ALIKE = 0.95  # rank correlation of two arrays from which on one is taken to be made from the other
_FETCHED = 4  # arrays that were read and are remembered, to see whether they are sent back
_SENT = 64  # samples that are remembered per line
_THREADS = 256
WIDE = ("float64", "complex128")  # dtypes with 64 bits for each component
_JOINS = (Kind.ELEMENTWISE, Kind.REDUCTION)  # kinds that would be fused with their inputs
Sample = npt.NDArray[np.float64]


@dataclass
class Runs:
    """The computations of a line, by the way in which they ran."""

    where: str
    called: str  # the function of this package that the line called
    how: str  # jit, program or numpy
    runs: int = 0
    fresh: int = 0  # runs that were the first of their structure, and so cost more
    built: int = 0  # runs for which a program was built
    build_seconds: float = 0.0
    costly_seconds: float = 0.0  # of the runs that were fresh, or for which a program was built
    seconds: float = 0.0  # of the host, in total
    nodes: int = 0  # recorded, in total
    fewest: int = 0  # recorded for a run
    most: int = 0
    items: int = 0  # computed, in total
    launches: int = 0
    operations: int = 0
    products: dict[str, int] = field(default_factory=dict)  # operations in products, by dtype
    nbytes: int = 0  # moved
    wide_bytes: int = 0  # of 64-bit values that kernels and steps of NumPy read and write
    host_steps: dict[str, int] = field(default_factory=dict)  # how often NumPy computes what between kernels
    raw_bytes: int = 0  # passed between the user's kernels and kernels that could be fused with them
    raw_names: str = ""
    arena_bytes: int = 0  # at most
    kept_bytes: int = 0  # at most: values kept for the gradient
    again: int = 0  # operations that were repeated, since an earlier run did not keep their results
    again_for: str = ""  # the line of that run


@dataclass
class Transfers:
    """The arrays that a line sent to a device."""

    where: str
    called: str
    dtype: str
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0  # of the host
    made_seconds: float = 0.0  # for making the arrays: since the thread's last use of the device
    least_seconds: float = 0.0  # of both, for a call
    beside: int = 0  # calls by threads that only send
    repeated: int = 0  # calls with values that this line had sent before
    returned: int = 0  # calls with values made from values that had just been read
    returned_seconds: float = 0.0  # from reading them to the end of sending
    source: str = ""  # the line that read them


@dataclass
class Handover:
    """Values that were stored because a line requested them, and that kernels of another line read."""

    where: str
    into: str
    count: int = 0
    nbytes: int = 0


@dataclass(frozen=True, eq=False)
class _Fetched:
    """Values that a line has read."""

    where: str
    size: int
    sample: Sample
    array: weakref.ref[Any]
    seconds: float


@dataclass(frozen=True)
class _Facts:
    """What a run of a program does."""

    operations: int
    products: dict[str, int]
    nbytes: int
    wide_bytes: int
    host_steps: dict[str, int]
    raw_bytes: int
    raw_names: str
    arena_bytes: int
    kept_bytes: int


class LineLog:
    """What the lines of the user's code do with a device. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, since a finalizer of the user's may read a tensor
        self._runs: dict[tuple[str, str], Runs] = {}
        self._transfers: dict[tuple[str, str], Transfers] = {}
        self._handovers: dict[tuple[str, str], Handover] = {}
        self._called: dict[str, str] = {}
        self._facts: weakref.WeakKeyDictionary[Executable, _Facts] = weakref.WeakKeyDictionary()
        self._done: weakref.WeakKeyDictionary[Node, str] = weakref.WeakKeyDictionary()  # computed, not kept
        self._asked: weakref.WeakKeyDictionary[Node, str] = weakref.WeakKeyDictionary()  # by realize()
        self._fetched: deque[_Fetched] = deque(maxlen=_FETCHED)
        self._samples: dict[tuple[str, str], deque[int]] = {}
        self._threads: dict[int, tuple[float, bool]] = {}  # last use of the device; whether it computed
        self.first = self.last = 0.0  # in seconds of `perf_counter`
        self.count = 0  # runs so far

    # Notifications

    def waited(self, where: str, end: float) -> None:
        """A line waited for the device."""
        called = user_call()[1]
        with self._lock:
            if len(self._called) < _MAX_LINES:
                self._called.setdefault(where, called)
            self._used(end, computes=False)

    def computed(self, run: Run) -> None:
        """See Recorder."""
        where, called = user_call()
        with self._lock:
            self._begin(run.start)
            self.count += 1
            entry = self._run(where, called, run.how)
            entry.runs += 1
            # NumPy computes what is small in any case, so it costs no more the first time.
            fresh = run.fresh and (run.program is not None or any(n.size >= _LARGE for n in run.nodes))
            entry.fresh += fresh
            entry.built += run.build_seconds > 0
            entry.build_seconds += run.build_seconds
            entry.seconds += run.end - run.start
            if fresh or run.build_seconds:
                entry.costly_seconds += run.end - run.start
            if run.nodes:
                self._recorded(run, entry, where, called)
            if run.program is not None:
                self._count(entry, run.program)
            self._used(run.end, computes=True)

    def sent(self, array: npt.NDArray[Any], start: float, end: float) -> None:
        """See Recorder."""
        where, called = user_call()
        sample = _sampled(array)
        with self._lock:
            self._begin(start)
            entry = self._transfer(where, called, str(array.dtype))
            entry.calls += 1
            entry.nbytes += array.nbytes
            entry.seconds += end - start
            last, computes = self._threads.get(threading.get_ident(), (0.0, False))
            if last:
                entry.made_seconds += start - last
                entry.least_seconds = min(entry.least_seconds or end - last, end - last)
            entry.beside += not computes
            source = self._came_back(array, sample)
            if source is not None:
                entry.returned += 1
                entry.returned_seconds += end - source.seconds
                entry.source = source.where
            elif sample is not None and self._sent_before((entry.where, entry.dtype), array, sample):
                entry.repeated += 1
            self._used(end, computes=False)

    def fetched(self, array: npt.NDArray[Any], end: float) -> None:
        """See Recorder."""
        sample = _sampled(array)
        with self._lock:
            if sample is not None:
                where = user_call()[0]
                self._fetched.append(_Fetched(where, array.size, sample, weakref.ref(array), end))
            self._used(end, computes=False)

    # Results

    def runs(self) -> list[Runs]:
        """Every line that computed something."""
        with self._lock:
            return deepcopy(list(self._runs.values()))

    def transfers(self) -> list[Transfers]:
        """Every line that sent something."""
        with self._lock:
            return deepcopy(list(self._transfers.values()))

    def handovers(self) -> list[Handover]:
        """Every value that was requested in the middle of a chain of operations."""
        with self._lock:
            return deepcopy(list(self._handovers.values()))

    def runs_so_far(self) -> int:
        """How many runs there were."""
        return self.count

    def called(self, where: str) -> str:
        """What a line that waited had called."""
        return self._called.get(where, "")

    # The lock is held from here on.

    def _begin(self, moment: float) -> None:
        self.first = min(self.first or moment, moment)

    def _used(self, moment: float, computes: bool) -> None:
        self._begin(moment)
        self.last = max(self.last, moment)
        thread = threading.get_ident()
        if thread in self._threads or len(self._threads) < _THREADS:
            before = self._threads.get(thread, (0.0, False))[1]
            self._threads[thread] = moment, before or computes

    def _run(self, where: str, called: str, how: str) -> Runs:
        key = (where, how)
        if key not in self._runs and len(self._runs) >= _MAX_LINES:
            where, key = OTHER, (OTHER, how)
        if key not in self._runs:
            self._runs[key] = Runs(where, called, how)
        return self._runs[key]

    def _transfer(self, where: str, called: str, dtype: str) -> Transfers:
        key = (where, dtype)
        if key not in self._transfers and len(self._transfers) >= _MAX_LINES:
            where, key = OTHER, (OTHER, dtype)
        if key not in self._transfers:
            self._transfers[key] = Transfers(where, called, dtype)
        return self._transfers[key]

    def _recorded(self, run: Run, entry: Runs, where: str, called: str) -> None:
        """Count the operations recorded, those computed a second time, and the values stored in between."""
        wanted = set(run.wanted)
        pending = [node for node in run.nodes if node.value is None]
        entry.nodes += len(pending)
        entry.fewest = min(entry.fewest or len(pending), len(pending))
        entry.most = max(entry.most, len(pending))
        for node in pending:
            entry.items += node.size
            if node.size < _LARGE or node.primitive.is_free:
                continue
            if node in self._done and not node.primitive.is_identity:
                entry.again += node.primitive.operations_of(node)
                entry.again_for = self._done[node]
            if node not in wanted:
                self._done[node] = where
            for parent in node.inputs if node.primitive.kind in _JOINS else ():
                source = base(parent)
                if source.value is not None and source in self._asked:
                    self._hand_over(self._asked[source], where, source.nbytes)
        if called.endswith(":realize"):
            for node in run.wanted:
                if node.size >= _LARGE:
                    self._asked[node] = where

    def _hand_over(self, where: str, into: str, nbytes: int) -> None:
        key = (where, into)
        if key not in self._handovers:
            if len(self._handovers) >= _MAX_LINES:
                return
            self._handovers[key] = Handover(where, into)
        self._handovers[key].count += 1
        self._handovers[key].nbytes += nbytes

    def _count(self, entry: Runs, program: Executable) -> None:
        facts = self._facts.get(program)
        if facts is None:
            facts = self._facts[program] = _facts(program)
        entry.launches += program.launches
        entry.operations += facts.operations
        entry.nbytes += facts.nbytes
        entry.wide_bytes += facts.wide_bytes
        for dtype, operations in facts.products.items():
            entry.products[dtype] = entry.products.get(dtype, 0) + operations
        for name, count in facts.host_steps.items():
            entry.host_steps[name] = entry.host_steps.get(name, 0) + count
        entry.raw_bytes += facts.raw_bytes
        entry.raw_names = entry.raw_names or facts.raw_names
        entry.arena_bytes = max(entry.arena_bytes, facts.arena_bytes)
        entry.kept_bytes = max(entry.kept_bytes, facts.kept_bytes)

    def _came_back(self, array: npt.NDArray[Any], sample: Sample | None) -> _Fetched | None:
        """The recently fetched values that an array was made from, if there are any."""
        if sample is None:
            return None
        for fetched in list(self._fetched):
            known = fetched.array()
            shares = known is not None and np.may_share_memory(known, array)
            if fetched.size == array.size and (shares or _alike(fetched.sample, sample)):
                self._fetched.remove(fetched)
                return fetched
        return None

    def _sent_before(self, line: tuple[str, str], array: npt.NDArray[Any], sample: Sample) -> bool:
        if sample.min() == sample.max():
            return False  # all arrays of zeros are equal
        key = hash((array.shape, sample.tobytes()))
        known = self._samples.setdefault(line, deque(maxlen=_SENT))
        if key in known:
            return True
        known.append(key)
        return False


def _facts(program: Executable) -> _Facts:
    operations, moved, products = 0, 0, Counter[str]()
    host: Counter[str] = Counter()
    raw_bytes, names = 0, []
    kinds = {base(node): step.group.kind for step in program.schedule.groups for node in step.group.outputs}
    wanted_by: dict[Node, list[str]] = {}
    for step in program.schedule.groups:
        for node in step.group.inputs:
            wanted_by.setdefault(base(node), []).append(step.group.kind)
    wide_bytes = 0
    for step in program.schedule.groups:
        group = step.group
        wide_bytes += sum(node.nbytes for node in (*group.inputs, *group.outputs) if str(node.dtype) in WIDE)
        if step.lowering is None:
            node = group.nodes[0]
            wide = next(
                (str(operand.dtype) for operand in (node, *node.inputs) if str(operand.dtype) in WIDE), ""
            )
            host[f"{node.primitive.name} {wide or node.dtype}"] += 1
            continue
        for cost in costs(group, step.lowering):
            operations += cost.operations
            moved += cost.nbytes
        for node in group.nodes:
            if node.primitive.kind in (Kind.CONTRACTION, Kind.CONVOLUTION):
                products[str(node.inputs[0].dtype)] += node.primitive.operations_of(node)
        if group.kind == "raw" and {node.shape for node in group.outputs} <= {
            node.shape for node in group.inputs
        }:
            before = [node for node in group.inputs if kinds.get(base(node)) == "map"]
            after = [node for node in group.outputs if wanted_by.get(base(node)) == ["map"]]
            raw_bytes += sum(node.nbytes for node in (*before, *after))
            if before or after:
                names.append(group.nodes[0].primitive.name)
    return _Facts(
        operations=operations,
        products=dict(products),
        nbytes=moved,
        wide_bytes=wide_bytes,
        host_steps=dict(host),
        raw_bytes=raw_bytes,
        raw_names=", ".join(dict.fromkeys(names)),
        arena_bytes=program.plan.arena_bytes,
        kept_bytes=program.schedule.kept_bytes(),
    )


def _sampled(array: npt.NDArray[Any]) -> Sample | None:
    """A few items of an array, in order; None if the array is too small to matter, or complex."""
    if array.size < _COMPARED or array.dtype.kind == "c":
        return None
    indices = np.linspace(0, array.size - 1, _SAMPLE).astype(np.intp)
    return np.asarray(array.flat[indices]).astype(np.float64)


def _alike(sample: Sample, other: Sample) -> bool:
    """Whether samples are equal or in the same order: one may be an elementwise function of the other."""
    if np.array_equal(sample, other, equal_nan=True):
        return True
    ranks = [np.unique(items, return_inverse=True)[1].astype(np.float64) for items in (sample, other)]
    first, second = (rank - rank.mean() for rank in ranks)
    both = float(np.sqrt((first @ first) * (second @ second)))
    return both > 0 and abs(float(first @ second)) > _ALIKE * both
