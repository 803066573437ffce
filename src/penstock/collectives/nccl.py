"""Ranks whose devices are NVIDIA's: NCCL moves arrays between them, through nccl4py.

Values of the host, such as losses, and the beats of ranks go through another engine, mostly MPI.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.collectives.engine import Array, Beat, DeviceRow, Engine, Exchange, Move


class NCCLEngine(Engine):
    """A communicator of NCCL on this rank's CUDA device, which has to be the current one."""

    on_device = True

    def __init__(self, host: Engine, device: int) -> None:
        """`host` moves the values of the host; `device` is the number of the CUDA device."""
        import nccl.core as nccl
        from cuda.core import Device

        self._host, self.rank, self.size = host, host.rank, host.size
        self.name = "NCCL"
        Device(device).set_current()
        own = nccl.get_unique_id()
        sent = host.begin("broadcast", np.frombuffer(bytes(own), np.uint8).copy())
        while not sent.is_done():
            time.sleep(1e-3)
        shared = nccl.UniqueId.from_bytes(sent.result.tobytes())
        self._communicator: Any = nccl.Communicator.init(self.size, self.rank, shared)
        self._sum = nccl.SUM

    def launch(self, operation: Move, source: DeviceRow, target: DeviceRow, stream: int) -> None:
        """See `Engine.launch`."""
        run, on = self._communicator, {"stream": stream}
        if operation == "all_reduce":
            run.allreduce(source, target, self._sum, **on)
        elif operation == "reduce_scatter":
            run.reduce_scatter(source, target, self._sum, **on)
        elif operation == "all_gather":
            run.allgather(source, target, **on)
        elif operation == "all_to_all":
            run.alltoall(source, target, **on)
        else:
            run.broadcast(source, target, 0, **on)

    def begin(self, operation: Move, array: Array) -> Exchange:
        """See `Engine.begin`: of values of the host."""
        return self._host.begin(operation, array)

    def beat(self, own: Beat) -> Mapping[int, Beat]:
        """See `Engine.beat`."""
        return self._host.beat(own)

    def who(self, rank: int) -> str:
        """See `Engine.who`."""
        return self._host.who(rank)

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._communicator.abort()
        self._host.abort()

    def close(self) -> None:
        """See `Engine.close`."""
        self._communicator.destroy()
        self._host.close()
