"""The examples reach the losses that they should, on every driver, and leave nothing behind."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS, one_opencl

import penstock as ps
from penstock import Device

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import classifier
import gpt
import sine
import xor

pytestmark = one_opencl
OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))
IN_FLIGHT_BYTES = 256 << 10  # losses of steps that the device has not finished, a block for each
SLACK_BYTES = 2 << 20  # what the resident size may drift by


@pytest.fixture(params=DRIVERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


def test_xor_on_every_driver(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert xor.main(device) < 1e-4
    assert "0 xor 1 = 1.0" in capsys.readouterr().out


@pytest.mark.slow("host", "host-late", "host-far")
def test_a_sine_on_every_driver(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert sine.main(device) < 1e-3
    assert "beside the sine" in capsys.readouterr().out


def test_pictures_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert classifier.main() < 0.1
    right = float(capsys.readouterr().out.split("%")[0].split()[-1])
    assert right > 95


@pytest.mark.slow
def test_a_gpt_learns_a_rhyme(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpt.main() < 0.6
    written = capsys.readouterr().out.splitlines()[1:]
    assert "\n".join(written).startswith("The rain")
    assert len("\n".join(written)) == 68


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("kind", [OPENCL, *CUDA_KINDS, *WEBGPU_KINDS])
def test_ten_thousand_further_steps_take_no_memory(kind: str) -> None:
    """In a process of its own: what other tests leave to be freed would change the resident size."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert processes.submit(resident_growth, kind).result() < SLACK_BYTES


def resident_growth(kind: str) -> int:
    """How many bytes larger a process is after ten thousand further steps on a device."""
    device = Device.over(DRIVERS[kind]())
    network = xor.Xor(device)
    network.train(2000)
    gc.collect()
    device.cleanup()
    held, resident = device.driver.allocated_bytes, psutil.Process().memory_info().rss
    for _ in range(10):
        assert np.isfinite(network.train(1000))
        staging = device.memory_stats().staging_bytes
        assert device.driver.allocated_bytes - staging < held + IN_FLIGHT_BYTES
    device.cleanup()
    assert device.driver.allocated_bytes == held
    grown = psutil.Process().memory_info().rss - resident
    device.close()
    return grown


@pytest.mark.slow("host-far")
@pytest.mark.parametrize("kind", [OPENCL, "host-far", *CUDA_KINDS, *WEBGPU_KINDS])
def test_twenty_trainings_leave_nothing_alive(kind: str) -> None:
    device = Device.over(DRIVERS[kind]())
    for _ in range(20):
        network = xor.Xor(device)
        assert network.train(20) < 1
        del network
        gc.collect()
        device.cleanup()
        stats = device.memory_stats()
        assert stats.live_bytes == 0
        assert device.driver.allocated_bytes == stats.pooled_bytes == 0
    device.close()


def test_twenty_trainings_on_the_default_device_leave_nothing_alive() -> None:
    device = ps.default_device()
    gc.collect()
    device.cleanup()
    before = device.memory_stats().live_bytes
    for _ in range(20):
        network = xor.Xor()
        network.train(20)
        del network
        gc.collect()
        device.cleanup()
        assert device.memory_stats().live_bytes == before
