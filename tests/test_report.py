"""The page about a run or a profile: as text, and in a real browser by clicking through it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import chromium
import numpy as np
import pytest
import trainer_models
from test_train import TEXT, TREE, Silent, measured
from typer.testing import CliRunner

import penstock as ps
from penstock import Device
from penstock.advising import Advice
from penstock.cli import app
from penstock.drivers.host import HostDriver
from penstock.errors import DeviceError, ReportError, SettingError
from penstock.formatting import UNKNOWN, format_duration, format_share
from penstock.measuring import ceilings
from penstock.profiling.records import CopyRecord, DeviceRecord, KernelRecord, OwnerRecord, WaitRecord
from penstock.profiling.words import short_location
from penstock.report import Certificate, Findings, PlannedStep, Run, charts, findings, render, roofline, words
from penstock.tensor.jit import schedules
from penstock.train import Config, TextTrainer, checkpoint, report_on, window
from penstock.train.metrics import FILE as METRICS

ATTACK = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>"
TABS = ["overview", "memory", "kernels", "transfers", "advice", "configuration", "sample"]
VOID = ("meta", "br", "wbr")
NARROW, TALL = 390, 844  # a phone


def kernel(**changed: Any) -> KernelRecord:
    whole = KernelRecord(
        device="host",
        name="matmul_add_0123456789ab",
        shapes="float32[8, 8] -> float32[8]",
        where="device",
        calls=4,
        seconds=0.5,
        least_seconds=0.1,
        most_seconds=0.2,
        operations=10**9,
        read_bytes=10**8,
        written_bytes=10**7,
        share=0.8,
        bound="compute",
    )
    return replace(whole, **changed)


def some_findings(**changed: Any) -> Findings:
    whole = Findings(
        seconds=1.0,
        devices=[DeviceRecord("host", "NumPy", True, 0.9, 1 << 20, 3, 1, 0, 0)],
        kernels=[kernel(), kernel(name="map_exp", seconds=0.25, bound="memory", share=0.3, operations=10**7)],
        copies=[CopyRecord("host", "upload", "host", 5, 12345, 0.1)],
        waits=[WaitRecord("host", "train.py:20", "download", 3, 0.4)],
        memory=[OwnerRecord("host", "train.py:19", 1 << 20, 3, 2 << 20)],
        ceilings={"host": {"bytes": 1e10, "float32": 1e11}},
        samples={"host": [(0.0, 1000, 10), (0.5, 2000, 20), (1.0, 1500, 30)]},
        advice=[],
        steps=(4, 6),
        certificate=Certificate(1_010_000, 1_000_000, 1),
        planned=PlannedStep([(0, 1000, 0, 0), (1, 3000, 500, 0), (2, 2000, 0, 500)], 1, 1 << 20, 0.25),
    )
    return replace(whole, **changed)


ADVICE = Advice("flaw", "A title", "the evidence", "train.py:3", "the change", "the gain", 0.5, None)


def a_run(values: list[float] | None = None, sample: str = "") -> Run:
    points = [(float(step), value) for step, value in enumerate(values or [3.0, 2.0, 1.0], start=1)]
    names = (
        "loss",
        "validation_loss",
        "live_bytes",
        "planned_bytes",
        "pooled_bytes",
        "peak_bytes",
        "seconds",
    )
    names += ("tokens_per_second", "learning_rate", "device_wait", "data_wait", "hit_rate", "limit_bytes")
    curves = dict.fromkeys(names, points) | {"step": [(step, step) for step, _ in points]}
    return Run(3, curves, Config().tree(), sample)


class Page(HTMLParser):
    """Checks that tags are closed in order, and that nothing outside the page is referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs)
        assert not [name for name in given if name.startswith("on")]
        assert not {"src", "srcset", "xlink:href", "action", "data"} & set(given)
        assert (given.get("href") or "#").startswith("#")
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        self.tags.append((tag, given))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def count(self, tag: str, **wanted: str) -> int:
        return sum(name == tag and wanted.items() <= given.items() for name, given in self.tags)


