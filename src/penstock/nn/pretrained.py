"""GPT-2 checkpoints in Hugging Face's layout: `config.json` and `model.safetensors` in a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from penstock.errors import CheckpointError
from penstock.files import atomic_file, parse_json, read_text, require_regular
from penstock.printable import shown

if TYPE_CHECKING:
    from penstock.nn.gpt import GPT
    from penstock.nn.layers import Where

_LAYERS = {
    "ln_1": "norm1",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "ln_2": "norm2",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}
_TOP = {
    "wte.weight": "tokens.weight",
    "wpe.weight": "positions.weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
}
_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
_BLOCK = re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)")
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
_PROPORTIONS = ("resid_pdrop", "layer_norm_epsilon")
# Settings that the model does not support otherwise.
_FIXED = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def load(kind: type[GPT], folder: Path, device: Where) -> GPT:
    """The model in a folder, with its configuration and weights."""
    config = _read_config(folder)
    try:
        require_regular(folder / "model.safetensors")
        weights = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError, LookupError) as error:  # a LookupError: NumPy lacks the dtype
        raise CheckpointError(f"{folder / 'model.safetensors'} cannot be read: {error}") from None
    if config.get("activation_function", "gelu_new") not in _ACTIVATIONS:
        given = config["activation_function"]
        raise CheckpointError(f"the activation {shown(given)} is not GPT-2's {_ACTIVATIONS}")
    _check_sizes(folder, config, weights)
    try:
        model = kind(
            vocab_size=config["vocab_size"],
            context=config["n_positions"],
            width=config["n_embd"],
            layers=config["n_layer"],
            heads=config["n_head"],
            dropout=config.get("resid_pdrop", 0.0),
            eps=config.get("layer_norm_epsilon", 1e-5),
            device=device,
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a GPT-2: {error}") from None
    state = {}
    for name, array in weights.items():
        ours = _ours(name.removeprefix("transformer."))
        if ours is not None:
            # GPT-2 stores linear weights as (inputs, outputs).
            state[ours] = array.T if _is_linear(ours, array) else array
    try:
        model.load_state_dict(state)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{folder} does not hold a GPT-2 of its own configuration: {error}") from None
    return model


def save(model: GPT, folder: Path) -> None:
    """Write a model's configuration and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocab_size,
        "n_positions": model.context,
        "n_embd": model.width,
        "n_layer": len(model.blocks),
        "n_head": model.heads,
        "layer_norm_epsilon": model.eps,
        "activation_function": "gelu_new",
        "resid_pdrop": model.dropout.p,
        "embd_pdrop": model.dropout.p,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    }
    weights: dict[str, npt.NDArray[Any]] = {}
    for name, array in model.state_dict().items():
        if name.endswith("weight") and ("blocks" in name or "norm" in name):
            # GPT-2 always has biases: write 0 for a missing bias.
            bias = f"transformer.{_theirs(name)}".removesuffix("weight") + "bias"
            weights.setdefault(bias, np.zeros(array.shape[0], array.dtype))
        theirs = f"transformer.{_theirs(name)}"
        weights[theirs] = np.ascontiguousarray(array.T if _is_linear(name, array) else array)
    with atomic_file(folder / "model.safetensors") as file:
        file.write(to_safetensors(weights, {"format": "pt"}))
    with atomic_file(folder / "config.json") as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = parse_json(read_text(folder / "config.json"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'} is an object, not {shown(config)}")
    missing = [name for name in _SIZES if name not in config]
    if missing:
        raise CheckpointError(f"{folder / 'config.json'} lacks {', '.join(missing)}")
    for name in _SIZES:
        if type(config[name]) is not int:
            raise CheckpointError(
                f"{folder / 'config.json'}: {name} is an integer, not {shown(config[name])}"
            )
    for name in _PROPORTIONS:
        value = config.get(name, 0.0)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise CheckpointError(
                f"{folder / 'config.json'}: {name} is a number from 0 to less than 1, not {shown(value)}"
            )
    for name, wanted in _FIXED.items():
        if config.get(name, wanted) != wanted:
            raise CheckpointError(
                f"{folder / 'config.json'}: {name} has to be {wanted}, not {shown(config[name])}"
            )
    return config


def _check_sizes(folder: Path, config: dict[str, Any], weights: dict[str, npt.NDArray[Any]]) -> None:
    """Check the configuration against the weights, before a model of these sizes is allocated."""
    names = {name.removeprefix("transformer."): array.shape for name, array in weights.items()}
    blocks = {int(match[1]) for match in map(_BLOCK.fullmatch, names) if match and len(match[1]) < 10}
    wte, wpe = names.get("wte.weight"), names.get("wpe.weight")
    width = config["n_embd"]
    for what, given, wanted in (
        ("wte.weight has the shape", wte, (config["vocab_size"], width)),
        ("wpe.weight has the shape", wpe, (config["n_positions"], width)),
        ("the number of layers is", len(blocks), config["n_layer"]),
    ):
        if given != wanted:
            raise CheckpointError(
                f"{folder} does not hold a GPT-2 of its own configuration: {what} {given}, and "
                f"{shown(wanted)} by config.json"
            )


def _is_linear(name: str, array: npt.NDArray[Any]) -> bool:
    return array.ndim == 2 and name.startswith("blocks.")


def _ours(name: str) -> str | None:
    """Penstock's name of a GPT-2 weight; None for other tensors, such as masks."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _LAYERS:
        return None
    return f"blocks.{match[1]}.{_LAYERS[match[2]]}.{match[3]}"


def _theirs(name: str) -> str:
    for theirs, ours in _TOP.items():
        if name == ours:
            return theirs
    _, number, rest = name.split(".", 2)
    layer, kind = rest.rsplit(".", 1)
    return f"h.{number}.{next(t for t, o in _LAYERS.items() if o == layer)}.{kind}"
