"""Compiled programs on disk, as binaries of the driver below OpenCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyopencl as cl

from penstock.drivers.binaries import Binaries


class ProgramCache:
    """The programs of a platform whose compiler has done all of its work when a program is built."""

    def __init__(self, binaries: Binaries | None = None) -> None:
        self._binaries = binaries or Binaries()

    def build(
        self,
        description: str,
        kernels: int,
        load: Callable[[bytes], cl.Program | None],
        compile: Callable[[], cl.Program],
    ) -> cl.Program:
        """A program from the binary of an earlier process; compiled if there is none that loads.

        `description` contains all that the program depends on, and `kernels` says how many it has.
        """
        binary = self._binaries.get(description)
        loaded = None if binary is None else load(binary)
        if loaded is not None:
            return loaded
        program = compile()
        binaries: Any = program.get_info(cl.program_info.BINARIES)  # of each device
        if binaries[0]:
            self._binaries.put(description, binaries[0])
        return program

    @property
    def is_compiling(self) -> bool:
        """Whether launches would wait for the compiler."""
        return False

    def has(self, description: str) -> bool:
        """Whether the binary of a program is on disk."""
        return self._binaries.has(description)

    def keep(self, description: str) -> None:
        """Save a program whose kernels have not run."""

    def save_if_due(self) -> None:
        """Save programs, if it is time. Usually it only compares two times."""

    def save(self) -> None:
        """Save every program whose kernels have run."""
