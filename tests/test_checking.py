"""`penstock devices --check`: every driver passes, and errors of a device are reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS
from typer.testing import CliRunner

import penstock as ps
from penstock import checking, registry
from penstock.checking import Finding, check
from penstock.cli import app
from penstock.drivers.driver import Event
from penstock.drivers.host import HostDriver
from penstock.errors import DeviceError, PenstockError
from penstock.runtime import Device


class Liar(HostDriver):
    """A device with memory of its own that brings a bit of every fourth byte back wrong."""

    def read(self, queue: Any, target: Any, memory: Any, offset: int, waits: Any) -> Event:
        event = super().read(queue, target, memory, offset, waits)
        target[3::4] ^= 0x40
        return event


class Refuser(HostDriver):
    """A device that has no memory to give."""

    def allocate(self, nbytes: int, pinned: bool = False) -> Any:
        raise DeviceError("no")


@pytest.mark.slow("opencl-mapped", "opencl-device", "host-late", "webgpu")
@pytest.mark.parametrize("kind", DRIVERS)
def test_every_driver_computes_what_numpy_computes(kind: str) -> None:
    device = Device.over(DRIVERS[kind]())
    findings = list(check(device))
    device.close()
    assert len(findings) == len({finding.what for finding in findings}) >= 8
    assert [(finding.what, finding.problem) for finding in findings if finding.problem] == []


def test_a_device_that_lies_is_found_out_and_one_that_refuses_is_told_with_its_words() -> None:
    lies = {finding.what: finding.problem for finding in check(Device.over(Liar(shared_memory=False)))}
    assert "what was uploaded is off by 64:" in lies["copies"]
    assert all(lies.values())
    refusals = [finding.problem for finding in check(Device.over(Refuser()))]
    assert all("DeviceError: no" in problem for problem in refusals), refusals


@pytest.mark.parametrize(
    ("result", "expected", "words"),
    [
        (np.ones(3), np.ones(4), r"x is float64 of shape \(3,\), not float64 of shape \(4,\)"),
        (np.ones(3, np.float32), np.ones(3), "x is float32"),
        (np.array([1, 2, 4]), np.array([1, 2, 3]), r"off by 1: 4 at \(2,\), where 3 is right"),
        (np.array([1.0, np.nan]), np.ones(2), r"off by inf: nan at \(1,\)"),
        (np.array([1.0, 1.2]), np.ones(2), "off by 0.2"),
    ],
)
def test_what_is_off_is_told(result: Any, expected: Any, words: str) -> None:
    with pytest.raises(checking._Wrong, match=words):
        checking._same("x", result, expected, 0.1)
    checking._same("x", expected, expected)


def test_the_command_prints_a_verdict_and_fails_where_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["devices", "host", "--check"])
    assert result.exit_code == 0
    assert "host: NumPy" in result.stdout
    assert "verdict              it computes what NumPy computes" in result.stdout
    assert "opencl" not in result.stdout
    problem = Finding("copies", 0.0, "what was uploaded is off by 1")
    monkeypatch.setattr(checking, "check", lambda device: iter([problem]))
    result = CliRunner().invoke(app, ["devices", "--check"])
    assert result.exit_code == 1
    assert isinstance(result.exception, PenstockError)
    names = [device.name for device in ps.devices()]
    assert str(result.exception).startswith(" and ".join(names))
    assert result.stdout.count("WRONG: what was uploaded is off by 1") == len(names)


def test_a_device_can_be_listed_alone() -> None:
    name = registry.devices()[0].name
    result = CliRunner().invoke(app, ["devices", name], env={"COLUMNS": "200"})
    assert name in result.stdout
    assert "host " not in result.stdout
