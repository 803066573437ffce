"""A name for a CPU that PoCL's compiler does not know.

PoCL compiles for the CPU that LLVM names, and LLVM misnames some. It calls Zen 5, which is younger,
"generic", and Clang refuses every kernel then: "unknown target CPU 'generic'". It calls Zen 4 "znver3", a CPU
without AVX-512, while PoCL chooses its own functions by what the CPU has, and LLVM ends the process when it
meets those for AVX-512: "Cannot select". And it calls CPUs of Intel by names that promise AVX-512 where a
virtual machine hides it. PoCL has no setting for the name. So it is replaced in PoCL's own record of the
device, by that of the level of the x86-64 architecture that the CPU has.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import pyopencl as cl

REFUSED = "unknown target CPU"  # in Clang's words
HINT = "\nPoCL's compiler is older than this CPU; a newer PoCL may know it"
_UNKNOWN = "generic"
_LEVEL_OF_AVX512 = "x86-64-v4"
_WITH_AVX512 = (  # names of CPUs
    "cannonlake cascadelake cooperlake emeraldrapids graniterapids graniterapids-d icelake-client "
    "icelake-server rocketlake sapphirerapids skylake-avx512 tigerlake x86-64-v4 znver4 znver5"
)
# The levels that Clang knows as CPUs, with what Linux calls their instructions.
_LEVELS = (
    (_LEVEL_OF_AVX512, "avx512f avx512bw avx512cd avx512dq avx512vl"),
    ("x86-64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"),
    ("x86-64-v2", "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2"),
    ("x86-64", ""),
)
_NAME = re.compile(r" PoCL .*-x86_64-\w+-\w+-\w+-(\S+)$")  # the triple of the target, and the name
_RECORD_BYTES = 1024  # of a device's record, in which the name is looked for
_POINTER = ctypes.sizeof(ctypes.c_void_p)

_given: dict[int, str] = {}  # names by the addresses of the devices' records


def name_cpu(device: cl.Device) -> None:
    """Give a device of PoCL whose CPU LLVM does not know a name, before anything is compiled for it.

    Nothing is changed if the record of the device is not as expected.
    """
    if platform.machine() != "x86_64" or device.int_ptr in _given:  # elsewhere, Clang knows a generic CPU
        return
    with suppress(OSError, AttributeError):
        name, reached = _named(device), level(_flags())
        if name == _UNKNOWN or (name in _WITH_AVX512.split()) != (reached == _LEVEL_OF_AVX512):
            _write_name(device.int_ptr, name, reached)


def given_name(device: cl.Device) -> str:
    """The name that a device's CPU was given; empty if it has PoCL's."""
    return _given.get(device.int_ptr, "")


def level(flags: frozenset[str]) -> str:
    """The highest level of the x86-64 architecture that a CPU has, which includes all levels below."""
    reached = "x86-64"
    for name, needed in reversed(_LEVELS):
        if not flags.issuperset(needed.split()):
            break
        reached = name
    return reached


def has_avx512(device: cl.Device) -> bool:
    """Whether a CPU has vector registers of 512 bits, and its compiler knows."""
    compiled_for = given_name(device) or _named(device)
    with suppress(OSError):
        return compiled_for in ["", *_WITH_AVX512.split()] and level(_flags()) == _LEVEL_OF_AVX512
    return False


def _named(device: cl.Device) -> str:
    """What LLVM calls a CPU, with which PoCL's text about a device ends; empty on other platforms."""
    name = _NAME.search(device.version)
    return name[1] if name else ""


def _flags() -> frozenset[str]:
    """The instructions that Linux says the CPU has."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(found, "").split())


def _write_name(record: int, old: str, name: str) -> None:
    copy = ctypes.CDLL(None).strdup  # PoCL may free it
    copy.argtypes, copy.restype = [ctypes.c_char_p], ctypes.c_void_p
    with open("/proc/self/mem", "rb", 0) as memory:  # which refuses addresses that are not mapped
        fields = list(_text_fields(memory, record))
    for (_, triple), (address, cpu) in pairwise(fields):
        # The fields are called llvm_target_triplet and llvm_cpu.
        if cpu == old.encode() and triple.startswith(b"x86_64-"):
            ctypes.c_void_p.from_address(address).value = copy(name.encode())
            _given[record] = name
            return


def _text_fields(memory: BinaryIO, record: int) -> Iterator[tuple[int, bytes]]:
    """The addresses of the pointers in a record, with the beginning of what each points to."""
    memory.seek(record)
    content = memory.read(_RECORD_BYTES)
    for offset in range(0, len(content) - _POINTER + 1, _POINTER):
        text = b""
        with suppress(OSError, OverflowError, ValueError):  # not a pointer
            memory.seek(int.from_bytes(content[offset : offset + _POINTER], "little"))
            text = memory.read(32).partition(b"\0")[0]
        yield record + offset, text
