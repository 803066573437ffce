"""Loaders of any dataset: the batches of a plain loop, whoever makes them and wherever they begin."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.data import Arrays, DataError, ImageFolder, Loader, collate, packed, padded
from penstock.data.workers import Workers

HOST = "host"


class Squares:
    """Samples that are computed; each is a pair of an array and an integer."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.float32], int]:
        if index == 1000:
            raise KeyError("no such sample")
        if index == 2000:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 3000:
            sys.exit(3)
        return np.float32([index, index * index]), index


class Counted:
    """Samples that can only be iterated, the same in each epoch."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


class Noisy(Squares):
    """Samples that use NumPy's generator."""

    def __getitem__(self, index: int) -> Any:
        return np.random.random(2) + index


class Growing(Squares):
    """Samples of more and more bytes, the first of which has none."""

    def __getitem__(self, index: int) -> Any:
        return np.full(index * 1000, index, np.int32)


class Together(Squares):
    """Samples that are taken together, as a dict each."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"x": float(index), "name": f"n{index}"} for index in indices]


def numbers(loader: Loader) -> list[list[int]]:
    """The samples of each batch of an epoch of `Squares`."""
    batches = []
    for rows, indices in loader:
        assert isinstance(rows, ps.Tensor)
        result = indices.numpy()
        np.testing.assert_array_equal(rows.numpy(), np.stack([result, result * result], 1).astype(np.float32))
        batches.append(result.tolist())
    return batches


# Order


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_epochs_are_those_of_a_plain_loop_and_resume_anywhere(
    length: int, batch: int, shuffle: bool, drop_last: bool, data: st.DataObject
) -> None:
    make = partial(Loader, Squares(length), batch, shuffle=shuffle, seed=3, drop_last=drop_last, device=HOST)
    if drop_last and batch > length:
        with pytest.raises(DataError, match=f"a dataset of {length} samples has no batch of {batch}"):
            make()
        return
    loader = make()
    epochs, states = [], []
    for _ in range(2):
        states.append(loader.state())
        epochs.append(numbers(loader))
    for epoch in epochs:
        assert len(epoch) == len(loader)
        flat = [number for rows in epoch for number in rows]
        kept = length // batch * batch if drop_last else length
        assert len(flat) == len(set(flat)) == kept
        assert all(len(rows) == batch for rows in epoch[:-1])
        assert set(flat) <= set(range(length))
        if not shuffle:
            assert flat == list(range(kept))
    # From the middle of the first epoch.
    taken = data.draw(st.integers(1, len(epochs[0])))
    begun = make()
    first = [indices.numpy().tolist() for _, indices in islice(begun, taken)]
    resumed = make(start=begun.state())
    rest = numbers(resumed)
    if taken == len(epochs[0]):
        assert (first, rest) == (epochs[0], epochs[1])
    else:
        assert first + rest == epochs[0]
        assert numbers(resumed) == epochs[1]


def test_epochs_are_shuffled_differently_and_by_the_seed() -> None:
    loader = Loader(Squares(50), 50, shuffle=True, seed=1, device=HOST)
    first, second = numbers(loader), numbers(loader)
    assert first != second
    assert first != numbers(Loader(Squares(50), 50, shuffle=True, seed=2, device=HOST))


# Processes


def test_processes_make_the_same_batches_and_leave_nothing_behind() -> None:
    expected = Loader(Squares(23), 4, shuffle=True, seed=5, device=HOST)
    before = shared_memory()
    with Loader(Squares(23), 4, shuffle=True, seed=5, workers=2, device=HOST) as loader:
        assert numbers(loader) == numbers(expected)
        first = next(iter(loader))  # a loop that ends early
        assert loader.state() == 23 + 4
        rest = numbers(loader)
        assert [first[1].numpy().tolist(), *rest] == numbers(expected)
    loader.close()
    assert shared_memory() <= before


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("psm_*")} if folder.is_dir() else set()


@pytest.mark.slow
def test_chance_does_not_depend_on_how_many_processes_there_are() -> None:
    results = []
    for workers in (1, 2):
        with Loader(Noisy(12), 4, workers=workers, seed=7, device=HOST) as loader:
            results.append([batch.numpy() for batch in loader])
    np.testing.assert_array_equal(*results)
    assert len(np.unique(results[0])) == 24


@pytest.mark.slow
def test_samples_may_grow() -> None:
    with Loader(Growing(9), 1, workers=1, device=HOST) as loader:
        for number, batch in enumerate(loader):
            np.testing.assert_array_equal(batch.numpy(), np.full((1, number * 1000), number, np.int32))


def test_an_error_in_a_process_is_raised_as_it_was_and_does_not_end_it() -> None:
    with Loader(Squares(1001), 1, workers=1, start=998, device=HOST) as loader:
        with pytest.raises(KeyError, match="no such sample") as raised:
            numbers(loader)
        assert any("in a worker process" in note for note in raised.value.__notes__)
        assert loader.state() == 1000
        with pytest.raises(KeyError):
            numbers(loader)


def test_a_process_that_dies_is_told() -> None:
    with (
        Loader(Squares(2001), 1, workers=1, start=1998, device=HOST) as loader,
        pytest.raises(DataError, match=r"worker 0 of 1, process \d+, ended by SIGKILL"),
    ):
        numbers(loader)


def test_a_process_that_exits_takes_its_memory_with_it_and_is_told() -> None:
    workers = Workers(Squares(3001).__getitem__, 1, seed=0)
    workers.ask(0, 0)
    workers.ask(1, 3000)
    workers._processes[0].join(60)
    with pytest.raises(DataError, match=r"worker 0 of 1, process \d+, ended with status 3"):
        workers.take()
    workers.close()


def test_what_cannot_be_sent_to_a_process_is_told() -> None:
    with pytest.raises(DataError, match=r"cannot be pickled: .*use workers=0"):
        next(iter(Loader([threading.Lock()], 1, workers=1, device=HOST)))


# Samples


def test_samples_taken_together_with_names_and_texts() -> None:
    (batch,) = Loader(Together(3), 3, device=HOST)
    assert batch["name"] == ["n0", "n1", "n2"]
    assert batch["x"].dtype == ps.float32
    np.testing.assert_array_equal(batch["x"].numpy(), np.float32([0, 1, 2]))


def test_rows_of_arrays_also_mapped_from_a_file(tmp_path: Path) -> None:
    x, y = np.random.default_rng(1).standard_normal((10, 3)), np.arange(10)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    loader = Loader(Arrays(mapped, y), 4, shuffle=True, seed=1, device=HOST)
    for rows, indices in loader:
        np.testing.assert_array_equal(rows.numpy(), x[indices.numpy()])
    np.testing.assert_array_equal(np.concatenate([rows.numpy() for rows in Loader(x, 4, device=HOST)]), x)
    with pytest.raises(DataError, match="the same number of rows"):
        Arrays(x, y[:3])


def test_tuples_of_tuples() -> None:
    (first, (second, third)) = collate([(1, (2.5, np.zeros(2))), (3, (4.5, np.ones(2)))])
    assert first.tolist() == [1, 3]
    assert second.tolist() == [2.5, 4.5]
    assert third.tolist() == [[0, 0], [1, 1]]


ragged = st.lists(st.integers(0, 7), min_size=1, max_size=6)


@given(lengths=ragged, multiple=st.integers(1, 5), width=st.integers(1, 3))
def test_samples_of_different_lengths(lengths: list[int], multiple: int, width: int) -> None:
    samples = [(np.full((length, width), length, np.float32), at) for at, length in enumerate(lengths)]
    (values, labels), told = padded(samples, value=-1, multiple=multiple)
    assert told.tolist() == lengths
    assert labels.tolist() == list(range(len(lengths)))
    assert values.shape == (len(lengths), -(-max(lengths) // multiple) * multiple, width)
    for row, length in zip(values, lengths, strict=True):
        assert (row[:length] == length).all()
        assert (row[length:] == -1).all()
    (values, labels), told = packed(samples)
    assert told.tolist() == lengths
    np.testing.assert_array_equal(values[:, 0], np.repeat(lengths, lengths))


def test_images_of_more_than_8_bits_are_not_cut_off(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "class").mkdir()
    pixels = np.array([[0, 257 * 100], [257 * 200, 65535]], np.uint16)
    Image.fromarray(pixels).save(tmp_path / "class" / "a.png")
    Image.fromarray(pixels.astype(np.float32)).save(tmp_path / "class" / "b.tiff")
    folder = ImageFolder(tmp_path)
    np.testing.assert_allclose(folder[0][0], np.stack([pixels / 65535] * 3), rtol=1e-6)
    with pytest.raises(DataError, match=r"b.tiff have no known range \(mode F\); give a transform"):
        folder[1]


def test_numbers_of_a_batch_have_a_dtype_that_holds_them() -> None:
    for samples in ([2.5, 1], [1, 2.5], [1.0, 2.0], [True, 0.5]):
        assert next(iter(Loader(samples, 2, device=HOST))).dtype == ps.float32
    assert next(iter(Loader([1, 2], 2, device=HOST))).dtype == ps.int64
    with pytest.raises(DataError, match="uint64 and in a signed dtype, and none holds them all"):
        next(iter(Loader([1, 2**63 + 1], 2, device=HOST)))


@pytest.mark.parametrize(
    "wrong", [{"batch": 2.0}, {"batch": True}, {"workers": 0.5}, {"start": 1.5}, {"seed": 1.5}], ids=str
)
def test_counts_of_a_loader_are_integers(wrong: dict[str, Any]) -> None:
    ((name, count),) = wrong.items()
    with pytest.raises(DataError, match=f"{name} is an integer, and {count} was given"):
        Loader(range(4), **{"batch": 2} | wrong)


def test_ragged_samples_are_refused_with_what_would_do() -> None:
    samples = [np.zeros(3), np.zeros(5)]
    with pytest.raises(DataError, match=r"shapes, such as \(3,\), \(5,\); collate=ps.data.padded"):
        next(iter(Loader(samples, 2, device=HOST)))
    values, lengths = next(iter(Loader(samples, 2, collate=partial(padded, multiple=4), device=HOST)))
    assert values.shape == (2, 8)
    assert lengths.numpy().tolist() == [3, 5]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"a": 1}, {"b": 1}], r"the same keys, and not all have \['a'\]"),
        ([(1, 2), (1,)], "the same parts, and not all have 2"),
        ([object()], "and object was given"),
    ],
)
def test_samples_that_do_not_fit_together(samples: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        collate(samples)


# Iterables


class Stream:
    """Items without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def items(loader: Loader) -> list[list[int]]:
    return [batch.numpy().tolist() for batch in loader]


