"""What products compute besides: norms before them, and two products at once, on GPUs against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, examples, opencl_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_sources import Imagined

import penstock as ps
from penstock import Device
from penstock.compiler.passes import fused
from penstock.compiler.pipeline import prepare
from penstock.drivers.cuda import compile_text
from penstock.drivers.driver import Driver
from penstock.execution import realize
from penstock.execution.realize import executables
from penstock.execution.structure import Structure
from penstock.fusion.column_reductions import column_units
from penstock.fusion.groups import Group
from penstock.graph import elementwise
from penstock.graph.calls import inline
from penstock.graph.dtypes import bfloat16
from penstock.graph.node import placeholder
from penstock.graph.quantization import packed_matmul
from penstock.kernels.cache import whole_text
from penstock.kernels.lower import write
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it


def _threads() -> Driver:
    driver = opencl_threads()
    driver.capabilities = replace(driver.capabilities, compute_units=4)
    return driver


@pytest.fixture(scope="module", params=["opencl-threads", *CUDA_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
        patch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
        made = Device.over({"opencl-threads": _threads, **DRIVERS}[request.param]())
        yield made
        made.close()


def given_to(device: Device, *shapes: tuple[int, ...], dtype: str = "float32") -> list[ps.Tensor]:
    draw = np.random.default_rng(len(shapes))
    arrays = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [ps.asarray(array, device=device).astype(getattr(ps, dtype)).realize() for array in arrays]


def groups(device: Device, *tensors: ps.Tensor) -> list[Group]:
    program = executables(device).build(Structure([tensor._node for tensor in tensors]))
    return [step.group for step in program.schedule.groups]


def exact(*tensors: ps.Tensor) -> list[Any]:
    return [tensor.astype(ps.float64).numpy() for tensor in tensors]


def normed(x: Any, scale: Any, centred: bool) -> Any:
    x = x - x.mean(axis=-1, keepdims=True) if centred else x
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * scale


def norm(x: ps.Tensor, scale: ps.Tensor, centred: bool) -> ps.Tensor:
    if centred:
        return F.layer_norm(x, scale.shape, scale, eps=1e-5)
    return F.rms_norm(x, scale.shape, scale, 1e-5)


@given(
    rows=st.sampled_from([32, 33, 48, 100, 512, 1999]),
    columns=st.sampled_from([7, 32, 64, 100, 256, 1000, 2048]),
    centred=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@settings(max_examples=examples(12, quick=8), deadline=None)
def test_a_norm_is_part_of_the_product(
    device: Device, rows: int, columns: int, centred: bool, dtype: str
) -> None:
    shapes = (1, columns), (columns,), (rows, columns)
    x, scale, weight = given_to(device, *shapes, dtype=dtype)
    result = norm(x, scale, centred) @ weight.T
    assert [group.kind for group in groups(device, result)] == ["row"]
    expected = normed(*exact(x, scale), centred) @ exact(weight)[0].T
    near = 2e-4 if dtype == "float32" else 0.05
    np.testing.assert_allclose(exact(result)[0], expected, rtol=near, atol=near * np.sqrt(columns))


def test_several_products_read_a_sum_and_its_norm(device: Device) -> None:
    """As in a block of a language model: the sum is stored once, for what is added to it later."""
    shapes = (1, 96), (96,), (96, 64), (1, 64), (128, 96), (128, 96), (40, 96)
    x, scale, out, y, gate, up, other = given_to(device, *shapes)
    total = x + y @ out.T
    near = norm(total, scale, False)
    gated, third = F.silu(near @ gate.T) * (near @ up.T), near @ other.T
    kinds = [(group.kind, len(group.outputs)) for group in groups(device, total, gated, third)]
    assert kinds == [("row", 1)] * 3
    realize.realize([value._node for value in (total, gated, third)], device)
    x, scale, out, y, gate, up, other = exact(x, scale, out, y, gate, up, other)
    expected = x + y @ out.T
    near = normed(expected, scale, False)
    np.testing.assert_allclose(exact(total)[0], expected, rtol=1e-5, atol=1e-5)
    first = near @ gate.T
    np.testing.assert_allclose(exact(gated)[0], first / (1 + np.exp(-first)) * (near @ up.T), 1e-4, 1e-4)
    np.testing.assert_allclose(exact(third)[0], near @ other.T, 1e-4, 1e-4)


def test_workgroups_take_rows_in_turn(device: Device) -> None:
    """There are more rows than workgroups: each computes the norm once, and takes several."""
    x, scale, weight = given_to(device, (1, 64), (64,), (65536, 64))
    result = norm(x, scale, True) @ weight.T
    (step,) = executables(device).build(Structure([result._node])).schedule.groups
    (call,) = step.calls
    assert "again" in str(call.source.body)
    np.testing.assert_allclose(
        exact(result)[0], normed(*exact(x, scale), True) @ exact(weight)[0].T, rtol=1e-4, atol=1e-4
    )


def test_rows_also_read_numbers_of_the_vector_and_biases(device: Device) -> None:
    """What rows read comes before the vector is computed, but not what depends on the vector."""
    x, scale, weight, bias = given_to(device, (1, 256), (256,), (300, 256), (300,))
    mean = x.mean()
    result = ((weight - mean) * norm(x, scale, False)).sum(axis=-1) * mean + bias
    wanted_x, wanted_scale, matrix, added = exact(x, scale, weight, bias)
    near = normed(wanted_x, wanted_scale, False)
    expected = ((matrix - wanted_x.mean()) * near).sum(axis=-1) * wanted_x.mean() + added
    np.testing.assert_allclose(exact(result)[0], expected, rtol=1e-3, atol=1e-3)


def test_what_is_wanted_itself_is_stored(device: Device) -> None:
    x, scale, weight = given_to(device, (1, 64), (64,), (64, 64))
    near = norm(x, scale, False)
    result = near @ weight.T
    assert len(groups(device, near, result)) == 2
    # What few rows read is computed before them.
    assert len(groups(device, norm(x, scale, False) @ weight[:8].T)) == 2


@pytest.mark.parametrize(("rows", "bits"), [(1, 4), (5, 8), (11, 4)])
def test_a_packed_product_gates_another(device: Device, rows: int, bits: int) -> None:
    x, *weights = given_to(device, (rows, 96), (80, 96), (80, 96))
    packed = [[part.realize() for part in F.quantized(weight, bits, 32)] for weight in weights]
    gate, up = (F.quantized_linear(x, *parts, bits) for parts in packed)
    result = F.silu(gate) * up
    assert [group.kind for group in groups(device, result)] == ["matmul"]
    first, second = (exact(x)[0] @ exact(F.dequantized(*parts, bits, 96))[0].T for parts in packed)
    expected = first / (1 + np.exp(-first)) * second
    np.testing.assert_allclose(exact(result)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 20])
def test_nvrtc_takes_a_pair_of_products(rows: int) -> None:
    can = replace(Imagined(tensor_cores=True).capabilities, max_group_size=1024)
    x = placeholder((rows, 256), bfloat16)
    gate, up = (
        packed_matmul(x, placeholder((96, 32), np.dtype(np.uint32)), placeholder((96, 8), bfloat16))
        for _ in range(2)
    )
    (group,) = fused([elementwise.multiply(elementwise.exp(gate), up)], can, column_units(can))
    lowering = write(group, can, "x")
    assert lowering is not None
    (launch,) = lowering.launches
    text = whole_text([launch.source], "cuda")
    assert compile_text(text, "sm_90").startswith(b"\x7fELF")


def packed_weights(bits: int, *weights: ps.Tensor) -> list[list[ps.Tensor]]:
    return [[part.realize() for part in F.quantized(weight, bits, 32)] for weight in weights]


@pytest.mark.parametrize(("columns", "features"), [(96, 200), (896, 200), (2048, 2200)])
@pytest.mark.parametrize(("bits", "centred", "dtype"), [(4, False, "bfloat16"), (8, True, "float16")])
def test_a_norm_is_part_of_packed_products(
    device: Device, columns: int, features: int, bits: int, centred: bool, dtype: str
) -> None:
    """On tensor cores; other kernels read a norm that was stored. A third product is in the same launch."""
    shapes = (1, columns), (columns,), (features, columns), (features, columns), (40, columns)
    x, scale, *weights = given_to(device, *shapes, dtype=dtype)
    packed = packed_weights(bits, *weights)
    near = norm(x, scale, centred)
    gate, up, third = (F.quantized_linear(near, *parts, bits) for parts in packed)
    gated = F.silu(gate) * up + third.sum()
    norms = [
        group for group in groups(device, gated, third) if group.kind == "row" and group.columns == columns
    ]
    assert bool(norms) is not device.capabilities.tensor_cores
    realize.realize([gated._node, third._node], device)
    expected = normed(*exact(x, scale), centred)
    matrices = [exact(F.dequantized(*parts, bits, columns))[0] for parts in packed]
    first, second, other = (expected @ matrix.T for matrix in matrices)
    near_by = 0.02 * np.sqrt(columns)
    np.testing.assert_allclose(exact(third)[0], other, rtol=0.02, atol=near_by)
    wanted = first / (1 + np.exp(-first)) * second + exact(third)[0].sum()
    np.testing.assert_allclose(exact(gated)[0], wanted, rtol=0.03, atol=0.03 * np.abs(wanted).max())


@pytest.mark.parametrize(("columns", "centred"), [(256, False), (896, True)])
def test_nvrtc_takes_a_norm_before_packed_products(columns: int, centred: bool) -> None:
    can = replace(Imagined(tensor_cores=True).capabilities, max_group_size=1024)
    x, scale = placeholder((1, columns), bfloat16), placeholder((columns,), bfloat16)
    tensors = [ps.Tensor(node, ps.default_device()) for node in (x, scale)]
    near = norm(*tensors, centred)._node
    words = placeholder((96, columns // 8), np.dtype(np.uint32))
    scales = placeholder((96, columns // 32), bfloat16)
    nodes, _ = prepare(inline([packed_matmul(near, words, scales)]), [x, scale, words, scales])
    (group,) = fused(nodes, can, column_units(can))
    lowering = write(group, can, "x")
    assert lowering is not None
    (launch,) = lowering.launches
    assert {dtype for dtype, name, _ in launch.source.arrays if name == "own_row"} == {"uint32"}
    assert compile_text(whole_text([launch.source], "cuda"), "sm_90").startswith(b"\x7fELF")
