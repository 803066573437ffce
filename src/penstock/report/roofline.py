"""The roofline: every kernel by operations per byte and per second, below the device's ceilings.

Left of the ridge, memory bandwidth limits a kernel; right of it, the rate of operations does.
Both axes are logarithmic. The larger a dot, the larger is the kernel's part of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from penstock.formatting import counted, format_number, format_seconds, format_share
from penstock.profiling.records import KernelRecord
from penstock.profiling.words import short_kernel, short_shapes
from penstock.report import words
from penstock.report.charts import Scale

BYTES = "bytes"  # the name of the bandwidth among the ceilings
_WIDTH, _HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 24, 36
_LEAST_DOT, _LARGEST_DOT = 2.8, 12.0  # radii
_SMALLEST, _LARGEST = 1e-7, 1e9  # a rate beyond these is a mistake, and not shown
_APART = 12.0  # between two labels, at least
_LABEL, _SHORT_LABEL = 120.0, 50.0  # room for the name of a level, and of the slope
Point = tuple[float, float]  # in the chart's units


@dataclass(frozen=True)
class Dot:
    """A kernel in the chart, with its number in the table."""

    number: int
    kernel: KernelRecord
    intensity: float  # operations per byte
    gflops: float
    part: float  # of the time of all kernels


def dots(kernels: Sequence[KernelRecord]) -> list[Dot]:
    """The kernels that can be shown: those that compute, move bytes, and were timed."""
    whole = sum(kernel.seconds or 0.0 for kernel in kernels)
    result = []
    for number, kernel in enumerate(kernels):
        moved = (kernel.read_bytes or 0) + (kernel.written_bytes or 0)
        if not (kernel.operations and moved > 0 and kernel.gflops and kernel.seconds):
            continue
        intensity = kernel.operations / moved
        if all(_SMALLEST < value < _LARGEST for value in (intensity, kernel.gflops)):
            result.append(Dot(number, kernel, intensity, kernel.gflops, kernel.seconds / whole))
    return result


def roofline(title: str, shown: Sequence[Dot], ceilings: Mapping[str, float]) -> str:
    """A chart of dots below the device's roof; nothing if there are no dots."""
    if not shown:
        return ""
    rates = {name: rate / 1e9 for name, rate in ceilings.items() if _SMALLEST < rate / 1e9 < _LARGEST}
    bandwidth = rates.pop(BYTES, 0.0)
    roofs = rates
    xs = [dot.intensity for dot in shown]
    ys = [dot.gflops for dot in shown] + list(roofs.values())
    if bandwidth:
        xs += [roof / bandwidth for roof in roofs.values()]
    x_scale = _decades(xs, _LEFT, _WIDTH - _RIGHT)
    y_scale = _decades(ys, _HEIGHT - _BOTTOM, _TOP)
    points = [(x_scale(math.log10(dot.intensity)), y_scale(math.log10(dot.gflops))) for dot in shown]
    lines, labels = _roof(roofs, bandwidth, x_scale, y_scale, points)
    parts = [*_grid(x_scale, y_scale), *lines]
    placed = zip(shown, points, strict=True)
    for dot, (x, y) in sorted(placed, key=lambda pair: -pair[0].part):  # small ones lie above large ones
        radius = _LEAST_DOT + (_LARGEST_DOT - _LEAST_DOT) * math.sqrt(min(dot.part, 1.0))
        label_text = escape(described(dot.kernel, dot.part))
        parts.append(
            f'<circle class="dot {escape(dot.kernel.bound or "unbound")}" '
            f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" data-kernel="{dot.number}" '
            f'tabindex="0" role="button" aria-label="{label_text}"><title>{label_text}</title></circle>'
        )
    parts += labels  # above the dots, so that they can be read
    label = f"Roofline of {counted(len(shown), 'kernel')}: GFLOP/s by operations for each byte"
    return (
        f'<svg class="roofline" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="group" '
        f'aria-label="{escape(f"{title}. {label}" if title else label)}">{"".join(parts)}</svg>'
    )


def described(kernel: KernelRecord, part: float) -> str:
    """A description of a kernel."""
    ceiling = f", {kernel.share:.0%} of the ceiling ({kernel.bound})" if kernel.share is not None else ""
    rates = f"{words.rate(kernel.gflops)} GFLOP/s, {words.rate(kernel.gbytes)} GB/s"
    calls = counted(kernel.calls, "call")
    return (
        f"{short_kernel(kernel.name)} {short_shapes(kernel.shapes)}: {calls}, "
        f"{format_seconds(kernel.seconds)} ({format_share(part)} of the time), {rates}{ceiling}"
    )


