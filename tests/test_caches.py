"""Caches on disk: private to the user, optional, and remeasured when they may be wrong."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock import cache, cli, files
from penstock.cache import CacheFolder
from penstock.cli import training
from penstock.data import ByteTokenizer, CharTokenizer, DataError, TokenStore
from penstock.dispatch.placements import Placement
from penstock.dispatch.predictions import Predictions
from penstock.drivers.binaries import Binaries
from penstock.drivers.host import HostDriver, host_capabilities
from penstock.errors import PenstockWarning, SettingError
from penstock.files import atomic_file, remove_leftovers
from penstock.measuring import ceilings, quiet
from penstock.measuring import rates as machine
from penstock.runtime import Device
from penstock.tuning_cache import TuningCache

TEXT = "the quick brown fox jumps over the lazy dog; the early bird catches the worm.\n" * 20
SETTINGS = """
[model]
context = 8
width = 8
layers = 1
heads = 2
[data]
tokenizer = "characters"
batch = 2
path = "text.txt"
[run]
steps = 3
evaluate_batches = 1
"""
COPIES = ((1e3, 1e-6),)
RATES = machine.Rates(1e-5, 1e-6, ((64.0, 1e-6), (1e6, 1e-4)), ((32.0, 1e-6),), 1e-9, COPIES, COPIES)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder, on an idle machine, before any warning."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_cleaned", set())
    monkeypatch.setattr(training, "_SAMPLE", 2)
    Path("text.txt").write_text(TEXT)
    Path("c.toml").write_text(SETTINGS)
    default = ps.default_device()
    yield tmp_path / "cache" / "penstock"
    ps.use(default)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Folders of the user alone


def test_every_folder_is_the_users_alone(place: Path) -> None:
    TuningCache("a device").put("problem", "ab")
    Binaries().put("source", b"code")
    TokenStore.open(TEXT, ByteTokenizer())
    folders = {place, place / "kernels", place / "tokens"}
    assert {path for path in place.rglob("*") if path.is_dir()} | {place} == folders
    assert {mode(folder) for folder in folders} == {0o700}


def test_a_folder_that_others_could_read_is_closed_to_them(place: Path) -> None:
    (place / "kernels").mkdir(parents=True, mode=0o755)
    os.chmod(place, 0o777)
    Binaries().put("source", b"code")
    assert Binaries().get("source") == b"code"
    assert mode(place) == mode(place / "kernels") == 0o700


@pytest.mark.parametrize("whose", ["root", "part"])
def test_what_belongs_to_another_user_is_not_used(
    whose: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TuningCache("a device").put("problem", "ab")
    Binaries().put("source", b"code")
    store = TokenStore.open(TEXT, ByteTokenizer())
    real, theirs = os.stat, place if whose == "root" else place / "kernels"

    def foreign(path: Any, **how: Any) -> Any:
        about = real(path, **how)
        if Path(path) != theirs:
            return about
        return SimpleNamespace(st_uid=about.st_uid + 1, st_mode=about.st_mode)

    monkeypatch.setattr(cache.os, "stat", foreign)
    with pytest.warns(PenstockWarning, match="it belongs to another user.; going on without it"):
        assert Binaries().get("source") is None
    Binaries().put("other", b"code")  # it is said once
    assert not list((place / "kernels").glob("*.part"))
    assert Binaries().get("other") is None
    assert TuningCache("a device").get("problem") == (None if whose == "root" else "ab")
    if whose == "root":
        again = TokenStore.open(TEXT, ByteTokenizer())
        assert again.path is None
        np.testing.assert_array_equal(again.train, store.train)
        assert again.key == store.key


def test_a_file_of_another_user_is_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Binaries().put("source", b"code")
    real = os.fstat

    def foreign(handle: int) -> Any:
        about = real(handle)
        return SimpleNamespace(st_uid=about.st_uid + 1, st_mode=about.st_mode, st_size=about.st_size)

    monkeypatch.setattr(cache.os, "fstat", foreign)
    assert Binaries().get("source") is None


def test_a_link_in_the_cache_is_not_followed(place: Path) -> None:
    Binaries().put("source", b"code")
    (path,) = (place / "kernels").iterdir()
    path.rename(place / "elsewhere")
    path.symlink_to(place / "elsewhere")
    assert Binaries().get("source") is None
    path.unlink()
    os.mkfifo(path)
    assert Binaries().get("source") is None


# A cache that cannot be written


def test_a_run_goes_on_without_a_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)
    whole = CliRunner().invoke(cli.app, ["train", "--config", "c.toml", "--device", "host", "--out", "with"])
    assert whole.exit_code == 0
    Path("blocked").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("blocked").absolute()))
    order = ["train", "--config", "c.toml", "--device", "host", "--out", "without"]
    with pytest.warns(PenstockWarning, match="going on without it") as said:
        result = CliRunner().invoke(cli.app, order)
    assert result.exit_code == 0, result.output
    assert len(said) == 1
    losses = [
        [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        for run in ("with", "without")
    ]
    assert losses[0] == losses[1]


def test_a_full_disk_leaves_tokens_in_memory(place: Path) -> None:
    resource = pytest.importorskip("resource")  # which Windows lacks
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.warns(PenstockWarning, match=r"File too large.*going on without it"):
            store = TokenStore.open(TEXT, ByteTokenizer(), validation=0)
        TuningCache("a device").put("problem", "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert bytes(store.train.tolist()).decode() == TEXT
    assert not store.train.flags.writeable
    assert not [path for path in place.rglob("*") if path.is_file()]
    with pytest.raises(DataError, match="could not be written"):
        TokenStore.open(TEXT, ByteTokenizer(), cache=Path("text.txt") / "cache")


# Tokens


def test_every_altered_token_is_noticed(place: Path) -> None:
    for tokenizer in (ByteTokenizer(), CharTokenizer(TEXT)):
        store = TokenStore.open(TEXT, tokenizer, validation=0)
        assert store.path is not None
        wanted, whole = store.train.copy(), store.path.read_bytes()
        for at in (-1, len(whole) // 2, len(whole) - 2 * len(wanted)):
            altered = bytearray(whole)
            altered[at] ^= 1
            Path("altered").write_bytes(altered)
            Path("altered").replace(store.path)  # as a new file: the old one is still mapped
            again = TokenStore.open(TEXT, tokenizer, validation=0)
            np.testing.assert_array_equal(again.train, wanted)
            assert store.path.read_bytes() == whole


# Atomic writes, and leftovers of killed processes


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_a_write_that_fails_leaves_what_was_there(error: BaseException) -> None:
    Path("file").write_text("old")
    before = sorted(os.listdir())

    def write() -> None:
        with atomic_file(Path("file")) as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)):
        write()
    assert sorted(os.listdir()) == before
    assert Path("file").read_text() == "old"


def test_leftovers_of_killed_processes_are_removed(place: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    old, recent = time.time() - 3600, time.time()
    ancient = time.time() - 3 * 24 * 3600
    left = {
        f"a.tokens.{ended.pid}-0123abcd.part": (old, False),
        f"b.bin.{ended.pid}-0123abcd.part": (recent, True),  # another machine may have such a process
        f"c.json.{os.getpid()}-0123abcd.part": (old, True),
        f"d.json.{os.getpid()}-0123abcd.part": (ancient, False),
        "tmpabcd_123.json": (ancient, False),
        "tmpabcd_124.json": (recent, True),
        "mine.part": (ancient, True),
        "choices-1.json": (ancient, True),
    }
    for folder in (place, place / "kernels", place / "tokens"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, (when, _) in left.items():
            (folder / name).touch()
            os.utime(folder / name, (when, when))
    TuningCache("a device").get("problem")
    Binaries().get("source")
    TokenStore.open(TEXT, ByteTokenizer())
    kept = {name for name, (_, stays) in left.items() if stays}
    for folder in (place, place / "kernels", place / "tokens"):
        assert {path.name for path in folder.iterdir()} & set(left) == kept
    remove_leftovers(Path("nowhere"))
    assert files.UNFINISHED == ".part"


# Measurements


class Counter:
    """A measurement that improves, on a machine that is busy during the first few."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, busy: int) -> None:
        self.count = 0
        monkeypatch.setattr(quiet.Watch, "busy", lambda watch: self.count <= busy)

    def __call__(self, *_: object) -> float:
        self.count += 1
        return float(min(self.count, 4))


