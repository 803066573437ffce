"""The runtime against what it is built on: each line runs both sides in turn, and prints their ratio.

    python benchmarks/runtime.py [--device opencl:0] [--save FILE]

Times are the best of several rounds, since other load of the machine only adds to them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl

import penstock as ps
from measuring import Report, Sides, best_of
from penstock.drivers.driver import Driver, Kernel, Memory
from penstock.memory.pool import size_class

SOURCE = """
__kernel void axpy(__global const float *x, __global float *y, float a, int n) {
    for (int i = get_global_id(0); i < n; i += get_global_size(0)) y[i] += a * x[i];
}
__kernel void churn(__global const float *x, __global float *y, int rounds, int n) {
    for (int i = get_global_id(0); i < n; i += get_global_size(0)) {
        float v = x[i];
        for (int round = 0; round < rounds; round++) v = v * 0.999f + 0.001f;
        y[i] = v;
    }
}
"""
CUDA_SOURCE = """
#define COUNT (blockDim.x * gridDim.x)
#define FIRST (blockIdx.x * blockDim.x + threadIdx.x)
extern "C" __global__ void axpy(const float *x, float *y, float a, int n) {
    for (int i = FIRST; i < n; i += COUNT) y[i] += a * x[i];
}
extern "C" __global__ void churn(const float *x, float *y, int rounds, int n) {
    for (int i = FIRST; i < n; i += COUNT) {
        float v = x[i];
        for (int round = 0; round < rounds; round++) v = v * 0.999f + 0.001f;
        y[i] = v;
    }
}
"""
SIGNATURES = {
    "axpy": ("float32*", "float32*", "float32", "int32"),
    "churn": ("float32*", "float32*", "int32", "int32"),
}


def kernels(device: ps.Device) -> dict[str, Kernel]:
    """The two kernels, in the device's language."""
    return device.compile(CUDA_SOURCE if device.capabilities.language == "cuda" else SOURCE, SIGNATURES)


