"""Whole training steps: forward, backward and the update of all parameters in a jitted function.

Operations are those of the matrix products, forward and twice that backward: the minimum of a network,
however it is computed. Bytes are those of the update, which reads and writes each parameter and its
two moments, and of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.bench.case import Array, Call, Case, drawn, drawn_ids
from penstock.bench.peer import Torch
from penstock.nn import GPT, Linear, Module, ReLU, Sequential, Tanh
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.optim import Adam, AdamW
from penstock.runtime import Device
from penstock.tensor.core import Tensor
from penstock.tensor.creation import asarray
from penstock.tensor.jit import jit

_PARAMETER = 6 * 4  # bytes that the update of a parameter moves
_RATE = 1e-3


def steps() -> list[Case]:
    """All of them."""
    return [_xor(), _mlp(), _gpt(Gpt(vocab=2048, context=128, width=128, layers=4, heads=4, batch=16))]


def _xor() -> Case:
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
    y = np.array([[0], [1], [1], [0]], np.float32)
    return _network("xor", (2, 8, 1), lambda: (x, y), len(x), "tanh", "mse_loss")


def _mlp() -> Case:
    rows, sizes = 128, (784, 256, 128, 10)
    return _network(
        "mlp", sizes, lambda: (drawn(rows, 784), drawn_ids(10, (rows,))), rows, "relu", "cross_entropy"
    )


def _network(
    name: str,
    sizes: tuple[int, ...],
    data: Callable[[], tuple[Array, Array]],
    rows: int,
    activation: str,
    loss: str,
) -> Case:
    """Layers of these sizes, trained by Adam. PyTorch's loss has the same name."""
    weights = [inputs * outputs for inputs, outputs in pairwise(sizes)]
    parameters = sum(weights) + sum(sizes[1:])
    # Two operations for each weight and row, three times; the first layer's input needs no gradient.
    flops = 2 * rows * (3 * sum(weights) - weights[0])
    nbytes = parameters * _PARAMETER + rows * sizes[0] * 4

    def penstock(device: Device) -> Call:
        layers: list[Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [Linear(inputs, outputs, device=device), {"tanh": Tanh, "relu": ReLU}[activation]()]
        model = Sequential(*layers[:-1])
        optimizer = Adam(model.parameters(), lr=_RATE)
        loss_of = getattr(F, loss)

        def step(x: Tensor, y: Tensor) -> Tensor:
            value: Tensor = loss_of(model(x), y)
            value.backward()
            optimizer.step()
            return value

        jitted = jit(step)
        x, y = (asarray(array, device=device) for array in data())
        return lambda: jitted(x, y)

    def torch(peer: Torch) -> Call:
        nn = peer.module.nn
        layers: list[Any] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]()]
        model = nn.Sequential(*layers[:-1]).to(peer.where)
        x, y = (peer.tensor(array) for array in data())
        loss_of = getattr(nn.functional, loss)
        optimizer = peer.module.optim.Adam(model.parameters(), lr=_RATE, fused=True)
        return _torch_step(optimizer, lambda: loss_of(model(x), y))

    return Case(name, f"{rows}x{'-'.join(map(str, sizes))}", flops, nbytes, penstock, torch)


def _torch_step(optimizer: Any, loss_of: Callable[[], Any]) -> Call:
    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    return step


@dataclass(frozen=True)
class Gpt:
    """The sizes of a GPT and its batch."""

    vocab: int
    context: int
    width: int
    layers: int
    heads: int
    batch: int


def _gpt(sizes: Gpt) -> Case:
    width, context, tokens = sizes.width, sizes.context, sizes.batch * sizes.context
    # Of a layer: the projections of queries, keys, values and the output, and a network four times as wide.
    weights = 12 * width**2 * sizes.layers + sizes.vocab * width
    # Two products over all pairs of positions, half of each as they are causal.
    attention = 2 * sizes.batch * context**2 * width * sizes.layers
    parameters = weights + context * width + 13 * width * sizes.layers + 2 * width

    def ids() -> Array:
        return drawn_ids(sizes.vocab, (sizes.batch, context + 1))

    def penstock(device: Device) -> Call:
        model = GPT(sizes.vocab, context, width, sizes.layers, sizes.heads, device=device)
        optimizer = AdamW(model.parameters(), lr=_RATE)

        def step(tokens: Tensor) -> Tensor:
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            return loss

        jitted = jit(step)
        batch = asarray(ids(), device=device)
        return lambda: jitted(batch)

    def torch(peer: Torch) -> Call:
        model = torch_gpt(peer.module, sizes).to(peer.where)
        batch = peer.tensor(ids())
        entropy = peer.module.nn.functional.cross_entropy
        optimizer = peer.module.optim.AdamW(model.parameters(), lr=_RATE, fused=True)
        return _torch_step(
            optimizer, lambda: entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        )

    return Case(
        "gpt-nano",
        f"{sizes.batch}x{context} tokens",
        flops=3 * (2 * tokens * weights + attention),
        nbytes=parameters * _PARAMETER + tokens * 8,
        penstock=penstock,
        torch=torch,
    )


def torch_gpt(torch: Any, sizes: Gpt) -> Any:
    """The same GPT in PyTorch, whose module is given."""
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            width = sizes.width
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            parts = self.qkv(self.norm1(x)).view(batch, length, 3, sizes.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(sizes.vocab, sizes.width)
            self.positions = nn.Embedding(sizes.context, sizes.width)
            self.blocks = nn.Sequential(*(Block() for _ in range(sizes.layers)))
            self.norm = nn.LayerNorm(sizes.width)
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
            return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)

    return Model()
