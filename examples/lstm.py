"""An LSTM that learns a rhyme, letter by letter, and goes on writing: `python examples/lstm.py [FILE]`."""

import sys
from pathlib import Path

from gpt import RHYME

import penstock as ps
from penstock import Device, Tensor, nn, optim
from penstock.nn import functional as F  # noqa: N812

LENGTH, BATCH = 24, 16


class Writer(nn.Module):
    def __init__(self, letters: int, width: int = 64, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple]:
        x, state = self.lstm(self.embedding(ids), state)
        return self.head(x), state


def main(device: Device | str | None = None, steps: int = 300, text: str = RHYME) -> float:
    ps.manual_seed(1)
    device = device or ps.default_device()
    tokenizer = ps.data.CharTokenizer(text)
    model = Writer(tokenizer.vocab_size).to(device)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)

    @ps.jit
    def step(ids: Tensor) -> Tensor:
        logits, _ = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    batches = ps.data.TextBatches(tokenizer.encode(text), BATCH, LENGTH, seed=1)
    for number in range(1, steps + 1):
        loss = step(ps.tensor(next(batches), device=device))
        if number % 100 == 0:
            print(f"step {number}: loss {loss:.3f}")

    written, state, ids = "", None, tokenizer.encode("The rain")
    with ps.no_grad():
        for _ in range(60):
            logits, state = model(ps.tensor(ids, device=device)[None], state)
            ids = [logits[0, -1].argmax().item()]
            written += tokenizer.decode(ids)
    print("The rain" + written)
    return loss.item()


if __name__ == "__main__":
    main(text=Path(sys.argv[1]).read_text() if sys.argv[1:] else RHYME)