@pytest.mark.parametrize(
    ("busy", "tries", "rate", "still"), [(0, 1, 1.0, True), (1, 2, 2.0, True), (9, 3, 3.0, False)]
)
def test_a_busy_machine_is_measured_again_and_the_best_counts(
    busy: int, tries: int, rate: float, still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(monkeypatch, busy)
    assert quiet.measure_quietly(counter, max) == (rate, still)
    assert counter.count == tries


def test_others_on_the_machine_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(quiet, "perf_counter", lambda: clock["now"])

    class Times(tuple):  # as psutil's: a tuple with names
        idle = iowait = guest = guest_nice = 0.0

    monkeypatch.setattr(quiet.psutil, "cpu_times", lambda: Times((clock["busy"],)))
    monkeypatch.setattr(quiet.psutil, "cpu_count", lambda: 2)
    process = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=clock["own"], system=0.0))
    monkeypatch.setattr(quiet.psutil, "Process", lambda: process)
    for busy, own, wanted in ((1.0, 1.0, False), (2.0, 2.0, False), (1.9, 1.0, True), (0.2, 0.0, False)):
        clock.update(now=0.0, busy=0.0, own=0.0)
        watch = quiet.Watch()
        clock.update(now=1.0, busy=busy, own=own)
        assert watch.busy() is wanted
    clock.update(now=1.001)
    assert not quiet.Watch().busy()  # too short to tell


