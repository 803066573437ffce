"""Several ranks: collectives, and training whose bits do not depend on how many there are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import rank_programs

import penstock as ps
from penstock.cli.launching import _without_devices
from penstock.collectives.engine import tree_sum
from penstock.collectives.local import DelayedEngine
from penstock.distributed.buckets import buckets
from penstock.distributed.shares import part_of
from penstock.drivers.host import HostDriver
from penstock.errors import SettingError
from penstock.plan.order import Work
from penstock.plan.overlap import waits_late
from penstock.registry import find
from penstock.runtime import Device

PROGRAMS = Path(rank_programs.__file__)
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"


def started(
    count: int, program: str, *, kept: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A program that ran as several ranks; `kept`: the others go on when a rank dies, to say so."""
    launcher = [MPIEXEC, *(["-disable-auto-cleanup"] if kept else []), "-n", str(count)]
    command = [sys.executable, str(PROGRAMS), program, json.dumps({"device": "host", **options})]
    return subprocess.run(
        (launcher if count > 1 else []) + command, capture_output=True, text=True, timeout=300, check=False
    )


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


def test_the_ranks_of_a_command_do_not_start_more() -> None:
    given = ["train", "--devices", "4", "--steps", "3", "--devices=2"]
    assert _without_devices(given) == ["train", "--steps", "3"]


def test_more_ranks_than_shards_are_refused() -> None:
    with pytest.raises(SettingError, match="power of 2"):
        ps.distributed.DataParallel(ps.optim.SGD([ps.nn.Parameter(ps.zeros(2))], lr=1.0), shards=3)


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


# Training


def test_the_number_of_ranks_changes_no_bit() -> None:
    alone = result(1, "mlp")
    assert alone["losses"][0] != alone["losses"][1]
    for count in (2, 4):
        several = result(count, "mlp")
        assert several["losses"] == alone["losses"]
        assert several["weights"] == alone["weights"]
        assert several["sent_bytes"] > 0


def test_sums_in_the_order_of_the_engine() -> None:
    alone, several = result(1, "mlp", exact=False), result(2, "mlp", exact=False)
    assert len(alone["losses"]) == len(several["losses"])  # dropout differs, as the shards do


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpt_on_any_number_of_ranks(precision: str) -> None:
    alone = result(1, "gpt", device="opencl", precision=precision)
    for count in (2, 4):
        several = result(count, "gpt", device="opencl", precision=precision)
        assert several["losses"] == alone["losses"]
        assert several["weights"] == alone["weights"]
        assert several["hidden"]


def test_delays_change_nothing() -> None:
    """Threads whose exchanges begin and end at random times, against processes of MPI."""

    def own(device: Device) -> str:
        weight = ps.nn.Parameter(ps.asarray(np.linspace(-1, 1, 12, dtype=np.float32), device=device))
        optimizer = ps.distributed.DataParallel(ps.optim.SGD([weight], lr=0.1), shards=4, bucket=16)

        @ps.jit
        def step(x: ps.Tensor) -> ps.Tensor:
            loss = ((x * weight).sum(axis=1) ** 2).mean()
            optimizer.backward(loss)
            optimizer.step()
            return loss

        rng = np.random.default_rng(0)
        for _ in range(3):
            x = ps.asarray(rng.standard_normal((8, 12)).astype(np.float32), device=device)
            optimizer.train(step, x).wait()
        return weight.numpy().tobytes().hex()

    (alone,) = on_ranks(1, own)
    for seed in range(2):
        assert set(on_ranks(4, own, lambda engine, seed=seed: DelayedEngine(engine, seed))) == {alone}


# Runs


def test_a_killed_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    options = {"steps": 9, "checkpoint_every": 2, "evaluate_every": 4}
    whole = result(1, "trainer", folder=str(tmp_path / "whole"), **options)
    assert len(whole["losses"]) == 9
    folder = str(tmp_path / "killed")
    killed = int(np.random.default_rng().integers(3, 8))
    assert started(2, "trainer", folder=folder, killed=killed, **options).returncode != 0
    resumed = result(4, "trainer", folder=folder, **options)
    assert resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]


def test_a_rank_that_fails_is_named() -> None:
    done = started(3, "raises")
    assert done.returncode != 0
    assert "rank 2 of 3: ended by ValueError: this rank has no data" in done.stderr


def test_a_rank_that_hangs_is_named() -> None:
    done = started(2, "hangs", timeout=1.0)
    assert done.returncode != 0
    assert "rank 1 of 2 (process" in done.stderr
    assert "hangs" in done.stderr
