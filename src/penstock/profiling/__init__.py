"""Where time and memory go: profiles, with what each kernel reaches of the device's best."""

from penstock.profiling.profile import Profile, profile
from penstock.profiling.records import (
    CopyRecord,
    DeviceRecord,
    EventRecord,
    KernelRecord,
    OwnerRecord,
    WaitRecord,
)

__all__ = [
    "CopyRecord",
    "DeviceRecord",
    "EventRecord",
    "KernelRecord",
    "OwnerRecord",
    "Profile",
    "WaitRecord",
    "profile",
]
