"""Settings from the environment, sizes as people write them, and the list of devices."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import penstock as ps
from penstock import registry
from penstock.cli import app
from penstock.config import Settings, parse_bytes
from penstock.drivers.host import HostDriver, host_capabilities
from penstock.errors import DeviceNotFound, SettingError
from penstock.formatting import format_bytes
from penstock.opened import refuse


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("1KiB", 1024), ("1 kb", 1000), ("1.5GiB", 3 << 29), ("2G", 2 << 30)],
)
def test_sizes_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("bad", ["", "two", "-1", "1 XB", "1e3", -1, 1.5, None, True, "GiB", "9" * 400])
def test_what_is_no_size_is_refused_with_an_example(bad: object) -> None:
    with pytest.raises(SettingError, match=r"GB|negative"):
        parse_bytes(bad)  # type: ignore[arg-type]


@given(st.integers(0, 1 << 60))
def test_formatted_sizes_are_near_the_number_and_readable_again(nbytes: int) -> None:
    again = parse_bytes(format_bytes(nbytes))
    assert abs(again - nbytes) <= 0.06 * nbytes + 1


def test_the_environment_sets_every_field() -> None:
    environment = {
        "PENSTOCK_DEVICE": "host",
        "PENSTOCK_MAX_COMMANDS": "7",
        "PENSTOCK_MAX_BYTES": "1MiB",
        "PENSTOCK_MAX_IN_FLIGHT": "2",
        "PENSTOCK_STAGING_BYTES": "2M",
        "PENSTOCK_MEMORY_LIMIT": "1GiB",
        "PENSTOCK_POOL_CAPACITY": "0",
        "PENSTOCK_POOL_BYTES": "100",
        "PENSTOCK_POOL_SECONDS": "1.5",
        "PENSTOCK_TRACE_MEMORY": "on",
        "PENSTOCK_FORCE_KERNELS": "1",
        "PENSTOCK_REUSE_GRAPHS": "0",
        "PENSTOCK_COMPILE_AHEAD": "0",
        "PENSTOCK_CHECK_INDICES": "off",
        "PENSTOCK_TF32": "1",
    }
    expected = Settings(
        "host", 7, 1 << 20, 2, 2 << 20, 1 << 30, 0, 100, 1.5, True, True, False, False, False, True
    )
    assert Settings.from_environment(environment) == expected
    assert Settings.from_environment({"PENSTOCK_MAX_BYTES": " "}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PENSTOCK_MAX_COMMANDS", "many"),
        ("PENSTOCK_MAX_COMMANDS", "0"),
        ("PENSTOCK_MEMORY_LIMIT", "lots"),
        ("PENSTOCK_POOL_SECONDS", "-1"),
        ("PENSTOCK_TRACE_MEMORY", "maybe"),
    ],
)
def test_a_bad_setting_is_named(variable: str, value: str) -> None:
    with pytest.raises(SettingError, match=variable.removeprefix("PENSTOCK_").lower() + "|" + variable):
        Settings.from_environment({variable: value})


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry before its first search."""
    monkeypatch.setattr(registry, "_by_driver", {})
    monkeypatch.setattr(registry, "_default", None)
    monkeypatch.setattr(registry, "_missing", [])
    monkeypatch.delenv("PENSTOCK_DEVICE", raising=False)


@pytest.mark.usefixtures("empty_registry")
def test_the_machine_has_an_opencl_device_and_the_host() -> None:
    names = [device.name for device in ps.devices()]
    assert next(name for name in names if not name.startswith("cuda")) == "opencl:0"
    assert names[-1] == "host"
    assert ps.default_device() is ps.devices()[0]
    kinds = [device.capabilities.kind for device in ps.devices() if not device.name.startswith("cuda")]
    order = ["gpu", "accelerator", "cpu", "host"]
    assert kinds == sorted(kinds, key=order.index), "GPUs first, then PoCL, then the host"


@pytest.mark.usefixtures("empty_registry")
def test_use_takes_names_and_devices() -> None:
    assert ps.use("host") is ps.default_device() is ps.devices()[-1]
    assert ps.use(" OpenCL ").name == "opencl:0"
    assert ps.use(ps.devices()[-1]).name == "host"


