"""What each line of the user's code makes a device compute, send and fetch while a profile is on.

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
_LARGE = 1 << 15  # items; what is computed twice, or stored in between, matters from here on
_COMPARED = 4096  # items; smaller arrays are not looked at
_SAMPLE = 256  # numbers of an array that are looked at
_ALIKE = 0.95  # correlation of ranks from which on one array was made of another
_FETCHED = 4  # arrays that are remembered, to see whether they come back
_SENT = 64  # samples that are remembered, of one line
_THREADS = 256
WIDE = ("float64", "complex128")  # dtypes that take 64 bits for each number
_JOINS = (Kind.ELEMENTWISE, Kind.REDUCTION)  # what would be one kernel with what it reads
Sample = npt.NDArray[np.float64]


@dataclass
class Runs:
    """What one line had computed, in one way."""

    where: str
    called: str  # by the line: a function of this package
    how: str  # jit, program or numpy
    runs: int = 0
    fresh: int = 0  # that were the first of their structure, and would have cost less if they were not
    built: int = 0  # for which something was built
    build_seconds: float = 0.0
    costly_seconds: float = 0.0  # of the runs that were fresh, or for which something was built
    seconds: float = 0.0  # of the host, in all
    nodes: int = 0  # recorded, in all
    fewest: int = 0  # recorded for one run
    most: int = 0
    items: int = 0  # computed, in all
    launches: int = 0
    operations: int = 0
    products: dict[str, int] = field(default_factory=dict)  # operations in products, by dtype
    nbytes: int = 0  # moved
    wide_bytes: int = 0  # of numbers of 64 bits, before and after kernels and steps of NumPy
    host_steps: dict[str, int] = field(default_factory=dict)  # what NumPy does between kernels, how often
    raw_bytes: int = 0  # handed over between kernels of the user's own and those that could hold them
    raw_names: str = ""
    arena_bytes: int = 0  # at most
    kept_bytes: int = 0  # at most: what waits for the gradient
    again: int = 0  # operations that another run had done for itself
    again_for: str = ""  # the line of that run


@dataclass
class Transfers:
    """What one line sent: arrays that became tensors."""

    where: str
    called: str
    dtype: str
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0  # of the host
    made_seconds: float = 0.0  # before: since the thread's last use of the device
    least_seconds: float = 0.0  # of both, for one call
    beside: int = 0  # calls by threads that only send
    repeated: int = 0  # calls with what this line had sent before
    returned: int = 0  # calls with what was made of values that had just been fetched
    returned_seconds: float = 0.0  # from the fetching to the end of the sending
    source: str = ""  # the line that fetched those


@dataclass
class Handover:
    """Values that were stored because one line asked for them, and that kernels of another line read."""

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
    """What one run of a program does."""

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
    """What the lines of the user's code ask of one device. It is told from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser of the user's own may read a tensor
        self._runs: dict[tuple[str, str], Runs] = {}
        self._transfers: dict[tuple[str, str], Transfers] = {}
        self._handovers: dict[tuple[str, str], Handover] = {}
        self._called: dict[str, str] = {}
        self._facts: weakref.WeakKeyDictionary[Executable, _Facts] = weakref.WeakKeyDictionary()
        self._done: weakref.WeakKeyDictionary[Node, str] = weakref.WeakKeyDictionary()  # computed, not kept
        self._asked: weakref.WeakKeyDictionary[Node, str] = weakref.WeakKeyDictionary()  # by realize()
        self._fetched: deque[_Fetched] = deque(maxlen=_FETCHED)
        self._samples: dict[tuple[str, str], deque[int]] = {}
        self._threads: dict[int, tuple[float, bool]] = {}  # last use of the device; whether it had it compute
        self.first = self.last = 0.0  # moments of `perf_counter`
        self.count = 0  # runs so far

    # What is told

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
            found = self._run(where, called, run.how)
            found.runs += 1
            # What is small is NumPy's whether it is known or not, so nothing is lost by its being new.
            fresh = run.fresh and (run.program is not None or any(n.size >= _LARGE for n in run.nodes))
            found.fresh += fresh
            found.built += run.build_seconds > 0
            found.build_seconds += run.build_seconds
            found.seconds += run.end - run.start
            if fresh or run.build_seconds:
                found.costly_seconds += run.end - run.start
            if run.nodes:
                self._recorded(run, found, where, called)
            if run.program is not None:
                self._count(found, run.program)
            self._used(run.end, computes=True)

    def sent(self, array: npt.NDArray[Any], start: float, end: float) -> None:
        """See Recorder."""
        where, called = user_call()
        sample = _sampled(array)
        with self._lock:
            self._begin(start)
            found = self._transfer(where, called, str(array.dtype))
            found.calls += 1
            found.nbytes += array.nbytes
            found.seconds += end - start
            last, computes = self._threads.get(threading.get_ident(), (0.0, False))
            if last:
                found.made_seconds += start - last
                found.least_seconds = min(found.least_seconds or end - last, end - last)
            found.beside += not computes
            source = self._came_back(array, sample)
            if source is not None:
                found.returned += 1
                found.returned_seconds += end - source.seconds
                found.source = source.where
            elif sample is not None and self._sent_before((found.where, found.dtype), array, sample):
                found.repeated += 1
            self._used(end, computes=False)

    def fetched(self, array: npt.NDArray[Any], end: float) -> None:
        """See Recorder."""
        sample = _sampled(array)
        with self._lock:
            if sample is not None:
                where = user_call()[0]
                self._fetched.append(_Fetched(where, array.size, sample, weakref.ref(array), end))
            self._used(end, computes=False)

    # What was found

    def runs(self) -> list[Runs]:
        """Every line that had something computed."""
        with self._lock:
            return deepcopy(list(self._runs.values()))

    def transfers(self) -> list[Transfers]:
        """Every line that sent something."""
        with self._lock:
            return deepcopy(list(self._transfers.values()))

    def handovers(self) -> list[Handover]:
        """Every value that was asked for in the middle of a chain."""
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

    def _recorded(self, run: Run, found: Runs, where: str, called: str) -> None:
        """Count the operations recorded, those computed a second time, and the values stored in between."""
        wanted = set(run.wanted)
        pending = [node for node in run.nodes if node.value is None]
        found.nodes += len(pending)
        found.fewest = min(found.fewest or len(pending), len(pending))
        found.most = max(found.most, len(pending))
        for node in pending:
            found.items += node.size
            if node.size < _LARGE or node.primitive.is_free:
                continue
            if node in self._done and not node.primitive.is_identity:
                found.again += node.primitive.operations_of(node)
                found.again_for = self._done[node]
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

    def _count(self, found: Runs, program: Executable) -> None:
        facts = self._facts.get(program)
        if facts is None:
            facts = self._facts[program] = _facts(program)
        found.launches += program.launches
        found.operations += facts.operations
        found.nbytes += facts.nbytes
        found.wide_bytes += facts.wide_bytes
        for dtype, operations in facts.products.items():
            found.products[dtype] = found.products.get(dtype, 0) + operations
        for name, count in facts.host_steps.items():
            found.host_steps[name] = found.host_steps.get(name, 0) + count
        found.raw_bytes += facts.raw_bytes
        found.raw_names = found.raw_names or facts.raw_names
        found.arena_bytes = max(found.arena_bytes, facts.arena_bytes)
        found.kept_bytes = max(found.kept_bytes, facts.kept_bytes)

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
            return False  # zeros look all alike
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
            if node.primitive.kind is Kind.CONTRACTION:
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
    """A few items of an array, in order; None where the array is too small to matter, or not ordered."""
    if array.size < _COMPARED or array.dtype.kind == "c":
        return None
    places = np.linspace(0, array.size - 1, _SAMPLE).astype(np.intp)
    return np.asarray(array.flat[places]).astype(np.float64)


def _alike(sample: Sample, other: Sample) -> bool:
    """Whether samples are equal or equally ordered: one may be an elementwise function of the other."""
    if np.array_equal(sample, other, equal_nan=True):
        return True
    ranks = [np.unique(items, return_inverse=True)[1].astype(np.float64) for items in (sample, other)]
    first, second = (rank - rank.mean() for rank in ranks)
    both = float(np.sqrt((first @ first) * (second @ second)))
    return both > 0 and abs(float(first @ second)) > _ALIKE * both
