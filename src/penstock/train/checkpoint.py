"""Checkpoints: all that a run needs to resume, in a safetensors file that is written atomically.

Of several ranks, each has written a part of the arrays before, to a file beside it (`shards.py`).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from penstock.data import DataError
from penstock.data.files import written_whole
from penstock.errors import CheckpointError, SettingError
from penstock.files import parse_json, require_regular
from penstock.printable import shown
from penstock.train.config import Config
from penstock.train.settings import RunSettings, from_tree
from penstock.train.shards import read_shards, remove_unlisted, storable

Arrays = Mapping[str, npt.NDArray[Any]]

FOLDER = "checkpoints"  # inside the folder of a run
_KEPT = 3  # of the last checkpoints; the best is kept in addition
_FORMAT, _SHARDED = "penstock checkpoint 1", "penstock checkpoint 2"
_STATE: dict[str, tuple[type, ...]] = {  # besides the arrays, with the types that each value may have
    "step": (int,),
    "config": (dict,),
    "generator": (dict,),
    "position": (int,),
    "text": (str,),
    "seconds": (int, float),
    "validation_loss": (int, float, type(None)),
}


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a step."""

    step: int
    config: Config | RunSettings
    model: Arrays
    optimizer: Arrays
    generator: dict[str, int]  # the state of the random generator
    position: int  # the number of the next sample of a text; of other data, that of the epoch's next batch
    text: str  # a key of the text and of its tokenizer; empty for other data
    seconds: float  # of training so far
    validation_loss: float | None
    more: dict[str, Any] = field(default_factory=dict)  # of data, schedulers and callbacks; plain values


def save(run: Path, checkpoint: Checkpoint, shards: Mapping[str, str] | None = None) -> Path:
    """Write a checkpoint into a run's folder, then remove older ones, except the best by validation loss.

    `shards` are files with the rest of its arrays, and their checksums. Raises CheckpointError if it cannot
    be written; then all earlier checkpoints are kept.
    """
    arrays = {f"model.{name}": storable(array) for name, array in checkpoint.model.items()}
    arrays |= {f"optimizer.{name}": storable(array) for name, array in checkpoint.optimizer.items()}
    values = {name: getattr(checkpoint, name) for name in (*_STATE, "more")}
    try:
        state = json.dumps({**values, "config": checkpoint.config.tree()})
    except TypeError as error:
        raise CheckpointError(
            f"the state of the data, the scheduler or a callback cannot be written as JSON: {error}"
        ) from None
    metadata = {"format": _FORMAT, "state": state, "sum": _sum(state, arrays)}
    if shards is not None:
        listed = json.dumps(shards)
        metadata |= {"format": _SHARDED, "shards": listed, "sum": _sum(state + listed, arrays)}
    path = path_of(run, checkpoint.step)
    try:
        with written_whole(path) as file:
            file.write(to_safetensors(arrays, metadata))
    except DataError as error:
        kept = checkpoint_files(run)
        there = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint before it"
        raise CheckpointError(f"{error}. {there[0].upper()}{there[1:]}.") from error
    _remove_old(run)
    return path


def path_of(run: Path, step: int) -> Path:
    """The file of the checkpoint of a step."""
    return run / FOLDER / f"step-{step:08}.safetensors"


def step_of(path: Path) -> int:
    """The step of a checkpoint, by the name of its file."""
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def load(path: Path) -> Checkpoint:
    """The checkpoint that `save` wrote; a CheckpointError says why a file is not valid, and what to do."""
    with _reading(path) as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        metadata = file.metadata() or {}
    if metadata.get("format") not in (_FORMAT, _SHARDED):
        raise CheckpointError(f"{path} is no checkpoint of a run; its format is {metadata.get('format')!r}")
    if _sum(metadata.get("state", "") + metadata.get("shards", ""), arrays) != metadata.get("sum"):
        raise CheckpointError(f"{path} is damaged: its checksum is wrong; use an older checkpoint")
    try:
        state = parse_json(metadata["state"])
        for name, kinds in _STATE.items():
            if type(state[name]) not in kinds:
                raise ValueError(f"{name} is {shown(state[name])}")
        more = state.get("more", {})  # older checkpoints have none
        if not isinstance(more, dict):
            raise ValueError(f"more is {shown(more)}")
        for name in ("step", "position", "seconds"):
            if not 0 <= state[name] < math.inf:
                raise ValueError(f"{name} is {shown(state[name])}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} lacks a part of its state, or a part is wrong: {error}") from None
    try:
        config = from_tree(state["config"], str(path))
    except SettingError as error:
        raise CheckpointError(f"{path} was written by another version of Penstock: {error}") from None
    parts = [_part(arrays, prefix) for prefix in ("model.", "optimizer.")]
    if metadata["format"] == _SHARDED:
        whole = read_shards(path.parent, _listed(path, metadata), arrays)
        parts = [whole.below(prefix) for prefix in ("model.", "optimizer.")]
    return Checkpoint(
        config=config,
        model=parts[0],
        optimizer=parts[1],
        more=more,
        **{name: state[name] for name in _STATE if name != "config"},
    )


