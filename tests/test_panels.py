"""Matrices that many products read from panels, and products that store values side by side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graph import at, evaluate
from test_products import GPU
from test_sums import normal

import penstock as ps
from penstock.fusion.panels import lay_out_panels
from penstock.graph.contraction import matmul
from penstock.graph.elementwise import add, exp
from penstock.graph.node import Node, topological
from penstock.graph.panels import PANELS
from penstock.graph.shaping import permute
from penstock.runtime import Device

CPU = replace(GPU, kind="cpu", local_bytes=1 << 20, vector_width=8, matmul_library=False)


def products(count: int, rows: int, weight: Node) -> list[Node]:
    return [matmul(at(normal(rows, weight.shape[0], seed=seed)), weight) for seed in range(count)]


def panels_of(nodes: list[Node]) -> list[Node]:
    return [node for node in topological(nodes) if node.primitive is PANELS]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("columns", "count"), [(140, 6), (144, 6), (20, 1)])
def test_a_matrix_is_laid_out_once_for_all_products(transposed: bool, columns: int, count: int) -> None:
    inner = 1000
    weight = permute(at(normal(columns, inner)), (1, 0)) if transposed else at(normal(inner, columns))
    outputs = products(5, 8, weight)
    laid_out = lay_out_panels([exp(outputs[0]), *outputs], CPU)
    if columns == 20 and not transposed:
        assert not panels_of(laid_out)  # it stays in a cache
        return
    (matrix,) = panels_of(laid_out)
    assert matrix.inputs[0].shape == (count, inner, 24)
    np.testing.assert_array_equal(evaluate(matrix), evaluate(weight))
    results = [evaluate(add(*nodes)) for nodes in (laid_out[1:3], outputs[:2])]
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("count", "rows", "shape"),
    [(3, 8, (512, 512)), (5, 3, (512, 512)), (5, 65, (512, 512)), (5, 8, (256, 256)), (5, 8, (1025, 512))],
    ids=["few products", "few rows", "many rows", "a small matrix", "long sums"],
)
def test_other_products_read_matrices_as_they_are(count: int, rows: int, shape: tuple[int, int]) -> None:
    outputs = products(count, rows, at(normal(*shape)))
    assert lay_out_panels(outputs, CPU) == outputs


def test_where_the_order_of_sums_depends_on_tiles_nothing_is_laid_out() -> None:
    outputs = products(5, 8, at(normal(512, 512)))
    assert lay_out_panels(outputs, replace(CPU, local_bytes=1 << 15)) == outputs


def test_a_transposed_left_side_is_packed_in_blocks_of_its_own() -> None:
    weight = at(normal(512, 512))
    outputs = [matmul(permute(at(normal(512, 8, seed=seed)), (1, 0)), weight) for seed in range(5)]
    assert lay_out_panels(outputs, CPU) == outputs


@settings(max_examples=examples(6, 2), deadline=None)
@given(data=st.data())
def test_panels_do_not_change_a_bit(data: st.DataObject) -> None:
    rows, inner = data.draw(st.integers(4, 40)), data.draw(st.integers(1, 1024))
    columns = data.draw(st.integers(-(-(1 << 14) // inner), -(-(1 << 14) // inner) + 90))
    given_weight = normal(columns, inner, seed=1)
    steps = normal(5, rows, inner)
    bias = normal(5, rows, columns, seed=2)

    def each(weight: ps.Tensor, steps: ps.Tensor, bias: ps.Tensor) -> list[ps.Tensor]:
        return [ps.tanh((steps[step] * 2.0) @ weight.T + bias[step]) for step in range(5)]

    tensors = [ps.asarray(array) for array in (given_weight, steps, bias)]
    alone = [ps.tanh((tensors[1][step] * 2.0) @ tensors[0].T + tensors[2][step]).numpy() for step in range(5)]
    wanted = np.tanh(2 * steps.astype(np.float64) @ given_weight.T.astype(np.float64) + bias)
    for step, (result, single) in enumerate(zip(ps.jit(each)(*tensors), alone, strict=True)):
        np.testing.assert_array_equal(result.numpy(), single)
        np.testing.assert_allclose(single, wanted[step], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("columns", [40, 37])
def test_products_store_concatenations(device: Device, axis: int, columns: int) -> None:
    arrays = normal(12, 50), normal(50, columns, seed=1), normal(3 * columns, 8, seed=2)

    @ps.jit
    def parts(x: ps.Tensor, w: ps.Tensor, v: ps.Tensor) -> tuple[ps.Tensor, ps.Tensor]:
        y = x @ w
        joined = ps.concat([y * 2.0, ps.tanh(y), y + 1.0], axis=axis)
        return joined, (joined @ v if axis else joined[:, :8])

    joined, after = parts(*(ps.asarray(array, device=device) for array in arrays))
    y = arrays[0] @ arrays[1]
    wanted = np.concatenate([y * 2, np.tanh(y), y + 1], axis=axis)
    np.testing.assert_allclose(joined.numpy(), wanted, rtol=1e-4, atol=1e-4)
    further = wanted @ arrays[2] if axis else wanted[:, :8]
    np.testing.assert_allclose(after.numpy(), further, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("given_rates")
def test_the_concatenation_is_stored_by_the_kernel_of_the_product() -> None:
    x, w = ps.asarray(normal(12, 50)), ps.asarray(normal(50, 40, seed=1))

    @ps.jit
    def parts(x: ps.Tensor, w: ps.Tensor) -> ps.Tensor:
        y = x @ w
        return ps.concat([y * 2.0, ps.tanh(y)], axis=1)

    parts(x, w).numpy()
    with ps.profile() as profile:
        parts(x, w).numpy()
    assert sum(kernel.calls for kernel in profile.kernels()) == 1


@pytest.mark.slow
def test_sums_of_many_columns_fit_into_local_memory() -> None:
    weight, rows = normal(20000, 16), normal(5, 64, 16, seed=1)
    tensors = [ps.asarray(array) for array in (weight, rows)]
    each = ps.jit(lambda weight, rows: [ps.tanh(rows[step]) @ weight.T for step in range(5)])
    results = each(*tensors)
    for step, result in enumerate(results):
        wanted = np.tanh(rows[step]) @ weight.T
        np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-4, atol=1e-4)
