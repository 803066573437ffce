"""Automatic dispatch: a logical device for several, which runs each program on the device that is fastest.

`pricing` estimates from measured rates how long a graph takes on each device, `cutting` where to cut a graph
in two, `placing` chooses and remembers, `moving` moves values between devices, and `device` is the interface
for users.
"""

from penstock.dispatch.device import AutoDevice, auto_device

__all__ = ["AutoDevice", "auto_device"]