def checked(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert page.count("script") == 2
    numbers = re.findall(r"\b(?:nan|inf|infinity|none)\b", page.text, re.IGNORECASE)
    assert numbers == []
    ids = [given["id"] for _, given in page.tags if "id" in given]
    assert len(ids) == len(set(ids))
    assert {given["href"] for _, given in page.tags if "href" in given} <= {f"#{token}" for token in ids}
    for tag, given in page.tags:
        for name in ("cx", "cy", "r", "x", "y", "x1", "x2", "y1", "y2"):
            if name in given and tag in ("circle", "line", "text"):
                assert math.isfinite(float(given[name] or ""))
    return page


# The page as text


def test_a_page_has_a_section_for_each_tab() -> None:
    page = checked(render("a run", a_run(sample="once upon a time"), some_findings(advice=[ADVICE])))
    sections = [given["id"] for tag, given in page.tags if tag == "section" and given.get("class") == "panel"]
    assert sections == TABS
    links = [given["href"] for tag, given in page.tags if tag == "a"][:7]
    assert links == [f"#{name}" for name in TABS]
    for part in (
        "3 steps of training · host (NumPy)",
        "once upon a time",
        "learning_rate",
        "matmul_add",
        "80%",
        "to the device",
        "train.py:20",
        "the evidence",
        "From steps 4 to 6 of the run",
        "1.00% more",
    ):
        assert part in page.text
    assert page.count("svg", **{"class": "chart"}) == 7
    assert page.count("circle", role="button") == 2


def test_a_run_of_several_ranks_has_a_section_for_them() -> None:
    values = {
        "longest_rank_wait": 0.06,
        "shortest_rank_wait": 0.02,
        "sent_bytes": 3 << 20,
        "hidden_exchange": 0.6,
        "rank_0_wait": 0.02,
        "rank_0_sent": 1 << 20,
        "rank_0_hidden": 0.8,
        "rank_1_wait": 0.06,
        "rank_1_sent": 2 << 20,
    }
    run = a_run()
    curves = {**run.curves, **{name: [(1.0, value), (2.0, value)] for name, value in values.items()}}
    page = checked(render("a run", replace(run, curves=curves), None))
    for part in ("Waiting for other ranks", "Exchanges hidden", "rank 1", "60 ms", "2.0 MiB", "80%"):
        assert part in page.text
    assert "Waiting for other ranks" not in checked(render("a run", run, None)).text


def test_what_comes_from_users_is_escaped() -> None:
    bad = ATTACK
    run = Run(3, a_run().curves, {bad: {bad: bad}}, bad)
    device = DeviceRecord(bad, bad, True, 0.5, 1, 1, 1, 0, 0)
    everything = some_findings(
        devices=[device, replace(device, name="other")],
        kernels=[kernel(device=bad, name=bad, shapes=bad, bound=bad)],
        copies=[CopyRecord(bad, bad, bad, 1, 1, 1.0)],  # type: ignore[arg-type]
        waits=[WaitRecord(bad, bad, bad, 1, 0.1)],
        memory=[OwnerRecord(bad, bad, 1, 1, 1)],
        ceilings={bad: {bad: 1e11, "bytes": 1e10}},
        samples={bad: [(0.0, 1, 1)]},
        advice=[Advice(bad, bad, bad, bad, bad, bad, None, None)],
    )
    page = checked(render(bad, run, everything))
    assert page.text.count(bad) > 10
    assert page.count("img") == 0


@pytest.mark.parametrize(
    "values",
    [
        [3.0],
        [0.0, 0.0],
        [1e-9, 1e9],
        [-5.0, 5.0, 2.0],
        [math.nan, 1.0, math.inf, -math.inf],
        [math.nan],
        [1e308, -1e308, 1e300],
        [1e-320, 0.0],
        [10**400, 1],
        [1e9, 1e9 + 1e-7],
    ],
)
def test_values_of_any_kind_are_drawn(values: list[float]) -> None:
    points = [(float(step), value) for step, value in enumerate(values, start=1)]
    for chart in (
        charts.line_chart("Loss", [charts.Line("a", points)]),
        charts.line_chart(
            "Bytes", [charts.Line("a", points)], unit=charts.bytes_unit([points]), from_zero=True
        ),
    ):
        drawn = any(abs(value) < 1e100 for value in values)
        assert chart.count("<svg") == drawn
        assert "nan" not in chart
        assert "inf" not in chart
    if all(abs(value) < 1e300 or value != value for value in values):
        checked(render("run", a_run(values), some_findings()))


def test_a_run_without_anything_has_a_page() -> None:
    page = checked(render("new", Run(10, {}, {}, ""), None))
    assert "0 of 10 steps" in page.text
    assert page.text.count("There is no profile of this run") == 5
    assert page.count("svg") == 0


def test_a_profile_without_a_run_has_a_page() -> None:
    page = checked(render("trace.json", None, some_findings(steps=None, certificate=None)))
    assert [given["id"] for tag, given in page.tags if given.get("class") == "panel"] == TABS[:5]
    assert "From a profile of 1 s." in page.text


def test_an_empty_profile_has_a_page() -> None:
    nothing = some_findings(kernels=[], copies=[], waits=[], memory=[], ceilings={}, samples={}, seconds=0.0)
    page = checked(render("run", a_run(), nothing))
    for part in ("No kernel ran", "Nothing was copied", "Nothing waited", "Nothing was held"):
        assert part in page.text
    checked(render("trace", None, replace(nothing, devices=[], steps=None, certificate=None)))


def test_what_a_device_does_not_tell_is_left_out() -> None:
    silent = kernel(seconds=None, least_seconds=None, most_seconds=None, share=None, bound="")
    host = kernel(name="numpy argsort", where="host", operations=None, read_bytes=None, written_bytes=None)
    moving = kernel(name="copy", operations=0)
    device = DeviceRecord("host", "WebGPU", False, None, 1, 0, 0, 0, 0)
    untimed = some_findings(
        devices=[device], kernels=[silent], copies=[CopyRecord("host", "upload", "host", 1, 9, None)]
    )
    page = checked(render("run", a_run(), untimed))
    assert "No kernel has both a time and a number of operations" in page.text
    page = checked(
        render("run", a_run(), some_findings(kernels=[kernel(), silent, host, moving], ceilings={}))
    )
    assert "3 kernels are in the table only" in page.text
    assert "What the device reaches at best is not known" in page.text
    assert page.count("circle", role="button") == 1


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan, 1e-3, 1e40])
def test_ceilings_of_any_kind_are_drawn(rate: float) -> None:
    strange = {"host": {"bytes": rate, "float32": 1e11, "float16": rate}}
    checked(render("run", a_run(), some_findings(ceilings=strange)))
    checked(render("run", a_run(), some_findings(ceilings={"host": {"bytes": 1e10, "float32": rate}})))
    odd = kernel(operations=1, read_bytes=10**15, seconds=1e6)
    checked(
        render(
            "run", a_run(), some_findings(kernels=[kernel(), odd, kernel(seconds=1e-12, operations=10**18)])
        )
    )


