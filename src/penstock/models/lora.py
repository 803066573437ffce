"""LoRA adapters of language models, and their files in PEFT's layout.

The layers of a model have the names of Hugging Face's files here, such as `q_proj` or `c_attn`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import CheckpointError
from penstock.models.settings import Settings, json_of, write_json
from penstock.models.weights import StoredTensor, tensors_in, write_file
from penstock.nn.layers import undrawn
from penstock.nn.lora import LoRA
from penstock.nn.module import Module
from penstock.nn.state import assign
from penstock.printable import shown
from penstock.tensor.core import Tensor, from_numpy, realize_together

if TYPE_CHECKING:
    from penstock.models.model import LanguageModel

Model = TypeVar("Model", bound="LanguageModel")

ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.(lora_[AB])\.weight")
_FLOATS = ("F32", "F16", "BF16")
# What PEFT has beyond plain LoRA of linear layers, and the values that mean none of it.
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
}
# How adapters may have started. Other ways change the weights beside them, for which they are then trained.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


def add_lora(
    model: Model,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] = ALL_LINEAR,
    dropout: float = 0.0,
) -> Model:
    """Freeze a model, and give it LoRA adapters, which are what is trained then. Returns the model.

    `targets` are names of layers as Hugging Face has them, such as `["q_proj", "v_proj"]`, or `"c_attn"` of
    GPT-2; "all-linear": all linear layers of all blocks. An adapter adds `alpha / rank` times the product of
    two matrices, with `rank` columns and rows, to the weight of its layer; see `ps.nn.LoRA`.

    >>> model = ps.models.add_lora(ps.nn.GPT(16, 8, 8, 1, 2), rank=2, targets=["c_attn"])
    >>> [name for name, tensor in model.named_parameters() if tensor.requires_grad]
    ['blocks.0.attention.qkv.lora_A.weight', 'blocks.0.attention.qkv.lora_B.weight']
    """
    layers = _linear_layers(model)
    chosen = _chosen(layers, [targets] if isinstance(targets, str) else targets)
    _attach(model, [layers[name] for name in chosen], rank, alpha, dropout)
    return model


def merge_lora(model: Model) -> Model:
    """Put the adapters of a model into its weights: W + alpha / rank * B A. Returns the model, not frozen."""
    layers = adapters(model)
    for layer in layers.values():
        layer.base_weight  # noqa: B018 - raises before anything changes
    _replace(model, {path: layer.merged() for path, layer in layers.items()})
    model.requires_grad_()
    return model


def adapters(model: LanguageModel) -> dict[str, LoRA]:
    """The LoRA layers of a model by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRA)}


def save_lora(model: LanguageModel, folder: str | Path) -> None:
    """Write the adapters of a model as PEFT does: `adapter_config.json` and `adapter_model.safetensors`."""
    layers = adapters(model)
    if not layers:
        raise CheckpointError("the model has no LoRA adapters to save; ps.models.add_lora adds them")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights: list[tuple[str, Tensor, bool]] = []
    targets = set()
    for path, layer in layers.items():
        theirs, transposed = model.weight_name(f"{path}.weight")
        name = theirs.removesuffix(".weight")
        targets.add(re.split(r"\.\d+\.", name)[-1])
        for part in ("lora_A", "lora_B"):
            weights.append((f"base_model.model.{name}.{part}.weight", getattr(layer, part).weight, False))
    write_file(folder / WEIGHTS, weights)
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if model.source is None else str(model.source),
        "r": layer.rank,
        "lora_alpha": layer.alpha,
        "lora_dropout": layer.dropout.p,
        "target_modules": sorted(targets),
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
    write_json(folder / CONFIG, config)


