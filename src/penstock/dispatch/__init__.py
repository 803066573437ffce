"""Automatic dispatch: one device that stands for several, each program on the one that is done with it first.

`pricing` tells from measured rates how long a graph takes on each device, `cutting` where a graph is best cut
in two, `placing` chooses and remembers, `moving` brings values to where they are needed, and `device` is what
users see of all of it.
"""

from penstock.dispatch.device import AutoDevice, auto_device

__all__ = ["AutoDevice", "auto_device"]
