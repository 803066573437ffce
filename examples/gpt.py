"""A small GPT that learns a text, letter by letter: `python examples/gpt.py [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import penstock as ps
from penstock import Device, Tensor, nn, optim

CONTEXT, BATCH, STEPS = 32, 8, 400
RHYME = """The rain came down upon the hill, the hill sent down the rain,
the river took it to the mill and round it went again.
The wheel went round, the stones went round, the corn went in between,
and all the while the water wound its way along the green.
"""


def main(device: Device | str | None = None, text: str = RHYME) -> float:
    ps.random.manual_seed(1)
    letters = sorted(set(text))
    ids = np.array([letters.index(one) for one in text])
    model = nn.GPT(len(letters), context=CONTEXT, width=32, layers=2, heads=2, device=device)
    optimizer = optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, clip_norm=1.0)
    schedule = optim.cosine(rate=1e-2, steps=STEPS, warmup=10)

    @ps.jit
    def step(batch: Tensor) -> Tensor:
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    random = np.random.default_rng(1)
    for number in range(STEPS):
        starts = random.integers(0, len(ids) - CONTEXT, BATCH)
        batch = np.stack([ids[start : start + CONTEXT + 1] for start in starts])
        optimizer.lr = schedule(number)
        loss = step(ps.asarray(batch, device=device))
    print(f"loss {float(loss):.2g}")
    prompt = ids[:8]
    written = model.generate(prompt, 60, temperature=0.5, seed=1)
    print("".join(letters[one] for one in [*prompt, *written]))
    return float(loss)


if __name__ == "__main__":
    main(text=Path(sys.argv[1]).read_text() if sys.argv[1:] else RHYME)
