"""Products for a library: how they form groups, and how their operands are described to it.

The library itself is on CUDA devices only. Here NumPy does what cuBLASLt would, from addresses, leading
dimensions, strides and transpositions alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from test_graph import at

import penstock as ps
from penstock import Device, tuning_cache
from penstock.config import Settings
from penstock.drivers.driver import Capabilities
from penstock.drivers.host import HostDriver, host_capabilities
from penstock.errors import PenstockWarning
from penstock.execution.realize import explain
from penstock.fusion.groups import Group, partition
from penstock.fusion.products import Matrix, batch_stride, by_library, laid_out, read_as_stored
from penstock.fusion.views import base
from penstock.graph import contraction, elementwise, reducing, shaping
from penstock.graph.contraction import MATMUL
from penstock.graph.node import Node
from penstock.graph.reference import computed
from penstock.graph.simplify import simplify
from penstock.graph.windows import windows
from penstock.kernels.library.cublaslt import WORKSPACE, LibraryLaunch, Product, library_problem
from penstock.kernels.lower import fusible, write
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.tensor import dtypes
from penstock.tuning_cache import TuningCache

GPU = Capabilities(
    description="a GPU",
    vendor="",
    api="",
    kind="gpu",
    language="cuda",
    total_bytes=1 << 34,
    max_allocation_bytes=1 << 34,
    offset_alignment=256,
    shared_memory=False,
    compute_units=132,
    max_group_size=1024,
    local_bytes=48 << 10,
    vector_width=1,
    float16=True,
    float64=True,
    matmul_library=True,
)


def groups(*wanted: Node, large: bool = True) -> list[Group]:
    """The groups of a device with a library, which takes every product, or only what it takes by itself."""
    rule: Callable[[Node], bool] = (lambda node: True) if large else (lambda node: by_library(node, GPU))
    return partition(simplify(wanted), lambda node: fusible(node, GPU), rule)


def kinds(result: list[Group]) -> list[str]:
    return [group.kind for group in result]


def x_(*shape: int, dtype: Any = np.float32) -> Node:
    return at(np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype))


def turned(x: Node) -> Node:
    return shaping.permute(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def wide(vector: Node, rows: int) -> Node:
    """A vector for each row."""
    return reducing.expand(shaping.reshape(vector, (1, vector.size)), (rows, vector.size))


# What a library computes, by NumPy


def matrices(memory: np.ndarray, matrix: Matrix, batch: int) -> np.ndarray:
    """What a library takes from memory: columns of `rows` items, then transposed or not."""
    assert matrix.leading >= matrix.rows
    assert memory.size >= matrix.extent + (batch - 1) * matrix.batch_stride
    size = memory.itemsize
    result = as_strided(
        memory[matrix.offset :],
        (batch, matrix.rows, matrix.columns),
        (matrix.batch_stride * size, size, matrix.leading * size),
    )
    return result.swapaxes(1, 2) if matrix.transposed else result


def by_numpy(problem: Product, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The memory that a library would write."""
    first = matrices(right, problem.right, problem.batch).astype(np.float64)
    second = matrices(left, problem.left, problem.batch).astype(np.float64)
    columns_first = first @ second
    assert columns_first.shape == (problem.batch, problem.columns, problem.rows)
    return columns_first.swapaxes(1, 2).reshape(-1)


def run(actual: list[Group]) -> dict[Node, np.ndarray]:
    """The values of groups: products from memory, as by a library, and the rest by NumPy references."""
    stored: dict[Node, np.ndarray] = {}
    for group in actual:
        known = {}
        for node in group.inputs:
            value = node.value if node.value is not None else stored[base(node)]
            known[node] = value.reshape(node.shape)
        if group.kind == "matmul":
            problem, operands = library_problem(group, contraction_of(group), GPU)
            memory = {side: known[node].reshape(-1) for side, node in operands.items()}
            bias = memory.pop("bias", np.zeros(problem.columns))
            result = by_numpy(problem, **memory).reshape(-1, problem.columns) + bias
            (output,) = group.outputs
            stored[output] = result.reshape(output.shape).astype(output.dtype)
            continue
        for node in group.nodes:
            known[node] = computed(node, [known[parent] for parent in node.inputs])
        stored.update({node: np.ascontiguousarray(known[node]) for node in group.outputs})
    return stored


