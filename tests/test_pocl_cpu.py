"""CPUs that PoCL's compiler does not know, in records like PoCL's own of a device."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pyopencl as cl
import pytest

from penstock.drivers.opencl import find_devices, pocl, pocl_cpu
from penstock.drivers.opencl.driver import OpenCLDriver
from penstock.errors import CompileError

V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"})
V3 = V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="the wheel of PoCL is for Linux")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (frozenset(), "x86-64"),
        (V2, "x86-64-v2"),
        (V3, "x86-64-v3"),
        (V4 | {"avx512_fp16"}, "x86-64-v4"),
        (V4 - {"avx512vl"}, "x86-64-v3"),
        (V4 - {"movbe"}, "x86-64-v2"),  # AVX-512 without a level below it is not a level
    ],
)
def test_a_level_needs_all_its_instructions_and_the_levels_below(flags: frozenset[str], name: str) -> None:
    assert pocl_cpu.level(flags) == name


class Record:
    """A record with the fields that PoCL has one after the other, between others."""

    def __init__(self, cpu: bytes, triple: bytes = b"x86_64-unknown-linux-gnu") -> None:
        self.texts = [ctypes.create_string_buffer(text) for text in (b"pthread", triple, cpu)]
        addresses = [ctypes.addressof(text) for text in self.texts]
        self.fields = (ctypes.c_size_t * 256)(
            0, 7, (1 << 64) - 1, addresses[0], 12345, *addresses[1:], 1 << 46
        )
        version = f"OpenCL 3.0 PoCL HSTR: pthread-{triple.decode()}-{cpu.decode()}"
        self.device: Any = SimpleNamespace(version=version, int_ptr=ctypes.addressof(self.fields))

    def cpu(self) -> bytes:
        return ctypes.string_at(self.fields[6])


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pocl_cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(pocl_cpu, "_given", {})


@linux
def test_an_unknown_cpu_gets_the_name_of_its_level_and_nothing_else_changes() -> None:
    record = Record(b"generic")
    before = list(record.fields)
    pocl_cpu.name_cpu(record.device)
    assert record.cpu().startswith(b"x86-64")
    assert pocl_cpu.given_name(record.device) == record.cpu().decode()
    assert [at for at, field in enumerate(record.fields) if field != before[at]] == [6]


@linux
@pytest.mark.parametrize(
    ("cpu", "flags", "has_avx512"),
    [
        (b"znver3", V3, False),
        (b"znver3", V4 - {"avx512vl"}, False),
        (b"icelake-server", V4, True),
        (b"haswell", V3, False),
    ],
)
def test_a_known_cpu_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch, cpu: bytes, flags: frozenset[str], has_avx512: bool
) -> None:
    monkeypatch.setattr(pocl_cpu, "_flags", lambda: flags)
    record = Record(cpu)
    pocl_cpu.name_cpu(record.device)
    assert (record.cpu(), pocl_cpu.given_name(record.device)) == (cpu, "")
    assert pocl_cpu.has_avx512(record.device) == has_avx512


@linux
@pytest.mark.parametrize(
    ("cpu", "flags", "name"),
    [(b"znver3", V4, b"x86-64-v4"), (b"skylake-avx512", V3, b"x86-64-v3")],  # Zen 4; a virtual machine
)
def test_a_cpu_whose_name_is_wrong_about_avx512_gets_that_of_its_level(
    monkeypatch: pytest.MonkeyPatch, cpu: bytes, flags: frozenset[str], name: bytes
) -> None:
    monkeypatch.setattr(pocl_cpu, "_flags", lambda: flags)
    record = Record(cpu)
    assert not pocl_cpu.has_avx512(record.device)  # as long as one of both says no
    pocl_cpu.name_cpu(record.device)
    assert record.cpu() == name
    assert pocl_cpu.has_avx512(record.device) == (flags == V4)


def test_compilers_other_than_pocls_know_what_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pocl_cpu, "_flags", lambda: V4)
    other: Any = SimpleNamespace(version="OpenCL 3.0 LINUX", int_ptr=1)
    assert pocl_cpu.has_avx512(other)


@linux
def test_a_record_that_is_not_as_expected_is_not_written() -> None:
    record = Record(b"generic")
    record.fields[5] = 0  # nothing before the name says that it is one
    before = list(record.fields)
    pocl_cpu.name_cpu(record.device)
    assert (list(record.fields), pocl_cpu.given_name(record.device)) == (before, "")


def test_other_architectures_have_a_generic_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pocl_cpu.platform, "machine", lambda: "aarch64")
    record = Record(b"generic", b"aarch64-unknown-linux-gnu")
    pocl_cpu.name_cpu(record.device)
    assert (record.cpu(), pocl_cpu.given_name(record.device)) == (b"generic", "")


def test_a_refusal_because_of_the_cpu_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    native = next((each for each in find_devices() if each.platform.name == pocl.PLATFORM), None)
    if native is None:
        pytest.skip("there is no PoCL on this machine")
    driver = OpenCLDriver(native, "opencl:0")

    def refuse(*args: Any, **options: Any) -> None:
        raise cl.RuntimeError("clBuildProgram failed\n\nerror: unknown target CPU 'generic'")

    monkeypatch.setattr(driver, "_build", refuse)
    with pytest.raises(CompileError, match="older than this CPU"):
        driver.compile("__kernel void nothing() {}", {"nothing": ()})
    driver.close()
