"""The page: sections under a row of tabs. Without its script it is a single long page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from pathlib import Path

from penstock.formatting import UNKNOWN, counted, format_duration, format_number, format_share
from penstock.report import sections, words
from penstock.report.cards import aside, card, fact_grid, grid
from penstock.report.charts import Line, Point, line_chart
from penstock.report.findings import Findings
from penstock.report.tables import settings_tables

# Nothing is loaded from elsewhere, whatever the texts of a run contain.
_EVALUATED = "validation_"  # before the name of a metric of an evaluation
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class Run:
    """What a page shows of a training run."""

    steps: int  # how many are planned
    curves: Mapping[str, Sequence[Point]]  # by the names of the metrics, over the steps
    settings: Mapping[str, Mapping[str, object]]
    sample: str = ""
    metrics: Sequence[str] = ()  # the names of a user's own


@dataclass(frozen=True)
class _Section:
    key: str
    name: str
    content: str
    count: int = 0  # shown beside the name


def render(title: str, run: Run | None, findings: Findings | None) -> str:
    """The page of a run, of a profile, or of a run with the profile of some of its steps."""
    shown = list(_sections(run, findings))
    links = "".join(f'<a href="#{tab.key}">{tab.name}{_badge(tab.count)}</a>' for tab in shown)
    panels = "".join(
        f'<section class="panel" id="{tab.key}"><h2>{tab.name}</h2>{tab.content}</section>' for tab in shown
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>
{_beside("page.css")}</style>
<script>document.documentElement.classList.add("js")</script>
</head>
<body>
<header><h1>{escape(title)}</h1><p class="dim">{escape(_subtitle(run, findings))}</p></header>
<nav aria-label="Sections">{links}</nav>
<main>{panels}</main>
<footer class="dim small">Written by Penstock {escape(version("penstock"))}</footer>
<script>
{_beside("page.js")}</script>
</body>
</html>
"""


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _badge(count: int) -> str:
    return f' <span class="badge">{count}</span>' if count else ""


def _sections(run: Run | None, findings: Findings | None) -> list[_Section]:
    advice = findings.advice if findings else []
    parts = [
        _Section("overview", "Overview", _overview(run, findings)),
        _Section("memory", "Memory", sections.memory(run.curves if run else {}, findings)),
        _Section("kernels", "Kernels", sections.kernels(findings)),
        _Section(
            "transfers", "Transfers &amp; waits", sections.transfers(run.curves if run else {}, findings)
        ),
        _Section("advice", "Advice", sections.advice(findings), len(advice)),
    ]
    if run and "sent_bytes" in run.curves:
        parts.insert(-1, _Section("ranks", "Ranks", sections.ranks(run.curves)))
    if run:
        parts.append(_Section("configuration", "Configuration", settings_tables(run.settings)))
        if _speed(run)[0] == "tokens":
            parts.append(_Section("sample", "Sample", _sample(run.sample)))
    return parts


def _subtitle(run: Run | None, findings: Findings | None) -> str:
    parts = []
    if run:
        done, whole = int(_last(run.curves.get("step", ())) or 0), counted(run.steps, "step")
        parts.append(f"{done:,} of {whole} of training" if done < run.steps else f"{whole} of training")
    else:
        parts.append("a profile")
    if findings:
        parts += [f"{device.name} ({device.description})" for device in findings.devices]
    return " · ".join(parts)


def _last(points: Sequence[Point]) -> float | None:
    return points[-1][1] if points else None


def _overview(run: Run | None, findings: Findings | None) -> str:
    if run is None:
        return fact_grid(sections.profile_facts(findings)) + sections.in_short(findings) if findings else ""
    loss = [
        Line("training", run.curves.get("loss", ())),
        Line("validation", run.curves.get("validation_loss", ()), color=1),
    ]
    unit, rates = _speed(run)
    speed = [Line("", rates)]
    rate = [Line("", run.curves.get("learning_rate", ()))]
    charts = [
        line_chart("Loss", loss, words.loss),
        *[line_chart(name, lines) for name, lines in _own_charts(run)],
        line_chart(f"{unit.capitalize()} per second", speed, from_zero=True),
        line_chart("Learning rate", rate, from_zero=True),
    ]
    return fact_grid(_run_facts(run)) + grid(*charts, sections.in_short(findings))


def _speed(run: Run) -> tuple[str, Sequence[Point]]:
    """What a run counts as its data, and how much of it there was in a second."""
    unit = "samples" if "samples_per_second" in run.curves else "tokens"
    return unit, run.curves.get(f"{unit}_per_second", ())


def _own_charts(run: Run) -> list[tuple[str, list[Line]]]:
    """Charts of a user's own metrics: in training, and under the same name in evaluations."""
    names = dict.fromkeys(name.removeprefix(_EVALUATED) for name in run.metrics)
    return [
        (
            name,
            [
                Line("training", run.curves.get(name, ())),
                Line("validation", run.curves.get(_EVALUATED + name, ()), color=1),
            ],
        )
        for name in names
    ]


def _run_facts(run: Run) -> list[tuple[str, str]]:
    def last(name: str) -> float:
        last = _last(run.curves.get(name, ()))
        return math.nan if last is None else last

    def middle(name: str) -> float:
        values = sorted(value for _, value in run.curves.get(name, ()))
        return values[len(values) // 2] if values else math.nan

    def of(text: str, value: float) -> str:
        return text if math.isfinite(value) else UNKNOWN

    best = min((value for _, value in run.curves.get("validation_loss", ())), default=math.nan)
    done = last("step")
    steps = f"{0 if math.isnan(done) else done:,.0f} of {run.steps:,}"
    unit, _ = _speed(run)
    speed, data, device = middle(f"{unit}_per_second"), middle("data_wait"), middle("device_wait")
    return [
        ("steps", steps),
        ("loss", of(words.loss(last("loss")), last("loss"))),
        ("best validation loss", of(words.loss(best), best)),
        ("time of training", format_duration(last("seconds"))),
        (f"{unit} per second", of(format_number(speed), speed)),
        ("peak memory", words.nbytes(last("peak_bytes"))),
        ("waiting for data", of(format_share(data), data)),
        ("waiting for the device", of(format_share(device), device)),
    ]


def _sample(sample: str) -> str:
    if not sample:
        return card("", aside("A run writes a sample of its text at its end."))
    return card("", f"<pre>{escape(sample)}</pre>")
