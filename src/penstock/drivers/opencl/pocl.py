"""What PoCL needs around it: a linker, and a cache of compiled kernels that cannot hurt it.

PoCL loads whatever its cache holds, so a file that was cut short or altered there ends the process, or
computes something else. Here it gets an empty folder for each process. A program comes into that folder just
before it is built, out of a file with a checksum; and goes back into one when its kernels have run.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import io
import math
import os
import secrets
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from penstock.config import cache_folder
from penstock.drivers.binaries import Binaries
from penstock.drivers.environment import environment

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PLATFORM = "Portable Computing Language"
_LINKERS = ("ld", "x86_64-unknown-linux-gnu-ld", "aarch64-unknown-linux-gnu-ld")  # the names that PoCL tries
_VARIABLE = "POCL_CACHE_DIR"
_NEEDED_BYTES = 32 << 20  # free on the disk: PoCL ends the process when it cannot write
_FIRST_SAVE_SECONDS = 1.0  # after a program was built; doubled each time
_MAX_BYTES = 256 << 20  # of programs on disk
_MAX_PROGRAMS = 256  # whose files stay in PoCL's folder

Built = TypeVar("Built")


def problem() -> str:
    """Why PoCL would end the process at the first kernel, in words; empty if it would not."""
    path = os.environ.get("PATH", "")  # without one, PoCL looks nowhere
    if not any(shutil.which(linker, path=path) for linker in _LINKERS):
        return (
            "PoCL compiles nothing without the linker ld, and no folder of PATH has one; "
            "apt install binutils brings it"
        )
    return "" if cache() is not None else "PoCL finds no folder with free space to write kernels to"


@dataclass
class _Program:
    """A program in PoCL's folder."""

    key: str
    kernels: int  # how many it has
    saved: frozenset[str]  # the names of its files that are in an archive

    def is_whole(self) -> bool:
        """Whether every kernel is in the archive."""
        return len({name.split("/")[2] for name in self.saved if name.endswith(".so")}) >= self.kernels


