"""Rows of Arrow and Parquet files: those that pyarrow reads, in whichever file, whoever makes the batch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import Arrays, DataError, Loader, Table, packed, padded
from penstock.data import table as table_module

HOST = "host"
ROWS = 53


def made(rows: int = ROWS, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "x": pa.array([number / 4 for number in numbers], pa.float32()),
            "even": [number % 2 == 0 for number in numbers],
            "name": [f"row {number} ä" for number in numbers],
            "pixels": pa.array([[number, number + 1, 3] for number in numbers], pa.list_(pa.uint8(), 3)),
            "square": pa.array([[[number, 2], [3, 4]] for number in numbers], pa.list_(pa.list_(pa.int32()))),
            "ragged": pa.array([list(range(number % 5)) for number in numbers], pa.large_list(pa.int32())),
            "when": pa.array(numbers, pa.timestamp("s")),
        }
    )


USED = ["id", "x", "even", "name", "pixels", "square"]


def write(table: pa.Table, folder: Path, kind: str) -> list[Path]:
    """Two files, each with several groups of rows."""
    paths = []
    for number, part in enumerate((table.slice(0, 20), table.slice(20))):
        path = folder / f"{number}.{kind}"
        if kind == "parquet":
            pa.parquet.write_table(part, path, row_group_size=6)
        elif kind == "feather":
            pa.feather.write_feather(part, path, compression="uncompressed", chunksize=7)
        else:
            new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
            with new(path, part.schema) as writer:
                writer.write_table(part, max_chunksize=8)
        paths.append(path)
    return paths


def check(batch: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    """A batch against the rows as pyarrow's own Python objects."""
    for name, values in batch.items():
        wanted = [row[name] for row in expected]
        if name == "name":
            assert values == wanted
        else:
            np.testing.assert_array_equal(np.asarray(values.numpy()), np.array(wanted))


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow", "stream"])
def test_rows_are_those_of_a_plain_loop(tmp_path: Path, kind: str) -> None:
    rows = made().select(USED).to_pylist()
    dataset = Table(write(made(), tmp_path, kind), USED)
    assert (len(dataset), dataset.columns) == (ROWS, tuple(USED))
    position = 0
    for batch in Loader(dataset, 8, device=HOST):
        count = len(batch["id"])
        check(batch, rows[position : position + count])
        position += count
    assert position == ROWS
    seen = []
    for batch in Loader(dataset, 8, shuffle=True, seed=3, device=HOST):
        seen += batch["id"].tolist()
        check(batch, [rows[number] for number in batch["id"].tolist()])
    assert sorted(seen) == list(range(ROWS))
    assert seen != sorted(seen)
    assert dataset[-1]["name"] == rows[-1]["name"]
    with pytest.raises(IndexError, match=f"0 to {ROWS - 1}"):
        dataset[ROWS]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-ROWS, ROWS - 1), max_size=12))
def test_any_indices(indices: list[int]) -> None:
    rows = made().select(USED).to_pylist()
    for sample, index in zip(Table(made(), USED).__getitems__(indices), indices, strict=True):
        for name, value in rows[index].items():
            np.testing.assert_array_equal(sample[name], value)


def test_ragged_and_empty_lists(tmp_path: Path) -> None:
    dataset = Table(write(made(), tmp_path, "arrow"), ["id", "ragged"])
    rows = made().to_pylist()
    for collate in (padded, packed):
        for batch, lengths in Loader(dataset, 10, shuffle=True, seed=1, collate=collate, device=HOST):
            wanted = [rows[number]["ragged"] for number in batch["id"].tolist()]
            assert lengths.tolist() == [len(values) for values in wanted]
            flat = [value for values in wanted for value in values]
            if collate is packed:
                assert batch["ragged"].tolist() == flat
            else:
                filled = batch["ragged"].numpy()
                assert [filled[at, : len(row)].tolist() for at, row in enumerate(wanted)] == wanted
                assert filled.sum() == sum(flat)
    with pytest.raises(DataError, match="different shapes"):
        next(iter(Loader(dataset, 10, device=HOST)))


