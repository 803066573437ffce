"""Short runs of the fuzzers, and checks that they find injected errors; `python tests/fuzz` runs longer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, WEBGPU_KINDS
from fuzz import state, values
from fuzz.reference import EXACT, FUNCTIONS, Reference
from fuzz.running import Fuzzer, fuzz

import penstock as ps
from penstock import Device
from penstock.config import Settings
from penstock.graph import elementwise
from penstock.registry import find
from penstock.tensor import arithmetic

KINDS = ["host", "opencl-svm" if "opencl-svm" in DRIVERS else "opencl-device", *WEBGPU_KINDS]
PROGRAMS = {"host": 40}  # a device that compiles takes about a second for one
FEW = 2


@pytest.fixture(params=KINDS)
def forced(request: pytest.FixtureRequest) -> Iterator[tuple[Device, int]]:
    """A device that computes everything by kernels, and how many programs it is given."""
    made = Device.over(DRIVERS[request.param](), Settings(force_kernels=True, compile_ahead=False))
    yield made, PROGRAMS.get(request.param, FEW)
    made.close()


@pytest.fixture(params=["host-late", *KINDS[1:]])
def plain(request: pytest.FixtureRequest) -> Iterator[tuple[Device, int]]:
    made = Device.over(DRIVERS[request.param](), SMALL)
    yield made, {"host-late": 30}.get(request.param, FEW)
    made.close()


def check(fuzzer: Fuzzer, programs: int) -> None:
    count = fuzz(fuzzer, 1, programs=programs)
    assert not count.failures, f"{count}\n{count.failures[0]}"
    assert count.programs == programs
    assert count.refused < count.operations / 4


def test_values(forced: tuple[Device, int]) -> None:
    check(values.ValueFuzzer(forced[0]), forced[1])


def test_state(plain: tuple[Device, int]) -> None:
    check(state.StateFuzzer(plain[0]), plain[1])


def test_the_reference_knows_every_elementwise_function() -> None:
    public = {name for name in elementwise.PRIMITIVES if callable(getattr(ps, name, None))}
    public |= {name for name, value in vars(arithmetic).items() if getattr(ps, name, None) is value}
    known = {*EXACT, *FUNCTIONS, *vars(Reference)}
    drawn = set(" ".join([*values.ONE.values(), *values.TWO.values()]).split()) | {"pow", "where", "clip"}
    drawn |= {"bitwise_left_shift", "bitwise_right_shift"}
    assert public - {"__builtins__", "Tensor", "full"} <= known & drawn


def test_a_wrong_value_is_found_and_the_program_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ps.tanh
    monkeypatch.setattr(ps, "tanh", lambda x: broken(x) * 1.001)
    count = fuzz(values.ValueFuzzer(find("host")), 1, programs=300)
    (failure,) = count.failures
    assert "ps.tanh" in str(failure)
    assert len(failure.lines) <= 5


def test_a_lost_change_is_found_and_the_program_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps.Tensor, "__imul__", lambda self, other: self)
    count = fuzz(state.StateFuzzer(find("host")), 1, programs=300)
    (failure,) = count.failures
    assert "*=" in str(failure)
    assert len(failure.lines) < 10
    assert np.isfinite(failure.seed)
