"""Matrix products by CPU and GPU kernels, against NumPy in double precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from conftest import NATIVE, examples, for_a_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.drivers.driver import Capabilities
from penstock.drivers.opencl import OpenCLDriver, find_devices, opencl_capabilities
from penstock.graph.dtypes import checked
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.cache import whole_text
from penstock.kernels.ir.expressions import Const, Expr, Load, Var, call
from penstock.kernels.ir.statements import Let, Statement, Store
from penstock.kernels.source import ALIGNMENT, KernelSource
from penstock.kernels.templates import matmul_gpu
from penstock.kernels.templates.matmul import BATCH, Epilogue, Matrix, Problem
from penstock.kernels.templates.matmul_cpu import cpu_matmul

GUARD = 128  # items before and after every matrix
CPU = next(device for device in reversed(find_devices()))  # CPUs come last


@pytest.fixture(scope="module")
def driver() -> Iterator[OpenCLDriver]:
    opened = OpenCLDriver(CPU, "matmul")
    if opened.capabilities.vector_width == 1:
        pytest.skip("no CPU device")
    yield opened
    opened.close()


def way_of(driver: OpenCLDriver, way: str) -> Capabilities:
    """What the kernel is written for: both ways run on a CPU."""
    if way == "cpu":
        return driver.capabilities
    if way == "cpu-small":
        return replace(driver.capabilities, local_bytes=16 << 10)
    few = replace(driver.capabilities, vector_width=1, local_bytes=32 << 10, compute_units=1)
    return replace(few, compute_units=1000) if way == "gpu-small" else few


def launch(driver: OpenCLDriver, source: KernelSource, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Run the kernel on copies of `arrays` and give them back; each has its value after a guard zone."""
    with for_a_gpu(math.prod(source.group) > 1):
        kernel = driver.compile(whole_text([source], "opencl"), {source.name: source.signature})[source.name]
    memories = [driver.allocate(array.nbytes) for array in arrays]
    queue = driver.compute
    for memory, array in zip(memories, arrays, strict=True):
        driver.write(queue, memory, 0, array.view(np.uint8), None)
    places = [np.int32(GUARD * array.itemsize // ALIGNMENT) for array in arrays]
    args = [memory.native for memory in memories]
    driver.launch(queue, kernel, source.grid, source.group, [*args, *places], None)
    results = [np.empty_like(array) for array in arrays]
    for memory, result in zip(memories, results, strict=True):
        driver.wait(driver.read(queue, result.view(np.uint8), memory, 0, None))
    for memory in memories:
        driver.free(memory)
    return results


def guarded(values: np.ndarray) -> np.ndarray:
    """`values` in a row, with NaN before and after."""
    guard = np.full(GUARD, np.nan, values.dtype)
    return np.concatenate([guard, values.ravel(), guard])


def stored(
    rng: np.random.Generator, name: str, dtype: str, batch: int, rows: int, columns: int, layout: str
) -> tuple[np.ndarray, np.ndarray, Matrix]:
    """Memory, the matrices in it, and the record that says so; what lies between the items is NaN."""
    shape = {
        "rows": (batch, rows, columns),
        "columns": (batch, columns, rows),
        "apart": (batch, rows, columns * 3 + 2),
        "padded": (batch, rows, columns + 5),
        "one row": (batch, 1, columns),
    }[layout]
    memory = np.full(shape, np.nan, checked(dtype))
    picked = {
        "rows": memory,
        "columns": memory.swapaxes(1, 2),
        "apart": memory[:, :, : 3 * columns : 3],
        "padded": memory[:, :, :columns],
        "one row": memory,
    }[layout]
    picked[...] = rng.standard_normal(picked.shape)
    last = {"apart": columns * 3 - 2, "padded": columns}.get(layout, shape[2])  # the memory ends with an item
    matrices = np.broadcast_to(picked, (batch, rows, columns))
    _, row_stride, column_stride = (stride // memory.itemsize for stride in matrices.strides)
    operand = Matrix(Memory(name, dtype), BATCH * (shape[1] * shape[2]), row_stride, column_stride)
    return memory.ravel()[: memory.size - shape[2] + last], matrices.astype(np.float64), operand


def check(
    driver: OpenCLDriver,
    way: str,
    sizes: tuple[int, int, int, int],
    layouts: tuple[str, str] = ("rows", "rows"),
    dtypes: tuple[str, str] = ("float32", "float32"),
) -> None:
    batch, rows, columns, inner = sizes
    rng = np.random.default_rng(sum(sizes))
    left_memory, left, left_operand = stored(rng, "in0", dtypes[0], batch, rows, inner, layouts[0])
    right_memory, right, right_operand = stored(rng, "in1", dtypes[1], batch, inner, columns, layouts[1])
    problem = Problem(batch, rows, columns, inner, left_operand, right_operand)

    def epilogue(row: Expr, column: Expr, product: Var) -> list[Statement]:
        place = (BATCH * rows + row) * columns + column
        seen = Var("seen", product.type)
        return [
            Store(product, "out0", "float32", place),
            Let(seen.name, Load(seen.type, "out1", "float32", place, 1)),
            Store(seen + 1, "out1", "float32", place, width=seen.type.width),
        ]

    outputs = [np.zeros((batch, rows, columns), np.float32) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_gpu, "_SMALL", 1 << 40 if way == "gpu-few" else 0)
        source = kernel_source(problem, way_of(driver, way), epilogue, 2)
    out, seen, *_ = launch(driver, source, [guarded(a) for a in (*outputs, left_memory, right_memory)])
    assert np.isnan([out[:GUARD], out[-GUARD:], seen[:GUARD], seen[-GUARD:]]).all()
    np.testing.assert_array_equal(seen[GUARD:-GUARD], 1)
    result = out[GUARD:-GUARD].reshape(batch, rows, columns)
    bound = (inner + 2) * np.finfo(np.float32).eps * (np.abs(left) @ np.abs(right))
    assert (np.abs(result - left @ right) <= bound).all()


def kernel_source(
    problem: Problem, capabilities: Capabilities, epilogue: Epilogue, outputs: int, more: int = 0
) -> KernelSource:
    inputs = [problem.left.memory.dtype, problem.right.memory.dtype, *["float32"] * more]
    k = KernelBuilder("product", capabilities, ["float32"] * outputs, inputs)
    if capabilities.vector_width > 1:
        return cpu_matmul(k, problem, capabilities, epilogue, 8)
    return matmul_gpu.gpu_matmul(k, problem, capabilities, epilogue)


@pytest.mark.parametrize("way", ["cpu", "gpu", "gpu-small", "gpu-few"])
@pytest.mark.parametrize(
    ("sizes", "layouts"),
    [
        ((1, 1, 1, 1), ("rows", "rows")),
        ((3, 17, 127, 3), ("rows", "columns")),
        ((2, 127, 17, 33), ("columns", "rows")),
        ((1, 65, 70, 1100), ("columns", "columns")),
        ((1, 5, 300, 40), ("apart", "padded")),
        ((2, 40, 12, 19), ("padded", "apart")),
        ((1, 40, 33, 19), ("one row", "one row")),
    ],
)
def test_products(
    driver: OpenCLDriver, way: str, sizes: tuple[int, int, int, int], layouts: tuple[str, str]
) -> None:
    check(driver, way, sizes, layouts)


@pytest.mark.parametrize(
    ("sizes", "layouts"),
    [
        ((1, 300, 520, 1030), ("rows", "rows")),  # K in blocks, several tiles
        ((1, 2, 2100, 90), ("rows", "rows")),  # the right side read in its order
        ((3, 1, 700, 90), ("rows", "columns")),  # items one by one
        ((1, 333, 3, 61), ("padded", "columns")),
        ((1, 500, 1, 30), ("columns", "columns")),
        ((1, 9, 7, 2100), ("rows", "columns")),
        ((1, 130, 400, 700), ("columns", "columns")),
    ],
)
def test_products_whose_size_matters_to_a_cpu(
    driver: OpenCLDriver, sizes: tuple[int, int, int, int], layouts: tuple[str, str]
) -> None:
    check(driver, "cpu", sizes, layouts)


SIZE = st.one_of(st.integers(1, 40), st.integers(41, 270))
LAYOUT = st.sampled_from(["rows", "columns", "apart", "padded"])


@settings(max_examples=examples(20, quick=8), deadline=None)
@given(
    way=st.sampled_from(["cpu", "cpu", "gpu", "gpu-few"]),
    sizes=st.tuples(st.integers(1, 3), SIZE, SIZE, SIZE),
    layouts=st.tuples(LAYOUT, LAYOUT),
)
def test_any_product(
    driver: OpenCLDriver, way: str, sizes: tuple[int, int, int, int], layouts: tuple[str, str]
) -> None:
    check(driver, way, sizes, layouts)


@pytest.mark.parametrize("way", ["cpu", "gpu", "gpu-few"])
@pytest.mark.parametrize(
    ("sizes", "layouts"),
    [
        ((2, 37, 50, 29), ("rows", "rows")),
        ((2, 37, 50, 29), ("columns", "columns")),
        ((2, 37, 50, 29), ("apart", "apart")),
        ((2, 2, 50, 29), ("rows", "columns")),
    ],
)
def test_half_precision_storage(
    driver: OpenCLDriver, way: str, sizes: tuple[int, int, int, int], layouts: tuple[str, str]
) -> None:
    check(driver, way, sizes, layouts, ("float16", "float16"))


@pytest.mark.parametrize("way", ["cpu", "gpu", "gpu-few"])
@pytest.mark.parametrize("layouts", [("rows", "columns"), ("columns", "apart")])
@pytest.mark.parametrize("rows", [1, 3, 37])
def test_bfloat16_storage(driver: OpenCLDriver, way: str, layouts: tuple[str, str], rows: int) -> None:
    check(driver, way, (2, rows, 50, 29), layouts, ("bfloat16", "bfloat16"))


@pytest.mark.parametrize("way", ["cpu", "gpu"])
def test_one_side_in_half_precision(driver: OpenCLDriver, way: str) -> None:
    check(driver, way, (1, 20, 30, 50), ("rows", "rows"), ("float32", "float16"))
    check(driver, way, (1, 2, 1500, 47), ("rows", "rows"), ("float16", "float32"))


@pytest.mark.parametrize("layouts", [("rows", "rows"), ("columns", "columns")])
def test_little_local_memory(driver: OpenCLDriver, layouts: tuple[str, str]) -> None:
    check(driver, "cpu-small", (1, 70, 61, 900), layouts)


@pytest.mark.parametrize("way", ["cpu", "gpu"])
def test_an_epilogue_and_batches_that_lie_in_another_order(driver: OpenCLDriver, way: str) -> None:
    """Heads side by side, as attention has them: matrix (i, j) begins at i * 12 * 4 * 10 + j * 10."""
    rng = np.random.default_rng(0)
    left = rng.standard_normal((2, 12, 4, 10)).astype(np.float32)  # text, row, head, item
    right = rng.standard_normal((2, 10, 4, 21)).astype(np.float32)
    bias = rng.standard_normal(21).astype(np.float32)
    problem = Problem(
        8,
        12,
        21,
        10,
        Matrix(Memory("in0", "float32"), BATCH // 4 * 480 + BATCH % 4 * 10, 40, 1),
        Matrix(Memory("in1", "float32"), BATCH // 4 * 840 + BATCH % 4 * 21, 84, 1),
    )

    def epilogue(row: Expr, column: Expr, product: Var) -> list[Statement]:
        place = (BATCH * 12 + row) * 21 + column
        added, biased = Var("added", product.type), Var("biased", product.type)
        return [
            Let(added.name, Load(added.type, "in2", "float32", column, 1)),
            Let(biased.name, product + added),
            Store(call("tanh", biased), "out0", "float32", place),
            Store(biased, "out1", "float32", place),
        ]

    source = kernel_source(problem, way_of(driver, way), epilogue, 2, 1)
    empty = np.zeros((8, 12, 21), np.float32)
    out, kept, *_ = launch(driver, source, [guarded(array) for array in (empty, empty, left, right, bias)])
    expected = np.einsum("trhk,tkhc->thrc", left.astype(np.float64), right) + bias
    inside = slice(GUARD, -GUARD)
    np.testing.assert_allclose(kept[inside].reshape(2, 4, 12, 21), expected, atol=1e-5)
    np.testing.assert_allclose(out[inside].reshape(2, 4, 12, 21), np.tanh(expected), atol=1e-5)


@pytest.mark.parametrize("way", ["cpu", "gpu"])
def test_a_product_comes_out_the_same_every_time(driver: OpenCLDriver, way: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (guarded(rng.standard_normal((150, 150)).astype(np.float32)) for _ in range(2))
    operands = [Matrix(Memory(name, "float32"), Const(0), 150, 1) for name in ("in0", "in1")]
    problem = Problem(1, 150, 150, 150, *operands)

    def epilogue(row: Expr, column: Expr, product: Var) -> list[Statement]:
        return [Store(product, "out0", "float32", row * 150 + column)]

    source = kernel_source(problem, way_of(driver, way), epilogue, 1)
    empty = guarded(np.zeros((150, 150), np.float32))
    first, second = (launch(driver, source, [empty, a, b])[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "sizes", [(3, 5, 7), (100, 200, 300), (2048, 384, 1536), (700, 3000, 900), (64, 20000, 64)]
)
@pytest.mark.parametrize("local_bytes", [1 << 15, 1 << 18, 1 << 20])
def test_kernels_for_many_sizes_take_no_more_memory_than_there_is(
    sizes: tuple[int, int, int], local_bytes: int
) -> None:
    rows, inner, columns = sizes
    capabilities = replace(opencl_capabilities(NATIVE), local_bytes=local_bytes)
    for left, right in ((1, 1), (0, 0)):  # contiguous, and transposed
        problem = Problem(
            1,
            rows,
            columns,
            inner,
            Matrix(Memory("in0", "float32"), Const(0), *((inner, 1) if left else (1, rows))),
            Matrix(Memory("in1", "float32"), Const(0), *((columns, 1) if right else (1, inner))),
            varied=True,
        )
        k = KernelBuilder("product", capabilities, ["float32"], ["float32"] * 2)
        arrays = cpu_matmul(k, problem, capabilities, lambda *_: []).arrays
        assert arrays
        assert all(dtype == "float32" for dtype, _, _ in arrays)
        assert 4 * sum(length for _, _, length in arrays) <= local_bytes
