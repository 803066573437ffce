"""Data: text however broken, tokens, batches in an order that can be resumed, and prefetching."""

from __future__ import annotations

import builtins
import errno
import gc
import io
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import Device
from penstock import files as files_module
from penstock.config import cache_folder
from penstock.data import (
    ArrayBatches,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    DataError,
    Prefetch,
    TextBatches,
    Tokenizer,
    TokenStore,
    find_text,
    load_tokenizer,
    python_sources,
    token_files,
    train_bpe,
)
from penstock.data import text as text_module
from penstock.data.batches import shuffled

PROSE = (
    "The water falls, the wheel turns; it's 1234 times a day.\n\n  Das Wasser fällt — 水が落ちる 🌊\n" * 30
)
SPACES = st.text(st.sampled_from(" \n\t\r\x0b\x1c\x85\xa0\u2028aé1'.!🌊sZ_²Ⅷ"))


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return train_bpe(PROSE, 400)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_PIECE", 64)


def failing_open(path: Path, error: OSError | None, shrinks: bool = False) -> Callable[..., Any]:
    """`open`, which fails for one path, or gives a file that ends early."""

    class Shrinking(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(100 - self.tell()) if self.tell() < 100 else b""

    def opened(name: Any) -> Any:
        if Path(name) == path:
            if error is not None:
                raise error
            if shrinks:
                return Shrinking(io.FileIO(name))
        return builtins.open(name, "rb")

    return opened


# Text


def test_a_folder_is_searched_and_what_is_of_no_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "deep" / "er" / "b.PY").write_text("second")
    (tmp_path / "empty.md").touch()
    (tmp_path / "binary.txt").write_bytes(b"abc\0def")
    (tmp_path / "picture.png").write_bytes(b"abc")
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    text = find_text(tmp_path)
    assert sorted(text.read().split("\n")) == ["first", "second"]
    assert {path.name: why for path, why in text.skipped.items()} == {
        "empty.md": "empty",
        "binary.txt": "binary",
        "dangling.txt": "no such file or directory",
    }
    assert "2 files" in text.summary()
    assert "empty.md (empty)" in text.summary()
    assert find_text(tmp_path).files == text.files


def test_a_list_keeps_its_order_and_takes_any_suffix(tmp_path: Path) -> None:
    names = ["z.dat", "a.dat", "m"]
    for name in names:
        (tmp_path / name).write_text(name)
    text = find_text([tmp_path / name for name in names])
    assert text.read() == "z.dat\na.dat\nm"
    assert find_text(str(tmp_path / "m")).read() == "m"


@pytest.mark.parametrize("content", [None, b"", b"\0\1\2"])
def test_no_text_is_an_error_that_names_the_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.txt"):
        find_text(path)
    with pytest.raises(DataError, match=tmp_path.name):
        find_text(tmp_path)


def test_undecodable_bytes_are_replaced_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("\ufeffgood \ufffd ".encode() + b"caf\xe9 na\xefve")
    text = find_text(path)
    assert text.read() == "good \ufffd caf\ufffd na\ufffdve"
    assert text.replaced == {path: 2}
    assert "2 places" in text.summary()
    text.read()
    assert text.replaced == {path: 2}  # and not twice as many


