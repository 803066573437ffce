"""The test suite on a machine with an NVIDIA GPU, on CUDA and on OpenCL, and a file with the outcome.

    python benchmarks/gpu_suite.py

CI has no GPU, so this is run by hand. Test files run in parallel; the file that needs all of the GPU's
memory runs alone. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import penstock as ps

ROOT = Path(__file__).resolve().parent.parent
ALONE = "test_cuda.py"
# They need a WebGPU adapter, a browser, or programs that are slow on a CPU, and run in CI.
ELSEWHERE = ("test_webgpu.py", "test_wgsl.py", "test_windows.py", "test_report.py", "test_advise.py")
LONG = (
    "test_leaks.py",
    "test_dispatch.py",
    "test_programs.py",
    "test_profile.py",
    "test_own_kernels.py",
    "test_faults.py",
)
PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvmath-python", "pyopencl", "numpy")
DRIVERS = ("cuda", "opencl", "host")
_SECONDS = 3600  # after which a file of tests is given up


def run(path: Path, select: str, folder: Path) -> tuple[list[tuple[str, str]], str]:
    """Every test of a file with its outcome, and pytest's output if a test failed."""
    report = folder / f"{path.stem}.xml"
    command = [sys.executable, "-m", "pytest", str(path), "-o", "addopts=-q", "--tb=short", "--slow"]
    command += ["-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *(["-k", select] if select else [])]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        said, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        said, code = f"{path.name} took longer than {_SECONDS} s", -1
    results = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            outcome = next(
                (kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), ""
            )
            outcome = {"": "passed", "skipped": "skipped"}.get(outcome, "failed")
            results.append((f"{path.name}::{case.get('name')}", outcome))
    if code not in (0, 5) and not any(outcome == "failed" for _, outcome in results):  # 5: nothing selected
        results.append((f"{path.name} (exit code {code})", "failed"))
    return results, said if any(outcome == "failed" for _, outcome in results) else ""


def driver_of(test: str) -> str:
    """The driver in a test's name, or "any"."""
    return next(
        (name for name in DRIVERS if name in test.split("::")[-1]), "cuda" if ALONE in test else "any"
    )


def summary(results: list[tuple[str, str]], seconds: float) -> dict[str, Any]:
    """The counts by driver, and the names of failed tests."""
    counts: dict[str, Counter[str]] = {}
    for test, outcome in results:
        counts.setdefault(driver_of(test), Counter())[outcome] += 1
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return {
        "command": "python benchmarks/gpu_suite.py",
        "commit": os.environ.get("GIT_COMMIT") or asked.stdout.strip() or "unknown",
        "devices": {
            device.name: f"{device.capabilities.description}, {device.capabilities.api}"
            for device in ps.devices()
        },
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "seconds": round(seconds),
        "drivers": {name: dict(result) for name, result in sorted(counts.items())},
        "failed": sorted(test for test, outcome in results if outcome == "failed"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--select", default="", help="as pytest's -k: cuda, opencl")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 12), help="files at a time")
    parser.add_argument("--result", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-suite.json")
    given = parser.parse_args()
    files = [path for path in (ROOT / "tests").glob("test_*.py") if path.name not in (ALONE, *ELSEWHERE)]
    files.sort(key=lambda path: (LONG.index(path.name) if path.name in LONG else len(LONG), path.name))
    start = time.perf_counter()
    results: list[tuple[str, str]] = []
    waiting = [ALONE, *(path.name for path in files)]
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder:

        def tell(path: Path) -> None:
            result, said = run(path, given.select if path.name != ALONE else "", Path(folder))
            with lock:
                print(f"{path.name}: {dict(Counter(outcome for _, outcome in result))}\n{said}", flush=True)
                results.extend(result)
                waiting.remove(path.name)
                # After each file, so that results survive the loss of the machine.
                told = summary(results, time.perf_counter() - start) | {"not run": sorted(waiting)}
                given.result.write_text(json.dumps(told, indent=1) + "\n")

        tell(ROOT / "tests" / ALONE)
        with ThreadPoolExecutor(given.workers) as threads:
            list(threads.map(tell, files))
    print(given.result.read_text())
    return 1 if any(outcome == "failed" for _, outcome in results) else 0


if __name__ == "__main__":
    sys.exit(main())
