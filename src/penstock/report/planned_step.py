"""A training step as it was planned: which bytes are live when, what is dropped and computed again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from penstock.compiler.schedule import Schedule
from penstock.formatting import format_seconds
from penstock.fusion.views import base
from penstock.graph.node import Node
from penstock.report import words
from penstock.report.cards import aside, card, text
from penstock.report.charts import Line, bytes_unit, line_chart

_LIVE, _DROPPED, _AGAIN = 0, 1, 2  # colors
_MOST_POINTS = 400  # of the timeline

Moment = tuple[int, int, int, int]  # turn; bytes live, dropped meanwhile, and live once more


@dataclass(frozen=True)
class PlannedStep:
    """The timeline of the temporaries of a step, and what was predicted of it."""

    moments: list[Moment]
    recomputed: int  # kernels that run once more
    peak_bytes: int  # of all that is taken from the device
    seconds: float | None  # None where the rates of the device are not known

    @classmethod
    def of(cls, schedule: Schedule, held_bytes: int, seconds: float | None) -> PlannedStep:
        """Of a schedule, on a device that holds so many bytes beside its arenas."""
        turns = schedule.turns
        live = _sums(_lives(schedule), turns)
        gone, again = _recomputed(schedule)
        moments = [*zip(range(turns), live, _sums(gone, turns), _sums(again, turns), strict=True)]
        size = -(-turns // _MOST_POINTS) or 1
        shown = [max(moments[at : at + size], key=lambda moment: moment[1]) for at in range(0, turns, size)]
        peak = held_bytes + schedule.taken_bytes
        return cls(shown, len(schedule.recomputed), peak, seconds)


Span = tuple[int, int, int]  # the first turn, the last one, and bytes


def _lives(schedule: Schedule) -> list[Span]:
    """When values take memory. One that overwrites another takes none of its own while that is live."""
    lifetimes, plan = schedule.lifetimes, schedule.plan
    spans = []
    for value, offset, arena in zip(lifetimes, plan.offsets, plan.arena_of, strict=True):
        spans.append((value.born, value.dies, value.nbytes))
        for at in value.may_alias:
            if (plan.offsets[at], plan.arena_of[at]) == (offset, arena):
                spans.append((value.born, value.born, -min(value.nbytes, lifetimes[at].nbytes)))
                break
    return spans


def _sums(spans: Sequence[Span], turns: int) -> list[int]:
    """The bytes of all spans at each turn."""
    change = [0] * (turns + 1)
    for first, last, nbytes in spans:
        change[first] += nbytes
        change[last + 1] -= nbytes
    return list(accumulate(change[:-1]))


def _recomputed(schedule: Schedule) -> tuple[list[Span], list[Span]]:
    """When values were dropped that are computed again, and when they are there once more.

    Two steps of one structure that read the same values compute the same.
    """
    last: dict[Node, int] = {}
    for step in schedule.groups:
        for node in (*step.group.outputs, *map(base, step.group.inputs)):
            last[node] = step.turn
    value_of: dict[Node, Hashable] = {}
    numbers: dict[Hashable, int] = {}
    latest: dict[Hashable, Node] = {}  # by value: what held it last
    gone: list[Span] = []
    again: list[Span] = []
    for step in schedule.groups:
        reads = tuple(value_of.get(base(node), base(node)) for node in step.group.inputs)
        key = (step.structure, step.constants, reads)
        number = numbers.setdefault(key, len(numbers))
        for position, node in enumerate(step.group.outputs):
            value = value_of[node] = (number, position)
            if step.again and value in latest:
                before = last[latest[value]]
                if before + 1 < step.turn:
                    gone.append((before + 1, step.turn - 1, node.nbytes))
                again.append((step.turn, last[node], node.nbytes))
            latest[value] = node
    return gone, again


def planned_step(planned: PlannedStep, measured_bytes: float | None, measured_seconds: float | None) -> str:
    """The timeline, and what was predicted beside what was measured."""
    live, gone, again = (
        [(float(moment[0]), float(moment[part])) for moment in planned.moments] for part in (1, 2, 3)
    )
    lines = [Line("live", live, _LIVE)]
    if planned.recomputed:
        lines += [
            Line("dropped, to be computed again", gone, _DROPPED),
            Line("of the live, computed again", again, _AGAIN),
        ]
    chart = line_chart(
        "Temporaries of a step, as planned",
        lines,
        words.nbytes,
        across="turn",
        from_zero=True,
        unit=bytes_unit([line.points for line in lines]),
    )
    said = "No value is computed twice."
    if planned.recomputed:
        said = f"To save memory, {planned.recomputed:,} kernels run once more in each step."
    rows = [
        ("peak memory", words.nbytes(planned.peak_bytes), _or_unknown(measured_bytes, words.nbytes)),
        (
            "time of a step",
            _or_unknown(planned.seconds, format_seconds),
            _or_unknown(measured_seconds, format_seconds),
        ),
    ]
    body = "".join(
        f"<tr><th>{name}</th><td>{escape(first)}</td><td>{escape(second)}</td></tr>"
        for name, first, second in rows
    )
    head = "<tr><th></th><th>predicted</th><th>measured</th></tr>"
    table = f'<table id="predicted"><thead>{head}</thead><tbody>{body}</tbody></table>'
    why = ""
    if planned.seconds is None:
        why = aside("<code>penstock plan</code> measures the rates from which times are predicted, once.")
    return chart + card("Predicted and measured", text(said), table, why)


def _or_unknown(value: float | None, words_of: Callable[[float], str]) -> str:
    return "unknown" if value is None else words_of(value)
