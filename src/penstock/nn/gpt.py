"""A GPT: a transformer that predicts the next token, with the architecture of GPT-2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.dropping import Dropout
from penstock.nn.layers import Embedding, Linear, Where
from penstock.nn.module import Module, evaluating
from penstock.nn.normalization import LayerNorm
from penstock.tensor import random
from penstock.tensor.arithmetic import where
from penstock.tensor.autograd import checkpoint
from penstock.tensor.core import Tensor, realize_together, resolve
from penstock.tensor.creation import arange, asarray, zeros
from penstock.tensor.jit import jit
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import permute_dims, reshape
from penstock.tensor.recording import no_grad

_INITIAL_STD = 0.02  # standard deviation of the initial weights, as in GPT-2


class CausalSelfAttention(Module):
    """Multi-head attention of every position to itself and earlier positions.

    >>> ps.nn.CausalSelfAttention(8, 2)(ps.zeros((3, 5, 8))).shape
    (3, 5, 8)
    """

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, bias: bool = True, device: Where = None
    ) -> None:
        if heads < 1 or width % heads:
            raise ValueError(f"a width of {width} cannot be divided among {heads} heads")
        self.heads = heads
        self.qkv = Linear(width, 3 * width, bias, device)
        self.out = Linear(width, width, bias, device)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """The attended values of each position."""
        return self.mixed(self.qkv(x), cache)

    def mixed(self, qkv: Tensor, cache: Cache | None = None) -> Tensor:
        """Like `forward`, from queries, keys and values that are concatenated in the last axis."""
        batch, length, wide = qkv.shape
        width = wide // 3
        parts = reshape(qkv, (batch, length, 3, self.heads, width // self.heads))
        if cache is None:
            mixed = F.packed_attention(parts, is_causal=True)
        else:
            query, key, value = (permute_dims(parts[:, :, k], (0, 2, 1, 3)) for k in range(3))
            mixed = permute_dims(cache.attend(query, key, value), (0, 2, 1, 3))
        result: Tensor = self.dropout(self.out(reshape(mixed, (batch, length, width))))
        return result


class Block(Module):
    """Attention and a feed-forward network, each with a residual connection.

    >>> ps.nn.Block(8, 2)(ps.zeros((3, 5, 8))).shape
    (3, 5, 8)
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        eps: float = 1e-5,
        device: Where = None,
    ) -> None:
        self.norm1 = LayerNorm(width, eps, bias=bias, device=device)
        self.attention = CausalSelfAttention(width, heads, dropout, bias, device)
        self.norm2 = LayerNorm(width, eps, bias=bias, device=device)
        self.up = Linear(width, 4 * width, bias, device)
        self.down = Linear(4 * width, width, bias, device)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """The output of the block."""
        # Norms and activations are cheap to recompute in the backward pass, and large to keep.
        qkv = checkpoint(lambda x: self.attention.qkv(self.norm1(x)), x)
        x = x + self.attention.mixed(qkv, cache)
        wide = checkpoint(lambda x: self.up(self.norm2(x)), x)
        result: Tensor = x + self.dropout(checkpoint(lambda wide: self.down(F.gelu(wide, "tanh")), wide))
        return result


