"""`penstock bench`: the statistics, the comparison of runs, the file, and the command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

import penstock as ps
from penstock.bench import (
    QUICK,
    BenchmarkError,
    Ceilings,
    DeviceResults,
    Effort,
    Hardware,
    Interval,
    Measured,
    Results,
    cases_for,
    compare,
    load,
    median_interval,
    ratio_in_turn,
    ratio_of_runs,
    run,
    verdict,
    versions,
)
from penstock.bench import ceilings as ceilings_module
from penstock.bench import sampling as sampling_module
from penstock.bench.case import _FOR_CPU, _FOR_GPU, Case, Sizes, operation, sizes_for
from penstock.bench.operations import operations
from penstock.bench.peer import Torch
from penstock.bench.sampling import measure
from penstock.bench.statistics import MARGIN, median
from penstock.bench.steps import steps
from penstock.bench.view import show_comparison, show_results
from penstock.cli import app
from penstock.errors import DeviceNotFound, PenstockError
from penstock.measuring import workloads
from penstock.nn import GPT
from penstock.runtime import Device

TINY = Sizes(
    items=1 << 20,
    rows=16,
    columns=8,
    products=((8, 8, 8), (8, 4, 6)),
    batch=(3, 4),
    attention=(2, 2, 8, 4),
    embedding=(20, 4, 6),
    copied=1 << 20,
)
SHORT = Effort(rounds=QUICK.rounds, sample_seconds=1e-6, ceiling_seconds=1e-6)
few = settings(max_examples=100, deadline=None)
times = st.lists(st.floats(1e-7, 1e3), min_size=9, max_size=40)


# Statistics


def test_the_median() -> None:
    assert median([3.0, 1.0, 2.0]) == 2
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5
    with pytest.raises(ValueError, match="needs a sample"):
        median([])


@pytest.mark.parametrize(
    ("count", "first", "last"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (20, 6, 15), (30, 10, 21)]
)
def test_the_interval_has_the_ranks_of_the_tables(count: int, first: int, last: int) -> None:
    samples = np.random.default_rng(count).permutation(count) + 1.0
    assert median_interval([*samples]) == Interval(first, (count + 1) / 2, last)


def test_few_samples_say_nothing() -> None:
    for count in range(1, 6):
        assert median_interval([2.0] * count) == Interval(0, 2, math.inf)
    assert ratio_of_runs([1.0] * 3, [1.0] * 30) == Interval(0, 1, math.inf)
    assert ratio_of_runs([1.0] * 30, [1.0] * 3) == Interval(0, 1, math.inf)
    assert verdict(ratio_of_runs([9.0] * 3, [1.0] * 30)) == "same"


@few
@given(st.integers(7, 200), st.sampled_from([0.9, 0.95, 0.975]))
def test_an_interval_is_as_narrow_as_its_confidence_permits(count: int, confidence: float) -> None:
    result = median_interval([*range(1, count + 1)], confidence)
    left_out = round(result.low) - 1
    assert result.high == count - left_out

    def chance(left_out: int) -> float:
        return 1 - 2 * sum(math.comb(count, below) for below in range(left_out + 1)) / 2**count

    assert chance(left_out) >= confidence > chance(left_out + 1)


@few
@given(times, st.randoms())
def test_an_interval_holds_the_median_in_whatever_order_the_samples_came(
    samples: list[float], random: Any
) -> None:
    result = median_interval(samples)
    assert min(samples) <= result.low <= result.middle <= result.high <= max(samples)
    shuffled = [*samples]
    random.shuffle(shuffled)
    assert median_interval(shuffled) == result


@few
@given(times)
def test_one_outlier_changes_no_interval(samples: list[float]) -> None:
    largest = samples.index(max(samples))
    disturbed = [*samples]
    disturbed[largest] = 1e9
    assert median_interval(disturbed) == median_interval(samples)


@few
@given(times, times)
def test_ratios_of_runs_are_turned_round_with_their_sides(samples: list[float], others: list[float]) -> None:
    result, turned = ratio_of_runs(samples, others), ratio_of_runs(others, samples)
    assert result.low <= result.middle <= result.high
    assert result.low == pytest.approx(1 / turned.high)
    assert result.high == pytest.approx(1 / turned.low)
    assert {verdict(result), verdict(turned)} in ({"same"}, {"slower", "faster"})


@few
@given(times)
def test_a_run_is_the_same_as_itself(samples: list[float]) -> None:
    result = ratio_of_runs(samples, samples)
    assert result.low <= 1 <= result.high
    assert result.middle == 1
    assert verdict(result) == "same"


@few
@given(times, st.floats(0.1, 10), st.randoms())
def test_what_slows_both_sides_does_not_change_their_ratio(
    samples: list[float], factor: float, random: Any
) -> None:
    phases = [random.uniform(1, 100) for _ in samples]
    ours = [sample * phase for sample, phase in zip(samples, phases, strict=True)]
    result = ratio_in_turn([item * factor for item in ours], ours)
    assert [*result] == pytest.approx([factor] * 3)


def test_intervals_hold_the_true_median_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        samples = rng.lognormal(0, 0.3, 25)  # of which the true median is 1
        held += median_interval([*samples]).low <= 1 <= median_interval([*samples]).high
    assert held / 1000 >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 1000)


def test_noise_is_called_slower_or_faster_in_few_of_many_comparisons() -> None:
    rng = np.random.default_rng(1)
    said = []
    for _ in range(400):
        runs = [rng.lognormal(0, 0.1, 30) * np.where(rng.random(30) < 0.1, 3, 1) for _ in range(2)]
        said.append(verdict(ratio_of_runs([*runs[0]], [*runs[1]])))
    assert said.count("same") >= 0.95 * 400


def test_a_verdict_needs_the_whole_interval_beyond_the_margin() -> None:
    edge = 1 + MARGIN
    assert verdict(Interval(edge + 0.01, 1.2, 1.3)) == "slower"
    assert verdict(Interval(edge - 0.01, 1.2, 1.3)) == "same"
    assert verdict(Interval(0.7, 0.8, 1 / edge - 0.01)) == "faster"
    assert verdict(Interval(0.7, 0.8, 1 / edge + 0.01)) == "same"


# Comparisons of made-up runs


def made(name: str, seconds: list[float], size: str = "8x8") -> Measured:
    return Measured(name, size, 100.0, 200.0, "device", seconds, [])


def steady(middle: float, spread: float = 0.01, count: int = 30) -> list[float]:
    return [middle * (1 + spread * (at / (count - 1) - 0.5)) for at in range(count)]


def test_slower_faster_and_noisy_cases_are_told_apart() -> None:
    before = [made("a", steady(1.0)), made("b", steady(1.0)), made("c", steady(1.0)), made("d", steady(1.0))]
    now = [
        made("a", steady(1.2)),
        made("b", steady(0.8)),
        made("c", steady(1.2, spread=2.0)),
        made("d", steady(1.04)),  # surely slower, but within the margin
    ]
    result = compare(before, now)
    assert [change.verdict for change in result.changes] == ["slower", "faster", "same", "same"]
    assert [change.label for change in result.slower] == ["a 8x8"]
    slower = result.changes[0]
    assert slower.before.middle == pytest.approx(1)
    assert slower.now.middle == pytest.approx(1.2)
    assert slower.ratio.low < 1.2 < slower.ratio.high
    assert result.only_before == result.only_now == []


def test_cases_that_only_one_run_has_are_named() -> None:
    before = [made("gone", steady(1.0)), made("both", steady(1.0)), made("other", steady(1.0), "4x4")]
    now = [made("other", steady(9.0), "5x5"), made("both", steady(1.0)), made("new", steady(1.0))]
    result = compare(before, now)
    assert [change.label for change in result.changes] == ["both 8x8"]
    assert result.only_before == ["gone 8x8", "other 4x4"]
    assert result.only_now == ["other 5x5", "new 8x8"]
    assert not result.slower


# The file

CEILINGS = Ceilings(moved=1e10, flops=1e11, uploaded=5e9, downloaded=4e9)
HARDWARE = Hardware("cuda:0", "A fast one", "CUDA 13", "gpu", 132, False)


def results(*measured: Measured, hardware: Hardware = HARDWARE) -> Results:
    return Results(versions(), [], [DeviceResults(hardware, CEILINGS, [*measured], ["a 9x9: too large"])])


def test_a_file_has_all_that_was_measured(tmp_path: Path) -> None:
    kept = results(made("a", steady(1.0)), replace(made("b", [1.0, 2.0]), torch_seconds=[3.0, 4.0]))
    kept.save(tmp_path / "base.json")
    assert load(tmp_path / "base.json") == kept
    text = (tmp_path / "base.json").read_text()
    assert '"format": 1' in text
    assert "commit" not in text


def _cut(tree: Any) -> str:
    return json.dumps(tree)[:-20]


def _with(*path: Any, value: Any) -> Callable[[Any], str]:
    def changed(tree: Any) -> str:
        at = tree
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        return json.dumps(tree)

    return changed


def _without(*path: Any) -> Callable[[Any], str]:
    def changed(tree: Any) -> str:
        at = tree
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        return json.dumps(tree)

    return changed


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_cut, "is damaged"),
        (lambda tree: "", "is damaged"),
        (lambda tree: "[1, 2]", "was not written by penstock bench --save"),
        (_with("what", value="something else"), "was not written by penstock bench --save"),
        (_with("format", value=7), "version 7 of the format, and this Penstock reads version 1"),
        (_without("format"), "version None of the format"),
        (_without("devices"), "'devices' is missing"),
        (_with("devices", value=[]), "it has no device"),
        (_with("devices", value=3), "not a list of dict"),
        (_with("devices", 0, "measured", value=["a"]), "not a list of dict"),
        (_without("devices", 0, "measured", 0, "seconds"), "'seconds' is missing"),
        (_with("devices", 0, "measured", 0, "seconds", value=[1, -1]), r"seconds is \[1, -1\]"),
        (_with("devices", 0, "measured", 0, "seconds", value=[1, math.nan]), r"seconds is \[1, nan\]"),
        (_with("devices", 0, "measured", 0, "seconds", value=[]), "a has no times"),
        (_with("devices", 0, "measured", 0, "flops", value="many"), "flops is 'many'"),
        (_with("devices", 0, "measured", 0, "way", value="by sea"), "way is 'by sea'"),
        (_with("devices", 0, "hardware", "compute_units", value="all"), "compute_units is 'all'"),
        (_with("devices", 0, "ceilings", value=None), "is damaged"),
        (_with("versions", value=5), "is damaged"),
        (_with("only", value="xor"), "not a list of str"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(
    tmp_path: Path, damage: Callable[[Any], str], complaint: str
) -> None:
    path = tmp_path / "base.json"
    results(made("a", steady(1.0))).save(path)
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(BenchmarkError, match=complaint) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"base\.json cannot be read: No such file"):
        load(tmp_path / "base.json")
    (tmp_path / "base.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchmarkError, match=r"base\.json is damaged"):
        load(tmp_path / "base.json")


def test_a_file_of_another_device_is_refused() -> None:
    kept = results(made("a", steady(1.0)))
    assert kept.of(replace(HARDWARE, api="CUDA 14", tf32=True), "base.json").hardware == HARDWARE
    for other in (
        replace(HARDWARE, name="cuda:1"),
        replace(HARDWARE, description="A slow one"),
        replace(HARDWARE, compute_units=66),
    ):
        with pytest.raises(
            BenchmarkError, match=r"base\.json was measured on cuda:0 \(A fast one, 132 units\)"
        ):
            kept.of(other, "base.json")


# Cases


@pytest.mark.parametrize("sizes", [_FOR_CPU, _FOR_GPU, TINY])
def test_cases_have_names_of_their_own_and_their_costs(sizes: Sizes) -> None:
    cases = [*operations(sizes), *steps()]
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        assert case.nbytes > 0
        assert case.flops >= 0
        assert (case.flops == 0) == (case.name in ("embedding", "upload", "download"))


def test_gpus_with_memory_get_larger_sizes() -> None:
    can = ps.default_device().capabilities
    assert sizes_for(replace(can, kind="cpu")) == _FOR_CPU
    assert sizes_for(replace(can, kind="gpu", total_bytes=8 << 30)) == _FOR_GPU
    assert sizes_for(replace(can, kind="gpu", total_bytes=1 << 30)) == _FOR_CPU


def test_the_gpt_has_as_many_parameters_as_are_counted() -> None:
    case = next(case for case in steps() if case.name == "gpt-nano")
    model = GPT(2048, 128, 128, 4, 4)
    parameters = sum(parameter.size for parameter in model.parameters())
    assert case.nbytes == 24 * parameters + 8 * 16 * 128
    # Six for each weight and token is the rule of thumb; attention comes on top, and some embeddings do not.
    assert case.flops == pytest.approx(6 * parameters * 16 * 128, rel=0.1)


@pytest.mark.parametrize("case", [*operations(TINY), *steps()[:2]], ids=lambda case: case.name)
def test_every_case_runs_on_a_device_that_is_not_the_default(case: Case) -> None:
    device = Device.over(DRIVERS["host"]())
    call = case.penstock(device)
    for _ in range(3):
        call()
    device.sync()
    device.close()


def test_operations_compute_what_pytorch_computes() -> None:
    pytest.importorskip("torch")
    device = ps.default_device()
    peer = Torch(device)
    for case in operations(TINY):
        ours: Any = case.penstock(device)()
        theirs: Any = case.torch(peer)()
        for array, other in zip(
            *([x] if not isinstance(x, list) else x for x in (ours, theirs)), strict=True
        ):
            np.testing.assert_allclose(np.asarray(array), np.asarray(other), rtol=1e-4, atol=1e-5)


def test_steps_run_in_pytorch() -> None:
    pytest.importorskip("torch").manual_seed(0)
    peer = Torch(ps.default_device())
    for case in steps():
        call = case.torch(peer)
        first: Any = call()
        for _ in range(3):
            last: Any = call()
        assert last.item() < first.item()


def test_pytorch_is_set_against_the_same_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        @staticmethod
        def is_available() -> bool:
            return there

    class Module:
        __version__ = "2.0"
        cuda = Cuda

    monkeypatch.setitem(sys.modules, "torch", Module)  # type: ignore[arg-type]
    host = Device.over(DRIVERS["host"]())

    def like(**changes: Any) -> Device:
        return Device(changes.pop("name"), replace(host.capabilities, **changes), lambda: host.driver)

    there = True
    assert Torch(host).where == "cpu"
    assert Torch(like(name="opencl:0", kind="cpu", language="opencl")).where == "cpu"
    assert Torch(like(name="cuda:1", kind="gpu", language="cuda")).where == "cuda:1"
    with pytest.raises(BenchmarkError, match="against CUDA devices and CPUs, and webgpu:0 is NumPy"):
        Torch(like(name="webgpu:0", kind="gpu", language="wgsl"))
    there = False
    with pytest.raises(BenchmarkError, match=r"PyTorch 2\.0 has no CUDA here"):
        Torch(like(name="cuda:0", kind="gpu", language="cuda"))


# Ceilings


@pytest.fixture
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_MOVED", {"cpu": 1 << 16, "gpu": 1 << 16})
    monkeypatch.setattr(workloads, "_TRANSFERRED", 1 << 16)
    monkeypatch.setattr(workloads, "_LENGTH", 16)
    monkeypatch.setattr(workloads, "_LONG", 0.0)


@pytest.mark.usefixtures("_small_ceilings")
def test_ceilings_are_measured_on_every_kind_of_device(device: Device) -> None:
    before = device.driver.allocated_bytes
    result = ceilings_module.measure_ceilings(device, 1e-6)
    assert min(result.moved, result.flops, result.uploaded, result.downloaded) > 0
    device.cleanup()
    assert device.driver.allocated_bytes <= before + (1 << 20)  # nothing large stays


def test_a_case_is_set_against_the_ceiling_that_it_meets_first() -> None:
    assert CEILINGS.least_seconds(1e11, 1e9, "device") == 1
    assert CEILINGS.bound(1e11, 1e9, "device") == "matmul"
    assert CEILINGS.least_seconds(1e9, 2e10, "device") == 2
    assert CEILINGS.bound(1e9, 2e10, "device") == "memory"
    assert CEILINGS.least_seconds(0, 5e9, "upload") == 1
    assert CEILINGS.least_seconds(0, 4e9, "download") == 1
    assert CEILINGS.bound(0, 4e9, "download") == "copy"


# Rounds


class FakePeer:
    """Stands for PyTorch."""

    def sync(self) -> None:
        pass


def noted(name: str, log: list[str]) -> Case:
    def noting(side: str) -> Callable[[Any], Callable[[], None]]:
        return lambda _: lambda: log.append(f"{name} {side}")

    return Case(name, "1", 1, 1, noting("ours"), noting("theirs"))


def without_repeats(log: list[str]) -> list[str]:
    return [item for at, item in enumerate(log) if at == 0 or item != log[at - 1]]


def test_rounds_go_over_all_cases_and_sides_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_module, "_PAUSE", 0)
    log: list[str] = []
    told: list[str] = []
    device = Device.over(DRIVERS["host"]())
    cases = [noted("a", log), noted("b", log)]
    measured, left_out = measure(cases, device, FakePeer(), SHORT, told.append)  # type: ignore[arg-type]
    turn = ["a ours", "a theirs", "b ours", "b theirs"]
    assert without_repeats(log) == turn * (1 + SHORT.rounds)
    assert told[:3] == ["preparing a 1", "preparing b 1", f"round 1 of {SHORT.rounds}"]
    assert [len(case.seconds) for case in measured] == [SHORT.rounds] * 2
    assert [len(case.torch_seconds) for case in measured] == [SHORT.rounds] * 2
    assert not left_out


@pytest.mark.slow
def test_a_case_that_takes_long_gets_the_least_rounds_and_the_others_all() -> None:
    device = Device.over(DRIVERS["host"]())
    effort = replace(SHORT, rounds=SHORT.rounds + 4)
    log: list[str] = []
    measured, _ = measure([noted("a", log)], device, None, effort)
    assert len(measured[0].seconds) == effort.rounds
    assert measured[0].torch_seconds == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_module, "_MOST_SECONDS", 0.0)
        measured, _ = measure([noted("a", log)], device, None, effort)
    assert len(measured[0].seconds) == SHORT.rounds


def test_cases_without_memory_are_left_out_and_named() -> None:
    device = Device.over(DRIVERS["host"]())
    device.limit_bytes = 1 << 16

    def wide(count: int) -> Case:
        shape = (count, 1)
        return operation(
            "wide",
            str(count),
            1,
            1,
            lambda: [np.ones(shape, np.float32)],
            lambda x: x + 1,
            lambda torch, x: x,
        )

    measured, left_out = measure([wide(16), wide(1 << 20), wide(32)], device, None, SHORT)
    assert [case.label for case in measured] == ["wide 16", "wide 32"]
    (said,) = left_out
    assert said.startswith("wide 1048576: ")
    assert "cannot give" in said


# What is shown


def shown(show: Callable[[Console], None], width: int = 100) -> str:
    console = Console(width=width, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    show(console)
    console.file.close()
    return console.export_text()


def test_results_are_shown_with_rates_and_shares() -> None:
    measured = [
        Measured("a", "8x8", 1e9, 4e9, "device", [1.0] * 9, [2.0] * 9),
        Measured("b", "16", 0, 1e3, "upload", [2.5e-5] * 9, [2.5e-5] * 9),
    ]
    text = shown(
        lambda console: show_results(console, DeviceResults(HARDWARE, CEILINGS, measured, ["c: why"]))
    )
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert "cuda:0 (A fast one, 132 units) through CUDA 13" in text
    assert "10 GB/s in memory, 100 GFLOP/s in a matmul, 5 GB/s up, 4 GB/s down" in text
    assert ["a", "8x8", "1.00", "s", "1.00", "-", "1.00", "1.00", "4.00", "40%", "memory"] in lines
    assert ["b", "16", "25.0", "µs", "25.0", "-", "25.0", "-", "0.0400", "<1%", "copy"] in lines
    assert ["left", "out:", "c:", "why"] in lines
    assert ["a", "8x8", "1.00", "s", "2.00", "s", "2.00", "2.00", "-", "2.00"] in lines


def test_a_comparison_says_what_got_slower() -> None:
    before = [made("a", steady(1e-3)), made("b", steady(1.0)), made("gone", steady(1.0))]
    now = [made("a", steady(2e-3)), made("b", steady(1.0)), made("new", steady(1.0))]
    text = shown(lambda console: show_comparison(console, compare(before, now), "base.json"))
    lines = [line.split() for line in text.splitlines()]
    slower = next(line for line in lines if line[:1] == ["a"])
    assert slower[:7] == ["a", "8x8", "1.00", "ms", "2.00", "ms", "2.00"]
    assert slower[-1] == "slower"
    assert next(line for line in lines if line[:1] == ["b"])[-1] != "slower"
    assert "only in base.json: gone 8x8" in text
    assert "only in this run: new 8x8" in text
    assert "1 of 2 got slower, by more than noise and 5%" in text
    text = shown(lambda console: show_comparison(console, compare(before, before), "base.json"))
    assert "nothing got slower by more than noise and 5%" in text


# The command


@pytest.fixture
def _in_folder(_small_ceilings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.bench.running.QUICK", SHORT)  # as many rounds, in less time
    default = ps.default_device()
    yield
    assert ps.default_device() is default  # which a run borrows


def penstock_bench(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["bench", "--quick", *arguments])
    if isinstance(result.exception, PenstockError):
        raise result.exception
    return result


def changed_times(factor: float) -> None:
    """Make the times of base.json so many times as long."""
    kept = load("base.json")
    (device,) = kept.devices
    measured = [replace(case, seconds=[factor * time for time in case.seconds]) for case in device.measured]
    replace(kept, devices=[replace(device, measured=measured)]).save("base.json")


@pytest.mark.usefixtures("_in_folder")
def test_a_run_is_kept_and_compared() -> None:
    result = penstock_bench("--device", "host", "--only", "xor", "--save", "base.json")
    assert result.exit_code == 0, result.output
    assert "ceilings: " in result.output
    assert "xor 4x2-8-1" in result.output
    kept = load("base.json")
    assert kept.only == ["xor"]
    (device,) = kept.devices
    assert device.hardware.name == "host"
    assert [case.label for case in device.measured] == ["xor 4x2-8-1"]
    assert len(device.measured[0].seconds) == QUICK.rounds

    changed_times(1e6)
    result = penstock_bench("--compare", "base.json")  # the file says which device and which cases
    assert result.exit_code == 0, result.output
    assert "faster" in result.output
    assert "nothing got slower" in result.output
    assert "only in" not in result.output

    changed_times(1e-12)
    result = penstock_bench("--compare", "base.json", "--save", "now.json")
    assert result.exit_code == 1
    assert "1 of 1 got slower" in result.output
    (device,) = load("now.json").devices
    assert len(device.measured[0].seconds) == 2 * QUICK.rounds  # looked at twice


@pytest.mark.usefixtures("_in_folder")
def test_what_seems_slower_only_once_is_not_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Hardware.of(next(device for device in ps.devices() if device.name == "host"))
    replace(results(made("xor", steady(1.0), "4x2-8-1"), hardware=host), only=["xor"]).save("base.json")
    looks = [steady(2.0), steady(1.0)]  # the machine was busy during the first

    def faked(*_: Any) -> tuple[list[Measured], list[str]]:
        return [made("xor", looks.pop(0), "4x2-8-1")], []

    monkeypatch.setattr("penstock.bench.running.measure", faked)
    result = penstock_bench("--compare", "base.json")
    assert not looks
    assert result.exit_code == 0, result.output
    assert "nothing got slower" in result.output


@pytest.mark.usefixtures("_in_folder")
def test_cases_of_only_one_side_are_named_by_the_command() -> None:
    host = Hardware.of(next(device for device in ps.devices() if device.name == "host"))
    kept = results(made("sinh", steady(1.0)), made("xor", steady(1.0)), hardware=host)
    replace(kept, only=["sinh", "xor"]).save("base.json")
    result = penstock_bench("--compare", "base.json")
    assert result.exit_code == 0, result.output
    assert "only in base.json: sinh 8x8, xor 8x8" in result.output
    assert "only in this run: xor 4x2-8-1" in result.output
    replace(kept, only=["sinh"]).save("base.json")
    with pytest.raises(BenchmarkError, match="has only sinh, and no such case is left"):
        penstock_bench("--compare", "base.json")
    result = penstock_bench("--compare", "base.json", "--only", "xor")
    assert "only in base.json: xor 8x8\n" in result.output  # others were not asked for


@pytest.mark.usefixtures("_in_folder")
def test_orders_that_cannot_be_carried_out_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.running.run", None)  # nothing is measured
    with pytest.raises(BenchmarkError, match="no case 'sofmax'; the cases are elementwise, sum, "):
        penstock_bench("--only", "sofmax")
    with pytest.raises(BenchmarkError, match="--against knows torch, and 'jax' was given"):
        penstock_bench("--against", "jax")
    with pytest.raises(DeviceNotFound, match="no device 'abacus'"):
        penstock_bench("--device", "abacus")
    with pytest.raises(BenchmarkError, match=r"base\.json cannot be read"):
        penstock_bench("--compare", "base.json")
    results(hardware=replace(HARDWARE, name="abacus")).save("base.json")
    with pytest.raises(
        BenchmarkError, match=r"base\.json was measured on abacus .*; there is no device 'abacus'"
    ):
        penstock_bench("--compare", "base.json")
    with pytest.raises(BenchmarkError, match="cannot be compared with host"):
        penstock_bench("--compare", "base.json", "--device", "host")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BenchmarkError, match="needs PyTorch, which cannot be loaded here"):
        penstock_bench("--against", "torch")


@pytest.mark.slow
def test_a_pipe_gets_plain_lines_and_errors_are_one_line() -> None:
    command = [sys.executable, "-m", "penstock", "bench", "--quick", "--device", "host"]
    result = subprocess.run([*command, "--only", "xor"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert "of ceiling" in result.stdout
    result = subprocess.run([*command, "--only", "xorr"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("penstock: there is no case 'xorr'")
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("_in_folder")
def test_several_devices_and_a_case_by_its_size() -> None:
    result = penstock_bench(
        "--device", "host", "--device", "opencl", "--only", "matmul 64", "--save", "a.json"
    )
    assert result.exit_code == 0, result.output
    kept = load("a.json")
    assert [device.hardware.name.split(":")[0] for device in kept.devices] == ["host", "opencl"]
    assert [case.label for device in kept.devices for case in device.measured] == ["matmul 64"] * 2


@pytest.mark.usefixtures("_in_folder")
def test_pytorch_in_turn() -> None:
    pytest.importorskip("torch")
    result = penstock_bench("--against", "torch", "--only", "xor", "--device", "opencl", "--save", "a.json")
    assert result.exit_code == 0, result.output
    assert "against PyTorch; above 1, Penstock is faster" in result.output
    kept = load("a.json")
    assert "torch" in kept.versions
    assert len(kept.devices[0].measured[0].torch_seconds) == QUICK.rounds


def test_all_cases_of_a_device_are_run_by_default() -> None:
    names = {case.name for case in cases_for(ps.default_device())}
    assert {
        "elementwise",
        "softmax",
        "matmul",
        "attention",
        "upload",
        "download",
        "xor",
        "mlp",
        "gpt-nano",
    } <= names


@pytest.mark.usefixtures("_small_ceilings")
def test_no_case_computes_faster_than_the_ceiling() -> None:
    result = run(Device.over(DRIVERS["host"]()), ["xor", "matmul 256"], effort=SHORT)
    assert [case.label for case in result.measured] == ["matmul 256", "xor 4x2-8-1"]
    assert all(case.flops / min(case.seconds) <= result.ceilings.flops for case in result.measured)
