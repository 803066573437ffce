"""The WebGPU driver against a bare loop of wgpu-py, and what a training step costs in Python.

    python benchmarks/webgpu.py [--device webgpu:0] [--save FILE]

Both sides run in turn, and times are the best of several rounds: other load only adds to them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import wgpu
from wgpu.backends.wgpu_native.extras import set_instance_extras

import penstock as ps
from measuring import Report, best_of
from train import NANO, gpt_step

ITEMS = 256
GROUP = 64
SOURCE = """
kernel step(x: array<f32>, y: array<f32>, c: f32, n: i32) {
    let i = GROUP_0 * THREADS + THREAD;
    if (i < n) { y[i] = x[i] + c; }
}
"""
SIGNATURE = ("float32*", "float32*", "float32", "int32")
BARE = f"""
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@compute @workgroup_size({GROUP}) fn main(@builtin(global_invocation_id) at: vec3<u32>) {{
    if (at.x < {ITEMS}u) {{ y[at.x] = x[at.x] + 1.0; }}
}}
"""


class Bare:
    """A loop of dispatches in plain wgpu-py, each depending on the previous."""

    def __init__(self, adapter: Any, count: int) -> None:
        self._count = count
        self._device = adapter.request_device_sync()
        module = self._device.create_shader_module(code=BARE)
        stage, storage = wgpu.ShaderStage.COMPUTE, {"type": wgpu.BufferBindingType.storage}
        entries = [{"binding": number, "visibility": stage, "buffer": storage} for number in range(2)]
        self._layout = self._device.create_bind_group_layout(entries=entries)
        layout = self._device.create_pipeline_layout(bind_group_layouts=[self._layout])
        self._pipeline = self._device.create_compute_pipeline(layout=layout, compute={"module": module})
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
        self._buffers = [self._device.create_buffer(size=4 * ITEMS, usage=usage) for _ in range(2)]
        self._prepared = [self._group(0), self._group(1)]

    def _group(self, first: int) -> Any:
        sides = (self._buffers[first], self._buffers[1 - first])
        entries = [{"binding": number, "resource": {"buffer": buffer}} for number, buffer in enumerate(sides)]
        return self._device.create_bind_group(layout=self._layout, entries=entries)

    def prepared(self) -> None:
        """With two bind groups, made before."""
        self._run(self._prepared.__getitem__)

    def new(self) -> None:
        """With a new bind group for every dispatch."""
        self._run(self._group)

    def _run(self, group: Callable[[int], Any]) -> None:
        encoder = self._device.create_command_encoder()
        compute_pass = encoder.begin_compute_pass()
        compute_pass.set_pipeline(self._pipeline)
        for number in range(self._count):
            compute_pass.set_bind_group(0, group(number % 2))
            compute_pass.dispatch_workgroups(ITEMS // GROUP)
        compute_pass.end()
        self._device.queue.submit([encoder.finish()])
        self._device._poll_wait()  # its public way to wait for a queue raises in wgpu-py 0.32

    def steps(self) -> float:
        """How many steps all of it took."""
        (value, *_) = np.frombuffer(
            self._device.queue.read_buffer(self._buffers[self._count % 2]), np.float32
        )
        return float(value)


def dispatch_lines(device: ps.Device, report: Report, count: int = 1000) -> None:
    adapter = next(
        adapter for adapter in _adapters() if adapter.info["device"] == device.capabilities.description
    )
    bare = Bare(adapter, count)
    kernel = device.compile(SOURCE, {"step": SIGNATURE})["step"]
    x, y = (device.upload(np.zeros(ITEMS, np.float32)) for _ in range(2))
    grid, group = (ITEMS // GROUP,), (GROUP,)
    launches = [
        (kernel, grid, group, (*((x, y) if n % 2 == 0 else (y, x)), 1.0, ITEMS)) for n in range(count)
    ]
    stream = device.stream
    program = stream.bind(launches)

    def replay() -> None:
        stream.replay(program)
        stream.sync()

    def launch() -> None:
        for item in launches:
            stream.launch(*item)
        stream.sync()

    replay()
    bare.prepared()
    assert device.download(x, np.float32).wait()[0] == bare.steps() == count, "both sides do the same"
    best = best_of({"replay": replay, "prepared": bare.prepared, "launch": launch, "new": bare.new})
    for ours, theirs, goal, what in (
        ("replay", "prepared", 1.1, "a bound dispatch / wgpu-py, bind groups prepared"),
        ("launch", "new", None, "a launch / wgpu-py, a new bind group each"),
    ):
        ratio = best[ours] / best[theirs]
        each = f"{best[ours] / count * 1e6:.2f} us against {best[theirs] / count * 1e6:.2f} us, until all ran"
        met = None if goal is None else ratio <= goal
        report.add(what, ratio, "x", f"<= {goal}" if goal else "", met, each)

    driver = device.driver
    seconds = float("inf")
    for _ in range(15):
        events: list[Any] = []
        start = time.perf_counter()
        driver.replay(driver.compute, program.bound, None, events)
        seconds = min(seconds, time.perf_counter() - start)
        driver.flush(driver.compute)
        driver.wait(events[-1])
    report.add("a bound dispatch, recorded alone", seconds / count * 1e6, "us", "", None, "")


def _adapters() -> list[Any]:
    """The adapters as wgpu-py has them, but for those of OpenGL."""
    os.environ["NODEVICE_SELECT"] = "1"  # lets Mesa look for no display
    set_instance_extras(backends=["Vulkan", "Metal", "DX12"])
    result: list[Any] = wgpu.gpu.enumerate_adapters_sync()
    return result


def training_line(device: ps.Device, report: Report, rounds: int = 5) -> None:
    """Time of the thread that runs Python, in its own code and in wgpu's, as a share of whole steps."""
    tokens = np.random.default_rng(0).integers(0, NANO.vocab, (NANO.batch, NANO.context + 1))
    step = gpt_step(NANO, tokens, device)
    for _ in range(3):
        step()
    device.sync()
    times = []
    for _ in range(rounds):
        start, busy = time.perf_counter(), time.thread_time()
        step()
        device.sync()
        times.append((time.perf_counter() - start, time.thread_time() - busy))
    whole, used = (min(side) for side in zip(*times, strict=True))
    share = 100 * used / whole
    detail = f"{used * 1e3:.2f} ms of {whole * 1e3:.1f} ms"
    report.add("GPT nano: Python's share of a training step", share, "%", "< 20", share < 20, detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="webgpu")
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device)
    print(f"{device.name}: {device.capabilities.description}, {device.capabilities.api}\n")
    report = Report()
    dispatch_lines(device, report)
    training_line(device, report)
    if options.save:
        report.save(options.save, "webgpu", device, {"wgpu": wgpu.__version__})


if __name__ == "__main__":
    main()
