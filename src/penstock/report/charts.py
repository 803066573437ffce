"""Line charts over steps or seconds as SVG. The script shows the values at the pointer below the chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from penstock.formatting import format_number
from penstock.report import words
from penstock.report.cards import aside, card

Point = tuple[float, float]

WIDTH, HEIGHT = 400, 210  # of a chart, in its own units; the style scales it to the room that it has
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24  # margins
_LARGEST = 1e100  # a larger value is a mistake, for which there would be no ticks


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    name: str
    points: Sequence[Point]
    color: int = 0  # the index of a color in the style
    dashed: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates: `low` to `start`, `high` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)


def drawable(points: Sequence[Point]) -> list[Point]:
    """The points with finite values, which can be drawn."""
    return [(x, y) for x, y in points if abs(x) < _LARGEST and abs(y) < _LARGEST]


def line_chart(
    title: str,
    lines: Sequence[Line],
    text: Callable[[float], str] = format_number,
    *,
    across: str = "step",
    across_text: Callable[[float], str] = format_number,
    from_zero: bool = False,
    unit: tuple[str, float] | None = None,
) -> str:
    """A card with a chart. `text` formats values; `unit` is the name and the size of the axis's unit."""
    drawn = [Line(line.name, drawable(line.points), line.color, line.dashed) for line in lines]
    drawn = [line for line in drawn if line.points]
    named = f"{title}, {unit[0]}" if unit else title
    if not drawn:
        return card(title, aside("Nothing was measured yet."))
    size = unit[1] if unit else 1.0
    values = [y / size for line in drawn for _, y in line.points]
    rows = ticks([0.0, *values] if from_zero else values)
    xs = [x for line in drawn for x, _ in line.points]
    x_scale = Scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    y_scale = Scale(rows[0], rows[-1], HEIGHT - _BOTTOM, _TOP)
    if min(xs) == max(xs):  # a single point is in the middle
        x_scale = Scale(min(xs) - 1, min(xs) + 1, _LEFT, WIDTH - _RIGHT)
    parts = [*_rows(rows, y_scale), *_columns(min(xs), max(xs), x_scale, across_text)]
    parts += [_path(line, x_scale, y_scale, size, text, across_text) for line in drawn]
    parts += [f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" x1="-9" x2="-9"/>']
    parts += [f'<circle class="mark c{line.color}" r="3.5" cx="-9" cy="-9"/>' for line in drawn]
    label = f"{named}, by {across}. {_summary(drawn, text, across, across_text)}"
    return card(
        named,
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>',
        _legend(drawn, text, across, across_text),
    )


def bytes_unit(points: Sequence[Sequence[Point]]) -> tuple[str, float]:
    """The unit for an axis of bytes, by the largest of all values."""
    largest = max((y for line in points for _, y in drawable(line)), default=0.0)
    for name, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if largest >= 1 << bits:
            return name, float(1 << bits)
    return "bytes", 1.0


def ticks(values: Sequence[float], about: int = 4) -> list[float]:
    """About so many round values that include all values, at least two."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / about))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if size * factor * (about + 1) >= span)
    start, end = math.floor(low / step), math.ceil(high / step)
    return [at * step for at in range(start, max(end, start + 1) + 1)]


def _rows(rows: Sequence[float], scale: Scale) -> list[str]:
    """A line and a number for each round value."""
    parts = []
    for row in rows:
        y = scale(row)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y:.1f}" dy=".35em">{words.axis(row)}</text>')
    return parts


def _columns(low: float, high: float, scale: Scale, text: Callable[[float], str]) -> list[str]:
    """Round values below the chart."""
    inside = [tick for tick in ticks([low, high], 3) if low <= tick <= high] if high > low else []
    shown = inside if len(inside) > 1 else sorted({low, high})
    parts = []
    for tick in shown:
        x = scale(tick)
        side = "end" if x > WIDTH - _RIGHT - 16 else "start" if x < _LEFT + 16 else "middle"
        parts.append(f'<text class="{side}" x="{x:.1f}" y="{HEIGHT - 7}">{escape(text(tick))}</text>')
    return parts


def _path(
    line: Line,
    x_scale: Scale,
    y_scale: Scale,
    size: float,
    text: Callable[[float], str],
    across_text: Callable[[float], str],
) -> str:
    """The path of a line, with the texts of its points."""
    path = " ".join(f"{x_scale(x):.1f},{y_scale(y / size):.1f}" for x, y in line.points)
    kind = "line" + (" dashed" if line.dashed else "") + (" single" if len(line.points) == 1 else "")
    ends = " h0.01" if len(line.points) == 1 else ""
    at = escape("|".join(across_text(x) for x, _ in line.points))
    labels = escape("|".join(text(y) for _, y in line.points))
    return f'<path class="{kind} c{line.color}" d="M{path}{ends}" data-at="{at}" data-text="{labels}"/>'


def _legend(
    lines: Sequence[Line], text: Callable[[float], str], across: str, across_text: Callable[[float], str]
) -> str:
    """The names with the last values, which the script replaces by those at the pointer."""
    last = max(line.points[-1][0] for line in lines)
    keys = [
        f'<span class="key"><i class="swatch c{line.color}{" dashed" if line.dashed else ""}"></i>'
        f"{escape(line.name)}{' ' if line.name else ''}<b>{escape(text(line.points[-1][1]))}</b></span>"
        for line in lines
    ]
    where = f'<span class="at">{escape(across)} <b>{escape(across_text(last))}</b></span>'
    return f'<div class="legend" aria-live="polite">{where}{"".join(keys)}</div>'


def _summary(
    lines: Sequence[Line], text: Callable[[float], str], across: str, across_text: Callable[[float], str]
) -> str:
    """A chart in words."""
    parts = []
    for line in lines:
        (first, start), (last, end) = line.points[0], line.points[-1]
        name = f"{line.name}: " if line.name else ""
        begin = f"{text(start)} at {across} {across_text(first)}"
        parts.append(f"{name}{begin}, {text(end)} at {across} {across_text(last)}")
    return "; ".join(parts)
