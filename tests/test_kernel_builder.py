"""Kernels built in the IR: the same body runs in every language, and compiles with NVRTC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, WEBGPU_KINDS, opencl_threads

from penstock import Device
from penstock.drivers.cuda import compile_text
from penstock.drivers.driver import Capabilities
from penstock.drivers.opencl import OpenCLDriver
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.cache import whole_text
from penstock.kernels.ir.expressions import Const, Expr, Type, Var, all_of
from penstock.kernels.source import KernelSource

THREADS = 64
DTYPES = ("bool", "int8", "uint16", "int32", "uint32", "int64", "float16", "bfloat16", "float32")


@pytest.fixture(scope="module", params=["cpu", "threads", *CUDA_KINDS, *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    own = {"threads": opencl_threads, "cpu": lambda: OpenCLDriver(NATIVE, "opencl-cpu")}
    driver = {**own, **DRIVERS}[request.param]()
    device = Device.over(driver)
    yield device
    device.close()


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def maximum_and_count(dtype: str, length: int, capabilities: Capabilities) -> KernelSource:
    """For each row: its largest item, how many are equal to it, and each item's place from the end."""
    k = KernelBuilder("row_maximum", capabilities, [dtype, "int32", "int64"], [dtype], ["int32"])
    x, (largest, count, places) = k.inputs[0], k.outputs
    (offset,) = k.scalars
    parts = k.shared("parts", x.type.dtype, THREADS)
    counts = k.shared("counts", "int32", 2, atomic=True)
    begin = k.let("begin", k.group() * length)
    top = k.variable("top", k.load(x, begin))
    with k.loop("i", k.thread, length, THREADS) as i:
        item = k.let("item", k.load(x, begin + i))
        k.assign(top, k.call("maximum", top, item))
        k.store(places, begin + i, (length - 1 - i + offset).cast("int64"))
    k.store(parts, k.thread, top)
    with k.when(k.thread.eq(0)):
        k.store(counts, 0, 0)
        k.store(counts, 1, 0)
    reach = k.variable("reach", THREADS // 2)
    with k.repeat(reach > 0):
        k.barrier()
        with k.when(k.thread < reach):
            other = k.let("other", k.load(parts, k.thread + reach))
            k.assign(top, k.call("maximum", top, other))
            k.store(parts, k.thread, top)
        k.assign(reach, reach // 2)
    k.barrier()
    k.assign(top, k.load(parts, 0))
    with k.loop("j", k.thread, length, THREADS) as j:
        equal = k.let("equal", k.call("equal", k.load(x, begin + j), top))
        with k.when(equal):
            k.atomic_add(counts, 0, 1)
        with k.otherwise():
            k.atomic_add(counts, 1, 1, "before")
    k.barrier()
    with k.when(all_of([k.thread.eq(0), ~(k.thread > 0)])):
        k.store(largest, k.group(), top)
        total = k.let("total", k.load(counts, 0))
        whole = k.let("whole", total + k.load(counts, 1))
        k.store(count, k.group(), k.select(whole.eq(length), total, -1))
    return k.source((3,), (THREADS,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_body_runs_in_every_language(device: Device, dtype: str) -> None:
    capabilities = device.capabilities
    if dtype == "int64" and not capabilities.int64:
        pytest.skip("the device has no int64")
    source = maximum_and_count(dtype, 150, capabilities)
    text = whole_text([source], capabilities.language)
    kernel = device.compile(text, {source.name: source.signature})[source.name]
    x = (
        np.random.default_rng(1)
        .integers(0, 2 if dtype == "bool" else 90, (3, 150))
        .astype(numpy_dtype(dtype))
    )
    results = [np.zeros(3, x.dtype), np.zeros(3, np.int32), np.zeros((3, 150), np.int64)]
    buffers = [device.upload(value.reshape(-1).view(np.uint8)) for value in (*results, x)]
    device.stream.launch(kernel, source.grid, source.group, (*buffers, 0, 0, 0, 0, 5))
    largest, count, places = (
        device.download(buffer).wait()[: value.nbytes].view(value.dtype).reshape(value.shape)
        for buffer, value in zip(buffers, results, strict=False)
    )
    np.testing.assert_array_equal(largest, x.max(1))
    np.testing.assert_array_equal(count, (x == x.max(1, keepdims=True)).sum(1))
    np.testing.assert_array_equal(places, np.broadcast_to(np.arange(149, -1, -1) + 5, (3, 150)))


def scaled_rows(dtype: str, rows: int, width: int, capabilities: Capabilities) -> KernelSource:
    """Rows by an index, four items at a time, times their number; the sums of indices; and -1 - index."""
    k = KernelBuilder("scaled_rows", capabilities, [dtype, "int32", "int64"], [dtype, "int64"])
    (x, index), (out, sums, negated) = k.inputs, k.outputs
    told = k.shared("told", "int32", 1)
    with k.when(k.thread.eq(THREADS - 1)):
        k.store(told, 0, width // 4)
    steps = k.uniform("steps", told)
    row = k.let("row", k.load_index(index, k.group() * THREADS + k.thread, rows))
    place = k.let("place", k.group() * THREADS + k.thread)
    k.store(negated, place, -1 - row)
    total = k.variable("total", k.select(row >= 0, row, 0))
    if capabilities.vector_width == 1:
        total = k.block_reduce("whole", "sum", total, THREADS, THREADS)
    with k.when(k.thread.eq(0)):
        k.store(sums, k.group(), total)
    source = k.pointer("source", x, row * width) if capabilities.vector_width > 1 else None
    with k.when(row >= 0), k.loop("step", 0, steps) as step:
        # A width of four in all languages; a CPU has vectors of eight only.
        if source is not None:
            for k4 in range(4):
                k.store(
                    out, place * width + step * 4 + k4, k.load(source, step * 4 + k4) * row.cast("float32")
                )
        else:
            four = k.let("four", k.load_vector(x, row * width + step * 4, 4, aligned=4))
            product = k.let("product", four * k.broadcast(row.cast("float32"), 4))
            total4 = k.variable("total4", k.identity("sum", "float32", 4))
            k.assign(total4, k.combine("sum", total4, product))
            k.store(out, place * width + step * 4, total4, aligned=4)
    return k.source((2,), (THREADS,))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_vectors_indices_and_sums_of_threads(device: Device, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(-4, 4, (9, 12)).astype(numpy_dtype(dtype))
    index = rng.integers(-3, 12, 2 * THREADS)
    index[3] = 1 << 40
    if device.capabilities.vector_width > 1:
        index %= 9
    source = scaled_rows(dtype, 9, 12, device.capabilities)
    text = whole_text([source], device.capabilities.language)
    kernel = device.compile(text, {source.name: source.signature})[source.name]
    results = [np.zeros((len(index), 12), x.dtype), np.zeros(2, np.int32), np.zeros(len(index), np.int64)]
    buffers = [device.upload(value.reshape(-1).view(np.uint8)) for value in (*results, x, index)]
    device.stream.launch(kernel, source.grid, source.group, (*buffers, 0, 0, 0, 0, 0))
    out, sums, negated = (
        device.download(buffer).wait()[: value.nbytes].view(value.dtype).reshape(value.shape)
        for buffer, value in zip(buffers, results, strict=False)
    )
    inside = (index >= 0) & (index < 9)
    rows = np.where(inside, index, 0)
    np.testing.assert_array_equal(out, np.where(inside[:, None], x[rows] * rows[:, None], 0).astype(x.dtype))
    np.testing.assert_array_equal(negated, np.where(inside, -1 - index, 0))
    if device.capabilities.vector_width == 1:
        np.testing.assert_array_equal(sums, rows.reshape(2, THREADS).sum(1))


def weighted(capabilities: Capabilities) -> KernelSource:
    """Vectors of the threads in reverse, their items too, times every seventh number, plus their own vector.

    Where threads have vectors, those of the first 40 threads only are their own.
    """
    k = KernelBuilder("weighted", capabilities, ["float32"], ["float32"])
    (x,), (out,) = k.inputs, k.outputs
    width = 4 if capabilities.vector_width == 1 else 8
    tile = k.shared("tile", "float32", THREADS * width, width=width)
    mask = k.thread < 40 if capabilities.vector_width == 1 else None
    own = k.let("own", k.load_vector(x, k.thread * width, width, width, mask))
    turned = k.let("turned", k.vector([k.lane(own, lane) for lane in reversed(range(width))]))
    k.store(tile, k.thread * width, turned)
    k.barrier()
    mirrored = (THREADS - 1 - k.thread) * width
    if capabilities.vector_width > 1:
        other = k.let("other", k.load_vector(k.pointer("last", tile, mirrored), 0, width))
    else:
        other = k.let("other", k.load_vector(tile, mirrored, width))
    total = k.variable("total", k.identity("sum", "float32", width))
    with k.loop("i", k.thread, 90, 7, unrolled=3) as i:
        k.multiply_add(total, i.cast("float32"), other)
    with k.loop("j", 0, 8, 1, unrolled=4) as j:
        k.multiply_add(total, j.cast("float32"), own)
    k.accumulate(total, "sum", own)
    k.store(out, k.thread * width, total, width)
    return k.source((1,), (THREADS,))


def test_vectors_of_a_workgroup_and_loops_in_parts(device: Device) -> None:
    capabilities = device.capabilities
    source = weighted(capabilities)
    kernel = device.compile(whole_text([source], capabilities.language), {source.name: source.signature})
    x = np.random.default_rng(3).integers(-9, 9, (THREADS, (4 if capabilities.vector_width == 1 else 8)))
    x = x.astype(np.float32)
    buffers = [device.upload(value.reshape(-1).view(np.uint8)) for value in (np.zeros_like(x), x)]
    device.stream.launch(kernel[source.name], source.grid, source.group, (*buffers, 0, 0))
    own = np.where(np.arange(THREADS)[:, None] < (40 if capabilities.vector_width == 1 else THREADS), x, 0)
    factors = np.array([sum(range(thread, 90, 7)) for thread in range(THREADS)])[:, None]
    result = device.download(buffers[0]).wait()[: x.nbytes].view(np.float32).reshape(x.shape)
    np.testing.assert_array_equal(result, factors * own[::-1, ::-1] + 29 * own)


def test_nvrtc_takes_it() -> None:
    capabilities = replace(DRIVERS["host"]().capabilities, language="cuda", vector_width=1)
    sources = [maximum_and_count(dtype, 150, capabilities) for dtype in DTYPES]
    sources += [scaled_rows(dtype, 9, 12, capabilities) for dtype in ("float32", "float16", "bfloat16")]
    sources.append(weighted(capabilities))
    for source in sources:
        assert compile_text(whole_text([source], "cuda"), "sm_80").startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("expr", "in_c", "in_wgsl"),
    [
        ((Var("a") + 1) * 2 - Var("b") % 3, "(a + 1) * 2 - b % 3", "(a + 1) * 2 - b % 3"),
        (Var("a") - (Var("b") - 1), "a - (b - 1)", "a - (b - 1)"),
        ((Var("a") & 7) + (Var("b") << 2), "(a & 7) + (b << 2)", "(a & 7) + (b << 2)"),
        (((Var("a") < 3) | (Var("b") > 1)) & (Var("a") < 9), "(a < 3 || b > 1) && a < 9", None),
        (Var("a").cast("uint32") < Const(5, Type("uint32")), "(uint)a < 5u", "u32(a) < 5u"),
        (Var("x", Type("float32")) + 0.5, "(x + 0.5f)", "opaque(fma(x, ONE, 0.5), ZERO)"),
        (Const(float("-inf"), Type("float32")), "-INFINITY", "bits_float(0xff800000u)"),
        (~(Var("a") < 3), "!(a < 3)", "!(a < 3)"),
    ],
)
def test_expressions_keep_their_meaning(expr: Expr, in_c: str, in_wgsl: str | None) -> None:
    capabilities = DRIVERS["host"]().capabilities
    for language, text in (("opencl", in_c), ("cuda", in_c), ("wgsl", in_wgsl or in_c)):
        k = KernelBuilder("f", replace(capabilities, language=language, vector_width=1), ["int32"], [])
        value = k.variable("value", expr)
        k.assign(value, expr)
        assert f"value = {text};" in k.source((1,), (1,)).text
