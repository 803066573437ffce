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

# Rows, steps and columns of products: with and without a remainder after micro-tiles of each width, few rows,
# and steps that are added up in blocks.
PRODUCTS = [
    *((7, 19, columns) for columns in (1, 5, 8, 15, 16, 17, 23, 24, 31, 32, 33, 40, 47, 48, 56, 100)),
    *((rows, 40, 72) for rows in (1, 2, 3, 8, 12, 13, 25, 77)),
    *((2, 4100, 72), (9, 2100, 40), (13, 2100, 56), (33, 1100, 90), (60, 700, 130)),
]
FEWER = PRODUCTS[4::3]  # of them
Operands = tuple[ps.Tensor, ps.Tensor]


def _halves(x: ps.Tensor, y: ps.Tensor) -> Operands:
    return x.astype(ps.float16), y.astype(ps.float16)


OPERANDS: dict[str, Callable[[ps.Tensor, ps.Tensor], Operands]] = {
    "rows": lambda x, y: (x, y),
    "a transposed left side": lambda x, y: (ps.reshape(x, x.shape[::-1]).T, y),
    "a transposed right side": lambda x, y: (x, ps.reshape(y, y.shape[::-1]).T),
    "both transposed": lambda x, y: (ps.reshape(x, x.shape[::-1]).T, ps.reshape(y, y.shape[::-1]).T),
    "halves": _halves,
    "batches": lambda x, y: (ps.stack([x, -x, x * 2]), ps.stack([y, y + 1, -y])),
}
EPILOGUES: dict[str, Callable[[ps.Tensor], ps.Tensor]] = {
    "bias": lambda product: product + product.shape[-1] * 0.1,
    "gelu": lambda product: nn.functional.gelu(product, "tanh"),
    "halves": lambda product: (product * 2).astype(ps.float16),
    "heads": lambda product: ps.permute_dims(ps.reshape(product, (product.shape[0], -1, 8)), (1, 0, 2)) * 2,
}
# Channels, sizes of images, and the sizes and strides of windows.
CONVOLUTIONS = [
    *((4, 20, size, 3, 1, 1) for size in (5, 8, 12, 16, 24, 32)),
    *((3, 150, 16, 3, 1, 1), (8, 12, 32, 5, 2, 2), (16, 16, 16, 1, 1, 0)),
]

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


wide = pytest.mark.skipif(
    not pocl_cpu.has_avx512(NATIVE), reason="compilers for other CPUs may lack wider functions"
)


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


@wide
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_width_of_vectors_changes_no_bit(devices: list[Device], name: str) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        values = rng.standard_normal(shape).astype(np.float32) * 2
        values[0, :3] = np.nan, -0.0, np.inf
        results = [EXPRESSIONS[name](ps.asarray(values, device=device)).numpy() for device in devices]
        assert _bits(results[0]) == _bits(results[1]), f"{shape}: {results[0]} and {results[1]}"


@wide
@pytest.mark.slow("both transposed", "batches")
@pytest.mark.parametrize("name", OPERANDS)
def test_products_add_in_the_same_order_in_vectors_of_any_width(devices: list[Device], name: str) -> None:
    for sizes in PRODUCTS if name == "rows" else FEWER:
        operands = _operands(sizes)

        def product(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
            left, right = OPERANDS[name](x, y)
            return left @ right

        _check_same(devices, product, operands, f"{sizes}")


@wide
@pytest.mark.slow("bias", "halves")
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues_of_products_have_the_same_bits(devices: list[Device], name: str) -> None:
    for sizes in FEWER:
        rows, steps, columns = sizes
        columns = -(-columns // 8) * 8 if name == "heads" else columns
        operands = _operands((rows, steps, columns))
        _check_same(devices, lambda x, y: EPILOGUES[name](x @ y), operands, f"{sizes}")


@wide
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_and_their_gradients_have_the_same_bits(
    devices: list[Device], case: tuple[int, int, int, int, int, int]
) -> None:
    before, after, size, window, stride, padding = case
    rng = np.random.default_rng(0)
    shapes = (2, before, size, size), (after, before, window, window)
    images, weight = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)

    def convolved(x: ps.Tensor, w: ps.Tensor) -> ps.Tensor:
        return nn.functional.conv2d(x, w, stride=stride, padding=padding)

    def loss(x: ps.Tensor, w: ps.Tensor) -> ps.Tensor:
        return ps.sum(ps.tanh(convolved(x, w)))

    for function in (convolved, ps.grad(loss, argnums=0), ps.grad(loss, argnums=1)):
        _check_same(devices, function, (images, weight), f"{case}")


@wide
@pytest.mark.parametrize(("rows", "columns"), [(4, 140), (8, 144), (13, 133), (40, 200)])
def test_panels_of_any_width_have_the_same_bits(devices: list[Device], rows: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    steps, weight = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((5, rows, 700), (columns, 700))
    )

    def each(steps: ps.Tensor, weight: ps.Tensor) -> ps.Tensor:
        return ps.stack([ps.tanh((steps[step] * 2.0) @ weight.T) for step in range(5)])

    _check_same(devices, each, (steps, weight), "")


def _operands(sizes: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(sum(sizes))
    rows, steps, columns = sizes
    left, right = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((rows, steps), (steps, columns))
    )
    left[-1, -1], right[0, -1] = np.inf, -0.0
    return left, right


def _check_same(
    devices: list[Device], function: Callable[..., ps.Tensor], arrays: tuple[np.ndarray, ...], what: str
) -> None:
    results = [
        ps.jit(function)(*(ps.asarray(array, device=device) for array in arrays)).numpy()
        for device in devices
    ]
    assert _bits(results[0]) == _bits(results[1]), f"{what}: {results[0]} and {results[1]}"


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
