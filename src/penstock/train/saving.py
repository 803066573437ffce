"""Checkpoints that several ranks write together, a shard each."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.collectives.communicator import Communicator
from penstock.distributed.pieces import Piece
from penstock.errors import CheckpointError, PenstockError, SettingError
from penstock.files import UNFINISHED, parse_json
from penstock.train import checkpoint as checkpoints
from penstock.train import shards
from penstock.train.checkpoint import Checkpoint


def save_together(
    run: Path,
    checkpoint: Checkpoint,
    pieces: Sequence[Piece],
    group: Communicator,
    check: Callable[[str, npt.NDArray[Any]], None],
) -> None:
    """Write this rank's pieces; then rank 0 writes what is common, and lists the shards of all ranks.

    Raises on every rank if any of them fails; then all earlier checkpoints are kept.
    """
    token = group.share(secrets.token_hex(4).encode()).decode()
    own = run / checkpoints.FOLDER / shards.name_of(checkpoint.step, token, group.rank, group.size)
    try:
        told = _on_all(group, lambda: (own.name, shards.write_shard(own, pieces, check), own.stat().st_size))
        _on_all(group, lambda: _listed(run, checkpoint, told) if group.rank == 0 else None)
    except PenstockError:
        with suppress(OSError):
            own.unlink()
        raise


def _listed(run: Path, checkpoint: Checkpoint, told: Sequence[tuple[str, str, int]]) -> None:
    for rank, (name, _, size) in enumerate(told):
        path = run / checkpoints.FOLDER / name
        if not path.exists() or path.stat().st_size != size:
            raise CheckpointError(f"rank 0 does not see {path}, which rank {rank} has written")
    checkpoints.save(run, checkpoint, {name: total for name, total, _ in told})


def _on_all(group: Communicator, work: Callable[[], Any]) -> list[Any]:
    """What each rank's work gave; if it fails on any, all raise."""
    value, problem = None, None
    try:
        with group.patient():
            value = work()
    except PenstockError as error:
        problem = error
    said = json.dumps([value, str(problem) if problem else ""])
    told = [parse_json(text.decode()) for text in group.collect(said.encode())]
    if problem is not None:
        raise problem
    for rank, (_, other) in enumerate(told):
        if other:
            raise CheckpointError(f"rank {rank} of {group.size}: {other}")
    return [result for result, _ in told]


def check_shared(folder: Path, group: Communicator) -> None:
    """Raise SettingError unless all ranks see the same folder, before they train for hours."""
    if group.size == 1:
        return
    token = group.share(secrets.token_hex(4).encode()).decode()
    paths = [folder / f"rank.{rank}-{token}{UNFINISHED}" for rank in range(group.size)]
    own = paths[group.rank]
    with suppress(OSError):
        own.touch()
    group.barrier()
    sees = all(path.exists() for path in paths)
    all_see = group.run("all_gather", np.array([sees], np.uint8)).all()
    with suppress(OSError):
        own.unlink()
    if not all_see:
        raise SettingError(
            f"each rank writes its part of checkpoints, and {folder} is not the same folder for all, or "
            "cannot be written; give one on a file system that they share"
        )