@given(st.lists(st.text(max_size=300), max_size=4), st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_pieces_make_up_the_text(parts: list[str], size: int) -> None:
    whole = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_PIECE", size)
        patch.setattr(text_module, "_CUT_SEARCHED", size)
        assert "".join(text_module.pieces(whole)) == whole


def test_files_that_vanish_are_noted(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name * 10)
    text = find_text([tmp_path / name for name in ("a", "b", "c")])
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("b")
    assert text.read() == "c" * 10
    assert text.skipped == {tmp_path / "a": "vanished", tmp_path / "b": "shrank from 10 to 1 bytes"}
    (tmp_path / "c").unlink()
    with pytest.raises(DataError, match="vanished"):
        TokenStore.open(text, ByteTokenizer(), cache=tmp_path / "cache")
    with pytest.raises(DataError, match="vanished"):
        train_bpe(text, 300)
    with pytest.raises(DataError, match="vanished"):
        CharTokenizer(text)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("x" * 1000)
    text = find_text(path)
    monkeypatch.setattr(text_module, "open_regular", failing_open(path, None, shrinks=True), raising=False)
    assert text.read() == "x" * 100
    assert "first 100 bytes" in text.skipped[path]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_unreadable_files_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    before = find_text(tmp_path)
    refused = failing_open(tmp_path / "a.txt", OSError(number, os.strerror(number)))
    monkeypatch.setattr(text_module, "open_regular", refused, raising=False)
    for text in (before, find_text(tmp_path)):
        assert text.read() == "b"
        assert text.skipped == {tmp_path / "a.txt": os.strerror(number).lower()}


def test_python_sources() -> None:
    text = python_sources("200KiB")
    assert 100 << 10 < text.nbytes <= 200 << 10
    assert all(path.suffix == ".py" for path in text.files)
    assert python_sources("200KiB").read() == text.read()
    assert python_sources("400KiB").files[: len(text.files)] == text.files
    with pytest.raises(DataError, match="no text"):
        python_sources(0)


# Tokenizers


@given(st.one_of(st.text(), SPACES))
@settings(max_examples=200, deadline=None)
def test_bpe_gives_the_ids_of_the_library_and_comes_back(bpe: BPETokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert ids.tolist() == bpe._model.encode(text).ids
    assert bpe.decode(ids) == text


@given(st.text(min_size=1), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_round_trips_and_streams(bpe: BPETokenizer, text: str, seed: int) -> None:
    tokenizers: list[Tokenizer] = [ByteTokenizer(), bpe, CharTokenizer(text)]
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join(stream.push(number) for number in ids) + stream.finish() == text
        assert ids.min() >= 0
        assert ids.max() < tokenizer.vocab_size
        any_ids = np.random.default_rng(seed).integers(0, tokenizer.vocab_size, 20)
        stream = tokenizer.stream()
        streamed = "".join(stream.push(number) for number in any_ids) + stream.finish()
        assert streamed == tokenizer.decode(any_ids)


def test_half_characters_are_held_back() -> None:
    stream = ByteTokenizer().stream()
    assert [stream.push(byte) for byte in "é🌊".encode()] == ["", "é", "", "", "", "🌊"]
    assert stream.push(list("🌊".encode()[:2])) == ""
    assert stream.finish() == "\ufffd"
    assert ByteTokenizer().decode([0xF0, 0x9F, 65]) == "\ufffdA"


def test_a_lone_surrogate_is_a_question_mark(bpe: BPETokenizer) -> None:
    for tokenizer in (ByteTokenizer(), bpe, CharTokenizer("ab?")):
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_what_a_tokenizer_does_not_know(bpe: BPETokenizer) -> None:
    with pytest.raises(DataError, match="3 characters, and not 'é' '🌊'"):
        CharTokenizer("abc").encode("abcé🌊")
    for tokenizer in (ByteTokenizer(), bpe, CharTokenizer("abc")):
        for wrong in (-1, tokenizer.vocab_size):
            with pytest.raises(DataError, match=f"no token {wrong}"):
                tokenizer.decode([0, wrong])
        assert tokenizer.decode([]) == ""
        assert len(tokenizer.encode("")) == 0
    with pytest.raises(DataError, match="256 or more"):
        train_bpe("abc", 255)
    for empty in (CharTokenizer, lambda text: train_bpe(text, 300)):
        with pytest.raises(DataError, match="empty"):
            empty("")


def test_characters_are_sorted() -> None:
    tokenizer = CharTokenizer("cab🌊a")
    assert tokenizer.encode("abc🌊").tolist() == [0, 1, 2, 3]
    assert tokenizer.vocab_size == 4


def test_tokenizers_are_saved_whole(tmp_path: Path, bpe: BPETokenizer) -> None:
    for tokenizer in (ByteTokenizer(), CharTokenizer(PROSE), bpe):
        path = tmp_path / "deep" / "tokenizer.json"
        tokenizer.save(path)
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer)
        assert loaded.encode(PROSE).tolist() == tokenizer.encode(PROSE).tolist()
        assert loaded.to_json() == tokenizer.to_json()
        assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]


def test_a_hugging_face_file_with_added_tokens_loads(tmp_path: Path, bpe: BPETokenizer) -> None:
    state = json.loads(bpe.to_json())
    added = {"id": bpe.vocab_size, "content": "<|endoftext|>", "single_word": False, "normalized": False}
    state["added_tokens"] = [added | {"lstrip": False, "rstrip": False, "special": True}]
    state["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.vocab_size == bpe.vocab_size + 1
    text = "the end<|endoftext|> the wheel"
    assert bpe.vocab_size in loaded.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.encode(PROSE).tolist() == bpe.encode(PROSE).tolist()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"type": "characters"}', '{"model": {"type": "BPE"}}', '{"model": 3}', "\0"],
)
def test_what_is_no_tokenizer(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    with pytest.raises(DataError, match=r"broken\.json"):
        load_tokenizer(path)
    path.write_text(content)
    with pytest.raises(DataError, match=r"broken\.json"):
        load_tokenizer(path)


def test_a_vocabulary_that_is_not_byte_level(tmp_path: Path, bpe: BPETokenizer) -> None:
    state = json.loads(bpe.to_json())
    state["model"] = {"type": "BPE", "vocab": {"a b": 0}, "merges": []}
    (tmp_path / "t.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"'a b'.*byte-level"):
        load_tokenizer(tmp_path / "t.json")


# Tokens


def test_tokens_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: BPETokenizer) -> None:
    first = TokenStore.open(PROSE, bpe, validation=0.25, cache=tmp_path)
    ids = bpe.encode(PROSE)
    assert np.concatenate([first.train, first.validation]).tolist() == ids.tolist()
    assert len(first) == len(ids)
    assert len(first.train) == int(len(ids) * 0.75)
    assert first.train.dtype == np.uint16
    assert not first.train.flags.writeable
    monkeypatch.setattr(BPETokenizer, "encode", None)  # must not be used any more
    second = TokenStore.open(PROSE, bpe, validation=0, cache=tmp_path)
    assert second.path == first.path
    assert second.train.tolist() == ids.tolist()
    assert len(second.validation) == 0


def test_other_text_and_other_tokenizers_have_other_files(tmp_path: Path, bpe: BPETokenizer) -> None:
    paths = {
        TokenStore.open(text, tokenizer, cache=tmp_path).path
        for text in (PROSE, PROSE + "x")
        for tokenizer in (bpe, ByteTokenizer(), CharTokenizer(PROSE + "x"))
    }
    assert len(paths) == 6


@pytest.mark.usefixtures("small_pieces")
def test_pieces_change_no_token(tmp_path: Path, bpe: BPETokenizer) -> None:
    path = tmp_path / "text"
    path.write_bytes(PROSE.encode())
    text = find_text(path)
    assert len(list(text)) > 20
    stored = TokenStore.open(text, bpe, validation=0, cache=tmp_path / "cache")
    assert stored.train.tolist() == bpe.encode(PROSE).tolist()
    assert TokenStore.open(PROSE, bpe, cache=tmp_path / "cache").path == stored.path


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    text = "".join(map(chr, [*range(0x20, 0xD800), *range(0x10000, 0x14000)]))
    store = TokenStore.open(text, CharTokenizer(text), validation=0, cache=tmp_path)
    assert store.train.dtype == np.uint32
    assert store.train.tolist() == list(range(len(text)))


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "header", "foreign"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    store = TokenStore.open(PROSE, ByteTokenizer(), validation=0, cache=tmp_path)
    other = TokenStore.open(PROSE[::-1], ByteTokenizer(), cache=tmp_path)
    whole = store.path.read_bytes()
    broken = {
        "cut": whole[:-2],
        "longer": whole + b"12",
        "empty": b"",
        "header": b"x" + whole[1:],
        "foreign": other.path.read_bytes(),
    }
    replaced = tmp_path / "broken"
    replaced.write_bytes(broken[damage])
    replaced.replace(store.path)  # as a new file: the old one is still mapped
    again = TokenStore.open(PROSE, ByteTokenizer(), validation=0, cache=tmp_path)
    assert again.path.read_bytes() == whole
    assert again.train.tolist() == list(PROSE.encode())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, when: int
) -> None:
    class Full(io.FileIO):
        writes = 0

        def write(self, data: Any, /) -> int:
            Full.writes += 1
            if Full.writes > when:
                raise OSError(number, os.strerror(number))
            return super().write(data)

    monkeypatch.setattr(files_module, "open", lambda path, mode: Full(path, mode), raising=False)
    with pytest.raises(DataError, match=r"\.tokens could not be written: .*(full|read-only)|Read-only"):
        TokenStore.open(PROSE, ByteTokenizer(), cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    Full.writes = 2
    (tmp_path / "t.json").write_text("old")
    with pytest.raises(DataError, match=r"t\.json could not be written"):
        ByteTokenizer().save(tmp_path / "t.json")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_text_that_changes_under_way_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("old text")

    class Changing(ByteTokenizer):
        def encode(self, text: str) -> Any:
            return super().encode(text)

        def to_json(self) -> str:  # called for each of the two readings
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                path.write_text("new text, longer")
            return super().to_json()

    changed = TokenStore.open(find_text(path), Changing(), validation=0, cache=tmp_path / "cache")
    assert bytes(changed.train.tolist()) == b"new text, longer"
    again = TokenStore.open("old text", ByteTokenizer(), validation=0, cache=tmp_path / "cache")
    assert bytes(again.train.tolist()) == b"old text"


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_TEXTS_KEPT", 3)
    abandoned = tmp_path / "x.tokens.1-0000000a.part"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    recent = tmp_path / "y.tokens.1-0000000a.part"
    recent.touch()
    stores = []
    for number in range(5):
        stores.append(TokenStore.open(f"text {number}", ByteTokenizer(), validation=0, cache=tmp_path))
        os.utime(stores[-1].path, (number + 1, number + 1))
    assert {path.name for path in tmp_path.iterdir()} == {store.path.name for store in stores[2:]} | {
        recent.name
    }
    monkeypatch.setattr(token_files, "_BYTES_KEPT", 100)
    TokenStore.open("text 4", ByteTokenizer(), cache=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {store.path.name for store in stores[3:]} | {
        recent.name
    }


def test_the_default_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, variable in (("linux", "XDG_CACHE_HOME"), ("win32", "LOCALAPPDATA"), ("darwin", "HOME")):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setenv(variable, str(tmp_path))
        assert tmp_path in cache_folder().parents
    monkeypatch.setattr(sys, "platform", "linux")
    assert tmp_path in TokenStore.open("abc", ByteTokenizer()).path.parents


def test_wrong_requests_for_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fraction"):
        TokenStore.open("abc", ByteTokenizer(), validation=1.0, cache=tmp_path)
    with pytest.raises(DataError, match="empty"):
        TokenStore.open("", ByteTokenizer(), cache=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="could not be written"):
        TokenStore.open("abc", ByteTokenizer(), cache=tmp_path / "file" / "cache")


# Batches


@given(st.integers(1, 3000), st.integers(-5, 2**70), st.integers(0, 10**12))
@settings(max_examples=100, deadline=None)
def test_an_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    epochs, items = shuffled(np.arange(epoch * count, (epoch + 1) * count), count, seed)
    assert set(epochs.tolist()) == {epoch}
    assert sorted(items.tolist()) == list(range(count))


def test_the_order_looks_random() -> None:
    count = 1000
    orders = [
        shuffled(np.arange(count) + epoch * count, count, seed)[1] for seed in (0, 1) for epoch in (0, 1)
    ]
    orders.append(np.arange(count))
    for value, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(value == other) < 12  # one is expected
        assert abs(np.corrcoef(value, other)[0, 1]) < 0.15
    for order in orders[:-1]:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.15
    firsts = shuffled(np.arange(7000) * 7, 7, 3)[1]
    assert np.bincount(firsts, minlength=7) == pytest.approx([1000] * 7, abs=150)


@given(st.integers(1, 9), st.integers(2, 200), st.integers(1, 7), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_every_window_once_an_epoch(context: int, length: int, batch: int, seed: int) -> None:
    if length <= context:
        return
    batches = TextBatches(np.arange(length, dtype=np.uint16), batch, context, seed)
    count = batches.epoch_samples
    rows = np.concatenate([next(batches) for _ in range(-(-3 * count // batch))])
    assert rows.dtype == np.int32
    assert (rows == rows[:, :1] + np.arange(context + 1)).all()
    for epoch in range(3):
        starts = np.sort(rows[epoch * count : (epoch + 1) * count, 0])
        assert (starts == starts[0] + context * np.arange(count)).all()
        assert 0 <= starts[0] < context
        assert starts[-1] + context < length
    assert length - 1 - count * context < 2 * context  # the remainder that an epoch leaves out


def test_windows_shift_between_epochs() -> None:
    batches = TextBatches(np.arange(1000), 99, 10, seed=0)
    assert batches.epoch_samples == 98
    shifts = {int(next(batches)[0, 0]) % 10 for _ in range(100)}
    assert shifts == set(range(10))


@given(st.integers(0, 5000), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_text_resumes_at_the_exact_sample(steps: int, batch: int) -> None:
    tokens = np.arange(500, dtype=np.uint16)
    through = TextBatches(tokens, batch, 8, seed=3)
    through._next = 0
    for _ in range(steps % 130):
        next(through)
    resumed = TextBatches(tokens, batch, 8, seed=3, start=through.state())
    for _ in range(4):
        assert next(through).tolist() == next(resumed).tolist()
    assert resumed.state() == through.state()


def test_samples_do_not_depend_on_the_batch() -> None:
    tokens = np.arange(5000)
    small, large = TextBatches(tokens, 4, 16, seed=1), TextBatches(tokens, 512, 16, seed=1)
    rows = np.concatenate([next(small) for _ in range(512)])
    assert rows.tolist() == np.concatenate([next(large) for _ in range(4)]).tolist()
    assert rows.tolist() != np.concatenate([next(TextBatches(tokens, 2048, 16, seed=2))]).tolist()


@given(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_rows_of_arrays(rows: int, batch: int, keep_last: bool, steps: int) -> None:
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    y = np.arange(rows)
    if batch > rows and not keep_last:
        with pytest.raises(DataError, match="cannot be filled"):
            ArrayBatches(x, y, batch=batch, seed=0)
        return
    batches = ArrayBatches(x, y, batch=batch, seed=0, keep_last=keep_last)
    for _ in range(3):
        seen = []
        for xs, ys in itertools.islice(batches, batches.epoch_batches):
            assert xs.tolist() == x[ys].tolist()
            assert len(ys) == batch or keep_last
            seen += ys.tolist()
        assert len(seen) == len(set(seen)) == (rows if keep_last else rows - rows % batch)
    for _ in range(steps):
        next(batches)
    resumed = ArrayBatches(x, y, batch=batch, seed=0, keep_last=keep_last, start=batches.state())
    for _ in range(3):
        assert next(resumed)[1].tolist() == next(batches)[1].tolist()


def test_another_process_sees_the_same_order(tmp_path: Path) -> None:
    script = """
import hashlib, sys
import numpy as np
from penstock.data import ArrayBatches, TextBatches, find_text, train_bpe
text = find_text(sys.argv[1])
bpe = train_bpe(text, 300)
tokens = bpe.encode(text.read())
found = hashlib.sha256(bpe.to_json().encode())
batches, arrays = TextBatches(tokens, 16, 8, 7), ArrayBatches(tokens, batch=16, seed=7)
for _ in range(50):
    found.update(next(batches))
    found.update(next(arrays)[0])
print(found.hexdigest())
"""
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"{number} {PROSE}")
    results = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", script, str(tmp_path)]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        results.add(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        )
    assert len(results) == 1
    assert TextBatches(np.arange(100), 4, 8, seed=7).__next__()[:, 0].tolist() == [6, 22, 62, 14]  # for ever


def test_wrong_requests_for_batches() -> None:
    tokens = np.arange(10)
    with pytest.raises(DataError, match="need 11 tokens, and there are 10"):
        TextBatches(tokens, 2, 10, seed=0)
    with pytest.raises(DataError, match="float64"):
        TextBatches(tokens * 1.0, 2, 2, seed=0)
    with pytest.raises(DataError, match=r"shape \(5, 2\)"):
        TextBatches(tokens.reshape(5, 2), 2, 2, seed=0)
    for wrong in ({"batch": 0}, {"batch": 2, "start": -1}):
        with pytest.raises(DataError, match="1 or more samples"):
            TextBatches(tokens, context=2, seed=0, **wrong)
    for arrays in ((tokens, tokens[:5]), (), (np.zeros((0, 3)),), (np.float32(3),)):
        with pytest.raises(DataError, match="same number of rows"):
            ArrayBatches(*arrays, batch=1, seed=0)


# Prefetching


@pytest.fixture
def host() -> Iterator[Device]:
    made = Device.over(DRIVERS["host"]())
    yield made
    made.close()


class Counting:
    """Batches of a number that count how many were made."""

    def __init__(self, end: int = 1 << 60, fail_at: int = -1, pause: float = 0.0) -> None:
        self.made, self.end, self.fail_at, self.pause = 0, end, fail_at, pause

    def __next__(self) -> np.ndarray:
        time.sleep(self.pause)
        if self.made == self.fail_at:
            raise ZeroDivisionError("in the middle")
        if self.made == self.end:
            raise StopIteration
        self.made += 1
        return np.array([self.made - 1])

    def state(self) -> int:
        return self.made


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock prefetch"]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("driver", DRIVERS)
def test_prefetching_changes_nothing(driver: str) -> None:
    device = Device.over(DRIVERS[driver]())
    tokens = np.arange(3000, dtype=np.uint16) % 700
    plain = TextBatches(tokens, 4, 16, seed=5)
    with Prefetch(TextBatches(tokens, 4, 16, seed=5), device) as batches:
        for _ in range(20):
            ids = next(batches)
            assert isinstance(ids, ps.Tensor)
            assert ids.device is device
            expected = next(plain)
            assert (ids[:, 1:] - ids[:, :-1]).numpy().tolist() == np.diff(expected, axis=1).tolist()
            assert batches.state() == plain.state()
        del ids
    rows = np.arange(20.0, dtype=np.float32)
    with Prefetch(ArrayBatches(rows, rows * 2, batch=5, seed=1), device) as pairs:
        for x, y in itertools.islice(pairs, 5):
            assert (x * 2).numpy().tolist() == y.numpy().tolist()
    del x, y
    assert not prefetch_threads()
    device.cleanup()
    assert device.memory_stats().live_bytes == 0
    device.close()


def test_back_pressure(host: Device) -> None:
    source = Counting()
    with Prefetch(source, host, depth=3) as batches:
        for taken in range(10):
            wait_until(lambda taken=taken: source.made == taken + 3)  # type: ignore[misc]
            time.sleep(0.01)
            assert source.made == taken + 3
            assert batches.state() == taken
            assert next(batches).numpy().tolist() == [taken]


def test_the_state_is_that_of_the_last_batch_taken(host: Device) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    plain = [batch.tolist() for batch in itertools.islice(TextBatches(tokens, 4, 16, seed=5), 40)]
    state, seen = 0, []
    for _ in range(8):
        with Prefetch(TextBatches(tokens, 4, 16, seed=5, start=state), host) as batches:
            seen += [next(batches).numpy().tolist() for _ in range(5)]
        state = batches.state()
    assert seen == plain
    assert state == 160


def test_the_end(host: Device) -> None:
    with Prefetch(Counting(end=7), host, depth=2) as batches:
        assert [int(batch[0]) for batch in batches] == list(range(7))
        assert next(batches, None) is None
        assert batches.state() == 7


def test_an_error_comes_after_the_batches_before_it(host: Device) -> None:
    with Prefetch(Counting(fail_at=5), host) as batches:
        for number in range(5):
            assert int(next(batches)[0]) == number
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="in the middle") as caught:
                next(batches)
            assert "__next__" in [entry.name for entry in caught.traceback][-1]
            assert str(caught.traceback[-1].path) == __file__
        assert batches.state() == 5


def test_an_error_of_the_device_reaches_the_consumer(host: Device) -> None:
    class Wrong(Counting):
        def __next__(self) -> np.ndarray:
            return np.array(["text"])

    with Prefetch(Wrong(), host) as batches, pytest.raises(TypeError):
        next(batches)


def test_waiting_is_counted(host: Device) -> None:
    with Prefetch(Counting(pause=0.03), host) as batches:
        next(batches)
        assert batches.waited_seconds > 0.01


def test_closing_ends_the_thread(host: Device) -> None:
    batches = Prefetch(Counting(), host)
    next(batches)
    assert len(prefetch_threads()) == 1
    batches.close()
    assert not prefetch_threads()
    batches.close()
    with pytest.raises(DataError, match="closed"):
        next(batches)
    assert batches.state() == 1
    with pytest.raises(KeyError), Prefetch(Counting(), host) as batches:
        raise KeyError
    assert not prefetch_threads()
    with pytest.raises(DataError, match="depth"):
        Prefetch(Counting(), host, depth=0)


def test_a_consumer_that_lets_go_ends_the_thread(host: Device) -> None:
    for _ in Prefetch(Counting(), host):
        break
    gc.collect()
    wait_until(lambda: not prefetch_threads())


def test_closing_from_another_thread_wakes_the_consumer(host: Device) -> None:
    batches = Prefetch(Counting(pause=0.2), host)
    threading.Timer(0.02, batches.close).start()
    with pytest.raises(DataError, match="closed"):
        next(batches)
    wait_until(lambda: not prefetch_threads())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told(host: Device) -> None:
    with Prefetch(Counting(), host) as batches:
        next(batches)
        if not (child := os.fork()):
            try:
                next(batches)
            except DataError:
                batches.close()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.slow("raise SystemExit(0)", "next(batches, 1); del batches", "batches = None")
@pytest.mark.parametrize(
    "ending", ["", "raise SystemExit(0)", "batches = None", "next(batches, 1); del batches"]
)
def test_a_program_ends_while_batches_are_made(ending: str) -> None:
    script = f"""
import numpy as np
from penstock.data import Prefetch, TextBatches
batches = Prefetch(TextBatches(np.arange(10000), 16, 64, seed=0), depth=3)
for number in range(3):
    next(batches)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_data_does_not_load_the_tokenizers_library() -> None:
    code = "import sys, penstock.data; print('tokenizers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
