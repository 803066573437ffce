"""Several ranks: collectives, and training whose bits do not depend on how many there are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import rank_programs
from conftest import until

import penstock as ps
from penstock.cli.launching import _without_devices
from penstock.collectives.communicator import Communicator, Given
from penstock.collectives.engine import DeviceRow, Move, tree_sum
from penstock.collectives.local import DelayedEngine, LocalEngine, Room
from penstock.collectives.world import communicator
from penstock.distributed.buckets import buckets
from penstock.distributed.shares import part_of
from penstock.drivers.driver import Event, Queue
from penstock.drivers.host import HostDriver
from penstock.errors import SettingError
from penstock.plan.order import Work
from penstock.plan.overlap import overlapped, starts_early, waits_late
from penstock.registry import find
from penstock.runtime import Device
from penstock.train.scaling import parse_rate, predicted

PROGRAMS = Path(rank_programs.__file__)
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"


def started(count: int, program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that ran as several ranks."""
    command = [sys.executable, str(PROGRAMS), program, json.dumps({"device": "host", **options})]
    launcher = [MPIEXEC, "-n", str(count)] if count > 1 else []
    return subprocess.run(launcher + command, capture_output=True, text=True, timeout=300, check=False)


def result(count: int, program: str, **options: Any) -> dict[str, Any]:
    """What rank 0 printed."""
    done = started(count, program, **options)
    assert done.returncode == 0, done.stderr
    known: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return known


def on_ranks(count: int, function: Callable[[Device], Any], engine: Any = None) -> list[Any]:
    """The results of a function on threads that are ranks, each with a host device of its own."""
    devices = [Device(f"host{number}", find("host").capabilities, HostDriver) for number in range(count)]
    return ps.distributed.run_local(function, devices, engine)


# Parts


def test_a_tree_sums_halves() -> None:
    rows = np.random.default_rng(0).standard_normal((8, 100)).astype(np.float32)
    a, b, c, d, e, f, g, h = rows
    assert np.array_equal(tree_sum(rows), ((a + b) + (c + d)) + ((e + f) + (g + h)))


@pytest.mark.parametrize("length", [8, 20, 23])
def test_shards_have_every_sample_once(length: int) -> None:
    batch = np.arange(length), {"weights": np.arange(length) * 2.0}, "name"
    parts = [part_of(batch, number, 8) for number in range(8)]
    assert np.array_equal(np.concatenate([part[0] for part in parts]), batch[0])
    assert np.array_equal(np.concatenate([part[1]["weights"] for part in parts]), batch[1]["weights"])
    assert {part[2] for part in parts} == {"name"}
    assert max(len(part[0]) for part in parts) - min(len(part[0]) for part in parts) <= 1


def test_buckets_hold_every_value() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (5,), (), (2, 2, 2))]
    values = {at: ps.asarray(array) for at, array in enumerate(arrays)}
    rows = buckets(values, 30, 4)
    assert len(rows) > 1
    assert [at for bucket in rows for at in bucket.positions] == [3, 2, 1, 0]
    unpacked = {at: value for row in rows for at, value in row.unpacked(row.packed(values)).items()}
    for at, array in enumerate(arrays):
        assert np.array_equal(unpacked[at].numpy(), array)


def test_waits_come_last() -> None:
    # 0 and 2 compute; 1 starts an exchange of 0's result, 3 waits for it, 4 uses it; 5 does not.
    steps = [
        Work((), (0,)),
        Work((0,), (1,)),
        Work((), (2,)),
        Work((1,), (3,)),
        Work((3, 2), (4,)),
        Work((2,), (5,)),
    ]
    assert waits_late([0, 1, 3, 2, 4, 5], steps, {3}) == [0, 1, 2, 5, 3, 4]


