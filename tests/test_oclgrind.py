"""Generated kernels in Oclgrind, a simulator that notices reads and writes out of bounds, and races."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = Path("/usr/lib/oclgrind/liboclgrind-rt-icd.so")

# On its own, in the simulator: kernels for a GPU and kernels for a CPU, on shapes that fit nothing.
PROGRAM = """
import sys
from dataclasses import replace
import numpy as np
import penstock as ps
from penstock.drivers.opencl import OpenCLDriver, find_devices
from penstock.runtime import Device
from penstock.nn import functional

(native,) = [device for device in find_devices() if "Oclgrind" in device.platform.name]


class Simulated(OpenCLDriver):
    _options = ["-w", "-DFENCE="]  # it does not know the instruction, and changes no order


driver = Simulated(native, "oclgrind")
can = driver.capabilities
assert can.kind == "gpu" and can.vector_width == 1
driver.capabilities = replace(can, vector_width=int(sys.argv[1]), compute_units=2)
device = Device.over(driver)
draw = np.random.default_rng(0).standard_normal


def on_device(*shape):
    return ps.asarray(draw(shape).astype(np.float32), device=device)


def close(ours, theirs):
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5)


x, y = on_device(7, 37), on_device(37, 5)
w = on_device(7, 37).requires_grad_()
bias = ps.zeros((), device=device).requires_grad_()
optimizer = ps.optim.Adam([w, bias], lr=0.1)
index = ps.asarray(np.array([3, 0, 6, 3]), device=device)


@ps.jit
def several(x, y):
    return ps.sum(x, axis=0), functional.softmax(x), x @ y, ps.cumulative_sum(x, axis=1), ps.argmax(x, axis=1)


@ps.jit
def others(x):
    return ps.sort(x, axis=1), ps.take(x, index, axis=0), ps.max(ps.exp(x)), ps.concat([x, x * 2], axis=1)


@ps.jit
def step(x, index):
    rows = ps.take(w, index, axis=0) * ps.take(x, index, axis=0)
    norm = functional.layer_norm(rows, rows.shape[-1:])
    loss = functional.cross_entropy(norm + bias, index) + ps.mean(w)
    loss.backward()
    optimizer.step()
    return loss


a, b = x.numpy(), y.numpy()
columns, soft, product, scan, places = several(x, y)
close(columns, a.sum(0))
close(soft, np.exp(a) / np.exp(a).sum(1, keepdims=True))
close(product, a @ b)
close(scan, a.cumsum(1))
assert (places.numpy() == a.argmax(1)).all()
in_order, rows, most, joined = others(x)
close(in_order, np.sort(a))
close(rows, a[[3, 0, 6, 3]])
close(most, np.exp(a).max())
close(joined, np.concatenate([a, a * 2], 1))
losses = [step(x, index).item() for _ in range(2)]
assert losses[1] < losses[0]
"""


# Two implementations of OpenCL in one process, used by turns and from two threads.
BOTH = """
from threading import Thread
import numpy as np
import penstock as ps

devices = [device for device in ps.devices() if device.name.startswith("opencl")]
platforms = {device.capabilities.api for device in devices}
assert len(platforms) == len(devices) >= 2, platforms
x = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
functions = [ps.jit(lambda t, n=n: ps.sum(ps.exp(t), axis=1) * n) for n in range(len(devices))]
results = {}


def run(n):
    for _ in range(3):
        results[n] = functions[n](ps.asarray(x, device=devices[n])).numpy()


threads = [Thread(target=run, args=(n,)) for n in range(len(devices))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for n in range(len(devices)):
    run(n)
    np.testing.assert_allclose(results[n], np.exp(x).sum(1) * n, rtol=1e-5)
moved = ps.asarray(x, device=devices[0])
for device in (*devices[1:], devices[0]):
    moved = moved.to_device(device) + 1
np.testing.assert_allclose(moved.numpy(), x + len(devices), rtol=1e-6)
"""


def run_in(tmp_path: Path, program: str, *arguments: str, **settings: str) -> None:
    """Run a program where Oclgrind is one of the OpenCL platforms."""
    if not LIBRARY.exists():
        assert "PENSTOCK_REQUIRE_OCLGRIND" not in os.environ
        pytest.skip("Oclgrind is not installed")
    (tmp_path / "oclgrind.icd").write_text(f"{LIBRARY}\n")
    environment = {
        **os.environ,
        "OCL_ICD_VENDORS": str(tmp_path),
        "OCLGRIND_BUILD_OPTIONS": "-cl-opt-disable",  # its optimizer makes other kernels of some
        **settings,
    }
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow("8", "gpu")
@pytest.mark.parametrize("lanes", [1, 8], ids=["gpu", "cpu"])
def test_kernels_stay_in_their_memory_and_do_not_race(tmp_path: Path, lanes: int) -> None:
    log = tmp_path / "log"
    run_in(tmp_path, PROGRAM, str(lanes), OCLGRIND_LOG=str(log), OCLGRIND_DATA_RACES="1")
    assert not log.exists() or log.read_text() == "", log.read_text()[:3000]


@pytest.mark.slow
def test_platforms_do_not_disturb_each_other(tmp_path: Path) -> None:
    run_in(tmp_path, BOTH)