def test_an_iterable_gives_an_epoch_each_time() -> None:
    loader = Loader(Stream(), 3, device=HOST)
    assert items(loader) == items(loader) == [[0, 1, 2], [3, 4, 5], [6]]
    assert loader.state() == 14
    with pytest.raises(TypeError, match="nobody knows how many items Stream has"):
        len(loader)
    dropping = Loader(Stream(), 3, drop_last=True, device=HOST)
    assert items(dropping) == items(dropping) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("start", "rest"), [(3, [[3, 4, 5], [6]]), (7, [[0, 1, 2], [3, 4, 5], [6]]), (10, [[3, 4, 5], [6]])]
)
def test_an_iterable_is_resumed(start: int, rest: list[list[int]]) -> None:
    assert items(Loader(Stream(), 3, start=start, device=HOST)) == rest


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_iterate_to_the_same_batches(workers: int) -> None:
    with Loader(Stream(), 2, workers=workers, device=HOST) as loader:
        assert items(loader) == [[0, 1], [2, 3], [4, 5], [6]]
        assert next(iter(loader)).tolist() == [0, 1]  # a loop that ends early
        assert loader.state() == 9
        assert items(loader) == [[2, 3], [4, 5], [6]]
        assert items(loader) == [[0, 1], [2, 3], [4, 5], [6]]
    with Loader(Stream(), 2, workers=workers, drop_last=True, start=25, device=HOST) as loader:
        assert items(loader) == [[4, 5]]
        assert items(loader) == [[0, 1], [2, 3], [4, 5]]