class GPT(Module):
    """From token ids to the logits of the next token at each position.

    >>> model = ps.nn.GPT(vocab_size=16, context=8, width=8, layers=1, heads=2)
    >>> model(ps.zeros((2, 8), dtype=ps.int32)).shape
    (2, 8, 16)
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 128,
        width: int = 384,
        layers: int = 6,
        heads: int = 6,
        dropout: float = 0.0,
        bias: bool = True,
        eps: float = 1e-5,
        device: Where = None,
    ) -> None:
        sizes = {
            "vocab_size": vocab_size,
            "context": context,
            "width": width,
            "layers": layers,
            "heads": heads,
        }
        for name, number in sizes.items():
            if number < 1:
                raise ValueError(f"a GPT needs a {name} of 1 or more, and {number} was given")
        self.vocab_size, self.context, self.width, self.heads = vocab_size, context, width, heads
        self.eps = eps
        self.tokens = Embedding(vocab_size, width, device=device)
        self.positions = Embedding(context, width, device=device)
        self.dropout = Dropout(dropout)
        self.blocks = [Block(width, heads, dropout, bias, eps, device) for _ in range(layers)]
        self.norm = LayerNorm(width, eps, bias=bias, device=device)
        self._draw_weights()

    def _draw_weights(self) -> None:
        residual = _INITIAL_STD / math.sqrt(2 * len(self.blocks))
        generator = random.default_generator
        drawn: list[tuple[Tensor, Tensor]] = []
        for name, tensor in self.named_parameters():
            if name.endswith("bias"):
                value = zeros(tensor.shape)
            elif "norm" in name:
                continue
            else:
                is_residual = name.endswith(("out.weight", "down.weight"))
                value = generator.normal(tensor.shape, 0.0, residual if is_residual else _INITIAL_STD)
            drawn.append((tensor, value.to_device(tensor.device)))
        # In one run: otherwise each weight would be compiled separately.
        realize_together([value for _, value in drawn])
        for tensor, value in drawn:
            tensor._become(value._node)

    # Training

    def features(self, token_ids: Tensor) -> Tensor:
        """The output of the last norm, of shape (batch, length, width)."""
        if token_ids.ndim != 2 or token_ids.shape[1] > self.context:
            raise ValueError(
                f"token ids have shape (batch, length up to {self.context}), and {token_ids.shape} was given"
            )
        positions = arange(token_ids.shape[1], device=token_ids.device)
        x = self.dropout(self.tokens(token_ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, token_ids: Tensor) -> Tensor:
        """The logits of the token after each position, of shape (batch, length, vocab_size)."""
        return matmul(self.features(token_ids), self.tokens.weight.T)

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy; targets of -100 are ignored. The logits are never in memory as a whole."""
        rows = reshape(self.features(token_ids), (-1, self.width))
        return F.linear_cross_entropy(rows, self.tokens.weight, reshape(targets, (-1,)))

    # Generation

    def generate(
        self,
        prompt: npt.ArrayLike,
        count: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Generate tokens after a prompt, one by one; with temperature 0 always the most likely.

        Keys and values are cached. When the context is full, its older half is dropped.
        """
        ids = [int(token) for token in np.asarray(prompt).reshape(-1)]
        if not ids or not all(0 <= token < self.vocab_size for token in ids):
            most = self.vocab_size - 1
            raise ValueError(f"a prompt has token ids from 0 to {most}, and {ids[:8]} was given")
        sampler = Sampler(temperature, top_k, top_p, seed)
        decoder = Decoder(self)
        window: list[int] = []
        pending = ids[-self.context :]
        for _ in range(count):
            if len(window) + len(pending) > self.context:
                pending = (window + pending)[-(self.context // 2 or 1) :]
                window = []
                decoder.reset()
            for token in pending:
                logits = decoder.step(token)
            window += pending
            chosen = sampler.pick(logits)
            yield chosen
            pending = [chosen]

    # Hugging Face's layout

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: Where = None) -> GPT:
        """A GPT-2 from a folder with `config.json` and `model.safetensors`."""
        from penstock.nn.pretrained import load

        return load(cls, Path(folder), device)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the layout that `from_pretrained` reads."""
        from penstock.nn.pretrained import save

        save(self, Path(folder))


class Cache:
    """The keys and values of a layer for the positions so far, allocated for the whole context."""

    def __init__(self, model: GPT, position: Tensor) -> None:
        shape = (1, model.heads, model.context, model.width // model.heads)
        self.keys = zeros(shape, device=position.device).realize()
        self.values = zeros(shape, device=position.device).realize()
        self._position = position
        self._context = model.context

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append the key and value of a position, and attend to all positions so far."""
        positions = arange(self._context, device=query.device)
        here = reshape(positions == self._position, (1, 1, self._context, 1))
        self.keys._rebind(where(here, key, self.keys))
        self.values._rebind(where(here, value, self.values))
        scores = matmul(query, self.keys.mT) * query.shape[-1] ** -0.5
        scores = where(positions <= self._position, scores, -math.inf)
        return matmul(F.softmax(scores), self.values)


class Decoder:
    """A model that is given tokens one by one; a single jitted program computes each step."""

    def __init__(self, model: GPT) -> None:
        self._model = model
        self._device = resolve(model.tokens.weight.device)
        self._position = zeros((), dtype=arange(1).dtype, device=self._device).realize()
        self._caches = [Cache(model, self._position) for _ in model.blocks]
        self._step = jit(self._next_logits)

    def reset(self) -> None:
        """Drop all tokens so far."""
        self._position._rebind(zeros((), dtype=self._position.dtype, device=self._device))

    def step(self, token: int) -> npt.NDArray[Any]:
        """Append a token; the logits of the next token."""
        with no_grad(), evaluating():
            logits = self._step(asarray(np.array([[token]]), device=self._device))
        values: npt.NDArray[Any] = logits.numpy()
        return values

    def _next_logits(self, token: Tensor) -> Tensor:
        model = self._model
        x = model.tokens(token) + model.positions(reshape(self._position, (1,)))
        for block, cache in zip(model.blocks, self._caches, strict=True):
            x = block(x, cache)
        self._position._rebind(self._position + 1)
        return reshape(matmul(model.norm(x), model.tokens.weight.T), (model.vocab_size,))


class Sampler:
    """Draws a token from its logits."""

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        if temperature < 0:
            raise ValueError(f"a temperature is 0 or more, and {temperature} was given")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is 1 or more, and {top_k} was given")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p is in (0, 1], and {top_p} was given")
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._random = np.random.default_rng(seed)

    def pick(self, logits: npt.NDArray[Any]) -> int:
        """Draw a token among the `top_k` most likely, and the fewest with a total probability of `top_p`."""
        if self._temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")[: self._top_k]
        scaled = logits[order].astype(np.float64) / self._temperature
        probabilities = np.exp(scaled - scaled[0])
        probabilities /= probabilities.sum()
        if self._top_p is not None:
            kept = int(np.searchsorted(np.cumsum(probabilities), self._top_p)) + 1
            order, probabilities = order[:kept], probabilities[:kept] / probabilities[:kept].sum()
        return int(self._random.choice(order, p=probabilities))
