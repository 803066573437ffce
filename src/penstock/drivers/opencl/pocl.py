"""What PoCL needs around it: a linker, and a cache of compiled kernels that cannot hurt it.

PoCL loads whatever its cache folder holds, so a file that was cut short or altered there ends the process, or
computes something else. Here it gets an empty folder for each process. Between processes, programs are kept
as the binaries that PoCL makes of them, in files with a checksum. A program comes from its binary in a tenth
of the time that PoCL takes for the source, whose headers it reads even if it knows the result.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import hashlib
import math
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import pyopencl as cl

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
# 0: a kernel is compiled once, for any size of a workgroup, and that code is what a binary has. By default
# PoCL compiles it again for each size, and once more for the binary. It reads this at every launch.
_SPECIALIZATION = "POCL_WORK_GROUP_SPECIALIZATION"
_NEEDED_BYTES = 32 << 20  # free on the disk: PoCL ends the process when it cannot write
_FIRST_SAVE_SECONDS = 1.0  # after a program was built; doubled each time
_MAX_BYTES = 256 << 20  # of programs on disk
_MAX_PROGRAMS = 256  # whose files stay in PoCL's folder


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
    built: weakref.ref[cl.Program]
    saved: bool  # whether its binary is kept


class PoclCache:
    """The folder that PoCL uses in this process, and the binaries that programs come from and go to."""

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
        os.environ.setdefault(_SPECIALIZATION, "0")
        atexit.register(self._end)

    def build(
        self,
        said: str,
        kernels: int,
        load: Callable[[bytes], cl.Program | None],
        compile: Callable[[], cl.Program],
    ) -> cl.Program:
        """A program from the binary of an earlier process; compiled where there is none, or none that loads.

        `said` names all that the program depends on, and `kernels` says how many it has.
        """
        key = _key(said)
        with self._lock:
            before = set(self._folders())
            self._due = math.inf  # nobody who launches kernels meanwhile waits for the compiler
            try:
                binary = self._binaries.get(key)
                loaded = None if binary is None else load(binary)
                program = compile() if loaded is None else loaded
            finally:
                self._wait = _FIRST_SAVE_SECONDS
                self._due = perf_counter() + self._wait
            new = [folder for folder in self._folders() if folder not in before]
            if len(new) == 1:  # none where PoCL had the program; several are not told apart
                self._programs[new[0]] = _Program(key, kernels, weakref.ref(program), loaded is not None)
            self._forget()
        return program

    def has(self, said: str) -> bool:
        """Whether there is a binary of a program."""
        return self._binaries.has(_key(said))

    def save_if_due(self) -> None:
        """Keep programs whose kernels have run since they were built. Costs a comparison, mostly."""
        if perf_counter() < self._due:
            return
        with self._lock:
            self._wait *= 2
            self._due = perf_counter() + self._wait
            kept = [self._save(folder) for folder in self._programs]
            if all(kept):
                self._due = math.inf

    def keep(self, said: str) -> None:
        """Keep a program whose kernels have not run: PoCL compiles them now."""
        key = _key(said)
        with self._lock:
            folders = [folder for folder, program in self._programs.items() if program.key == key]
            programs = [self._programs[folder].built() for folder in folders]
        for program in programs:  # without the lock, which whoever launches a kernel may want
            if program is not None:
                _generate_code(program)
        with self._lock:
            for folder in folders:
                if folder in self._programs:
                    self._save(folder, has_run=False)

    def save(self) -> None:
        """Keep every program whose kernels have run."""
        with self._lock:
            for folder in self._programs:
                self._save(folder)

    def _save(self, folder: str, has_run: bool = True) -> bool:
        """Keep a program if all its kernels have run, or that does not matter; whether nothing is left to do.

        PoCL compiles those that have not run for the binary, while everybody waits.
        """
        program = self._programs[folder]
        built = program.built()
        if program.saved or built is None:
            return True
        with suppress(OSError, cl.Error):  # what cannot be kept is compiled again
            compiled = sum(1 for _ in (self.folder / folder).glob("*/*/*.so"))
            if compiled >= program.kernels or not has_run:
                binaries: Any = built.get_info(cl.program_info.BINARIES)  # of each device
                self._binaries.put(program.key, binaries[0])
                program.saved = True
        return program.saved

    def _forget(self) -> None:
        """Remove the oldest programs from PoCL's folder: it has loaded what it needs of them."""
        for folder in list(self._programs)[:-_MAX_PROGRAMS]:
            self._save(folder)
            del self._programs[folder]
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def _folders(self) -> Iterator[str]:
        """The folders of programs: the two parts of their names."""
        for outer in os.scandir(self.folder):
            if len(outer.name) == 2:
                yield from (f"{outer.name}/{inner.name}" for inner in os.scandir(outer.path))

    def _end(self) -> None:
        if os.getpid() != self._process:  # a fork of it
            return
        self.save()
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


def _generate_code(program: cl.Program) -> None:
    """Have PoCL compile the kernels of a program: it does so before it tells how long the binary is.

    PyOpenCL asks while no other thread of Python can run, for half a second; so it is asked past PyOpenCL.
    What fails here is told by PyOpenCL, which asks again.
    """
    with suppress(OSError, AttributeError):  # a build of PyOpenCL whose library is linked in otherwise
        ask = ctypes.CDLL(cl._cl.__file__).clGetProgramInfo
        ask.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        length = ctypes.c_size_t()
        what = int(cl.program_info.BINARY_SIZES)
        ask(program.int_ptr, what, ctypes.sizeof(length), ctypes.byref(length), None)


def _key(said: str) -> str:
    return hashlib.sha256(said.encode()).hexdigest()


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
