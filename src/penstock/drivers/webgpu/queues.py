"""What the WebGPU driver records: queues, batches that are submitted together, events of commands."""

from __future__ import annotations

from typing import Any

from wgpu.backends.wgpu_native import ffi

from penstock.drivers.driver import Bytes
from penstock.drivers.webgpu.launches import Dispatch
from penstock.drivers.webgpu.native import NativeBuffer, Owned
from penstock.drivers.webgpu.times import Moments, Queries

RING_BYTES = 1 << 18  # of a queue's uniform buffer, in which each launch has its own scalars


class EncoderQueue:
    """What is recorded and not submitted, and what is submitted and not known to be done."""

    __slots__ = (
        "batch", "encoder", "group", "in_flight", "native_pass", "offset", "pipeline", "ring", "ring_used",
        "scalars", "staged",
    )  # fmt: skip

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.in_flight: list[Batch] = []  # in the order of submission
        self.encoder: Any = None
        self.native_pass: Any = None  # inside the encoder
        self.pipeline: Owned | None = None  # set in the pass
        self.group: Owned | None = None
        self.staged = 0  # bytes that were written and not submitted
        self.ring: tuple[NativeBuffer, Owned] | None = None  # the uniform buffer and its bind group
        self.ring_used = 0
        self.scalars = ffi.new("uint8_t[]", RING_BYTES)  # what will be written to it at the next submission
        self.offset = ffi.new("uint32_t *")


class Batch:
    """Commands that are submitted together."""

    __slots__ = (
        "done", "error", "events", "index", "moments", "queries", "queue", "reads", "start", "submitted",
        "temporary", "waiting",
    )  # fmt: skip

    def __init__(self, queue: EncoderQueue, queries: Queries | None = None) -> None:
        self.queue = queue
        self.events: list[CommandEvent] = []
        self.reads: list[Read] = []
        self.temporary: list[NativeBuffer] = []  # needed until the batch is done
        self.index = 0  # of its submission
        self.start = 0.0  # when it was submitted
        self.queries = queries  # where its commands are timed
        self.moments: Moments | None = None  # the results of these, once the batch is done
        self.waiting: set[int] = set()  # callbacks to come
        self.submitted = False
        self.done = False
        self.error = ""

    def told(self, expected: int, problem: str) -> None:
        """Take notice of a callback."""
        self.error = self.error or problem
        self.waiting.discard(expected)

    def fail(self, reason: str) -> None:
        """End the batch; its commands have failed."""
        self.error = self.error or reason
        self.submitted = True
        self.end()

    def end(self) -> None:
        """Let go of everything: nothing is needed of a batch but that it is done."""
        for event in self.events:
            event.dispatch = None
        self.events.clear()
        self.reads.clear()
        self.temporary.clear()
        self.queries = None
        self.done = True


class CommandEvent:
    """One command of a batch."""

    __slots__ = ("batch", "dispatch", "error", "moment")

    def __init__(self, batch: Batch, dispatch: Dispatch | None, moment: int = -1) -> None:
        self.batch = batch
        self.moment = moment  # the index of its start in the batch's moments; -1 where it is not timed
        self.dispatch = dispatch  # of a launch, until it is done
        self.error = ""


class Read:
    """A buffer to be mapped, and where its bytes go."""

    __slots__ = ("buffer", "nbytes", "skip", "target")

    def __init__(self, buffer: NativeBuffer, nbytes: int, skip: int, target: Bytes) -> None:
        self.buffer = buffer
        self.nbytes = nbytes
        self.skip = skip  # bytes before the first that was asked for
        self.target = target
