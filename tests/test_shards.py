"""Checkpoints that ranks write together: whole or not there, and the same for any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from test_distributed import Trained, on_ranks, result, started

import penstock as ps
from penstock.collectives.world import communicator
from penstock.distributed.pieces import PiecedArrays, own_pieces
from penstock.errors import CheckpointError, SettingError
from penstock.runtime import Device
from penstock.train import checkpoint as checkpoints
from penstock.train.checkpoint import Checkpoint
from penstock.train.saving import check_shared, save_together
from penstock.train.settings import RunSettings


def unchecked(name: str, array: npt.NDArray[Any]) -> None:
    """No check of what is written."""


def saved(run: Trained, folder: Path, step: int, check: Any = unchecked) -> None:
    """Write a checkpoint of all ranks."""
    group = communicator()
    tensors = {str(at): weight for at, weight in enumerate(run.weights)}
    checkpoint = Checkpoint(
        step=step,
        config=RunSettings({"trainer": {}}),
        model={},
        optimizer=run.optimizer.common_state(),
        generator=ps.random.state(),
        position=0,
        text="",
        seconds=0.0,
        validation_loss=None,
    )
    save_together(folder, checkpoint, list(run.optimizer.pieces(tensors)), group, check)


# Pieces


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_item_is_in_one_piece(size: int) -> None:
    rng = np.random.default_rng(size)
    shapes = [(3, 5), (), (0, 2), (7,), (2, 2, 2), (1,)]
    arrays = {str(at): rng.standard_normal(shape).astype(np.float32) for at, shape in enumerate(shapes)}
    arrays["few"] = rng.integers(0, 9, 5).astype(np.int8)
    tensors = {name: ps.asarray(array, device="host") for name, array in arrays.items()}
    parts: dict[str, list[tuple[int, Any]]] = {}
    bytes_of = []
    for rank in range(size):
        pieces = list(own_pieces(tensors, rank, size))
        bytes_of.append(sum((piece.stop - piece.start) * arrays[piece.name].itemsize for piece in pieces))
        for piece in pieces:
            values = arrays[piece.name].reshape(-1)[piece.start : piece.stop]
            parts.setdefault(piece.name, []).append((piece.start, values))
    assert max(bytes_of) - min(bytes_of) <= 8
    whole = PiecedArrays({name: array.shape for name, array in arrays.items()}, parts)
    for name, array in arrays.items():
        assert np.array_equal(whole[name], array)
        assert whole[name].dtype == array.dtype
    assert np.array_equal(whole.items_of("0", 4, 11), arrays["0"].reshape(-1)[4:11])


def test_pieces_that_leave_items_out_are_refused() -> None:
    for parts in ([], [(0, np.zeros(2))], [(1, np.zeros(3))], [(0, np.zeros(2)), (3, np.zeros(1))]):
        with pytest.raises(ValueError, match="lacks items"):
            PiecedArrays({"x": (4,)}, {"x": parts})


# Files


@pytest.mark.parametrize(("zero", "precision"), [(0, ps.float32), (1, ps.float32), (2, ps.bfloat16)], ids=str)
def test_shards_have_what_ranks_gather(zero: int, precision: Any, tmp_path: Path) -> None:
    def write(device: Device) -> Any:
        run = Trained(device, precision, zero=zero)
        run.steps(2)
        saved(run, tmp_path, 2)
        weights = [weight.astype(ps.float32).numpy() for weight in run.weights]
        return weights, run.optimizer.state_dict(), run.steps(2), run.values()

    weights, state, losses, ends = on_ranks(4, write)[0]
    shards = list((tmp_path / "checkpoints").glob("shard-*"))
    assert len(shards) == 4
    known = checkpoints.load(checkpoints.path_of(tmp_path, 2))
    for at, weight in enumerate(weights):
        assert np.array_equal(known.model[str(at)], weight)
    assert set(known.optimizer) == set(state)
    for name, array in state.items():
        assert np.array_equal(known.optimizer[name], np.asarray(array, known.optimizer[name].dtype)), name

    def rest(device: Device) -> Any:
        run = Trained(device, precision, zero=2 if zero else 0)
        run.steps(2)  # the data goes on
        for at, weight in enumerate(run.weights):
            value = ps.asarray(known.model[str(at)], device=device).astype(precision)
            weight._become(value.realize()._node)
        run.optimizer.load_state_dict(known.optimizer)
        return run.steps(2), run.values()

    for count in (1, 2):
        assert on_ranks(count, rest) == [(losses, ends)] * count


def test_what_fails_on_a_rank_leaves_the_checkpoints_before(tmp_path: Path) -> None:
    def fails(name: str, array: npt.NDArray[Any]) -> None:
        if communicator().rank == 1:
            raise CheckpointError(f"{name} is not finite")

    def own(device: Device) -> str:
        run = Trained(device)
        saved(run, tmp_path, 1)
        with pytest.raises(CheckpointError) as failed:
            saved(run, tmp_path, 2, fails)
        return str(failed.value)

    first, second = on_ranks(2, own)
    assert first.startswith("rank 1 of 2: ")
    assert first.endswith(second)
    assert checkpoints.load_last(tmp_path)[0].step == 1
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_a_damaged_shard_is_not_used(tmp_path: Path) -> None:
    def own(device: Device) -> None:
        run = Trained(device)
        for step in (1, 2):
            saved(run, tmp_path, step)

    on_ranks(2, own)
    folder, copy = tmp_path / "checkpoints", tmp_path / "copy"
    shutil.copytree(folder, copy)
    for damage in ("bit", "short", "gone"):
        (shard,) = folder.glob("shard-00000002-*-1-of-2*")
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        if damage == "gone":
            shard.unlink()
        else:
            shard.write_bytes(content if damage == "bit" else content[:-1])
        known, problems = checkpoints.load_last(tmp_path)
        assert known.step == 1
        assert str(shard) in problems[0]
        shutil.copytree(copy, folder, dirs_exist_ok=True)
    assert checkpoints.load_last(tmp_path)[0].step == 2
    with pytest.raises(CheckpointError, match=r"ps\.train\.load"):
        ps.load(checkpoints.path_of(tmp_path, 2))


def test_shards_of_removed_and_interrupted_checkpoints_go(tmp_path: Path) -> None:
    def own(device: Device) -> None:
        run = Trained(device)
        for step in range(1, 6):
            if step == 4 and communicator().rank == 0:
                (tmp_path / "checkpoints" / "shard-00000004-0123abcd-0-of-2.safetensors").touch()
            communicator().barrier()
            saved(run, tmp_path, step)

    on_ranks(2, own)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert [name[:14] for name in names] == [f"shard-{step:08}" for step in (3, 3, 4, 4, 5, 5)] + [
        f"step-{step:08}." for step in (3, 4, 5)
    ]
    assert not any("0123abcd" in name for name in names)


def test_ranks_need_the_same_folder(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()

    def own(folder: Path) -> None:
        check_shared(tmp_path, communicator())
        with pytest.raises(SettingError, match="file system that they share"):
            check_shared(folder, communicator())

    ps.distributed.run_local(own, folders)
    assert sorted(tmp_path.rglob("*")) == folders


# Kills


WRITING: dict[str, Any] = {"steps": 8, "checkpoint_every": 1, "evaluate_every": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run gives that nothing kills."""
    return result(1, "trainer", folder=str(tmp_path_factory.mktemp("run") / "whole"), **WRITING)


@pytest.mark.slow("1", "2")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ranks_that_are_killed_while_they_write(whole: dict[str, Any], seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    folder = tmp_path / "killed"
    for count, latest in ((2, 9), (4, 7))[: 2 if seed else 1]:
        moment = {
            "rank": int(rng.integers(count)),
            "call": int(rng.integers(1, latest)),
            "later": float(rng.choice([0, 1e-4, 1e-3])),
        }
        zero = {"zero": int(rng.integers(4))}
        killed = started(count, "trainer", folder=str(folder), writing=moment, parallel=zero, **WRITING)
        assert killed.returncode != 0, moment
        if checkpoints.checkpoint_files(folder):
            assert checkpoints.load_last(folder)[1] == []  # none is damaged
    resumed = result(1, "trainer", folder=str(folder), **WRITING)
    assert resumed["losses"] == whole["losses"]
    assert resumed["validation"] == whole["validation"]
    assert resumed["weights"] == whole["weights"]
