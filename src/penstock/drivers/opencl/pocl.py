"""The environment of PoCL: a linker, and a safe cache of compiled kernels.

PoCL loads whatever its cache folder contains, so a damaged file there crashes the process, or computes wrong
results. Here each process gives it an empty folder. Between processes, programs are kept as binaries in files
with a checksum. Loading a binary takes a tenth of the time that PoCL needs for a source that it has cached,
because it parses the headers of the source all the same.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import pyopencl as cl

from penstock.config import cache_folder
from penstock.drivers.binaries import Binaries
from penstock.drivers.driver import at_end
from penstock.drivers.environment import environment
from penstock.drivers.opencl.programs import ProgramCache

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PLATFORM = "Portable Computing Language"
_LINKERS = ("ld", "x86_64-unknown-linux-gnu-ld", "aarch64-unknown-linux-gnu-ld")  # the names that PoCL tries
_VARIABLE = "POCL_CACHE_DIR"
# 0: a kernel is compiled once for workgroups of any size, and the binary contains that code. By default PoCL
# compiles it for each size separately, and once more for the binary. It reads the variable at every launch.
_SPECIALIZATION = "POCL_WORK_GROUP_SPECIALIZATION"
# By default PoCL has the device with threads only. `basic` runs kernels in the calling thread: see `inline`.
_DEVICES = "POCL_DEVICES"
_BOTH_DEVICES = "pthread basic"
_PACKAGE, _PACKAGE_VERSION = "pocl-binary-distribution", "3.0"  # whose devices have these names
_WITH_THREADS, _INLINE = "pthread-", "basic-"  # with which their own names begin
_NEEDED_BYTES = 32 << 20  # free on the disk: PoCL aborts the process when it cannot write
_FIRST_SAVE_SECONDS = 1.0  # after a program was built; doubled each time
_MAX_BYTES = 256 << 20  # of programs on disk
_FORMAT = 4  # of the files; in 1, some had no code; in 2 and 3, some had been built with other flags
_MAX_PROGRAMS = 256  # whose files stay in PoCL's folder


_extra_flags: str | None = None


def extra_flags() -> str:
    """What PoCL adds to the options of builds. Like it, keeps the variable's value once it is set."""
    global _extra_flags
    if _extra_flags is None:
        _extra_flags = os.environ.get("POCL_EXTRA_BUILD_FLAGS")
    return _extra_flags or ""


def problem() -> str:
    """Why PoCL would abort the process at the first kernel; empty if it would not."""
    path = os.environ.get("PATH", "")  # if PATH is not set, PoCL searches nowhere
    if not any(shutil.which(linker, path=path) for linker in _LINKERS):
        return (
            "PoCL needs the linker ld to compile kernels, and no folder of PATH has it; "
            "apt install binutils brings it"
        )
    return "" if cache() is not None else "PoCL finds no folder with free space to write kernels to"


@dataclass
class _Program:
    """A program in PoCL's folder."""

    key: str
    kernels: int  # how many it has
    built: weakref.ref[cl.Program]
    saved: bool  # whether its binary is on disk