def test_the_real_clock_of_others_goes_on() -> None:
    first = quiet._others_seconds()
    assert quiet._others_seconds() >= first - 1.0


def test_rates_of_a_busy_machine_are_measured_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch, busy=9)
    monkeypatch.setattr(ceilings, "_measured", counter)
    now = time.time()
    monkeypatch.setattr(quiet, "time", lambda: now)
    device = Device("host", host_capabilities(), HostDriver)
    assert ceilings.Ceilings(device).bandwidth() == 3
    assert ceilings.Ceilings(device).bandwidth() == 3
    assert counter.count == 3
    now += 3700
    assert ceilings.Ceilings(device).bandwidth(measure=False) == 3
    assert ceilings.Ceilings(device).bandwidth() == 4
    now += 1e9
    monkeypatch.setattr(quiet.Watch, "busy", lambda watch: False)
    before = counter.count
    assert ceilings.Ceilings(device).bandwidth() == 4
    assert counter.count == before + 1, "the last one was not quiet either"
    now += 1e9
    assert ceilings.Ceilings(device).bandwidth() == 4
    assert counter.count == before + 1


def test_a_ceiling_that_is_exceeded_is_measured_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet.Watch, "busy", lambda watch: False)
    asked: list[str] = []
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: float(asked.append(what) or len(asked)))
    device = Device("host", host_capabilities(), HostDriver)
    result = ceilings.Ceilings(device)
    result.exceeded("float32", 9.0)  # there is no earlier rate that could be wrong
    assert result.operations("float32") == 1
    result.exceeded("int8", 1.2)  # rates of integers are compared with float32
    assert asked == ["float32"]
    for _ in range(2):
        result.exceeded("float32", 9.0)
        assert result.operations("float32") == 2
    assert asked == ["float32"] * 2
    assert ceilings.Ceilings(device).operations("float32", measure=False) == 2


