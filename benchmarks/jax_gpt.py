"""The GPT of the benchmarks and its training step in JAX, where that is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from measuring import installed
from penstock.bench.steps import Gpt

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other libraries are in the same process
jax = installed("jax")

Tree = Any  # JAX's nested containers of arrays
_DECAY, _BETAS, _EPSILON = 0.01, (0.9, 0.999), 1e-8  # of AdamW


def weights(sizes: Gpt) -> Tree:
    """New parameters, in float32."""
    draw, width = np.random.default_rng(0), sizes.width

    def linear(inputs: int, outputs: int) -> Tree:
        weight = np.float32(0.02) * draw.standard_normal((inputs, outputs), np.float32)
        return {"weight": weight, "bias": np.zeros(outputs, np.float32)}

    def norm() -> Tree:
        return {"weight": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}

    blocks = [
        {
            "norm1": norm(),
            "qkv": linear(width, 3 * width),
            "out": linear(width, width),
            "norm2": norm(),
            "up": linear(width, 4 * width),
            "down": linear(4 * width, width),
        }
        for _ in range(sizes.layers)
    ]
    tables = {"tokens": sizes.vocab, "positions": sizes.context}
    rows = {name: draw.normal(0, 0.02, (count, width)).astype(np.float32) for name, count in tables.items()}
    return jax.device_put({**rows, "blocks": blocks, "norm": norm()})


def _linear(given: Tree, x: Any) -> Any:
    return x @ given["weight"].astype(x.dtype) + given["bias"].astype(x.dtype)


def _norm(given: Tree, x: Any) -> Any:
    wide = x.astype(jax.numpy.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return (normal * given["weight"] + given["bias"]).astype(x.dtype)


def _block(heads: int, x: Any, given: Tree) -> Any:
    batch, length, width = x.shape
    parts = _linear(given["qkv"], _norm(given["norm1"], x)).reshape(batch, length, 3, heads, width // heads)
    mixed = jax.nn.dot_product_attention(parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], is_causal=True)
    x = x + _linear(given["out"], mixed.reshape(batch, length, width))
    inner = jax.nn.gelu(_linear(given["up"], _norm(given["norm2"], x)), approximate=True)
    return x + _linear(given["down"], inner)


def _loss(sizes: Gpt, dtype: Any, checkpoints: bool, given: Tree, ids: Any) -> Any:
    block = partial(_block, sizes.heads)
    if checkpoints:
        block = jax.checkpoint(block)
    x = (given["tokens"][ids[:, :-1]] + given["positions"][: ids.shape[1] - 1]).astype(dtype)
    for layer in given["blocks"]:
        x = block(x, layer)
    logits = (_norm(given["norm"], x) @ given["tokens"].T.astype(dtype)).astype(jax.numpy.float32)
    right = jax.numpy.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - right).mean()


def _updated(rate: float, step: Any, weight: Any, grad: Any, first: Any, second: Any) -> tuple[Any, Any, Any]:
    """AdamW."""
    one, two = _BETAS
    first, second = one * first + (1 - one) * grad, two * second + (1 - two) * grad * grad
    scaled = first / (1 - one**step) / (jax.numpy.sqrt(second / (1 - two**step)) + _EPSILON)
    return weight - rate * (scaled + _DECAY * weight), first, second


def side(
    sizes: Gpt, tokens: Any, rate: float, steps: int, half: bool, checkpoints: bool
) -> tuple[Callable[[], Any], int]:
    """Some training steps that return their last loss, and the bytes that XLA plans for one.

    `half`: in bfloat16 with float32 parameters. `checkpoints`: each block is computed again for its gradient.
    """
    numpy = jax.numpy
    loss_of = partial(_loss, sizes, numpy.bfloat16 if half else numpy.float32, checkpoints)

    def one(state: Tree, ids: Any) -> tuple[Tree, Any]:
        given, first, second, count = state
        loss, grads = jax.value_and_grad(loss_of)(given, ids)
        leaves, shape = jax.tree.flatten(given)
        columns = (leaves, *(jax.tree.leaves(tree) for tree in (grads, first, second)))
        new = [_updated(rate, count + 1.0, *row) for row in zip(*columns, strict=True)]
        trees = [jax.tree.unflatten(shape, column) for column in zip(*new, strict=True)]
        return (*trees, count + 1.0), loss

    given = weights(sizes)
    zeros = jax.tree.map(numpy.zeros_like, given)
    state = [(given, zeros, jax.tree.map(numpy.zeros_like, given), numpy.zeros(()))]
    ids = jax.device_put(tokens.astype(np.int32))
    compiled = jax.jit(one, donate_argnums=0).lower(state[0], ids).compile()
    planned = compiled.memory_analysis()
    taken = planned.temp_size_in_bytes + planned.argument_size_in_bytes + planned.output_size_in_bytes
    taken -= planned.alias_size_in_bytes

    def run() -> Any:
        for _ in range(steps):
            state[0], loss = compiled(state[0], ids)
        return loss.block_until_ready()

    return run, int(taken)
