"""The width of a CPU's vectors changes no bit of what its kernels compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from conftest import NATIVE
from test_graph import at
from test_quantize import assert_product, drawn, product

import penstock as ps
from penstock import Device, nn
from penstock.config import Settings
from penstock.drivers.driver import Capabilities
from penstock.drivers.opencl import OpenCLDriver, opencl_capabilities, pocl_cpu
from penstock.fusion.groups import partition
from penstock.graph import elementwise
from penstock.graph.dtypes import int64
from penstock.graph.node import Node
from penstock.graph.reducing import expand
from penstock.kernels.lower import fusible, write

WIDTHS = (8, 16)  # those of AVX2 and of AVX-512
# With and without what remains after vectors, on rows that are short, many and long.
SHAPES = [(3, 5), (6, 8), (4, 24), (40, 48), (7, 67), (5, 128), (9, 143), (33, 200), (2, 4500)]
# Rows, features, inputs, bits and integers with a scale of packed products.
PACKED = [(1, 7, 32, 4, 32), (3, 5, 480, 4, 32), (9, 3, 576, 4, 64), (2, 9, 96, 8, 32), (16, 6, 448, 8, 64)]

EXPRESSIONS: dict[str, Callable[[ps.Tensor], ps.Tensor]] = {
    "sum": ps.sum,
    "rows": lambda x: ps.sum(x, axis=1),
    "columns": lambda x: ps.sum(x, axis=0),
    "a product": lambda x: ps.prod(1 + x / 64, axis=1),
    "integers": lambda x: ps.sum((x * 9).astype(ps.int32), axis=1),
    "any": lambda x: ps.any(x > 2, axis=1),
    "max": lambda x: ps.max(x, axis=1),
    "min of integers": lambda x: ps.min((x * 9).astype(ps.int32), axis=1),
    "argmax": lambda x: ps.argmax(x, axis=1),
    "argmin of bytes": lambda x: ps.argmin((x * 9).astype(ps.int8), axis=1),
    "sort": ps.sort,
    "exp": ps.exp,
    "sin": lambda x: ps.sin(x * 1e7),
    "logarithm": lambda x: ps.log(ps.abs(x)),
    "power": lambda x: ps.abs(x) ** 1.7,
    "softmax": nn.functional.softmax,
    "layer norm": lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    "gelu": lambda x: nn.functional.gelu(x, "tanh"),
    "transpose": lambda x: ps.tanh(x.T) + 1,
    "halves": lambda x: (x.astype(ps.float16) * 3 + x).astype(ps.float16),
    "bfloat16": lambda x: ps.sum(x.astype(ps.bfloat16) * 3, axis=0),
    "rows of two": lambda x: ps.concat([x, -x], axis=1) * 2,
    "choices": lambda x: ps.where(x > 0, x, -1.5) + ps.floor(x),
    "gradient": ps.grad(lambda x: ps.sum(ps.tanh(x) ** 2)),
}


@pytest.fixture(scope="module")
def devices() -> Iterator[list[Device]]:
    opened = []
    for width in WIDTHS:
        driver = OpenCLDriver(NATIVE, f"opencl-{width}")
        driver.capabilities = replace(driver.capabilities, vector_width=width)
        opened.append(Device.over(driver, Settings(force_kernels=True, compile_ahead=False)))
    yield opened
    for device in opened:
        device.close()


@pytest.mark.skipif(not pocl_cpu.has_avx512(), reason="compilers for other CPUs may lack wider functions")
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_width_of_vectors_changes_no_bit(devices: list[Device], name: str) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        values = rng.standard_normal(shape).astype(np.float32) * 2
        values[0, :3] = np.nan, -0.0, np.inf
        results = [EXPRESSIONS[name](ps.asarray(values, device=device)).numpy() for device in devices]
        assert _bits(results[0]) == _bits(results[1]), f"{shape}: {results[0]} and {results[1]}"


def _bits(result: np.ndarray) -> bytes:
    """The bytes of a result, in which all NaNs are alike."""
    return np.where(result == result, result, np.nan).astype(result.dtype).tobytes()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("local_bytes", [1 << 10, 1 << 13, 1 << 20])
def test_packed_products_have_vectors_of_every_width(width: int, local_bytes: int) -> None:
    """Whatever remains of a row after vectors, and however few rows fit into local memory."""
    driver = OpenCLDriver(NATIVE, "opencl-packed")
    driver.capabilities = replace(driver.capabilities, vector_width=width, local_bytes=local_bytes)
    device = Device.over(driver, Settings(force_kernels=True, compile_ahead=False))
    try:
        for rows, columns, inner, bits, group in PACKED:
            packed = drawn(columns, inner, bits, group, rows, "float32")
            given = np.random.default_rng(rows).normal(size=(rows, inner))
            result, x = product(given, packed, bits, "float32", device)
            assert_product(result, x, packed, bits, "float32")
            in_place = 5 * inner <= local_bytes  # or the matrix is unpacked
            for row in range(rows if in_place else 0):  # whose bits do not depend on the others
                alone, _ = product(given[row : row + 1], packed, bits, "float32", device)
                assert result[row].tobytes() == alone.tobytes()
    finally:
        device.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("columns", [16, 24, 200])
def test_vectors_fill_the_registers_of_the_device(width: int, columns: int) -> None:
    """Unless items have eight bytes, or the axis is short and most of it would remain after such vectors."""
    can = replace(opencl_capabilities(NATIVE), vector_width=width)
    x = at(np.zeros((3, columns), np.float32))
    column = at(np.zeros((3, 1), np.float32))
    wide = width == 16 and columns != 24
    assert ("float16" in _text(elementwise.add(x, expand(column, x.shape)), can)) == wide
    assert "long16" not in _text(elementwise.negative(elementwise.cast(x, int64)), can)


def _text(wanted: Node, can: Capabilities) -> str:
    """The kernel of a value that is a single group."""
    (group,) = partition([wanted], lambda node: fusible(node, can))
    lowering = write(group, can, "kernel")
    assert lowering is not None
    return lowering.launches[0].source.text
