"""Advice: programs with a single flaw get exactly that advice; programs without flaws get none."""

from __future__ import annotations

import json
import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, WEBGPU_KINDS
from typer.testing import CliRunner

import penstock as ps
from penstock import Device, cli, nn, optim, tuning_cache
from penstock.advising import computing, holding, judging, moving
from penstock.advising.judging import advice, findings
from penstock.advising.text import rendered
from penstock.callsite import user_call
from penstock.errors import NoEvidence, SettingError
from penstock.measuring import ceilings
from penstock.memory.trace import Action, Block
from penstock.profiling import lines
from penstock.profiling.evidence import (
    Evidence,
    Keeping,
    KernelTime,
    Missing,
    Waiting,
    misses_within,
)
from penstock.profiling.lines import Handover, Runs, Transfers
from penstock.profiling.records import OTHER

sys.path += [str(Path(__file__).parent.parent / name) for name in ("benchmarks", "examples")]
import classifier
import sine
import xor

from flaws import FLAWS, Flaw

OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))
FAR = "opencl-device"  # with memory of its own, for the flaws of copying
RATES = {
    "bytes": 3e10,
    "float32": 2e11,
    "float64": 1e11,
    "bfloat16": 2e11,
    "launches": 4e4,
    "recorded operations": 6e4,
}
# What does not depend on how fast a device is, or on what it has kernels for.
ANYWHERE = ("small-operations", "repeated-upload", "growing-memory")
COPYING = ("round-trip", "repeated-upload", "hidden-wait", "pool-misses")
# Reading many small results is a hidden wait first, where a device computes them.
FAR_FROM_HOST = tuple(name for name in ANYWHERE if name != "small-operations")
CASES = [
    *((OPENCL, flaw) for flaw in FLAWS),
    *((FAR, flaw) for flaw in FLAWS if flaw.name in COPYING),
    *(("host", flaw) for flaw in FLAWS if flaw.name in ANYWHERE),
    *((kind, flaw) for kind in WEBGPU_KINDS for flaw in FLAWS if flaw.name in FAR_FROM_HOST),
]
QUICK = ("changing-shapes", "repeated-upload", "growing-memory")  # others are judged by records there
TRIES = 4  # others may take the machine away for a while, and then some times are theirs


@pytest.fixture(autouse=True)
def rates(optimized: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rates that need no measuring, and are not those of a machine that others use too."""
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: RATES[what])
    monkeypatch.setattr(tuning_cache, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that records and launches so slowly that its share of the time is plain on a busy machine."""
    slow = RATES | {"launches": 40.0, "recorded operations": 60.0}
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: slow[what])


def profiled(flaw: Flaw, side: str, kind: str) -> tuple[ps.profiling.profiles.Profile, Evidence]:
    device = Device.over(DRIVERS[kind](), flaw.settings if side == "flawed" else None)
    loop = getattr(flaw, side)(device)
    device.sync()
    with ps.profile(device=device) as p:
        kept = loop()
    del kept
    (evidence,) = p.evidence()
    device.close()
    return p, evidence


@pytest.mark.alone
@pytest.mark.slow(FAR, "webgpu", *(f"{flaw.name}-{OPENCL}" for flaw in FLAWS if flaw.name not in QUICK))
@pytest.mark.parametrize(("kind", "flaw"), CASES, ids=[f"{flaw.name}-{kind}" for kind, flaw in CASES])
def test_a_flaw_is_named_with_its_line_and_mending_it_helps(kind: str, flaw: Flaw) -> None:
    for left in reversed(range(TRIES)):
        _, flawed = profiled(flaw, "flawed", kind)
        given = advice([flawed])
        if [piece.flaw for piece in given] == [flaw.name] or not left:
            break
    assert [piece.flaw for piece in given] == [flaw.name]
    (piece,) = given
    path, _, line = piece.where.rpartition(":")
    if flaw.name != "idle-memory":  # which no single line is to blame for
        assert linecache.getline(path, int(line)).strip().endswith(f"flaw: {flaw.name}")
    assert piece.title
    assert piece.evidence
    assert piece.change
    assert piece.gain
    if piece.seconds is None:
        assert piece.nbytes
    else:
        assert 0 < piece.seconds <= flawed.seconds
    for left in reversed(range(TRIES)):
        _, mended = profiled(flaw, "mended", kind)
        if not advice([mended]) or not left:
            break
    assert advice([mended]) == []
    # What the advice promises, counted and not timed.
    assert flaw.count(mended) <= 0.75 * flaw.count(flawed), flaw.counted


