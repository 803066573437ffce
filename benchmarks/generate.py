"""How fast models generate: the prompt, and then each token, for models of known shapes with random weights.

    python benchmarks/generate.py --device cuda:0 --model llama-1b --batch 1 8 32 128
    python benchmarks/generate.py --device cuda:0 --model llama-8b --quantize int8 int4
    python benchmarks/generate.py --model tiny --prompt 64 --tokens 32     # on any machine
    python benchmarks/generate.py --device cuda:0 --model llama-1b --requests 256 --slots 32
    python benchmarks/generate.py --model smollm --dtype float32 --prompt 256 --tokens 32 --peers  # on a CPU
    python benchmarks/generate.py --model smollm --dtype float32 --peers --quantize int8 int4  # Q8_0 and Q4_0

For Llamas, PyTorch runs in turn with it, with the same weights, where it is installed (`torch_llama.py`): a
static cache, and on CUDA the prompt and each token a replay of a compiled graph. With `--requests`, so many
come at random moments to an engine, with prompts and answers of random lengths. With `--peers`, transformers
and llama.cpp run in turn with it, where they are installed (`cpu_peers.py`).
The share of bandwidth is that of the bytes which a step has to read, the weights and the cached keys and
values, at the rate at which the device copies memory. The host's time is that in which it does not wait for
the device: if it comes near that of a step, the host is the limit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import cpu_peers
import penstock as ps
import torch_llama
from measuring import Report
from penstock.models import LanguageModel
from penstock.models.blocks import Transformer
from penstock.tensor.core import resolve
from torch_llama import Peer, Run

COPIES = 8  # in a row, so that starting them takes no time of theirs
WARM = 3  # rounds that do not count: the first builds programs, the second CUDA's graphs of them
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **LLAMA,
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "smollm": {  # of 135 million parameters
        **LLAMA,
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 2048,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
    },
    "llama-1b": {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def copy_rate(device: ps.Device) -> float:
    """Bytes a second that a copy reads and writes, half of them each; of several copies in a row."""
    nbytes = min(1 << 30, device.capabilities.total_bytes // 32)
    x = ps.zeros(nbytes // 4, device=device).realize()

    @ps.jit
    def copy(x: ps.Tensor) -> ps.Tensor:
        return x + 1

    times = []
    for _ in range(4):
        device.sync()
        start = time.perf_counter()
        for _ in range(COPIES):
            copy(x)
        device.sync()
        times.append((time.perf_counter() - start) / COPIES)
    return 2 * nbytes / min(times)


def measured(model: LanguageModel, ids: list[list[int]], tokens: int) -> tuple[Run, float]:
    """The tokens after prompts; and of the seconds of each step what the host does not wait."""
    waits = resolve(model.head_weight.device).stream.waits
    made: list[list[int]] = [[] for _ in ids]
    start = time.perf_counter()
    begun = end = waited = 0.0
    for piece in model.stream(ids, tokens, temperature=0, stop_tokens=()):
        made[piece.index].append(piece.id)
        if piece.index == len(ids) - 1:
            end = time.perf_counter()
            if not begun:
                begun, waited = end, waits.seconds
    each = (end - begun) / (tokens - 1)
    return Run(begun - start, each, made), each - (waits.seconds - waited) / (tokens - 1)


def served(model: LanguageModel, requests: int, slots: int, prompt: int, tokens: int, rate: float) -> str:
    """An engine under requests with prompts and answers of up to so many tokens, `rate` a second."""
    draw = np.random.default_rng(0)
    with ps.models.Engine(model, slots=slots, queue=requests) as engine:
        for turn in range(2):  # the first builds the programs
            before, start, answers = engine.stats(), time.perf_counter(), []
            for pause in draw.exponential(1 / rate, requests):
                ids = draw.integers(0, model.vocab_size, int(draw.integers(1, prompt + 1))).tolist()
                count = int(draw.integers(1, tokens + 1))
                answers.append(engine.submit(ids, count, temperature=0, stop_tokens=()))
                time.sleep(pause if turn else 0)
            for answer in answers:
                answer.result()
            seconds, stats = time.perf_counter() - start, engine.stats()
    made = stats.generated_tokens - before.generated_tokens
    steps = stats.steps - before.steps
    return (
        f"{requests} requests, {slots} slots: {made / seconds:,.0f} tokens/s, {made / steps:.1f} a step, "
        f"{stats.preempted - before.preempted} preempted, {stats.pages_used} pages left in use"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--quantize", nargs="*", choices=("int8", "int4"), default=[])
    parser.add_argument("--no-torch", action="store_true", help="without PyTorch beside it")
    parser.add_argument(
        "--peers", action="store_true", help="transformers and llama.cpp on the CPU beside it"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts")
    parser.add_argument("--save", type=Path, help="a file for the results")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    chosen = parser.parse_args()
    if chosen.device:
        ps.use(chosen.device)
    device = ps.default_device()
    if chosen.peers:
        beside_peers(chosen)
        return
    rate, results = copy_rate(device), Report()
    print(f"{device}; a copy moves {rate / 1e9:.0f} GB/s")
    for quantized in (None, *chosen.quantize):
        model = ps.models.build(SHAPES[chosen.model]).to(chosen.dtype)
        if quantized is not None:
            ps.quantize(model, quantized)
        report(model, f"{chosen.model} {quantized or chosen.dtype}", chosen, rate, results)
        del model
    if chosen.save:
        save(results, chosen, "" if torch_llama.torch is None else torch_llama.torch.__version__)


def save(results: Report, chosen: argparse.Namespace, torch: str) -> None:
    given = f" --device {chosen.device or ps.default_device().name} --model {chosen.model}"
    given += f" --dtype {chosen.dtype} --prompt {chosen.prompt} --tokens {chosen.tokens}"
    given += f" --batch {' '.join(map(str, chosen.batch))} --rounds {chosen.rounds}"
    given += f" --quantize {' '.join(chosen.quantize)}" * bool(chosen.quantize)
    results.save(chosen.save, "generate", ps.default_device(), {"torch": torch} if torch else {}, given)


def beside_peers(chosen: argparse.Namespace) -> None:
    report = Report()
    for quantized in ("", *chosen.quantize):
        model = ps.models.build(SHAPES[chosen.model]).to(chosen.dtype)
        cpu_peers.compare(model, quantized, chosen.prompt, chosen.tokens, chosen.rounds, report)
        del model
    if chosen.save:
        peers = (cpu_peers.torch, cpu_peers.transformers, cpu_peers.llama_cpp)
        versions = {peer.__name__: peer.__version__ for peer in peers if peer is not None}
        given = f" --model {chosen.model} --dtype {chosen.dtype} --prompt {chosen.prompt} "
        given += f"--tokens {chosen.tokens} --rounds {chosen.rounds} --peers"
        given += f" --quantize {' '.join(chosen.quantize)}" * bool(chosen.quantize)
        report.save(chosen.save, "generate", ps.default_device(), versions, given)


def step_bytes(model: LanguageModel) -> int:
    """The bytes of weights that a step has to read: of embeddings few, unless they are the head too."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, ps.nn.Embedding)]
    skipped = set() if model.lm_head is None else {id(weight) for weight in embeddings}
    return sum(tensor._node.nbytes for _, tensor in model.file_tensors() if id(tensor) not in skipped)


