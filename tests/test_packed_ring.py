"""Products of 17 to 32 rows with packed matrices on tensor cores, which a CPU imitates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from conftest import NATIVE
from test_cuda_sources import Imagined
from test_linear import TILES, Floats, imitated
from test_matmul_kernel import GUARD, guarded, launch, way_of
from test_quantize import Packed, assert_product, drawn

from penstock.compiler.passes import fused
from penstock.compiler.pipeline import compile_graph
from penstock.compiler.target import Target
from penstock.drivers.cuda.code import compile_text
from penstock.drivers.opencl import OpenCLDriver
from penstock.fusion.column_reductions import column_units
from penstock.graph import elementwise
from penstock.graph.dtypes import bfloat16, checked, float32
from penstock.graph.node import Node, placeholder
from penstock.graph.quantization import packed_matmul
from penstock.kernels.cache import whole_text
from penstock.kernels.lower import write
from penstock.kernels.source import KernelSource

UNPACKING = """
#define INTEGER(word, k) ((float)((int)((word) >> 16 * (k) & 15) - 8))
#define INTEGERS_BFLOAT16(word) BFLOAT16_PAIR(INTEGER(word, 0), INTEGER(word, 1))
#define INTEGERS_FLOAT16(word) FLOAT16_PAIR(INTEGER(word, 0), INTEGER(word, 1))
#define HALF(word, k) half_float((ushort)((word) >> 16 * (k)))
#define BHALF(word, k) FROM_BFLOAT16((ushort)((word) >> 16 * (k)))
#define SCALED_FLOAT16(pair, s) FLOAT16_PAIR(HALF(pair, 0) * HALF(s, 0), HALF(pair, 1) * HALF(s, 1))
#define SCALED_BFLOAT16(pair, s) BFLOAT16_PAIR(BHALF(pair, 0) * BHALF(s, 0), BHALF(pair, 1) * BHALF(s, 1))
#define LOAD_PART(w0, w1, w2, w3, part) { \\
    __local const uint *part_ = (__local const uint *)(part); \\
    w0 = part_[0]; w1 = part_[1]; w2 = part_[2]; w3 = part_[3]; \\
}
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[OpenCLDriver]:
    opened = OpenCLDriver(NATIVE, "packed-ring")
    yield opened
    opened.close()


def computed(
    driver: OpenCLDriver,
    wanted: Node,
    inputs: Sequence[Node],
    arrays: Sequence[np.ndarray],
    units: int,
    splits: int,
) -> Floats:
    """The value of a graph, by a kernel for tensor cores. What lies around values is NaN, and stays so."""
    can = replace(way_of(driver, "gpu"), tensor_cores=True, clusters=splits > 1, compute_units=units)
    (group,) = fused([wanted], can, column_units(can))
    lowering = write(group, can, "x")
    assert lowering is not None
    given = [arrays[inputs.index(node)] for node in group.inputs]
    given = [guarded(array.view(np.float32) if array.dtype == np.uint32 else array) for array in given]
    out = guarded(np.zeros(wanted.shape, wanted.dtype))
    (call,) = lowering.launches
    assert call.source.cluster == splits
    assert "LOAD_PART" in call.source.text
    source = imitated(call.source)
    source = replace(source, body=source.text.replace(TILES, TILES + UNPACKING))
    result, *_ = launch(driver, source, [out, *given])
    wide = result.astype(np.float64)
    assert np.isnan([wide[:GUARD], wide[-GUARD:]]).all()
    return wide[GUARD:-GUARD].reshape(wanted.shape)


def operands(
    rows: int, inner: int, dtype: str, matrices: Sequence[Packed]
) -> tuple[list[Node], list[np.ndarray]]:
    x = np.random.default_rng(rows).normal(size=(rows, inner)).astype(checked(dtype))
    arrays = [x]
    for packed in matrices:
        arrays += [packed.words, packed.scales]
    return [placeholder(array.shape, checked(array.dtype)) for array in arrays], arrays


@pytest.mark.slow("130", "200")
@pytest.mark.parametrize(
    ("rows", "features", "inner", "units", "splits", "bits", "group", "dtype"),
    [
        (19, 37, 224, 1, 1, 8, 32, "bfloat16"),
        (17, 130, 1056, 1, 1, 4, 32, "float16"),
        (32, 200, 320, 1, 1, 4, 64, "bfloat16"),
        (24, 70, 800, 100, 2, 8, 32, "float16"),
        (32, 50, 2080, 100, 8, 4, 32, "bfloat16"),
    ],
)
def test_products(
    driver: OpenCLDriver,
    rows: int,
    features: int,
    inner: int,
    units: int,
    splits: int,
    bits: int,
    group: int,
    dtype: str,
) -> None:
    """Also with more steps than a ring has room for, and with inputs that a cluster's workgroups share."""
    packed = drawn(features, inner, bits, group, rows, dtype)
    inputs, arrays = operands(rows, inner, dtype, [packed])
    result = computed(driver, packed_matmul(*inputs), inputs, arrays, units, splits)
    assert_product(result, arrays[0].astype(np.float64), packed, bits, dtype)


@pytest.mark.slow("288")
@pytest.mark.parametrize(("bits", "inner", "splits"), [(4, 288, 1), (8, 544, 2)])
def test_a_product_gates_another(driver: OpenCLDriver, bits: int, inner: int, splits: int) -> None:
    rows = 18
    matrices = [drawn(72, inner, bits, 32, seed, "bfloat16") for seed in range(2)]
    inputs, arrays = operands(rows, inner, "bfloat16", matrices)
    arrays[0] /= 8
    gate, up = (
        elementwise.cast(packed_matmul(inputs[0], *own), float32) for own in (inputs[1:3], inputs[3:])
    )
    wanted = elementwise.multiply(elementwise.tanh(gate), up)
    result = computed(driver, wanted, inputs, arrays, 100, splits)
    first, second = (arrays[0].astype(np.float64) @ packed.matrix.T for packed in matrices)
    np.testing.assert_allclose(result, np.tanh(first) * second, rtol=0.05, atol=0.05 * np.abs(second).max())


@pytest.mark.parametrize("bits", [4, 8])
def test_wide_matrices_have_more_features_in_a_workgroup_and_compile(bits: int) -> None:
    can = replace(Imagined(tensor_cores=True).capabilities, clusters=True, max_group_size=1024)

    def source_of(columns: int, rows: int = 32) -> KernelSource:
        shapes = (rows, 2048), (columns, 2048 * bits // 32), (columns, 64)
        dtypes = bfloat16, checked(np.uint32), bfloat16
        inputs = [placeholder(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        schedule = compile_graph([packed_matmul(*inputs)], inputs, {}, Target.of(can))
        (source,) = (call.source for step in schedule.groups for call in step.calls)
        assert compile_text(whole_text([source], "cuda"), "sm_90").startswith(b"\x7fELF")
        return source

    narrow, wide = source_of(2048), source_of(1 << 16)
    assert (narrow.grid, narrow.cluster) == ((256,), 8)
    assert (wide.grid, wide.cluster) == (((1 << 16) // (128 if bits == 4 else 64),), 1)
    assert ["LOAD_PART" in source_of(2048, rows).text for rows in (16, 17)] == [False, True]
