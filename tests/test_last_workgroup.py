"""Reductions in parts whose last workgroup reduces the partial results: on PoCL, with what CUDA has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, UnoptimizedDriver
from test_cuda_sources import Imagined
from test_graph import at
from test_schedule import compiled

import penstock as ps
from penstock import Device
from penstock.compiler.launches import arranged, dependencies, launch_parts
from penstock.compiler.schedule import Schedule
from penstock.config import Settings
from penstock.drivers.cuda import compile_text
from penstock.graph import elementwise, reducing
from penstock.graph.node import Node
from penstock.kernels.cache import whole_text
from penstock.kernels.concatenation import Call
from penstock.kernels.dialects.cuda import Cuda
from penstock.kernels.dialects.opencl import OpenCL
from penstock.kernels.last_workgroup import with_last_workgroups
from penstock.kernels.sizes import Sizes

# What CUDA has, for PoCL: each of its threads sees the writes of the others in order.
_LAST = """
#define COUNTERS __global
static inline int COMES_LAST(volatile __global int *counter, int count) {
    int last = atomic_inc(counter) == count - 1;
    if (last) atomic_xchg(counter, 0);
    return last;
}
"""
Reduction = Callable[[ps.Tensor], ps.Tensor]
REDUCTIONS: dict[str, tuple[tuple[int, ...], Reduction]] = {
    "all items": ((512, 192), ps.sum),
    "all items, and more": ((512, 192), lambda x: ps.sqrt(ps.mean(x * x)) + 1.0),
    "the place of the largest": ((512, 192), ps.argmax),
    "the places of the largest of rows": ((3, 30000), lambda x: ps.argmax(x, axis=1)),
    "few columns": ((2048, 32), lambda x: ps.sum(x, axis=0)),
    "an uneven number of columns": ((2048, 100), lambda x: ps.sum(x, axis=0)),
    "many columns": ((256, 1024), lambda x: ps.sum(x, axis=0) * 2.0),
    "columns of two axes": ((16, 128, 32), lambda x: ps.max(x, axis=(0, 1))),
    "few rows": ((4, 65536), lambda x: ps.min(x, axis=1)),
    "rows and columns": ((64, 8, 256), lambda x: ps.sum(x, axis=(0, 2))),
}


class _Counting(UnoptimizedDriver):
    """PoCL with the kernels of a GPU, whose workgroups are of one size, and with counters in its programs."""

    def __init__(self) -> None:
        super().__init__(NATIVE, "counting", None)
        self.capabilities = replace(self.capabilities, vector_width=1, max_group_size=32, compute_units=32)

    @property
    def _options(self) -> list[str]:
        return [*super()._options, "-cl-std=CL2.0"]


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device.over(_Counting(), Settings(force_kernels=True, compile_ahead=False))
    yield made
    made.close()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Has workgroups count each other, or not, in programs that are built from now on."""
    monkeypatch.setattr(OpenCL, "optional_preludes", {**OpenCL.optional_preludes, "COMES_LAST": _LAST})
    return lambda whether: monkeypatch.setattr(OpenCL, "device_atomics", whether)


def launches(device: Device, call: Callable[[], Any]) -> int:
    """How many kernels a call launches."""
    with ps.profile(device=device) as profile:
        call()
        device.sync()
        return sum(kernel.calls for kernel in profile.kernels())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in REDUCTIONS), ("all items", "bfloat16"), ("few columns", "int8")],
)
def test_one_launch_gives_the_bits_of_two(
    counts: Callable[[bool], None], device: Device, name: str, dtype: str
) -> None:
    shape, reduced = REDUCTIONS[name]
    array = (np.random.default_rng(0).standard_normal(shape) * 8).astype(np.dtype(dtype))
    x = ps.asarray(array, device=device)
    counts(False)
    expected = reduced(x).numpy()
    assert launches(device, lambda: reduced(x).realize()) == 2
    other = Device.over(_Counting(), Settings(force_kernels=True, compile_ahead=False))
    counts(True)
    x = ps.asarray(array, device=other)
    for _ in range(4):  # the counters are as they were
        np.testing.assert_array_equal(reduced(x).numpy(), expected)
    assert launches(other, lambda: reduced(x).realize()) == 1
    jitted = ps.jit(lambda *given: [reduced(x) for x in given])
    for _ in range(3):
        for result in [*jitted(x), *jitted(x, ps.asarray(array, device=other))]:
            np.testing.assert_array_equal(result.numpy(), expected)
    other.close()


