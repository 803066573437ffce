"""Quantized layers of language models: which they are, in files that `save` wrote and in GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import CheckpointError
from penstock.models.gguf import BLOCK, PackedTensor
from penstock.models.model import LanguageModel
from penstock.models.settings import Settings
from penstock.nn.layers import Linear, undrawn
from penstock.nn.module import Module
from penstock.nn.quantizing import QuantizedLinear, replace_linear
from penstock.printable import shown

_KEY, _METHOD = "quantization_config", "penstock"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head"  # in files


def file_setting(model: LanguageModel) -> dict[str, Any]:
    """The key of `config.json` that says which weights are quantized: their bits, and the size of groups."""
    weights = {
        _file_name(model, path): [layer.bits, layer.group]
        for path, layer in model.named_modules()
        if isinstance(layer, QuantizedLinear)
    }
    return {_KEY: {"quant_method": _METHOD, "weights": weights}} if weights else {}


def prepare(model: LanguageModel, settings: Settings) -> None:
    """Give a model without weights the quantized layers that its configuration names."""
    given = settings.part(_KEY)
    if not given.values:
        return
    if given.values.get("quant_method") != _METHOD:
        raise CheckpointError(
            f"{given.where}: quant_method is {shown(given.values.get('quant_method'))}, and only folders "
            f"that were quantized by penstock are read; GGUF files are read too"
        )
    weights = given.part("weights").values
    try:
        _replace(model, lambda name: tuple(weights[name]) if name in weights else None)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{given.where}: {error}") from None


def keep_packed(model: LanguageModel, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Quantize the layers whose weights are packed in a GGUF file; the file's tensors for such a model."""
    files: dict[str, PackedTensor] = dict(stored)
    source = dict(files)
    if model.lm_head is None and _EMBEDDING in source:
        source[f"{_HEAD}.weight"] = source[_EMBEDDING]

    def sizes(name: str) -> tuple[int, int] | None:
        tensor = source.get(f"{name}.weight")
        if tensor is None or not tensor.bits:
            return None
        assert tensor.words is not None
        assert tensor.scales is not None
        files.pop(f"{name}.weight", None)
        outputs, inputs = tensor.shape
        files[f"{name}.packed"] = PackedTensor((outputs, inputs * tensor.bits // 32), tensor.words)
        files[f"{name}.scales"] = PackedTensor((outputs, inputs // BLOCK), tensor.scales)
        return tensor.bits, BLOCK

    _replace(model, sizes)
    return files


def _replace(model: LanguageModel, sizes: Callable[[str], tuple[int, int] | None]) -> None:
    """Replace the linear layers for which `sizes` tells bits and group, given their names in files."""
    layers = [(path, part) for path, part in model.named_modules() if isinstance(part, Linear)]
    names = {id(layer): _file_name(model, path) for path, layer in layers}
    device = model.head_weight.device

    def made(layer: Linear) -> Module:
        given = sizes(names[id(layer)])
        if given is None:
            return layer
        inputs, outputs = layer.in_features, layer.out_features
        return QuantizedLinear(inputs, outputs, layer.bias is not None, *given, device=device)

    with undrawn():
        replace_linear(model, made)
        if model.lm_head is None and (given := sizes(_HEAD)) is not None:
            outputs, inputs = model.head_weight.shape
            model.lm_head = QuantizedLinear(inputs, outputs, False, *given, device=device)


def _file_name(model: LanguageModel, path: str) -> str:
    """The name of a layer in Hugging Face's files."""
    return model.weight_name(f"{path}.weight")[0].removesuffix(".weight")
