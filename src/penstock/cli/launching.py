"""Starts the ranks of `penstock train --devices N` with mpiexec."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from penstock.collectives.mpi import PROCESSES, launched_size
from penstock.errors import SettingError


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
            status = running.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if running.poll() is None:
                running.terminate()
    return status if status >= 0 else 128 - status


def launcher() -> list[str]:
    """The mpiexec beside this Python, which the package mpich brings, or that of the system."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    path = beside or shutil.which("mpiexec")
    if path is None:
        raise SettingError(
            "--devices starts ranks with mpiexec, which is not here; pip install 'penstock[mpi]' brings it"
        )
    asked = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    # MPICH's would end the others before they can say which rank died.
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
