"""Loaders beside PyTorch's, and tokenizing while a model trains beside the `tokenizers` library alone.

    python benchmarks/data.py [--workers 0 2] [--rounds 5] [--megabytes 24]

Loaders: samples per second of the same datasets with the same workers, in turn. A ratio above 1 says that
Penstock's loader is faster; of the CPU seconds of this process, that it takes fewer. PyTorch's gives tensors
in the host's memory, and Penstock's tensors on the device, which is a copy more. Tokenizing: megabytes of
text per second, by the library on all cores, and by Penstock while a small GPT trains.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import penstock as ps
from penstock.data import (
    Arrays,
    BPETokenizer,
    Loader,
    Prefetch,
    Table,
    Text,
    TokenStore,
    find_text,
    python_sources,
    train_bpe,
)
from penstock.data.growing import GrowingTokens

BATCH = 64


class Pictures:
    """Images that are computed, as a decoder would: 3 x 64 x 64, and a label."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index >= self._length:
            raise IndexError(index)
        image = np.random.default_rng(index).standard_normal((3, 64, 64), dtype=np.float32)
        return np.tanh(image), index % 10


class Rows:
    """Rows of an array, each by itself, as a PyTorch dataset has them."""

    def __init__(self, rows: int) -> None:
        self.values = np.random.default_rng(1).standard_normal((rows, 256), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


def seconds(epoch: Iterable[Any]) -> tuple[float, float]:
    """How long an epoch takes, and the CPU seconds of this process."""
    begun, busy = time.perf_counter(), time.process_time()
    for _ in epoch:
        pass
    ps.sync()
    return time.perf_counter() - begun, time.process_time() - busy


def compared(name: str, ours: Any, theirs: Any, samples: int, rounds: int) -> None:
    """Print the samples per second of both, and the ratios, of epochs in turn."""
    own, other = [], []
    for _ in range(rounds + 1):  # the first is to get warm: processes start in it
        own.append(seconds(ours))
        other.append(seconds(theirs))
    own_wall, own_cpu = np.min(own[1:], axis=0).tolist()
    wall, cpu = np.min(other[1:], axis=0).tolist()
    ratios = [b[0] / a[0] for a, b in zip(own[1:], other[1:], strict=True)]
    print(
        f"{name:<28} {samples / own_wall:>12,.0f} {samples / wall:>12,.0f} {wall / own_wall:>8.2f} "
        f"{statistics.median(ratios):>8.2f} {cpu / own_cpu:>8.2f}"
    )


def arrow_rows(folder: Path, rows: int) -> Table:
    """A dataset of an Arrow file in batches of 1,000 rows, as Hugging Face writes them."""
    arrow: Any = importlib.import_module("pyarrow")
    values = np.random.default_rng(1).standard_normal((rows, 64), dtype=np.float32)
    column = arrow.FixedSizeListArray.from_arrays(arrow.array(values.ravel()), 64)
    table = arrow.table({"x": column, "label": np.arange(rows) % 10})
    with arrow.ipc.new_file(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return Table(folder / "rows.arrow")


def tokenizing(folder: Path, megabytes: int) -> None:
    """Print the rate of tokenizing while a model trains, and that of the library."""
    text = some_text(folder, megabytes)
    tokenizer = train_bpe(text, 2048)
    ps.random.manual_seed(1)
    model = ps.nn.GPT(tokenizer.vocab_size, 128, 128, 4, 4, 0.0)
    optimizer = ps.optim.AdamW(model.parameters())

    @ps.jit
    def step(ids: ps.Tensor) -> ps.Tensor:
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimizer.backward(loss)
        optimizer.step()
        return loss

    for _ in range(3):  # compiles
        step(ps.zeros((16, 129), dtype=ps.int32)).item()
    library = library_rate(tokenizer, text)
    begun = time.perf_counter()
    store = TokenStore.open(text, tokenizer, cache=folder / "tokens")
    assert isinstance(store.train, GrowingTokens)
    steps, done, first = 0, None, 0.0
    count = store.train.count
    with Prefetch(store.batches(16, 128, seed=1)) as batches:
        while done is None or steps < 20:
            step(next(batches)).item()
            steps += 1
            first = first or time.perf_counter() - begun
            last = store.train.job.folder.path / store.train.job.name(count - 1)
            if done is None and last.exists():
                done = time.perf_counter() - begun
    print(f"{text.nbytes / 1e6:.0f} MB of text; the first step was done after {first:.2f} s")
    own = text.nbytes / 1e6 / done
    print(
        f"tokenizing, MB/s: {own:.1f} beside {steps} steps, {library:.1f} by the library; {own / library:.2f}"
    )


def some_text(folder: Path, megabytes: int) -> Text:
    """A file of about so many megabytes: the sources of Python, repeated."""
    sources = python_sources("60MiB").read()
    with (folder / "text.txt").open("w") as file:
        while file.tell() < megabytes * 1_000_000:
            file.write(sources[: megabytes * 1_000_000 - file.tell()])
    return find_text(folder / "text.txt")


def library_rate(tokenizer: BPETokenizer, text: Text) -> float:
    """Megabytes per second of the library, which uses all cores for a batch of lines."""
    model: Any = importlib.import_module("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    pieces = [piece for piece, _ in zip(text, range(4), strict=False)]
    begun = time.perf_counter()
    for piece in pieces:
        for encoding in model.encode_batch_fast(piece.splitlines(keepends=True)):
            np.array(encoding.ids, np.uint16)
    return sum(len(piece.encode()) for piece in pieces) / 1e6 / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=24, help="of the text that is tokenized")
    given = parser.parse_args()
    if given.megabytes < 17:
        parser.error("text is tokenized during training from 16 MiB on; give --megabytes 17 or more")
    with TemporaryDirectory() as name:
        loading(Path(name), given.workers, given.rounds)
        tokenizing(Path(name), given.megabytes)


def loading(folder: Path, counts: list[int], rounds: int) -> None:
    """Print the rates of loaders."""
    torch_data: Any = importlib.import_module("torch.utils.data")
    torch: Any = importlib.import_module("torch")
    cases: dict[str, Any] = {"computed images": Pictures(2048), "rows one by one": Rows(50_000)}
    cases["Arrow rows"] = arrow_rows(folder, 50_000)
    print(f"{'':<28} {'penstock/s':>12} {'torch/s':>12} {'best':>8} {'median':>8} {'CPU':>8}")
    for workers in counts:
        for name, dataset in cases.items():
            with Loader(dataset, BATCH, shuffle=True, seed=1, workers=workers) as ours:
                theirs = torch_data.DataLoader(
                    dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
                )
                compared(f"{name}, {workers} workers", ours, theirs, len(dataset), rounds)
    rows = cases["rows one by one"].values
    ours = Loader(Arrays(rows), BATCH, shuffle=True, seed=1)
    theirs = torch_data.DataLoader(torch_data.TensorDataset(torch.from_numpy(rows)), BATCH, shuffle=True)
    compared("rows of an array", ours, theirs, len(rows), rounds)


if __name__ == "__main__":
    main()
