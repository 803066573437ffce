"""Rows of Arrow and Parquet files, by index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.batches import Ints
from penstock.data.collate import collate
from penstock.data.errors import DataError

_KEPT = 1 << 30  # bytes of decoded row groups of Parquet files that are kept
_PARQUET = b"PAR1"  # begins a Parquet file
_ARROW = b"ARROW1"  # begins an Arrow file; a stream, as Hugging Face writes them, has no such beginning


class Table:
    """The rows of Arrow or Parquet files, or of a `pyarrow.Table`: a sample is a dict by column.

    Columns have numbers, booleans, texts, bytes, or lists of numbers: arrays of one axis, or of more where
    lists contain lists. Those of different lengths are for `collate=ps.data.padded` or `packed`. Arrow files
    (also Feather, and streams such as Hugging Face's) are memory-mapped. Parquet is decoded by row groups, of
    which the last are kept, up to 1 GiB: shuffled rows of larger files are quicker from Arrow files. Needs
    pyarrow: pip install 'penstock[arrow]'.

    >>> import pyarrow
    >>> table = ps.data.Table(pyarrow.table({"x": [1, 2, 3], "name": ["a", "b", "c"]}))
    >>> batch = next(iter(ps.data.Loader(table, batch=2)))
    >>> batch["x"].tolist(), batch["name"]
    ([1, 2], ['a', 'b'])
    """

    def __init__(self, source: Any, columns: Sequence[str] | None = None) -> None:
        """`source`: a path, several, or a `pyarrow.Table`. `columns`: their names; without them, all."""
        _pyarrow()
        if isinstance(columns, str):
            raise DataError(f"columns are a list of names, and {columns!r} was given; use [{columns!r}]")
        self._columns = None if columns is None else tuple(columns)
        if isinstance(source, (str, os.PathLike)):
            source = [source]
        self._given = list(source) if not hasattr(source, "column_names") else source
        self._open()
        self._check_columns()

    def _open(self) -> None:
        groups = self._groups_of_all()
        self._groups = list(groups)  # a batch of rows each, which is had when it is needed
        self._ends = np.cumsum([group.rows for group in self._groups])
        self._starts = self._ends - [group.rows for group in self._groups]
        self._sizes = {group.path: group.path.stat().st_size for group in self._groups if group.path}
        self._kept: dict[int, _Columns] = {}  # of groups that were read
        self._decoded: list[int] = []  # those that were decoded, the oldest first

    def _groups_of_all(self) -> Iterable[_Group]:
        if hasattr(self._given, "column_names"):
            yield from _batches(self._given, None)
            return
        if not self._given:
            raise DataError("a table needs a file, and none was given")
        for path in map(Path, self._given):
            yield from _groups(path, self._columns)

    def _check_columns(self) -> None:
        schema = self._groups[0].schema if self._groups else None
        if schema is None:
            raise DataError(f"there are no rows in {self._given}")
        names = schema.names if self._columns is None else self._columns
        for name in names:
            if name not in schema.names:
                raise DataError(f"there is no column {name!r}; the columns are {schema.names}")
            if not _usable(schema.field(name).type):
                others = [other for other in schema.names if _usable(schema.field(other).type)]
                raise DataError(
                    f"the column {name!r} is of {schema.field(name).type}, and numbers, booleans, texts, "
                    f"bytes and lists of numbers can be used; choose columns of them: {others}"
                )
        for group in self._groups:
            if group.schema.names != schema.names:
                raise DataError(
                    f"{group.path} has other columns than the first file: {group.schema.names} and not "
                    f"{schema.names}"
                )
        self._names = tuple(names)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of a sample."""
        return self._names

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The samples of some indices."""
        if not len(indices):
            return []
        values = self._values(np.asarray(indices, np.int64))
        return [{name: values[name][at] for name in self._names} for at in range(len(indices))]

    def rows(self, indices: Ints) -> dict[str, Any]:
        """The batch of some samples, as `collate` would make it of them."""
        return {
            name: values if isinstance(values, np.ndarray) else collate(values)
            for name, values in self._values(indices).items()
        }

    def _values(self, indices: Ints) -> dict[str, Any]:
        """The values of each column: an array, or a list of what cannot be stacked as it is."""
        length = len(self)
        places = np.where(indices < 0, indices + length, indices)
        if not 0 <= places.min() <= places.max() < length:
            raise IndexError(f"rows are from 0 to {length - 1}, and {indices.tolist()} were asked for")
        numbers = np.searchsorted(self._ends, places, side="right")
        order = np.argsort(numbers, kind="stable")
        used, firsts = np.unique(numbers[order], return_index=True)
        groups = [self._groups[number] for number in used.tolist()]
        rows = np.split(places[order] - self._starts[numbers[order]], firsts[1:])
        for path in {group.path for group in groups if group.mapped}:
            self._check_size(path)
        read = [self._read(number) for number in used.tolist()]
        result: dict[str, Any] = {}
        for name in self._names:
            parts = [columns[name].take(row, axis=0) for columns, row in zip(read, rows, strict=True)]
            if all(isinstance(part, np.ndarray) for part in parts):
                joined = np.concatenate(parts)
                result[name] = np.empty_like(joined)
                result[name][order] = joined
            else:
                flat = [value for part in parts for value in part]
                result[name] = [flat[at] for at in np.argsort(order).tolist()]
        return result

    def _read(self, number: int) -> _Columns:
        """The columns of a group."""
        if number in self._kept:
            return self._kept[number]
        group = self._groups[number]
        columns = self._kept[number] = _Columns(group.read())
        if not group.mapped:
            self._decoded.append(number)
        while len(self._decoded) > 1 and sum(self._kept[kept].nbytes for kept in self._decoded) > _KEPT:
            del self._kept[self._decoded.pop(0)]
        return columns

    def _check_size(self, path: Path | None) -> None:
        """Raise DataError if a mapped file has shrunk: to read behind its end would end the process."""
        if path is not None and (size := path.stat().st_size) < self._sizes[path]:
            raise DataError(f"{path} shrank from {self._sizes[path]} to {size} bytes while it was used")

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the files itself."""
        return {"_given": self._given, "_columns": self._columns, "_names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class _Group:
    """Rows that are had together: a record batch of Arrow, or a row group of Parquet."""

    def __init__(
        self, path: Path | None, schema: Any, rows: int, read: Callable[[], Any], mapped: bool
    ) -> None:
        self.path, self.schema, self.rows, self._read, self.mapped = path, schema, rows, read, mapped

    def read(self) -> Any:
        """A batch with the rows; a DataError says why there is none."""
        try:
            return self._read()
        except Exception as error:  # pyarrow has several kinds
            raise DataError(f"{self.path} cannot be read: {error}") from error


def _groups(path: Path, columns: Sequence[str] | None) -> Iterable[_Group]:
    """The groups of a file, by its first bytes."""
    pyarrow = _pyarrow()
    try:
        with path.open("rb") as file:
            magic = file.read(6)
        if magic.startswith(_PARQUET):
            yield from _row_groups(path, columns)
            return
        source = pyarrow.memory_map(str(path))
        opened = pyarrow.ipc.open_file if magic == _ARROW else pyarrow.ipc.open_stream
        table = opened(source).read_all()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is no Arrow or Parquet file, or it is damaged: {error}") from error
    yield from _batches(table, path)


def _batches(table: Any, path: Path | None) -> Iterable[_Group]:
    for batch in table.to_batches():
        if batch.num_rows:
            yield _Group(path, batch.schema, batch.num_rows, partial(_same, batch), mapped=True)


def _same(batch: Any) -> Any:
    return batch


def _row_groups(path: Path, columns: Sequence[str] | None) -> Iterable[_Group]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    names = None if columns is None else list(columns)

    def read(number: int) -> Any:
        return file.read_row_group(number, columns=names).combine_chunks().to_batches()[0]

    for number in range(file.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if rows:
            yield _Group(path, file.schema_arrow, rows, partial(read, number), mapped=False)


def _usable(kind: Any) -> bool:
    types = _pyarrow().types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_number(kind.value_type) or (_usable(kind.value_type) and not _is_text(kind.value_type))
    return _is_number(kind) or _is_text(kind)


def _is_number(kind: Any) -> bool:
    types = _pyarrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_text(kind: Any) -> bool:
    types = _pyarrow().types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_null(kind)
    )


class _Columns(dict[str, Any]):
    """The columns of a batch by name: arrays or the like, as views of its memory where that is possible."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.nbytes = batch.nbytes

    def __missing__(self, name: str) -> Any:
        column = self._batch.column(self._batch.schema.get_field_index(name))
        self[name] = values = _Texts(column) if _is_text(column.type) else _view(column, name)
        return values


def _view(column: Any, name: str) -> Any:
    """The items of a column of numbers or lists of them."""
    if column.null_count:
        raise DataError(f"the column {name!r} has missing values, and numbers have none; fill them in before")
    if _is_number(column.type):
        return column.to_numpy(zero_copy_only=False)
    if _pyarrow().types.is_fixed_size_list(column.type):
        flat = _view(column.flatten(), name)
        if isinstance(flat, np.ndarray):
            return flat.reshape(len(column), column.type.list_size, *flat.shape[1:])
        return _Lists(np.arange(len(column) + 1) * column.type.list_size, flat, name)
    offsets = column.offsets.to_numpy()
    start, stop = int(offsets[0]), int(offsets[-1])
    return _Lists(offsets - start, _view(column.values.slice(start, stop - start), name), name)


class _Texts:
    """A column of texts or bytes."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def take(self, rows: Ints, axis: int) -> list[Any]:
        """The items at some rows."""
        return self._column.take(_pyarrow().array(rows)).to_pylist()  # type: ignore[no-any-return]


class _Lists:
    """A column of lists of different lengths: the items of all, and where each list begins and ends."""

    def __init__(self, offsets: Ints, flat: Any, name: str) -> None:
        self._offsets, self._flat, self._name = offsets, flat, name

    def take(self, rows: Ints, axis: int) -> list[Any]:
        """The arrays at some rows."""
        starts, stops = self._offsets[rows].tolist(), self._offsets[rows + 1].tolist()
        if isinstance(self._flat, np.ndarray):
            return [self._flat[start:stop] for start, stop in zip(starts, stops, strict=True)]
        inner = [
            self._flat.take(np.arange(start, stop), 0) for start, stop in zip(starts, stops, strict=True)
        ]
        try:
            return [np.stack(part) if part else np.empty(0, np.float32) for part in inner]
        except ValueError as error:
            raise DataError(
                f"the lists in the lists of the column {self._name!r} differ in length: {error}"
            ) from error


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise DataError("Arrow and Parquet need pyarrow: pip install 'penstock[arrow]'") from None
    return pyarrow
