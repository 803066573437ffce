"""Makes lora.npz, what PEFT computes with adapters over the models of `model_cases.py`, for test_lora.py.

Run it where peft, transformers and PyTorch are installed: `python tests/data/make_lora.py`. The tests only
read the file, which has PEFT's own adapter files too.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import peft
import torch
from make_models import built

sys.path.insert(0, str(Path(__file__).parents[1]))
import model_cases as cases

warnings.simplefilter("ignore")  # of PEFT, about models that are in no hub


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    store: dict[str, np.ndarray] = {}
    for case, targets in cases.LORA_TARGETS.items():
        config = peft.LoraConfig(
            r=cases.LORA_RANK,
            lora_alpha=cases.LORA_ALPHA,
            target_modules=targets,
            task_type="CAUSAL_LM",
            fan_in_fan_out=case == "gpt2",
        )
        model = peft.get_peft_model(built(case), config).eval()
        trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor.copy_(torch.tensor(0.2 * cases.weight(name, tensor.shape)))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                store[f"{case}.{file}"] = np.frombuffer((Path(folder) / file).read_bytes(), np.uint8)
        ids = torch.tensor(cases.tokens(2, cases.LENGTH))
        store[f"{case}.logits"] = model(ids).logits[:, cases.POSITIONS].detach().numpy()
        optimizer = torch.optim.AdamW(trained.values(), lr=cases.LORA_RATE, weight_decay=0.1)
        losses = []
        for _ in range(cases.LORA_STEPS):
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        store[f"{case}.losses"] = np.array(losses)
        store[f"{case}.merged"] = model.merge_and_unload()(ids).logits[:, cases.POSITIONS].detach().numpy()
        print(f"{case:8} {losses[0]:.4f} to {losses[-1]:.4f}")
    np.savez_compressed(cases.LORA_REFERENCE, **store)
    print(f"{cases.LORA_REFERENCE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
