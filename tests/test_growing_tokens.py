"""Large texts: tokens that are made while training goes on, in an order that does not depend on how fast."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import COMMAND_WITH_RATES

import penstock as ps
from penstock import files as files_module
from penstock.cache import CacheFolder
from penstock.data import (
    ByteTokenizer,
    DataError,
    Text,
    TextBatches,
    TokenStore,
    find_text,
    growing,
    python_sources,
    train_bpe,
)
from penstock.data import chunks as chunks_module
from penstock.data import tokenizer as tokenizer_module
from penstock.data import tokens as tokens_module
from penstock.data.batches import ChunkBatches
from penstock.data.growing import GrowingTokens
from penstock.data.tokenizing import Job
from penstock.errors import PenstockWarning
from penstock.measuring import ceilings
from penstock.train import Config, load_last
from penstock.train.text_trainer import TextTrainer
from penstock.train.view import PlainView

PROSE = "The water falls, the wheel turns; it's 1234 times a day.\n\n  Das Wasser fällt — 水が落ちる 🌊\n"


@pytest.fixture(autouse=True)
def _small_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few KiB count as large, and chunks are short."""
    for module in (tokens_module, tokenizer_module):
        monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(chunks_module, "_FIRST", 500)
    monkeypatch.setattr(chunks_module, "_LONGEST", 3000)
    monkeypatch.setattr(growing, "_MOST_PROCESSES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


@pytest.fixture
def text(tmp_path: Path) -> Text:
    """Files of different lengths, of which one begins with a mark and one is not UTF-8."""
    (tmp_path / "files").mkdir()
    contents = [("\ufeff" + PROSE * 40).encode(), b"short", b"caf\xe9 " * 300, (PROSE * 25).encode()]
    for number, content in enumerate(contents):
        (tmp_path / "files" / f"{number}.txt").write_bytes(content)
    return find_text([tmp_path / "files" / f"{number}.txt" for number in range(4)])


def rows(batches: ChunkBatches | TextBatches, count: int) -> list[list[list[int]]]:
    return [batch.tolist() for batch in islice(batches, count)]


def test_chunks_have_the_tokens_of_the_text(text: Text, tmp_path: Path) -> None:
    bpe = train_bpe(PROSE, 300)
    store = TokenStore.open(text, bpe, validation=0, cache=tmp_path / "cache")
    assert isinstance(store.train, GrowingTokens)
    assert store.train.count > 4
    assert "while training goes on" in store.summary()
    expected = bpe.encode(text.read())
    assert store.train[:20].tolist() == expected[:20].tolist()
    assert len(store) == len(expected)
    assert store.train[0 : len(store)].tolist() == expected.tolist()
    places = np.random.default_rng(1).integers(0, len(expected), (3, 50))
    assert store.train.take(places).tolist() == expected[places].tolist()
    assert store.replaced == 300


def test_validation_is_the_end_of_the_text(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TokenStore.open(text, ByteTokenizer(), validation=0.25, cache=tmp_path / "cache")
    whole = text.read().encode()
    together = bytes([*store.train[0 : len(store.train)].tolist(), *store.validation.tolist()])
    assert together == whole
    assert len(store.validation) / len(whole) == pytest.approx(0.25, abs=0.02)
    monkeypatch.setattr(tokens_module, "_MOST_VALIDATION", 400)
    monkeypatch.setattr(chunks_module, "_SAMPLED", 100)
    sampled = bytes(TokenStore.open(text, ByteTokenizer(), 0.25, tmp_path / "cache").validation.tolist())
    assert 200 < len(sampled) < 700
    kept = bytes(store.validation.tolist())
    assert sampled[:20] == kept[:20]
    assert sampled[-20:] != kept[:20]


def test_a_tokenizer_is_trained_on_parts_of_a_large_text(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_TRAINED_ON", 2000)
    monkeypatch.setattr(chunks_module, "_SAMPLED", 500)
    bpe = train_bpe(text, 280)
    assert bpe.decode(bpe.encode(PROSE)) == PROSE
    assert bpe.to_json() == train_bpe(text, 280).to_json()


# Order


@pytest.mark.parametrize("context", [7, 400, 2000])  # 2000: most chunks are too short for a window
def test_each_window_once_within_its_chunk_then_anywhere(text: Text, tmp_path: Path, context: int) -> None:
    store = TokenStore.open(text, ByteTokenizer(), validation=0, cache=tmp_path / "cache")
    tokens = store.train
    assert isinstance(tokens, GrowingTokens)
    batches = store.batches(1, context, seed=3)
    whole = np.frombuffer(text.read().encode(), np.uint8)
    expected = []
    for number in range(tokens.count):
        begin, end = tokens.chunk(number)
        windows = [whole[begin + at * context :][: context + 1] for at in range((end - begin - 1) // context)]
        given = [row for (row,) in rows(batches, len(windows))]
        assert sorted(given) == sorted(window.tolist() for window in windows)
        if len(windows) > 10:
            assert given != [window.tolist() for window in windows]
        expected += given
    later = TextBatches(whole, 1, context, seed=3)
    later = TextBatches(whole, 1, context, seed=3, start=later.epoch_samples)
    assert rows(batches, 40) == rows(later, 40)
    # From anywhere, in batches of any size, whether the tokens are there or not.
    shutil.rmtree(tmp_path / "cache")
    again = TokenStore.open(text, ByteTokenizer(), validation=0, cache=tmp_path / "cache")
    start = len(expected) // 2
    resumed = again.batches(3, context, seed=3, start=start)
    assert [row for batch in rows(resumed, 4) for row in batch][: len(expected) - start] == expected[start:][
        :12
    ]
    assert resumed.state() == start + 12


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """Killed at several moments while it tokenizes, and each time resumed, with or without its cache."""
    sources = python_sources("4MiB").read()
    (tmp_path / "text.txt").write_text((sources + "\n") * 5)  # more than 16 MiB
    (tmp_path / "c.toml").write_text(
        "[model]\ncontext = 64\nwidth = 8\nlayers = 1\nheads = 2\n[data]\nbatch = 256\nvocabulary = 300\n"
        f"path = '{tmp_path / 'text.txt'}'\n[run]\nsteps = 16\nevaluate_every = 4\nevaluate_batches = 1\n"
        "device = 'host'\n"
    )

    def begin(run: str, *given: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", COMMAND_WITH_RATES, "train", *given]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / f"{run} cache")}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=tmp_path)

    def losses(run: str) -> dict[int, float]:
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines)}

    assert begin("through", "--config", "c.toml", "--out", "through").wait() == 0
    process = begin("killed", "--config", "c.toml", "--out", "killed")
    for moment in (4, 12):
        folder = tmp_path / "killed"
        while not list(folder.glob(f"checkpoints/step-{moment:08}.safetensors")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
        if moment == 12:
            shutil.rmtree(tmp_path / "killed cache")
        process = begin("killed", "--resume", "killed")
    assert process.wait() == 0
    assert losses("killed") == losses("through")


def test_too_short_for_a_window(text: Text, tmp_path: Path) -> None:
    store = TokenStore.open(text, ByteTokenizer(), validation=0, cache=tmp_path / "cache")
    with pytest.raises(DataError, match="windows of a context of 100000 need 100001 tokens, and there are"):
        next(store.batches(1, 100_000, seed=0))
    with pytest.raises(DataError, match="a context has 1 or more"):
        store.batches(1, 0, seed=0)


# What may go wrong


def test_made_once_and_known_by_path_size_and_time(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TokenStore.open(text, ByteTokenizer(), validation=0, cache=tmp_path / "cache")
    length = len(first)
    files = sorted((tmp_path / "cache").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)  # must not be used any more
        again = TokenStore.open(text, ByteTokenizer(), validation=0, cache=tmp_path / "cache")
        assert (len(again), again.key) == (length, first.key)
    os.utime(text.files[1], (5, 5))
    assert TokenStore.open(find_text(text.files), ByteTokenizer(), 0, tmp_path / "cache").key != first.key
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"x")  # a damaged file is made anew
    os.utime(text.files[1], ns=(0, first.train.job.chunks[0][0].modified))
    sound = TokenStore.open(text, ByteTokenizer(), validation=0, cache=tmp_path / "cache")
    assert bytes(sound.train[0 : len(sound)].tolist()) == text.read().encode()


@pytest.mark.parametrize(
    ("damage", "message"), [("cut", "shrank from"), ("touch", "was changed"), ("gone", "cannot be read")]
)
def test_a_file_that_changes_is_named(text: Text, tmp_path: Path, damage: str, message: str) -> None:
    divided = chunks_module.DividedText(text)
    path = text.files[-1]
    if damage == "cut":
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
    elif damage == "touch":
        os.utime(path, (1, 1))
    else:
        path.unlink()
    with pytest.raises(DataError, match=rf"{path.name} {message}"):
        divided.sample(1 << 30)


def test_an_error_of_the_process_is_raised_when_its_tokens_are_needed(text: Text, tmp_path: Path) -> None:
    tokens = job_of(text, tmp_path / "cache")
    os.utime(text.files[-1], (1, 1))
    growing_tokens = GrowingTokens(tokens)
    assert growing_tokens.chunk(0)[1] > 0
    for _ in range(2):
        with pytest.raises(DataError, match=r"cannot be tokenized: .*3\.txt was changed while it was"):
            len(growing_tokens)
    growing_tokens.close()
    with pytest.raises(DataError, match=r"3\.txt was changed"):  # tried anew
        len(growing_tokens)


def test_a_process_that_dies_is_told(text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Killed(subprocess.Popen[str]):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            started.append(self)
            self.send_signal(signal.SIGKILL)

    monkeypatch.setattr(subprocess, "Popen", Killed)
    tokens = GrowingTokens(job_of(text, tmp_path / "cache"))
    with pytest.raises(DataError, match=rf"the process {started[0].pid} that does this ended by SIGKILL"):
        tokens.chunk(0)
    monkeypatch.undo()
    tokens.close()
    assert tokens.chunk(0)[0] == 0


def test_a_full_disk_is_told_and_leaves_nothing(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job = job_of(text, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(files_module, "open", lambda path, mode: Full(path, mode), raising=False)
        with pytest.raises(DataError, match=r"\.tokens could not be written: the disk is full"):
            job.make(0, job.chunks[0], ByteTokenizer())
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file could not be written"):
        TokenStore.open(text, ByteTokenizer(), cache=tmp_path / "file")


def test_without_a_cache_a_temporary_folder_is_used(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = CacheFolder.prepare

    def refused(self: CacheFolder) -> None:
        if "user" in str(self.path):
            raise PermissionError(errno.EACCES, "no, for this test")
        prepare(self)

    monkeypatch.setattr(CacheFolder, "prepare", refused)
    with pytest.warns(PenstockWarning, match="cannot be used"):
        store = TokenStore.open(text, ByteTokenizer())
    assert isinstance(store.train, GrowingTokens)
    folder = store.train.job.folder.path
    assert folder.is_dir()
    assert bytes(store.train[:9].tolist()) == b"The water"
    del store
    assert not folder.exists()


def job_of(text: Text, folder: Path) -> Job:
    chunks = chunks_module.DividedText(text).chunks(text.nbytes)
    return Job("0123", ByteTokenizer().to_json(), 256, str(folder), "", False, chunks)


# Training


@pytest.fixture
def config(text: Text) -> Iterator[Config]:
    default = ps.default_device()
    ps.use("host")  # which compiles nothing
    yield Config().changed(
        {
            "model": {"context": 16, "width": 16, "layers": 1, "heads": 2, "dropout": 0.1},
            "data": {"tokenizer": "bytes", "batch": 4, "path": str(text.files[0].parent)},
            "run": {"steps": 20, "evaluate_every": 5, "evaluate_batches": 2},
        }
    )
    ps.use(default)


def trained(config: Config, run: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Train up to a step, from the last checkpoint if there is one; all losses of the run."""
    from rich.console import Console

    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)  # which takes its time
    resumed = load_last(run)[0] if (run / "checkpoints").is_dir() else None
    view = PlainView(Console(file=io.StringIO()))
    trainer = TextTrainer(config, run, view, resumed)
    if steps < config.run.steps:
        step = trainer._record

        def record(metrics: Any) -> None:
            step(metrics)
            if metrics.step == steps:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(trainer, "_record", record)
    trainer.fit()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line.get("validation_loss")) for line in lines]


@pytest.mark.parametrize("begun", ["chunks", "whole"])
def test_a_run_is_resumed_to_the_same_bits(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    if begun == "whole":  # as runs of large texts were before
        monkeypatch.setattr(tokens_module, "LARGE", 1 << 30)
    expected = trained(config, tmp_path / "through", 20, monkeypatch)
    shutil.rmtree(tmp_path / "user")
    first = trained(config, tmp_path / "stopped", 8, monkeypatch)
    assert len(first) < 20
    assert load_last(tmp_path / "stopped")[0].text.startswith("chunks-") == (begun == "chunks")
    monkeypatch.setattr(tokens_module, "LARGE", 1000)
    if begun == "chunks":
        shutil.rmtree(tmp_path / "user")
    assert trained(config, tmp_path / "stopped", 20, monkeypatch) == expected
