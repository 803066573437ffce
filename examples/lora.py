"""A model that knows a rhyme learns another by LoRA: its weights stay, and matrices beside them learn."""

import tempfile
from pathlib import Path

from gpt import RHYME

import penstock as ps
from penstock import Device, Tensor
from penstock.models import LanguageModel

OTHER = """The snow lay deep upon the hill, the hill was white with snow,
the river froze beside the mill and nothing now could grow.
"""


def train(model: LanguageModel, ids: list[int], steps: int, rate: float) -> float:
    """Train what is not frozen on a text; the last loss."""
    learned = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = ps.optim.AdamW(learned, lr=rate, clip_norm=1.0)

    @ps.jit
    def step(batch: Tensor) -> Tensor:
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    batches = ps.data.TextBatches(ids, batch=8, context=32, seed=1)
    for _ in range(steps):
        loss = step(ps.tensor(next(batches), device=model.head_weight.device))
    print(f"{sum(tensor.size for tensor in learned):,} parameters trained: loss {loss:.3f}")
    return loss.item()


def main(device: Device | str | None = None, steps: int = 150) -> float:
    ps.manual_seed(1)
    tokenizer = ps.data.CharTokenizer(RHYME + OTHER)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64}
    model = ps.models.build(ps.models.SIZES["llama-tiny"] | sizes, device)
    model.tokenizer = tokenizer
    train(model, tokenizer.encode(RHYME), steps, rate=1e-2)

    with tempfile.TemporaryDirectory() as folder:
        base, adapter = Path(folder, "base"), Path(folder, "adapter")
        model.save(base)
        ps.models.add_lora(model, rank=4, alpha=8)
        loss = train(model, tokenizer.encode(OTHER), steps, rate=1e-2)
        ps.models.save_lora(model, adapter)  # some kilobytes, in PEFT's layout
        for name, each in (("as it was", None), ("with the adapter", adapter)):
            loaded = ps.models.load(base, device=device, adapter=each)
            print(f"{name}: {loaded.generate('The snow', 40, temperature=0).text!r}")
    return loss


if __name__ == "__main__":
    main()