def load_lora(model: LanguageModel, folder: Path) -> None:
    """Give a model the adapters of a folder in PEFT's layout; a CheckpointError says what does not fit."""
    settings = Settings(json_of(folder / CONFIG), str(folder / CONFIG))
    settings.fixed(**_PLAIN)
    if settings.values.get("init_lora_weights") not in _STARTS:
        raise settings.error("init_lora_weights", "true, false, gaussian, eva or orthogonal")
    rank, alpha = settings.integer("r"), settings.number("lora_alpha", 8.0)
    layers = _linear_layers(model)
    stored = _checked(folder / WEIGHTS, model, layers, rank)
    try:
        dropout = settings.number("lora_dropout", 0.0)
        with undrawn():
            _attach(model, [layers[name] for name in stored], rank, alpha, dropout)
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG} does not describe LoRA adapters: {error}") from None
    attached = adapters(model)
    for name, parts in stored.items():
        for part, source in parts.items():
            tensor = getattr(attached[layers[name]], part).weight
            assign(tensor, from_numpy(source.array().astype(tensor._node.dtype.numpy), tensor.device))


def _checked(
    path: Path, model: LanguageModel, layers: Mapping[str, str], rank: int
) -> dict[str, dict[str, StoredTensor]]:
    """The tensors of a file by layer and matrix, after a check of all names, dtypes and shapes."""
    modules: dict[str, Any] = dict(model.named_modules())
    stored: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors_in(path):
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in layers:
            raise CheckpointError(
                f"{path} has {shown(name)}, which belongs to no linear layer in the blocks of the model; "
                f"there are {', '.join(sorted(layers)[:3])}"
            )
        layer = modules[layers[match[1]]]
        wanted = (rank, layer.in_features) if match[2] == "lora_A" else (layer.out_features, rank)
        if tensor.shape != wanted or tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype} of shape {tensor.shape}, and {wanted} by {CONFIG} and the "
                f"model, in {', '.join(_FLOATS)}"
            )
        stored.setdefault(match[1], {})[match[2]] = tensor
    half = [name for name, parts in stored.items() if len(parts) != 2]
    if half or not stored:
        raise CheckpointError(
            f"{path} lacks lora_A or lora_B of {half[0]}" if half else f"{path} holds no adapter"
        )
    return stored


def _linear_layers(model: LanguageModel) -> dict[str, str]:
    """The paths of all linear layers in the blocks of a model, by their names in Hugging Face's files."""
    if adapters(model):
        raise ValueError(
            "the model has LoRA adapters already; ps.models.merge_lora(model) puts them into its weights"
        )
    inside = {id(module) for block in model.blocks for module in block.modules()}
    return {
        model.weight_name(f"{path}.weight")[0].removesuffix(".weight"): path
        for path, module in model.named_modules()
        if id(module) in inside and hasattr(module, "in_features") and hasattr(module, "out_features")
    }


def _chosen(layers: Mapping[str, str], targets: Sequence[str]) -> list[str]:
    """The names of the layers that targets name; a ValueError lists the names that there are."""
    chosen: list[str] = []
    for target in targets:
        named = [name for name in layers if target == ALL_LINEAR or f".{name}".endswith(f".{target}")]
        if not named:
            known = sorted({re.split(r"\.\d+\.", name)[-1] for name in layers})
            raise ValueError(f"no layer is called {target!r}; there are {', '.join(known)}, or {ALL_LINEAR}")
        chosen += named
    return list(dict.fromkeys(chosen))


def _attach(model: LanguageModel, paths: Sequence[str], rank: int, alpha: float, dropout: float) -> None:
    modules = dict(model.named_modules())
    layers = {path: LoRA(modules[path], rank, alpha, dropout) for path in paths}
    realize_together([part.weight for layer in layers.values() for part in (layer.lora_A, layer.lora_B)])
    model.requires_grad_(False)
    _replace(model, layers)


def _replace(model: LanguageModel, layers: Mapping[str, Module]) -> None:
    """Put modules in the places of others, by path."""
    modules = dict(model.named_modules())
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, layer)
    model._decoders = None  # programs of the layers before
