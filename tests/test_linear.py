"""Products of few rows on tensor cores, which a CPU imitates: their values, and which products are such."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from conftest import NATIVE, one_opencl
from test_cuda_sources import Imagined
from test_matmul_kernel import GUARD, guarded, launch, way_of

import penstock as ps
from penstock import Device
from penstock.compiler.launches import arranged, launch_parts
from penstock.compiler.passes import fused
from penstock.compiler.pipeline import compile_graph
from penstock.compiler.target import Target
from penstock.drivers.cuda.code import compile_text
from penstock.drivers.opencl import OpenCLDriver
from penstock.fusion.column_reductions import column_units
from penstock.graph import elementwise
from penstock.graph.contraction import matmul
from penstock.graph.dtypes import bfloat16, checked, float16, float32
from penstock.graph.linear import LINEAR, few_rows
from penstock.graph.node import Node, placeholder
from penstock.graph.shaping import permute, reshape, slice_axis
from penstock.kernels.cache import whole_text
from penstock.kernels.concatenation import Call
from penstock.kernels.lower import write
from penstock.kernels.sizes import Sizes
from penstock.kernels.source import KernelSource
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.tuning_cache import TuningCache

Floats = npt.NDArray[np.float64]
# What the instruction m16n8k16 does with the words of a warp's threads, by way of local memory.
TILES = """
// The words of threads, of which EACH_LANE() is one, are needed.
#define LOCAL_ID ((int)get_local_id(0))
#define TILES(NAME, t0, t1, t2, t3, a0, a1, a2, a3, b0, b1) { \\
    BARRIER; \\
    tiles_[LOCAL_ID][0] = a0; tiles_[LOCAL_ID][1] = a1; tiles_[LOCAL_ID][2] = a2; \\
    tiles_[LOCAL_ID][3] = a3; tiles_[LOCAL_ID][4] = b0; tiles_[LOCAL_ID][5] = b1; \\
    BARRIER; \\
    for (int k_ = 0; k_ < 16; k_++) { \\
        int own_ = LOCAL_ID / 4 * 4 + k_ % 8 / 2; \\
        int other_ = LOCAL_ID / 32 * 32 + LOCAL_ID % 4 * 8 + k_ % 8 / 2; \\
        float upper_ = ITEM_##NAME((&tiles_[own_][k_ / 8 * 2]), k_ % 2); \\
        float lower_ = ITEM_##NAME((&tiles_[own_][k_ / 8 * 2 + 1]), k_ % 2); \\
        float left_ = ITEM_##NAME((&tiles_[other_][4 + k_ / 8]), k_ % 2); \\
        float right_ = ITEM_##NAME((&tiles_[other_ + 4][4 + k_ / 8]), k_ % 2); \\
        t0 += upper_ * left_; t1 += upper_ * right_; t2 += lower_ * left_; t3 += lower_ * right_; \\
    } \\
}
#define COPY_AHEAD(to, from, bytes) { \\
    for (int k_ = 0; k_ < 8; k_++) \\
        ((__local ushort *)(to))[k_] = (bytes) ? ((__global const ushort *)(from))[k_] : 0; \\
}
#define END_COPIES
#define WAIT_FOR_COPIES(left)
#define LINE(tile) (LOCAL_ID / 32 * 32 + tile * 8 + LOCAL_ID % 32 / 4)
#define LOADED(tile) ((__local const uint *)lines_[LINE(tile)])[LOCAL_ID % 4]
#define LOAD_TILES(t0, t1, t2, t3, line) { \\
    BARRIER; \\
    lines_[LOCAL_ID] = (ulong)(line); \\
    BARRIER; \\
    t0 = LOADED(0); t1 = LOADED(1); t2 = LOADED(2); t3 = LOADED(3); \\
}
#define MULTIPLY_TILES_BFLOAT16(...) TILES(BFLOAT16, __VA_ARGS__)
#define MULTIPLY_TILES_FLOAT16(...) TILES(FLOAT16, __VA_ARGS__)
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[OpenCLDriver]:
    opened = OpenCLDriver(NATIVE, "linear")
    yield opened
    opened.close()


