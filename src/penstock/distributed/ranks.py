"""Which rank this is, and how ranks come to be."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from penstock.collectives.communicator import Communicator, Traffic
from penstock.collectives.engine import Engine
from penstock.collectives.local import LocalEngine, Room
from penstock.collectives.mpi import MPIEngine, launched_size
from penstock.collectives.nccl import NCCLEngine
from penstock.collectives.world import as_rank, begin, begun, communicator
from penstock.errors import SettingError
from penstock.registry import default_device, devices, use
from penstock.tensor.random import default_generator

T = TypeVar("T")


def init(engine: Engine | None = None, *, timeout: float = 50.0) -> int:
    """Join the ranks that `mpiexec -n N` started; the number of this rank. Alone without a launcher.

    Ranks on a machine with as many GPUs of the default device's kind take one each, in order. Arrays go from
    CUDA device to device through NCCL if nccl4py is there, and otherwise through MPI and the host's memory.
    All ranks then draw the random numbers of rank 0. A rank that dies, or that the others wait for longer
    than `timeout` seconds while it neither computes nor compiles, ends them with a message that names it.

    >>> ps.distributed.init(), ps.distributed.size()
    (0, 1)
    """
    if begun():
        return rank()
    if engine is None and launched_size() > 1:
        mpi = _mpi()
        engine = _with_nccl(mpi, _take_device(mpi))
    own = begin(Engine() if engine is None else engine, timeout)
    if own.size > 1:
        state = own.share(json.dumps(default_generator.state()).encode())
        default_generator.set_state(json.loads(state))
    return own.rank


def _mpi() -> MPIEngine:
    try:
        return MPIEngine()
    except ImportError as error:
        raise SettingError(
            f"a launcher has started {launched_size()} ranks, and mpi4py cannot be imported ({error}); "
            "pip install 'penstock[mpi]' brings it with an MPI, or build mpi4py for the MPI of this machine"
        ) from None


def _take_device(mpi: MPIEngine) -> bool:
    """Give the ranks of a machine with several GPUs one each; whether each has its own."""
    driver = default_device().name.split(":")[0]
    alike = [
        each for each in devices() if each.name.split(":")[0] == driver and each.capabilities.kind == "gpu"
    ]
    if len(alike) < mpi.local_size:
        return False
    if mpi.local_size > 1:
        use(alike[mpi.local_rank])
    return True


def _with_nccl(mpi: MPIEngine, apart: bool) -> Engine:
    """MPI, with NCCL for what lies on CUDA devices, if nccl4py is there and ranks have a device each."""
    driver, _, number = default_device().name.partition(":")
    if not apart or driver != "cuda" or find_spec("nccl") is None:
        return mpi
    return NCCLEngine(mpi, int(number or 0))


def rank() -> int:
    """The number of this rank, from 0.

    >>> ps.distributed.rank()
    0
    """
    return communicator().rank


def size() -> int:
    """How many ranks there are.

    >>> ps.distributed.size()
    1
    """
    return communicator().size


def barrier() -> None:
    """Wait until every rank is here.

    >>> ps.distributed.barrier()
    """
    communicator().barrier()


@contextmanager
def patient() -> Iterator[None]:
    """In a block, the other ranks wait as long as it takes; for what a single rank does at length.

    >>> with ps.distributed.patient():
    ...     total = sum(range(10))
    """
    with communicator().patient():
        yield


def traffic() -> Traffic:
    """What this rank has exchanged with others so far, and how long it waited for them.

    >>> ps.distributed.traffic().sent_bytes
    0
    """
    return communicator().traffic


def run_local(function: Callable[..., T], arguments: Sequence[Any], engine: Any = None) -> list[T]:
    """Call a function with each of several arguments, mostly devices, each in a thread that is a rank.

    Every rank needs a device of its own, since the program of a rank keeps its device until it is done.

    >>> ps.distributed.run_local(lambda start: ps.distributed.rank() + start, [10, 20])
    [10, 21]
    """
    room = Room(len(arguments))
    results: list[Any] = [None] * len(arguments)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        own = LocalEngine(room, number)
        try:
            with as_rank(Communicator(own if engine is None else engine(own))):
                results[number] = function(arguments[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
