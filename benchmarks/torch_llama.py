"""A Llama in PyTorch with the weights of ours, for `generate.py`: a static cache, compiled with CUDA graphs.

A prompt is one call; each token after it is a replay of one compiled step, which picks the largest logit.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import ml_dtypes
import numpy as np

from measuring import installed
from penstock.models.blocks import Transformer

torch = installed("torch")
TURNS = 4  # of which the first compiles


class Llama:
    """The weights, and memory for keys and values of `positions` positions of `batch` sequences."""

    def __init__(self, model: Transformer, batch: int, positions: int, where: str) -> None:
        self.sizes, self.weights = model.sizes, dict[str, Any]()
        for name, tensor in model.named_parameters():
            array = tensor.numpy()
            bits = array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array
            given = torch.from_numpy(np.ascontiguousarray(bits))
            self.weights[name] = (given.view(torch.bfloat16) if bits is not array else given).to(where)
        dtype = self.weights["norm.weight"].dtype
        shape = (2, batch, self.sizes.key_heads, positions, self.sizes.head_size)
        self.caches = [torch.zeros(shape, dtype=dtype, device=where) for _ in model.layers]
        frequencies = model.sizes.rotaries[0].frequencies
        angles = torch.arange(positions).outer(torch.tensor(frequencies, dtype=torch.float32)).to(where)
        self.turns = angles.cos(), angles.sin()
        self.places = torch.arange(positions, device=where)

    def _linear(self, x: Any, name: str) -> Any:
        return torch.nn.functional.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Any, name: str) -> Any:
        wide = x.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.sizes.eps)
        return scaled.to(x.dtype) * self.weights[f"{name}.weight"]

    def _rotated(self, x: Any, positions: Any) -> Any:
        cosine, sine = (table[positions] for table in self.turns)
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x.dtype)

    def __call__(self, ids: Any, positions: Any) -> Any:
        """The largest logit after the last of `ids`, (batch, length), at these positions, (length,)."""
        sizes, (batch, length) = self.sizes, ids.shape
        x = self.weights["embed_tokens.weight"][ids]
        # A prompt attends to itself; a token to all that is cached.
        mask = None if length > 1 else (self.places <= positions[-1])[None, None, None]
        for layer, cache in enumerate(self.caches):
            name = f"layers.{layer}"
            y = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self._linear(y, f"{name}.self_attn.{side}_proj")
                .view(batch, length, -1, sizes.head_size)
                .transpose(1, 2)
                for side in "qkv"
            )
            q, k = self._rotated(q, positions), self._rotated(k, positions)
            cache[0].index_copy_(2, positions, k)
            cache[1].index_copy_(2, positions, v)
            keys, values = (k, v) if length > 1 else (cache[0], cache[1])
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, is_causal=length > 1, enable_gqa=True
            )
            joined = attended.transpose(1, 2).reshape(batch, length, -1)
            x = x + self._linear(joined, f"{name}.self_attn.o_proj")
            y = self._norm(x, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(y, f"{name}.mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        head = "embed_tokens" if sizes.tied else "lm_head"
        return self._linear(self._norm(x[:, -1], "norm"), head).argmax(-1)


def stepping(llama: Llama, batch: int, compiles: bool, where: str) -> Any:
    """What computes the next tokens from the last and their position: on CUDA, a replay of a graph."""
    if not compiles:
        return llama
    torch.compiler.reset()
    compiled = torch.compile(llama.__call__, dynamic=False)
    if where != "cuda":
        return compiled
    # PyTorch makes no graph of its own of what changes its inputs, here the cache.
    ids = torch.zeros((batch, 1), dtype=torch.int64, device=where)
    at = torch.zeros(1, dtype=torch.int64, device=where)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            compiled(ids, at)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compiled(ids, at)

    def step(token: Any, place: Any) -> Any:
        ids.copy_(token)
        at.copy_(place)
        graph.replay()
        return result

    return step


def measured(
    model: Transformer, ids: list[list[int]], tokens: int, compiles: bool
) -> tuple[float, float, list[list[int]]]:
    """The seconds until the first token, and of each token after it; and the tokens of each sequence.

    Tokens stay on the device until the last is there, so that nothing waits for the host.
    """
    where = "cuda" if torch.cuda.is_available() else "cpu"
    prompt = torch.tensor(ids, device=where)
    batch, length = prompt.shape
    llama = Llama(model, batch, length + tokens, where)
    first, each, answer = [], [], [[0]]
    with torch.inference_mode():
        step = stepping(llama, batch, compiles, where)
        for turn in range(TURNS):
            start = time.perf_counter()
            token = llama(prompt, llama.places[:length])
            token.tolist()  # waits
            made = [token]
            began = time.perf_counter()
            for count in range(1, tokens):
                at = llama.places[length + count - 1 : length + count]
                made.append(step(made[-1][:, None], at).clone())
            answer = torch.stack(made, 1).tolist()  # waits
            end = time.perf_counter()
            if turn:
                first.append(began - start)
                each.append((end - began) / (tokens - 1))
    return statistics.median(first), statistics.median(each), answer