class PlainPool:
    """A simple pool for comparison: a dictionary of lists."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.free: dict[int, list[Memory]] = defaultdict(list)

    def reserve(self, nbytes: int) -> Memory:
        size = size_class(nbytes)
        free = self.free[size]
        return free.pop() if free else self.driver.allocate(size)

    def release(self, memory: Memory) -> None:
        self.free[memory.nbytes].append(memory)


def pool_lines(device: ps.Device, report: Report) -> None:
    driver, pool, plain = device.driver, device.pool, PlainPool(device.driver)
    sizes = [int(n) for n in np.random.default_rng(0).integers(1, 1 << 20, 16)]

    def back_and_forth(of: Any) -> Callable[[], None]:
        return lambda: of.release(of.reserve(4096))

    def working_set(of: Any) -> Callable[[], None]:
        def run() -> None:
            for memory in [of.reserve(size) for size in sizes]:
                of.release(memory)

        return run

    best = best_of(
        {
            "pool": back_and_forth(pool),
            "plain": back_and_forth(plain),
            "raw": lambda: driver.free(driver.allocate(4096)),
        },
        repeat=5000,
    )
    detail = f"{best['pool'] * 1e6:.2f} us against {best['plain'] * 1e6:.2f} us"
    ratio = best["pool"] / best["plain"]
    report.add("reserve+release / dictionary of lists", ratio, "x", "<= 1.5", ratio <= 1.5, detail)
    microseconds = best["pool"] * 1e6
    report.add("reserve+release", microseconds, "us", "< 1", microseconds < 1, "")
    ratio = best["raw"] / best["pool"]
    detail = f"raw {best['raw'] * 1e6:.2f} us"
    report.add("raw allocation / reserve+release", ratio, "x", "", None, detail)

    best = best_of({"pool": working_set(pool), "plain": working_set(plain)}, repeat=500)
    ratio = best["pool"] / best["plain"]
    detail = f"16 sizes up to 1 MiB, each {best['pool'] / 16 * 1e6:.2f} us"
    report.add("the same, a working set / dictionary of lists", ratio, "x", "", None, detail)
    for blocks in plain.free.values():
        for memory in blocks:
            driver.free(memory)


def launch_lines(device: ps.Device, native: cl.Device, report: Report, count: int = 1000) -> None:
    context = cl.Context([native])
    queue = cl.CommandQueue(context)
    buffers = [cl.Buffer(context, cl.mem_flags.READ_WRITE, 256) for _ in range(2)]
    bare = cl.Kernel(cl.Program(context, SOURCE).build(), "axpy")
    bare.set_scalar_arg_dtypes([None, None, np.float32, np.int32])
    bare.set_args(*buffers, 1.0, 64)
    enqueue: Any = cl.enqueue_nd_range_kernel

    stream = device.stream
    kernel = kernels(device)["axpy"]
    x, y = device.upload(np.ones(64, np.float32)), device.upload(np.ones(64, np.float32))
    args = (x, y, 1.0, 64)
    program = stream.bind([(kernel, (1,), (64,), args)] * 100)

    def bare_enqueues() -> None:
        for _ in range(count):
            enqueue(queue, bare, (64,), (64,))
        queue.finish()

    def replays() -> None:
        for _ in range(count // 100):
            stream.replay(program)
        stream.sync()

    def bare_calls() -> None:
        for _ in range(count):
            bare(queue, (64,), (64,), *buffers, 1.0, 64)
        queue.finish()

    def launches() -> None:
        for _ in range(count):
            stream.launch(kernel, (1,), (64,), args)
        stream.sync()

    sides: Sides = {
        "enqueue": bare_enqueues, "replay": replays, "call": bare_calls, "launch": launches
    }  # fmt: skip
    best = best_of(sides, rounds=30)
    for ours, theirs, what in (
        ("replay", "enqueue", "a bound launch / bare enqueue, arguments set"),
        ("launch", "call", "a launch / bare PyOpenCL kernel call"),
    ):
        ratio = best[ours] / best[theirs]
        detail = (
            f"{best[ours] / count * 1e6:.2f} us against {best[theirs] / count * 1e6:.2f} us, until all ran"
        )
        report.add(what, ratio, "x", "<= 1.25", ratio <= 1.25, detail)


def copy_lines(device: ps.Device, report: Report, nbytes: int = 64 << 20) -> None:
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    target = np.empty_like(source)
    buffer = device.upload(source)

    def upload() -> None:
        device.upload(source, into=buffer)
        device.sync()

    def memcpy() -> None:
        np.copyto(target, source)

    def copy_into_new() -> npt.NDArray[np.uint8]:
        return source.copy()

    sides: Sides = {
        "upload": upload,
        "memcpy": memcpy,
        "download": lambda: device.download(buffer).wait(),
        "memcpy into new memory": copy_into_new,
    }
    best = best_of(sides)
    for ours, theirs in (("upload", "memcpy"), ("download", "memcpy into new memory")):
        ratio = best[theirs] / best[ours]
        detail = f"64 MiB, {nbytes / best[ours] / 1e9:.1f} GB/s against {nbytes / best[theirs] / 1e9:.1f}"
        report.add(f"{ours} / {theirs}, speed", ratio, "x", ">= 0.95", ratio >= 0.95, detail)


def overlap_line(device: ps.Device, report: Report, nbytes: int = 16 << 20, steps: int = 40) -> None:
    """A loop that uploads a batch, computes on it, and downloads the result, with two sets of buffers."""
    kernel = kernels(device)["churn"]
    batch = np.ones(nbytes // 4, np.float32)
    xs = [device.upload(batch) for _ in range(2)]
    ys = [device.upload(batch) for _ in range(2)]
    units = device.capabilities.compute_units
    if device.capabilities.kind == "cpu":  # copies use the CPU too: leave a core for them
        grid, group = (max(units - 1, 1),), (1,)
    else:
        grid, group = (8 * units,), (256,)

    def loop(rounds: int, copies: bool) -> None:
        future = None
        for step in range(steps):
            x, y = xs[step % 2], ys[step % 2]
            if copies:
                device.upload(batch, into=x)
            if rounds:
                device.stream.launch(kernel, grid, group, (x, y, rounds, batch.size))
                device.stream.commit()
            if future is not None:
                future.wait()
            if copies:
                future = device.download(y, np.float32)
        device.sync()

    copies = best_of({"copies": lambda: loop(0, True)}, rounds=3)["copies"]
    rounds = 1
    while best_of({"compute": partial(loop, rounds, False)}, rounds=3)["compute"] < 2 * copies:
        rounds *= 2
    best = best_of(
        {
            "copies": lambda: loop(0, True),
            "compute": lambda: loop(rounds, False),
            "both": lambda: loop(rounds, True),
        },
        rounds=7,
    )
    hidden = 100 * (best["copies"] + best["compute"] - best["both"]) / best["copies"]
    detail = ", ".join(f"{name} {seconds / steps * 1e3:.1f} ms" for name, seconds in best.items()) + " a step"
    report.add("transfer time hidden behind compute", hidden, "%", "> 90", hidden > 90, detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device)
    index = int(device.name.partition(":")[2])
    from penstock.drivers.opencl import find_devices

    print(f"{device.name}: {device.capabilities.description}, {device.capabilities.api}\n")
    report = Report()
    pool_lines(device, report)
    launch_lines(device, find_devices()[index], report)
    copy_lines(device, report)
    overlap_line(device, report)
    if options.save:
        report.save(options.save, "runtime", device, {"pyopencl": cl.VERSION_TEXT})


if __name__ == "__main__":
    main()