def test_the_roofline_is_logarithmic_and_bounded_by_its_roof() -> None:
    records = [
        kernel(operations=10**9, read_bytes=10**9, written_bytes=0, seconds=4.0),  # 1 a byte, 1 GFLOP/s
        kernel(operations=10**9, read_bytes=10**8, written_bytes=0, seconds=0.4),  # 10 and 10
        kernel(operations=10**9, read_bytes=10**7, written_bytes=0, seconds=0.04),  # 100 and 100
    ]
    dots = roofline.dots(records)
    assert [(round(dot.intensity), round(dot.gflops)) for dot in dots] == [(1, 1), (10, 10), (100, 100)]
    page = Page()
    page.feed(roofline.roofline("", dots, {"bytes": 1e10, "float32": 1e12}))
    places = {
        given["data-kernel"]: (float(given["cx"] or 0), float(given["cy"] or 0))
        for tag, given in page.tags
        if tag == "circle"
    }
    (x0, y0), (x1, y1), (x2, y2) = (places[str(number)] for number in range(3))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    roofs = [given for tag, given in page.tags if tag == "line" and given["class"] == "roof"]
    assert len(roofs) == 2
    level = next(roof for roof in roofs if roof["y1"] == roof["y2"])
    assert float(level["y1"] or 0) == pytest.approx(y2 - (y1 - y2), abs=0.2)  # ten times as high
    assert float(level["x1"] or 0) == pytest.approx(x2, abs=0.2)  # 1000 GFLOP/s at 10 GB/s: 100 for a byte


@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        (Certificate(1 << 20, 1 << 20, 1), "an arena of 1.0 MiB. .* just that: 0% more"),
        (Certificate(1010 << 10, 1000 << 10, 3), "in 3 arenas of 1010.0 KiB.* takes 1.00% more"),
        (Certificate(0, 0, 1), "needs no arena"),
        (None, "Its certificate comes with a run's profile"),
    ],
)
def test_the_certificate_is_told_in_words(certificate: Certificate | None, said: str) -> None:
    page = checked(render("run", a_run(), some_findings(certificate=certificate)))
    assert re.search(said, page.text)


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    page = render("a", a_run([float(1 << 20)] * 3), some_findings())
    (table,) = re.findall(r'<table id="predicted">.*?</table>', page)
    cells = re.findall(r"<td>(.*?)</td>", table)
    assert cells == ["1.0 MiB", "1.0 MiB", "250 ms", "333 ms"]  # the profile has one second for three steps
    assert "1 kernels run once more" in page
    for name in ("live", "dropped, to be computed again", "of the live, computed again"):
        assert name in page
    unknown = render("a", a_run(), some_findings(planned=PlannedStep([(0, 1000, 0, 0)], 0, 1 << 20, None)))
    assert "No value is computed twice" in unknown
    assert "dropped, to be" not in unknown
    assert "<td>unknown</td>" in unknown


def test_the_timeline_of_a_step_shows_what_is_dropped_and_computed_again() -> None:
    device = Device.over(HostDriver())
    x = ps.asarray(np.ones((64, 64), np.float32), device=device)

    def chain(x: ps.Tensor) -> ps.Tensor:
        x = x.detach().requires_grad_()
        value = x
        for _ in range(8):
            value = ps.tanh(value)
        ps.sum(value).backward()
        assert x.grad is not None
        return x.grad

    free = ps.jit(chain)
    small = ps.jit(chain, memory=ps.memory.plan(free, x).smallest_bytes)
    peaks = []
    for step in (free, small):
        step(x)
        (schedule,) = schedules(step)
        planned = PlannedStep.of(schedule, 0, None)
        assert planned.recomputed == len(schedule.recomputed)
        assert max(live for _, live, _, _ in planned.moments) == schedule.plan.lower_bound
        assert any(gone for _, _, gone, _ in planned.moments) == (step is small)
        assert all(again <= live for _, live, _, again in planned.moments)
        assert any(again for *_, again in planned.moments) == (step is small)
        peaks.append(planned.peak_bytes)
    assert peaks[1] < peaks[0]
    device.close()


