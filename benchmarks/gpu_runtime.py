"""The runtime on an NVIDIA GPU: pooled allocation, launches, copies and overlap, next to PyTorch and CuPy.

python benchmarks/gpu_runtime.py [--device cuda] [--save FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import penstock as ps
from measuring import Report, Sides, best_of, installed
from runtime import CUDA_SOURCE, kernels, overlap_line, pool_lines

torch, cupy = installed("torch"), installed("cupy")


def allocation_line(device: ps.Device, report: Report, nbytes: int = 1 << 20) -> None:
    """A buffer that is allocated and dropped."""
    sides: Sides = {"penstock": lambda: device.empty(nbytes)}
    if torch is not None:
        sides["torch"] = lambda: torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    if cupy is not None:
        sides["cupy"] = lambda: cupy.empty(nbytes, dtype=cupy.uint8)
    best = best_of(sides, repeat=2000)
    _against_best(report, "a pooled buffer", best, 1e6, "us")


def launch_line(device: ps.Device, report: Report, count: int = 1000) -> None:
    """A sequence of small kernels until all are done: launched, and replayed as a program."""
    kernel, stream = kernels(device)["axpy"], device.stream
    x, y = device.upload(np.ones(64, np.float32)), device.upload(np.ones(64, np.float32))
    program = stream.bind([(kernel, (1,), (64,), (x, y, 1.0, 64))] * count)

    def launches() -> None:
        for _ in range(count):
            stream.launch(kernel, (1,), (64,), (x, y, 1.0, 64))
        stream.sync()

    def replay() -> None:
        stream.replay(program)
        stream.sync()

    sides: Sides = {"penstock": launches, "replayed": replay}
    if cupy is not None:
        bare = cupy.RawKernel(CUDA_SOURCE, "axpy")
        a, b = cupy.ones(64, cupy.float32), cupy.ones(64, cupy.float32)

        def cupy_launches() -> None:
            for _ in range(count):
                bare((1,), (64,), (a, b, np.float32(1), np.int32(64)))
            cupy.cuda.Device().synchronize()

        sides["cupy"] = cupy_launches
    if torch is not None:
        left, right = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")

        def torch_adds() -> None:
            for _ in range(count):
                left.add_(right)
            torch.cuda.synchronize()

        sides["torch"] = torch_adds
    for call in sides.values():
        call()
    best = best_of(sides, rounds=10)
    replayed = best.pop("replayed")
    _against_best(report, "a launch", best, 1e6 / count, "us")
    report.add("a launch, replayed in a program", replayed * 1e6 / count, "us", "", None, "")


def copy_lines(device: ps.Device, report: Report, nbytes: int = 256 << 20) -> None:
    """Copies from and to the host's pageable memory, and the peers' from pinned and pageable memory."""
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    buffer = device.upload(source)

    def upload() -> None:
        device.upload(source, into=buffer)
        device.sync()

    up: Sides = {"penstock": upload}
    down: Sides = {"penstock": lambda: device.download(buffer).wait()}
    if torch is not None:
        pageable = torch.from_numpy(source)
        pinned = pageable.pin_memory()
        there = pageable.cuda()
        up["torch"] = lambda: (there.copy_(pageable), torch.cuda.synchronize())
        up["torch pinned"] = lambda: (there.copy_(pinned), torch.cuda.synchronize())
        down["torch"] = lambda: there.cpu()
        down["torch pinned"] = lambda: (pinned.copy_(there), torch.cuda.synchronize())
    if cupy is not None:
        array = cupy.asarray(source)
        up["cupy"] = lambda: (array.set(source), cupy.cuda.Device().synchronize())
        down["cupy"] = array.get
    for what, sides in (("upload", up), ("download", down)):
        for call in sides.values():
            call()
        best = best_of(sides, rounds=5)
        detail = ", ".join(f"{name} {nbytes / seconds / 1e9:.1f}" for name, seconds in best.items())
        report.add(f"{what}, 256 MiB", nbytes / best["penstock"] / 1e9, "GB/s", "", None, detail)


def _against_best(report: Report, what: str, best: dict[str, float], factor: float, unit: str) -> None:
    peers = {name: seconds for name, seconds in best.items() if name != "penstock"}
    detail = ", ".join(f"{name} {seconds * factor:.2f} {unit}" for name, seconds in peers.items())
    met = best["penstock"] <= min(peers.values()) if peers else None
    report.add(what, best["penstock"] * factor, unit, "<= peers", met, detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device)
    versions = {
        name: module.__version__ for name, module in (("torch", torch), ("cupy", cupy)) if module is not None
    }
    print(f"{device.name}: {device.capabilities.description}, {device.capabilities.api}; {versions}\n")
    report = Report()
    pool_lines(device, report)
    allocation_line(device, report)
    launch_line(device, report)
    copy_lines(device, report)
    overlap_line(device, report)
    if options.save:
        report.save(options.save, "gpu_runtime", device, versions)


if __name__ == "__main__":
    main()