def report(model: LanguageModel, name: str, chosen: argparse.Namespace, rate: float, results: Report) -> None:
    weights, item = step_bytes(model), model.head_weight.dtype.itemsize
    print(f"{name}, a step reads {weights / 1e9:.2f} GB of weights")
    if chosen.requests:
        print(served(model, chosen.requests, chosen.slots, chosen.prompt, chosen.tokens, chosen.rate))
        return
    unpacked = not any(isinstance(module, ps.nn.QuantizedLinear) for module in model.modules())
    beside = torch_llama.torch is not None and not chosen.no_torch and unpacked
    for batch in chosen.batch:
        ids = np.random.default_rng(0).integers(0, model.vocab_size, (batch, chosen.prompt)).tolist()
        peer = Peer(model, ids, chosen.tokens) if beside and isinstance(model, Transformer) else None
        ours, host, theirs = in_turn(model, peer, ids, chosen)
        kept = sum(2 * shape.heads * shape.head_size for shape in model.cache_shapes)
        read = weights + batch * kept * item * (chosen.prompt + chosen.tokens // 2)
        detail = f"{ours.each * 1e3:.3f} ms a step, {100 * read / ours.each / rate:.1f}% of a copy's rate, "
        detail += f"{host * 1e6:.0f} µs of the host"
        results.add(f"{name}: batch {batch}", batch / ours.each, "tokens/s", "", None, detail)
        detail = f"{batch * chosen.prompt / ours.first:,.0f} tokens/s"
        what = f"{name}: batch {batch}, prompts of {chosen.prompt}"
        results.add(what, ours.first * 1e3, "ms", "", None, detail)
        if theirs is not None:
            compare(f"{name}: batch {batch}", ours, theirs, results)


def in_turn(
    model: LanguageModel, peer: Peer | None, ids: list[list[int]], chosen: argparse.Namespace
) -> tuple[Run, float, Run | None]:
    """The medians of ours, with the host's seconds of a step, and of the peer."""
    runs, hosts, theirs = [], [], []
    for turn in range(WARM + chosen.rounds):
        run, host = measured(model, ids, chosen.tokens)
        other = None if peer is None else peer()
        if turn >= WARM:
            runs.append(run)
            hosts.append(host)
            theirs += [] if other is None else [other]
    return middle(runs), statistics.median(hosts), middle(theirs) if theirs else None


def middle(runs: list[Run]) -> Run:
    """The medians, with the tokens of the last run."""
    each = statistics.median(run.each for run in runs)
    return Run(statistics.median(run.first for run in runs), each, runs[-1].tokens)


def compare(name: str, ours: Run, theirs: Run, results: Report) -> None:
    """Ours against PyTorch's; equal tokens are counted up to the first that differs, by rounding."""
    same = [
        next((at for at, pair in enumerate(zip(*rows, strict=True)) if pair[0] != pair[1]), len(rows[0]))
        for rows in zip(ours.tokens, theirs.tokens, strict=True)
    ]
    ratio, detail = theirs.first / ours.first, f"{theirs.first * 1e3:.3f} ms"
    results.add(f"{name}, prompts: PyTorch / ours", ratio, "x", ">= 1", ratio >= 1, detail)
    ratio = theirs.each / ours.each
    detail = f"{theirs.each * 1e3:.3f} ms, {len(same) / theirs.each:,.0f} tokens/s; "
    detail += f"{statistics.mean(same):.0f} of {len(ours.tokens[0])} tokens equal"
    results.add(f"{name}, a step: PyTorch / ours", ratio, "x", "", None, detail)


if __name__ == "__main__":
    main()