def test_no_advice_is_told_and_advice_is_counted() -> None:
    assert (
        "Nothing was found that would be worth a change"
        in checked(render("r", a_run(), some_findings())).text
    )
    several = [replace(ADVICE, title=f"title {number}", where="") for number in range(5)]
    page = checked(render("r", a_run(), some_findings(advice=several)))
    assert page.count("span", **{"class": "badge"}) == 1
    assert page.count("section", **{"class": "card advice"}) == 5
    assert "and 2 more" in page.text
    assert "Where" not in page.text


def test_long_tables_say_what_is_left_out() -> None:
    page = checked(render("r", a_run(), some_findings(kernels=[kernel() for _ in range(120)])))
    assert "and 20 more" in page.text


def test_numbers_in_words() -> None:
    assert [words.axis(value) for value in (0, 999, 25_000, 1.5e6, 2e9, 2.5e-4)] == [
        "0",
        "999",
        "25k",
        "1.5M",
        "2G",
        "2.5e-4",
    ]
    assert [format_duration(value) for value in (1.25, 90, 7320, math.nan)] == [
        "1.2 s",
        "1 min 30 s",
        "2 h 02 min",
        UNKNOWN,
    ]
    assert [format_share(value) for value in (0, 0.012, 0.5, 1.5)] == ["0%", "1.2%", "50%", "150%"]
    assert short_location(ps.__file__ + ":3") == os.path.join("penstock", "__init__.py:3")


@pytest.mark.parametrize("values", [[0.0, 7.3], [5.0], [-3.0, -1.0], [1e-7, 2e-7], [1e20, 3e20], [0.0]])
def test_ticks_are_few_and_around_all_values(values: list[float]) -> None:
    ticks = charts.ticks(values)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= min(values)
    assert ticks[-1] >= max(values)


# Findings of a profile, on disk


def test_findings_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    whole = some_findings(advice=[ADVICE])
    whole.save(tmp_path / "profile.json")
    assert findings.load(tmp_path / "profile.json") == whole
    bare = some_findings(steps=None, certificate=None, planned=None, ceilings={}, samples={})
    bare.save(tmp_path / "profile.json")
    assert findings.load(tmp_path / "profile.json") == bare


def test_long_profiles_keep_the_peaks_of_memory() -> None:
    samples = [(float(at), at % 97, 0) for at in range(5000)]
    thinned = findings._thinned(samples)
    assert 200 <= len(thinned) <= 400
    assert max(thinned, key=lambda sample: sample[1])[1] == 96
    assert thinned == sorted(thinned)
    assert findings._thinned([]) == []
    assert findings._thinned(samples[:3]) == samples[:3]


def test_a_later_version_may_tell_more(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    some_findings().save(path)
    tree = json.loads(path.read_text())
    tree["kernels"][0]["color"] = "blue"
    path.write_text(json.dumps(tree))
    assert findings.load(path) == some_findings()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "is no profile"),
        ("{}", "its format is None"),
        (("kernels", "x"), "damaged"),
        (("kernels", [{}]), "'device' is missing"),
        (("kernels", [3]), "damaged"),
        (("seconds", "long"), "damaged"),
        (("steps", [1]), "damaged"),
        (("certificate", {"arena": 1}), "damaged"),
        (("ceilings", {"host": 3}), "damaged"),
        (("samples", {"host": [[1]]}), "damaged"),
        (("waits", [{"device": "a", "where": "b", "why": "c", "count": "d", "seconds": 1}]), "count is 'd'"),
        (("advice", None), "damaged"),
    ],
)
def test_broken_findings_are_named(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    some_findings().save(path)
    if isinstance(change, str):
        path.write_text(change)
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), change[0]: change[1]}))
    with pytest.raises(ReportError, match=f"profile.json.*{message}"):
        findings.load(path)


# Runs


@pytest.fixture
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host, which compiles nothing, and ceilings that need no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)
    default = ps.default_device()
    ps.use("host")
    yield
    ps.use(default)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "text.txt").write_text(TEXT)
    return Config().changed(TREE).changed({"data": {"path": str(tmp_path / "text.txt")}})


