"""The devices of this machine by name, the default device, and their handling at a fork and at exit."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config import Settings
from penstock.drivers.driver import Capabilities, Driver, at_end
from penstock.drivers.host import HostDriver, host_capabilities
from penstock.errors import DeviceError, DeviceNotFound, DeviceUnavailable, PenstockWarning
from penstock.opened import forked, refuse
from penstock.runtime import Device, in_use, unpickle_with

_registry_lock = threading.RLock()
_by_driver: dict[str, list[Device]] = {}  # of drivers that were loaded
_default: Device | None = None
_auto: Device | None = None  # the device `auto`, once it was requested
_open_auto: Callable[[], Device]
_missing: list[str] = []  # why drivers are not available
_unusable: dict[str, str] = {}  # by driver, why an existing device cannot be used


def devices() -> list[Device]:
    """Every device of this machine, the best first. Nothing is opened.

    >>> [device.name for device in ps.devices() if device.name == "host"]
    ['host']
    """
    return [*_in_order(_of("cuda"), _of("opencl"), _of("webgpu")), *_of("host")]


def _of(driver: str) -> list[Device]:
    """The devices of a driver, which is loaded at the first request."""
    with _registry_lock:
        if driver not in _by_driver:
            _by_driver[driver] = _FINDERS[driver]()
        return _by_driver[driver]


def _in_order(cuda: list[Device], opencl: list[Device], webgpu: list[Device]) -> list[Device]:
    """Devices, the best first: GPUs, then CPUs; PoCL before software Vulkan.

    A GPU that both drivers reach is faster through OpenCL, except on a Mac, where OpenCL is deprecated.
    """
    both = (*webgpu, *opencl) if sys.platform == "darwin" else (*opencl, *webgpu)
    gpus = [device for device in both if device.capabilities.kind == "gpu"]
    others = [device for device in (*opencl, *webgpu) if device.capabilities.kind != "gpu"]
    return [*cuda, *gpus, *others]


def default_device() -> Device:
    """The device of `use` or of `PENSTOCK_DEVICE`, or else the best device.

    >>> ps.default_device().name
    'host'
    """
    global _default
    with _registry_lock:
        if _default is None:
            name = Settings.from_environment().device
            _default = find(name) if name else _best()
        return _default


def _best() -> Device:
    before = [] if sys.platform == "darwin" else _in_order(_of("cuda"), _of("opencl"), [])
    if before and before[0].capabilities.kind == "gpu":
        return before[0]  # without loading WebGPU, which takes a second and ranks below
    best = devices()[0]
    if best.capabilities.kind != "gpu":
        for why in _unusable.values():
            warnings.warn(f"{why}; the default device is {best.name}", PenstockWarning, stacklevel=3)
    return best


def use(device: str | Device) -> Device:
    """Make a device the default, by object or by name: `cuda`, `opencl:1`, `gpu`, `cpu`, `host`, `auto`.

    `card.toml` is the device that this file describes, for memory plans; it cannot compute.

    >>> ps.use("host").name
    'host'
    """
    global _default
    with _registry_lock:
        _default = device if isinstance(device, Device) else find(device)
        return _default


def find(name: str) -> Device:
    """The device of a name, or the first of a driver or a kind; DeviceNotFound lists the devices.

    The path of a `.toml` file is the device that it describes, which this machine need not have.
    """
    wanted = name.strip().lower()
    if wanted == "auto":
        return _auto_device()
    if wanted.endswith(".toml"):
        return _described(Path(name.strip()))
    driver = wanted.split(":")[0]
    for device in _of(driver) if driver in _FINDERS else ():
        if wanted in (device.name, driver):
            return device
    if wanted in ("cpu", "gpu"):
        kinds = ("gpu",) if wanted == "gpu" else ("cpu", "host")
        for device in devices():
            if device.capabilities.kind in kinds:
                return device
    if why := _unusable.get(driver):
        raise DeviceUnavailable(f"{name} cannot be used here: {why}")
    known = ", ".join(f"{device.name} ({device.capabilities.description})" for device in devices())
    why = f"; not available: {'; '.join(_missing)}" if _missing else ""
    raise DeviceNotFound(f"there is no device {name!r}; there are {known}, and auto{why}")


def _described(path: Path) -> Device:
    """The device that a file describes, for memory plans only."""
    from penstock.drivers.absent import AbsentDriver
    from penstock.drivers.description import read_description

    return Device.over(AbsentDriver(str(path), *read_description(path)))


def provide_auto(open_auto: Callable[[], Device]) -> None:
    """Set the function that makes the device `auto`, which depends on modules that import this one."""
    global _open_auto
    _open_auto = open_auto


def _auto_device() -> Device:
    global _auto
    with _registry_lock:
        if _auto is None:
            _auto = _open_auto()
        return _auto


def sync() -> None:
    """Wait until nothing is pending on any device. Raises the first failure of the pending work.

    >>> ps.sync()
    """
    _on_all(lambda device: device.sync())


def commit() -> None:
    """Submit recorded commands of all devices, without waiting.

    >>> ps.commit()
    """
    _on_all(lambda device: device.stream.commit())


def cleanup() -> None:
    """Wait for pending work on all devices, and give idle memory back. All devices stay usable.

    >>> ps.cleanup()
    """
    _on_all(lambda device: device.cleanup())


def _on_all(action: Callable[[Device], None]) -> None:
    """Apply an action to every open device, and then raise the first failure."""
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
    """The devices of a driver, named by index; none is opened."""
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
        indices = cuda.find_devices()
    except DeviceError as error:
        _missing.append(f"cuda, which found no device ({error})")
        return []
    return _numbered("cuda", indices, cuda.cuda_capabilities, cuda.CudaDriver)


def _opencl_devices() -> list[Device]:
    try:
        from penstock.drivers import opencl  # imported late: a quarter of the package's import time
    except (ImportError, OSError) as error:  # no PyOpenCL, or no OpenCL loader
        _missing.append(f"opencl, which could not be loaded ({error})")
        return []
    usable = []
    for native in opencl.find_devices():
        if why := opencl.problem(native):
            _unusable["opencl"] = why
        else:
            usable.append(native)
    result = _numbered("opencl", usable, opencl.opencl_capabilities, opencl.OpenCLDriver)
    if not result and "opencl" not in _unusable:
        _missing.append("opencl, which found no device")
    return result


def _webgpu_devices() -> list[Device]:
    try:
        from penstock.drivers import webgpu  # imported late: it reads a header of two thousand lines
    except (ImportError, OSError, RuntimeError) as error:  # a RuntimeError: its native library is missing
        _missing.append(f"webgpu, which could not be loaded ({error})")
        return []
    result = _numbered("webgpu", webgpu.find_devices(), webgpu.webgpu_capabilities, webgpu.WebGpuDriver)
    if not result:
        _missing.append("webgpu, which found no device")
    return result


def _host_devices() -> list[Device]:
    return [Device("host", host_capabilities(), HostDriver)]


_FINDERS: dict[str, Callable[[], list[Device]]] = {
    "cuda": _cuda_devices,
    "opencl": _opencl_devices,
    "webgpu": _webgpu_devices,
    "host": _host_devices,
}


def _close_all() -> None:
    for device in list(in_use):
        try:
            device.close()
        except BaseException as error:  # nothing may keep the interpreter from exiting, not even an interrupt
            print(f"penstock: at exit, {device.name}: {error}", file=sys.stderr)
    if threading.active_count() > 1:
        # Python stops daemon threads wherever they are, and inside a device's C++ code that aborts the
        # process. Within this time, threads that use a device get its exception instead.
        time.sleep(0.02)
    for action in at_end:
        with suppress(KeyboardInterrupt):  # another Ctrl-C: later processes remove what this one leaves
            action()


def _after_fork() -> None:
    """In the child, which has no threads of OpenCL or of this module."""
    global _registry_lock, _default, _auto
    _registry_lock = threading.RLock()
    for device in list(in_use):
        device.abandon()
    in_use.clear()
    if _auto is not None:
        _auto.abandon()
    _default = _auto = None
    for driver, known in _by_driver.items():
        _by_driver[driver] = [_after_fork_device(device) for device in known]


def _after_fork_device(device: Device) -> Device:
    host = device.capabilities.kind == "host"
    return Device(device.name, device.capabilities, HostDriver if host else refuse(forked(device.name)))


unpickle_with(find)
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
