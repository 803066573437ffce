"""Compiled programs of OpenCL platforms other than PoCL on disk, and new expressions, which wait for none.

PoCL stands for such a platform, under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import NATIVE, opencl_threads, until

import penstock as ps
from penstock import Device, nn
from penstock.config import Settings
from penstock.drivers.opencl import pocl
from penstock.drivers.opencl.driver import OpenCLDriver
from penstock.drivers.opencl.programs import ProgramCache
from penstock.execution import ahead
from penstock.execution.executable import Executable
from penstock.execution.realize import executables
from penstock.execution.structure import Structure
from penstock.kernels.source import KernelSource

SOURCE = "__kernel void twice(__global float *x) { x[get_global_id(0)] *= 2; }"
SIGNATURES = {"twice": ("float32*",)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a platform that is not known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pocl, "PLATFORM", "another")
    return tmp_path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each binary from disk was accepted."""
    accepted: list[bool] = []
    load = OpenCLDriver._loaded

    def noted(self: OpenCLDriver, device: Any, binary: bytes) -> Any:
        program = load(self, device, binary)
        accepted.append(program is not None)
        return program

    monkeypatch.setattr(OpenCLDriver, "_loaded", noted)
    return accepted


def twice(driver: OpenCLDriver) -> np.ndarray:
    """What the kernel of SOURCE makes of 1, 2, 3, 4."""
    device = Device.over(driver, Settings(compile_ahead=False))
    kernel = device.compile(SOURCE, SIGNATURES)["twice"]
    x = device.upload(np.arange(1, 5, dtype=np.float32))
    device.stream.launch(kernel, (4,), (1,), (x,))
    result = device.download(x, np.float32).wait()
    del x
    device.close()
    return result


def test_a_program_is_loaded_by_the_next_driver(loaded: list[bool], folder: Path) -> None:
    expected = [2, 4, 6, 8]
    first = OpenCLDriver(NATIVE, "first")
    assert type(first._cache) is ProgramCache
    assert not first.has_compiled(SOURCE)
    np.testing.assert_array_equal(twice(first), expected)
    second = OpenCLDriver(NATIVE, "second")
    assert second.has_compiled(SOURCE)
    np.testing.assert_array_equal(twice(second), expected)
    assert loaded == [True]
    assert len([*folder.rglob("*.bin")]) == 1


def test_a_binary_that_is_refused_is_compiled_again(loaded: list[bool]) -> None:
    driver = OpenCLDriver(NATIVE, "first")
    description = driver._description(SOURCE, NATIVE)
    assert driver._cache is not None
    driver._cache._binaries.put(description, b"of another version of the compiler")
    np.testing.assert_array_equal(twice(driver), [2, 4, 6, 8])
    np.testing.assert_array_equal(twice(OpenCLDriver(NATIVE, "second")), [2, 4, 6, 8])
    assert loaded == [False, True]


def test_other_options_are_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    twice(OpenCLDriver(NATIVE, "first"))
    options = OpenCLDriver._options.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(OpenCLDriver, "_options", property(lambda self: [*options(self), "-DOTHER"]))
    assert not OpenCLDriver(NATIVE, "second").has_compiled(SOURCE)


# The bridge on a GPU of such a platform


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(ahead.Ahead, "_is_done", lambda self: True)  # only the wanted kernels are compiled
    device = Device.over(opencl_threads(), Settings(compile_ahead=True))
    yield device
    device.close()


def expression(x: ps.Tensor) -> ps.Tensor:
    return nn.functional.softmax(ps.exp(x) * 0.7 - x, axis=1)


def test_a_new_expression_waits_for_no_compiler(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    own = executables(gpu)
    x = ps.asarray(np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32), device=gpu)
    own.kernels.compile_ahead(own._missing(own._separate(Structure([expression(x)._node], gpu.capabilities))))
    late: list[str] = []
    compile: Callable[..., Any] = own.kernels._compile

    def noted(part: list[KernelSource]) -> Any:
        late.extend(source.name for source in own.kernels.missing(part))
        return compile(part)

    monkeypatch.setattr(own.kernels, "_compile", noted)
    results = {expression(x).numpy().tobytes()}
    (bridge,) = own._bridges.values()
    assert isinstance(bridge.program, Executable)

    def has_program() -> bool:
        results.add(expression(x).numpy().tobytes())
        return len(own._programs) == 1

    until(has_program)
    assert not late
    assert len(results) == 1


def test_kernels_of_threads_contract_nothing_by_themselves() -> None:
    device = Device.over(opencl_threads(), Settings(compile_ahead=False))
    own, a = executables(device), np.random.default_rng(0).standard_normal((3, 2000)).astype(np.float32)
    x, y = (ps.asarray(part, device=device) for part in a[:2])
    z = ps.asarray(-(a[0] * a[1]), device=device)
    np.testing.assert_array_equal((x * y + z).numpy(), 0)
    sources = own.build(Structure([(x * y + z)._node], device.capabilities)).schedule
    (step,) = sources.groups
    assert own.kernels._text([step.calls[0].source]).startswith("#pragma OPENCL FP_CONTRACT OFF")
    device.close()