def test_waits_come_in_the_order_of_starts() -> None:
    # 0 and 1 start exchanges, 2 and 3 wait for them, and 4 and 5 use their results.
    steps = [
        Work((), (0,)),
        Work((0,), (1,)),
        Work((0,), (2,)),
        Work((1,), (3,)),
        Work((2,), (4,)),
        Work((3,), (5,)),
    ]
    assert waits_late([0, 1, 3, 5, 2, 4], steps, {2, 3}) == [0, 1, 2, 4, 3, 5]


def test_starts_come_early() -> None:
    # 0, 1 and 2 follow one another; 3 computes from 0 what 4 packs and 5 sends, and 6 from 1 what 7 sends.
    steps = [
        Work((), (0,)),
        Work((0,), (1,)),
        Work((1,), (2,)),
        Work((0,), (3,)),
        Work((3,), (4,)),
        Work((4,), (5,)),
        Work((1,), (6,)),
        Work((6, 5), (7,)),
    ]
    order = [0, 1, 2, 6, 3, 4, 5, 7]
    assert starts_early(order, steps, frozenset({2}), {5, 7}) == [0, 3, 4, 5, 1, 6, 7, 2]
    assert starts_early(order, steps, frozenset({2, 3}), {5, 7}) == [0, 1, 2, 6, 3, 4, 5, 7]  # 3 is a result


@pytest.mark.parametrize("seed", range(20))
def test_any_order_stays_valid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps: list[Work] = []
    starts, waits = list[int](), set[int]()
    for number in range(40):
        reads = set(rng.integers(0, number, 2).tolist()) if number else set()
        if number > 5 and rng.random() < 0.2:
            starts.append(number)
            reads |= set(starts[-2:-1])  # its token is an input of the next
        elif starts and rng.random() < 0.2:
            waits.add(number)
            reads = {starts[int(rng.integers(len(starts)))]}
        steps.append(Work(tuple(reads), (number,)))
    kept = frozenset(rng.integers(0, 40, 5).tolist())
    fetches = set(starts[::2]) if seed % 2 else set()
    order = overlapped(range(40), steps, kept, set(starts) - fetches, fetches, waits)
    assert sorted(order) == list(range(40))
    for number, step in enumerate(steps):
        assert all(order.index(value) < order.index(number) for value in step.reads)


def test_the_ranks_of_a_command_do_not_start_more() -> None:
    given = ["train", "--devices", "4", "--steps", "3", "--devices=2"]
    assert _without_devices(given) == ["train", "--steps", "3"]


def test_more_ranks_than_shards_are_refused() -> None:
    with pytest.raises(SettingError, match="power of 2"):
        ps.distributed.DataParallel(ps.optim.SGD([ps.nn.Parameter(ps.zeros(2))], lr=1.0), shards=3)


def test_links_are_in_bits_or_bytes() -> None:
    assert parse_rate("400Gb/s") == parse_rate("50 GB/s") == 50e9
    for wrong in ("400", "fast", "0Gb/s", "1.2.3GB/s"):
        with pytest.raises(SettingError, match="400Gb/s"):
            parse_rate(wrong)


def test_what_ranks_wait_for() -> None:
    """Of 40 MB of gradients, which 2 ranks send once, and a step of 90 ms, of which 60 ms can hide that."""

    class Plan:
        unlimited_seconds = 0.09
        unlimited_bytes = 300_000_000

    plan: Any = Plan()
    fast = predicted({0: plan, 3: plan}, 4, 10_000_000, 2, parse_rate("8Gb/s"))
    assert fast.sent_bytes == 40_000_000
    assert fast.exchange_seconds == pytest.approx(40e-3 + 2 * 9 * 5e-6)
    assert fast.exposed_seconds == pytest.approx(fast.exchange_seconds / 9)  # the last of 9 buckets
    slow = predicted({0: plan}, 4, 10_000_000, 2, parse_rate("1.6Gb/s"))
    assert slow.exposed_seconds == pytest.approx(slow.exchange_seconds - 60e-3)
    assert slow.efficiency < fast.efficiency < predicted({0: plan}, 4, 10_000_000, 1, 1e9).efficiency == 1
    assert fast.rank_bytes == {0: 300_000_000, 3: 300_000_000}