# Programs without a flaw


def network(device: Device) -> None:
    model = nn.Sequential(nn.Linear(128, 256, device=device), nn.GELU(), nn.Linear(256, 10, device=device))
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    random = np.random.default_rng(1)
    pictures, kinds = random.standard_normal((2048, 128), dtype=np.float32), random.integers(0, 10, 2048)
    with ps.data.Prefetch(ps.data.ArrayBatches(pictures, kinds, batch=128, seed=1), device) as batches:
        for number in range(100):
            loss = step(*next(batches))
            if number % 25 == 24:
                loss.item()


def transformer(device: Device) -> None:
    model = nn.GPT(64, context=32, width=32, layers=2, heads=2, device=device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
    schedule = optim.cosine(rate=1e-3, steps=60, warmup=5)

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    tokens = np.random.default_rng(1).integers(0, 64, 5000)
    total = 0.0
    with ps.data.Prefetch(ps.data.TextBatches(tokens, batch=8, context=32, seed=1), device) as batches:
        for number in range(60):
            optimizer.lr = schedule(number)
            loss = step(next(batches))
            if number % 20 == 19:
                total += loss.item()
    model.generate(tokens[:4], 30, seed=1)


@pytest.mark.alone
@pytest.mark.slow("main0", "main1")
@pytest.mark.parametrize(
    "program",
    [
        network,
        pytest.param(transformer, marks=pytest.mark.slow),
        classifier.main,
        sine.main,
        xor.main,
    ],
)
def test_a_program_without_a_flaw_is_left_alone(
    program: Callable[[Device], object], capsys: pytest.CaptureFixture[str]
) -> None:
    for left in reversed(range(TRIES)):
        device = Device.over(DRIVERS[OPENCL]())
        with ps.profile(device=device) as p:  # from the first compilation on, as `penstock advise` sees it
            program(device)
        given = ps.advise(p)
        device.close()
        if not given or not left:
            break
    assert given == []


def test_a_profile_of_nothing_has_no_advice() -> None:
    with ps.profile() as p:
        pass
    assert ps.advise(p) == []


# Traces


@pytest.mark.alone
def test_a_saved_trace_has_the_same_advice(tmp_path: Path) -> None:
    flaw = next(flaw for flaw in FLAWS if flaw.name == "small-operations")
    p, _ = profiled(flaw, "flawed", OPENCL)
    expected = ps.advise(p)
    p.save_trace(tmp_path / "trace.json")
    assert ps.advise(tmp_path / "trace.json") == expected
    assert ps.advise(str(tmp_path / "trace.json")) == expected


@pytest.mark.alone
@pytest.mark.usefixtures("slow_host")
def test_what_a_trace_does_not_tell_is_measured_on_the_device_of_its_name(tmp_path: Path) -> None:
    device = ps.registry.find("opencl")
    flaw = next(flaw for flaw in FLAWS if flaw.name == "unjitted-step")
    loop = flaw.flawed(device)
    with ps.profile(tmp_path / "trace.json", device=device):
        loop()
    (kept,) = json.loads((tmp_path / "trace.json").read_text())["otherData"]["evidence"]
    assert kept["rates"] == {}
    assert [piece.flaw for piece in ps.advise(tmp_path / "trace.json")] == ["unjitted-step"]


@pytest.mark.parametrize("text", ["", "{}", '{"otherData": {"evidence": [1]}}', '{"otherData": {}}', "[]"])
def test_what_is_no_trace_is_an_error_that_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(NoEvidence, match="is no trace"):
        ps.advise(path)
    with pytest.raises(NoEvidence, match="there is no file"):
        ps.advise(tmp_path / "other.json")


# The command


SCRIPT = """
import sys
import numpy as np
import penstock as ps

rows, scale = ps.asarray(np.ones((400, 64), np.float32)), ps.asarray(np.ones(64, np.float32))
found = [ps.sum(rows[number] * scale).item() for number in range(400)]
print("arguments", *sys.argv[1:], __name__)
"""
END = "sys.exit(int(sys.argv[1]))\n"
# Many small operations; on a busy machine the first of each row may take more of the time.
FLAW = re.compile(r"\[(small-operations|changing-shapes)\]")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["advise", *words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.alone
@pytest.mark.usefixtures("slow_host")
def test_a_script_is_run_with_its_arguments_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.argv), list(sys.path)
    for words in (["rows.py"], ["--", "python", "rows.py"], ["-m", "rows"], ["--", "python3", "-m", "rows"]):
        status, text = run(*words, "--lr", "1")
        assert status == 0
        assert "arguments --lr 1 __main__" in text
        assert FLAW.search(text)
        assert "rows.py:7" in text
    assert (sys.argv, sys.path) == before


@pytest.mark.alone
@pytest.mark.usefixtures("slow_host")
def test_the_exit_status_is_that_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(SCRIPT + END)
    for status in (0, 3):
        exit_status, text = run(str(script), str(status))
        assert exit_status == status
        assert FLAW.search(text)


@pytest.mark.alone
def test_a_trace_is_read_and_nothing_is_said_of_a_sound_one(tmp_path: Path) -> None:
    with ps.profile(tmp_path / "trace.json"):
        ps.sum(ps.ones(10)).item()
    status, text = run(str(tmp_path / "trace.json"))
    assert status == 0
    assert "nothing to advise" in text


@pytest.mark.parametrize("words", [["there_is_none.py"], ["--", "python"], ["--", "python", "-c", "1"]])
def test_what_cannot_be_run_is_an_error(words: list[str]) -> None:
    with pytest.raises(SettingError):
        run(*words)


def test_text_has_everything_in_the_width_that_is_asked_for() -> None:
    piece = ps.Advice(
        "flaw", "A [title]", "evidence " * 20, "a.py:1", "change", "about 1 ms of 2 ms", 1e-3, None
    )
    text = rendered([piece, replace(piece, where="")], width=60)
    assert "1. A [title] [flaw]" in text
    assert text.count("a.py:1") == 1
    assert max(map(len, text.splitlines())) <= 60


# Rules, on records


def nothing(**changes: Any) -> Evidence:
    """A device of which there is nothing to say, in a second of which it computed for half."""
    plain = Evidence(
        device="gpu:0",
        description="",
        kind="gpu",
        units=100,
        fast_float16=False,
        seconds=1.0,
        busy_seconds=0.5,
        peak_bytes=1 << 30,
        taken_bytes=1 << 30,
        total_bytes=8 << 30,
        limit_bytes=None,
        pool_hits=1000,
        pool_misses=10,
        given_back_bytes=0,
        tight_misses=0,
        rates=dict(RATES),
    )
    return replace(plain, **changes)


def names(evidence: Evidence) -> list[str]:
    return [finding.advice.flaw for finding in findings(evidence)]


def test_no_evidence_is_no_flaw() -> None:
    assert names(nothing()) == []
    assert names(nothing(seconds=0.0, busy_seconds=None, peak_bytes=0, taken_bytes=0, rates={})) == []


def test_changing_shapes_by_the_share_of_first_runs() -> None:
    jit = Runs("a.py:1", "tensor/jit.py:__call__", "jit", runs=40, fresh=20, built=20, build_seconds=0.4)
    jit.costly_seconds = 0.5
    assert names(nothing(runs=[jit])) == ["changing-shapes"]
    (finding,) = computing.changing_shapes(nothing(runs=[jit]))
    assert finding.advice.seconds == pytest.approx(0.5 * 16 / 20)
    assert names(nothing(runs=[replace(jit, fresh=9)])) == []  # a few lengths
    assert names(nothing(runs=[replace(jit, runs=400)])) == []
    assert names(nothing(runs=[replace(jit, costly_seconds=0.01)])) == []
    assert names(nothing(runs=[replace(jit, called="models/decoders.py:_run")])) == []  # the package's own
    growing = replace(jit, how="program", nodes=4000, fewest=10, most=400)  # no shape, but a chain
    assert "changing-shapes" not in names(nothing(runs=[growing]))


def test_halves_are_advised_where_the_device_has_them_and_measures_faster() -> None:
    kernel = KernelTime("matmul_1", "float32[8, 8]", "device", 10, 0.4, 0.01, "float32")
    run = Runs("a.py:1", "tensor/jit.py:__call__", "jit", runs=10, products={"float32": 10**9})
    fast = RATES | {"bfloat16": 8e11}
    evidence = nothing(kernels=[kernel], runs=[run], fast_float16=True, rates=fast)
    (finding,) = findings(evidence)
    assert (finding.advice.flaw, finding.advice.where) == ("half-precision", "a.py:1")
    assert finding.advice.seconds == pytest.approx(0.3)
    assert names(replace(evidence, fast_float16=False)) == []
    assert names(replace(evidence, rates=RATES | {"bfloat16": 2.5e11})) == []
    assert names(replace(evidence, kernels=[replace(kernel, seconds=0.1)])) == []


def test_small_batches_by_the_least_time_of_a_gpus_kernels() -> None:
    run = Runs("a.py:1", "tensor/jit.py:__call__", "jit", runs=100, launches=10_000, operations=10**9)
    run.seconds = 0.02
    kernel = KernelTime("map_1", "", "device", 10_000, 0.05, 5e-6, "")
    fed = Transfers("a.py:2", "tensor/creation.py:asarray", "float32", calls=100, seconds=0.01)
    evidence = nothing(runs=[run], kernels=[kernel], transfers=[fed])
    assert names(evidence) == ["small-batches"]  # 5 ms of work, and 50 ms of launches
    assert names(replace(evidence, runs=[replace(run, operations=2 * 10**9)])) == []
    assert names(replace(evidence, transfers=[])) == []  # all of the data is in each batch
    assert names(replace(evidence, transfers=[replace(fed, repeated=80)])) == []
    assert names(replace(evidence, rates={})) == []


def test_a_wait_costs_what_device_and_host_could_have_done_at_once() -> None:
    wait = Waiting("a.py:1", "tensor/core.py:item", "download", 100, 0.5, 0.2)
    (finding,) = findings(nothing(waits=[wait]))
    assert (finding.advice.flaw, finding.advice.seconds) == ("hidden-wait", 0.2)
    (shared,) = findings(nothing(waits=[wait], kind="cpu", units=2))  # the same cores
    assert shared.advice.seconds == pytest.approx(0.1)
    for other in (
        replace(wait, count=9),
        replace(wait, idle_seconds=0.04),
        replace(wait, seconds=0.04),
        replace(wait, why="back-pressure"),
        replace(wait, called="models/decoders.py:_run"),
    ):
        assert names(nothing(waits=[other])) == []


def test_late_data_is_hidden_only_behind_what_else_the_thread_does() -> None:
    sent = Transfers("a.py:1", "tensor/creation.py:asarray", "float32", calls=100, nbytes=10**8)
    sent = replace(sent, seconds=0.1, made_seconds=0.3, least_seconds=3e-3)
    (finding,) = findings(nothing(transfers=[sent]))
    assert (finding.advice.flaw, finding.advice.seconds) == ("late-data", pytest.approx(0.4))
    assert names(nothing(transfers=[sent], busy_seconds=0.98)) == []  # the device is never idle
    assert names(nothing(transfers=[sent], busy_seconds=None)) == []  # nobody knows
    for other in (
        replace(sent, made_seconds=0.88),  # there is nothing to hide it behind
        replace(sent, least_seconds=5e-4),
        replace(sent, beside=100),
        replace(sent, calls=9),
    ):
        assert names(nothing(transfers=[other])) == []


def test_waits_for_other_ranks() -> None:
    several = nothing(ranks=4, exchanged_seconds=0.5, waited_for_ranks=0.3, sent_bytes=1 << 20)
    (finding,) = findings(several)
    assert (finding.advice.flaw, finding.advice.seconds) == ("exposed-exchange", pytest.approx(0.3))
    assert names(replace(several, waited_for_ranks=0.001)) == []  # hidden
    assert names(nothing()) == []


def test_ranks_that_others_wait_for() -> None:
    several = nothing(ranks=4, exchanged_seconds=0.5, waited_for_ranks=0.3, sent_bytes=1 << 20)
    (finding,) = findings(replace(several, rank_waits=[0.3, 0.28, 0.01, 0.35]))
    assert (finding.advice.flaw, finding.advice.seconds) == ("straggler", pytest.approx(0.29))
    assert finding.advice.title == "The other ranks wait for rank 2"
    both = findings(replace(several, rank_waits=[0.3, 0.28, 0.1, 0.35]))
    assert [(each.advice.flaw, each.advice.seconds) for each in both] == [
        ("straggler", pytest.approx(0.2)),
        ("exposed-exchange", pytest.approx(0.1)),
    ]
    assert names(replace(several, rank_waits=[0.3, 0.3, 0.3, 0.3])) == ["exposed-exchange"]


def test_one_line_has_one_flaw_the_cause_before_what_follows() -> None:
    back = Transfers("a.py:2", "tensor/creation.py:asarray", "float32", calls=20, nbytes=10**7, returned=20)
    back = replace(back, returned_seconds=0.2, source="a.py:1")
    wait = Waiting("a.py:1", "tensor/core.py:numpy", "download", 20, 0.5, 0.2)
    assert names(nothing(transfers=[back], waits=[wait])) == ["round-trip"]
    assert names(nothing(transfers=[back], waits=[replace(wait, where="a.py:9")])) == [
        "round-trip",
        "hidden-wait",
    ]


def test_the_greatest_share_comes_first_and_several_devices_are_named() -> None:
    small = Waiting("a.py:1", "tensor/core.py:item", "sync", 100, 0.5, 0.1)
    large = replace(small, where="a.py:2", idle_seconds=0.3)
    first, second = nothing(waits=[small]), nothing(device="gpu:1", waits=[large])
    assert [piece.where for piece in advice([first, second])] == ["a.py:2", "a.py:1"]
    assert advice([first, second])[0].evidence.startswith("gpu:1: ")
    assert not advice([second])[0].evidence.startswith("gpu:1")


def test_lines_of_this_package_are_not_blamed() -> None:
    package = str(Path(judging.__file__).parent / "judging.py")
    wait = Waiting(f"{package}:1", "tensor/core.py:item", "sync", 100, 0.5, 0.5)
    assert names(nothing(waits=[wait])) == []
    assert names(nothing(waits=[replace(wait, where="(MainThread)")])) == []


def test_a_chain_is_cut_only_where_operations_would_join() -> None:
    cut = Handover("a.py:1", "a.py:2", count=10, nbytes=3 * 10**9)
    (finding,) = findings(nothing(handovers=[cut]))
    assert (finding.advice.flaw, finding.advice.where) == ("forced-realization", "a.py:1")
    assert names(nothing(handovers=[cut], kind="host")) == []
    assert names(nothing(handovers=[replace(cut, nbytes=10**7)])) == []


def test_pool_misses_have_their_cause() -> None:
    miss = Missing("a.py:1", count=500, nbytes=10**9, seconds=0.2, sizes=400)
    evidence = nothing(pool_hits=100, pool_misses=500, misses=[miss])
    assert "400 different sizes" in findings(evidence)[0].advice.evidence
    kept = Keeping("a.py:1", blocks=490, nbytes=10**9, quarters=(490, 0, 0, 0))
    same = replace(evidence, misses=[replace(miss, sizes=1)])
    assert "nothing of it was let go" in findings(replace(same, keeping=[kept]))[0].advice.evidence
    assert not findings(same)  # as much was in use at once
    assert "PENSTOCK_POOL_BYTES" in findings(replace(same, given_back_bytes=10**9))[0].advice.change
    assert names(replace(evidence, pool_hits=1000)) == []
    assert names(replace(evidence, pool_misses=50)) == []
    assert names(replace(evidence, misses=[replace(miss, seconds=0.01)])) == []


def test_growth_is_what_every_quarter_of_the_runs_adds_to() -> None:
    kept = Keeping("a.py:1", blocks=100, nbytes=1 << 29, quarters=(25, 25, 25, 25))
    (finding,) = holding.growing_memory(nothing(keeping=[kept]))
    assert finding.advice.nbytes == (1 << 29) - (1 << 29) // 100
    for other in (
        replace(kept, quarters=(100, 0, 0, 0)),  # made at the beginning, and held
        replace(kept, blocks=20, quarters=(5, 5, 5, 5)),
        replace(kept, nbytes=1 << 20),
    ):
        assert names(nothing(keeping=[other])) == []
    model = Runs("a.py:1", "nn/module.py:__init__", "numpy", runs=100)
    assert names(nothing(keeping=[kept], runs=[model])) == []


def test_idle_memory_has_its_price() -> None:
    miss = Missing("a.py:1", count=10, nbytes=10**9, seconds=0.01, sizes=10)
    evidence = nothing(taken_bytes=2 << 30, tight_misses=7, misses=[miss])
    (finding,) = findings(evidence)
    assert (finding.advice.flaw, finding.advice.nbytes) == ("idle-memory", 1 << 30)
    assert "7 more allocations (7 ms)" in finding.advice.gain
    assert '"1024MiB"' in finding.advice.change
    assert names(replace(evidence, limit_bytes=1 << 30)) == []
    assert names(replace(evidence, taken_bytes=(1 << 30) + (32 << 20))) == []


def test_checkpoints_are_for_those_who_are_short_of_memory() -> None:
    run = Runs("a.py:1", "tensor/jit.py:__call__", "jit", runs=10, kept_bytes=1 << 29)
    evidence = nothing(runs=[run], limit_bytes=(1 << 30) + 1000)
    (finding,) = findings(evidence)
    assert (finding.advice.flaw, finding.advice.nbytes) == ("tight-memory", 1 << 29)
    assert names(replace(evidence, limit_bytes=None)) == []
    assert names(replace(evidence, runs=[replace(run, kept_bytes=1 << 20)])) == []


def test_steps_of_the_host_and_wide_numbers() -> None:
    run = Runs("a.py:1", "tensor/jit.py:__call__", "jit", runs=20, seconds=0.3, host_steps={"sort int64": 20})
    kernel = KernelTime("numpy sort", "", "host", 20, 0.2, 0.01, "")
    assert names(nothing(runs=[run], kernels=[kernel])) == ["host-operation"]
    wide = replace(run, host_steps={"sort float64": 20})
    assert names(nothing(runs=[wide], kernels=[kernel])) == ["wide-dtype"]  # the reason why there is none
    assert names(nothing(runs=[replace(run, host_steps={"sort int64": 5})], kernels=[kernel])) == []
    product = KernelTime("matmul_1", "float64[8, 8]", "device", 20, 0.2, 0.01, "float64")
    (finding,) = computing.wide_dtypes(nothing(kernels=[product]))
    assert finding.advice.seconds == pytest.approx(0.1)  # by the measured rates
    user = Runs("a.py:3", "tensor/jit.py:__call__", "jit", runs=20, wide_bytes=10**6)
    (finding,) = computing.wide_dtypes(nothing(kernels=[replace(product, product="")], runs=[run, user]))
    assert finding.advice.seconds == pytest.approx(0.1)  # half of the bytes
    assert finding.advice.where == "a.py:3"  # as they were sent before


def test_a_loop_that_records_hides_behind_a_busy_device() -> None:
    run = Runs("a.py:1", "optim/optimizers.py:step", "program", runs=100, nodes=30_000)
    assert names(nothing(runs=[run])) == ["unjitted-step"]  # a quarter of a second
    assert names(nothing(runs=[run], busy_seconds=0.95)) == []
    assert names(nothing(runs=[replace(run, nodes=1700)])) == []
    assert names(nothing(runs=[replace(run, runs=4)])) == []
    sent = Keeping("a.py:2", blocks=100, nbytes=1 << 29, quarters=(25, 25, 25, 25))  # held by what is pending
    fed = Transfers("a.py:2", "tensor/creation.py:asarray", "float32", calls=100)
    assert names(nothing(runs=[run], transfers=[fed], keeping=[sent])) == ["unjitted-step"]


def test_every_rule_is_there_once() -> None:
    modules = (computing, moving, holding)
    public = [
        rule
        for module in modules
        for name, rule in vars(module).items()
        if getattr(rule, "__module__", "") == module.__name__ and not name.startswith("_")
    ]
    assert sorted(rule.__name__ for rule in judging.RULES) == sorted(rule.__name__ for rule in public)


# What the rules judge by


def blocks(*steps: tuple[int, int, bool]) -> list[Action]:
    """Actions by serial, bytes, and whether a block goes out."""
    return [Action(0.0, out, Block(serial, nbytes, nbytes, "a.py:1")) for serial, nbytes, out in steps]


def test_a_tight_pool_is_played_from_what_happened() -> None:
    once = [(1, 100, True), (1, 100, False)]
    assert misses_within(blocks(*once * 5), 100) == 1  # the same block every time
    phases = [(1, 100, True), (1, 100, False), (2, 60, True), (2, 60, False)]
    assert misses_within(blocks(*phases * 5), 160) == misses_within(blocks(*phases * 5), None) == 2
    assert misses_within(blocks(*phases * 5), 100) == 10
    assert misses_within([], 0) == 0


@pytest.mark.parametrize(
    ("made", "alike"),
    [
        (lambda x: x, True),
        (lambda x: np.clip(x, -1, 1), True),
        (lambda x: 3 - 2 * x, True),
        (lambda x: np.exp(x), True),
        (lambda x: x[::-1], False),
        (lambda x: np.zeros_like(x), False),
        (lambda x: np.random.default_rng(2).standard_normal(x.shape), False),
    ],
)
def test_values_that_were_made_of_others_are_known_again(
    made: Callable[[np.ndarray], np.ndarray], alike: bool
) -> None:
    x = np.random.default_rng(1).standard_normal(10_000)
    first, second = lines._sampled(x), lines._sampled(np.asarray(made(x), np.float32))
    assert first is not None
    assert second is not None
    assert lines._alike(first, second) is alike


def test_the_next_batch_is_no_round_trip() -> None:
    device = Device.over(DRIVERS[OPENCL]())
    double, random = ps.jit(lambda x: x * 2), np.random.default_rng(1)
    with ps.profile(device=device) as p:
        for _ in range(12):
            double(ps.asarray(random.standard_normal((64, 128)), device=device)).numpy()
    (evidence,) = p.evidence()
    (sent,) = evidence.transfers
    assert (sent.calls, sent.returned, sent.repeated, sent.dtype) == (12, 0, 0, "float64")
    device.close()


def test_several_values_of_one_line_are_told_apart() -> None:
    device = Device.over(DRIVERS[OPENCL]())
    drawn = [np.random.default_rng(seed).standard_normal((64, 128)).astype(np.float32) for seed in range(3)]
    with ps.profile(device=device) as p:
        values = [ps.asarray(array, device=device).numpy() for array in drawn]
        for array in reversed(values):
            ps.asarray(array + 1, device=device)
        ps.asarray(drawn[0] * -1, device=device)  # what was read has come back already
    first, *_ = p.evidence()[0].transfers
    assert (first.calls, first.returned, first.repeated) == (3, 0, 0)
    assert [transfer.returned for transfer in p.evidence()[0].transfers] == [0, 3, 0]
    device.close()


def test_lines_are_told_apart_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MAX_LINES", 2)
    device = Device.over(DRIVERS[OPENCL]())
    code = "\n".join(f"ps.sum(ps.asarray(np.ones({n + 1}), device=device)).item()" for n in range(6))
    with ps.profile(device=device) as p:
        exec(compile(code, "many.py", "exec"), {"ps": ps, "np": np, "device": device})
    (evidence,) = p.evidence()
    assert [run.where for run in evidence.runs] == ["many.py:1", "many.py:2", OTHER]
    assert [run.runs for run in evidence.runs] == [1, 1, 4]
    assert sum(transfer.calls for transfer in evidence.transfers) == 6
    device.close()


def test_a_line_is_known_with_what_it_called() -> None:
    where, called = user_call()
    assert where.startswith(__file__)
    assert called == ""
    device = Device.over(DRIVERS[OPENCL]())
    with ps.profile(device=device) as p:
        float(ps.sum(ps.ones(10, device=device)))
    (run,) = p.evidence()[0].runs
    assert run.called == "tensor/core.py:__float__"
    device.close()
