"""Starts the ranks of `penstock train --devices N` with mpiexec."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import psutil

from penstock.collectives.mpi import ABORTED, PROCESSES, launched_size
from penstock.errors import SettingError
from penstock.terminal import complain

_LOOK = 0.5  # seconds between two looks at the ranks
_PATIENCE = 10.0  # seconds that mpiexec has to end them


def start_ranks(count: int) -> int:
    """Run this command as several ranks; the exit status. Ctrl-C and SIGTERM are passed on to rank 0."""
    if launched_size() > 1:
        raise SettingError(f"mpiexec has started {launched_size()} ranks already; leave out --devices")
    start = launcher()
    command = [*start, "-n", str(count), sys.executable, "-m", "penstock", *_without_devices(sys.argv[1:])]
    with TemporaryDirectory(prefix="penstock-") as folder:
        environment = {**os.environ, PROCESSES: folder, **_terminal()}
        # In a session of its own, so that Ctrl-C reaches the ranks once.
        running = subprocess.Popen(command, env=environment, start_new_session=True)

        def pass_on(number: int, _: FrameType | None) -> None:
            with suppress(OSError, ValueError):
                os.kill(int((Path(folder) / "0").read_text()), number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            status = _watched(running, Path(folder), count)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            _end(running, Path(folder))
    return status if status >= 0 else 128 - status


def _watched(running: subprocess.Popen[bytes], folder: Path, count: int) -> int:
    """The exit status of mpiexec; 1 if a rank dies, which is named."""
    status: int | None = None
    while not (lost := _died(folder)) and status is None:
        with suppress(subprocess.TimeoutExpired):
            status = running.wait(_LOOK)
    if not lost:
        assert status is not None
        return status
    named = " and ".join(f"rank {rank} of {count} (process {process})" for rank, process in lost.items())
    complain(
        f"{named} died; the others are ended, and penstock train --resume goes on from the last checkpoint, "
        "with any number of devices"
    )
    return 1


def _died(folder: Path) -> dict[str, int]:
    """The ranks whose processes are gone although they have not left, with the numbers of these."""
    gone = {note: process for note, process in _noted(folder) if not _is_there(process)}
    if (folder / ABORTED).exists():
        return {}
    return {
        note.name: process for note, process in gone.items() if note.exists()
    }  # removed by those that leave


def _noted(folder: Path) -> Iterator[tuple[Path, int]]:
    for note in sorted(folder.iterdir()):
        with suppress(OSError, ValueError):
            yield note, int(note.read_text())


def _is_there(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _end(running: subprocess.Popen[bytes], folder: Path) -> None:
    """End mpiexec and its ranks, if they are there yet."""
    if running.poll() is None:
        running.terminate()
        try:
            running.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
    for _, process in _noted(folder):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def launcher() -> list[str]:
    """The mpiexec beside this Python, which the package mpich brings, or that of the system."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    path = beside or shutil.which("mpiexec")
    if path is None:
        raise SettingError(
            "--devices starts ranks with mpiexec, which is not here; pip install 'penstock[mpi]' brings it"
        )
    asked = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    # MPICH's would end the others before it is known which rank died.
    return [path, "-disable-auto-cleanup"] if "HYDRA" in asked.stdout else [path]


def _without_devices(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != "--devices" and not argument.startswith("--devices="):
            kept.append(argument)
        skip = argument == "--devices"
    return kept


def _terminal() -> dict[str, str]:
    """What ranks have to know of a terminal, which they only reach through mpiexec."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    return {"FORCE_COLOR": "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}