class PoclCache(ProgramCache):
    """The folder that PoCL uses in this process, and the binaries on disk.

    PoCL compiles a kernel when it first runs, or when a program's binary is asked for.
    """

    def __init__(self) -> None:
        given = os.environ.get(_VARIABLE)
        base = Path(given) if given else cache_folder() / "pocl"
        self.folder, self._lock_file = _own_folder(base / "running")
        super().__init__(Binaries(base / "programs", max_bytes=_MAX_BYTES))
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._programs: dict[str, _Program] = {}  # by their folders, the oldest first
        self._listed: dict[str, tuple[int | None, tuple[str, ...]]] = {}  # by outer folders, with their times
        # Folders in which PoCL writes code now: it would crash if it were asked for the binary meanwhile.
        self._generating: set[str] = set()
        self._building = False
        self._wait = 0.0
        self._due = math.inf  # when to try next to save programs whose kernels had not all run
        os.environ.setdefault(_SPECIALIZATION, "0")
        at_end.append(self._end)  # not earlier: pending kernels are compiled in the folder

    def build(
        self,
        description: str,
        kernels: int,
        load: Callable[[bytes], cl.Program | None],
        compile: Callable[[], cl.Program],
    ) -> cl.Program:
        key = _key(description)
        with self._lock:
            before = set(self._folders())
            self._building = True
            self._due = math.inf  # so that threads that launch kernels do not wait for the compiler
            try:
                binary = self._binaries.get(key)
                loaded = None if binary is None else load(binary)
                program = compile() if loaded is None else loaded
            finally:
                self._building = False
                self._wait = _FIRST_SAVE_SECONDS
                self._due = perf_counter() + self._wait
            new = [folder for folder in self._folders() if folder not in before]
            if len(new) == 1:  # none if PoCL has the program already; several cannot be told apart
                self._programs[new[0]] = _Program(key, kernels, weakref.ref(program), loaded is not None)
            self._forget()
        return program

    @property
    def is_compiling(self) -> bool:
        """Whether PoCL compiles now: all launches wait for it, on its threads or in the calling thread."""
        return self._building or bool(self._generating)

    def has(self, description: str) -> bool:
        return self._binaries.has(_key(description))

    def save_if_due(self) -> None:
        if perf_counter() < self._due:
            return
        with self._lock:
            self._wait *= 2
            self._due = perf_counter() + self._wait
            saved = [self._save(folder) for folder in self._programs]
            if all(saved):
                self._due = math.inf

    def keep(self, description: str) -> None:
        key = _key(description)
        with self._lock:
            folders = [folder for folder, program in self._programs.items() if program.key == key]
            folders = [folder for folder in folders if folder not in self._generating]  # by another device
            programs = [self._programs[folder].built() for folder in folders]
            self._generating.update(folders)
        for program in programs:  # without the lock, which launches may need meanwhile
            if program is not None:
                _generate_code(program)
        with self._lock:
            self._generating.difference_update(folders)
            for folder in folders:
                if folder in self._programs:
                    self._save(folder, has_run=False)

    def save(self) -> None:
        with self._lock:
            for folder in self._programs:
                self._save(folder)

    def _save(self, folder: str, has_run: bool = True) -> bool:
        """Save a program if all its kernels have run or `has_run` is False; whether nothing is left to do.

        For the binary, PoCL compiles kernels that have not run, and all threads wait meanwhile.
        """
        program = self._programs[folder]
        built = program.built()
        if program.saved or built is None:
            return True
        if folder in self._generating:
            return False
        with suppress(OSError, cl.Error):  # the next process then compiles it
            compiled = sum(1 for _ in (self.folder / folder).glob("*/*/*.so"))
            if compiled >= program.kernels or not has_run:
                binaries: Any = built.get_info(cl.program_info.BINARIES)  # of each device
                self._binaries.put(program.key, binaries[0])
                program.saved = True
        return program.saved

    def _forget(self) -> None:
        """Remove the files of the oldest programs from PoCL's folder: PoCL has loaded what it needs."""
        for folder in list(self._programs)[:-_MAX_PROGRAMS]:
            if folder in self._generating:
                continue
            self._save(folder)
            del self._programs[folder]
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def _folders(self) -> Iterator[str]:
        """The folders of programs, relative to PoCL's folder; each name has two parts.

        An outer folder is read again where it has changed: there are hundreds, and each program asks twice.
        """
        for outer in os.scandir(self.folder):
            if len(outer.name) == 2:
                changed = outer.stat().st_mtime_ns
                listed, folders = self._listed.get(outer.name, (None, ()))
                if listed != changed:
                    folders = tuple(f"{outer.name}/{inner.name}" for inner in os.scandir(outer.path))
                    self._listed[outer.name] = changed, folders
                yield from folders

    def _end(self) -> None:
        if os.getpid() != self._process:  # in the child of a fork
            return
        self.save()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock_file is not None:
            with suppress(OSError):
                self._lock_file.unlink()


_cache: PoclCache | None = None


def cache() -> PoclCache | None:
    """The cache of this process; None if no folder is writable."""
    global _cache
    if _cache is None:
        with suppress(OSError):
            _cache = PoclCache()
    return _cache


def own_folder() -> AbstractContextManager[None]:
    """Let PoCL, which is loaded and reads its settings inside the block, use the folder of this process."""
    own = cache()  # child processes have folders of their own
    return nullcontext() if own is None else environment(_VARIABLE, str(own.folder))


def both_devices() -> AbstractContextManager[None]:
    """Let PoCL, which is loaded inside the block, have its device without threads, too.

    Not where the user has chosen devices, or where PoCL is not the package that is known to have both.
    """
    if _DEVICES in os.environ or not is_known():
        return nullcontext()
    return environment(_DEVICES, _BOTH_DEVICES)


def is_known() -> bool:
    """Whether PoCL is the package that is known to have both devices, and counters of kernels."""
    try:
        return version(_PACKAGE) == _PACKAGE_VERSION
    except PackageNotFoundError:
        return False


def without_inline(devices: Sequence[cl.Device]) -> list[cl.Device]:
    """The devices of a platform without those that only help another one: see `inline_device`."""
    helpers = [inline_device(device) for device in devices]
    return [device for device in devices if device not in helpers]


def inline_device(device: cl.Device) -> cl.Device | None:
    """The device that runs kernels on the same CPU as `device`, but in the calling thread."""
    if device.platform.name != PLATFORM or not device.name.startswith(_WITH_THREADS):
        return None
    others = (other for other in device.platform.get_devices() if other.name.startswith(_INLINE))
    return next(others, None)


def _generate_code(program: cl.Program) -> None:
    """Have PoCL compile the kernels of a program, which it does when the size of the binary is queried.

    PyOpenCL would hold Python's global lock during the query, for half a second, so it is called by ctypes.
    Errors are ignored here: PyOpenCL reports them when it queries the binary later.
    """
    with suppress(OSError, AttributeError):  # a build of PyOpenCL that links the library in another way
        ask = ctypes.CDLL(cl._cl.__file__).clGetProgramInfo
        ask.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        length = ctypes.c_size_t()
        what = int(cl.program_info.BINARY_SIZES)
        ask(program.int_ptr, what, ctypes.sizeof(length), ctypes.byref(length), None)


def _key(description: str) -> str:
    return hashlib.sha256(f"{_FORMAT}\n{description}".encode()).hexdigest()


def _own_folder(parent: Path) -> tuple[Path, Path | None]:
    """An empty folder, and a file that is locked while this process lives. Folders of dead processes go."""
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
