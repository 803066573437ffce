"""Teams: calls of layers that share a launch on a CPU, with the bits of separate launches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import NATIVE

import penstock as ps
from penstock import Device
from penstock.compiler import launches as launching
from penstock.drivers.driver import Capabilities, Cost
from penstock.drivers.opencl import OpenCLDriver, opencl_capabilities
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.concatenation import Call
from penstock.kernels.dialects.opencl import OpenCL
from penstock.kernels.hazards import Touched
from penstock.kernels.source import KernelSource
from penstock.kernels.teams import in_teams

CAPABILITIES = opencl_capabilities(NATIVE)

pytestmark = pytest.mark.skipif(not CAPABILITIES.kernel_counters, reason="kernels have no counters")


def source(name: str) -> KernelSource:
    k = KernelBuilder(name, CAPABILITIES, ["float32"], ["float32"])
    return k.source((3,), (1,))


def call(name: str, slot: int, work: int = 1 << 20, scalars: tuple[int, ...] = ()) -> Call:
    made = replace(source(name), sizes=len(scalars))
    return Call(made, ((0, slot), (slot, 0)), scalars, (), work, Touched(), cost=Cost(work, 0, 0, ""))


def calls(names: str, work: int = 1 << 20) -> list[Call]:
    return [call(name, 1 + at, work) for at, name in enumerate(names)]


def names_of(given: list[Call], capabilities: Capabilities = CAPABILITIES) -> str:
    """The names of kernels after merging, of teams a T."""
    return "".join(
        "T" if each.source.name.startswith("team_") else each.source.name
        for each in in_teams(given, capabilities)
    )


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        ("abcabcabcabc", "T"),
        ("xabcabcabcabcaby", "xTaby"),  # a turn that is not whole
        ("abcdabcdabcd", "abcdabcdabcd"),  # three turns
        ("aaaaaaaaaaa", "aaaaaaaaaaa"),  # few calls
        ("aabaabaabaabz", "Tz"),
        (12 * "a" + "z" + 6 * "bc", "TzT"),
        ("abcdefghijklmn", "abcdefghijklmn"),
        ("", ""),
    ],
)
def test_calls_that_come_in_turns_are_merged(names: str, merged: str) -> None:
    assert names_of(calls(names)) == merged


def test_what_is_not_merged() -> None:
    names = 6 * "ab"
    assert names_of(calls(names)) == "T"
    assert names_of(calls(names, work=1 << 26)) == names  # each takes long
    assert names_of(calls(names, work=10)) == names  # a thread alone makes them
    assert names_of([call(name, at, scalars=(1,)) for at, name in enumerate(names)]) == names  # for all sizes
    assert names_of([call("a", at, scalars=(at,)) for at in range(12)]) == 12 * "a"  # unlike each other
    assert names_of(calls(names), replace(CAPABILITIES, kernel_counters=False)) == names


def test_a_team_takes_the_buffers_of_all() -> None:
    (team,) = in_teams(calls(6 * "ab"), CAPABILITIES)
    assert team.locations == tuple((slot, 0) for slot in range(13))
    assert team.source.grid == (CAPABILITIES.compute_units,)
    assert team.source.text.count("PIECE void") == 2


def layers(count: int, width: int, device: Device, dtype: str = "float32") -> Any:
    """A network of layers that are alike, of a few rows."""
    rng = np.random.default_rng(0)
    drawn = (rng.normal(size=(2 * count, width, width)) / 16).astype(dtype)
    weights = [ps.asarray(weight, device=device) for weight in drawn]

    def network(x: ps.Tensor) -> ps.Tensor:
        for first, second in zip(weights[::2], weights[1::2], strict=True):
            y = x / ps.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
            x = x + ps.tanh(y @ first) @ second
        return x

    return network


@pytest.fixture(params=["as it is", "many workgroups", "nobody waits"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    driver = OpenCLDriver(NATIVE, "team")
    if request.param == "many workgroups":  # more than threads, so some begin when all is done
        driver.capabilities = replace(driver.capabilities, compute_units=7)
    if request.param == "nobody waits":  # and all but one end early
        prelude = OpenCL.optional_preludes["COUNTERS"]
        assert prelude.count("1 << 15") == 1
        changed = {**OpenCL.optional_preludes, "COUNTERS": prelude.replace("1 << 15", "1")}
        monkeypatch.setattr(OpenCL, "optional_preludes", changed)
    made = Device.over(driver)
    yield made
    made.close()


def test_devices_compute_at_the_same_time() -> None:
    """The same program: the counters of each device are its own."""
    devices = [Device.over(OpenCLDriver(NATIVE, f"team {number}")) for number in range(2)]
    networks = [ps.jit(layers(6, 256, device)) for device in devices]
    given = [ps.asarray(np.ones((2, 256), np.float32), device=device) for device in devices]
    expected = networks[0](given[0]).numpy()

    def results(at: int) -> list[Any]:
        return [result.numpy() for result in [networks[at](given[at]) for _ in range(500)]]

    with ThreadPoolExecutor(2) as threads:
        for computed in threads.map(results, range(2)):
            for result in computed:
                np.testing.assert_array_equal(result, expected)
    for device in devices:
        device.close()


def teams_of(jitted: Any) -> int:
    """The launches of a jitted function that are teams."""
    ((captured,),) = jitted._captured.values()
    (segment,) = captured.program._current
    return sum(call.source.name.startswith("team_") for call in segment._calls)


# Rows of 250 have items after their vectors, which float16 has functions of OpenCL for.
@pytest.mark.parametrize(("dtype", "width"), [("float32", 256), ("float16", 250)])
def test_layers_have_the_bits_of_separate_calls(
    dtype: str, width: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, rng = layers(6, width, device, dtype), np.random.default_rng(1)
    given = [ps.asarray(rows, device=device) for rows in rng.normal(size=(4, 2, width)).astype(dtype)]
    together = ps.jit(network)
    results = [together(x).numpy() for _ in range(25) for x in given]
    assert teams_of(together) == 1
    monkeypatch.setattr(launching, "in_teams", lambda given, _: given)
    separate = ps.jit(lambda x: network(x))
    expected = [separate(x).numpy() for x in given]
    assert teams_of(separate) == 0
    for at, result in enumerate(results):
        np.testing.assert_array_equal(result, expected[at % 4])