@pytest.mark.usefixtures("empty_registry")
def test_the_environment_names_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DEVICE", "host")
    assert ps.default_device().name == "host"


@pytest.mark.usefixtures("empty_registry")
def test_a_name_that_is_not_there_gets_the_names_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda:99", "opencl:99", "hosts"):
        with pytest.raises(DeviceNotFound, match=rf"{name}.*opencl:0 \(.*host \(NumPy\)"):
            ps.use(name)
    monkeypatch.setenv("PENSTOCK_DEVICE", "opencl:7")
    with pytest.raises(DeviceNotFound, match="'opencl:7'"):
        ps.default_device()


@pytest.mark.usefixtures("empty_registry")
def test_a_machine_without_any_driver_still_has_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver in ("cuda", "opencl", "webgpu"):
        monkeypatch.setitem(sys.modules, f"penstock.drivers.{driver}", None)
        monkeypatch.delattr(f"penstock.drivers.{driver}", raising=False)
    assert [device.name for device in ps.devices()] == ["host"]
    absent = (
        r"not available: cuda, .*; opencl, which could not be loaded .*; webgpu, which could not be loaded"
    )
    with pytest.raises(DeviceNotFound, match=absent):
        ps.use("opencl")


def test_gpus_come_first_and_by_the_driver_that_serves_them_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(name: str, kind: Any) -> ps.Device:
        language: Any = {"cuda:0": "cuda", "opencl:0": "opencl", "opencl:1": "opencl"}.get(name, "wgsl")
        can = replace(host_capabilities(), kind=kind, language=language)
        return ps.Device(name, can, refuse("it is not there"))

    cuda = [device("cuda:0", "gpu")]
    opencl = [device("opencl:0", "gpu"), device("opencl:1", "cpu")]
    webgpu = [device("webgpu:0", "gpu"), device("webgpu:1", "cpu")]
    order = {"linux": ["opencl:0", "webgpu:0"], "win32": ["opencl:0", "webgpu:0"]}
    order["darwin"] = ["webgpu:0", "opencl:0"]  # whose OpenCL is kept for old programs only
    for platform, gpus in order.items():
        monkeypatch.setattr(sys, "platform", platform)
        names = [device.name for device in registry._in_order(cuda, opencl, webgpu)]
        assert names == ["cuda:0", *gpus, "opencl:1", "webgpu:1"], platform


def test_listing_devices_opens_none_and_importing_loads_no_driver() -> None:
    script = (
        "import sys, penstock as ps; assert not {'pyopencl', 'cuda.bindings', 'wgpu'} & set(sys.modules); "
        "assert ps.devices(); assert ps.memory.stats().devices == {}"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


@pytest.mark.usefixtures("empty_registry")
def test_penstock_devices_lists_them() -> None:
    result = CliRunner().invoke(app, ["devices"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"{ps.devices()[0].name} *" in result.stdout
    assert "NumPy" in result.stdout


def test_the_command_line_tells_an_error_in_a_line() -> None:
    command = [sys.executable, "-m", "penstock", "devices"]
    environment = {**os.environ, "PENSTOCK_DEVICE": "abacus"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 1
    assert "no device 'abacus'" in done.stderr
    assert "Traceback" not in done.stderr


def test_memory_stats_reconcile_the_whole_process() -> None:
    closed = ps.Device.over(HostDriver("closed"))
    closed.upload([1.0])
    closed.close()  # and still there: it must not be in the way
    device = ps.use("opencl")
    buffer = device.upload([1.0] * 100_000)
    stats = ps.memory.stats()
    mine = stats.devices[device.name]
    assert stats.live_bytes >= mine.live_bytes >= buffer.nbytes
    assert stats.unaccounted_bytes == mine.unaccounted_bytes == 0
    assert stats.resident_bytes > 10_000_000
    assert stats.other_bytes <= stats.resident_bytes
    del buffer
    device.sync()
    assert ps.memory.stats().pooled_bytes > 0
    assert ps.memory.trim() > 0
    assert ps.memory.stats().pooled_bytes == 0
