"""Reductions in parts as a single launch: the last workgroup to finish reduces the partial results.

A long reduction is two kernels (see `fusion/splitting.py`): partial results, and what reduces these. Where
workgroups can see what others wrote, both become functions of one kernel. Each workgroup computes its partial
results and counts itself; the last of all, or of those with the same columns, calls the second function. That
reads them in its fixed order, so the bits are those of two launches.

The counters belong to the kernel: they are 0 when its code is loaded, and the last workgroup sets them back.
So launches of one kernel must not overlap. In a queue they do not, and in a graph all of them are declared to
write `_COUNTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from penstock.drivers.driver import Capabilities
from penstock.kernels import ir
from penstock.kernels.concatenation import Call
from penstock.kernels.costing import merged
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.hazards import Range, Touched, orderings
from penstock.kernels.horizontal_fusion import local_arrays, local_memory
from penstock.kernels.source import KernelSource, digest, kernel_of

T = TypeVar("T")
Aliases = Mapping[int, Collection[int]]  # for a buffer, others that it may be written over

_MOST_COUNTERS = 1024  # of a kernel
_MOST_TURNS = 2  # if all of the second are called by one workgroup: each takes about as long as a launch
_COUNTERS = -4  # stands for their memory, where the byte is a number of the kernel
_ARRIVED = "arrived"  # the local integer that tells all threads of a workgroup whether it is the last


def with_last_workgroups(
    items: Sequence[Call | T], aliases: Callable[[], Aliases], capabilities: Capabilities
) -> list[Call | T]:
    """Launches in order, with those merged that reduce what the one before them has written."""
    if not capabilities.compiles or not dialect_of(capabilities).device_atomics:
        return list(items)
    dialect = dialect_of(capabilities)
    result: list[Call | T] = []
    for item in items:
        last = result[-1] if result else None
        if (
            isinstance(item, Call)
            and isinstance(last, Call)
            and (counting := _counting(item, last, aliases, dialect)) is not None
        ):
            result[-1] = _merged(last, item, counting, dialect)
        else:
            result.append(item)
    return result


class _Counting(NamedTuple):
    """How the workgroups of a kernel are counted, and which of a second kernel the last of them calls."""

    groups: int  # that are counted together
    period: int  # after so many come others that are counted together with the first
    together: int  # neighbours that are counted together
    turns: int  # workgroups of the second kernel that the last calls, one after the other


def _counting(
    second: Call, first: Call, aliases: Callable[[], Aliases], dialect: Dialect
) -> _Counting | None:
    """How the last workgroups of a reduction can call another kernel, which reduces its results; or None."""
    calls = first, second
    if not all(call.reduces and _is_plain(call.source) for call in calls):
        return None
    threads, fewer = first.source.group[0], second.source.group[0]
    if first.source.grid[0] == 1 or fewer > threads or (fewer < threads and not dialect.threads_may_end):
        return None
    written = Touched(writes=first.touched.writes + first.scratch)
    if not orderings([written, Touched(reads=second.touched.reads + second.scratch)], {})[1]:
        return None
    groups = second.source.grid[0]
    counting = _of_own_results(first, second) if groups > 1 else None
    # Others may still read and write when the last workgroup of some results continues.
    writes = Touched(writes=second.touched.writes)
    if counting is not None and not orderings([first.touched, writes], aliases())[1]:
        return counting
    return _Counting(first.source.grid[0], 1, 1, groups) if groups <= _MOST_TURNS else None


def _of_own_results(first: Call, second: Call) -> _Counting | None:
    """The same if each workgroup of the second kernel reads the results of some of the first only."""
    reads, block, own = second.reads_own, first.source.block, second.source.block
    if reads is None or not block or not own or (own % block and block % own):
        return None
    results = max(own, block)  # of the second that depend on the same workgroups of the first
    near = results if reads.parts_first else results * reads.parts  # of the first, in memory
    counters, count = reads.results // results, first.source.grid[0]
    even = count * block == reads.results * reads.parts and second.source.grid[0] * own == reads.results
    if not even or reads.results % results or near % block or counters > _MOST_COUNTERS:
        return None
    period = reads.results // block if reads.parts_first else count
    return _Counting(count // counters, period, near // block, results // own)


def _is_plain(source: KernelSource) -> bool:
    """Whether a kernel can be a function of the index of its workgroup."""
    if isinstance(source.body, str) or source.alone or source.cluster > 1:
        return False
    kernel = kernel_of(source)
    return not (kernel.functions or kernel.tables or kernel.counters) and len(source.grid) == 1


def _merged(first: Call, second: Call, counting: _Counting, dialect: Dialect) -> Call:
    """A launch in which the last workgroups of a kernel call another."""
    calls, sources = (first, second), (first.source, second.source)
    threads = second.source.group[0]
    functions = {source.name: kernel_of(source) for source in sources}  # sizes may be all that differs
    kernel = ir.KernelIR(
        outputs=[dtype for source in sources for dtype in source.buffers],
        scalars=[dtype for source in sources for dtype in kernel_of(source).scalars],
        functions=[ir.Function(name, kernel, "DEVICE") for name, kernel in functions.items()],
        arrays=[*local_memory(sources), ir.LocalArray(_ARRIVED, "int32", 1)],
        grid=first.source.grid,
        group=first.source.group,
        resident=first.source.resident,
        vectors=False,
        counters=_MOST_COUNTERS,
    )
    *counted, turns = counting
    kernel.sizes = sum(kernel_of(source).sizes for source in sources) + len(counted)
    *_, count, period, together = (ir.Var(f"size{at}") for at in range(kernel.sizes))
    own = ir.Var("own")
    last = ir.Var("comes_last").ne(0)
    whole: list[ir.Statement] = [_call(calls, 1, own)]
    if turns > 1:  # in the same local memory; as a constant, since a loop takes registers
        in_turn: list[ir.Statement] = [_call(calls, 1, own * turns + ir.Var("turn")), ir.Barrier()]
        whole = [ir.loop("turn", 0, turns, in_turn, unrolled=1)]
    kernel.body = [
        _call(calls, 0, ir.WORKGROUP),
        ir.Let("own", ir.WORKGROUP % period // together),
        ir.ComesLast("comes_last", ir.COUNTERS, own, count, _ARRIVED),
        # Threads that are too many end, and no barrier waits for them.
        ir.If(last & (threads > ir.THREAD) if threads < kernel.group[0] else last, whole),
    ]
    identity = digest(repr([turns, *((source.name, source.group) for source in sources)]))
    number = int(identity, 16)
    counters: Range = (_COUNTERS, number, number + 1)
    return Call(
        dialect.render(kernel, f"in_parts_{identity}"),
        first.locations + second.locations,
        (*first.scalars, *second.scalars, *counted),
        first.constants + second.constants,
        first.work + second.work,
        Touched(
            tuple(dict.fromkeys(first.touched.reads + second.touched.reads)),
            first.touched.writes + second.touched.writes,
            first.touched.ahead,
        ),
        (*first.scratch, *second.scratch, counters),
        merged([source.name for source in sources], [call.cost for call in calls]),
    )


def _call(calls: Sequence[Call], at: int, workgroup: ir.Expr) -> ir.CallFunction:
    """The call of one of the functions; the kernel has moved its buffers to their offsets."""
    source = calls[at].source
    before = calls[:at]
    buffers = sum(len(call.locations) for call in before)
    sizes = sum(len(call.scalars) for call in before)
    constants = sum(len(call.constants) for call in before)
    return ir.CallFunction(
        source.name,
        workgroup,
        tuple(local_arrays(source)),
        tuple((dtype, f"out{buffers + number}") for number, dtype in enumerate(source.buffers)),
        (
            *[ir.Const(0)] * len(source.buffers),
            *(ir.Var(f"size{sizes + number}") for number in range(len(calls[at].scalars))),
            *(ir.Var(f"c{constants + number}") for number in range(len(calls[at].constants))),
        ),
    )
