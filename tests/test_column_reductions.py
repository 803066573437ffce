"""Column sums fused into the kernels that compute the rows: as groups, and on GPUs against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, examples, opencl_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fusion import holds
from test_graph import at

import penstock as ps
from penstock import Device, nn
from penstock.drivers.driver import Driver
from penstock.drivers.opencl import opencl_capabilities
from penstock.execution import realize
from penstock.execution.realize import executables
from penstock.execution.structure import Structure
from penstock.fusion import splitting
from penstock.fusion.column_reductions import column_units, is_column_part
from penstock.fusion.groups import Group, partition
from penstock.fusion.splitting import split
from penstock.graph import contraction, elementwise, reducing, shaping
from penstock.graph.node import Node
from penstock.kernels.lower import fusible

GPU = replace(opencl_capabilities(NATIVE), vector_width=1, compute_units=4)


def groups(*wanted: Node) -> list[Group]:
    parted = split(wanted, GPU)
    result = partition(parted, lambda node: fusible(node, GPU), column_units=GPU.compute_units)
    holds(result, parted)
    return result


def with_column_sums(result: list[Group]) -> list[tuple[str, int]]:
    """The kind of each group with fused column sums, and their number."""
    counts = [
        (group.kind, sum(map(is_column_part, group.outputs))) for group in result if group.kind != "column"
    ]
    return [(kind, count) for kind, count in counts if count]


def rows(shape: tuple[int, int] = (512, 96)) -> Node:
    return at(np.ones(shape, np.float32))


def centred(x: Node) -> Node:
    return elementwise.subtract(x, reducing.restore(reducing.sum_(x, (1,)), x, (1,)))


def down(x: Node) -> Node:
    return reducing.sum_(x, (0,))


# Groups


def test_a_map_adds_up_what_it_writes() -> None:
    y = elementwise.exp(rows())
    result = groups(y, down(y))
    assert with_column_sums(result) == [("row", 1)]
    assert [group.kind for group in result] == ["row", "column"]
    assert result[0].columns == 96


def test_a_row_group_adds_up_what_it_reads_writes_and_could_compute() -> None:
    x = contraction.matmul(rows(), at(np.ones((96, 96), np.float32)))
    y = centred(x)
    result = groups(y, down(x), down(y), down(elementwise.multiply(x, y)))
    assert [group.kind for group in result][:2] == ["matmul", "row"]
    assert with_column_sums(result) == [("row", 3)]
    assert result[1].inputs == (x,)


def test_what_would_read_more_is_by_itself() -> None:
    x = rows()
    y = centred(x)
    assert not with_column_sums(groups(y, down(elementwise.multiply(y, rows()))))


def test_a_kernel_keeps_few() -> None:
    y = elementwise.exp(rows())
    powers = [y]
    for _ in range(4):
        powers.append(elementwise.multiply(powers[-1], y))
    kept = with_column_sums(groups(y, *map(down, powers)))
    assert sum(count for _, count in kept) <= 3


def test_sums_of_what_no_kernel_has_are_by_themselves() -> None:
    x = rows()
    product = contraction.matmul(x, at(np.ones((96, 96), np.float32)))
    for result in (groups(down(x)), groups(product, down(product))):
        assert not with_column_sums(result)


def test_no_circle_arises() -> None:
    """An operation on a column sum needs the complete sum, so it is not in the group of the sum."""
    y = elementwise.exp(rows())
    total = down(y)
    z = elementwise.divide(y, reducing.expand(shaping.reshape(total, (1, 96)), y.shape))
    result = groups(y, z, down(z))
    assert with_column_sums(result) == [("row", 1), ("row", 1)]


def test_rows_that_lie_otherwise_are_read_otherwise() -> None:
    y = elementwise.exp(rows((512, 512)))
    turned = shaping.permute(y, (1, 0))
    assert not with_column_sums(groups(y, down(elementwise.negative(turned))))


def test_short_wide_and_uneven_sums_are_cut_as_before() -> None:
    for shape in ((8, 4096), (509, 96), (64, 8192)):
        y = elementwise.exp(rows(shape))
        assert not with_column_sums(groups(y, down(y)))


def test_only_kernels_in_c_for_threads_keep_them() -> None:
    assert column_units(GPU) == 4
    assert not column_units(replace(GPU, vector_width=8))
    assert not column_units(replace(GPU, language="wgsl"))


# On devices


def _threads() -> Driver:
    driver = opencl_threads()
    driver.capabilities = replace(driver.capabilities, compute_units=4)
    return driver


@pytest.fixture(scope="module", params=["opencl-threads", *CUDA_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
        patch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
        patch.setattr(splitting, "_LARGE", 1)
        made = Device.over({"opencl-threads": _threads, **DRIVERS}[request.param]())
        yield made
        made.close()


def kept(device: Device, *tensors: ps.Tensor) -> int:
    """How many fused column sums the program of some tensors has."""
    nodes = [tensor._node for tensor in tensors]
    program = executables(device).build(Structure(nodes))
    return sum(count for _, count in with_column_sums([step.group for step in program.schedule.groups]))


def norm(x: Any, g: Any, of: Any) -> tuple[Any, ...]:
    """The gradient of a norm without a scale, and the sums for the gradients of a scale and a shift."""
    mean = of.sum(x, axis=1, keepdims=True) / x.shape[1]
    centre = x - mean
    near = centre / of.sqrt(of.sum(centre * centre, axis=1, keepdims=True) / x.shape[1] + 1)
    dx = g - of.sum(g, axis=1, keepdims=True) / x.shape[1] - near
    return dx, of.sum(g * near, axis=0), of.sum(g, axis=0)


def slope(x: Any, g: Any, of: Any) -> tuple[Any, ...]:
    y = g * of.tanh(x)
    return y, of.sum(y, axis=0)


COLUMNS = st.one_of(st.integers(2, 70), st.sampled_from([96, 128, 384, 520, 1000, 1536, 3000, 4096]))


@given(function=st.sampled_from([norm, slope]), stretches=st.integers(2, 9), columns=COLUMNS)
@settings(max_examples=examples(14, quick=8), deadline=None)
def test_sums_on_the_way_are_those_of_numpy(
    device: Device, function: Callable[..., Any], stretches: int, columns: int
) -> None:
    draw = np.random.default_rng(columns)
    x, g = (draw.standard_normal((8 * stretches, columns)).astype(np.float32) for _ in range(2))
    results = function(ps.asarray(x, device=device), ps.asarray(g, device=device), ps)
    assert kept(device, *results) == (columns <= 512 or function is slope)
    realize.realize([result._node for result in results], device)
    for result, expected in zip(results, function(x.astype(float), g.astype(float), np), strict=True):
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_added_up_as_float32(device: Device, dtype: str) -> None:
    draw = np.random.default_rng(1)
    x, g = (
        ps.asarray(draw.standard_normal((4096, 64)), device=device).astype(getattr(ps, dtype))
        for _ in range(2)
    )
    exact = slope(x.astype(ps.float64).numpy(), g.astype(ps.float64).numpy(), np)
    results = slope(x, g, ps)
    assert kept(device, *results) == 1
    realize.realize([result._node for result in results], device)
    result = results[1].astype(ps.float32).numpy()
    np.testing.assert_allclose(result, exact[1], rtol=1e-2, atol=0.6)  # each item was rounded once


@pytest.mark.slow
def test_a_network_learns_the_same(device: Device) -> None:
    """All gradients of a small GPT, against those of the host."""
    tokens = np.random.default_rng(0).integers(0, 64, (8, 33)).astype(np.int32)
    gradients = []
    for where in (device, "host"):
        model = nn.GPT(vocab_size=64, context=32, width=48, layers=1, heads=3, device=where)
        draw = np.random.default_rng(2)
        with ps.no_grad():
            for parameter in model.parameters():
                parameter[...] = ps.asarray(
                    0.1 * draw.standard_normal(parameter.shape).astype(np.float32), device=where
                )
        batch = ps.asarray(tokens, device=where)
        model.loss(batch[:, :-1], batch[:, 1:]).backward()
        realize.realize(
            [parameter.grad._node for parameter in model.parameters()], batch.device
        )  # in one program
        gradients.append({name: value.grad.numpy() for name, value in model.named_parameters()})
    for name, expected in gradients[1].items():
        np.testing.assert_allclose(gradients[0][name], expected, rtol=1e-3, atol=1e-5, err_msg=name)