# Collectives


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("engine", [None, lambda own: DelayedEngine(own, seed=7)], ids=["plain", "delayed"])
def test_collectives(jitted: bool, engine: Any) -> None:
    arrays = np.random.default_rng(0).integers(0, 9, (3, 6, 2)).astype(np.float32)

    def exchanged(x: ps.Tensor) -> tuple[ps.Tensor, ...]:
        d = ps.distributed
        return d.all_reduce(x), d.reduce_scatter(x + 1), d.all_gather(x * 2), d.broadcast(x)

    def own(device: Device) -> list[npt.NDArray[np.float32]]:
        x = ps.asarray(arrays[ps.distributed.rank()], device=device)
        function = ps.jit(exchanged) if jitted else exchanged
        function(x)
        return [tensor.numpy() for tensor in function(x)]

    for rank, (summed, scattered, joined, first) in enumerate(on_ranks(3, own, engine)):
        assert np.array_equal(summed, arrays.sum(axis=0))
        assert np.array_equal(scattered, (arrays + 1).sum(axis=0)[2 * rank : 2 * rank + 2])
        assert np.array_equal(joined, 2 * arrays.reshape(18, 2))
        assert np.array_equal(first, arrays[0])


def test_a_thread_that_fails_ends_the_others() -> None:
    def own(device: Device) -> None:
        if ps.distributed.rank() == 1:
            raise ValueError("no data")
        ps.distributed.barrier()

    with pytest.raises(ValueError, match="no data"):
        on_ranks(2, own)


def test_no_gradient_passes_a_collective() -> None:
    with pytest.raises(SettingError, match="detach"):
        ps.distributed.all_reduce(ps.nn.Parameter(ps.ones(2)))


# Training


@cache
def mlp_alone() -> dict[str, Any]:
    return result(1, "mlp")


@pytest.mark.slow("4")
@pytest.mark.parametrize("count", [2, 4])
def test_the_number_of_ranks_changes_no_bit(count: int) -> None:
    alone, several = mlp_alone(), result(count, "mlp")
    assert alone["losses"][0] != alone["losses"][1]
    assert several["losses"] == alone["losses"]
    assert several["weights"] == alone["weights"]
    assert several["sent_bytes"] > 0


@cache
def gpt_alone(precision: str) -> dict[str, Any]:
    return result(1, "gpt", device="opencl", precision=precision, zero=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "zero", "count"), [("float32", 0, 2), ("bfloat16", 2, 2), ("float32", 3, 2)]
)
def test_a_gpt_on_any_number_of_ranks(precision: str, zero: int, count: int) -> None:
    alone = gpt_alone(precision)
    several = result(count, "gpt", device="opencl", precision=precision, zero=zero)
    assert several["losses"] == alone["losses"]
    assert several["weights"] == alone["weights"]
    assert several["hidden"] or zero == 3


class Trained:
    """A small network on a device after some steps, with all that a checkpoint has of its optimizer."""

    def __init__(self, device: Device, precision: Any = ps.float32, **options: Any) -> None:
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((5, 7), (7,), (7, 3), (3,))]
        self.weights = [
            ps.nn.Parameter(ps.asarray(array, device=device).astype(precision)) for array in arrays
        ]
        groups = [{"params": self.weights[::2], "weight_decay": 0.1}, {"params": self.weights[1::2]}]
        self.optimizer = ps.distributed.DataParallel(
            ps.optim.AdamW(groups, lr=0.05, clip_norm=0.5), **{"shards": 4, "bucket": 64, **options}
        )
        self._device, self._precision, self._rng = device, precision, rng
        self._step = ps.jit(self._trained)

    def _trained(self, x: ps.Tensor) -> ps.Tensor:
        first, bias, second, shift = self.weights
        loss = (((x @ first + bias).tanh() @ second + shift) ** 2).astype(ps.float32).mean()
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss

    def steps(self, count: int) -> list[float]:
        batches = [self._rng.standard_normal((10, 5)).astype(np.float32) for _ in range(count)]
        given = [ps.asarray(batch, device=self._device).astype(self._precision) for batch in batches]
        return [self.optimizer.train(self._step, batch).wait() for batch in given]

    def values(self) -> list[bytes]:
        with self.optimizer.gathered():
            return [weight.astype(ps.float32).numpy().tobytes() for weight in self.weights]

    def state(self) -> dict[str, bytes]:
        return {name: np.asarray(array).tobytes() for name, array in self.optimizer.state_dict().items()}