# Layouts


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    row_stride=st.integers(0, 9),
    column_stride=st.integers(0, 9),
    offset=st.integers(0, 3),
)
def test_a_layout_says_where_every_item_lies(
    rows: int, columns: int, row_stride: int, column_stride: int, offset: int
) -> None:
    matrix = laid_out(rows, columns, row_stride, column_stride, 0, offset)
    memory = np.arange(offset + rows * (row_stride + columns) + columns * (column_stride + rows))
    if matrix is None:
        steps = [s for s, n in ((row_stride, rows), (column_stride, columns)) if n > 1]
        contiguous = steps in ([], [columns, 1], [1, rows]) or steps == [1]
        assert not contiguous
        return
    place = np.arange(rows)[:, None] * row_stride + np.arange(columns) * column_stride
    # Either operand is seen transposed by the library.
    np.testing.assert_array_equal(matrices(memory, matrix, 1)[0].T, memory[offset + place])


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), max_size=3))
def test_one_stride_walks_through_a_batch_in_order(axes: list[tuple[int, int]]) -> None:
    lengths, factors = [n for n, _ in axes], [f for _, f in axes]
    walk = [sum(i * f for i, f in zip(place, factors, strict=True)) for place in np.ndindex(*lengths)]
    stride = batch_stride(lengths, factors)
    even = all(number == at * (walk[1] if len(walk) > 1 else 0) for at, number in enumerate(walk))
    assert (stride is not None) == even
    if stride is not None:
        assert walk == [at * stride for at in range(len(walk))]