class PoclCache:
    """The folder that PoCL uses in this process, and the archives that programs come from and go to."""

    def __init__(self) -> None:
        given = os.environ.get(_VARIABLE)
        base = Path(given) if given else cache_folder() / "pocl"
        self.folder, self._lock_file = _own_folder(base / "running")
        self._binaries = Binaries(base / "programs", max_bytes=_MAX_BYTES)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._programs: dict[str, _Program] = {}  # by their folders, the oldest first
        self._wait = 0.0
        self._due = math.inf  # when programs are saved next whose kernels have not all run yet
        atexit.register(self._end)

    def build(self, said: str, kernels: int, build: Callable[[], Built]) -> Built:
        """What `build` gives, with the files of an earlier process where they are whole.

        `said` names all that the program depends on, and `kernels` says how many it has.
        """
        key = hashlib.sha256(said.encode()).hexdigest()
        with self._lock:
            self._unpack(key, kernels)
            before = set(self._folders())
            self._due = math.inf  # nobody who launches kernels meanwhile waits for the compiler
            try:
                built = build()
            finally:
                self._wait = _FIRST_SAVE_SECONDS
                self._due = perf_counter() + self._wait
            new = [folder for folder in self._folders() if folder not in before]
            if len(new) == 1:  # none where PoCL had the program; several are not told apart
                self._programs[new[0]] = _Program(key, kernels, frozenset())
            self._forget()
        return built

    def save_if_due(self) -> None:
        """Keep what has run since programs were built. Costs a comparison, mostly."""
        if perf_counter() < self._due:
            return
        with self._lock, suppress(OSError):  # what cannot be kept is compiled again
            self._wait *= 2
            self._due = perf_counter() + self._wait
            unsaved = [folder for folder, program in self._programs.items() if not program.is_whole()]
            whole = [self._save(folder) for folder in unsaved]
            if all(whole):
                self._due = math.inf

    def _save(self, folder: str) -> bool:
        """Keep a program's files, if there are new ones; whether that is all of it."""
        program = self._programs[folder]
        files = self._files(folder)
        if not files <= program.saved:
            self._binaries.put(program.key, _packed(self.folder, folder, files))
            program.saved = files
        return program.is_whole()

    def _unpack(self, key: str, kernels: int) -> None:
        archive = self._binaries.get(key)
        if archive is None:
            return
        with zipfile.ZipFile(io.BytesIO(archive)) as packed:
            folder = packed.comment.decode()
            if (self.folder / folder).exists():  # PoCL may have its files open
                return
            with suppress(OSError):  # PoCL compiles what is not there
                packed.extractall(self.folder)
            self._programs[folder] = _Program(key, kernels, frozenset(packed.namelist()))

    def _forget(self) -> None:
        """Remove the oldest programs from PoCL's folder: it has loaded what it needs of them."""
        for folder in list(self._programs)[:-_MAX_PROGRAMS]:
            with suppress(OSError):
                self._save(folder)
            del self._programs[folder]
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def _folders(self) -> Iterator[str]:
        """The folders of programs: the two parts of their names."""
        for outer in os.scandir(self.folder):
            if len(outer.name) == 2:
                yield from (f"{outer.name}/{inner.name}" for inner in os.scandir(outer.path))

    def _files(self, folder: str) -> frozenset[str]:
        """The names of a program's files. PoCL writes each under another name first."""
        paths = (self.folder / folder).rglob("*")
        wanted = [path for path in paths if path.name == "program.bc" or path.suffix == ".so"]
        return frozenset(path.relative_to(self.folder).as_posix() for path in wanted)

    def _end(self) -> None:
        if os.getpid() != self._process:  # a fork of it
            return
        with suppress(OSError):  # nothing may keep the interpreter from ending
            for folder in self._programs:
                self._save(folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock_file is not None:
            with suppress(OSError):
                self._lock_file.unlink()


_cache: PoclCache | None = None


def cache() -> PoclCache | None:
    """The one of this process; None where no folder can be written to."""
    global _cache
    if _cache is None:
        with suppress(OSError):
            _cache = PoclCache()
    return _cache


def own_folder() -> AbstractContextManager[None]:
    """PoCL, which is loaded and reads its settings inside the block, uses the folder of this process."""
    own = cache()  # child processes have folders of their own
    return nullcontext() if own is None else environment(_VARIABLE, str(own.folder))


def _packed(base: Path, folder: str, names: Iterable[str]) -> bytes:
    """An archive of files under `base`, with the name of their folder as its comment."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.comment = folder.encode()
        for name in sorted(names):
            archive.writestr(zipfile.ZipInfo(name), (base / name).read_bytes())
    return target.getvalue()


def _own_folder(parent: Path) -> tuple[Path, Path | None]:
    """An empty folder, and the file whose lock says that this process lives. Those of the dead go."""
    if fcntl is not None:
        with suppress(OSError):
            parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            parent.mkdir(mode=0o700, exist_ok=True)
            _remove_dead(parent)
            return _locked_folder(parent)
    folder = Path(tempfile.mkdtemp(prefix="penstock-pocl-"))
    _check_space(folder)
    return folder, None


def _locked_folder(parent: Path) -> tuple[Path, Path]:
    status = parent.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"others may write to {parent}")
    _check_space(parent)
    folder = parent / secrets.token_hex(8)
    lock_file = folder.with_suffix(".lock")
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600)  # stays open until the process ends
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.mkdir(mode=0o700)
    return folder, lock_file


def _remove_dead(parent: Path) -> None:
    for path in parent.glob("*.lock"):
        with suppress(OSError), open(path) as lock_file:  # refused while its process lives
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink()


def _check_space(folder: Path) -> None:
    if shutil.disk_usage(folder).free < _NEEDED_BYTES:
        raise OSError(errno.ENOSPC, f"the disk of {folder} is full")
