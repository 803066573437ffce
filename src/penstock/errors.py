"""The exceptions of Penstock. Each message says what was given and what would work."""

from __future__ import annotations

from collections.abc import Sequence


class PenstockError(Exception):
    """The base class of all others."""


class SettingError(PenstockError, ValueError):
    """A setting, from the environment or from code, has an invalid value."""


class DeviceNotFound(PenstockError, LookupError, ValueError):
    """No device has the requested name."""


class DeviceUnavailable(PenstockError, RuntimeError):
    """The device existed, but cannot be used here: closed, or inherited through a fork."""


class CompileError(PenstockError, RuntimeError):
    """A kernel's source was refused by the device's compiler. The message contains the compiler's log."""


class KernelError(PenstockError, ValueError):
    """A user's kernel is refused: its formula, its function or its declaration is not valid."""


class DeviceError(PenstockError, RuntimeError):
    """The device refused or failed a command. `command` describes it: kernel, sizes and arguments."""

    def __init__(self, reason: str, command: str = "") -> None:
        super().__init__(f"{command}: {reason}" if command else reason)
        self.reason = reason
        self.command = command


class BadIndex(PenstockError, IndexError):
    """An index is out of range; `where` is the user's line that recorded the operation.

    Kernels continue with an index that is in range, and the error is raised when the host next reads a value.
    """

    def __init__(self, reason: str, *, index: int, length: int, where: str) -> None:
        super().__init__(reason)
        self.index = index
        self.length = length
        self.where = where


class BufferInUse(PenstockError, RuntimeError):
    """A buffer was passed to the device while the host holds a view of it, or vice versa."""


class OutOfDeviceMemory(PenstockError, MemoryError):
    """An allocation did not fit, even after pending work was finished and the pool was freed.

    Everything else stays usable: nothing that was live or pending is lost.
    """

    def __init__(
        self,
        reason: str,
        *,
        asked: int,
        live: int = 0,
        pooled: int = 0,
        free: int | None = None,
        owners: Sequence[tuple[str, int]] = (),
        smallest: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.asked = asked
        self.live = live
        self.pooled = pooled
        self.free = free
        self.owners = tuple(owners)
        self.smallest = smallest  # the smallest budget that would suffice, if that is known


class CaptureError(PenstockError):
    """A function that `jit` captures does something that cannot be replayed, such as reading a value."""


class DamagedTensor(PenstockError, RuntimeError):
    """A step failed while it was overwriting this tensor, so its values are undefined."""


class CheckpointError(PenstockError):
    """A saved model or run cannot be read, is damaged, or does not fit."""


class QueueFull(PenstockError, RuntimeError):
    """An engine has as many waiting requests as its queue takes."""


class EngineClosed(PenstockError, RuntimeError):
    """An engine was closed, or a step of it failed, so it takes and completes no requests."""


class OnnxError(PenstockError, ValueError):
    """A model in ONNX's format cannot be read, or is not valid."""


class UnsupportedModel(OnnxError, NotImplementedError):
    """A valid ONNX model has something that Penstock does not compute; `reason` says in few words what."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ReportError(PenstockError):
    """A run's folder or a file of a profile cannot be shown as a page."""


class NoEvidence(PenstockError, ValueError):
    """A file is no trace of a profile, or of a version whose traces have too little for advice."""


class PenstockWarning(UserWarning):
    """Something is wrong, but nothing is lost by continuing."""
