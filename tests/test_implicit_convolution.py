"""Convolutions whose kernels read windows from the image: their graphs by NumPy, and the kernels on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, examples
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_channels_last import LIBRARY, value
from test_convolution import convolve
from test_cuda_sources import Imagined

import penstock as ps
from penstock import Device
from penstock.compiler.passes import fused
from penstock.config import Settings
from penstock.drivers.cuda import compile_text
from penstock.graph import convolution, elementwise, reducing
from penstock.graph.channels_last import channels_last
from penstock.graph.convolution_reference import Geometry
from penstock.graph.decompose import decompose
from penstock.graph.dtypes import bfloat16, float16, float32, float64
from penstock.graph.gradient import gradients
from penstock.graph.node import Kind, Node, leaf, topological
from penstock.graph.simplify import simplify
from penstock.graph.windows import WINDOWS
from penstock.kernels.cache import whole_text
from penstock.kernels.lower import write
from penstock.kernels.templates.launches import Launch
from penstock.nn import functional as F  # noqa: N812

TENSOR_CORES = replace(LIBRARY, tensor_cores=True, tf32=True)
# Channels of a group, outputs of a group, groups
WIDTHS = [
    (16, 16, 1),
    (24, 40, 1),
    (64, 64, 1),
    (128, 64, 1),
    (64, 128, 1),
    (32, 16, 2),
    (1, 1, 16),
    (1, 2, 3),
    (2, 3, 4),
    (4, 1, 2),
]


@st.composite
def settings(draw: st.DrawFn) -> tuple[Geometry, tuple[int, ...], tuple[int, ...], tuple[int, int]]:
    """A geometry, the lengths of images, those of windows, and the channels of a group and its outputs."""
    axes = draw(st.integers(1, 3))
    sizes = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    padding = tuple((draw(st.integers(0, 2)),) * 2 for _ in range(axes))
    lengths = tuple(
        (size - 1) * apart + draw(st.integers(1, 4)) for size, apart in zip(sizes, dilation, strict=True)
    )
    channels, outputs, groups = draw(st.sampled_from(WIDTHS))
    return Geometry(stride, padding, dilation, groups), lengths, sizes, (channels, outputs)


def nodes_of(given: Any, dtype: np.dtype[Any], batch: int = 2) -> list[Node]:
    """A convolution, its transpose and its gradient by the weight, on random arrays."""
    geometry, lengths, sizes, (channels, outputs) = given
    random, groups = np.random.default_rng(1), geometry.groups

    def array(*shape: int) -> Node:
        return leaf(random.standard_normal(shape).astype(dtype), shape, dtype)

    x, weight = array(batch, channels * groups, *lengths), array(outputs * groups, channels, *sizes)
    g = array(batch, outputs * groups, *geometry.counts(lengths, sizes))
    return [
        convolution.convolution(x, weight, geometry),
        convolution.convolution_transpose(g, weight, geometry, lengths),
        convolution.convolution_weight(x, g, geometry, sizes),
    ]


def parts_of(node: Node) -> Node:
    """A node for a device with tensor cores, after the passes on its graph."""
    (last,) = channels_last(simplify(decompose([node], TENSOR_CORES)))
    return last


def implicit(node: Node) -> list[Node]:
    return [part for part in topological([node]) if part.primitive.kind is Kind.CONVOLUTION]


@given(settings())
@hypothesis_settings(max_examples=examples(100, 25), deadline=None)
def test_what_numpy_computes(given: Any) -> None:
    for node in nodes_of(given, float32):
        parts = parts_of(node)
        assert parts.shape == node.shape
        np.testing.assert_allclose(value(parts), value(node), 1e-4, 1e-4)


# Channels of a group, outputs of a group, groups, window, stride, dtype
ROADS = {
    "tiles": [
        (32, 64, 1, 3, 1, float32),
        (64, 64, 1, 3, 2, bfloat16),
        (16, 16, 2, 1, 1, float16),
        (24, 40, 1, 2, 1, bfloat16),
    ],
    "direct": [(1, 1, 32, 3, 1, float32), (2, 2, 8, 3, 2, bfloat16), (1, 3, 8, 3, 1, float16)],
    "products": [
        (32, 64, 1, 1, 1, bfloat16),  # a product of matrices as they lie in memory
        (32, 64, 1, 2, 2, bfloat16),  # windows that do not overlap are rows of a matrix
        (3, 64, 1, 7, 2, bfloat16),  # channels that a thread cannot read at once
        (256, 256, 1, 3, 1, bfloat16),  # the library gains more than writing windows costs
        (128, 128, 1, 3, 1, float32),
        (32, 32, 1, 3, 1, float64),
        (1, 1, 8, 3, 1, float64),
    ],
}


@pytest.mark.parametrize("road", ROADS)
def test_the_road_of_a_convolution(road: str) -> None:
    for channels, outputs, groups, size, stride, dtype in ROADS[road]:
        pairs = ((size // 2,) * 2,) * 2
        geometry = Geometry((stride,) * 2, pairs, (1, 1), groups)
        for node in nodes_of((geometry, (8, 8), (size, size), (channels, outputs)), dtype):
            parts = parts_of(node)
            if road == "products":
                assert not implicit(parts)
                continue
            assert [part.attributes["tiled"] for part in implicit(parts)] == [road == "tiles"]
            assert not any(part.primitive is WINDOWS for part in topological([parts]))


def test_float32_is_not_rounded_unless_it_may_be() -> None:
    geometry = Geometry((1, 1), ((1, 1),) * 2, (1, 1))
    exact = replace(TENSOR_CORES, tf32=False)
    for node in nodes_of((geometry, (8, 8), (3, 3), (32, 32)), float32):
        assert not implicit(decompose([node], exact)[0])
    by_channel = replace(geometry, groups=8)
    for node in nodes_of((by_channel, (8, 8), (3, 3), (1, 1)), float32):
        assert implicit(decompose([node], exact)[0])


def test_a_training_step_writes_no_windows() -> None:
    """The images between two convolutions are read where the norm before them wrote them."""
    random = np.random.default_rng(0)
    x = leaf(random.standard_normal((8, 32, 16, 16)).astype(bfloat16), (8, 32, 16, 16), bfloat16)
    weights = [
        leaf(random.standard_normal((32, 32, 3, 3)).astype(bfloat16), (32, 32, 3, 3), bfloat16)
        for _ in range(2)
    ]
    geometry = Geometry((1, 1), ((1, 1),) * 2, (1, 1))
    zero = elementwise.full(x.shape, bfloat16, 0)
    first = elementwise.maximum(convolution.convolution(x, weights[0], geometry), zero)
    loss = reducing.sum_(convolution.convolution(first, weights[1], geometry), (0, 1, 2, 3))
    slopes = [slope for slope in gradients(loss, None, weights) if slope is not None]
    wanted = channels_last(simplify(decompose([loss, *slopes], TENSOR_CORES)))
    groups = fused(wanted, TENSOR_CORES)
    assert sum(group.kind == "convolution" for group in groups) == 5
    assert max(node.size for group in groups for node in group.outputs) == x.size


def launches(given: Any, dtype: np.dtype[Any], batch: int = 2) -> list[Launch]:
    made: list[Launch] = []
    for number, node in enumerate(nodes_of(given, dtype, batch)):
        for group in fused([parts_of(node)], TENSOR_CORES):
            lowering = write(group, TENSOR_CORES, f"of_{number}")
            assert lowering is not None
            made += lowering.launches if group.kind == "convolution" else ()
    return made


COMPILED = [
    ((2, 2), (1, 1), (64, 64, 1)),
    ((1, 1), (1, 1), (32, 32, 1)),
    ((2, 3), (1, 2), (24, 40, 2)),
    ((2, 1), (1, 1), (1, 1, 16)),
    ((2, 3), (2, 1), (2, 3, 4)),
]


@pytest.mark.slow("sm_80")
@pytest.mark.parametrize(
    ("dtype", "architecture"),
    [(float32, "sm_80"), (float32, "sm_90a"), (bfloat16, "sm_80"), (float16, "sm_90a")],
    ids=str,
)
def test_kernels_compile(dtype: np.dtype[Any], architecture: str) -> None:
    for stride, dilation, (channels, outputs, groups) in COMPILED:
        geometry = Geometry(stride, ((1, 1), (0, 2)), dilation, groups)
        made = launches((geometry, (9, 10), (3, 3), (channels, outputs)), dtype)
        text = whole_text([launch.source for launch in made], "cuda")
        assert compile_text(text, architecture).startswith(b"\x7fELF")


@pytest.mark.parametrize("widths", [(64, 64, 1), (1, 1, 16)])
def test_kernels_serve_every_batch(widths: tuple[int, int, int]) -> None:
    channels, outputs, groups = widths
    geometry = Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), groups)
    few, many, wider = (
        launches((geometry, (9, width), (3, 3), (channels, outputs)), bfloat16, batch)
        for width, batch in ((10, 2), (10, 700), (11, 2))
    )
    assert len(few) == 4  # two for the gradient of the weight
    for launch, other, unlike in zip(few, many, wider, strict=True):
        assert launch.source.text == other.source.text
        assert launch.source.name == other.source.name
        assert launch.scalars != other.scalars
        assert launch.source.name != unlike.source.name or "sum" in launch.source.name


def test_another_batch_compiles_no_convolution() -> None:
    class Compiling(Imagined):
        def compile(self, source: Any, signatures: Any) -> Any:
            compiled.extend(name for name in signatures if name.startswith("convolution_"))
            return super().compile(source, signatures)

    compiled: list[str] = []
    device = Device.over(Compiling(tensor_cores=True), Settings(compile_ahead=False))
    weight = ps.ones((32, 32, 3, 3), dtype=ps.bfloat16, device=device, requires_grad=True)

    @ps.jit
    def step(images: ps.Tensor) -> ps.Tensor:
        loss = F.relu(F.conv2d(images, weight, padding=1)).sum()
        loss.backward()
        return loss

    for batch in (64, 7):  # the last of an epoch
        step(ps.ones((batch, 32, 16, 16), dtype=ps.bfloat16, device=device))
        assert len(compiled) == len({*compiled}) == 3  # of the image, and of the weight with a sum
    device.close()


# On a device


@pytest.fixture(scope="module", params=CUDA_KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param](), settings=Settings(tf32=True))
    yield made
    made.close()


BOUNDS = {float32: 2e-3, bfloat16: 1e-2, float16: 2e-3}  # of the error, relative to the whole array


@given(given=settings(), dtype=st.sampled_from([*BOUNDS]), batch=st.integers(1, 3))
@hypothesis_settings(max_examples=examples(100, 25), deadline=None)
def test_kernels_compute_convolutions(device: Device, given: Any, dtype: Any, batch: int) -> None:
    geometry, lengths, sizes, (channels, outputs) = given
    random, groups = np.random.default_rng(2), geometry.groups
    counts = geometry.counts(lengths, sizes)
    shapes = (
        (batch, channels * groups, *lengths),
        (outputs * groups, channels, *sizes),
        (batch, outputs * groups, *counts),
    )
    arrays = [random.standard_normal(shape).astype(dtype) for shape in shapes]
    x, weight, g = (ps.asarray(array, device=device) for array in arrays)
    conv = getattr(F, f"conv{len(lengths)}d")
    padding = tuple(before for before, _ in geometry.padding)
    for tensor in (x, weight):
        tensor.requires_grad_()
    y = conv(x, weight, None, geometry.stride, padding, geometry.dilation, groups)
    ps.sum(y * g).backward()
    wide = [array.astype(np.float64) for array in arrays]
    wanted = convolve(*wide, geometry.stride, geometry.padding, geometry.dilation, groups)
    for result, array in zip((y, x.grad, weight.grad), wanted, strict=True):
        assert result is not None
        error = np.linalg.norm(result.numpy().astype(np.float64) - array)
        assert error <= BOUNDS[dtype] * max(float(np.linalg.norm(array)), 1e-6)