@st.composite
def operand(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> Node:
    """A node of a shape with any view of memory: permuted, repeated, sliced, merged axes."""
    order = draw(st.permutations(range(len(shape))))
    stored, parts, small = [], [], []
    for axis in order:
        length = shape[axis]
        kind = draw(st.sampled_from(["whole", "whole", "part", "steps", "repeated"]))
        start = draw(st.integers(0, 3)) if kind in ("part", "steps") else 0
        step = draw(st.integers(2, 3)) if kind == "steps" else 1
        small.append(1 if kind == "repeated" else length)
        end = start + (small[-1] - 1) * step + 1
        stored.append(end + (draw(st.integers(0, 2)) if kind == "part" else 0))
        if kind == "steps" and draw(st.booleans()):
            start, step = end - 1, -step
        parts.append((start, small[-1], step))
    rng = np.random.default_rng(draw(st.integers(0, 100)))
    node = at(rng.standard_normal(stored).astype(dtypes.checked(dtype)))
    if draw(st.booleans()):
        node = elementwise.negative(node)  # something that is computed before
    node = reducing.expand(shaping.slice_(node, tuple(parts)), tuple(shape[axis] for axis in order))
    node = shaping.permute(node, tuple(order.index(axis) for axis in range(len(shape))))
    if draw(st.booleans()) and len(shape) > 2:  # the batch as one axis
        node = shaping.reshape(node, (int(np.prod(shape[:-2])), *shape[-2:]))
    return node


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_operands_of_any_layout_are_read_in_place_or_written_out(data: st.DataObject) -> None:
    batch = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    rows, inner, columns = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    dtype = data.draw(st.sampled_from(["float32", "float16", "bfloat16", "float64"]))
    left = data.draw(operand((*batch, rows, inner), dtype))
    right = data.draw(operand((*batch, inner, columns), dtype))
    if left.ndim != right.ndim:
        merged = (int(np.prod(batch)),)
        left, right = (shaping.reshape(x, (*merged, *x.shape[-2:])) for x in (left, right))
    product = contraction.matmul(left, right)
    (wanted,) = simplify([product])
    result = partition([wanted], lambda node: fusible(node, GPU), lambda node: True)
    values = run(result)
    expected = computed_graph(wanted)
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(
        values[base(wanted)].astype(np.float64).reshape(wanted.shape),
        expected,
        rtol=tolerance,
        atol=tolerance,
    )


def computed_graph(node: Node) -> np.ndarray:
    """A graph's value in double precision."""
    inputs = [computed_graph(parent) for parent in node.inputs]
    if node.value is not None:
        return np.asarray(node.value).astype(np.float64)
    return np.asarray(node.primitive.reference(*inputs, **node.attributes))


# Groups


def test_a_product_is_alone_and_what_follows_is_one_map() -> None:
    x, w, b = x_(64, 32), x_(48, 32), x_(48)
    biased = elementwise.add(contraction.matmul(x, turned(w)), wide(b, 64))
    result = groups(elementwise.tanh(elementwise.multiply(biased, biased)))
    assert kinds(result) == ["matmul", "map"]
    assert [node.primitive.name for node in result[0].nodes if node.primitive.name != "permute"] == ["matmul"]
    assert set(result[0].inputs) == {x, w}  # the transposed weight is read in place
    assert set(result[1].inputs) == {result[0].outputs[0], b}


def test_a_residual_and_a_norm_after_a_product_are_one_row_kernel() -> None:
    x, w, residual = x_(64, 32), x_(32, 48), x_(64, 48)
    y = elementwise.add(residual, contraction.matmul(x, w))
    total = reducing.sum_(elementwise.multiply(y, y), (1,))
    normed = elementwise.multiply(y, reducing.expand(shaping.reshape(total, (64, 1)), (64, 48)))
    result = groups(y, normed)
    assert kinds(result) == ["matmul", "row"]
    assert set(result[1].outputs) == {y, normed} or len(result[1].outputs) == 2


def test_a_bias_is_added_by_the_library_to_what_is_stored_in_any_case() -> None:
    x, w, b = x_(6000, 32), x_(32, 48), x_(48)
    rows = shaping.reshape(contraction.matmul(x, w), (2, 3000, 48))
    biased = elementwise.add(reducing.expand(shaping.reshape(b, (1, 1, 48)), (2, 3000, 48)), rows)
    (group,) = groups(biased)
    assert (group.kind, set(group.inputs)) == ("matmul", {x, w, b})
    problem, operands = library_problem(group, contraction_of(group), GPU)
    assert problem.bias
    assert operands == {"left": x, "right": w, "bias": b}
    np.testing.assert_allclose(run([group])[group.outputs[0]], computed_graph(biased), rtol=1e-5, atol=1e-5)
    written = write(group, GPU, "end")
    assert written is not None
    assert isinstance(written.function, LibraryLaunch)
    assert sorted(written.function.buffers) == ["bias", "left", "out", "right", "workspace"]
    # Another product reads it from memory, and so it is stored.
    result = groups(contraction.matmul(shaping.reshape(biased, (6000, 48)), x_(48, 5)))
    assert kinds(result) == ["matmul", "matmul"]
    assert contraction_of(result[0]) is not result[0].outputs[0]


def test_the_largest_of_a_library_s_product_is_found_in_what_it_wrote() -> None:
    rows = x_(8, 512, dtype=np.float16)
    for columns, dtype in ((4096, np.float16), (64, np.float32)):  # few columns: by a generated kernel
        product = contraction.matmul(rows, x_(512, columns, dtype=np.float16))
        wide = elementwise.cast(product, dtypes.float32)
        (largest,) = read_as_stored([reducing.argmax(wide, 1)], GPU)
        assert largest.inputs[0].dtype == dtype
        (same,) = read_as_stored([reducing.argmax(elementwise.cast(product, dtypes.int32), 1)], GPU)
        assert same.inputs[0].dtype == np.int32, "a cast that may keep no order"


def test_a_bias_that_is_computed_is_stored() -> None:
    x, w, b = x_(64, 32), x_(32, 48), x_(48, dtype=np.float64)
    narrow = elementwise.cast(b, dtypes.float32)
    result = groups(elementwise.add(contraction.matmul(x, w), wide(narrow, 64)))
    assert kinds(result) == ["map", "matmul"]
    values = run(result)
    expected = x.value @ w.value + b.value
    np.testing.assert_allclose(values[result[1].outputs[0]], expected, rtol=1e-5, atol=1e-5)


def test_sums_that_are_no_bias_are_maps() -> None:
    x, w, b = x_(64, 32), x_(32, 48), x_(48)
    product = contraction.matmul(x, w)
    bias = wide(b, 64)
    others = {
        "a residual": elementwise.add(product, x_(64, 48)),
        "a column": elementwise.add(product, reducing.expand(x_(64, 1), (64, 48))),
        "a number": elementwise.add(product, elementwise.like(product, 2)),
        "itself": elementwise.add(product, product),
        "a difference": elementwise.subtract(product, bias),
    }
    for name, node in others.items():
        assert kinds(groups(node)) == ["matmul", "map"], name
    # What is needed without its bias too is stored without it.
    result = groups(elementwise.add(product, bias), elementwise.exp(product))
    assert kinds(result) == ["matmul", "map", "map"]
    assert kinds(groups(elementwise.add(product, bias), product)) == ["matmul", "map"]
    row = contraction.matmul(x_(1, 32), w)
    assert kinds(groups(elementwise.add(row, row))) == ["matmul", "map"]


def contraction_of(group: Group) -> Node:
    return next(node for node in group.nodes if node.primitive is MATMUL)


def test_heads_that_lie_in_two_strides_are_written_out() -> None:
    """(text, row, head, item): the matrices of heads begin 10 items apart, those of texts 480."""
    x = x_(2, 12, 4, 10)
    heads = shaping.permute(x, (0, 2, 1, 3))
    result = groups(contraction.matmul(heads, x_(2, 4, 10, 7)))
    assert kinds(result) == ["map", "matmul"]
    single = x_(1, 12, 4, 10)  # a single sequence has a single stride
    heads = shaping.permute(single, (0, 2, 1, 3))
    result = groups(contraction.matmul(heads, turned(heads)))
    assert kinds(result) == ["matmul"]
    problem, _ = library_problem(result[0], result[0].outputs[0], GPU)
    assert (problem.left.leading, problem.left.batch_stride) == (40, 10)


def test_windows_are_written_out_for_a_library() -> None:
    x, weight = x_(2, 3, 6, 5), x_(2, 4, 27)
    seen = windows(windows(x, 2, 3), 4, 3)
    columns = shaping.reshape(shaping.permute(seen, (0, 1, 3, 5, 2, 4)), (2, 27, 12))
    product = contraction.matmul(weight, columns)
    actual = groups(product)
    assert kinds(actual) == ["map", "matmul"]
    (result,) = actual[-1].outputs
    np.testing.assert_allclose(run(actual)[result], computed_graph(product), rtol=1e-5, atol=1e-5)
    (alone,) = partition(simplify([product]), lambda node: fusible(node, GPU), lambda node: False)
    assert alone.kind == "matmul"  # a generated kernel reads them where they lie
    assert x in alone.inputs


def test_one_matrix_for_all_of_a_batch_has_no_stride() -> None:
    x, w = x_(3, 8, 6), x_(1, 6, 7)
    result = groups(contraction.matmul(x, reducing.expand(w, (3, 6, 7))))
    assert kinds(result) == ["matmul"]
    problem, _ = library_problem(result[0], result[0].outputs[0], GPU)
    assert problem.right.batch_stride == 0
    assert problem.left.batch_stride == 48


def test_a_small_product_holds_what_follows() -> None:
    x, w, b = x_(4, 2), x_(2, 8), x_(8)
    hidden = elementwise.tanh(elementwise.add(contraction.matmul(x, w), wide(b, 4)))
    assert kinds(groups(hidden, large=False)) == ["matmul"]
    x, w, b = x_(512, 512), x_(512, 512), x_(512)
    hidden = elementwise.tanh(elementwise.add(contraction.matmul(x, w), wide(b, 512)))
    assert kinds(groups(hidden, large=False)) == ["matmul", "map"]


def test_what_a_library_takes() -> None:
    def product(dtype: str, capabilities: Capabilities = GPU, size: int = 512) -> tuple[bool, bool]:
        x = at(np.ones((size, size), dtypes.checked(dtype)))
        node = contraction.matmul(x, x)
        return fusible(node, capabilities), by_library(node, capabilities)

    assert all(product(dtype) == (True, True) for dtype in ("float16", "bfloat16", "float32", "float64"))
    assert product("float64", size=2) == (True, True)  # there is no generated kernel
    assert product("bfloat16", size=2) == (True, False)
    assert product("int32") == product("complex64") == (False, False)
    assert product("float32", replace(GPU, matmul_library=False)) == (True, False)
    assert product("bfloat16", replace(GPU, matmul_library=False)) == (False, False)


def test_a_group_as_a_launch() -> None:
    x, w = x_(300, 64), x_(200, 64)
    (group,) = groups(contraction.matmul(x, turned(w)))
    written = write(group, GPU, "end")
    assert written is not None
    assert isinstance(written.function, LibraryLaunch)
    (launch,) = written.launches
    assert launch.buffers == (0, 1, 2, 3)
    assert launch.source.signature == ("float32*",) * 3 + ("uint8*",) + ("int32",) * 4
    assert written.scratch == (WORKSPACE,)
    product = written.function.product
    assert (product.rows, product.columns, product.inner, product.tf32) == (300, 200, 64, False)
    assert (product.left.transposed, product.right.transposed) == (False, True)
    same = groups(contraction.matmul(x, turned(x)))
    written = write(same[0], replace(GPU, tf32=True), "end")
    assert written is not None
    assert isinstance(written.function, LibraryLaunch)
    assert written.function.buffers == {"out": 0, "left": 1, "right": 1, "workspace": 2}
    assert written.function.product.tf32


def test_tf32_is_a_setting_of_devices_with_a_library() -> None:
    for capabilities, expected in ((GPU, True), (host_capabilities(), False)):
        assert Device("some", capabilities, HostDriver, Settings(tf32=True)).capabilities.tf32 == expected
        assert not Device("some", capabilities, HostDriver, Settings()).capabilities.tf32


def test_products_of_bfloat16_are_cast_only_where_there_is_no_library() -> None:
    for capabilities, casts in (
        (host_capabilities(), True),
        (replace(host_capabilities(), matmul_library=True), False),
    ):
        device = Device("host", capabilities, HostDriver, SMALL)
        x = ps.ones((4, 4), dtype=ps.bfloat16, device=device).requires_grad_()
        y = x @ x
        y.sum().backward()
        text = explain([y._node, x.grad._node], device)
        assert ("cast" in text) == casts
        np.testing.assert_array_equal(y.numpy().astype(np.float32), np.full((4, 4), 4.0))
        device.close()


# Choices


def test_choices_are_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, other = TuningCache("a device"), TuningCache("another device")
    assert first.get("problem") is None
    first.put("problem", "ab")
    other.put("problem", "cd")
    assert (TuningCache("a device").get("problem"), TuningCache("another device").get("problem")) == (
        "ab",
        "cd",
    )


def test_a_file_of_choices_is_bounded_and_may_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning_cache, "_MAX_ENTRIES", 3)
    some = TuningCache("a device")
    for number in range(5):
        some.put(str(number), "00")
    (path,) = (tmp_path / "penstock").iterdir()
    assert list(json.loads(path.read_text())) == ["2", "3", "4"]
    for damaged in ("", "[1]", '{"a": 1', '{"a": 1}'):
        path.write_text(damaged)
        again = TuningCache("a device")
        assert again.get("a") is None
        again.put("b", "11")
        assert TuningCache("a device").get("b") == "11"


