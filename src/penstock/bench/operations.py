"""The measured operations, with their operation counts and bytes."""

from __future__ import annotations

from typing import Any

from penstock.bench.case import Call, Case, Sizes, drawn, drawn_ids, operation
from penstock.bench.peer import Torch
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.runtime import Device
from penstock.tensor import arithmetic as ops
from penstock.tensor.autograd import grad
from penstock.tensor.core import Tensor
from penstock.tensor.creation import asarray
from penstock.tensor.linear import matmul, matmul_batch
from penstock.tensor.reduction import sum as sum_

_FLOAT = 4  # bytes
_ID = 8
_SEPARATE, _SMALL = 64, 32  # products of separate tensors, and their length


def operations(sizes: Sizes) -> list[Case]:
    """All of them."""
    return [
        _elementwise(sizes),
        *_sums(sizes),
        _softmax(sizes),
        _layer_norm(sizes),
        _cross_entropy(sizes),
        *(_matmul(*lengths) for lengths in sizes.products),
        _batched_matmul(*sizes.batch),
        _separate_matmuls(),
        _attention(*sizes.attention),
        *_embedding(*sizes.embedding),
        *_copies(sizes.copied),
    ]


def _chain(xp: Any, x: Any, y: Any) -> Any:
    """Eleven operations on each item."""
    return (xp.sqrt(xp.exp(-(x * y + x)) + y) * x - xp.tanh(y)) / (y + 1)


def _elementwise(sizes: Sizes) -> Case:
    n = sizes.items
    return operation(
        "elementwise",
        f"{n >> 20}M",
        flops=11 * n,
        nbytes=3 * n * _FLOAT,  # two inputs and the result
        inputs=lambda: [drawn(n), drawn(n)],
        ours=lambda x, y: _chain(ops, x, y),
        theirs=_chain,
    )


def _sums(sizes: Sizes) -> list[Case]:
    rows, columns = sizes.rows, sizes.columns
    n = rows * columns
    return [
        operation(
            "sum",
            f"{n >> 20}M",
            flops=n,
            nbytes=n * _FLOAT,
            inputs=lambda: [drawn(n)],
            ours=sum_,
            theirs=lambda torch, x: torch.sum(x),
        ),
        operation(
            "column-sum",
            f"{rows}x{columns}",
            flops=n,
            nbytes=(n + columns) * _FLOAT,
            inputs=lambda: [drawn(rows, columns)],
            ours=lambda x: sum_(x, axis=0),
            theirs=lambda torch, x: torch.sum(x, 0),
        ),
    ]


def _softmax(sizes: Sizes) -> Case:
    rows, columns = sizes.rows, sizes.columns
    return operation(
        "softmax",
        f"{rows}x{columns}",
        flops=5 * rows * columns,  # maximum, difference, exponential, sum, quotient
        nbytes=2 * rows * columns * _FLOAT,
        inputs=lambda: [drawn(rows, columns)],
        ours=lambda x: F.softmax(x, axis=1),
        theirs=lambda torch, x: torch.softmax(x, 1),
    )


def _layer_norm(sizes: Sizes) -> Case:
    rows, columns = sizes.rows, sizes.columns
    return operation(
        "layer-norm",
        f"{rows}x{columns}",
        flops=7 * rows * columns,  # sum, difference, square, sum, scale, weight, bias
        nbytes=(2 * rows + 2) * columns * _FLOAT,
        inputs=lambda: [drawn(rows, columns), drawn(columns), drawn(columns)],
        ours=lambda x, weight, bias: F.layer_norm(x, (columns,), weight, bias),
        theirs=lambda torch, x, weight, bias: torch.layer_norm(x, (columns,), weight, bias),
    )


def _cross_entropy(sizes: Sizes) -> Case:
    rows, columns = sizes.rows, sizes.columns
    return operation(
        "cross-entropy",
        f"{rows}x{columns}",
        flops=4 * rows * columns,  # maximum, difference, exponential, sum
        nbytes=rows * (columns * _FLOAT + _ID),
        inputs=lambda: [drawn(rows, columns), drawn_ids(columns, (rows,))],
        ours=F.cross_entropy,
        theirs=lambda torch, x, target: torch.nn.functional.cross_entropy(x, target),
    )


