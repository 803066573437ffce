"""Ranks that are processes of MPI: `mpiexec -n 4`, through mpi4py."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.collectives.engine import (
    Array,
    Beat,
    Engine,
    Exchange,
    Move,
    check_summable,
    empty_result,
)

# What launchers tell the processes that they start: MPICH and Intel MPI, Open MPI, Slurm.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
_PRINTING = 1.0  # seconds in which mpiexec passes on what was printed, before it kills all ranks
_BEAT = 1  # the tag of its messages
ABORTED = "aborted"  # a file beside these, if a rank has ended the others and said why
PROCESSES = "PENSTOCK_RANK_PROCESSES"  # a folder with the number of each rank's process, while it is needed


def launched_size() -> int:
    """How many ranks a launcher has started, as far as the environment tells."""
    for name in _SIZES:
        value = os.environ.get(name, "")
        if value.isdecimal() and (name != "SLURM_NTASKS" or "SLURM_STEP_ID" in os.environ):
            return int(value)
    return 1


class MPIEngine(Engine):
    """Nonblocking collectives of MPI on arrays of the host, in a communicator of their own."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self._beats = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = here.Get_rank(), here.Get_size()  # among those on this machine
        self.name = MPI.Get_library_version().split("\n")[0].split(":")[0].split(" Version")[0]
        self._processes: list[str] = self._comm.allgather(f"process {os.getpid()} on {platform.node()}")
        self._note = Path(os.environ[PROCESSES]) / str(self.rank) if PROCESSES in os.environ else None
        if self._note is not None:
            self._note.write_text(str(os.getpid()))
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._sent: dict[int, tuple[Any, Array]] = {}  # the last beat to each rank
        self._inbox = {rank: np.zeros(3, np.int64) for rank in others}
        self._arriving = {rank: self._expected(rank) for rank in others}

    def begin(self, operation: Move, array: Array) -> Exchange:
        """See `Engine.begin`."""
        comm, sum_ = self._comm, self._mpi.SUM
        if operation == "barrier":
            return Exchange(comm.Ibarrier().Test, array)
        if operation == "broadcast":
            result = array.copy()
            return Exchange(comm.Ibcast(_bytes(result), root=0).Test, result)
        result = empty_result(operation, self.size, array)
        if operation == "all_reduce":
            check_summable(array)
            request = comm.Iallreduce(array, result, op=sum_)
        elif operation == "reduce_scatter":
            check_summable(array)
            request = comm.Ireduce_scatter_block(array, result, op=sum_)
        elif operation == "all_gather":
            request = comm.Iallgather(_bytes(array), _bytes(result))
        else:
            request = comm.Ialltoall(_bytes(array), _bytes(result))
        return Exchange(request.Test, result)

    def beat(self, own: Beat) -> Mapping[int, Beat]:
        """See `Engine.beat`. A rank that does not take its messages gets no more of them."""
        heard: dict[int, Beat] = {}
        for rank, inbox in self._inbox.items():
            last = self._sent.get(rank)
            if last is None or last[0].Test():
                message = np.array([own.begun, own.patient, own.ended], np.int64)
                self._sent[rank] = self._beats.Isend(message, dest=rank, tag=_BEAT), message
            while self._arriving[rank].Test():
                heard[rank] = Beat(int(inbox[0]), bool(inbox[1]), bool(inbox[2]))
                self._arriving[rank] = self._expected(rank)
        return heard

    def _expected(self, rank: int) -> Any:
        return self._beats.Irecv(self._inbox[rank], source=rank, tag=_BEAT)

    def who(self, rank: int) -> str:
        """See `Engine.who`."""
        return self._processes[rank]

    def abort(self) -> None:
        """See `Engine.abort`."""
        if self._note is not None:
            (self._note.parent / ABORTED).touch()
        time.sleep(_PRINTING)
        self._mpi.COMM_WORLD.Abort(1)

    def close(self) -> None:
        """Take back what still waits for messages, so that MPI can end."""
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        for request in self._arriving.values():
            request.Cancel()
            request.Wait()
        for request, _ in self._sent.values():
            if not request.Test():
                request.Cancel()
                request.Wait()


def _bytes(array: Array) -> Array:
    """The same memory as bytes, which MPI moves whatever the dtype is."""
    return array.reshape(-1).view(np.uint8)