def test_choices_without_a_folder_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    some = TuningCache("a device")
    with pytest.warns(PenstockWarning, match="going on without it"):
        some.put("problem", "ab")
    some.put("other", "cd")  # it is said once
    assert some.get("problem") == "ab"


# On a device: through a library on CUDA, by generated kernels on OpenCL


@pytest.fixture(scope="module", params=["cuda", "opencl-device"])
def opened(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param not in DRIVERS:
        pytest.skip("no such device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
        patch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
        device = Device.over(DRIVERS[request.param]())
        yield device
        device.close()


ENDINGS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "none": lambda y, bias, residual: y,
    "bias": lambda y, bias, residual: y + bias,
    "relu": lambda y, bias, residual: F.relu(y + bias),
    "gelu": lambda y, bias, residual: F.gelu(y + bias),
    "residual": lambda y, bias, residual: residual + (y + bias),
    # Of two columns that hardly differ, a smaller epsilon would have gradients magnify what was rounded.
    "norm": lambda y, bias, residual: F.layer_norm(residual + y, bias.shape, bias, eps=0.1),
    "columns": lambda y, bias, residual: ps.sum(y + bias, axis=-2),
}
EPSILON = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


@st.composite
def stored_matrices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[np.ndarray, Callable[[Any], Any]]:
    """An allocation, and matrices in it: transposed or not, whole or parts of larger matrices."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    before = draw(st.sampled_from([0, 0, 1, 8]))
    *batch, rows, columns = shape
    if draw(st.booleans()):
        return rng.standard_normal((*batch, columns, before + rows)), lambda x: x[..., before:].mT
    return rng.standard_normal((*batch, rows, before + columns)), lambda x: x[..., before:]


@settings(max_examples=examples(20, quick=4), deadline=None)
@given(data=st.data())
def test_products_and_endings_on_a_device(opened: Device, data: st.DataObject) -> None:
    """The values, and the gradients of both operands, against double precision."""
    name = data.draw(st.sampled_from(["float32", "float16", "bfloat16", "float64"]))
    batch = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    size = st.sampled_from([1, 2, 5, 8, 16, 31, 64, 72, 136, 200])
    rows, inner, columns = data.draw(st.tuples(size, size, size))
    ending = ENDINGS[data.draw(st.sampled_from(sorted(ENDINGS)))]
    left, left_view = data.draw(stored_matrices((*batch, rows, inner)))
    shared = data.draw(st.booleans())
    right, right_view = data.draw(stored_matrices((*(() if shared else batch), inner, columns)))
    rng = np.random.default_rng(0)
    bias, residual, weight = (
        rng.standard_normal(shape) for shape in ((columns,), (*batch, rows, columns), (columns,))
    )
    dtype = dtypes.checked(name)
    rounded = [array.astype(dtype) for array in (left, right, bias, residual, weight)]

    def values(device: Device, inside: Any) -> list[np.ndarray]:
        a, b, c, d, w = (ps.asarray(value.astype(inside), device=device) for value in rounded)
        a, b = a.requires_grad_(), b.requires_grad_()
        out = ending(ps.matmul(left_view(a), right_view(b)), c, d)
        ps.sum(out * w).backward()
        return [x.numpy().astype(np.float64) for x in (out, a.grad, b.grad)]

    host = Device.over(HostDriver("exact"))
    expected = values(host, dtypes.float64)
    host.close()
    for result, exact, allowed in zip(values(opened, dtype), expected, (4, 40, 40), strict=True):
        error = np.linalg.norm(result - exact)
        assert error <= allowed * EPSILON[name] * (np.linalg.norm(exact) + np.sqrt(exact.size))