def imitated(source: KernelSource) -> KernelSource:
    """A kernel for tensor cores that a CPU can run. The workgroups of a cluster are parts of a single one."""
    (threads,), (grid,), count = source.group, source.grid, source.cluster
    text, every = source.text, count * threads
    words = f"LOCAL uint tiles_[{every}][6]; LOCAL ulong lines_[{every}];"
    lines = [
        TILES,
        f"#define RANK (LOCAL_ID / {threads})",
        "#undef THREAD",
        f"#define THREAD (LOCAL_ID % {threads})",
        "#undef GROUP",
        f"#define GROUP(axis) ((int)get_group_id(0) * {count} + RANK)",
        "#define CLUSTER_BARRIER BARRIER",
        "#define CLUSTER_SUM(array, index, count) ({})".format(
            " + ".join(f"array##_[{rank}][index]" for rank in range(count))
        ),
        "#define CLUSTER_LOAD(array, index, rank) array##_[rank][index]",
    ]
    for _, name, _ in source.arrays:
        text = text.replace(f"LOCAL float {name}[", f"LOCAL float {name}_[{count}][")
        lines.append(f"#define {name} {name}_[RANK]")
    before, opening, body = text.partition("{")
    body = "\n".join([*lines, f"{before}{opening}{words}{body}"])
    return replace(source, body=body, grid=(grid // count,), group=(every,))


def computed(
    driver: OpenCLDriver,
    wanted: Node,
    inputs: Sequence[Node],
    arrays: Sequence[Floats],
    units: int,
    splits: int,
) -> Floats:
    """The value of a graph, by a kernel for tensor cores. What lies around values is NaN, and stays so."""
    can = replace(way_of(driver, "gpu"), tensor_cores=True, clusters=splits > 1, compute_units=units)
    (group,) = fused(few_rows([wanted], can), can, column_units(can))
    assert LINEAR in [node.primitive for node in group.nodes]
    lowering = write(group, can, "x")
    assert lowering is not None
    given = [guarded(arrays[inputs.index(node)].astype(node.dtype)) for node in group.inputs]
    out = guarded(np.zeros(wanted.shape, wanted.dtype))
    (call,) = lowering.launches
    assert call.source.cluster == splits
    result, *_ = launch(driver, imitated(call.source), [out, *given])
    wide = result.astype(np.float64)
    assert np.isnan([wide[:GUARD], wide[-GUARD:]]).all()
    return wide[GUARD:-GUARD].reshape(wanted.shape)


def drawn(*shapes: tuple[int, ...], dtype: np.dtype[np.generic]) -> list[Floats]:
    draw = np.random.default_rng(sum(map(sum, shapes)))
    return [draw.normal(size=shape).astype(dtype).astype(np.float64) for shape in shapes]


def transposed_product(x: Node, weight: Node) -> Node:
    return matmul(x, permute(weight, (1, 0)))


@pytest.mark.parametrize(
    ("rows", "features", "inner", "units", "splits"),
    [
        (2, 37, 200, 100, 1),
        (3, 64, 768, 1, 1),
        (8, 16, 2048, 8, 1),
        (9, 200, 200, 1, 1),
        (17, 53, 264, 2, 2),
        (32, 40, 96, 1, 1),
        (32, 130, 1032, 1, 1),
        (9, 70, 264, 100, 2),
        (32, 50, 520, 100, 4),
        (20, 150, 1096, 2, 2),
        (24, 64, 1024, 100, 8),
    ],
)
@pytest.mark.parametrize("dtype", [bfloat16, float16])
def test_products(
    driver: OpenCLDriver,
    rows: int,
    features: int,
    inner: int,
    units: int,
    splits: int,
    dtype: np.dtype[np.generic],
) -> None:
    """Also with more steps than a ring has room for, and with inputs that a cluster's workgroups share."""
    shapes = (rows, inner), (features, inner), (rows, features)
    x, weight, other = inputs = [placeholder(shape, checked(dtype)) for shape in shapes]
    arrays = drawn(*shapes, dtype=dtype)
    total = elementwise.add(transposed_product(x, weight), other)
    result = computed(driver, total, inputs, arrays, units, splits)
    bound = 2.0**-22 * inner**0.5 * np.abs(arrays[0]) @ np.abs(arrays[1].T)
    product = arrays[0] @ arrays[1].T
    step = 2.0**-8 if dtype == bfloat16 else 2.0**-11
    bound += step * (1 + 2 * step) * (np.abs(product) + np.abs(product + arrays[2]))
    assert (np.abs(result - product - arrays[2]) <= bound).all()


@pytest.mark.parametrize(("rows", "inner", "splits"), [(5, 136, 1), (20, 1000, 1), (20, 272, 2)])
def test_a_product_gates_another(driver: OpenCLDriver, rows: int, inner: int, splits: int) -> None:
    shapes = (rows, inner), (72, inner), (72, inner)
    x, *weights = inputs = [placeholder(shape, bfloat16) for shape in shapes]
    arrays = drawn(*shapes, dtype=bfloat16)
    arrays[1] /= 4 * inner**0.5
    gate, up = (elementwise.cast(transposed_product(x, weight), float32) for weight in weights)
    result = computed(driver, elementwise.multiply(elementwise.exp(gate), up), inputs, arrays, 100, splits)
    first, second = (arrays[0] @ weight.astype(bfloat16).astype(np.float64).T for weight in arrays[1:])
    np.testing.assert_allclose(result, np.exp(first) * second, rtol=0.05, atol=0.1)


@one_opencl
@pytest.mark.parametrize(("rows", "features", "inner"), [(3, 70, 200), (30, 33, 2048)])
def test_layers_on_every_driver(device: Device, rows: int, features: int, inner: int) -> None:
    x, weight, bias = drawn((rows, inner), (features, inner), (features,), dtype=bfloat16)
    given = (ps.asarray(array, device=device).astype("bfloat16") for array in (x, weight, bias))
    result = F.linear(*given).astype("float32").numpy()
    exact = x @ weight.T + bias
    bound = 2.0**-7 * (np.abs(exact) + np.abs(bias)) + 2.0**-18 * np.abs(x) @ np.abs(weight.T)
    assert (np.abs(result - exact) <= bound).all()


def test_which_products_are_of_few_rows() -> None:
    can = Imagined(tensor_cores=True).capabilities
    weight, flat = placeholder((64, 96), bfloat16), placeholder((64 * 96,), bfloat16)

    def linear(product: Node) -> bool:
        (result,) = few_rows([product], can)
        return result.primitive is LINEAR

    few = placeholder((32, 96), bfloat16)
    assert linear(transposed_product(few, weight))
    assert linear(transposed_product(few, reshape(flat, (64, 96))))
    assert not linear(transposed_product(placeholder((33, 96), bfloat16), weight)), "many rows"
    assert not linear(transposed_product(few, placeholder((40000, 96), bfloat16))), "many features"
    assert not linear(transposed_product(few, slice_axis(placeholder((64, 100), bfloat16), 1, 0, 96))), (
        "a part"
    )
    assert not linear(matmul(placeholder((8, 64), bfloat16), weight)), "a matrix of inputs"
    assert not linear(transposed_product(*(placeholder((8, 100), bfloat16) for _ in range(2)))), "bytes left"
    assert not linear(transposed_product(*(placeholder((8, 96), float32) for _ in range(2)))), "float32"
    assert (
        few_rows([transposed_product(few, weight)], replace(can, tensor_cores=False))[0].primitive
        is not LINEAR
    )


@pytest.mark.parametrize("rows", [2, 32])
def test_a_layer_has_few_launches(rows: int) -> None:
    """Queries, keys and values are one launch, a gate and what it multiplies another."""
    can = replace(Imagined(tensor_cores=True).capabilities, clusters=True, max_group_size=1024)
    shapes = (rows, 512), (512, 512), (128, 512), (128, 512), (1024, 512), (1024, 512), (512, 1024)
    x, *weights = inputs = [placeholder(shape, bfloat16) for shape in shapes]
    first = [transposed_product(x, weight) for weight in weights[:3]]
    gate, up = (transposed_product(first[0], weight) for weight in weights[3:5])
    last = transposed_product(elementwise.multiply(elementwise.exp(gate), up), weights[5])
    schedule = compile_graph([*first, elementwise.add(last, x)], inputs, {}, Target.of(can))
    parts = launch_parts(schedule, can)
    assert sum(len(part) for part in parts if isinstance(part, list)) == 3
    for launches in arranged(parts, schedule, can, None, Sizes(TuningCache(""))):
        assert isinstance(launches, list)
        for call in launches:
            assert isinstance(call, Call)
            assert compile_text(whole_text([call.source], "cuda"), "sm_90").startswith(b"\x7fELF")