def test_an_iterator_has_one_epoch() -> None:
    loader = Loader(iter(range(4)), 2, device=HOST)
    assert items(loader) == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="gives no items; an iterator gives them once"):
        items(loader)


# Errors


def test_what_is_no_dataset_or_no_size() -> None:
    with pytest.raises(DataError, match="has items by index and a length, or can be iterated; int cannot"):
        Loader(7, 1)
    with pytest.raises(DataError, match="Stream has no items by index, so it cannot be shuffled"):
        Loader(Stream(), 1, shuffle=True)
    for sizes in ({"batch": 0}, {"batch": 1, "start": -1}, {"batch": 1, "workers": -1}):
        with pytest.raises(DataError, match="1 or more samples"):
            Loader(Squares(3), **sizes)
    with pytest.raises(DataError, match="a dataset of 0 samples"):
        Loader([], 1)
    with pytest.raises(DataError, match="a multiple of 1 or more"):
        padded([np.zeros(1)], multiple=0)


def test_a_loop_inside_a_loop_is_refused() -> None:
    loader = Loader(Squares(3), 1, device=HOST)
    for _ in loader:
        with pytest.raises(DataError, match="iterated already"):
            iter(loader)
        break


@pytest.mark.parametrize("workers", [0, 1])
def test_so_are_two_loops_side_by_side(workers: int) -> None:
    with Loader(Squares(4), 1, device=HOST, workers=workers) as loader:
        with pytest.raises(DataError, match="iterated already"):
            next(zip(loader, loader, strict=True))
        assert len(list(loader)) == 3  # the first of the two took one