def test_the_rates_of_auto_too(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([(2.0, True), (1.0, True), (1.5, True), (0.5, False), (9.0, False)])
    state: dict[str, Any] = {"now": time.time()}

    def measured(device: Device, seconds: float) -> machine.Rates:
        factor, state["busy"] = next(results)
        return machine.Rates.parsed(json.loads(json.dumps(machine.asdict(RATES))) | {"program": factor})

    monkeypatch.setattr(machine, "measured", measured)
    monkeypatch.setattr(quiet.Watch, "busy", lambda watch: state["busy"])
    monkeypatch.setattr(quiet, "time", lambda: state["now"])
    device = Device("host", host_capabilities(), HostDriver)
    assert machine.machine_rates([device])[device].program == 1.0  # three on a busy machine, and the best
    assert machine.machine_rates([device])[device].program == 1.0
    state["now"] += 3700
    assert machine.machine_rates([device])[device].program == 0.5
    state["now"] += 3700
    assert machine.machine_rates([device])[device].program == 0.5  # a quiet one stays
    assert machine.machine_rates([device], remeasure=True)[device].program == 9.0


def test_the_shorter_of_two_times_counts_for_each_size() -> None:
    sums, downloads = ((64.0, 5e-7), (1e3, 2e-6)), ((1e3, 1e-7),)
    other = machine.Rates(2e-5, 5e-7, sums, ((32.0, 2e-6),), 1e-9, COPIES, downloads)
    best = RATES.best(other)
    assert best == other.best(RATES)
    assert (best.program, best.step) == (1e-5, 5e-7)
    assert best.sums == ((64.0, 5e-7), (1e3, 2e-6), (1e6, 1e-4))
    assert (best.products, best.downloads) == (((32.0, 1e-6),), ((1e3, 1e-7),))


# Predictions


def test_what_is_far_off_again_and_again_is_noticed() -> None:
    first, second = (Device(name, host_capabilities(), HostDriver) for name in ("a", "b"))
    predictions = Predictions()
    for measured in (5e-2, 6e-2, 2e-2, 5e-2, 5e-2):
        predictions.add(first, 1e-2, measured)
        predictions.add(second, 1e-6, 5e-5)  # too short to tell
        predictions.add(second, 1e-6, float("inf"))
        assert predictions.far_off() == []
    predictions.add(first, 1e-2, 9e-2)
    assert predictions.far_off() == [first]
    for _ in range(3):
        predictions.add(first, 1e-2, 1e-2)
        predictions.add(second, 1e-1, 1e-3)
    assert predictions.far_off() == [second]


def test_auto_measures_again_once_and_programs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.dispatch import placing
    from penstock.dispatch.device import AutoDevice

    members = [Device(name, host_capabilities(), HostDriver) for name in ("one", "two")]
    auto = AutoDevice(members)
    dispatcher = auto.dispatcher
    assert dispatcher is not None
    dispatcher._rates = dict.fromkeys(members, RATES)
    again: list[list[Device]] = []

    def rates(devices: list[Device], again_: bool = False, **how: bool) -> dict[Device, machine.Rates]:
        again.append(devices)
        return dict.fromkeys(devices, RATES)

    monkeypatch.setattr(placing, "machine_rates", rates)
    monkeypatch.setattr(placing, "seconds_of", lambda ways, *_: [1.0, 2.0])
    rng = np.random.default_rng(1)
    for length in (70_000, 80_000, 90_000, 100_000):
        x = ps.asarray(rng.random(length).astype(np.float32), device=auto)
        step = ps.jit(lambda x: x + x)
        for _ in range(2):
            y = step(x)
        assert auto.holder(y._node.value) is members[0]
    assert again == [members]
    auto.close()


def test_a_remembered_cut_is_known_by_its_name() -> None:
    members = [Device(name, host_capabilities(), HostDriver) for name in ("opencl:0", "host")]
    placement = Placement(members[0], members[1], 7)
    assert Placement.parsed(placement.name, members) == placement
    for name in ("host", "x for 7 operations, then host", "host for -1 operations, then host", ""):
        assert Placement.parsed(name, members) is None


# The command


def test_a_command_forgets_and_measures_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 2e9)
    monkeypatch.setattr(machine, "measured", lambda device, seconds: RATES)
    TuningCache("a library").put("problem", "ab")
    result = CliRunner().invoke(cli.app, ["devices", "host", "--measure"])
    assert result.exit_code == 0, result.output
    assert "host: 2 GB/s, 2 GFLOP/s in float32, 10 µs for a small program" in result.output
    assert TuningCache("a library").get("problem") is None
    host = ps.registry.find("host")
    assert ceilings.Ceilings(host).bandwidth(measure=False) == 2e9
    assert machine.machine_rates([host])[host] == RATES
    result = CliRunner().invoke(cli.app, ["devices", "--measure", "--check"])
    assert isinstance(result.exception, SettingError)


def test_a_folder_that_was_given_is_used_as_it_is() -> None:
    Path("shared").mkdir(mode=0o755)
    os.chmod("shared", 0o775)
    TokenStore.open(TEXT, ByteTokenizer(), cache="shared")
    assert mode(Path("shared")) == 0o775
    with CacheFolder(Path("shared"), private=False).writing("x") as file:
        file.write(b"y")
    assert CacheFolder(Path("shared"), private=False).read("x") == b"y"
