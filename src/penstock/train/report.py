"""`report.html`: one page about a run that needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from penstock.config import format_bytes
from penstock.data.files import written_whole
from penstock.train.config import Config
from penstock.train.metrics import Curve

FILE = "report.html"
_WIDTH, _HEIGHT = 420, 220  # of a chart, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 26  # room around the lines

Line = tuple[str, Curve]  # a name and its values

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2430; --dim: #5c6773;
  --rule: #dfe3e8; --line0: #1769c2; --line1: #c2571a; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b2129; --text: #e6eaf0;
  --dim: #9aa5b1; --rule: #323b46; --line0: #6db3ff; --line1: #ffa666; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 1.25rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .5rem; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.facts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
  margin-bottom: 1rem; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 1rem;
  margin-bottom: 1rem; min-width: 0; }
.grid > section, .facts > section { margin: 0; }
.fact { font-size: 1.35rem; font-weight: 600; }
.dim, text, th { color: var(--dim); fill: var(--dim); font-weight: 400; }
svg { display: block; width: 100%; height: auto; }
text { font-size: 12px; }
.rule { stroke: var(--rule); }
path { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line0 { stroke: var(--line0); color: var(--line0); } .line1 { stroke: var(--line1); color: var(--line1); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .15rem .75rem .15rem 0; overflow-wrap: anywhere; vertical-align: top; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.5 ui-monospace, monospace; }
"""


def write_report(run: Path, config: Config, curves: Mapping[str, Curve], sample: str = "") -> Path:
    """Write the page of a run into its folder."""
    path = run / FILE
    with written_whole(path) as file:
        file.write(render(run.name, config, curves, sample).encode(errors="replace"))
    return path


def render(title: str, config: Config, curves: Mapping[str, Curve], sample: str = "") -> str:
    """The page as text."""
    curve = {name: curves.get(name, Curve()) for name in _CURVES}
    charts = [
        _chart("Loss", [("training", curve["loss"]), ("validation", curve["validation_loss"])]),
        _chart("Learning rate", [("", curve["learning_rate"])]),
        _chart("Tokens per second", [("", curve["tokens_per_second"])], from_zero=True),
        _chart(
            "Memory, MiB",
            [("live", curve["live_bytes"]), ("peak", curve["peak_bytes"])],
            from_zero=True,
            unit=1 << 20,
        ),
    ]
    shown = f"<section><h2>Sample</h2><pre>{escape(sample)}</pre></section>" if sample else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<div class="facts">{"".join(_facts(config, curve))}</div>
<div class="grid">{"".join(charts)}</div>
<p></p>{shown}
<div class="grid">{"".join(_tables(config))}</div>
</body></html>
"""


_CURVES = (
    "loss",
    "validation_loss",
    "learning_rate",
    "seconds",
    "tokens_per_second",
    "live_bytes",
    "peak_bytes",
    "data_wait",
    "device_wait",
)


def _facts(config: Config, curve: Mapping[str, Curve]) -> list[str]:
    def last(name: str) -> float:
        return curve[name].points[-1][1] if curve[name].points else math.nan

    def middle(name: str) -> float:
        values = sorted(value for _, value in curve[name].points)
        return values[len(values) // 2] if values else math.nan

    steps = curve["loss"].points[-1][0] if curve["loss"].points else 0
    best = min((value for _, value in curve["validation_loss"].points), default=math.nan)
    facts = {
        "steps": f"{steps:,.0f} of {config.run.steps:,}",
        "loss": f"{last('loss'):.4f}",
        "best validation loss": f"{best:.4f}",
        "minutes": f"{last('seconds') / 60:.1f}",
        "tokens per second": f"{middle('tokens_per_second'):,.0f}",
        "peak memory": _bytes(last("peak_bytes")),
        "waiting for data": f"{middle('data_wait'):.1%}",
        "waiting for the device": f"{middle('device_wait'):.1%}",
    }
    return [
        f'<section><div class="fact">{escape(value.replace("nan", "-"))}</div>'
        f'<div class="dim">{name}</div></section>'
        for name, value in facts.items()
    ]


def _tables(config: Config) -> list[str]:
    tables = []
    for name, values in config.tree().items():
        rows = [f"<tr><th>{key}</th><td>{escape(str(value))}</td></tr>" for key, value in values.items()]
        tables.append(f"<section><h2>{name.capitalize()}</h2><table>{''.join(rows)}</table></section>")
    return tables


def _chart(title: str, lines: Sequence[Line], from_zero: bool = False, unit: float = 1.0) -> str:
    lines = [(name, curve) for name, curve in lines if curve.points]
    if not lines:
        return f'<section><h2>{title}</h2><p class="dim">nothing was measured yet</p></section>'
    steps = [step for _, curve in lines for step, _ in curve.points]
    values = [value / unit for _, curve in lines for _, value in curve.points]
    ticks = _ticks([0.0, *values] if from_zero else values)
    first, last = min(steps), max(steps)

    def across(step: float) -> float:
        return _LEFT + (step - first) / max(last - first, 1) * (_WIDTH - _LEFT - _RIGHT)

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (_HEIGHT - _BOTTOM - _TOP)

    parts = []
    for tick in ticks:
        y = up(tick)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {first:,.0f}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{last:,.0f}</text>')
    for at, (_, curve) in enumerate(lines):
        points = " ".join(f"{across(step):.1f},{up(value / unit):.1f}" for step, value in curve.points)
        single = len(curve.points) == 1
        shape = f'd="M{points} h0.01" style="stroke-width: 7"' if single else f'd="M{points}"'
        parts.append(f'<path class="line{at}" stroke-linecap="round" {shape}/>')
    names = [f'<span class="line{at}">&#9644; {name}</span>' for at, (name, _) in enumerate(lines) if name]
    return (
        f"<section><h2>{title}</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title} over the steps">'
        f"{''.join(parts)}</svg>"
        f"<div>{' '.join(names)}</div></section>"
    )


def _ticks(values: Sequence[float]) -> list[float]:
    """About five round numbers around all values."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * 5 >= span)
    start, end = math.floor(low / step), math.ceil(high / step)
    return [at * step for at in range(start, max(end, start + 1) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _bytes(value: float) -> str:
    return "-" if math.isnan(value) else format_bytes(int(value))