# Images


def test_folders_of_images(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(1).integers(0, 256, (2, 6, 4, 3), dtype=np.uint8)
    for name, image in zip(("cat", "dog"), pixels, strict=True):
        (tmp_path / name).mkdir()
        Image.fromarray(image).save(tmp_path / name / "1.png")
        (tmp_path / name / "notes.txt").write_text("no image")
    dataset = ImageFolder(tmp_path)
    assert dataset.classes == ["cat", "dog"]
    ((images, labels),) = Loader(dataset, 2, device=HOST)
    assert labels.numpy().tolist() == [0, 1]
    np.testing.assert_array_equal(images.numpy(), pixels.transpose(0, 3, 1, 2) / np.float32(255))
    assert ImageFolder(tmp_path, size=(8, 5))[0][0].shape == (3, 8, 5)
    assert ImageFolder(tmp_path, transform=lambda image: image.size)[1] == ((4, 6), 1)
    (tmp_path / "cat" / "0.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"0\.png cannot be read"):
        ImageFolder(tmp_path)[0]


def test_folders_without_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        ImageFolder(tmp_path / "none")
    with pytest.raises(DataError, match="no images in folders of classes"):
        ImageFolder(tmp_path)
    with pytest.raises(DataError, match="give only one of them"):
        ImageFolder(tmp_path, size=(1, 1), transform=np.asarray)


def test_epochs_leave_nothing_on_the_device() -> None:
    loader = Loader(Arrays(np.ones((20, 3), np.float32)), 8, device=HOST)
    device = ps.registry.find(HOST)
    before = device.memory_stats().live_bytes
    for _ in range(3):
        for batch in loader:
            assert batch.shape[1] == 3
        del batch
        assert device.memory_stats().live_bytes == before


@pytest.mark.parametrize("dataset", [Arrays(np.arange(23.0)), Squares(23), Counted(23)])
def test_a_state_goes_on_in_another_loader(dataset: Any) -> None:
    def made() -> Loader:
        return Loader(dataset, 5, shuffle=not isinstance(dataset, Counted), seed=3, device=HOST)

    def numbers(loader: Loader, count: int) -> list[Any]:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        return [
            np.asarray(batch[-1] if isinstance(batch, tuple) else batch) for batch in islice(batches, count)
        ]

    whole = numbers(made(), 12)
    for taken in range(1, 11):
        first = made()
        begun = numbers(first, taken)
        second = made()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for batch, expected in zip([*begun, *numbers(second, 12 - taken)], whole, strict=True):
            np.testing.assert_array_equal(batch, expected)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"batch": 4}, "batch"),
        ({"shuffle": True}, "shuffle"),
        ({"seed": 2}, "seed"),
        ({"drop_last": True}, "drop_last"),
    ],
)
def test_the_state_of_another_loader_is_refused(changed: dict[str, Any], name: str) -> None:
    rows = Arrays(np.arange(20.0))
    state = Loader(rows, 5, device=HOST).state_dict()
    with pytest.raises(DataError, match=f"with {name}="):
        Loader(rows, **{"batch": 5, "device": HOST, **changed}).load_state_dict(state)
    with pytest.raises(DataError, match="with samples=20, and this has 21"):
        Loader(Arrays(np.arange(21.0)), 5, device=HOST).load_state_dict(state)
    with pytest.raises(DataError, match="with contents="):
        Loader(Arrays(np.arange(20.0) + 1), 5, device=HOST).load_state_dict(state)
    loader = Loader(rows, 5, device=HOST)
    batches = iter(loader)
    next(batches)
    with pytest.raises(DataError, match="being iterated"):
        loader.load_state_dict(state)
