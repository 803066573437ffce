"""The sections of a page about a profile: memory, kernels, transfers and waits, advice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from penstock.advising import Advice
from penstock.formatting import counted, format_number, format_seconds, format_share
from penstock.report import words
from penstock.report.cards import aside, card, fact_grid, grid, kernel_name, location, text
from penstock.report.charts import Line, Point, bytes_unit, line_chart
from penstock.report.findings import Certificate, Findings
from penstock.report.planned_step import planned_step
from penstock.report.roofline import BYTES, Dot, dots, roofline
from penstock.report.tables import copy_table, kernel_table, owner_table, rank_table, wait_table

Curves = Mapping[str, Sequence[Point]]
_LIVE, _POOLED, _PLANNED, _PEAK, _LEAST = 0, 1, 2, 3, 4  # colors
_TEASERS = 3  # pieces of advice that the overview names

_NO_PROFILE = (
    "There is no profile of this run. A run profiles a few of its steps after the first steps, unless it "
    "ends before, or was made by an older version of Penstock. Resuming it makes a profile: "
    "<code>penstock train --resume FOLDER</code>."
)
_OWNERS = (
    "By the line of code that asked for it, at the moment of the profile at which the most was live. What a "
    "run holds all the time was there before."
)
_ROOFLINE = (
    "Each dot is a kernel; the larger, the more of the time it took. The lines are the best that was "
    "measured of the device. What is above them had its data in a cache."
)
_CHOOSE = "Choose a dot, or a row of the table: the other is marked, and its values are shown here."
_NO_ROOF = (
    "What the device reaches at best is not known. The first profile on a device measures it, where the "
    "device's memory limit leaves room; a trace has it if <code>p.kernels()</code> was called before."
)
_NO_ADVICE = "Nothing was found that would be worth a change."
_WAITING = (
    "While Python waits for the device, the device is busy: a large share is good. Waiting for data is not: "
    "then the device has nothing to do, because reading the text is too slow."
)


_RANKS = (
    "Exchanges are hidden while a rank computes. The rank that waits least is the one that the others wait "
    "for; what it waits is for bytes on their way."
)


def profile_facts(findings: Findings) -> list[tuple[str, str]]:
    """A profile in a few facts."""
    facts = [("profiled", format_seconds(findings.seconds))]
    busy = _busy(findings)
    if busy is not None:
        facts.append(("of it in kernels", format_share(busy)))
    launches = sum(kernel.calls for kernel in findings.kernels)
    facts.append(("kernels", f"{len(findings.kernels):,}"))
    if findings.steps:
        each = launches / (findings.steps[1] - findings.steps[0] + 1)
        facts.append(("launches in a step", format_number(each)))
    else:
        facts.append(("launches", f"{launches:,}"))
    operations = sum((kernel.operations or 0) * kernel.calls for kernel in findings.kernels)
    if operations and findings.seconds:
        facts.append(("GFLOP/s over all", format_number(operations / findings.seconds / 1e9)))
    facts.append(("memory at most", words.nbytes(sum(device.peak_bytes for device in findings.devices))))
    return facts


def _busy(findings: Findings) -> float | None:
    """The part of the time in which kernels ran, if a device times commands."""
    busy = [device.busy_seconds for device in findings.devices if device.busy_seconds is not None]
    return sum(busy) / findings.seconds if busy and findings.seconds else None


def in_short(findings: Findings | None) -> str:
    """The other tabs in a sentence each."""
    if findings is None:
        return card("In short", text(_NO_PROFILE))
    sentences = []
    busy = _busy(findings)
    if busy is not None:
        sentences.append(f"Kernels ran in {format_share(busy)} of {_which(findings)}.")
    whole = sum(kernel.seconds or 0.0 for kernel in findings.kernels)
    if whole:
        longest = findings.kernels[0]
        part = format_share((longest.seconds or 0.0) / whole)
        name = f"<code>{kernel_name(longest.name)}</code>"
        kernel = '<a href="#kernels">kernel</a>'
        sentences.append(f"The {kernel} that took longest, {name}, had {part} of their time.")
    if findings.certificate:
        gap = findings.certificate.gap
        over = f"{gap:.2%} over the least possible" if gap else "the least possible"
        sentences.append(f'The <a href="#memory">memory plan</a> of a step is {over}.')
    titles = [escape(advice.title) for advice in findings.advice[:_TEASERS]]
    if len(findings.advice) > _TEASERS:
        titles.append(f"and {len(findings.advice) - _TEASERS} more")
    items = "".join(f"<li>{sentence}</li>" for sentence in sentences)
    if not titles:
        return card("In short", f"<ul>{items}<li>{_NO_ADVICE}</li></ul>")
    better = "".join(f"<li>{title}</li>" for title in titles)
    return card(
        "In short",
        f"<ul>{items}</ul>",
        text('What could be better, with the change in <a href="#advice">Advice</a>:'),
        f"<ul>{better}</ul>",
    )


# Memory


def memory(curves: Curves, findings: Findings | None) -> str:
    """Bytes over the run, the plan with its certificate, bytes during the profile, and their owners."""
    if not curves and findings is None:
        return card("", text(_NO_PROFILE))
    facts = fact_grid(_memory_facts(curves)) if curves else ""
    charts = [_memory_chart(curves)] if curves else []
    plan = _plan(findings, curves) if curves else ""
    if findings is None:
        return facts + grid(*charts) + plan
    charts += [_during(findings, name) for name, samples in findings.samples.items() if samples]
    if findings.planned is not None:
        count = 1 + findings.steps[1] - findings.steps[0] if findings.steps else 0
        peak = curves["peak_bytes"][-1][1] if curves.get("peak_bytes") else None
        seconds = findings.seconds / count if count else None
        charts.append(planned_step(findings.planned, peak, seconds))
    owners = owner_table(findings.memory) if findings.memory else text("Nothing was held.")
    held = card("Who held it", aside(_OWNERS), owners)
    if len(charts) == 1:  # there is room beside it
        return facts + grid(*charts, held) + plan
    return facts + grid(*charts) + plan + held


def _memory_facts(curves: Curves) -> list[tuple[str, str]]:
    names = {
        "live": "live_bytes",
        "of it planned": "planned_bytes",
        "pooled": "pooled_bytes",
        "peak": "peak_bytes",
        "limit": "limit_bytes",
    }
    facts = [(name, words.nbytes(curves[key][-1][1])) for name, key in names.items() if curves.get(key)]
    if curves.get("hit_rate"):
        facts.append(("requests served by the pool", format_share(curves["hit_rate"][-1][1])))
    return facts


def _memory_chart(curves: Curves) -> str:
    lines = [
        Line("live", curves.get("live_bytes", ()), _LIVE),
        Line("planned", curves.get("planned_bytes", ()), _PLANNED),
        Line("pooled", curves.get("pooled_bytes", ()), _POOLED),
        Line("peak", curves.get("peak_bytes", ()), _PEAK, dashed=True),
    ]
    unit = bytes_unit([line.points for line in lines])
    return line_chart("Memory over the run", lines, words.nbytes, from_zero=True, unit=unit)


def _plan(findings: Findings | None, curves: Curves) -> str:
    certificate = findings.certificate if findings else None
    if certificate is None:
        return card("The memory plan", aside("Its certificate comes with a run's profile, which is missing."))
    live = curves["live_bytes"][-1][1] if curves.get("live_bytes") else 0.0
    most = max(live, certificate.arena_bytes, 1)
    rows = [
        ("least possible", certificate.lower_bound, _LEAST),
        ("planned", certificate.arena_bytes, _PLANNED),
        ("live in all", live, _LIVE),
    ]
    bars = [
        f'<div class="row"><span>{name}</span><span class="long"><i class="c{color}" '
        f'style="width: {min(size / most, 1.0):.2%}"></i></span><b>{words.nbytes(size)}</b></div>'
        for name, size, color in rows
        if size
    ]
    statement = f'<p id="certificate">{_certified(certificate)}</p>'
    return card("The memory plan", statement, f'<div class="rows">{"".join(bars)}</div>')


def _certified(certificate: Certificate) -> str:
    """The certificate in words."""
    if not certificate.arena_bytes:
        return "The training step has no temporaries, and so needs no arena."
    arenas = "an arena" if certificate.arenas == 1 else f"{certificate.arenas} arenas"
    planned, least = words.nbytes(certificate.arena_bytes), words.nbytes(certificate.lower_bound)
    verdict = f"<b>{certificate.gap:.2%}</b> more" if certificate.gap else "just that: <b>0%</b> more"
    return (
        f"All temporaries of the training step have fixed offsets in {arenas} of <b>{planned}</b>. At the "
        f"moment at which the most of them are needed, they have <b>{least}</b>, so no plan can do with "
        f"less. This one takes {verdict}."
    )


def _during(findings: Findings, device: str) -> str:
    samples = findings.samples[device]
    live = [(at, float(size)) for at, size, _ in samples]
    pooled = [(at, float(size)) for at, _, size in samples]
    lines = [Line("live", live, _LIVE), Line("pooled", pooled, _POOLED)]
    title = f"Memory during {_which(findings)}"
    if len(findings.devices) > 1:
        title += f" on {device}"
    unit = bytes_unit([live, pooled])
    return line_chart(
        title, lines, words.nbytes, across="time", across_text=format_seconds, from_zero=True, unit=unit
    )


# Kernels


def kernels(findings: Findings | None) -> str:
    """The roofline and the table; choosing a kernel in one marks it in the other."""
    if findings is None:
        return card("", text(_NO_PROFILE))
    if not findings.kernels:
        return card("", text("No kernel ran during the profile."))
    table = kernel_table(findings.kernels, len(findings.devices) > 1)
    return (
        fact_grid(profile_facts(findings))
        + _rooflines(findings, dots(findings.kernels))
        + card("Kernels by time", _source(findings), table)
    )


def _rooflines(findings: Findings, shown: Sequence[Dot]) -> str:
    """A chart for each device."""
    if not shown:
        return card("Roofline", aside("No kernel has both a time and a number of operations."))
    charts = []
    for device in findings.devices:
        own = [dot for dot in shown if dot.kernel.device == device.name]
        name = device.name if len(findings.devices) > 1 else ""
        charts.append(f"<h4>{escape(name)}</h4>" if name and own else "")
        charts.append(roofline(name, own, findings.ceilings.get(device.name, {})))
    keys = "".join(
        f'<span class="key"><i class="swatch dot {kind}"></i>{label}</span>'
        for kind, label in (("compute", "held back by computing"), ("memory", "held back by memory"))
        if any(dot.kernel.bound == kind for dot in shown)
    )
    picked = f'<p class="picked" role="status">{_CHOOSE}</p>'
    legend = f'<div class="legend">{keys}</div>' if keys else ""
    return card("Roofline", aside(_ROOFLINE), *charts, legend, picked, _missing(findings, shown))


def _missing(findings: Findings, shown: Sequence[Dot]) -> str:
    """Notes about what the rooflines do not show."""
    sentences = []
    left = len(findings.kernels) - len(shown)
    if left:
        are = "is" if left == 1 else "are"
        kernels = counted(left, "kernel")
        sentences.append(f"{kernels} {are} in the table only: without operations, or without a time.")
    if any(BYTES not in findings.ceilings.get(dot.kernel.device, {}) for dot in shown):
        sentences.append(_NO_ROOF)
    return "".join(map(aside, sentences))


# Transfers and waits


def transfers(curves: Curves, findings: Findings | None) -> str:
    """Copies with their rates, waits with their lines, and the share of waits over the run."""
    cards = []
    if curves:
        lines = [
            Line("for the device", curves.get("device_wait", ()), 0),
            Line("for data", curves.get("data_wait", ()), 1),
        ]
        percent = ("%", 0.01)
        cards.append(line_chart("Waiting of Python", lines, format_share, from_zero=True, unit=percent))
    if findings is None:
        return grid(*cards, card("What it means", text(_WAITING))) + card("", text(_NO_PROFILE))
    waits = wait_table(findings.waits, findings.seconds) if findings.waits else text("Nothing waited.")
    cards.append(card("Waits", aside(_WAITING), _source(findings), waits))
    copies = copy_table(findings.copies) if findings.copies else text("Nothing was copied.")
    return grid(*cards) + card("Transfers", _source(findings), copies)


# Ranks


def ranks(curves: Curves) -> str:
    """How long ranks waited for each other over the run, what they sent, and how much of it was hidden."""
    waits = [
        Line("longest", curves.get("longest_rank_wait", ()), 1),
        Line("shortest", curves.get("shortest_rank_wait", ()), 0),
    ]
    hidden = [Line("", curves.get("hidden_exchange", ()))]
    sent = [Line("", curves.get("sent_bytes", ()))]
    unit = bytes_unit([line.points for line in sent])
    cards = [
        line_chart("Waiting for other ranks", waits, format_seconds, from_zero=True, unit=("ms", 1e-3)),
        line_chart("Exchanges hidden", hidden, format_share, from_zero=True, unit=("%", 0.01)),
        line_chart("Sent in a step", sent, words.nbytes, from_zero=True, unit=unit),
    ]

    def mean(name: str) -> float:
        values = [value for _, value in curves.get(name, ())]
        return sum(values) / len(values) if values else math.nan

    count = sum(f"rank_{number}_wait" in curves for number in range(len(curves)))
    rows = [
        (mean(f"rank_{number}_wait"), mean(f"rank_{number}_sent"), mean(f"rank_{number}_hidden"))
        for number in range(count)
    ]
    table = card("In a step, on average", aside(_RANKS), rank_table(rows)) if rows else ""
    return grid(*cards) + table


# Advice


def advice(findings: Findings | None) -> str:
    """A card for each piece."""
    if findings is None:
        return card("", text(_NO_PROFILE))
    if not findings.advice:
        return card("", text(f"<b>{_NO_ADVICE}</b>"), _source(findings))
    return _source(findings) + "".join(map(_advice, findings.advice))


def _advice(advice: Advice) -> str:
    rows = [("Seen", advice.evidence), ("Change", advice.change), ("Gain", advice.gain)]
    rows = [(name, escape(value)) for name, value in rows]
    if advice.where:
        rows.insert(1, ("Where", location(advice.where)))
    shown = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value)
    return card(advice.title, f"<dl>{shown}</dl>", kind="advice")


# Words


def _which(findings: Findings) -> str:
    """The part of a run that a profile saw."""
    if findings.steps is None:
        return "the profile"
    first, last = findings.steps
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _source(findings: Findings) -> str:
    """The sources of the values."""
    time = format_seconds(findings.seconds)
    if findings.steps is None:
        return aside(f"From a profile of {time}.")
    return aside(f"From {_which(findings)} of the run, {time}, which the trainer profiled by itself.")
