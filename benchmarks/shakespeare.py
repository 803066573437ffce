"""A GPT on characters with nanoGPT's settings for a CPU: the validation loss after 2,000 steps, and the time.

    python benchmarks/shakespeare.py TEXT [--device opencl:0] [--seed N]

nanoGPT on PyTorch reaches 1.886 on tinyshakespeare with these settings (characters, context 64, batch 12,
four layers, four heads, width 128, no dropout).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import penstock as ps

STEPS, BATCH, CONTEXT = 2000, 12, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--seed", type=int, default=1337)
    options = parser.parse_args()
    device = ps.use(options.device)
    text = options.text.read_text()
    tokenizer = ps.data.CharTokenizer(text)
    ids = tokenizer.encode(text)
    cut = int(0.9 * len(ids))
    ps.random.manual_seed(options.seed)
    model = ps.nn.GPT(tokenizer.vocab_size, CONTEXT, width=128, layers=4, heads=4, bias=False)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = ps.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), clip_norm=1.0)
    rate = ps.optim.cosine(1e-3, STEPS, warmup=100, least=1e-4)

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    start = time.perf_counter()
    batches = ps.data.TextBatches(ids[:cut], BATCH, CONTEXT, seed=options.seed)
    with ps.data.Prefetch(batches, device) as stream:
        for number, tokens in zip(range(STEPS), stream, strict=False):
            optimizer.lr = rate(number)
            loss = step(tokens)
            if number % 250 == 0:
                print(
                    f"step {number:5}: loss {loss.item():.3f}, {time.perf_counter() - start:.1f} s",
                    flush=True,
                )
        device.sync()
    seconds = time.perf_counter() - start
    print(
        f"{STEPS} steps in {seconds:.1f} s, {1e3 * seconds / STEPS:.1f} ms each; "
        f"waited {stream.waited_seconds:.2f} s for data"
    )

    @ps.jit
    def evaluate(tokens: ps.Tensor) -> ps.Tensor:
        return model.loss(tokens[:, :-1], tokens[:, 1:])

    rows = (len(ids) - cut - 1) // CONTEXT
    windows = np.stack([ids[cut + CONTEXT * k : cut + CONTEXT * (k + 1) + 1] for k in range(rows)]).astype(
        np.int32
    )
    with ps.no_grad():
        losses = [
            evaluate(ps.asarray(part)).item() for part in np.split(windows[: rows // 32 * 32], rows // 32)
        ]
    print(f"validation loss {np.mean(losses):.3f} over {len(losses) * 32} windows")


if __name__ == "__main__":
    main()