@pytest.mark.parametrize(
    ("precision", "zero", "counts"),
    [
        (ps.float32, 0, (2, 4)),
        (ps.float32, 1, (2,)),
        (ps.float32, 2, (2, 4)),
        (ps.bfloat16, 2, (4,)),
        (ps.float32, 3, (1, 2, 4)),
        (ps.bfloat16, 3, (2,)),
    ],
    ids=str,
)
def test_ranks_change_no_bit_in_any_stage_of_sharding(precision: Any, zero: int, counts: Any) -> None:
    def own(zero: int) -> Callable[[Device], Any]:
        def trained(device: Device) -> Any:
            run = Trained(device, precision, zero=zero)
            return run.steps(2), run.values(), run.state()

        return trained

    (alone,) = on_ranks(1, own(0))
    for count in counts:
        assert on_ranks(count, own(zero)) == [alone] * count


def test_a_rank_keeps_its_part_of_the_state() -> None:
    def kept(device: Device) -> int:
        run = Trained(device, zero=2)
        return sum(tensor.size for tensor in run.optimizer.optimizer._state["mean"])

    (alone,), several = on_ranks(1, kept), on_ranks(4, kept)
    assert several == [alone // 4] * 4


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 1), (2, 3)])
def test_state_goes_from_one_number_of_ranks_to_another(before: int, after: int) -> None:
    def whole(device: Device) -> Any:
        run = Trained(device)
        return run.steps(4), run.values()

    def first(device: Device) -> Any:
        run = Trained(device, zero=before)
        run.steps(2)
        with run.optimizer.gathered("host"):
            return [weight.numpy() for weight in run.weights], run.optimizer.state_dict()

    ((weights, state),) = on_ranks(2, first)[:1]

    def rest(device: Device) -> Any:
        run = Trained(device, zero=after)
        run.steps(2)  # the data goes on
        with run.optimizer.gathered("host"):
            for weight, array in zip(run.weights, weights, strict=True):
                weight._become(ps.asarray(array, device=weight.device)._node)
            run.optimizer.load_state_dict(state)
        return run.steps(2), run.values()

    ((losses, values),) = on_ranks(1, whole)
    for continued, ends in on_ranks(4, rest):
        assert continued == losses[2:]
        assert ends == values


