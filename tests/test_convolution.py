"""Windows, convolutions and pooling against direct loops, on every driver, jitted and not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS, examples
from differences import check_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import Device, nn
from penstock.graph.windows import overlap_add, window_count, windows
from penstock.nn import functional as F  # noqa: N812
from penstock.tensor.core import record

OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))


@pytest.fixture(scope="module", params=[OPENCL, "host", *CUDA_KINDS, *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def convolve(
    x: np.ndarray,
    w: np.ndarray,
    g: np.ndarray | None,
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    groups: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The convolution, and the gradients by both arguments of its product with `g`, window by window."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *padding))
    sizes = w.shape[2:]
    spans = [(k - 1) * d + 1 for k, d in zip(sizes, dilation, strict=True)]
    counts = [(n - r) // s + 1 for n, r, s in zip(padded.shape[2:], spans, stride, strict=True)]
    out, dx, dw = np.zeros((len(x), len(w), *counts)), np.zeros_like(padded), np.zeros(w.shape)
    inner, outer = w.shape[1], len(w) // groups
    for group in range(groups):
        ins, outs = slice(group * inner, (group + 1) * inner), slice(group * outer, (group + 1) * outer)
        for window in np.ndindex(*counts):
            for item in np.ndindex(*sizes):
                at = tuple(o * s + k * d for o, s, k, d in zip(window, stride, item, dilation, strict=True))
                taps, own = w[(outs, slice(None), *item)], padded[(slice(None), ins, *at)]
                out[(slice(None), outs, *window)] += own @ taps.T
                if g is not None:
                    slope = g[(slice(None), outs, *window)]
                    dx[(slice(None), ins, *at)] += slope @ taps
                    dw[(outs, slice(None), *item)] += slope.T @ own
    inside = tuple(slice(before, before + n) for (before, _), n in zip(padding, x.shape[2:], strict=True))
    return out, dx[(slice(None), slice(None), *inside)], dw


def with_gradients(function: Any, device: Device, g: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
    """A function's value and its gradients, which are the same inside jit."""

    def both(*tensors: ps.Tensor) -> list[ps.Tensor]:
        values = []

        def total(*tensors: ps.Tensor) -> ps.Tensor:
            values[:] = [function(*tensors)]
            return ps.sum(values[0] * ps.asarray(g, device=device))

        _, slopes = ps.value_and_grad(total, tuple(range(len(arrays))))(*tensors)
        return [*values, *slopes]

    tensors = [ps.asarray(array, device=device) for array in arrays]
    eager, jitted = ([t.numpy() for t in run(*tensors)] for run in (both, ps.jit(both)))
    for a, b in zip(eager, jitted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return eager


def check(result: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(result, wanted, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(b).max()))


@settings(max_examples=examples(100, 40), deadline=None)
@given(
    size=st.integers(1, 4),
    stride=st.integers(1, 5),
    dilation=st.integers(1, 3),
    more=st.integers(0, 9),
    axis=st.integers(0, 2),
)
def test_windows_and_their_opposite(size: int, stride: int, dilation: int, more: int, axis: int) -> None:
    shape = [2, 3, 2]
    shape[axis] = length = (size - 1) * dilation + 1 + more
    x = normal(*shape)
    tensor = ps.asarray(x, device="host")
    view = record(windows(tensor._node, axis, size, stride, dilation), tensor)
    count = window_count(length, size, stride, dilation)
    place = np.arange(count)[:, None] * stride + np.arange(size) * dilation
    np.testing.assert_array_equal(view.numpy(), np.take(x, place, axis))
    g = normal(*view.shape, seed=1)
    wanted = np.zeros_like(x)
    np.add.at(wanted, (slice(None),) * axis + (place,), g)
    given_g = ps.asarray(g, device="host")
    added = record(overlap_add(given_g._node, axis, length, stride, dilation), given_g)
    np.testing.assert_allclose(added.numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_gradients_of_gradients_of_windows() -> None:
    x, w = (array.astype(np.float64) for array in (normal(1, 2, 5, 4), normal(2, 2, 2, 2, seed=1)))

    def slope(x: ps.Tensor, w: ps.Tensor) -> ps.Tensor:
        return ps.grad(lambda x: ps.sum(F.conv2d(x, w, stride=(2, 1), padding=1) ** 3))(x)

    check_gradients(slope, x, w, tolerance=1e-5)
    check_gradients(lambda x: F.unfold(x, 2, dilation=2), x)
    check_gradients(lambda x: F.fold(x, (4, 3), 2), normal(1, 8, 6).astype(np.float64))


# Channels, outputs, groups, lengths, windows, stride, padding, dilation
SETTINGS = {
    "1d": (3, 4, 1, (9,), (3,), (1,), (1,), (1,)),
    "2d": (4, 6, 2, (6, 7), (3, 2), (1, 1), (1, 0), (1, 2)),
    "2d strided": (4, 4, 1, (7, 6), (3, 3), (2, 3), (1, 2), (1, 1)),
    "2d pointwise": (3, 5, 1, (4, 4), (1, 1), (2, 1), (0, 0), (1, 1)),
    "2d by channel": (4, 8, 4, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    "3d": (2, 2, 1, (4, 5, 3), (2, 3, 1), (1, 2, 1), (0, 1, 0), (1, 1, 1)),
    "2d in phases": (3, 4, 1, (11, 10), (5, 4), (3, 2), (2, 1), (1, 1)),
    "2d in phases, dilated": (4, 6, 2, (9, 8), (3, 3), (2, 4), (1, 2), (2, 2)),
    "2d of long rows": (5, 6, 1, (9, 24), (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d of many": (17, 13, 1, (18, 11), (3, 3), (1, 1), (1, 1), (1, 1)),
}


@pytest.mark.slow("webgpu", "2d of many", "2d strided", "3d")
@pytest.mark.parametrize("name", SETTINGS)
def test_convolutions(device: Device, name: str) -> None:
    channels, outputs, groups, lengths, sizes, stride, padding, dilation = SETTINGS[name]
    x, w = normal(2, channels, *lengths), normal(outputs, channels // groups, *sizes, seed=1)
    pairs = tuple((n, n) for n in padding)
    shape = convolve(x, w, None, stride, pairs, dilation, groups)[0].shape
    g = normal(*shape, seed=2)
    wanted = convolve(x, w, g, stride, pairs, dilation, groups)
    axes = len(lengths)
    conv = getattr(F, f"conv{axes}d")
    result = with_gradients(lambda x, w: conv(x, w, None, stride, padding, dilation, groups), device, g, x, w)
    check(result, list(wanted))
    # Transposed, from the shape of the result to that of the images.
    least = [
        (n - 1) * s + (k - 1) * d + 1 - 2 * p
        for n, s, k, d, p in zip(shape[2:], stride, sizes, dilation, padding, strict=True)
    ]
    more = tuple(n - m for n, m in zip(lengths, least, strict=True))
    transpose = getattr(F, f"conv_transpose{axes}d")
    back = with_gradients(
        lambda g, w: transpose(g, w, None, stride, padding, more, groups, dilation), device, x, g, w
    )
    check(back, [wanted[1], wanted[0], wanted[2]])


@settings(max_examples=examples(100, 15), deadline=None)
@given(data=st.data())
def test_random_convolutions(data: st.DataObject) -> None:
    axes = data.draw(st.integers(1, 2))

    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.integers(least, most), min_size=axes, max_size=axes)))

    groups, sizes, dilation, stride, padding = (
        data.draw(st.integers(1, 3)),
        each(1, 3),
        each(1, 2),
        each(1, 3),
        each(0, 3),
    )
    lengths = tuple((k - 1) * d + n for k, d, n in zip(sizes, dilation, each(1, 5), strict=True))
    x = normal(data.draw(st.integers(1, 3)), 2 * groups, *lengths)
    w = normal(groups * data.draw(st.integers(1, 2)), 2, *sizes, seed=1)
    pairs = tuple((n, n) for n in padding)
    g = normal(*convolve(x, w, None, stride, pairs, dilation, groups)[0].shape, seed=2)
    conv = getattr(F, f"conv{axes}d")
    host = next(d for d in ps.devices() if d.name == "host")
    result = with_gradients(lambda x, w: conv(x, w, None, stride, padding, dilation, groups), host, g, x, w)
    check(result, list(convolve(x, w, g, stride, pairs, dilation, groups)))


@pytest.mark.parametrize("columns", range(2, 6))
def test_few_windows_of_several_rows(device: Device, columns: int) -> None:
    """Those of a row are neighbours in memory, and the last of all may be as far as if all of them were."""
    for rows in range(2, 5):
        x, w = normal(1, 1, rows, columns), normal(4, 1, 1, 2, seed=1)
        result = F.conv2d(ps.asarray(x, device=device), ps.asarray(w, device=device)).numpy()
        windows = np.lib.stride_tricks.sliding_window_view(x[0, 0], 2, axis=1)
        expected = np.einsum("hwk,ok->ohw", windows, w[:, 0, 0])[None]
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_windows_are_not_written_out(device: Device) -> None:
    """The product reads windows in place, unless a library computes it, which needs contiguous operands."""
    if device.capabilities.matmul_library or device.name.startswith("host"):
        pytest.skip("a library computes the product")
    x, w = ps.asarray(normal(2, 16, 32, 32), device=device), ps.asarray(normal(8, 16, 3, 3), device=device)
    steps = [line for line in str(ps.explain(F.conv2d(x, w))).splitlines() if " -> " in line]
    assert len(steps) == 1
    assert "windows" in steps[0]


def pooled(x: np.ndarray, sizes: Any, stride: Any, padding: Any, reduce: Any) -> np.ndarray:
    """A function of the items of each window that are inside, and of how many it has with the padding."""
    counts = [
        (n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[2:], sizes, stride, padding, strict=True)
    ]
    out = np.zeros((*x.shape[:2], *counts))
    for window in np.ndindex(*counts):
        starts = [o * s - p for o, s, p in zip(window, stride, padding, strict=True)]
        inside = tuple(
            slice(max(b, 0), min(b + k, n)) for b, k, n in zip(starts, sizes, x.shape[2:], strict=True)
        )
        items = x[(slice(None), slice(None), *inside)]
        out[(slice(None), slice(None), *window)] = reduce(items.reshape(*x.shape[:2], -1))
    return out


@pytest.mark.parametrize("axes", [1, 2])
def test_pooling(device: Device, axes: int) -> None:
    x = normal(2, 3, *(7, 6)[:axes])
    sizes, stride, padding = (3, 2)[:axes], (2, 1)[:axes], (1, 1)[:axes]
    tensor = ps.asarray(x, device=device)
    most, mean = getattr(F, f"max_pool{axes}d"), getattr(F, f"avg_pool{axes}d")
    np.testing.assert_array_equal(
        most(tensor, sizes, stride, padding).numpy(),
        pooled(x, sizes, stride, padding, lambda items: items.max(-1)),
    )
    whole = math.prod(sizes)
    for include, divide in ((True, lambda n: whole), (False, lambda n: n)):
        wanted = pooled(x, sizes, stride, padding, lambda i, d=divide: i.sum(-1) / d(i.shape[-1]))
        result = mean(tensor, sizes, stride, padding, count_include_pad=include).numpy()
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_maximum_goes_to_the_first(device: Device) -> None:
    x = ps.asarray(np.float32([[[1, 3, 3, 2, 3, 0]]]), device=device).requires_grad_()
    value, index = F.max_pool1d(x, 3, 1, return_indices=True)
    assert index.numpy().tolist() == [[[1, 1, 2, 4]]]
    ps.sum(value * ps.asarray(np.float32([1, 10, 100, 1000]), device=device)).backward()
    assert x.grad is not None
    assert x.grad.numpy().tolist() == [[[0, 11, 100, 0, 1000, 0]]]


@pytest.mark.parametrize("axes", [1, 3])
def test_adaptive_pooling_of_other_dimensions(axes: int) -> None:
    x = np.random.default_rng(axes).standard_normal((2, 3, *(7, 5, 6)[:axes]))
    most, mean = getattr(F, f"adaptive_max_pool{axes}d"), getattr(F, f"adaptive_avg_pool{axes}d")
    for pool, function in ((most, np.max), (mean, np.mean)):
        wanted = x
        for axis in range(2, 2 + axes):  # windows of several axes are products of their windows
            length = wanted.shape[axis]
            windows = [(at * length // 2, -(-(at + 1) * length // 2)) for at in range(2)]
            parts = [function(np.take(wanted, range(*w), axis), axis=axis) for w in windows]
            wanted = np.stack(parts, axis)
        np.testing.assert_allclose(pool(ps.asarray(x), 2).numpy(), wanted, rtol=1e-12)


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_unpooling_puts_items_back(device: Device, axes: int) -> None:
    x = normal(2, 3, *(7, 5, 4)[:axes])
    pool, back = getattr(F, f"max_pool{axes}d"), getattr(F, f"max_unpool{axes}d")
    items, index = pool(ps.asarray(x, device=device), 2, return_indices=True)
    assert back(items, index, 2).shape == (2, 3, *(n // 2 * 2 for n in x.shape[2:]))
    result = back(items, index, 2, output_size=x.shape)
    wanted = np.zeros((2, 3, math.prod(x.shape[2:])), np.float32)
    places = index.numpy().reshape(2, 3, -1)
    np.put_along_axis(wanted, places, items.numpy().reshape(2, 3, -1), 2)
    np.testing.assert_array_equal(result.numpy(), wanted.reshape(x.shape))
    slope = normal(*x.shape, seed=1)
    up = ps.asarray(slope, device=device)
    gradient = ps.grad(lambda items: ps.sum(back(items, index, 2, output_size=x.shape) * up))(items)
    expected = np.take_along_axis(slope.reshape(2, 3, -1), places, 2).reshape(items.shape)
    np.testing.assert_array_equal(gradient.numpy(), expected)
    module = getattr(nn, f"MaxUnpool{axes}d")(2)
    np.testing.assert_array_equal(module(items, index, x.shape).numpy(), result.numpy())
    with pytest.raises(ValueError, match="give or take less than a stride"):
        back(items, index, 2, output_size=[n + 5 for n in x.shape])
    with pytest.raises(ValueError, match=r"items of shape .* and indices of shape"):
        back(items, index[:1], 2)


def test_padding_counts_axes_from_the_last() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    wanted = np.pad(x, ((0, 0), (3, 0), (1, 2)), constant_values=5)
    np.testing.assert_array_equal(F.pad(ps.asarray(x), (1, 2, 3, 0), value=5).numpy(), wanted)
    wanted = np.pad(x, ((0, 0), (0, 0), (2, 1)), mode="reflect")
    np.testing.assert_array_equal(F.pad(ps.asarray(x), (2, 1), mode="reflect").numpy(), wanted)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_adaptive_pooling(count: int) -> None:
    x = np.random.default_rng(3).permutation(60).reshape(1, 2, 6, 5).astype(np.float64)
    wanted = np.zeros((2, 1, 2, count, count))
    for i, j in itertools.product(range(count), repeat=2):
        rows, columns = (slice(at * n // count, -(-(at + 1) * n // count)) for at, n in ((i, 6), (j, 5)))
        part = x[:, :, rows, columns]
        wanted[:, :, :, i, j] = part.mean((2, 3)), part.max((2, 3))
    tensor = ps.asarray(x)
    np.testing.assert_allclose(F.adaptive_avg_pool2d(tensor, count).numpy(), wanted[0], rtol=1e-12)
    value, index = F.adaptive_max_pool2d(tensor, (count, count), return_indices=True)
    np.testing.assert_array_equal(value.numpy(), wanted[1])
    np.testing.assert_array_equal(
        np.take_along_axis(x.reshape(1, 2, -1), index.numpy().reshape(1, 2, -1), -1),
        value.numpy().reshape(1, 2, -1),
    )
    check_gradients(lambda x: F.adaptive_max_pool2d(x, count), x)
    check_gradients(lambda x: F.adaptive_avg_pool2d(x, count), x)


def test_padding_modes_and_same() -> None:
    x = normal(1, 2, 6, 5)
    for mode, name in (
        ("reflect", "reflect"),
        ("replicate", "edge"),
        ("circular", "wrap"),
        ("zeros", "constant"),
    ):
        layer = nn.Conv2d(2, 3, (3, 2), padding="same", dilation=(1, 2), padding_mode=mode)
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode=name)
        assert layer.bias is not None
        w, b = layer.weight.numpy(), layer.bias.numpy()
        wanted = convolve(padded, w, None, (1, 1), ((0, 0), (0, 0)), (1, 2), 1)[0] + b[:, None, None]
        np.testing.assert_allclose(layer(ps.asarray(x)).numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_modules_have_pytorchs_shapes_and_words() -> None:
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False)
    assert conv.weight.shape == (6, 2, 3, 3)
    assert (
        repr(conv) == "Conv2d(4, 6, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), groups=2, bias=False)"
    )
    bound = 1 / math.sqrt(2 * 9)
    assert bound * 0.8 < np.abs(conv.weight.numpy()).max() <= bound
    back = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, groups=2)
    assert {name: t.shape for name, t in back.named_parameters()} == {"weight": (6, 2, 3, 3), "bias": (4,)}
    x = ps.asarray(normal(1, 6, 5, 5))
    assert back(x).shape == (1, 4, 9, 9)
    assert back(x, output_size=(10, 9)).shape == (1, 4, 10, 9)
    assert nn.MaxPool2d(2)(x).shape == (1, 6, 2, 2)
    assert nn.AvgPool2d(2, ceil_mode=True)(x).shape == (1, 6, 3, 3)
    assert nn.AdaptiveAvgPool2d((None, 1))(x).shape == (1, 6, 5, 1)
    assert nn.Conv1d(3, 2, 2)(ps.asarray(normal(3, 8))).shape == (2, 7)


def test_half_precision_sums_in_float32(device: Device) -> None:
    x, w = normal(1, 64, 6, 6), normal(2, 64, 3, 3, seed=1)
    wanted = convolve(
        *(a.astype(np.float16).astype(np.float32) for a in (x, w)), None, (1, 1), ((0, 0),) * 2, (1, 1), 1
    )
    result = F.conv2d(*(ps.asarray(a.astype(np.float16), device=device) for a in (x, w)))
    assert result.dtype == ps.float16
    np.testing.assert_allclose(result.numpy(), wanted[0], rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w: F.conv2d(x, w, groups=2), "takes 6 channels"),
        (lambda x, w: F.conv2d(x, w, dilation=9), "do not fit"),
        (lambda x, w: F.conv2d(x, w, padding="all"), "'same' or 'valid'"),
        (lambda x, w: F.conv2d(x, w, stride=2, padding="same"), "stride of 1"),
        (lambda x, w: F.conv2d(x, w, stride=0), "stride is an integer of 1 or more"),
        (lambda x, w: F.conv2d(x, w, bias=x), "a bias of shape"),
        (lambda x, w: F.conv3d(x, w), "3 more axes"),
        (lambda x, w: F.conv_transpose2d(x, w), "takes 4 channels"),
        (lambda x, w: F.conv_transpose2d(x, ps.zeros((3, 2, 2, 2)), output_padding=1), "less than stride"),
        (lambda x, w: F.max_pool2d(x, 2, padding=2), "half of a window"),
        (lambda x, w: F.max_pool2d(x, 9), "do not fit"),
        (lambda x, w: F.adaptive_avg_pool2d(x, (1, 2, 3)), "a single size or 2"),
        (lambda x, w: F.fold(x, 4, 2), "is needed"),
        (lambda x, w: nn.Conv2d(3, 4, 2, groups=2), "multiples of groups"),
        (lambda x, w: nn.Conv2d(3, 4, 2, padding_mode="mirror"), "padding_mode is"),
        (lambda x, w: nn.ConvTranspose2d(3, 2, 2, stride=2)(x, output_size=3), "are possible for shape"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(ps.asarray(normal(1, 3, 5, 5)), ps.asarray(normal(4, 3, 2, 2)))
    with pytest.raises(TypeError, match="floating point"):
        F.conv1d(ps.zeros((1, 1, 3), dtype=ps.int32), ps.zeros((1, 1, 1)))


SECOND = {
    "convolution": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(2, 3, 6, 5), (4, 3, 3, 3)]),
    "transpose": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 3, 4, 4), (3, 2, 3, 3)]),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [(3, 2, 3, 3), (2,), (2,)],
    ),
    "batch norm without parameters": (
        lambda x: F.batch_norm(x, None, None, training=True),
        [(5, 3)],
    ),
    "maximum": (lambda x: F.max_pool2d(x, 3, 2, padding=1), [(2, 2, 6, 6)]),
}


@pytest.mark.parametrize("name", SECOND)
def test_gradients_of_gradients_against_differences(name: str) -> None:
    function, shapes = SECOND[name]
    host = partial(ps.asarray, device="host")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    weights = [host(rng.standard_normal(shape)) for shape in shapes]
    every = tuple(range(len(shapes)))

    def slope(*args: ps.Tensor) -> ps.Tensor:
        """A linear function of the gradient."""
        parts = ps.grad(lambda *own: ps.sum(ps.tanh(function(*own)) ** 2), every)(*args)
        return ps.stack([ps.sum(part * weight) for part, weight in zip(parts, weights, strict=True)]).sum()

    direction = [rng.standard_normal(shape) for shape in shapes]
    parts = ps.grad(slope, every)(*(host(array) for array in arrays))
    by_gradient = sum((part.numpy() * way).sum() for part, way in zip(parts, direction, strict=True))
    step = 1e-5
    ends = [
        slope(*(host(array + sign * step * way) for array, way in zip(arrays, direction, strict=True)))
        for sign in (1, -1)
    ]
    by_difference = (ends[0].item() - ends[1].item()) / (2 * step)
    np.testing.assert_allclose(by_gradient, by_difference, 1e-6, 1e-7)