def _matmul(m: int, n: int, k: int) -> Case:
    return operation(
        "matmul",
        str(m) if m == n == k else f"{m}x{n}x{k}",
        flops=2 * m * n * k,
        nbytes=(m * k + k * n + m * n) * _FLOAT,
        inputs=lambda: [drawn(m, k), drawn(k, n)],
        ours=matmul,
        theirs=lambda torch, x, y: torch.matmul(x, y),
    )


def _batched_matmul(count: int, n: int) -> Case:
    return operation(
        "batched-matmul",
        f"{count}x{n}",
        flops=2 * count * n**3,
        nbytes=3 * count * n * n * _FLOAT,
        inputs=lambda: [drawn(count, n, n), drawn(count, n, n)],
        ours=matmul,
        theirs=lambda torch, x, y: torch.matmul(x, y),
    )


def _separate_matmuls() -> Case:
    """Small products of separate tensors."""
    count, n = _SEPARATE, _SMALL
    return operation(
        "matmul-batch",
        f"{count}x{n}",
        flops=2 * count * n**3,
        nbytes=3 * count * n * n * _FLOAT,
        inputs=lambda: [drawn(n, n) for _ in range(2 * count)],
        ours=lambda *x: matmul_batch(x[:count], x[count:]),
        theirs=lambda torch, *x: [torch.matmul(*pair) for pair in zip(x[:count], x[count:], strict=True)],
    )


def _attention(batch: int, heads: int, length: int, width: int) -> Case:
    shape = (batch, heads, length, width)
    return operation(
        "attention",
        "x".join(map(str, shape)),
        # Two products, half of each if causal; the softmax between them is not counted.
        flops=2 * batch * heads * length**2 * width,
        nbytes=4 * batch * heads * length * width * _FLOAT,  # queries, keys, values and the result
        inputs=lambda: [drawn(*shape) for _ in range(3)],
        ours=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        theirs=lambda torch, q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        ),
    )


def _embedding(words: int, width: int, count: int) -> list[Case]:
    size = f"{count} of {words}x{width}"

    def ours_gradient(ids: Tensor, weight: Tensor, g: Tensor) -> Any:
        return grad(lambda weight: sum_(F.embedding(ids, weight) * g))(weight)

    return [
        operation(
            "embedding",
            size,
            flops=0,
            nbytes=count * (2 * width * _FLOAT + _ID),  # rows read and written
            inputs=lambda: [drawn_ids(words, (count,)), drawn(words, width)],
            ours=F.embedding,
            theirs=lambda torch, ids, weight: torch.nn.functional.embedding(ids, weight),
        ),
        operation(
            "embedding-gradient",
            size,
            flops=count * width,
            nbytes=count * (width * _FLOAT + _ID) + words * width * _FLOAT,  # rows read, all words written
            inputs=lambda: [drawn_ids(words, (count,)), drawn(words, width), drawn(count, width)],
            ours=ours_gradient,
            theirs=lambda torch, ids, weight, g: torch.ops.aten.embedding_dense_backward(
                g, ids, words, -1, False
            ),
        ),
    ]


def _copies(nbytes: int) -> list[Case]:
    """Copies between host and device memory; each byte is counted once."""
    size = f"{nbytes >> 20}MiB"
    count = nbytes // _FLOAT

    def upload(device: Device) -> Call:
        array = drawn(count)
        return lambda: asarray(array, device=device)

    def torch_upload(peer: Torch) -> Call:
        array = drawn(count)
        return lambda: peer.tensor(array)

    def download(device: Device) -> Call:
        return asarray(drawn(count), device=device).numpy

    def torch_download(peer: Torch) -> Call:
        tensor = peer.tensor(drawn(count))
        return lambda: tensor.to("cpu", copy=True).numpy()

    return [
        Case("upload", size, 0, nbytes, upload, torch_upload, "upload"),
        Case("download", size, 0, nbytes, download, torch_download, "download"),
    ]
