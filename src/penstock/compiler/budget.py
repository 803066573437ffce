"""The pass under a memory budget: where a plan is too large, some values are not kept on the device.

Groups run again to compute them once more, or copies lie in the memory of the host meanwhile. State, such as
moments, may be there between runs, too, and come to the device for its uses only. The pass works on
groups, when their kernels are known: a group that runs once more runs the same kernels on the same values, so
it gives the same bits, whatever the device. Every schedule that it tries is packed by the planner, and the
packed arenas are the proof.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, tee

from penstock.compiler.compilation import Compilation, Move
from penstock.compiler.layout import lay_out, own_buffers, plan
from penstock.compiler.passes import Works, fetched_in_time, turns_of, works_of
from penstock.compiler.taking import (
    arena_bytes,
    bytes_beside_arenas,
    counted_results,
    described,
    fresh_results,
    host_bytes,
    price,
    results_beside,
    taken_bytes,
    too_large,
    too_large_text,
)
from penstock.compiler.target import Target
from penstock.errors import OutOfDeviceMemory
from penstock.formatting import format_bytes
from penstock.fusion.groups import Group
from penstock.fusion.views import base
from penstock.graph.node import Node
from penstock.kernels.source import ALIGNMENT
from penstock.plan.arenas import least_bytes
from penstock.plan.order import least_deferred
from penstock.plan.prefetching import prefetched
from penstock.plan.recomputing import least_peak, sequels
from penstock.plan.sequences import HOLD, OUT, Link, Run, Sequel, Task

_SURE = 0.99  # of what is estimated to be live: no plan takes less
# Of what a sequence takes more than the least: so far a search goes on before it counts, as a cheaper one may
# follow.
_AHEAD = 1 / 8
# Of what a sequence takes more than any can without moves: if a cheaper one takes less with moves, a search
# without them has gone on for long enough.
_BEHIND = 3 / 4
_TAIL = 8  # sequences in which a search has to come nearer to a budget, by this share of what is missing:
_HARDLY = 1 / 16
_SHOWN = 4  # of the largest values, in a message
_MARGIN = 1.3  # of a copy: kernels, which are priced by usual rates, may be faster, and would wait for it
_LEVELS = 8  # of memory, between what is needed without a budget and the least


def fit(state: Compilation, target: Target) -> Compilation:
    """Where the plan passes the budget: the first schedule inside it that recomputes or moves some values.

    Raises OutOfDeviceMemory with the smallest budget that would do, where there is none.
    """
    budget = target.budget
    if budget is None or budget.held + taken_bytes(state, target) <= budget.limit:
        return state
    ways = Ways(state, target)
    if planned := ways.inside(budget.limit):
        return planned
    raise _refusal(_smallest(state, ways.outlines(), target), target)


@dataclass(frozen=True)
class _Outline:
    """A way to run the groups before it is planned."""

    least: int  # bytes, for sure
    early: bool  # copies have more time than they need, as they have not in another outline
    laid_out: Callable[[], Compilation]


class Ways:
    """Ways to run the groups of a compilation in less memory. They are looked for when they are asked for."""

    def __init__(self, state: Compilation, target: Target) -> None:
        self._compilation, self._target = state, target
        self._works = works = works_of(state)
        fixed = set(own_buffers(state))
        self._kept = works.kept | {number for number, node in enumerate(works.nodes) if node in fixed}
        self._tasks = [
            Task(
                *step,
                over=written.may_alias if written else (),
                scratch=sum(map(_aligned, written.scratch)) if written else 0,
                price=price(group, written, target),
            )
            for step, group, written in zip(works.steps, state.groups, state.lowered, strict=True)
        ]
        self._order = least_deferred(works.steps, works.nbytes, works.kept)
        self._results, self._beside = counted_results(state, target), results_beside(state, target)
        # NumPy on the host waits for the device, and with it for all copies.
        cost = None if None in state.lowered else target.link_cost()
        rates = target.rates
        self._link = None if cost is None else Link(_MARGIN * cost / rates.bandwidth, rates.launch)
        self._nbytes = list(map(_aligned, works.nbytes))
        self._own = _state(state, target, works, fixed) if self._link else {}
        self._state = {value: new for value, (_, new) in self._own.items()}
        replaced = {new for new in self._state.values() if new is not None}
        self._new = _new_state(state, target, works, fixed) - replaced if self._link else frozenset()
        self._front, self._soon = self._by_price(), self._sequels(self._link, at_any_price=True)

    def inside(self, limit: int) -> Compilation | None:
        """The first that takes no more than so many bytes."""
        room = self._room(limit)
        if taken_bytes(self._compilation, self._target) <= room:
            return self._compilation
        planned = (_planned(outline, self._target, room) for outline in self.outlines())
        return next(filter(None, planned), None)

    def _room(self, limit: int) -> int:
        budget = self._target.budget
        return limit - (budget.held if budget else 0)

    def fits(self, limit: int) -> bool:
        """Whether so many bytes will do. Less is planned than to name the plan for them."""
        room = self._room(limit)
        if taken_bytes(self._compilation, self._target) <= room:
            return True
        return any(self._some_fit(outlines, room) for outlines in (self._at_any_price(), self.outlines()))

    def _some_fit(self, outlines: Iterator[_Outline], room: int) -> bool:
        """Whether any fits; a search that hardly gets nearer any more is given up."""
        lowest = list[int]()  # so far, after each
        for outline in outlines:
            if not outline.early and _planned(outline, self._target, room):
                return True
            lowest.append(min([outline.least, *lowest[-1:]]))
            over = lowest[-1] - room
            if len(lowest) > _TAIL and lowest[-1 - _TAIL] - lowest[-1] < over * _HARDLY:
                return False
        return False

    def least(self) -> int:
        """Bytes that will do, and mostly the fewest: sooner known than what each budget costs."""
        *_, last = self._at_any_price()
        smallest = _smallest(self._compilation, [last], self._target)
        return taken_bytes(smallest, self._target)

    def frontier(self) -> list[Compilation]:
        """Planned compilations, each with less memory for more work than the one before.

        The given compilation is the first, and that with the least memory the last.
        """
        state, target, outlines = self._compilation, self._target, list(self.outlines())
        smallest = _smallest(state, outlines, target)
        most, least = taken_bytes(state, target), taken_bytes(smallest, target)
        result, last = [state], most
        for share in range(1, _LEVELS):
            level = most - (most - least) * share // _LEVELS
            outline = next((outline for outline in outlines if outline.least <= level), None)
            if outline is None or level >= last:
                continue
            planned = plan(outline.laid_out(), target)
            if least < (nbytes := taken_bytes(planned, target)) < last:
                result.append(planned)
                last = nbytes
        return [*result, smallest] if least < most else result

    def outlines(self) -> Iterator[_Outline]:
        """All of them, each dearer than those before: a budget gets the first that fits.

        They do not depend on the budget. So a larger one gets nothing that is dearer than what a smaller one
        gets, or that takes less.
        """
        self._front, sequels = tee(self._front)
        front, dearest = list[Sequel](), 0.0
        for sequel in sequels:
            front.append(sequel)
            dearest = sequel.price
            yield self._outline(sequel, sequel.moves)
        # Or else, where none of these can be packed, without time for copies: in the least memory.
        for sequel in front:
            if sequel.moves:
                yield self._outline(replace(sequel, price=dearest), False)
        yield from self._at_any_price(dearest)

    def _by_price(self) -> Iterator[Sequel]:
        """Sequences with less and less memory, for which no cheaper one takes no more."""
        # Without moves nothing takes less than this.
        lowest = least_peak(self._tasks, self._nbytes, self._kept, self._state, self._new)
        search = _dearer_and_dearer(self._sequels(None), lowest)
        if self._link is not None:
            search = _cheaper_of(search, _dearer_and_dearer(self._sequels(self._link), 0), lowest)
        yield from search

    def _at_any_price(self, dearest: float = 0.0) -> Iterator[_Outline]:
        """Those to which a search for the least memory comes, which is soon over; `dearest` of the others."""
        self._soon, sequels = tee(self._soon)
        for sequel in sequels:
            yield self._outline(replace(sequel, price=max(sequel.price, dearest)), False)

    def _sequels(self, link: Link | None, at_any_price: bool = False) -> Iterator[Sequel]:
        return sequels(
            self._tasks, self._order, self._nbytes, self._kept, link, self._state, self._new, at_any_price
        )

    def _least(self, sequel: Sequel) -> int:
        """Bytes that a sequence takes for sure."""
        own, budget = self._own, self._target.budget
        stays = sum(self._nbytes[at] for at in (own.keys() - sequel.hosted) | (self._new - sequel.results))
        freed = budget.freed([own[at][0] for at in sequel.hosted]) if budget else 0
        freed += sum(self._results.get(self._works.nodes[at], 0) for at in sequel.results)
        return self._beside + int(_SURE * (sequel.peak_bytes - stays)) - freed

    def _outline(self, sequel: Sequel, with_time: bool) -> _Outline:
        early, sequence = self._link is not None and with_time, partial(replace, sequel)
        if self._link is not None and with_time:
            sequence = partial(prefetched, sequel, self._tasks, self._nbytes, self._link)
        laid_out = partial(_laid_out, self._compilation, self._target, self._works.nodes, sequence)
        return _Outline(self._least(sequel), early, laid_out)


def _state(
    state: Compilation, target: Target, works: Works, fixed: Collection[Node]
) -> dict[int, tuple[int, int | None]]:
    """Inputs that may lie at the host between runs, and the results that are their next values.

    By their numbers among the values: the number of the input, and that of the result. A result that has
    another use, and what a kernel takes only where the caller has it, stays.
    """
    number = {node: at for at, node in enumerate(works.nodes)}
    wanted = Counter(base(node) for node in state.wanted)
    computed = {node for group in state.groups for node in group.outputs}
    next_value = {given: base(state.wanted[at]) for at, given in state.aliases.items()}
    result: dict[int, tuple[int, int | None]] = {}
    for at in sorted(target.budget.state) if target.budget else ():
        node, new = state.inputs[at], next_value.get(at)
        if node not in number or node in wanted or node in fixed:
            continue
        if new is None:
            result[number[node]] = at, None
        elif wanted[new] == 1 and new in computed and new not in fixed and new.nbytes == node.nbytes:
            result[number[node]] = at, number[new]
    return result


def _new_state(state: Compilation, target: Target, works: Works, fixed: Collection[Node]) -> frozenset[int]:
    """Results that are state without another value before: by their numbers among the values."""
    number = {node: at for at, node in enumerate(works.nodes)}
    wanted = Counter(base(node) for node in state.wanted)
    computed = {node for group in state.groups for node in group.outputs}
    fresh = set(fresh_results(state)) & computed
    results = [base(state.wanted[at]) for at in target.budget.state_results] if target.budget else []
    return frozenset(
        number[node] for node in results if node in fresh and wanted[node] == 1 and node not in fixed
    )


def _dearer_and_dearer(search: Iterator[Sequel], lowest: int) -> Iterator[Sequel]:
    """The sequences of a search but those for which one with less memory, that soon follows, is cheaper.

    `lowest`: bytes below which it never comes.
    """
    waiting, price = deque[Sequel](), -1.0
    for sequel in search:
        while waiting and waiting[-1].price >= sequel.price:
            waiting.pop()
        if sequel.price > price:
            waiting.append(sequel)
        while waiting and sequel.peak_bytes - lowest <= (1 - _AHEAD) * (waiting[0].peak_bytes - lowest):
            price = waiting[0].price
            yield waiting.popleft()
    yield from waiting


def _cheaper_of(plain: Iterator[Sequel], moving: Iterator[Sequel], lowest: int) -> Iterator[Sequel]:
    """The sequences of searches without moves and with them, but those for which a cheaper takes no more.

    Both have less and less memory, and are dearer and dearer. No more is searched than is asked for.
    `lowest`: see `_dearer_and_dearer`, of that without moves.
    """
    computed, moved = next(plain, None), next(moving, None)
    while computed is not None and moved is not None:
        if (moved.peak_bytes, moved.price) > (computed.peak_bytes, computed.price):
            if moved.price < computed.price:
                yield moved
            moved = next(moving, None)
        elif computed.price < moved.price:
            yield computed
            computed = next(plain, None)
        elif moved.peak_bytes - lowest > _BEHIND * (computed.peak_bytes - lowest):
            computed = next(plain, None)
        else:
            computed = None
    if moved is not None:
        yield from chain([moved], moving)
    elif computed is not None:
        yield from chain([computed], plain)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _laid_out(
    state: Compilation, target: Target, nodes: Sequence[Node], sequence_of: Callable[[], Sequel]
) -> Compilation:
    """The groups in another sequence, with the lifetimes of their values."""
    sequel = sequence_of()
    holder = dict(enumerate(nodes))  # the node that holds each number
    sent: dict[int, Node] = {}  # results that go to the host: what they are there
    groups: list[Group] = []
    moves: list[Move] = []
    tasks = [run for run in sequel.runs if run.task >= 0]
    sequence: list[int] = []
    for run in sequel.runs:
        if run.task < 0:
            sequence.append(len(tasks) + len(moves))
            moves.append(_move(run, holder, moves))
            if run.task == OUT:
                sent[sequel.value_of[run.reads[0]]] = moves[-1].hosted
            continue
        sequence.append(len(groups))
        group = state.groups[run.task]
        new = {base(node): holder[read] for node, read in zip(group.inputs, run.reads, strict=True)}
        first = run.writes[0] < len(nodes)
        if not first or any(new[node] is not node for node in new):
            group = _moved(group, new)
        holder.update(zip(run.writes, group.outputs, strict=True))
        groups.append(group)
    results = {node: sent.get(at, holder[at]) for at, node in enumerate(nodes)}
    moved = replace(
        state,
        wanted=[results.get(base(node), node) for node in state.wanted],
        groups=groups,
        lowered=[state.lowered[run.task] for run in tasks],
        again=frozenset(at for at, run in enumerate(tasks) if run.writes[0] >= len(nodes)),
        moves=moves,
        extra=sequel.price,
    )
    works = works_of(moved)
    turns = turns_of(moved, target, works, fetched_in_time(moved, works, sequence), spare=False)
    return lay_out(replace(moved, turns=turns), target)


def _move(run: Run, holder: dict[int, Node], before: Sequence[Move]) -> Move:
    """A copy of a sequence, which has nodes of its own for what it writes."""
    read = holder[run.reads[0]]
    if run.task == HOLD:
        return Move("hold", read, next(move.hosted for move in before if move.value is read))
    (number,) = run.writes
    holder[number] = written = read.alike(read.inputs)
    return Move("out", read, written) if run.task == OUT else Move("in", written, read)


def _moved(group: Group, bases: Mapping[Node, Node]) -> Group:
    """The same group on other values, with nodes of its own."""
    new: dict[Node, Node] = {}

    def given(node: Node) -> Node:
        if node is base(node):
            return bases[node]
        return node.alike((given(node.inputs[0]), *node.inputs[1:]))

    for node in group.inputs:
        new[node] = given(node)
    for node in group.nodes:
        new[node] = node.alike(tuple([new[parent] for parent in node.inputs]))
    return group.on(new)


def _smallest(state: Compilation, outlines: Iterable[_Outline], target: Target) -> Compilation:
    """Of all ways to run the groups, that which takes the least memory."""
    best, least = state, taken_bytes(state, target)
    for outline in reversed(list(outlines)):
        if not outline.early and (planned := _planned(outline, target, least - 1)):
            best, least = planned, taken_bytes(planned, target)
    return best


def _planned(outline: _Outline, target: Target, most: int) -> Compilation | None:
    """The plan of an outline; None if it takes more than so many bytes, as its lower bounds mostly tell."""
    if outline.least > most:
        return None
    laid_out = outline.laid_out()
    assert laid_out.layout is not None
    room = most - bytes_beside_arenas(laid_out, target)
    if least_bytes(laid_out.layout.lifetimes, ALIGNMENT, target.capabilities.max_arena_bytes) > room:
        return None
    planned = plan(laid_out, target)
    return planned if arena_bytes(planned) <= room else None


def _refusal(smallest: Compilation, target: Target) -> OutOfDeviceMemory:
    budget = target.budget
    assert budget is not None
    taken, results = taken_bytes(smallest, target), results_beside(smallest, target)
    needed = budget.held + taken
    freed = budget.freed(smallest.hosted_state)
    parts = [
        f"{format_bytes(nbytes)} {what}"
        for nbytes, what in (
            (budget.held - freed, "for what is live already"),
            (results, "for results"),
            (taken + freed - results, "for temporaries"),
        )
        if nbytes
    ]
    largest = ", ".join(
        f"{described(node)} ({format_bytes(node.nbytes)})" for node in _at_the_peak(smallest)[:_SHOWN]
    )
    return OutOfDeviceMemory(
        f"this does not fit into {budget.limit} bytes ({format_bytes(budget.limit)}) on {target.name}, even "
        f"if all is recomputed{_or_moved(smallest)} that can be. The smallest budget that would do is "
        f"{needed} bytes ({format_bytes(needed)}): {', '.join(parts)}. "
        + (f"The largest at the peak: {largest}. " if largest else "")
        + (f"{too_large_text(large)}. " if (large := too_large(smallest)) else "")
        + "A smaller batch or context, float16 or bfloat16, or a smaller model needs less",
        asked=taken,
        live=budget.held,
        free=max(budget.limit - budget.held, 0),
        smallest=needed,
    )


def _or_moved(smallest: Compilation) -> str:
    if not smallest.moves:
        return ""
    return f" or moved to the host ({format_bytes(host_bytes(smallest))} of its memory)"


def _at_the_peak(state: Compilation) -> list[Node]:
    """The temporaries that are live where the most bytes are, the largest first."""
    layout = state.layout
    assert layout is not None
    load = [0] * (1 + max((value.dies for value in layout.lifetimes), default=0))
    for value in layout.lifetimes:
        for turn in range(value.born, value.dies + 1):
            load[turn] += value.nbytes
    peak = load.index(max(load))
    live = [
        node
        for node, number in layout.temporaries.items()
        if layout.lifetimes[number].born <= peak <= layout.lifetimes[number].dies
    ]
    return sorted(live, key=lambda node: -node.nbytes)