@pytest.mark.usefixtures("_quick")
def test_a_run_profiles_a_few_of_its_steps(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "a <run> & more"
    trainer = TextTrainer(config, run, Silent())
    trainer.fit()
    trainer.report("a <b>sample</b> & ☃")
    kept = findings.load(run / "profile.json")
    assert kept.steps == (4, 5)  # after which it evaluates
    assert kept.kernels
    assert kept.ceilings["host"]["bytes"] == 1e11
    assert kept.certificate == Certificate.of(schedules(trainer._train_step)[0].plan)
    assert kept.certificate.arena_bytes >= kept.certificate.lower_bound > 0
    assert ps.default_device().stream.recorders == ()
    page = checked((run / "report.html").read_text("utf-8"))
    for part in ("a <run> & more", "a <b>sample</b> & ☃", "20 of 20", "clip_norm", "steps 4 to 5"):
        assert part in page.text
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    assert all(0 < line["planned_bytes"] <= line["live_bytes"] for line in lines)


@pytest.mark.slow("-1")
@pytest.mark.parametrize("number", [0, -1])
def test_profiled_steps_give_the_same_bits(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: None)
    default = ps.default_device()
    ps.use(ps.devices()[number])
    try:
        TextTrainer(config, tmp_path / "with", Silent()).fit()
        monkeypatch.setattr(window, "_WARM", -1)
        TextTrainer(config, tmp_path / "without", Silent()).fit()
    finally:
        ps.use(default)
    assert (tmp_path / "with" / "profile.json").exists()
    assert not (tmp_path / "without" / "profile.json").exists()
    assert measured(tmp_path / "with") == measured(tmp_path / "without")
    last, other = (checkpoint.load_last(tmp_path / name)[0].model for name in ("with", "without"))
    assert all((last[name] == other[name]).all() for name in last)


@pytest.mark.slow("30")
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("steps", "every", "seen"),
    [(1, 5, None), (2, 5, (2, 2)), (3, 1, (3, 3)), (30, 100, (4, 6)), (5, 2, (4, 4))],
)
def test_short_runs_profile_what_they_have(
    tmp_path: Path, config: Config, steps: int, every: int, seen: tuple[int, int] | None
) -> None:
    run = tmp_path / "run"
    TextTrainer(config.changed({"run": {"steps": steps, "evaluate_every": every}}), run, Silent()).fit()
    assert (run / "profile.json").exists() == (seen is not None)
    if seen:
        assert findings.load(run / "profile.json").steps == seen
    checked((run / "report.html").read_text("utf-8"))


