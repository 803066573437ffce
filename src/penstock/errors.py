"""Every exception that Penstock raises on purpose. Each names what was given and what would work."""

from __future__ import annotations

from collections.abc import Sequence


class PenstockError(Exception):
    """The base of all the others."""


class SettingError(PenstockError, ValueError):
    """A setting, from the environment or from code, has a value that cannot be used."""


class DeviceNotFound(PenstockError, LookupError, ValueError):
    """No device has the name that was asked for."""


class DeviceUnavailable(PenstockError, RuntimeError):
    """The device existed, but cannot be used here: closed, or inherited through a fork."""


class CompileError(PenstockError, RuntimeError):
    """A kernel's source was refused by the device's compiler. The message holds the compiler's log."""


class KernelError(PenstockError, ValueError):
    """A kernel of the user's own cannot be one: its formula, its function or its declaration is refused."""


class DeviceError(PenstockError, RuntimeError):
    """The device refused or failed a command. `command` describes it: kernel, sizes and arguments."""

    def __init__(self, reason: str, command: str = "") -> None:
        super().__init__(f"{command}: {reason}" if command else reason)
        self.reason = reason
        self.command = command


class BadIndex(PenstockError, IndexError):
    """An index is out of range; `where` is the user's line that recorded the operation.

    Kernels go on with an index that is in range, and the error is raised when the host next reads anything.
    """

    def __init__(self, reason: str, *, index: int, length: int, where: str) -> None:
        super().__init__(reason)
        self.index = index
        self.length = length
        self.where = where


class BufferInUse(PenstockError, RuntimeError):
    """A buffer was given to the device while the host holds a view of it, or the other way round."""


class OutOfDeviceMemory(PenstockError, MemoryError):
    """A request did not fit, even after pending work was finished and the pool given back.

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
    ) -> None:
        super().__init__(reason)
        self.asked = asked
        self.live = live
        self.pooled = pooled
        self.free = free
        self.owners = tuple(owners)


class CaptureError(PenstockError):
    """A function that `jit` captures does what cannot be replayed, such as reading a value."""


class DamagedTensor(PenstockError, RuntimeError):
    """A step failed while it was writing over this tensor, so that nobody knows what is in it."""


class CheckpointError(PenstockError):
    """A saved model or run cannot be read, is damaged, or does not fit."""


class ReportError(PenstockError):
    """A run's folder or a file of a profile cannot be shown as a page."""


class NoEvidence(PenstockError, ValueError):
    """A file is no trace of a profile, or one of a version that kept less than advice is given by."""


class PenstockWarning(UserWarning):
    """Something is not as it should be, and nothing is lost by going on."""