@pytest.mark.parametrize(("count", "zero"), [(2, 0), (3, 2), (3, 3)])
def test_sums_in_the_order_of_the_engine(count: int, zero: int) -> None:
    def own(device: Device) -> Any:
        run = Trained(device, exact=False, zero=zero)
        losses = run.steps(2)
        with run.optimizer.gathered():
            return losses, [weight.numpy() for weight in run.weights]

    (alone,) = on_ranks(1, own)
    for losses, weights in on_ranks(count, own):
        assert np.allclose(losses, alone[0], rtol=1e-5)
        for weight, expected in zip(weights, alone[1], strict=True):
            assert np.allclose(weight, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("zero", [2, 3])
def test_delays_change_nothing(zero: int) -> None:
    def own(device: Device) -> Any:
        run = Trained(device, zero=zero)
        return run.steps(2), run.values()

    (alone,) = on_ranks(1, own)
    for seed in range(2):
        for other in on_ranks(4, own, lambda engine, seed=seed: DelayedEngine(engine, seed)):
            assert other == alone


def test_a_wait_counts_exchanges_before_its_own() -> None:
    """The result of the second is asked for first, while the other rank has come to neither."""
    groups: list[Communicator] = []

    def waits() -> bool:
        return bool(groups) and groups[0]._waits and groups[0]._clock[1] is not None

    def waited(late: float) -> float:
        group = communicator()
        if late:
            until(waits)
            time.sleep(late)
        else:
            groups.append(group)
        first, second = (group.submit("all_gather", Given(np.ones(4))) for _ in range(2))
        second.wait()
        first.wait()
        return group.traffic.waited_seconds

    late = 0.1
    assert ps.distributed.run_local(waited, [0.0, late])[0] > late / 2


def test_ranks_know_how_long_each_waited() -> None:
    def own(device: Device) -> tuple[list[float], list[float]]:
        run = Trained(device)
        run.steps(1)
        with ps.profile() as profile:
            run.steps(2)
        (waits,) = {tuple(each.rank_waits) for each in profile.evidence()}
        return list(waits), [each.waited_seconds for each in communicator().reported]

    first, second = on_ranks(2, own)
    assert first == second
    assert len(first[0]) == 2
    assert all(0 <= during <= whole for during, whole in zip(*first, strict=True))


def test_ranks_agree_with_one_step_on_the_whole_batch() -> None:
    """The mean of the shards' gradients is that of the batch, up to rounding."""
    (summed,) = on_ranks(1, lambda device: Trained(device, shards=4).steps(3))
    (whole,) = on_ranks(1, lambda device: Trained(device, shards=1).steps(3))
    assert np.allclose(summed, whole, rtol=1e-4)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_step_without_jit(zero: int) -> None:
    def own(device: Device) -> Any:
        run = Trained(device, zero=zero)
        run._step = run._trained
        with run.optimizer.gathered():
            return run.steps(2), run.values()

    (alone,) = on_ranks(1, own)
    assert on_ranks(2, own) == [alone] * 2
    (jitted,) = on_ranks(1, lambda device: Trained(device, zero=zero).steps(2))
    assert np.allclose(jitted, alone[0], rtol=1e-5)


def test_two_kinds_of_device_in_a_process() -> None:
    def own(device: Device) -> Any:
        run = Trained(device, shards=2)
        return run.steps(3), [weight.numpy() for weight in run.weights]

    first, second = ps.distributed.run_local(own, [find("opencl"), find("host")])
    assert first[0] == second[0]
    for weight, other in zip(first[1], second[1], strict=True):  # each computes the update itself
        assert np.allclose(weight, other, rtol=1e-5, atol=1e-6)


def test_rules_over_whole_parameters_are_refused() -> None:
    weight = ps.nn.Parameter(ps.zeros((2, 2)))
    with pytest.raises(SettingError, match="Muon updates"):
        ps.distributed.DataParallel(ps.optim.Muon([weight], lr=0.1), zero=1)


class ForeignHost(HostDriver):
    """A host driver that takes commands of other libraries, as CUDA's does."""

    def foreign(self, queue: Queue, work: Callable[[int], None], waits: Any) -> Event:
        return self._record(queue, lambda: work(0), waits)


class OnDevice(LocalEngine):
    """Threads that exchange memory of their devices, as NCCL does."""

    on_device = True

    def launch(self, operation: Move, source: DeviceRow, target: DeviceRow, stream: int) -> None:
        given, result = (row.__cuda_array_interface__ for row in (source, target))
        array = given["data"][0].view(given["typestr"])
        assert given["shape"] == array.shape
        exchange = self._launched.begin(operation, array)
        while not exchange.is_done():
            time.sleep(1e-4)
        result["data"][0].view(result["typestr"])[...] = exchange.result

    def __init__(self, room: Room, rank: int, launched: Room) -> None:
        super().__init__(room, rank)
        self._launched = LocalEngine(launched, rank)


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_engines_that_move_memory_of_devices(count: int, zero: int) -> None:
    def own(device: Device) -> Any:
        run = Trained(device, zero=zero)
        return run.steps(3), run.values(), ps.distributed.traffic().sent_bytes > 0

    launched = Room(count)
    capabilities = find("host").capabilities
    devices = [Device(f"foreign{number}", capabilities, ForeignHost) for number in range(count)]
    results = ps.distributed.run_local(
        own, devices, lambda engine: OnDevice(engine._room, engine.rank, launched)
    )
    ((losses, values, _),) = on_ranks(1, own)
    assert results == [(losses, values, count > 1)] * count


# Runs


@pytest.mark.slow("accumulated", "own")
@pytest.mark.parametrize("more", ["plain", "accumulated", "own"])
def test_a_killed_run_goes_on_with_other_ranks(more: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 9, "checkpoint_every": 2, "evaluate_every": 4}
    if more == "accumulated":
        options |= {"accumulate": 2, "parallel": {"zero": 2}}
    elif more == "own":
        options |= {"own": True}
    whole = result(1, "trainer", folder=str(tmp_path / "whole"), **options)
    if more == "own":
        options |= {"parallel": {"zero": 3}}
    assert len(whole["losses"]) == 9
    folder = str(tmp_path / "killed")
    killed = int(np.random.default_rng().integers(3, 8))
    assert started(2, "trainer", folder=folder, killed=killed, **options).returncode != 0
    resumed = result(4 if more == "accumulated" else 1, "trainer", folder=folder, **options)
    assert resumed["losses"] == whole["losses"]
    assert len(whole["validation"]) == 3
    assert resumed["validation"] == whole["validation"]
    assert resumed["weights"] == whole["weights"]


@pytest.mark.slow
def test_devices_of_a_command(tmp_path: Path) -> None:
    """A run of two ranks, of which one is killed, and which a single one then ends."""
    text = tmp_path / "text"
    text.write_text("a text of a few words, again and again; " * 200)
    folder = tmp_path / "run"
    settings = ["width=16", "layers=1", "heads=2", "context=8", "dropout=0.1"]
    given = ["--out", str(folder), "--data", str(text), "--tokenizer", "bytes", "--device", "host"]
    given += [part for setting in settings for part in ("--set", f"model.{setting}")]
    command = [sys.executable, "-m", "penstock", "train"]
    several = [*command, *given, "--steps", "100000", "--checkpoint-every", "5", "--devices", "2"]
    several += ["--set", "ranks.zero=3"]
    with subprocess.Popen(several, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as running:
        until(lambda: list(folder.glob("checkpoints/step-*")))
        below = psutil.Process(running.pid).children(recursive=True)
        ranks = [process for process in below if process.cmdline()[1:3] == ["-m", "penstock"]]
        ranks[-1].kill()
        _, said = running.communicate(timeout=120)
    assert running.returncode == 1
    assert f"(process {ranks[-1].pid}) died" in said
    last, problems = ps.train.load_last(folder)
    assert not problems
    weights = ps.models.load(folder).state_dict()  # as generate and eval do
    assert all(np.array_equal(weights[name], last.model[name]) for name in last.model)
    steps = 5 + last.step
    more = [*command, "--resume", str(folder), "--steps", str(steps)]
    assert subprocess.run(more, capture_output=True, timeout=120, check=False).returncode == 0
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    assert {"rank_0_wait", "rank_1_wait", "sent_bytes"} <= metrics[3].keys()


@pytest.mark.slow
def test_a_rank_that_fails_is_named() -> None:
    done = started(2, "raises")
    assert done.returncode != 0
    assert "rank 1 of 2: ended by ValueError: this rank has no data" in done.stderr


def test_a_rank_that_hangs_is_named() -> None:
    done = started(2, "hangs", timeout=2.5)
    assert done.returncode != 0
    assert "rank 1 of 2 (process" in done.stderr
    assert "hangs" in done.stderr
