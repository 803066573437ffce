"""Allocations larger than a WebGPU binding: with small artificial windows, and at their true size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, WEBGPU_KINDS, compiled, examples, gpt_losses
from hypothesis import given, settings
from hypothesis import strategies as st
from test_random_graphs import check, poison
from test_templates import Bench, items
from test_templates import meaning as single

import penstock as ps
from penstock import Device, nn, optim
from penstock.compiler.schedule import Step
from penstock.drivers.driver import Kernel
from penstock.drivers.webgpu.wgsl import module_text, parse
from penstock.errors import CompileError, DeviceError, OutOfDeviceMemory
from penstock.execution import realize
from penstock.execution.executable import Executable
from penstock.graph import contraction, reducing
from penstock.graph.node import leaf
from penstock.kernels.lowering import fused
from penstock.memory import pool

if not WEBGPU_KINDS:
    pytest.skip("there is no adapter", allow_module_level=True)

from penstock.drivers.webgpu import WebGpuDriver, find_devices

ADAPTER = find_devices()[0]


class Watched(WebGpuDriver):
    """A driver that looks at what is bound together: WebGPU permits no byte twice where it may be written."""

    def _group(self, parts: Any, buffers: Any) -> Any:
        for (value, start, size), (other, begin, length) in combinations(parts, 2):
            assert value != other or start + size <= begin or begin + length <= start
        assert all(size <= self.capabilities.binding_bytes for _, _, size in parts)
        return super()._group(parts, buffers)


def opened(binding: int, buffers: int = 32, kind: type[WebGpuDriver] = Watched) -> Device:
    """A device with small bindings; WebGPU itself refuses larger bindings."""
    limits = {"maxStorageBufferBindingSize": binding, "maxStorageBuffersPerShaderStage": buffers}
    return Device.over(kind(replace(ADAPTER, limits=ADAPTER.limits | limits), "webgpu"), SMALL)


KERNELS: dict[str, Kernel] = {}
_shared: dict[tuple[int, int], Device] = {}


def shared(binding: int, buffers: int = 32) -> Device:
    """One device for all examples of a property."""
    if (binding, buffers) not in _shared:
        _shared[binding, buffers] = opened(binding, buffers)
    return _shared[binding, buffers]


@pytest.fixture(autouse=True)
def exact_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pool rounds sizes to a granule, as it does with those of true bindings, and no further."""
    monkeypatch.setattr(pool, "EXACT_FROM", 0)
    pool.size_class.cache_clear()
    yield
    pool.size_class.cache_clear()


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything is computed by kernels at the first sight; the names of what NumPy computes all the same."""
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    on_host, names = Executable._on_host, []

    def noted(self: Executable, step: Step, *rest: Any) -> None:
        names.append(step.group.nodes[0].primitive.name)
        on_host(self, step, *rest)

    monkeypatch.setattr(Executable, "_on_host", noted)
    return names


@pytest.fixture
def device() -> Iterator[Device]:
    """One with bindings of 1 KiB, into which 256 numbers go."""
    made = opened(1024)
    yield made
    made.close()
    assert not made.driver._native.errors


def close(result: ps.Tensor, expected: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(result.numpy(), expected, rtol=rtol, atol=atol)


# Texts


def text(source: str, *windows: int) -> str:
    (kernel,) = parse(source).values()
    return module_text(kernel, (1,), range(len(windows)), False, False, windows, 1024)


def test_items_are_used_through_functions_that_choose_a_window() -> None:
    made = text("kernel k(x: array<u32>, y: array<u32>) { x[y[x[0]]] = y[1] + x[2 * (1 + 2)]; }", 3, 1)
    assert "_store_x(i32(y[_load_x(i32(0))]), y[1] + _load_x(i32(2 * (1 + 2))));" in made
    assert "fn _load_x(i: i32) -> u32 { if (i < 256) { return x[i]; } else { if (i < 512) {" in made
    names = re.findall(r"@binding\((\d)\) var<storage, read_write> (\w+)", made)
    assert names == [("0", "x"), ("1", "_x_1"), ("2", "_x_2"), ("3", "y")]


def test_a_kernel_without_large_memories_has_the_same_text_as_ever() -> None:
    (kernel,) = parse("kernel k(x: array<u32>, y: array<u32>) { x[y[0]] = y[1]; }").values()
    plain = module_text(kernel, (1,), (0, 1), False, False)
    assert module_text(kernel, (1,), (0, 1), False, False, (), 1024) == plain
    assert "x[y[0]] = y[1];" in plain


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("let p = &x[0]; *p = 1.0;", "the address of an item is taken"),
        ("if (arrayLength(&x) > 3u) { x[0] = 1.0; }", "its address is taken"),
        ("let x = 3; ", "something else has the same name"),
        ("for (var x: i32 = 0; x < 3; x++) { }", "something else has the same name"),
    ],
)
def test_what_cannot_go_through_functions_is_refused(body: str, words: str) -> None:
    with pytest.raises(CompileError, match=f"'x' takes several bindings.*{words}"):
        text(f"kernel k(x: array<f32>) {{ {body} }}", 2)


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("vec4<f32>", "x[0].x = 1.0;", "a part of an item"),
        ("vec3<f32>", "x[0] = vec3<f32>(0.0);", "its items are vec3<f32>"),
        ("atomic<u32>", "let t = atomicCompareExchangeWeak(&x[0], 1u, 2u);", "atomicCompareExchangeWeak"),
    ],
)
def test_items_of_which_there_are_no_windows_are_refused(kind: str, body: str, words: str) -> None:
    with pytest.raises(CompileError, match=words):
        text(f"kernel k(x: array<{kind}>) {{ {body} }}", 2)


# Launches


def one_kernel(device: Device, source: str, *signature: str) -> Kernel:
    (name,) = parse(source)
    return device.compile(source, {name: signature})[name]


USES = """
fn twice(i: u32) -> f32 { return 2.0 * x[i]; }
kernel uses(x: array<f32>, y: array<atomic<u32>>, z: array<vec2<i32>>, w: array<i32>, n: i32) {
    let i = GROUP_0 * THREADS + THREAD;
    if (i >= n) { return; }
    x[i] = twice(u32(i));
    x[i] += f32(i) / 2.0; x[i] -= x[i] * 0.5;
    if (x[i] <= 10.0 && x[i] != 7.0) { x[i] += 1.0; }
    atomicStore(&y[i], 3u);
    atomicMax(&y[i], u32(i));
    atomicXor(&y[i], atomicAdd(&y[i], 1u) & 1u);
    z[i] = vec2<i32>(z[i].y, -i);
    w[i]++;
    w[w[i] - 1] <<= 1u;
}
"""


def test_kernels_of_ones_own_use_items_of_all_windows(device: Device) -> None:
    kernel = one_kernel(device, USES, "float32*", "uint32*", "int32*", "int32*", "int32")
    n = 700
    x, z = np.random.default_rng(0).uniform(-9, 9, n).astype(np.float32), np.arange(2 * n, dtype=np.int32)
    buffers = [device.upload(array) for array in (x, np.zeros(n, np.uint32), z, np.arange(n, dtype=np.int32))]
    device.stream.launch(kernel, (11,), (64,), (*buffers, n))
    expected = (2 * x + np.arange(n, dtype=np.float32) / 2) * np.float32(0.5)
    expected = np.where((expected <= 10) & (expected != 7), expected + 1, expected)
    np.testing.assert_allclose(device.download(buffers[0], np.float32).wait(), expected, rtol=1e-6)
    counts = np.maximum(3, np.arange(n, dtype=np.uint32))
    assert np.array_equal(device.download(buffers[1], np.uint32).wait(), (counts + 1) ^ (counts & 1))
    pairs = np.stack([z[1::2], -np.arange(n, dtype=np.int32)], 1)
    assert np.array_equal(device.download(buffers[2], np.int32, (n, 2)).wait(), pairs)
    assert np.array_equal(device.download(buffers[3], np.int32).wait(), 2 * (np.arange(n) + 1))


def test_a_kernel_that_cannot_have_windows_is_told_the_limit(device: Device) -> None:
    source = "kernel bad(x: array<f32>) { x[i32(arrayLength(&x)) - 1] = 1.0; }"
    kernel = one_kernel(device, source, "float32*")
    with pytest.raises(DeviceError, match=r"'bad'.*1500-byte.*a binding has at most 1024 bytes.*'x'"):
        device.stream.launch(kernel, (1,), (1,), (device.empty(1500),))
    device.stream.launch(kernel, (1,), (1,), (device.empty(1024),))
    device.sync()


def test_more_windows_than_a_kernel_may_have_are_refused(device: Device) -> None:
    axpy = compiled(device)["axpy"]
    x, y = device.upload(np.ones(16 * 256, np.float32)), device.upload(np.ones(17 * 256, np.float32))
    with pytest.raises(
        DeviceError, match=r"'axpy'.*33 parts of memories, of at most 1024 bytes.*may have 32"
    ):
        device.stream.launch(axpy, (1,), (64,), (x, y, 1.0, 4096))
    device.stream.launch(axpy, (4,), (64,), (x, x, 1.0, 4096))  # the same windows for both
    assert np.all(device.download(x, np.float32).wait() == 2)


PLACES = """
kernel add(
    out: array<u32>, x: array<u32>, y: array<u32>, out_place: i32, x_place: i32, y_place: i32, n: i32
) {
    let i = GROUP_0 * THREADS + THREAD;
    if (i < n) { out[64 * out_place + i] = x[64 * x_place + i] + y[64 * y_place + i]; }
}
"""
PLACED = ("uint32*", "uint32*", "uint32*", "int32", "int32", "int32", "int32")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_parts_of_a_large_memory_take_as_many_windows_as_they_have(data: st.DataObject) -> None:
    device = shared(1024)
    if "add" not in KERNELS:
        KERNELS["add"] = one_kernel(device, PLACES, *PLACED)
    kernel = KERNELS["add"]
    units = 40  # of 256 bytes
    model = np.random.default_rng(0).integers(0, 1 << 30, 64 * units, dtype=np.uint32)
    whole = device.upload(model)
    n = data.draw(st.integers(1, 64 * 9))
    starts = [data.draw(st.integers(0, units - 9)) for _ in range(3)]
    inside = [data.draw(st.integers(0, min(start, 3))) for start in starts]  # beside the buffer's own offset
    if abs(starts[0] - starts[1]) < 9 or abs(starts[0] - starts[2]) < 9:
        starts[1:] = starts[:1] * 2  # not over a part of what others still read
    inside = [min(value, start) for value, start in zip(inside, starts, strict=True)]
    parts = [
        whole.view(256 * (start - value), 256 * value + 4 * n)
        for start, value in zip(starts, inside, strict=True)
    ]
    device.stream.launch(kernel, (9,), (64,), (*parts, *inside, n))
    a, b = (model[64 * start :][:n].copy() for start in starts[1:])
    model[64 * starts[0] :][:n] = a + b
    assert np.array_equal(device.download(whole, np.uint32).wait(), model)


def test_a_small_part_of_a_large_memory_is_one_binding(device: Device) -> None:
    kernel = one_kernel(device, PLACES, *PLACED)
    whole = device.upload(np.arange(64 * 100, dtype=np.uint32))
    parts = [whole.view(256 * start, 256) for start in (90, 3, 41)]
    device.stream.launch(kernel, (1,), (64,), (*parts, 0, 0, 0, 64))
    (bound,) = device.driver._groups.known
    assert [(offset, size) for _, offset, size in bound] == [(256 * start, 256) for start in (90, 3, 41)]
    (made_for,) = kernel.native.pipelines
    assert made_for[-1] == (), "no window has to be chosen"
    result = device.download(parts[0], np.uint32).wait()
    assert np.array_equal(result, np.arange(64) * 2 + 64 * (3 + 41))


# Copies


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_at_any_place_are_copied_and_their_neighbours_stay(data: st.DataObject) -> None:
    device = shared(2048)
    n = data.draw(st.integers(5000, 9000))
    model = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
    other_model = 255 - model
    buffer, other = device.upload(model), device.upload(other_model)
    for _ in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(1, n))
        to, start = data.draw(st.integers(0, n - count)), data.draw(st.integers(0, n - count))
        verb = data.draw(st.sampled_from(["upload", "copy", "inside", "download"]))
        if verb == "upload":
            new = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
            device.upload(new, into=buffer, offset=to)
            model[to : to + count] = new
        elif verb == "copy":
            device.copy(buffer, other, count, target_offset=to, source_offset=start)
            model[to : to + count] = other_model[start : start + count]
        elif verb == "inside":
            count = min(count, abs(to - start))
            if count:
                device.copy(buffer, buffer, count, target_offset=to, source_offset=start)
                model[to : to + count] = model[start : start + count].copy()
        else:
            got = device.download(buffer, np.uint8, (count,), offset=to).wait()
            assert np.array_equal(got, model[to : to + count])
    assert np.array_equal(device.download(buffer).wait(), model)
    assert np.array_equal(device.download(other).wait(), other_model)


# What users compute. Every function takes the namespace, so that NumPy says what is right.


def softmax(xp: Any, x: Any) -> Any:
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def norm(xp: Any, x: Any) -> Any:
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    return centred / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + 1e-3)


Computed = Callable[..., Any]
FLOATS: dict[str, Computed] = {
    "chain": lambda xp, x, y, i: xp.tanh(x * 2 + y) - y / (x * x + 1),
    "softmax": lambda xp, x, y, i: softmax(xp, x),
    "norm": lambda xp, x, y, i: norm(xp, x) * y,
    "sums": lambda xp, x, y, i: xp.sum(x) + xp.max(y),
    "columns": lambda xp, x, y, i: xp.sum(x * y, axis=0),
    "centred columns": lambda xp, x, y, i: x - xp.mean(x, axis=0, keepdims=True),
    "product": lambda xp, x, y, i: xp.matmul(x, xp.permute_dims(y, (1, 0))) + 1,
    "product of columns": lambda xp, x, y, i: xp.matmul(xp.permute_dims(x, (1, 0)), y),
}
ANY: dict[str, Computed] = {
    "map": lambda xp, x, y, i: xp.where(x < y, x, y),
    "transposed": lambda xp, x, y, i: xp.permute_dims(x, (1, 0)),
    "slices": lambda xp, x, y, i: x[1::2, ::-1],
    "joined": lambda xp, x, y, i: xp.concat([x, y[: x.shape[0] // 2], x], axis=0),
    "joined rows": lambda xp, x, y, i: xp.concat([x, y], axis=1),
    "rows": lambda xp, x, y, i: xp.take(x, i, axis=0),
    "flat": lambda xp, x, y, i: xp.flip(xp.reshape(x, (-1,))),
    "extreme": lambda xp, x, y, i: xp.argmax(x, axis=1),
    "extremes": lambda xp, x, y, i: xp.argmax(x, axis=0),
    "sorted": lambda xp, x, y, i: xp.sort(xp.reshape(x, (-1,))),
    "sorted rows": lambda xp, x, y, i: xp.sort(x, axis=1),
    "sorted columns": lambda xp, x, y, i: xp.sort(x, axis=0),
}
WHOLE: dict[str, Computed] = {
    "scan": lambda xp, x, y, i: xp.cumulative_sum(xp.reshape(x, (-1,)), dtype=x.dtype),
    "scan of columns": lambda xp, x, y, i: xp.cumulative_sum(x, axis=0, dtype=x.dtype),
}
DTYPES = ("float32", "float16", "int8", "uint8", "int16", "int32", "int64")


class Plain:
    """NumPy with the names of the array API standard."""

    def __getattr__(self, name: str) -> Any:
        if name == "permute_dims":
            return np.transpose
        if name == "concat":
            return np.concatenate
        if name == "cumulative_sum":
            return lambda x, axis=0, dtype=None: np.cumsum(x, axis=axis, dtype=dtype)
        return getattr(np, name)


def compare(device: Device, compute: Computed, dtype: str, shape: tuple[int, int], seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    if dtype == "float32":
        x, y = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    else:
        x, y = (rng.integers(0, 100, shape).astype(dtype) for _ in range(2))
    i = rng.integers(0, shape[0], 2 * shape[0] + 1)
    given = [ps.asarray(array, device=device) for array in (x, y, i)]
    close(compute(ps, *given), compute(Plain(), x, y, i), rtol=1e-4, atol=1e-4)


CASES = [(name, "float32") for name in FLOATS]
CASES += [(name, dtype) for name in ANY for dtype in ("float32", "int8", "float16", "int64")]
# Each takes seconds to compile, and every width of items is that of another of them, too.
CASES = [case for case in CASES if case not in (("sorted rows", "int64"), ("sorted columns", "int64"))]
CASES += [(name, dtype) for name in WHOLE for dtype in ("int32", "int64", "int8")]


@pytest.fixture(scope="module")
def few_windows() -> Iterator[Device]:
    made = opened(4096)
    yield made
    made.close()


@pytest.mark.slow("float16", "int64", "int8")
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_kernels_compute_what_is_larger_than_a_binding(
    few_windows: Device, by_kernels: list[str], name: str, dtype: str
) -> None:
    each = np.dtype(dtype).itemsize
    # Three windows, and a bit; where NumPy gets involved by the items of 8 bytes of an index, one.
    windows = 1 if each < 4 and name.startswith(("sorted", "extreme")) else 3
    compare(few_windows, (FLOATS | ANY | WHOLE)[name], dtype, (windows * 4096 // each // 60 + 1, 61))
    assert not by_kernels or (dtype == "float16" and name.startswith(("sorted", "extreme")))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_numpy_computes_what_takes_too_many_windows(by_kernels: list[str], name: str, dtype: str) -> None:
    device = shared(256, 8)
    compare(device, (FLOATS | ANY | WHOLE)[name], dtype, (80, 37))
    assert by_kernels


@settings(max_examples=examples(30, quick=20), deadline=None)
@given(
    st.sampled_from([(256, 32), (512, 16), (1024, 8), (768, 32)]),
    st.sampled_from(sorted(FLOATS | ANY | WHOLE)),
    st.sampled_from(DTYPES),
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 1 << 30),
)
def test_any_shape(
    limits: tuple[int, int], name: str, dtype: str, rows: int, columns: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
        patch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
        kind = "float32" if name in FLOATS else "int32" if name in WHOLE and dtype[0] == "f" else dtype
        compare(shared(*limits), (FLOATS | ANY | WHOLE)[name], kind, (rows, columns), seed)


def test_random_numbers_are_those_of_any_device(by_kernels: list[str]) -> None:
    drawn = []
    for device in (shared(4096), shared(1 << 20)):
        generator = ps.random.Generator(7, device)
        drawn.append([generator.uniform((50, 70)).numpy(), generator.normal((3000,)).numpy()])
    for value, other in zip(*drawn, strict=True):
        np.testing.assert_array_equal(value, other)
    assert not by_kernels


@pytest.mark.slow("512", "2048")
@pytest.mark.parametrize("binding", [256, 512, 2048])
@pytest.mark.parametrize("buffers", [8, 32])
def test_random_graphs(monkeypatch: pytest.MonkeyPatch, binding: int, buffers: int) -> None:
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    monkeypatch.setattr(fused, "_BUSY", 0)
    device = opened(binding, buffers)
    poison(monkeypatch)
    for seed in range(2):
        check(device, 2000 + seed, 60)
    monkeypatch.undo()
    device.close()


SINGLE = {
    "scan": lambda: reducing.cumulative_sum(array("int32", (3, 700)), 1),
    "scan of columns": lambda: reducing.cumulative_sum(array("float32", (90, 23)), 0),
    "extremes": lambda: reducing.argmax(array("float32", (3, 700)), 1),
    "sort": lambda: reducing.argsort(array("float32", (6, 250)), 1, False),
    "sort in memory": lambda: reducing.argsort(array("int32", (1, 9000)), 1, True),
    "scatter": lambda: contraction.scatter_add(array("float32", (200, 16)), index(200, 300), 300),
    "scatter of halves": lambda: contraction.scatter_add(array("float16", (200, 15)), index(200, 300), 300),
}


def array(dtype: str, shape: tuple[int, ...]) -> Any:
    value = items(dtype, shape) if dtype != "float32" else np.random.default_rng(0).integers(0, 99, shape)
    return leaf(np.ascontiguousarray(value.astype(dtype)), shape, np.dtype(dtype))


def index(count: int, length: int) -> Any:
    value = np.random.default_rng(1).integers(0, length, count)
    return leaf(value, value.shape, value.dtype)


@pytest.mark.parametrize("name", SINGLE)
def test_kernels_of_single_nodes_stay_inside_their_buffers(name: str) -> None:
    binding = 16384 if name == "sort in memory" else 4096
    node = SINGLE[name]()
    bench = Bench(shared(binding))
    np.testing.assert_allclose(
        bench.run(node, "gpu").astype(np.float64), single(node).astype(np.float64), rtol=1e-2
    )


# Training


def trained(device: Device, steps: int = 3) -> list[np.ndarray]:
    """A model whose table, and whose logits, are larger than a small binding."""
    ps.random.manual_seed(3)
    table = nn.Embedding(300, 16, device=device)
    head = nn.Linear(16, 300, device=device)
    parameters = [*table.parameters(), *head.parameters()]
    optimizer = optim.AdamW(parameters, lr=1e-2, clip_norm=1.0)

    @ps.jit
    def step(tokens: ps.Tensor, targets: ps.Tensor) -> ps.Tensor:
        loss = nn.functional.cross_entropy(head(nn.functional.gelu(table(tokens))), targets)
        loss.backward()
        optimizer.step()
        return loss

    rng = np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        tokens, targets = (ps.asarray(rng.integers(0, 300, 64), device=device) for _ in range(2))
        losses.append(step(tokens, targets).numpy())
    return [np.stack(losses), *(parameter.numpy() for parameter in parameters)]


@pytest.mark.slow("4096", "8192", "1024")
@pytest.mark.parametrize(("binding", "buffers"), [(4096, 32), (8192, 10), (1024, 8)])
def test_a_table_larger_than_a_binding_is_trained(binding: int, buffers: int) -> None:
    device, plain = opened(binding, buffers), Device.over(DRIVERS["host"](), SMALL)
    for value, other in zip(trained(device), trained(plain), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-3, atol=1e-5)
    device.close()
    plain.close()


@pytest.mark.slow
def test_a_gpt_is_trained_with_windows() -> None:
    losses = []
    for device in (opened(8192), Device.over(DRIVERS["host"](), SMALL)):
        losses.append(gpt_losses(device, layers=1, batches=2)[0])
        device.close()
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_a_program_takes_no_more_of_an_arena_than_it_has_planned(by_kernels: list[str]) -> None:
    """Programs share arenas; an arena larger than a binding would slow the other programs down."""
    device = opened(4096)

    def twice(x: ps.Tensor) -> ps.Tensor:
        return ps.cumulative_sum(ps.cumulative_sum(x, axis=0), axis=0)

    small, large = np.ones((4, 5), np.float32), np.ones((60, 50), np.float32)
    jitted = ps.jit(twice)
    for value in (small, large, small, large):
        close(jitted(ps.asarray(value, device=device)), np.cumsum(np.cumsum(value, axis=0), axis=0))
    assert any(arena.nbytes > 4096 for arena in device.layers().scratch)
    assert not by_kernels
    device.close()


# True sizes


@pytest.fixture
def true_size() -> Iterator[Device]:
    made = Device.over(Watched(ADAPTER, "webgpu"))
    yield made
    made.close()


@pytest.mark.slow
def test_a_tensor_larger_than_a_true_binding(true_size: Device) -> None:
    """160 MiB, where a binding may have 128."""
    shape = (40 << 10, 1 << 10)
    if true_size.capabilities.binding_bytes >= 160 << 20:
        pytest.skip("the adapter binds it whole")
    x = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    x %= 1013
    given = ps.asarray(x, device=true_size)
    assert float(ps.sum(given)) == pytest.approx(x.sum(dtype=np.float64), rel=1e-6)
    halved = (given * 0.5 + 1).numpy()
    x *= 0.5
    x += 1
    assert np.array_equal(halved, x)
    rows = nn.functional.softmax(given * 0.01, axis=-1)[:: shape[0] - 1]
    close(rows, softmax(np, (x[:: shape[0] - 1] - 1) * 0.02), rtol=1e-4)
    wanted = np.array([0, shape[0] - 1, 32 << 10, (32 << 10) - 1])
    taken = ps.take(given, ps.asarray(wanted, device=true_size), axis=0)
    assert np.array_equal(taken.numpy() * 0.5 + 1, x[wanted])


def test_a_tensor_larger_than_any_buffer_is_refused_with_its_shape(true_size: Device) -> None:
    rows = (true_size.capabilities.max_allocation_bytes >> 12) + 1
    with pytest.raises(OutOfDeviceMemory, match=rf"a result, float32\[{rows}, 1024\].*in parts"):
        ps.ones((rows, 1 << 10), device=true_size).numpy()


def test_a_group_of_outputs_beyond_the_bound_is_in_parts(by_kernels: Sequence[str]) -> None:
    """Each fits by itself: three windows that are read, and three that are written, of eight."""
    device = opened(1024, 8)
    x = np.arange(700, dtype=np.float32)
    given = ps.asarray(x, device=device)
    outputs = [given + k for k in range(4)]
    realize.realize([output._node for output in outputs], device)
    for k, output in enumerate(outputs):
        close(output, x + k)
    assert not by_kernels
    device.close()
