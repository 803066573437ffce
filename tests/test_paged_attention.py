"""Attention to keys and values in pages: kernels of CPUs and GPUs, and products, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, WEBGPU_KINDS, opencl_threads
from test_cuda_sources import Imagined
from test_graph import at
from test_linear import imitated
from test_matmul_kernel import GUARD, launch, way_of

import penstock as ps
from penstock import Device
from penstock.config import Settings
from penstock.drivers.cuda import compile_text
from penstock.drivers.driver import Capabilities
from penstock.drivers.opencl import OpenCLDriver
from penstock.fusion.groups import partition
from penstock.graph import paged_attention as graph
from penstock.graph.decompose import decompose
from penstock.graph.shaping import reshape, slice_axis
from penstock.kernels.cache import whole_text
from penstock.kernels.dialects.opencl import OpenCL
from penstock.kernels.lower import Lowering, fusible, write
from penstock.kernels.source import KernelSource
from penstock.tensor.attention import paged_attention, paged_step

PAGE = 16
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", params=["host", "vectors", "threads", *CUDA_KINDS, *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    own = {"threads": opencl_threads, "vectors": lambda: OpenCLDriver(NATIVE, "opencl-vectors")}
    driver = {**DRIVERS, **own}[request.param]()
    device = Device.over(driver, Settings(force_kernels=True, compile_ahead=False))
    yield device
    device.close()


def naive(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    window: int | None,
    cap: float | None,
) -> np.ndarray:
    """The attended values of a single query, by the definition, in float64."""
    keys, values = keys[-(window or len(keys)) :], values[-(window or len(values)) :]
    scores = keys @ query * scale
    scores = np.tanh(scores / cap) * cap if cap else scores
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def check(
    device: Device,
    shape: tuple[int, ...],
    reach: int,
    window: int | None = None,
    cap: float | None = None,
    dtype: Any = np.float32,
) -> None:
    rows, length, heads, key_heads, size = shape
    width = -(-reach // PAGE)
    count = rows * width + 3
    query = RNG.standard_normal((rows, heads, length, size)).astype(dtype)
    pages = RNG.standard_normal((2, count, key_heads, PAGE, size)).astype(dtype)
    table = RNG.permutation(count)[: rows * width].reshape(rows, width).astype(np.int32)
    last = RNG.integers(0, reach, (rows, length)).astype(np.int32)
    last[0, 0], last[-1, -1] = 0, reach - 1
    given = (ps.asarray(array, device=device) for array in (query, pages, table, last))
    result = paged_attention(*given, size**-0.5, window, cap).numpy().astype(np.float64)
    wide = pages.astype(np.float64)
    for row in range(rows):
        keys, values = (
            wide[side][table[row]].swapaxes(0, 1).reshape(key_heads, -1, size) for side in range(2)
        )
        for head in range(heads):
            shared = head * key_heads // heads
            for at_query in range(length):
                end = last[row, at_query] + 1
                own = query[row, head, at_query].astype(np.float64)
                expected = naive(own, keys[shared, :end], values[shared, :end], size**-0.5, window, cap)
                tolerance = {np.float32: 1e-5, np.float64: 1e-12}.get(dtype, 0.02)
                np.testing.assert_allclose(result[row, head, at_query], expected, atol=tolerance)


SHAPES = [
    # rows, queries, heads, heads of keys, size of a head; positions, window, softcap
    ((1, 1, 4, 2, 8), 40, None, None),
    ((3, 1, 4, 4, 64), 100, None, None),
    ((2, 5, 3, 1, 16), 64, 20, None),
    ((1, 1, 3, 1, 20), 300, None, 30.0),  # a size that is no power of two
    ((2, 1, 2, 1, 80), 2048, 500, None),  # several splits
    ((1, 2, 4, 2, 256), 1030, None, None),
    ((1, 1, 11, 1, 5), 33, None, None),  # more heads than are computed together
    ((2, 40, 4, 2, 16), 90, 30, 5.0),  # many queries
    ((1, 33, 3, 1, 20), 300, None, None),
    ((1, 17, 2, 2, 256), 150, None, None),
    ((2, 20, 4, 4, 80), 200, 70, None),
]


@pytest.mark.slow("webgpu-case3", *(f"case{number}" for number in (1, 2, 4, 5, 6, 8, 9, 10)))
@pytest.mark.parametrize("case", SHAPES, ids=[f"case{number}" for number in range(len(SHAPES))])
def test_each_query_attends_to_its_positions(device: Device, case: tuple[Any, ...]) -> None:
    check(device, *case)


@pytest.mark.slow("float16", "many")
@pytest.mark.parametrize("queries", [1, 20], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision(device: Device, dtype: Any, queries: int) -> None:
    check(device, (2, queries, 4, 2, 16), 50, dtype=dtype)


@pytest.mark.parametrize("device", ["host", "vectors", "threads"], indirect=True)
@pytest.mark.parametrize("queries", [1, 20], ids=["few", "many"])
def test_double_precision(device: Device, queries: int) -> None:
    check(device, (2, queries, 4, 2, 16), 100, dtype=np.float64)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [64, 80, 256])
@pytest.mark.parametrize("queries", [1, 64])
@pytest.mark.parametrize("clusters", [False, True], ids=["alone", "clusters"])
def test_nvrtc_takes_it(dtype: Any, size: int, queries: int, clusters: bool) -> None:
    capabilities = replace(Imagined(tensor_cores=True).capabilities, max_group_size=1024, clusters=clusters)
    query, pages = np.ones((2, queries, 8, size), dtype), np.ones((2, 300, 2, PAGE, size), dtype)
    table, last = np.ones((2, 128), np.int32), np.ones((2, queries), np.int32)
    node = graph.paged_attention(*map(at, (query, pages, table, last)), 0.1, 1500, 5.0)
    nodes = decompose([node], capabilities)
    groups = partition(nodes, lambda node: fusible(node, capabilities))
    if dtype is not np.float32 and queries > 1:
        assert (len(groups) == 1) == (size <= 128), "larger heads are products of matrices"
    if len(groups) > 1:
        return
    lowering = write(groups[0], capabilities, "x")
    assert lowering is not None
    combined = queries > 1 or (clusters and dtype is not np.float32 and size == 64)
    assert len(lowering.launches) == (1 if combined else 2), "splits, and what combines them"
    text = whole_text([launch.source for launch in lowering.launches], "cuda")
    assert compile_text(text, "sm_90a").startswith(b"\x7fELF")


def test_prompts_on_tensor_cores_read_queries_through_views() -> None:
    capabilities = replace(Imagined(tensor_cores=True).capabilities, max_group_size=1024)
    dtype = ml_dtypes.bfloat16
    packed, pages = np.ones((2, 40, 3, 4, 64), dtype), np.ones((2, 9, 4, PAGE, 64), dtype)
    query = reshape(slice_axis(at(packed), 2, 0, 1), (2, 40, 4, 64))
    given = at(pages), at(np.ones((2, 4), np.int32)), at(np.ones((2, 40), np.int32))
    nodes = decompose([graph.paged_attention(query, *given, 0.1)], capabilities)
    (group,) = partition(nodes, lambda node: fusible(node, capabilities))
    assert packed.shape in [node.shape for node in group.inputs]


PROMPTS = [
    # rows, queries, heads, heads of keys, size of a head; positions, window, softcap
    ((2, 70, 4, 2, 64), 200, None, None),
    ((1, 130, 2, 2, 128), 300, 100, None),
    ((3, 17, 3, 1, 16), 90, 30, 5.0),
    ((1, 64, 2, 1, 80), 129, None, 20.0),
    ((2, 33, 2, 2, 32), 700, 9, None),
]


FEW_QUERIES = [
    ((2, 1, 8, 2, 64), 1060, None, None),
    ((1, 3, 4, 4, 128), 700, 300, 5.0),
    ((3, 1, 8, 1, 128), 2048, None, None),
    ((1, 1, 8, 2, 64), 20000, None, None),  # too many positions for a cluster
]


@pytest.mark.parametrize("device", CUDA_KINDS, indirect=True)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", FEW_QUERIES, ids=[f"few{number}" for number in range(len(FEW_QUERIES))])
def test_few_queries_on_tensor_cores(device: Device, dtype: Any, case: tuple[Any, ...]) -> None:
    check(device, *case, dtype=dtype)


@pytest.mark.parametrize("device", CUDA_KINDS, indirect=True)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", PROMPTS, ids=[f"prompt{number}" for number in range(len(PROMPTS))])
def test_prompts_on_tensor_cores(device: Device, dtype: Any, case: tuple[Any, ...]) -> None:
    check(device, *case, dtype=dtype)


# Steps, which put a position before they attend


def check_step(
    device: Device,
    shape: tuple[int, ...],
    reach: int,
    window: int | None = None,
    dtype: Any = np.float32,
    lengths: Sequence[int] = (),
) -> Any:
    """Of operands that are computed from others; every second row is not taken. The jitted step.

    `lengths` are those of the rows, or drawn.
    """
    rows, heads, key_heads, size = shape
    width = -(-reach // PAGE)
    count = rows * width + 3

    def on_device(array: np.ndarray) -> ps.Tensor:
        return ps.asarray(array, device=device).realize()

    draw = [RNG.standard_normal((rows, 1, number * size)) for number in (heads, key_heads, key_heads)]
    flat = [on_device(array.astype(dtype)) for array in draw]
    pages = RNG.standard_normal((2, count, key_heads, PAGE, size)).astype(dtype)
    table = RNG.permutation(count)[: rows * width].reshape(rows, width).astype(np.int32)
    last = RNG.integers(0, reach, (rows, 1)).astype(np.int32)
    last[0, 0], last[-1, -1] = 0, reach - 1
    if lengths:
        last[:, 0] = np.subtract(lengths, 1)
    slots = np.array([row if row % 2 == 0 else -1 for row in range(rows)], np.int32)
    given = [on_device(array) for array in (table, last, slots)]
    counters = on_device(np.zeros(rows * heads, np.int32))

    def operands(*flat: ps.Tensor) -> list[ps.Tensor]:
        query, key, value = (ps.permute_dims(ps.reshape(x, (rows, 1, -1, size)), (0, 2, 1, 3)) for x in flat)
        return [ps.flip(query, axis=-1) * 2, ps.flip(key, axis=-1) * 2, value]

    query, key, value = operands(*flat)
    expected, new = pages.copy(), [key.numpy(), value.numpy()]
    for row in np.flatnonzero(slots >= 0):
        place = (table[row, last[row, 0] // PAGE], slice(None), last[row, 0] % PAGE)
        expected[0][place], expected[1][place] = (side[row, :, 0] for side in new)
    attended = paged_attention(query, on_device(expected), *given[:2], size**-0.5, window)
    kept = on_device(pages)

    @ps.jit
    def step(*args: ps.Tensor) -> ps.Tensor:  # which replaces the pages
        choices = (size**-0.5, window, None, counters)
        result, after = paged_step(*operands(*args[:3]), kept, *args[3:], *choices)
        kept._rebind(after)
        return result

    copied = paged_step(*operands(*flat), on_device(pages), *given, size**-0.5, window)
    with ps.no_grad():
        in_place = [(step(*flat, *given), kept) for _ in range(3)]
    for result, after in (copied, *in_place):
        np.testing.assert_array_equal(after.numpy(), expected)
        near = 1e-5 if dtype is np.float32 else 0.02
        result, wanted = (x.numpy().astype(np.float64) for x in (result, attended))
        np.testing.assert_allclose(result, wanted, atol=near)
    assert not counters.numpy().any()
    return step


STEPS = [
    ((1, 4, 2, 8), 40, None),
    ((3, 4, 4, 64), 100, None),
    ((3, 2, 1, 20), 300, 50),  # a size that is no power of two
    ((2, 2, 1, 80), 2048, None),  # several splits
    ((1, 11, 1, 5), 33, None),  # more heads than are computed together
]


@pytest.mark.slow("webgpu", *(f"step{number}" for number in (0, 2, 3, 4)))
@pytest.mark.parametrize("case", STEPS, ids=[f"step{number}" for number in range(len(STEPS))])
def test_a_step_puts_a_position_and_attends(device: Device, case: tuple[Any, ...]) -> None:
    check_step(device, *case)


@pytest.mark.slow
def test_a_step_in_half_precision(device: Device) -> None:
    check_step(device, (3, 4, 2, 16), 50, dtype=ml_dtypes.bfloat16)


@pytest.mark.parametrize("device", CUDA_KINDS, indirect=True)
@pytest.mark.parametrize(
    ("shape", "reach"), [((3, 8, 2, 64), 700), ((2, 2, 2, 128), 300), ((1, 8, 1, 64), 2048)]
)
def test_a_step_on_tensor_cores(device: Device, shape: tuple[int, ...], reach: int) -> None:
    check_step(device, shape, reach, dtype=ml_dtypes.bfloat16)


LENGTHS = 1, 15, 16, 17, 300, 1060


@pytest.mark.slow("float16", "shrinking")
@pytest.mark.parametrize("device", CUDA_KINDS, indirect=True)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1]], ids=["growing", "shrinking"])
@pytest.mark.parametrize("window", [None, 300, 1000])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [(2, 2, 64), (8, 2, 64), (8, 1, 128)])
def test_steps_of_all_lengths_in_long_tables(
    device: Device, heads: tuple[int, ...], dtype: Any, window: int | None, lengths: Sequence[int]
) -> None:
    check_step(device, (6, *heads), 2048, window, dtype, lengths)


# Tensor cores, which a CPU imitates

PACKS = """
#define PACK_LOW(a, b) (((a) & 0xffff) | ((b) << 16))
#define PACK_HIGH(a, b) (((a) >> 16) | ((b) & 0xffff0000))
"""
TILED = [
    # rows, heads, heads of keys, size of a head; positions, window, softcap; splits
    ((3, 4, 1, 64), 300, None, None, 1),
    ((2, 8, 1, 64), 150, 70, None, 1),
    ((1, 6, 2, 128), 90, 25, 5.0, 1),
    ((2, 2, 2, 64), 20, None, None, 1),
    ((2, 4, 1, 64), 640, None, 5.0, 1),  # positions are read ahead
    ((3, 2, 2, 64), 900, 600, None, 1),
    ((2, 4, 1, 64), 512, None, None, 4),
    ((3, 8, 1, 128), 256, None, 5.0, 2),
]


def tiled(driver: OpenCLDriver, splits: int) -> Capabilities:
    """A device with tensor cores; where there are splits, it has clusters, and room for many workgroups."""
    can = replace(way_of(driver, "gpu"), tensor_cores=True, max_group_size=1024, local_bytes=48 << 10)
    return replace(can, clusters=True, compute_units=100) if splits > 1 else can


def run_imitated(
    driver: OpenCLDriver, source: KernelSource, arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """What a kernel for tensor cores makes of these buffers."""
    imitation = imitated(source)
    imitation = replace(imitation, body=f"{PACKS}{imitation.body}")
    results = launch(driver, imitation, [np.pad(array.ravel(), GUARD) for array in arrays])
    return [result[GUARD:-GUARD].reshape(array.shape) for result, array in zip(results, arrays, strict=True)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, (np.float16, ml_dtypes.bfloat16)[number % 2]) for number, case in enumerate(TILED)],
    ids=[f"tiled{number}" for number in range(len(TILED))],
)
def test_tiles_of_positions(case: tuple[Any, ...], dtype: Any) -> None:
    (rows, heads, key_heads, size), reach, window, cap, splits = case
    driver = OpenCLDriver(NATIVE, "tiles")
    can = tiled(driver, splits)
    width = -(-reach // PAGE)
    count = rows * width + 3
    query = RNG.standard_normal((rows, 1, heads, size)).astype(dtype)
    pages = RNG.standard_normal((2, count, key_heads, PAGE, size)).astype(dtype)
    table = RNG.permutation(count)[: rows * width].reshape(rows, width).astype(np.int32)
    last = RNG.integers(0, reach, (rows, 1)).astype(np.int32)
    last[-1, -1] = reach - 1
    for row in range(rows):  # what lies after the last position may be anything
        page, offset = table[row, last[row, 0] // PAGE], last[row, 0] % PAGE
        pages[:, page, :, offset + 1 :] = np.nan
    inputs = [at(array) for array in (query, pages, table, last)]
    node = graph.paged_attention(*inputs, size**-0.5, window or 0, cap or 0.0)
    (group,) = partition([node], lambda node: fusible(node, can))
    lowering = write(group, can, "x")
    assert lowering is not None
    (call,) = lowering.launches
    assert "MULTIPLY_TILES" in call.source.text
    assert (call.source.cluster, lowering.scratch) == (splits, ())
    arrays = [np.zeros(node.shape, dtype), query, pages, table, last]
    result = run_imitated(driver, call.source, arrays)[0].astype(np.float64)
    driver.close()
    for row, head in np.ndindex(rows, heads):
        end, shared = last[row, 0] + 1, head * key_heads // heads
        keys, values = (
            side[table[row]].swapaxes(0, 1).reshape(key_heads, -1, size)[shared, :end].astype(np.float64)
            for side in pages
        )
        expected = naive(query[row, 0, head].astype(np.float64), keys, values, size**-0.5, window, cap)
        np.testing.assert_allclose(result[row, 0, head], expected, atol=0.02)


@pytest.mark.parametrize(
    ("heads", "window", "splits"), [((4, 1, 64), None, 4), ((2, 2, 64), 400, 2), ((8, 1, 128), None, 4)]
)
def test_a_cluster_combines_the_splits_of_a_step(
    heads: tuple[int, int, int], window: int | None, splits: int
) -> None:
    """Every second row is not taken, so that it attends to what its page has.

    The workgroups of a cluster go as often through their loops: for a CPU, they are a single one.
    """
    lengths = 1, 15, 16, 17, 300, 500
    (count, key_heads, size), rows, dtype = heads, len(lengths), ml_dtypes.bfloat16
    driver = OpenCLDriver(NATIVE, "cluster")
    query, key, value = (
        RNG.standard_normal((rows, 1, number, size)).astype(dtype) for number in (count, key_heads, key_heads)
    )
    width, number = 512 // PAGE, 100
    pages = RNG.standard_normal((2, number, key_heads, PAGE, size)).astype(dtype)
    table = RNG.integers(0, number, (rows, width)).astype(np.int32)
    used = [-(-length // PAGE) for length in lengths]
    own = np.split(RNG.permutation(number)[: sum(used)], np.cumsum(used)[:-1])
    for row, numbers in enumerate(own):
        table[row, : len(numbers)] = numbers
    last = np.subtract(lengths, 1).astype(np.int32)
    slots = np.arange(rows, dtype=np.int32) % 2 - 1
    arrays = [query, key, value, pages, table, last[:, np.newaxis], slots]
    can = tiled(driver, splits)
    steps = graph.paged_step([at(array) for array in arrays], size**-0.5, window)
    (group,) = partition(steps, lambda node: fusible(node, can))
    lowering = write(group, can, "x")
    assert lowering is not None
    source = lowering.launches[-1].source
    assert (source.grid, source.cluster) == ((rows * key_heads * splits,), splits)
    assert lowering.scratch == ()
    result, after, *_ = run_imitated(driver, source, [np.zeros_like(query), pages.copy(), *arrays])
    driver.close()
    for row in np.flatnonzero(slots >= 0):
        place = table[row, last[row] // PAGE], slice(None), last[row] % PAGE
        pages[0][place], pages[1][place] = key[row, 0], value[row, 0]
    np.testing.assert_array_equal(after, pages)
    for row, head in np.ndindex(rows, count):
        keys, values = (
            side[table[row]].swapaxes(0, 1).reshape(key_heads, -1, size)[head * key_heads // count]
            for side in pages.astype(np.float64)
        )
        seen = slice(last[row] + 1)
        expected = naive(
            query[row, 0, head].astype(np.float64), keys[seen], values[seen], size**-0.5, window, None
        )
        np.testing.assert_allclose(result[row, 0, head].astype(np.float64), expected, atol=0.02)


# What CUDA does, for PoCL: each of its threads sees the writes of the others in order.
_LAST = """
static inline int COMES_LAST(GLOBAL const int *counter, int count) {
    int last = atomic_inc((volatile GLOBAL int *)counter) == count - 1;
    if (last) atomic_xchg((volatile GLOBAL int *)counter, 0);
    return last;
}
"""


def test_the_last_workgroup_combines_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenCL, "device_atomics", True)
    monkeypatch.setattr(OpenCL, "optional_preludes", {**OpenCL.optional_preludes, "COMES_LAST": _LAST})
    device = Device.over(opencl_threads(), Settings(force_kernels=True, compile_ahead=False))
    step = check_step(device, (2, 2, 2, 16), 1500)
    ((captured,),) = step._captured.values()
    names = [call.source.name for part in captured.program.schedule.groups for call in part.calls]
    assert sum("step_over_pages" in name for name in names) == 1
    assert not any("combine" in name for name in names)
    device.close()


def step_on_hopper(
    heads: tuple[int, int, int], rows: int, reach: int, window: int | None = None, cap: float | None = None
) -> Lowering:
    """A step with counters, in bfloat16."""
    can = replace(Imagined(tensor_cores=True).capabilities, max_group_size=1024, clusters=True)
    (count, key_heads, size), dtype = heads, ml_dtypes.bfloat16
    arrays: list[Any] = [np.ones((rows, 1, number, size), dtype) for number in (count, key_heads, key_heads)]
    arrays += [np.ones((2, 300, key_heads, PAGE, size), dtype), np.ones((rows, reach // PAGE), np.int32)]
    arrays += [np.ones(shape, np.int32) for shape in ((rows, 1), (rows,), (rows * count,))]
    steps = graph.paged_step([at(array) for array in arrays], 0.1, window, cap)
    (group,) = partition(steps, lambda node: fusible(node, can))
    lowering = write(group, can, "x")
    assert lowering is not None
    return lowering


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (1000, 5.0)])
def test_nvrtc_takes_a_step_in_clusters(rows: int, size: int, window: int | None, cap: float | None) -> None:
    lowering = step_on_hopper((32, 8, size), rows, 2048, window, cap)
    (source,) = (launch.source for launch in lowering.launches)
    text = whole_text([source], "cuda")
    assert ("COMES_LAST" in text) == (rows == 8), "two workgroups of a compute unit are in no clusters"
    assert ("CLUSTER_LOAD" in text) == (rows == 1), "32 rows keep all of a device busy without splits"
    assert compile_text(text, "sm_90").startswith(b"\x7fELF")


def test_which_steps_are_combined_in_clusters() -> None:
    def grid_and_cluster(*case: Any) -> tuple[int, int]:
        lowering = step_on_hopper(*case)
        (source,) = (launch.source for launch in lowering.launches)
        assert bool(lowering.scratch) == ("COMES_LAST" in source.text) == bool(lowering.restores)
        return source.grid[0], source.cluster

    llama = 32, 8, 64
    assert grid_and_cluster(llama, 1, 2048) == (64, 8)
    assert grid_and_cluster(llama, 2, 2048) == (128, 8), "each has a compute unit for itself"
    assert grid_and_cluster(llama, 8, 2048) == (256, 1), "each shares a compute unit"
    assert grid_and_cluster(llama, 32, 2048) == (256, 1), "there is nothing to combine"
    assert grid_and_cluster(llama, 1, 512) == (32, 4), "each warp has a tile of positions"
    assert grid_and_cluster(llama, 1, 8192) == (64, 8)
    assert grid_and_cluster(llama, 1, 32768) == (264, 1), "more workgroups read faster"
    assert grid_and_cluster(llama, 1, 32768, 1000) == (32, 4), "a window is short"
    assert grid_and_cluster(llama, 2, 8192) == (128, 8)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_nvrtc_takes_a_step(tensor_cores: bool) -> None:
    capabilities = replace(Imagined(tensor_cores).capabilities, max_group_size=1024)
    dtype = ml_dtypes.bfloat16
    arrays: list[Any] = [np.ones((2, 1, heads, 64), dtype) for heads in (8, 2, 2)]
    arrays += [np.ones((2, 300, 2, PAGE, 64), dtype), np.ones((2, 128), np.int32)]
    arrays += [np.ones(shape, np.int32) for shape in ((2, 1), (2,), (16,))]
    inputs = [at(array) for array in arrays]
    (group,) = partition(graph.paged_step(inputs, 0.1), lambda node: fusible(node, capabilities))
    lowering = write(group, capabilities, "x")
    assert lowering is not None
    assert len(lowering.launches) == 1
    (source,) = (launch.source for launch in lowering.launches)
    text = whole_text([source], "cuda")
    assert "COMES_LAST" in text
    assert compile_text(text, "sm_90").startswith(b"\x7fELF")
    if tensor_cores:  # pages are read while earlier launches compute queries, keys and values
        early, waits, _ = source.text.partition("WAIT_FOR_EARLIER;")
        assert waits
        assert "in3 + " in early
        assert all(f"in{operand} + " not in early and f"in{operand}[" not in early for operand in range(3))
        outputs = source.text.count("*out")
        assert [at - outputs for at in source.ahead] == [3, 4, 5, 6]
