"""The shortest way of a launch from its arguments to the driver.

Most of the host's time for a small operation goes to calls, so this has the code of the queue's methods
`dependencies` and `record` instead of calling them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.drivers.driver import Driver
from penstock.errors import DeviceError
from penstock.memory.buffer import Buffer
from penstock.stream.queue import CommandQueue, describe
from penstock.stream.recorder import Launch

if TYPE_CHECKING:
    from penstock.stream.stream import Stream


def launcher(
    stream: Stream, queue: CommandQueue, command: Launch, driver: Driver
) -> Callable[[Sequence[Any], Sequence[Buffer]], None]:
    """What records a launch on a queue, any number of times; see `Stream.launcher`."""
    kernel, grid, group, _ = command
    launch, noted, policy = driver.launcher(kernel, grid, group), (command,), queue.policy

    def record(native: Sequence[Any], buffers: Sequence[Buffer]) -> None:
        with stream.lock:  # not acquire() and try: an interrupt between these would leave it locked
            if stream.unavailable:
                stream.check_available()
            batch, waits, is_known, is_idle = queue.opened, None, True, False
            for buffer in buffers:
                if buffer.usage.batch is not batch:
                    is_known = False
                    break
            if not is_known:
                for buffer in buffers:
                    usage = buffer.usage
                    if usage.event is not None or usage.viewers or buffer.driver is not driver:
                        waits = queue.admit(buffers)
                        break
                else:
                    is_idle = True  # no command uses them
            try:
                try:
                    # The native queue is another one once commands were timed.
                    event = launch(queue.native, native, waits)
                except DeviceError as error:
                    raise DeviceError(error.reason, describe(command)) from None
                if event is None:
                    if not is_idle:
                        _forget(buffers, driver)
                    return
                if is_idle:
                    queue.admit(buffers)  # which counts their bytes
                events = batch.events
                events += (event,)
                batch.commands += noted
                # Where all commands of a batch have one event, its memories have it already.
                if not is_known or events[0] is not event:
                    for buffer in buffers:
                        usage = buffer.usage
                        usage.batch = batch
                        usage.event = event
                if len(events) >= policy.max_commands or batch.nbytes >= policy.max_bytes:
                    queue.submit()
            except DeviceError:
                raise
            except BaseException:
                stream.interrupted(queue)
                raise

    return record


def _forget(buffers: Sequence[Buffer], driver: Driver) -> None:
    """Forget the last uses of buffers, which are done, unless they have failed."""
    for buffer in buffers:
        event = buffer.usage.event
        if event is not None and not driver.failures((event,)):
            buffer.usage.forget()
