"""The devices of this machine by name, the default one, and what happens to them at a fork and at exit."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.config import Settings
from penstock.drivers.driver import Capabilities, Driver
from penstock.drivers.host import HostDriver, host_capabilities
from penstock.errors import DeviceError, DeviceNotFound, DeviceUnavailable, PenstockWarning
from penstock.runtime import Device, forked, in_use, refuse, unpickle_with

_registry_lock = threading.RLock()
_devices: list[Device] | None = None
_default: Device | None = None
_auto: Device | None = None  # the one that stands for several, once somebody asked for it
_open_auto: Callable[[], Device]
_missing: list[str] = []  # why a driver is not there
_unusable: dict[str, str] = {}  # by driver, why a device of it that is there cannot be used


def devices() -> list[Device]:
    """Every device of this machine, the best first. Nothing is opened."""
    global _devices
    with _registry_lock:
        if _devices is None:
            host = Device("host", host_capabilities(), HostDriver)
            _devices = [*_in_order(_cuda_devices(), _opencl_devices(), _webgpu_devices()), host]
        return list(_devices)


def _in_order(cuda: list[Device], opencl: list[Device], webgpu: list[Device]) -> list[Device]:
    """The best first: GPUs, then CPUs; PoCL before software Vulkan.

    A GPU that both reach is faster through OpenCL, but on a Mac, where that is kept for old programs only.
    """
    both = (*webgpu, *opencl) if sys.platform == "darwin" else (*opencl, *webgpu)
    gpus = [device for device in both if device.capabilities.kind == "gpu"]
    others = [device for device in (*opencl, *webgpu) if device.capabilities.kind != "gpu"]
    return [*cuda, *gpus, *others]


def default_device() -> Device:
    """The device of `use` or of `PENSTOCK_DEVICE`, or else the best one found."""
    global _default
    with _registry_lock:
        if _default is None:
            name = Settings.from_environment().device
            _default = find(name) if name else _best()
        return _default


def _best() -> Device:
    best = devices()[0]
    if best.capabilities.kind != "gpu":
        for why in _unusable.values():
            warnings.warn(f"{why}; the default device is {best.name}", PenstockWarning, stacklevel=3)
    return best


def use(device: str | Device) -> Device:
    """Make a device the default, by object or by name: `cuda`, `webgpu`, `opencl:1`, `host`, `auto`."""
    global _default
    with _registry_lock:
        _default = device if isinstance(device, Device) else find(device)
        return _default


def find(name: str) -> Device:
    """The device of a name, or the first of a driver's; DeviceNotFound lists what is there."""
    wanted = name.strip().lower()
    if wanted == "auto":
        return _auto_device()
    for device in devices():
        if device.name == wanted or device.name.split(":")[0] == wanted:
            return device
    if why := _unusable.get(wanted.split(":")[0]):
        raise DeviceUnavailable(f"{name} cannot be used here: {why}")
    there = ", ".join(f"{device.name} ({device.capabilities.description})" for device in devices())
    why = f"; not there: {'; '.join(_missing)}" if _missing else ""
    raise DeviceNotFound(f"there is no device {name!r}; there are {there}, and auto{why}")


def provide_auto(open_auto: Callable[[], Device]) -> None:
    """Say how the device `auto` is made, which is built on much that is built on this module."""
    global _open_auto
    _open_auto = open_auto


def _auto_device() -> Device:
    global _auto
    with _registry_lock:
        if _auto is None:
            _auto = _open_auto()
        return _auto


def sync() -> None:
    """Wait until nothing is pending on any device. Raises the first failure of the work that was."""
    _on_all(lambda device: device.sync())


def commit() -> None:
    """Submit what was recorded for any device, without waiting."""
    _on_all(lambda device: device.stream.commit())


def cleanup() -> None:
    """Wait for what is pending on any device, and give back everything idle. All devices stay usable."""
    _on_all(lambda device: device.cleanup())


def _on_all(action: Callable[[Device], None]) -> None:
    """Do something with every open device; the first failure is raised once all had their turn."""
    failures: list[Exception] = []
    for device in list(in_use):
        if not device.stream.unavailable:
            try:
                action(device)
            except Exception as error:
                failures.append(error)
    if failures:
        raise failures[0]


def _numbered(
    kind: str,
    natives: Sequence[Any],
    capabilities: Callable[[Any], Capabilities],
    driver: Callable[[Any, str], Driver],
) -> list[Device]:
    """Devices of one driver, none of them opened."""
    names = [f"{kind}:{index}" for index in range(len(natives))]
    return [
        Device(name, capabilities(native), partial(driver, native, name))
        for name, native in zip(names, natives, strict=True)
    ]


def _cuda_devices() -> list[Device]:
    try:
        from penstock.drivers import cuda
    except ImportError as error:
        _missing.append(f"cuda, which could not be loaded ({error}); pip install 'penstock[cuda]' brings it")
        return []
    try:
        numbers = cuda.find_devices()
    except DeviceError as error:
        _missing.append(f"cuda, which found no device ({error})")
        return []
    return _numbered("cuda", numbers, cuda.cuda_capabilities, cuda.CudaDriver)


def _opencl_devices() -> list[Device]:
    try:
        from penstock.drivers import opencl  # imported late: a quarter of the time that the package takes
    except (ImportError, OSError) as error:  # no PyOpenCL, or no library that finds OpenCL's devices
        _missing.append(f"opencl, which could not be loaded ({error})")
        return []
    usable = []
    for native in opencl.find_devices():
        if why := opencl.problem(native):
            _unusable["opencl"] = why
        else:
            usable.append(native)
    found = _numbered("opencl", usable, opencl.opencl_capabilities, opencl.OpenCLDriver)
    if not found and "opencl" not in _unusable:
        _missing.append("opencl, which found no device")
    return found


def _webgpu_devices() -> list[Device]:
    try:
        from penstock.drivers import webgpu  # imported late: it reads a header of two thousand lines
    except (ImportError, OSError, RuntimeError) as error:  # the last where its library is not there
        _missing.append(f"webgpu, which could not be loaded ({error})")
        return []
    found = _numbered("webgpu", webgpu.find_devices(), webgpu.webgpu_capabilities, webgpu.WebGpuDriver)
    if not found:
        _missing.append("webgpu, which found no device")
    return found


def _close_all() -> None:
    for device in list(in_use):
        try:
            device.close()
        except BaseException as error:  # nothing may keep the interpreter from ending, an interrupt neither
            print(f"penstock: at exit, {device.name}: {error}", file=sys.stderr)
    if threading.active_count() > 1:
        # Python ends daemon threads wherever they are, and inside a device's C++ that aborts the process.
        # Those that use a device meet its refusal within this time.
        time.sleep(0.02)


def _after_fork() -> None:
    """In the child: threads of OpenCL and of this module did not come along."""
    global _registry_lock, _devices, _default, _auto
    _registry_lock = threading.RLock()
    for device in list(in_use):
        device.abandon()
    in_use.clear()
    if _auto is not None:
        _auto.abandon()
    _default = _auto = None
    if _devices is not None:
        _devices = [_after_fork_device(device) for device in _devices]


def _after_fork_device(device: Device) -> Device:
    host = device.capabilities.kind == "host"
    return Device(device.name, device.capabilities, HostDriver if host else refuse(forked(device.name)))


unpickle_with(find)
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
