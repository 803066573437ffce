"""Copies through views by one kernel for all shapes, which computes new expressions on every driver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import DRIVERS, WEBGPU_KINDS, examples, opencl_threads
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import Device
from penstock.config import Settings
from penstock.execution.executable import Executable
from penstock.execution.realize import executables
from penstock.execution.sources import kernel_sources
from penstock.execution.structure import Structure

OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))
DTYPES = (np.float32, np.float16, np.int64, np.int8, np.bool_)


@pytest.fixture(scope="module", params=[OPENCL, "opencl-threads", *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    driver = opencl_threads() if request.param == "opencl-threads" else DRIVERS[request.param]()
    made = Device.over(driver, Settings(compile_ahead=False))
    yield made
    made.close()


def alone(device: Device, tensor: ps.Tensor) -> tuple[np.ndarray, set[str]]:
    """The value by the kernels of single operations, and the names of those that copy."""
    structure, own = Structure([tensor._node], device.capabilities), executables(device)
    schedule = own._separate(structure)
    program = Executable(schedule, device, own.kernels)
    (buffer,) = program.run([node.value for node in structure.inputs], structure.constants())
    value = device.download(buffer, tensor.dtype, tensor.shape).wait()
    names = {source.name for source in kernel_sources(schedule, device, own.kernels)}
    return value, {name for name in names if name.startswith("copy_")}


@st.composite
def views(draw: st.DrawFn) -> tuple[np.dtype, tuple[int, ...], list[tuple[str, tuple[int, ...]]]]:
    """A dtype, a shape, and steps from it, by which NumPy and Penstock view the same items."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    steps: list[tuple[str, tuple[int, ...]]] = []
    at = shape
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["permute", "slice", "flip", "expand"]))
        axis = draw(st.integers(0, len(at) - 1))
        if kind == "permute":
            order = tuple(draw(st.permutations(range(len(at)))))
            steps.append((kind, order))
            at = tuple(at[k] for k in order)
        elif kind == "slice":
            start, step = draw(st.integers(0, at[axis] - 1)), draw(st.integers(1, 3))
            steps.append((kind, (axis, start, step)))
            at = (*at[:axis], -(-(at[axis] - start) // step), *at[axis + 1 :])
        elif kind == "flip":
            steps.append((kind, (axis,)))
        elif len(at) < 5:
            steps.append((kind, (draw(st.integers(2, 3)),)))
            at = (steps[-1][1][0], *at)
    return np.dtype(draw(st.sampled_from(DTYPES))), shape, steps


def viewed(x, steps):  # type: ignore[no-untyped-def] - of arrays and tensors
    for kind, given_ in steps:
        if kind == "permute":
            x = x.transpose(given_) if isinstance(x, np.ndarray) else ps.permute_dims(x, given_)
        elif kind == "slice":
            axis, start, step = given_
            x = x[(slice(None),) * axis + (slice(start, None, step),)]
        elif kind == "flip":
            x = (np if isinstance(x, np.ndarray) else ps).flip(x, axis=given_[0])
        else:
            x = (np if isinstance(x, np.ndarray) else ps).broadcast_to(x, (*given_, *x.shape))
    return x


@settings(max_examples=examples(80, quick=15))
@given(views())
def test_views_are_copied_item_by_item(device: Device, case: tuple) -> None:  # type: ignore[type-arg]
    dtype, shape, steps = case
    values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    x = ps.asarray(values, device=device)
    value, _ = alone(device, viewed(x, steps))
    np.testing.assert_array_equal(value, viewed(values, steps))


def test_one_kernel_serves_all_shapes_of_a_size_of_items(device: Device) -> None:
    kernels = set()
    for shape, order in (
        ((7, 9), (1, 0)),
        ((5, 6, 11), (2, 0, 1)),
        ((3, 4, 5, 6), (0, 3, 1, 2)),
        ((600, 70), (1, 0)),
    ):
        values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        x = ps.asarray(values, device=device)
        for tensor, expected in (
            (ps.permute_dims(x, order), values.transpose(order)),
            (ps.flip(x, axis=0)[1::2], values[::-1][1::2]),
            (ps.broadcast_to(x[:1], shape), np.broadcast_to(values[:1], shape)),
        ):
            value, names = alone(device, tensor)
            np.testing.assert_array_equal(value, expected)
            kernels |= names
    assert len(kernels) == 1


def test_axes_that_a_reshape_splits_are_read_by_strides(device: Device) -> None:
    values = np.arange(24 * 30, dtype=np.float32).reshape(24, 30)
    x = ps.asarray(values, device=device)
    tensor = ps.permute_dims(ps.reshape(x, (4, 6, 5, 6)), (2, 0, 3, 1))
    value, names = alone(device, tensor)
    np.testing.assert_array_equal(value, values.reshape(4, 6, 5, 6).transpose(2, 0, 3, 1))
    assert len(names) == 1
    odd = ps.reshape(ps.reshape(x, (30, 24)).T, (36, 20))[::5]  # not by strides: indices are divided
    value, names = alone(device, odd)
    np.testing.assert_array_equal(value, values.reshape(30, 24).T.reshape(36, 20)[::5])