def test_shapes_that_share_a_kernel_are_counted_by_their_own_sizes(
    counts: Callable[[bool], None], device: Device
) -> None:
    counts(True)
    for rows in (256, 384, 512, 1024, 768, 256):
        array = np.random.default_rng(rows).standard_normal((rows, 256)).astype(np.float32)
        x = ps.asarray(array, device=device)
        for _ in range(2):
            np.testing.assert_allclose(ps.sum(x).item(), array.sum(dtype=np.float64), rtol=1e-4, atol=1e-2)
            expected = array.sum(0, dtype=np.float64)
            np.testing.assert_allclose(ps.sum(x, axis=0).numpy(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_a_gpu_counts_right_in_any_order(kind: str) -> None:
    """Many launches in flight, and in graphs, of which no two of one kernel may overlap."""
    device = Device.over(DRIVERS[kind]())
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((512, 512)).astype(np.float32) for _ in range(6)]
    given = [ps.asarray(array, device=device) for array in arrays]

    def chains(*xs: ps.Tensor) -> list[ps.Tensor]:
        results = []
        for depth, x in enumerate(xs):
            factor = x[0, :1]
            for _ in range(depth):  # so that the sums are no single launch
                factor = ps.max(ps.cos(factor), keepdims=True)
            results += [ps.sum(x * factor), ps.sum(x * factor, axis=0)]
        return results

    for reduced in (ps.sum, ps.max, ps.argmax):
        results = [[reduced(x).realize() for x in given] for _ in range(50)]
        assert len({tuple(result.item() for result in turn) for turn in results}) == 1
    np.testing.assert_allclose(ps.sum(given[0]).item(), arrays[0].sum(dtype=np.float64), rtol=1e-5, atol=1e-2)
    step = ps.jit(chains)
    first = [result.numpy() for result in step(*given)]
    for result, expected in zip(first, chains(*given), strict=True):
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-4, atol=1e-2)
    for _ in range(50):
        for result, before in zip(step(*given), first, strict=True):
            np.testing.assert_array_equal(result.numpy(), before)
    device.close()


# What CUDA gets.

CUDA = replace(Imagined().capabilities, max_group_size=1024)


def calls_of(*wanted: Node) -> tuple[Schedule, list[Call]]:
    """The launches of an imagined CUDA device."""
    schedule, _ = compiled(list(wanted), CUDA)
    (part,) = arranged(launch_parts(schedule, CUDA), schedule, CUDA, (), Sizes())
    assert isinstance(part, list)
    return schedule, [call for call in part if isinstance(call, Call)]


def total(x: Node) -> Node:
    return reducing.sum_(x, (0, 1))


def test_launches_of_one_kernel_do_not_overlap() -> None:
    first, second, third = (at(np.ones((512, 512), np.float32)) for _ in range(3))
    # Each sum waits for the one before, so that no two are in one launch.
    sums = [total(first)]
    for x in (second, third):
        sums.append(total(elementwise.multiply(x, reducing.restore(sums[-1], x, (0, 1)))))
    schedule, calls = calls_of(*sums)
    assert [call.source.name for call in calls][1] == calls[2].source.name
    assert len(calls) == 3
    alone = [replace(call, touched=replace(call.touched, reads=(), writes=())) for call in calls]
    assert dependencies(schedule, alone, {}) == [[], [], [1]]


def test_some_columns_are_not_written_over_what_others_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = at(np.ones((4096, 4096), np.float32))
    for axes, merged in (((0,), 2), ((0, 1), 1)):  # of all items, the last workgroup is the last to read
        monkeypatch.setattr(Cuda, "device_atomics", False)
        schedule, apart = calls_of(reducing.sum_(x, axes))
        assert len(apart) == 2
        monkeypatch.setattr(Cuda, "device_atomics", True)
        (result,), (given,) = schedule.outputs, schedule.inputs
        assert len(with_last_workgroups(apart, dict, CUDA)) == 1
        assert len(with_last_workgroups(apart, partial(dict, {result: [given]}), CUDA)) == merged


def test_nvrtc_takes_them() -> None:
    sources = {}
    for dtype in ("float32", "float16", "int8", "float64"):
        x = at(np.ones((2048, 2048), dtype))
        for reduce in (reducing.sum_, reducing.max_):
            for axes in ((0, 1), (0,)):
                _, calls = calls_of(reduce(x, axes))
                sources.update({call.source.name: call.source for call in calls})
    for dtype in ("float32", "bfloat16"):
        _, (call,) = calls_of(reducing.argmax(at(np.ones((32, 50000), dtype)), 1))
        sources[call.source.name] = call.source
    text = whole_text([*sources.values()], "cuda")
    assert text.count("COUNTERS int") == len(sources) == 18
    assert compile_text(text, "sm_90").startswith(b"\x7fELF")
