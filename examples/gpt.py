"""A small GPT that learns a text, letter by letter: `python examples/gpt.py [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

import penstock as ps
from penstock import Device, Tensor, nn, optim

CONTEXT, BATCH = 32, 8
RHYME = """The rain came down upon the hill, the hill sent down the rain,
the river took it to the mill and round it went again.
The wheel went round, the stones went round, the corn went in between,
and all the while the water wound its way along the green.
"""


def main(device: Device | str | None = None, steps: int = 400, text: str = RHYME) -> float:
    ps.manual_seed(1)
    tokenizer = ps.data.CharTokenizer(text)
    ids = tokenizer.encode(text)
    model = nn.GPT(tokenizer.vocab_size, context=CONTEXT, width=32, layers=2, heads=2, device=device)
    optimizer = optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, clip_norm=1.0)
    schedule = optim.cosine(rate=1e-2, steps=steps, warmup=10)

    @ps.jit
    def step(batch: Tensor) -> Tensor:
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    batches = ps.data.TextBatches(ids, BATCH, CONTEXT, seed=1)
    for number in range(steps):
        optimizer.lr = schedule(number)
        loss = step(ps.tensor(next(batches), device=device))
        if number % 100 == 99:
            print(f"step {number + 1}: loss {loss:.3f}")
    model.tokenizer = tokenizer
    prompt = text[:8]
    print(prompt + model.generate(prompt, 60, temperature=0.5, seed=1).text)
    return loss.item()


if __name__ == "__main__":
    main(text=Path(sys.argv[1]).read_text() if sys.argv[1:] else RHYME)
