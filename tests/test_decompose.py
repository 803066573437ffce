"""Recorded graphs are the same on every device; their decomposition for each device."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from test_graph import at, check_gradient, evaluate, sample

import penstock as ps
from penstock.drivers.driver import Capabilities
from penstock.drivers.host import HostDriver
from penstock.graph import contraction, cross_entropy, elementwise, shaping
from penstock.graph.decompose import decompose
from penstock.graph.dtypes import bfloat16, float32
from penstock.graph.gradient import gradients
from penstock.graph.node import Kind, Node, topological

PLAIN = HostDriver("decompose").capabilities
LIBRARY = replace(PLAIN, matmul_library=True, tensor_cores=True)
CPU = replace(PLAIN, vector_width=8)


def names(node: Node, capabilities: Capabilities) -> list[str]:
    (result,) = decompose([node], capabilities)
    assert (result.shape, result.dtype) == (node.shape, node.dtype)
    return [node.primitive.name for node in topological([result]) if node.value is None]


def test_what_every_device_has_stays_as_it_is() -> None:
    x = at(np.ones((2, 3), np.float32))
    node = elementwise.exp(contraction.matmul(x, shaping.permute(x, (1, 0))))
    assert decompose([node], PLAIN) == [node]


def test_products_of_bfloat16_are_in_float32_where_there_is_no_library() -> None:
    x = elementwise.cast(at(np.ones((2, 3), np.float32)), bfloat16)
    product = contraction.matmul(x, shaping.permute(x, (1, 0)))
    assert decompose([product], LIBRARY) == [product]
    assert names(product, PLAIN) == ["cast", "cast", "cast", "permute", "matmul", "cast"]
    (result,) = decompose([elementwise.negative(product)], PLAIN)
    assert result.inputs[0].inputs[0].dtype == float32


def test_the_error_function_is_made_of_others() -> None:
    x = at(np.linspace(-3, 3, 9))
    assert "erf" not in names(elementwise.erf(x), PLAIN)
    assert "erf" not in names(elementwise.erf(elementwise.cast(x, bfloat16)), PLAIN)


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_error_function(device: ps.Device, dtype: type) -> None:
    spread = np.logspace(math.log10(np.finfo(dtype).tiny), 1, 500)
    x = np.concatenate([np.linspace(-7, 7, 5001), spread, -spread]).astype(dtype)
    expected = np.array([math.erf(float(value)) for value in x])
    for function in (ps.erf, ps.jit(ps.erf)):
        result = function(ps.asarray(x, device=device)).numpy().astype(np.float64)
        steps = np.abs(result - expected) / np.spacing(np.abs(expected).astype(dtype)).astype(np.float64)
        assert steps.max() <= 3
    # What it lacks to 1 is precise where it is small, but for what the exponential of a large number loses.
    expected = np.array([math.erfc(float(value)) for value in x])
    result = ps.erfc(ps.asarray(x, device=device)).numpy().astype(np.float64)
    np.testing.assert_allclose(
        result, expected, 2e-5 if dtype is np.float32 else 1e-13, atol=np.finfo(dtype).tiny
    )
    near = np.abs(x) < 1.5
    np.testing.assert_allclose(result[near], expected[near], 1e-6 if dtype is np.float32 else 3e-15)


def test_the_error_function_of_integers_is_that_of_float32(device: ps.Device) -> None:
    result = ps.erf(ps.arange(3, dtype=ps.int32, device=device))
    assert result.dtype == ps.float32
    np.testing.assert_allclose(result.numpy(), [math.erf(x) for x in range(3)], 1e-6)
    result = ps.kernel("x * erf(1)")(ps.ones(2, device=device)).numpy()
    np.testing.assert_allclose(result, math.erf(1), 1e-6)


def test_the_error_function_of_special_values(device: ps.Device) -> None:
    x = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 30, -30], np.float32)
    result = ps.jit(ps.erf)(ps.asarray(x, device=device)).numpy()
    np.testing.assert_array_equal(result, np.array([0, -0.0, 1, -1, math.nan, 1, -1], np.float32))
    assert np.signbit(result[:2]).tolist() == [False, True]
    result = ps.jit(ps.erfc)(ps.asarray(x, device=device)).numpy()
    np.testing.assert_array_equal(result, np.array([1, 1, 0, 2, math.nan, 0, 2], np.float32))


def test_the_gradient_of_the_error_function(device: ps.Device) -> None:
    x = np.linspace(-4, 4, 101).astype(np.float32)
    result = ps.grad(lambda x: ps.sum(ps.erf(x)))(ps.asarray(x, device=device)).numpy()
    expected = 2 / math.sqrt(math.pi) * np.exp(-(x.astype(np.float64) ** 2))
    np.testing.assert_allclose(result, expected, 1e-5)
    result = ps.grad(lambda x: ps.sum(ps.erfc(x)))(ps.asarray(x, device=device)).numpy()
    np.testing.assert_allclose(result, -expected, 1e-5)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("rows", [4, 100])
def test_the_loss_of_a_linear_layer(monkeypatch: pytest.MonkeyPatch, rows: int, kept: bool) -> None:
    monkeypatch.setattr(cross_entropy, "_rows_at_once", lambda *_: rows)
    arrays = [sample(10, 3, low=-1, high=1), sample(7, 3, low=-1, high=1, seed=1)]
    labels = at(np.arange(10) % 7)
    used = at(np.arange(10) != 4) if kept else None

    def loss(x: Node, weight: Node) -> Node:
        return cross_entropy.linear_cross_entropy(x, weight, labels, used, 0.1)

    check_gradient(loss, *arrays)
    nodes = [at(array) for array in arrays]
    whole = loss(*nodes)
    wanted = [whole, *gradients(whole, None, nodes)]
    for target in (PLAIN, CPU):
        result = decompose([node for node in wanted if node is not None], target)
        products = [node for node in topological(result) if node.primitive.kind is Kind.CONTRACTION]
        assert {node.primitive.name for node in products} == {"matmul"}
        for node, parts in zip(wanted, result, strict=True):
            assert node is not None
            np.testing.assert_allclose(evaluate(parts), evaluate(node), rtol=1e-9)
    slope = at(sample(7, 3, seed=2))
    check_gradient(lambda x, weight: gradients(loss(x, weight), None, [weight])[0] or slope, *arrays)


def test_what_is_recorded_is_the_same_on_every_device() -> None:
    recorded = []
    for number, capabilities in enumerate((PLAIN, LIBRARY, CPU)):
        driver = HostDriver(f"recording-{number}")
        driver.capabilities = capabilities
        device = ps.Device.over(driver)
        ps.random.manual_seed(0)
        model = ps.nn.GPT(vocab_size=20, context=8, width=32, layers=1, heads=2, device=device)
        model.to(ps.bfloat16)
        tokens = ps.zeros((2, 8), dtype=ps.int32, device=device)
        loss = model.loss(tokens, tokens)
        parts = gradients(loss._node, None, [weight._node for weight in model.parameters()])
        nodes = topological([loss._node, *(part for part in parts if part is not None)])
        recorded.append([(node.primitive.name, node.shape, node.dtype) for node in nodes])
        device.close()
    assert recorded[0] == recorded[1] == recorded[2]
