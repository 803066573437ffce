"""`penstock cache`: what is kept on disk, by Penstock and by the drivers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.config import cache_folder
from penstock.errors import PenstockError, SettingError
from penstock.formatting import format_bytes
from penstock.terminal import cell, say, show, table, write_json


@dataclass(frozen=True)
class _Cache:
    """Files that can be recreated."""

    name: str
    what: str
    folder: Path
    pattern: str = "**/*"
    shared: bool = False  # by other programs, as a driver keeps it

    def files(self) -> Iterator[Path]:
        return (path for path in self.folder.glob(self.pattern) if path.is_file() and not path.is_symlink())

    def nbytes(self) -> int:
        total = 0
        for path in self.files():
            with suppress(OSError):  # another process may just have removed it
                total += path.stat().st_size
        return total

    def clear(self) -> None:
        for path in self.files():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise PenstockError(f"{path} could not be removed: {error.strerror}") from None


def _caches() -> dict[str, _Cache]:
    own, given = cache_folder(), os.environ.get
    home_cache = Path(given("XDG_CACHE_HOME") or Path.home() / ".cache")
    pocl = Path(given("POCL_CACHE_DIR") or own / "pocl")
    mesa = Path(given("MESA_SHADER_CACHE_DIR") or home_cache)
    nvidia = Path(given("CUDA_CACHE_PATH") or Path.home() / ".nv" / "ComputeCache")
    every = (
        _Cache(
            "measurements", "rates of devices, placements of auto, choices of kernels", own, "choices-*.json"
        ),
        _Cache("kernels", "compiled kernels, for GPUs", own / "kernels"),
        _Cache("pocl", "compiled kernels, for the CPU", pocl / "programs"),
        _Cache("tokens", "texts as tokens", own / "tokens"),
        _Cache("nvidia", "kept by NVIDIA's driver, for all programs", nvidia, shared=True),
        _Cache("mesa", "kept by Mesa, for all programs", mesa, "mesa_shader_cache*/**/*", shared=True),
    )
    return {cache.name: cache for cache in every}


def cache(
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these of the list; else all of Penstock's own.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove their files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for other programs.")] = False,
) -> None:
    """Say what is kept on disk, and where, or clear it.

    Everything in it is made again when it is needed. What drivers keep for other programs as well is removed
    only if it is named. To measure devices again at once: penstock devices --measure.
    """
    caches = _caches()
    if unknown := [name for name in names or () if name not in caches]:
        raise SettingError(f"there is no cache {', '.join(unknown)}; there are {', '.join(caches)}")
    chosen = [caches[name] for name in names] if names else list(caches.values())
    if clear:
        chosen = [each for each in chosen if names or not each.shared]
    sizes = {each.name: each.nbytes() for each in chosen}
    if clear:
        for each in chosen:
            each.clear()
    if as_json:
        write_json(
            [
                {"name": each.name, "folder": str(each.folder), "nbytes": sizes[each.name], "cleared": clear}
                for each in chosen
            ]
        )
        return
    console = Console()
    rows = table(("name", ">size", "what", "where"))
    for each in chosen:
        rows.add_row(each.name, format_bytes(sizes[each.name]), each.what, cell(str(each.folder)))
    show(console, rows)
    if clear:
        say(console, f"{format_bytes(sum(sizes.values()))} were removed")