def _decades(values: Sequence[float], start: float, end: float) -> Scale:
    """A logarithmic scale over whole decades that include all values."""
    logarithms = [math.log10(value) for value in values]
    low, high = math.floor(min(logarithms)), math.ceil(max(logarithms))
    return Scale(low, max(high, low + 1), start, end)


def _grid(x_scale: Scale, y_scale: Scale) -> list[str]:
    parts = []
    rows = range(int(y_scale.low), int(y_scale.high) + 1)
    columns = range(int(x_scale.low), int(x_scale.high) + 1)
    for power in rows:
        y = y_scale(power)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if (power - rows[0]) % _stride(len(rows), 7) == 0:
            parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y:.1f}" dy=".35em">{_power(power)}</text>')
    for power in columns:
        x = x_scale(power)
        parts.append(f'<line class="rule" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" x1="{x:.1f}" x2="{x:.1f}"/>')
        if (power - columns[0]) % _stride(len(columns), 7) == 0:
            below = _HEIGHT - _BOTTOM + 15
            side = "end" if power == columns[-1] and len(columns) > 2 else "middle"
            parts.append(f'<text class="{side}" x="{x:.1f}" y="{below}">{_power(power)}</text>')
    parts.append(f'<text class="start" x="2" y="{_TOP - 12}">GFLOP/s</text>')
    parts.append(f'<text class="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">operations for each byte</text>')
    return parts


def _roof(
    roofs: Mapping[str, float], bandwidth: float, x_scale: Scale, y_scale: Scale, taken: Sequence[Point]
) -> tuple[list[str], list[str]]:
    """Lines and their names: a slope for the bandwidth, up to the highest roof, and a level for each dtype.

    Names are where they hide the fewest dots, whose points are `taken`.
    """
    lines, labels = [], []
    left, right = 10.0**x_scale.low, 10.0**x_scale.high
    free = math.inf  # there is no name above it yet
    for name, roof in sorted(roofs.items(), key=lambda item: item[1]):
        y = y_scale(math.log10(roof))
        ridge = x_scale(math.log10(max(roof / bandwidth, left))) if bandwidth else x_scale.start
        lines.append(_line(ridge, x_scale.end, y, y))
        free = min(y - 5, free - _APART)
        last = x_scale.end - _LABEL / 2
        middles = [(min(x, last), free - 4) for x in (ridge, ridge + _LABEL / 2 + 4, last)]
        x, _ = _clearest(middles, taken, _LABEL)
        label = escape(f"{name} {format_number(roof)} GFLOP/s")
        labels.append(f'<text class="name middle" x="{x:.1f}" y="{free:.1f}">{label}</text>')
    if bandwidth:
        # The slope enters at the left or at the bottom, and leaves at the highest roof or at the right.
        from_x = max(left, 10.0**y_scale.low / bandwidth)
        to_x = min(max(roofs.values(), default=10.0**y_scale.high) / bandwidth, right)
        if to_x > from_x:
            x1, x2 = x_scale(math.log10(from_x)), x_scale(math.log10(to_x))
            y1, y2 = (y_scale(math.log10(x * bandwidth)) for x in (from_x, to_x))
            lines.append(_line(x1, x2, y1, y2))
            angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
            along = [x1 + (x2 - x1) * tenth / 10 for tenth in (4, 5, 3, 6, 2)]
            middles = [(x, y1 + (y2 - y1) * (x - x1) / (x2 - x1) - 8) for x in along]
            x, y = _clearest(middles, taken, _SHORT_LABEL)
            labels.append(
                f'<text class="name middle" x="{x:.1f}" y="{y + 8:.1f}" dy="-.6em" '
                f'transform="rotate({angle:.1f} {x:.1f} {y + 8:.1f})">{format_number(bandwidth)} GB/s</text>'
            )
    return lines, labels


def _clearest(middles: Sequence[Point], taken: Sequence[Point], room: float) -> Point:
    """Of several points for a name, the first of those with the fewest dots around them."""

    def hidden(middle: Point) -> int:
        return sum(abs(x - middle[0]) < room / 2 and abs(y - middle[1]) < _APART for x, y in taken)

    return min(middles, key=hidden)


def _line(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="roof" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _stride(count: int, most: int) -> int:
    return -(-count // most)


def _power(power: int) -> str:
    """A power of ten, formatted."""
    if -3 <= power <= 4:
        return f"{10.0**power:,g}"
    return f"1e{power}"