def test_a_huge_item_among_small_ones() -> None:
    sizes = [0, 3, 3_000_000, 1]
    table = pa.table({"x": pa.array([np.arange(size, dtype=np.float32) for size in sizes])})
    ((batch, lengths),) = Loader(Table(table), 4, collate=packed, device=HOST)
    assert lengths.tolist() == sizes
    expected = np.concatenate([np.arange(size, dtype=np.float32) for size in sizes])
    np.testing.assert_array_equal(batch["x"].numpy(), expected)


@pytest.mark.slow
def test_processes_open_the_files_themselves(tmp_path: Path) -> None:
    paths = write(made(), tmp_path, "parquet")
    dataset = Table(paths, ["id", "pixels"])
    assert len(pickle.dumps(dataset)) < 1000
    expected = [batch["pixels"].tolist() for batch in Loader(dataset, 9, shuffle=True, seed=2, device=HOST)]
    with Loader(dataset, 9, shuffle=True, seed=2, workers=2, device=HOST) as loader:
        assert [batch["pixels"].tolist() for batch in loader] == expected


def test_tables_of_pyarrow_are_datasets_of_rows() -> None:
    (batch,) = Loader(made(4).select(["id", "x"]), 4, device=HOST)
    assert batch["id"].tolist() == [0, 1, 2, 3]
    assert batch["x"].tolist() == [0, 0.25, 0.5, 0.75]


def test_decoded_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_KEPT", 100)
    dataset = Table(write(made(), tmp_path, "parquet"), ["id"])
    for number in (0, 50, 7, 0, 30):
        assert dataset[number]["id"] == number
        assert len(dataset._kept) <= 2


# What may go wrong


def test_a_file_that_shrinks_or_is_damaged(tmp_path: Path) -> None:
    paths = write(made(), tmp_path, "arrow")
    dataset = Table(paths, ["id"])
    content = paths[1].read_bytes()
    with paths[1].open("r+b") as file:
        file.truncate(len(content) // 2)
    assert dataset[0]["id"] == 0
    with pytest.raises(DataError, match=r"1\.arrow shrank from"):
        dataset[30]
    with pytest.raises(DataError, match=r"1\.arrow is no Arrow or Parquet file, or it is damaged"):
        Table(paths)
    parquet = write(made(), tmp_path, "parquet")
    dataset = Table(parquet, ["id", "name"])
    content = parquet[0].read_bytes()
    with parquet[0].open("r+b") as file:
        file.write(content[:4] + bytes(len(content) // 2))
    with pytest.raises(DataError, match=r"0\.parquet cannot be read"):
        dataset.rows(np.arange(20))
    with pytest.raises(DataError, match=r"none\.parquet cannot be read: No such file"):
        Table(tmp_path / "none.parquet")
    (tmp_path / "text").write_text("no table")
    with pytest.raises(DataError, match="text is no Arrow or Parquet"):
        Table(tmp_path / "text")


def test_an_array_whose_file_shrinks(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((100, 1000)))
    dataset = Arrays(np.load(tmp_path / "x.npy", mmap_mode="r"))
    with (tmp_path / "x.npy").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=r"x\.npy shrank from 800128 to 5000 bytes"):
        next(iter(Loader(dataset, 4, device=HOST)))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["idd"], r"no column 'idd'; the columns are \['id', 'x'"),
        (["when"], r"'when' is of timestamp\[s\].* choose columns of them: \['id', 'x'"),
        ("id", r"a list of names, and 'id' was given; use \['id'\]"),
    ],
)
def test_wrong_columns(columns: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Table(made(), columns)


def test_missing_values_and_no_rows(tmp_path: Path) -> None:
    table = pa.table({"x": [1, None], "text": ["a", None], "y": [[1], [None]]})
    assert Table(table, ["text"]).rows(np.arange(2)) == {"text": ["a", None]}
    for name in ("x", "y"):
        with pytest.raises(DataError, match=rf"column '{name}' has missing values"):
            Table(table, [name])[1]
    for nothing in (made(0), []):
        with pytest.raises(DataError, match=r"there are no rows|a table needs a file"):
            Table(nothing)
    other = tmp_path / "other.parquet"
    pa.parquet.write_table(pa.table({"z": [1]}), other)
    with pytest.raises(DataError, match=r"0\.arrow has other columns"):
        Table([other, *write(made(), tmp_path, "arrow")], None)
