"""Makes models.npz, what transformers computes with the models of `model_cases.py`, for test_models.py.

Run it where transformers and PyTorch are installed: `python tests/data/make_models.py`, for some of the cases
with their names. The tests only read the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
import model_cases as cases


def built(case: str) -> transformers.PreTrainedModel:
    """A model with the weights of its names."""
    config = transformers.AutoConfig.for_model(**cases.CONFIGS[case])
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.tensor(cases.weight(name, tensor.shape)))
    return model.eval()


def greedy(model: transformers.PreTrainedModel, prompt: np.ndarray) -> tuple[list[int], float]:
    """The likeliest tokens, one after another, and the least lead that one of them had."""
    given, past, result, lead = torch.tensor(prompt[None]), None, [], np.inf
    for _ in range(cases.TOKENS):
        out = model(given, past_key_values=past, use_cache=True)
        past = out.past_key_values
        best = out.logits[0, -1].topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        result.append(int(best.indices[0]))
        given = best.indices[:1][None]
    return result, lead


def main() -> None:
    chosen = sys.argv[1:] or list(cases.CONFIGS)
    store = dict(np.load(cases.REFERENCE)) if sys.argv[1:] else {}
    for case in chosen:
        model = built(case)
        ids = torch.tensor(cases.tokens(2, cases.LENGTH))
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        shapes = {name: list(tensor.shape) for name, tensor in model.named_parameters()}
        probes = {
            name: [
                float((tensor.grad.double().numpy() * cases.probe(name, tensor.shape)).sum()),
                float(tensor.grad.double().norm()),
            ]
            for name, tensor in model.named_parameters()
        }
        with torch.no_grad():
            model = built(case)  # scalings by length have a state
            exact = model.double()(ids).logits
            continued = [greedy(built(case), cases.tokens(length)) for length in cases.PROMPTS]
        noise = float((exact - logits.detach()).abs().max())
        least = min(lead for _, lead in continued)
        print(f"{case:16} loss {loss.item():.4f}, noise {noise:.1e}, least lead {least:.1e}")
        store[f"{case}.logits"] = logits[:, cases.POSITIONS].detach().numpy()
        store[f"{case}.greedy"] = np.array([ids for ids, _ in continued], np.uint8)
        about = {"loss": loss.item(), "noise": noise, "shapes": shapes, "gradients": probes}
        store[f"{case}.about"] = np.array(json.dumps(about))
    np.savez_compressed(cases.REFERENCE, **store)
    print(f"{cases.REFERENCE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