@pytest.mark.usefixtures("_quick")
def test_a_profile_that_cannot_be_kept_stops_no_run(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a rule divided by nothing")

    monkeypatch.setattr(findings, "of_profile", broken)
    view = Silent()
    assert TextTrainer(config, tmp_path / "run", view).fit()
    assert any("not in the report: a rule divided" in note for note in view.notes)


@pytest.mark.usefixtures("_quick")
def test_a_failure_inside_the_window_leaves_no_profile_on(tmp_path: Path, config: Config) -> None:
    trainer = TextTrainer(config, tmp_path / "run", Silent())
    advance = trainer._advance

    def fails(batches: Any) -> None:
        if trainer.step == 4:
            raise DeviceError("out of order")
        advance(batches)

    trainer._advance = fails  # type: ignore[method-assign]
    with pytest.raises(DeviceError):
        trainer.fit()
    assert ps.default_device().stream.recorders == ()
    assert not (tmp_path / "run" / "profile.json").exists()


@pytest.mark.usefixtures("_quick")
def test_a_resumed_run_keeps_its_findings_until_there_are_new_ones(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    TextTrainer(config.changed({"run": {"steps": 6}}), run, Silent()).fit()
    assert findings.load(run / "profile.json").steps == (4, 5)
    last, _ = checkpoint.load_last(run)
    TextTrainer(config.changed({"run": {"steps": 7}}), run, Silent(), last).fit()  # too short for another
    assert findings.load(run / "profile.json").steps == (4, 5)
    assert "steps 4 to 5" in (run / "report.html").read_text()
    last, _ = checkpoint.load_last(run)
    TextTrainer(config, run, Silent(), last).fit()
    assert findings.load(run / "profile.json").steps == (11, 13)


@pytest.mark.usefixtures("_quick")
def test_a_broken_profile_is_told_when_a_run_goes_on(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    TextTrainer(config.changed({"run": {"steps": 5}}), run, Silent()).fit()
    (run / "profile.json").write_text("{")
    (run / "checkpoints").rename(tmp_path / "kept")
    with pytest.raises(ReportError, match=r"profile\.json is not JSON"):
        report_on(run)
    (tmp_path / "kept").rename(run / "checkpoints")
    view = Silent()
    last, _ = checkpoint.load_last(run)
    assert TextTrainer(config.changed({"run": {"steps": 6}}), run, view, last).fit()
    assert any("profile.json is not JSON" in note for note in view.notes)


@pytest.mark.usefixtures("_quick")
def test_a_page_is_written_again_from_the_folder(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    trainer = TextTrainer(config, run, Silent())
    trainer.fit()
    trainer.report("once upon a time")
    page = (run / "report.html").read_text("utf-8")
    (run / "report.html").unlink()
    result = CliRunner().invoke(app, ["report", str(run)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.output == f"report: {run / 'report.html'}\n"
    assert (run / "report.html").read_text("utf-8") == page


@pytest.mark.usefixtures("_quick")
def test_a_run_of_an_older_version_has_a_page(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    TextTrainer(config, run, Silent()).fit()
    (run / "profile.json").unlink()
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    for line in lines:
        del line["planned_bytes"]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 21, "lo')
    page = checked(report_on(run).read_text("utf-8"))
    assert "There is no profile of this run" in page.text
    assert "20 of 20" in page.text
    last, _ = checkpoint.load_last(run)
    assert TextTrainer(config.changed({"run": {"steps": 22}}), run, Silent(), last).fit()
    assert len(measured(run)) == 22


@pytest.mark.usefixtures("_quick")
def test_what_is_no_run_is_named(tmp_path: Path, config: Config) -> None:
    with pytest.raises(ReportError, match=r"there is no .*nowhere"):
        report_on(tmp_path / "nowhere")
    with pytest.raises(ReportError, match="holds no run"):
        report_on(tmp_path)
    TextTrainer(config.changed({"run": {"steps": 2}}), tmp_path / "run", Silent()).fit()
    (tmp_path / "run" / METRICS).write_text(
        '{"step": "x"}\n{"step": 1, "loss": "low", "seconds": NaN}\nnothing\n'
    )
    checked(report_on(tmp_path / "run").read_text("utf-8"))
    (tmp_path / "run" / "config.toml").write_text("[run")
    with pytest.raises(SettingError, match="is not TOML"):
        report_on(tmp_path / "run")


def test_a_trace_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)
    x = ps.asarray(np.ones((64, 64), np.float32), device="host")
    step = ps.jit(lambda x: ps.exp(x @ x))
    with ps.profile(device="host") as p:
        step(x).numpy()
    p.kernels()  # measures
    p.save_trace(tmp_path / "trace.json")
    path = report_on(tmp_path / "trace.json")
    assert path == tmp_path / "trace.html"
    page = checked(path.read_text("utf-8"))
    assert "matmul" in page.text
    assert page.count("circle", role="button") >= 1
    assert page.count("line", **{"class": "roof"}) == 2
    assert "Memory during the profile" in page.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is not JSON"),
        ("{}", "is no trace of ps.profile"),
        ('{"otherData": {"tool": "another"}}', "is no trace of ps.profile"),
        ('{"otherData": {"tool": "penstock"}}', "damaged"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ReportError, match=message):
        report_on(tmp_path / "trace.json")


def test_only_a_jitted_function_has_plans() -> None:
    step = ps.jit(lambda x: ps.exp(x @ x).sum())
    assert schedules(step) == []
    step(ps.asarray(np.ones((8, 8), np.float32), device="host"))
    step(ps.asarray(np.ones((16, 16), np.float32), device="host"))
    sizes = [plan.arena_bytes for plan in schedules(step)]
    assert len(sizes) == 2
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(TypeError, match="jit has plans"):
        schedules(len)


def test_nothing_is_measured_beyond_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = ps.registry.find("host")
    before = device.limit_bytes
    try:
        device.limit_bytes = "200MiB"
        assert ceilings.Ceilings(device).bandwidth() is None
    finally:
        device.limit_bytes = before


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    opened = chromium.Browser(chromium.required())
    opened.offline()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page of a real run on the default device, with advice of every length."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "text.txt").write_text(TEXT)
    config = Config().changed(TREE).changed({"data": {"path": str(folder / "text.txt")}})
    default = ps.default_device()
    ps.use(ps.devices()[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "_measured", lambda device, what: 3e10 if what == "bytes" else 1e11)
        trainer = TextTrainer(config, folder / ("a-long-name-of-a-run_" * 4), Silent())
        trainer.fit()
        long = replace(
            ADVICE, where="/home/someone/" + "folder/" * 9 + "train.py:123", evidence="many words " * 20
        )
        assert trainer._findings is not None
        trainer._findings = replace(trainer._findings, advice=[ADVICE, long])
        trainer.report("a sample " * 30 + "x" * 300 + ATTACK)
    yield trainer.folder / "report.html"
    ps.use(default)


@pytest.fixture
def page(browser: chromium.Browser, trained: Path) -> Iterator[chromium.Browser]:
    """The page, opened; nothing may go wrong in it, and nothing but the file be asked for."""
    browser.problems.clear()
    browser.requests.clear()
    browser.view(1280, 800)
    browser.open(trained)
    yield browser
    assert browser.problems == []
    assert set(browser.requests) <= {trained.resolve().as_uri()}


def shown(page: chromium.Browser) -> list[str]:
    """The sections that can be seen."""
    expression = "[...document.querySelectorAll('.panel')].filter(p => p.offsetHeight > 0).map(p => p.id)"
    return list(page.ask(expression))


def text_of(page: chromium.Browser, selector: str) -> str:
    return str(page.ask(f"document.querySelector({json.dumps(selector)}).textContent"))


def test_the_memory_tab_shows_the_plan_of_a_step(page: chromium.Browser) -> None:
    page.click('nav a[href="#memory"]')
    rows = page.ask("[...document.querySelectorAll('#predicted tbody tr')].map(row => row.innerText)")
    assert [row.split("\t")[0] for row in rows] == ["peak memory", "time of a step"]
    assert all(len(row.split("\t")) == 3 for row in rows)
    titles = page.ask("[...document.querySelectorAll('#memory h3')].map(title => title.innerText)")
    assert any(str(title).startswith("Temporaries of a step, as planned") for title in titles)


@pytest.mark.slow
def test_every_tab_shows_its_section(page: chromium.Browser) -> None:
    assert shown(page) == ["overview"]
    for name in [*TABS[::-1], *TABS]:
        page.click(f'nav a[href="#{name}"]')
        assert shown(page) == [name]
        assert page.ask("location.hash") == f"#{name}"
        assert page.ask("document.querySelectorAll('[aria-selected=true]').length") == 1
        assert page.ask(f"document.querySelector('#tab-{name}').getAttribute('aria-selected')") == "true"


def test_tabs_follow_the_keyboard_and_links(page: chromium.Browser, trained: Path) -> None:
    page.ask("document.querySelector('nav a').focus()")
    for key, name in (
        ("ArrowRight", "memory"),
        ("ArrowLeft", "overview"),
        ("ArrowLeft", "sample"),
        ("Home", "overview"),
    ):
        page.press(key)
        assert shown(page) == [name]
        assert page.ask("document.activeElement.id") == f"tab-{name}"
    page.click('#overview a[href="#advice"]')
    assert shown(page) == ["advice"]
    page.open(trained, "#kernels")
    assert shown(page) == ["kernels"]
    assert (
        page.ask("new Promise(done => setTimeout(() => done(scrollY), 100))") == 0
    )  # at the head of the page
    page.open(trained, "#nowhere")
    assert shown(page) == ["overview"]


@pytest.mark.slow("True")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("phone", [False, True])
def test_nothing_is_wider_than_the_screen(
    page: chromium.Browser, trained: Path, tmp_path: Path, phone: bool, dark: bool
) -> None:
    width, height = (NARROW, TALL) if phone else (1280, 800)
    page.view(width, height, phone=phone, dark=dark)
    for name in TABS:
        page.open(trained, f"#{name}")
        assert shown(page) == [name]
        # A phone would zoom out to what is too wide, so that the width of the window is no measure.
        assert page.ask("document.scrollingElement.scrollWidth") <= width
        assert page.ask("innerWidth") == width
        image = tmp_path / f"{name}.png"
        page.screenshot(image)
        assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_can_be_read(page: chromium.Browser, dark: bool) -> None:
    page.view(1280, 800, dark=dark)
    page.ask("document.querySelector('tr[data-kernel]').click()")  # the chosen row has colors of its own
    texts = "h1, h3, p, a, dt, dd, th, td, .dim, .tag, b, li, svg text, .badge"
    contrast, where = page.least_contrast(texts)
    assert contrast >= 4.5, where
    lightness = page.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (lightness < 80) == dark


def test_kernels_are_sorted_by_any_column(page: chromium.Browser) -> None:
    page.click('nav a[href="#kernels"]')
    heads = page.ask("[...document.querySelectorAll('.kernels th')].map(th => th.textContent)")
    assert heads == ["Kernel", "Time", "Part", "Of ceiling", "GFLOP/s", "GB/s", "Calls", "Mean"]
    for at, head in enumerate(heads, start=1):
        values = (
            f"[...document.querySelectorAll('.kernels tbody td:nth-child({at})')].map(td => td.dataset.value)"
        )
        whole = page.ask(values)
        assert len(whole) > 3
        for turn in range(2):
            page.click(f".kernels th:nth-child({at}) button")
            got = page.ask(values)
            words_ = head == "Kernel"
            order = [str(item).lower() for item in got] if words_ else [float(item) for item in got]
            assert order == sorted(order, reverse=(turn == 1) == words_)
            assert sorted(got) == sorted(whole)
        said = page.ask(f"document.querySelector('.kernels th:nth-child({at})').getAttribute('aria-sort')")
        assert said == ("descending" if head == "Kernel" else "ascending")
        assert page.ask("document.querySelectorAll('[aria-sort]').length") == 1


def chosen(page: chromium.Browser) -> list[list[str]]:
    return list(
        page.ask("[...document.querySelectorAll('.chosen')].map(e => [e.tagName, e.dataset.kernel]).sort()")
    )


def test_a_dot_and_its_row_are_chosen_together(page: chromium.Browser) -> None:
    page.click('nav a[href="#kernels"]')
    assert chosen(page) == []
    # Small dots are drawn above large dots, so the smallest can be clicked.
    by_size = "sort((a, b) => a.r.baseVal.value - b.r.baseVal.value)"
    dot = page.ask(f"[...document.querySelectorAll('circle.dot')].{by_size}[0].dataset.kernel")
    page.click(f'circle[data-kernel="{dot}"]')
    (row, circle) = chosen(page)
    assert (row[0], circle[0], circle[1]) == ("TR", "circle", row[1])
    assert "GFLOP/s" in text_of(page, ".picked")
    name = text_of(page, f'tr[data-kernel="{row[1]}"] .pick')
    assert text_of(page, ".picked").startswith(name)
    inside = """(() => {
      const row = document.querySelector('tr.chosen').getBoundingClientRect();
      const box = document.querySelector('#kernels .scroll').getBoundingClientRect();
      return row.top >= box.top - 1 && row.top < box.bottom;
    })()"""
    assert page.ask(inside)
    other = next(number for number in ("0", "1") if number != row[1])
    page.click(f'.pick[data-kernel="{other}"]')
    assert [number for _, number in chosen(page)] == [other, other]
    assert (
        page.ask(f"document.querySelector('.pick[data-kernel=\"{other}\"]').getAttribute('aria-pressed')")
        == "true"
    )
    page.ask("document.querySelector('circle.dot').focus()")
    first = page.ask("document.activeElement.dataset.kernel")
    page.press("Enter")
    assert [number for _, number in chosen(page)] == [first, first]


def test_a_chart_shows_the_values_under_the_pointer(page: chromium.Browser) -> None:
    legend = "#overview .legend"
    before = text_of(page, legend)
    assert before.startswith("step 20")
    x, y = page.place("#overview svg.chart")
    page.mouse("mouseMoved", x, y)
    during = text_of(page, legend)
    assert during != before
    assert page.ask("document.querySelectorAll('.reading').length") == 1
    page.mouse("mouseMoved", x - 60, y)
    assert text_of(page, legend) not in (before, during)
    page.mouse("mouseMoved", 3, 3)
    assert text_of(page, legend) == before
    page.ask("document.querySelector('#overview svg.chart').focus()")
    page.press("Home")
    assert text_of(page, legend).startswith("step 1t")
    page.press("ArrowRight")
    assert text_of(page, legend).startswith("step 2t")
    page.press("End")
    assert text_of(page, legend) == before


def test_a_finger_reads_a_chart(page: chromium.Browser, trained: Path) -> None:
    page.view(NARROW, TALL, phone=True)
    page.open(trained)
    x, y = page.place("#overview svg.chart")
    point = [{"x": x, "y": y}]
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=point)
    assert not text_of(page, "#overview .legend").startswith("step 20")
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])


def test_without_scripts_everything_is_there(page: chromium.Browser, trained: Path) -> None:
    page.scripts(False)
    try:
        page.view(NARROW, TALL, phone=True)
        page.open(trained)
        page.scripts(True)  # only to look at it
        assert shown(page) == TABS
        assert page.ask("document.querySelectorAll('[role=tab]').length") == 0
        assert page.ask("document.scrollingElement.scrollWidth") <= NARROW
    finally:
        page.scripts(True)


@pytest.mark.slow
def test_a_printed_page_has_everything(page: chromium.Browser) -> None:
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert shown(page) == TABS
    finally:
        page.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.slow
def test_pages_of_every_kind_work_in_a_browser(page: chromium.Browser, tmp_path: Path) -> None:
    pages = {
        "new": render("new", Run(10, {}, {}, ""), None),
        "trace": render("trace", None, some_findings(steps=None, certificate=None)),
        "single": render("single", a_run([1.0]), some_findings(kernels=[kernel()], advice=[ADVICE])),
        "empty": render(
            "empty", a_run(), some_findings(kernels=[], copies=[], waits=[], memory=[], samples={})
        ),
    }
    page.view(NARROW, TALL, phone=True)
    for name, text in pages.items():
        path = tmp_path / f"{name}.html"
        path.write_text(text, "utf-8")
        page.open(path)
        tabs = page.ask("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href').slice(1))")
        for tab in tabs:
            page.click(f'nav a[href="#{tab}"]')
            assert shown(page) == [tab]
            assert page.ask("document.scrollingElement.scrollWidth") <= NARROW
    page.requests.clear()


@pytest.mark.slow("resnet", "lstm")
@pytest.mark.parametrize("name", trainer_models.RUNS)
@pytest.mark.usefixtures("_quick")
def test_the_report_of_a_model_of_one_s_own_works_in_a_browser(
    tmp_path: Path, browser: chromium.Browser, name: str
) -> None:
    trainer_models.make(name, tmp_path / "run").fit()
    browser.problems.clear()
    browser.requests.clear()
    browser.view(1280, 800)
    browser.open(tmp_path / "run" / "report.html")
    titles = set(browser.ask("[...document.querySelectorAll('#overview h3')].map(title => title.innerText)"))
    own = {"resnet": {"accuracy"}, "lstm": set(), "own": {"size"}}[name]
    assert {"Loss", "Samples per second", "Learning rate", *own} <= titles
    lines_of = "[...document.querySelectorAll('#overview section')].map(part => part.innerText)"
    assert any("Loss" in text and "training" in text for text in browser.ask(lines_of))
    for tab in ("memory", "kernels", "transfers", "advice", "configuration", "overview"):
        browser.click(f'nav a[href="#{tab}"]')
        assert shown(browser) == [tab]
    browser.click('nav a[href="#configuration"]')
    assert {"resnet": "Sequential", "lstm": "Writer", "own": "Pair"}[name] in text_of(
        browser, "#configuration"
    )
    assert browser.problems == []
    assert set(browser.requests) == {(tmp_path / "run" / "report.html").resolve().as_uri()}
