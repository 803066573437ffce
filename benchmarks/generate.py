"""How fast models generate: the prompt, and then each token, for models of known shapes with random weights.

    python benchmarks/generate.py --device cuda:0 --model llama-1b --batch 1 8 32 128
    python benchmarks/generate.py --device cuda:0 --model llama-8b --quantize int8 int4
    python benchmarks/generate.py --model tiny --prompt 64 --tokens 32     # on any machine
    python benchmarks/generate.py --device cuda:0 --model llama-1b --requests 256 --slots 32
    python benchmarks/generate.py --model smollm --dtype float32 --prompt 256 --tokens 32 --peers  # on a CPU

For Llamas, PyTorch runs beside it with the same weights where it is installed (`torch_llama.py`): a static
cache, and each token a replay of one compiled step. With `--requests`, so many come at random moments to an
engine, with prompts and answers of random lengths. With `--peers`, transformers and llama.cpp run in turn
with it, where they are installed (`cpu_peers.py`).
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
from penstock.tensor.core import resolve

COPIES = 8  # in a row, so that starting them takes no time of theirs
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


def measured(model: LanguageModel, prompt: int, tokens: int, batch: int) -> tuple[float, float, float]:
    """The seconds until the first token, of each step after it, and of these what the host does not wait."""
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (batch, prompt)).tolist()
    waits = resolve(model.head_weight.device).stream.waits
    first, each, host = [], [], []
    for turn in range(4):
        start = time.perf_counter()
        begun = end = waited = 0.0
        for piece in model.stream(ids, tokens, temperature=0, stop_tokens=()):
            if piece.index == batch - 1:
                end = time.perf_counter()
                if not begun:
                    begun, waited = end, waits.seconds
        if turn:  # the first builds the programs
            first.append(begun - start)
            each.append((end - begun) / (tokens - 1))
            host.append(each[-1] - (waits.seconds - waited) / (tokens - 1))
    return statistics.median(first), statistics.median(each), statistics.median(host)


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
    parser.add_argument("--rounds", type=int, default=5, help="with peers")
    parser.add_argument("--save", type=Path, help="a file for the results with peers")
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
    rate = copy_rate(device)
    print(f"{device}; a copy moves {rate / 1e9:.0f} GB/s")
    for quantized in (None, *chosen.quantize):
        model = ps.models.build(SHAPES[chosen.model]).to(chosen.dtype)
        if quantized is not None:
            ps.quantize(model, quantized)
        report(model, f"{chosen.model} {quantized or chosen.dtype}", chosen, rate)
        del model


def beside_peers(chosen: argparse.Namespace) -> None:
    report, model = Report(), ps.models.build(SHAPES[chosen.model]).to(chosen.dtype)
    cpu_peers.compare(model, chosen.prompt, chosen.tokens, chosen.rounds, report)
    if chosen.save:
        peers = (cpu_peers.torch, cpu_peers.transformers, cpu_peers.llama_cpp)
        versions = {peer.__name__: peer.__version__ for peer in peers if peer is not None}
        given = f" --model {chosen.model} --dtype {chosen.dtype} --prompt {chosen.prompt} "
        given += f"--tokens {chosen.tokens} --rounds {chosen.rounds} --peers"
        report.save(chosen.save, "generate", ps.default_device(), versions, given)


def step_bytes(model: LanguageModel) -> int:
    """The bytes of weights that a step has to read: of embeddings few, unless they are the head too."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, ps.nn.Embedding)]
    skipped = set() if model.lm_head is None else {id(weight) for weight in embeddings}
    return sum(tensor._node.nbytes for _, tensor in model.file_tensors() if id(tensor) not in skipped)


def report(model: LanguageModel, name: str, chosen: argparse.Namespace, rate: float) -> None:
    weights, item = step_bytes(model), model.head_weight.dtype.itemsize
    print(f"{name}, a step reads {weights / 1e9:.2f} GB of weights")
    if chosen.requests:
        print(served(model, chosen.requests, chosen.slots, chosen.prompt, chosen.tokens, chosen.rate))
        return
    for batch in chosen.batch:
        prefill, step, host = measured(model, chosen.prompt, chosen.tokens, batch)
        kept = sum(2 * shape.heads * shape.head_size for shape in model.cache_shapes)
        read = weights + batch * kept * item * (chosen.prompt + chosen.tokens // 2)
        print(
            f"batch {batch:4}: prompt of {chosen.prompt} {prefill * 1e3:9.2f} ms, "
            f"{batch * chosen.prompt / prefill:11,.0f} tokens/s; then {step * 1e3:8.3f} ms a step "
            f"({host * 1e6:.0f} µs of the host), "
            f"{batch / step:9,.0f} tokens/s, {100 * read / step / rate:5.1f}% of a copy's bandwidth"
        )
        unpacked = not any(isinstance(module, ps.nn.QuantizedLinear) for module in model.modules())
        if torch_llama.torch is not None and not chosen.no_torch and chosen.model != "gpt2" and unpacked:
            beside(model, batch, chosen, prefill, step)


def beside(model: LanguageModel, batch: int, chosen: argparse.Namespace, prefill: float, step: float) -> None:
    """The same by PyTorch; equal tokens are counted up to the first that differs, by rounding."""
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (batch, chosen.prompt)).tolist()
    cuda = resolve(model.head_weight.device).name.startswith("cuda")
    theirs = torch_llama.measured(model, ids, chosen.tokens, compiles=cuda)  # type: ignore[arg-type]
    ours = [each.ids for each in model.generate(ids, chosen.tokens, temperature=0, stop_tokens=())]
    same = [
        next((at for at, pair in enumerate(zip(*rows, strict=True)) if pair[0] != pair[1]), chosen.tokens)
        for rows in zip(ours, theirs[2], strict=True)
    ]
    first, each, _ = theirs
    print(
        f"    PyTorch{' compiled' if cuda else ''}: "
        f"prompt {first * 1e3:.2f} ms, {first / prefill:.2f} times ours; "
        f"{each * 1e3:.3f} ms a step, {each / step:.2f} times ours, {batch / each:,.0f} tokens/s; "
        f"{statistics.mean(same):.0f} of {chosen.tokens} tokens equal"
    )


if __name__ == "__main__":
    main()