def text_config(checkpoint: Checkpoint, run: Path) -> Config:
    """The settings of a run of `penstock train`; a CheckpointError if it is another run."""
    if isinstance(checkpoint.config, Config):
        return checkpoint.config
    raise CheckpointError(
        f"{run} is a run of ps.Trainer, with a model of its own: start the program that made it again, and "
        "its fit() goes on; `penstock train` and `penstock generate` are for language models"
    )


def older(run: Path, step: int) -> Iterator[Checkpoint]:
    """The valid checkpoints of a run before a step, the last first."""
    for path in reversed(checkpoint_files(run)):
        with suppress(CheckpointError):
            checkpoint = load(path)
            if checkpoint.step < step:
                yield checkpoint


def checkpoint_files(run: Path) -> list[Path]:
    """The files of a run's checkpoints, the oldest first; they may be damaged."""
    return sorted((run / FOLDER).glob("step-*.safetensors"))


def load_last(run: Path) -> tuple[Checkpoint, list[str]]:
    """The last valid checkpoint of a run, and why later checkpoints are not valid."""
    problems: list[str] = []
    for path in reversed(checkpoint_files(run)):
        try:
            return load(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"no checkpoint in {run} can be used: {'; '.join(problems)}")
    raise CheckpointError(f"{run} holds no run with a checkpoint; `penstock train` names its folder")


def _sum(state: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    total = zlib.crc32(state.encode())
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name].tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _listed(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    """The shards that a checkpoint's file lists, with their checksums."""
    listed = parse_json(metadata.get("shards", "{}"))
    if not isinstance(listed, dict) or not all(isinstance(total, str) for total in listed.values()):
        raise CheckpointError(f"{path} lists its shards as {shown(listed)}")
    return listed


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint: its own, and those that this lists."""
    with _reading(path) as file:
        listed = _listed(path, file.metadata() or {})
    return [path, *(path.with_name(name) for name in sorted(listed))]


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        require_regular(path)
        with safe_open(path, "numpy") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    except (OSError, SafetensorError, LookupError) as error:  # LookupError: a dtype that NumPy lacks
        raise CheckpointError(f"{path} is damaged, or no checkpoint ({error}); use an older one") from None


def best_of(run: Path) -> Path | None:
    """The checkpoint of a run with the best evaluation; None if none was evaluated."""
    scores = {path: _score(path) for path in checkpoint_files(run)}
    best = min(scores, key=lambda path: scores[path], default=None)
    return None if best is None or math.isinf(scores[best]) else best


def _score(path: Path) -> float:
    """The score of a checkpoint, of which lower is better: its validation loss, unless it has another."""
    with (
        suppress(CheckpointError, ValueError, TypeError, OverflowError, AttributeError),
        _reading(path) as file,
    ):
        state = parse_json((file.metadata() or {})["state"])
        score = state.get("more", {}).get("score", state["validation_loss"])
        return math.inf if score is None else float(score)
    return math.inf


def _remove_old(run: Path) -> None:
    paths = checkpoint_files(run)
    best = best_of(run)
    for path in paths[:-_KEPT]:
        if path != best:
            with suppress(OSError):
                path.unlink()
    listed: dict[int, list[str] | None] = {}
    for path in checkpoint_files(run):
        try:
            listed[step_of(path)] = [file.name for file in files_of(path)]
        except (CheckpointError, ValueError):
            listed[step_of(path)] = None
    remove_unlisted(run / FOLDER, listed)
