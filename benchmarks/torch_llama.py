"""A Llama in PyTorch with the weights of ours, for `generate.py`: a static cache, compiled, in CUDA graphs.

A prompt is one call, and so is each token after it, which is the largest logit. On CUDA both are replays of
graphs that are captured here: PyTorch makes none of what changes its inputs, here the cache. A layer is
compiled once for all layers, with the sum before it, so that this joins the norm that follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from measuring import installed
from penstock.models.blocks import Transformer

torch = installed("torch")


class Run(NamedTuple):
    """The seconds until the first token, and of each token after it; and the tokens of each sequence."""

    first: float
    each: float
    tokens: list[list[int]]


class Llama:
    """The weights, and memory for keys and values of `positions` positions of `batch` sequences."""

    def __init__(self, model: Transformer, batch: int, positions: int, where: str, compiles: bool) -> None:
        self.sizes, self._top = model.sizes, dict[str, Any]()
        self._layers: list[dict[str, Any]] = [{} for _ in model.layers]
        for name, tensor in model.named_parameters():
            array = tensor.numpy()
            bits = array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array
            given = torch.from_numpy(np.ascontiguousarray(bits))
            weight = (given.view(torch.bfloat16) if bits is not array else given).to(where)
            if name.startswith("layers."):
                _, number, own = name.split(".", 2)
                self._layers[int(number)][own] = weight
            else:
                self._top[name] = weight
        dtype = self._top["norm.weight"].dtype
        shape = (batch, self.sizes.key_heads, positions, self.sizes.head_size)
        for layer in self._layers:
            layer["keys"], layer["values"] = (torch.zeros(shape, dtype=dtype, device=where) for _ in range(2))
        frequencies = model.sizes.rotaries[0].frequencies
        angles = torch.arange(positions).outer(torch.tensor(frequencies, dtype=torch.float32)).to(where)
        self._turns = angles.cos(), angles.sin()
        self.places = torch.arange(positions, device=where)
        self._parts: tuple[Any, ...] = (self._layer, self._head)
        if compiles:
            torch.compiler.reset()
            self._parts = tuple(torch.compile(part, dynamic=False) for part in self._parts)

    def _norm(self, x: Any, weight: Any) -> Any:
        wide = x.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.sizes.eps)
        return scaled.to(x.dtype) * weight

    def _rotated(self, x: Any, positions: Any) -> Any:
        cosine, sine = (table[positions] for table in self._turns)
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x.dtype)

    def _layer(self, x: Any, more: Any, layer: dict[str, Any], positions: Any) -> tuple[Any, Any]:
        """What a layer's output is the sum of, from what its input is the sum of."""
        linear, sizes, (batch, length, _) = torch.nn.functional.linear, self.sizes, x.shape
        x = x + more
        y = self._norm(x, layer["input_layernorm.weight"])
        q, k, v = (
            linear(y, layer[f"self_attn.{side}_proj.weight"])
            .view(batch, length, -1, sizes.head_size)
            .transpose(1, 2)
            for side in "qkv"
        )
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        layer["keys"][:, :, positions] = k
        layer["values"][:, :, positions] = v
        # A prompt attends to itself; a token to all that is cached.
        keys, values = (k, v) if length > 1 else (layer["keys"], layer["values"])
        mask = None if length > 1 else (self.places <= positions[-1])[None, None, None]
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=length > 1, enable_gqa=True
        )
        joined = attended.transpose(1, 2).reshape(batch, length, -1)
        x = x + linear(joined, layer["self_attn.o_proj.weight"])
        y = self._norm(x, layer["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(linear(y, layer["mlp.gate_proj.weight"]))
        return x, linear(gate * linear(y, layer["mlp.up_proj.weight"]), layer["mlp.down_proj.weight"])

    def _head(self, x: Any, more: Any) -> Any:
        head = "embed_tokens" if self.sizes.tied else "lm_head"
        last = self._norm(x[:, -1] + more[:, -1], self._top["norm.weight"])
        return torch.nn.functional.linear(last, self._top[f"{head}.weight"]).argmax(-1)

    def __call__(self, ids: Any, positions: Any) -> Any:
        """The largest logit after the last of `ids`, (batch, length), at these positions, (length,)."""
        x = self._top["embed_tokens.weight"][ids]
        more, (through, head) = torch.zeros_like(x), self._parts
        for layer in self._layers:
            x, more = through(x, more, layer, positions)
        return head(x, more)


def _replayed(llama: Llama, batch: int, length: int) -> Callable[[Any, Any], Any]:
    """A call of this size as the replay of a graph; as it is where CUDA captures none, which is told."""
    ids = torch.zeros((batch, length), dtype=torch.int64, device="cuda")
    at = llama.places[:length].clone()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            llama(ids, at)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = llama(ids, at)
    except RuntimeError as error:
        print(f"    PyTorch: no graph of {batch} x {length} tokens: {str(error).splitlines()[0]}")
        return llama

    def replay(tokens: Any, positions: Any) -> Any:
        ids.copy_(tokens)
        at.copy_(positions)
        graph.replay()
        return result

    return replay


class Peer:
    """PyTorch with the weights of a model, for prompts of one length."""

    def __init__(self, model: Transformer, ids: list[list[int]], tokens: int) -> None:
        self._where = "cuda" if torch.cuda.is_available() else "cpu"
        self._ids, self._count = ids, tokens
        batch, length = len(ids), len(ids[0])
        graphs = self._where == "cuda"
        with torch.no_grad():
            self._llama = Llama(model, batch, length + tokens, self._where, compiles=graphs)
            self._prompt = _replayed(self._llama, batch, length) if graphs else self._llama
            self._step = _replayed(self._llama, batch, 1) if graphs else self._llama

    def __call__(self) -> Run:
        """A prompt, and then tokens, which stay on the device until the last: no step waits for the host."""
        places, length = self._llama.places, len(self._ids[0])
        with torch.no_grad():
            start = time.perf_counter()
            prompt = torch.tensor(self._ids, device=self._where)
            made = [self._prompt(prompt, places[:length]).clone()]
            made[0].tolist()  # waits
            began = time.perf_counter()
            for at in range(length, length + self._count - 1):
                made.append(self._step(made[-1][:, None], places[at : at + 1]).clone())
            tokens = torch.stack(made, 1).tolist()  # waits
            end = time.perf_counter()
        return Run(began - start, (end - began) / (self._count - 1), tokens)
