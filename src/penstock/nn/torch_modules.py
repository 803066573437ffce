"""Modules of PyTorch as modules of Penstock, with the same weights.

PyTorch is not imported: its modules are recognised by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock import nn
from penstock.nn.layers import Where
from penstock.nn.module import Module
from penstock.tensor.core import from_numpy, resolve

# Arguments of the constructor that are attributes of PyTorch's module under the same names.
_SAME: dict[str, str] = {
    "Identity": "",
    "Flatten": "start_dim end_dim",
    "Unflatten": "dim unflattened_size",
    "Dropout": "p",
    "Dropout1d": "p",
    "Dropout2d": "p",
    "Dropout3d": "p",
    "AlphaDropout": "p",
    "GELU": "approximate",
    "LeakyReLU": "negative_slope",
    "ELU": "alpha",
    "CELU": "alpha",
    "Softplus": "beta threshold",
    "Hardtanh": "min_val max_val",
    "Softshrink": "lambd",
    "Hardshrink": "lambd",
    "Threshold": "threshold value",
    "Softmax": "dim",
    "LogSoftmax": "dim",
    "Softmin": "dim",
    "GLU": "dim",
    "PReLU": "num_parameters",
    "GroupNorm": "num_groups num_channels eps affine",
    "L1Loss": "reduction",
    "MSELoss": "reduction",
    "SmoothL1Loss": "reduction beta",
    "HuberLoss": "reduction delta",
    "KLDivLoss": "reduction log_target",
    "CosineEmbeddingLoss": "margin reduction",
    "CosineSimilarity": "dim eps",
    "CTCLoss": "blank reduction zero_infinity",
}
_SAME |= dict.fromkeys(
    [
        "ReLU",
        "ReLU6",
        "SELU",
        "Sigmoid",
        "LogSigmoid",
        "Tanh",
        "Tanhshrink",
        "SiLU",
        "Mish",
        "Softsign",
        "Hardsigmoid",
        "Hardswish",
    ],
    "",
)
_RUNNING = "num_features eps momentum affine track_running_stats"
_SAME |= {f"{kind}{axes}d": _RUNNING for kind in ("BatchNorm", "InstanceNorm") for axes in (1, 2, 3)}
_RECURRENT = "input_size hidden_size num_layers bias batch_first dropout bidirectional"
_SAME |= {"LSTM": _RECURRENT, "GRU": _RECURRENT, "RNN": f"{_RECURRENT} nonlinearity"}
_POOLS = {
    "MaxPool": "kernel_size stride padding dilation return_indices ceil_mode",
    "MaxUnpool": "kernel_size stride padding",
    "AdaptiveAvgPool": "output_size",
    "AdaptiveMaxPool": "output_size return_indices",
}
_SAME |= {f"{kind}{axes}d": names for kind, names in _POOLS.items() for axes in (1, 2, 3)}
_AVERAGE = "kernel_size stride padding ceil_mode count_include_pad"
_SAME |= {"AvgPool1d": _AVERAGE} | {f"AvgPool{axes}d": f"{_AVERAGE} divisor_override" for axes in (2, 3)}
_SAME |= {
    "Unfold": "kernel_size dilation padding stride",
    "Fold": "output_size kernel_size dilation padding stride",
}


def converted(module: Any, device: Where = None) -> Module:
    """See `nn.from_torch`."""
    made = _made(module, "")
    if device is not None:
        made.to(device)
    made.load_state_dict(module.state_dict())
    theirs = dict(module.named_parameters())
    for name, tensor in made.named_parameters():
        if name in theirs:
            tensor.requires_grad_(bool(theirs[name].requires_grad))
    for name, inner in made.named_modules():
        inner.training = bool(module.get_submodule(name).training) if name else bool(module.training)
    return made


def _made(module: Any, path: str) -> Module:
    kind = type(module).__name__
    is_torch = type(module).__module__.startswith("torch.nn.")
    if is_torch and kind in _SAME:
        given = {name: getattr(module, name) for name in _SAME[kind].split()}
        made: Module = getattr(nn, kind)(**given)
        return made
    make = _MAKERS.get(kind)
    if not is_torch or make is None:
        where = f" at {path!r}" if path else ""
        raise ValueError(
            f"there is no counterpart of PyTorch's {kind}{where}; write it with ps.nn, and load its state"
        )
    return make(module, path)


def _children(module: Any, path: str) -> dict[str, Module]:
    return {name: _made(child, f"{path}.{name}" if path else name) for name, child in module.named_children()}


def _linear(module: Any, path: str) -> Module:
    return nn.Linear(module.in_features, module.out_features, module.bias is not None)


def _convolution(module: Any, path: str) -> Module:
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"]
    names.append("output_padding" if module.transposed else "padding_mode")
    given = {name: getattr(module, name) for name in names}
    made: Module = getattr(nn, type(module).__name__)(**given, bias=module.bias is not None)
    return made


def _embedding(module: Any, path: str) -> Module:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ValueError(
            f"an embedding with max_norm, scale_grad_by_freq or sparse has no counterpart: {path}"
        )
    return nn.Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx)


def _layer_norm(module: Any, path: str) -> Module:
    affine, bias = module.elementwise_affine, module.bias is not None
    return nn.LayerNorm(module.normalized_shape, module.eps, affine, bias)


def _rms_norm(module: Any, path: str) -> Module:
    return nn.RMSNorm(module.normalized_shape, module.eps, module.elementwise_affine)


def _upsample(module: Any, path: str) -> Module:
    return nn.Upsample(module.size, module.scale_factor, module.mode, bool(module.align_corners))


def _cell(module: Any, path: str) -> Module:
    more = {"nonlinearity": module.nonlinearity} if hasattr(module, "nonlinearity") else {}
    made: Module = getattr(nn, type(module).__name__)(
        module.input_size, module.hidden_size, module.bias, **more
    )
    return made


def _attention(module: Any, path: str) -> Module:
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(f"attention with add_bias_kv or add_zero_attn has no counterpart: {path}")
    return nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        module.dropout,
        module.in_proj_bias is not None,
        module.kdim,
        module.vdim,
        module.batch_first,
    )


def _transformer_layer(module: Any, path: str) -> Module:
    return getattr(nn, type(module).__name__)(  # type: ignore[no-any-return]
        module.self_attn.embed_dim,
        module.self_attn.num_heads,
        module.linear1.out_features,
        module.dropout.p,
        _activation(module.activation, path),
        module.norm1.eps,
        module.self_attn.batch_first,
        module.norm_first,
        module.linear1.bias is not None,
    )


def _activation(function: Any, path: str) -> Any:
    name = getattr(function, "__name__", "")
    if callable(function) and name in ("relu", "gelu", "silu", "tanh", "sigmoid"):
        return name
    return _made(function, f"{path}.activation")


def _stack(module: Any, path: str) -> Module:
    children = _children(module, path)
    layers = list(children["layers"])  # type: ignore[call-overload]
    made: Module = getattr(nn, type(module).__name__)(layers[0], len(layers), children.get("norm"))
    return made


def _weighted(*names: str) -> Callable[[Any, str], Module]:
    """A loss with tensors among its settings."""

    def make(module: Any, path: str) -> Module:
        given = {name: _tensor(getattr(module, name)) for name in names}
        made: Module = getattr(nn, type(module).__name__)(**given)
        return made

    return make


def _tensor(value: Any) -> Any:
    return from_numpy(value.detach().cpu().numpy(), resolve(None)) if hasattr(value, "detach") else value


_MAKERS: Mapping[str, Callable[[Any, str], Module]] = {
    "Linear": _linear,
    "NonDynamicallyQuantizableLinear": _linear,
    **{f"{kind}{axes}d": _convolution for kind in ("Conv", "ConvTranspose") for axes in (1, 2, 3)},
    "Embedding": _embedding,
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
    "Upsample": _upsample,
    "RNNCell": _cell,
    "LSTMCell": _cell,
    "GRUCell": _cell,
    "MultiheadAttention": _attention,
    "TransformerEncoderLayer": _transformer_layer,
    "TransformerDecoderLayer": _transformer_layer,
    "TransformerEncoder": _stack,
    "TransformerDecoder": _stack,
    "Sequential": lambda module, path: nn.Sequential(_children(module, path)),
    "ModuleList": lambda module, path: nn.ModuleList(_children(module, path).values()),
    "ModuleDict": lambda module, path: nn.ModuleDict(_children(module, path)),
    "BCELoss": _weighted("weight", "reduction"),
    "BCEWithLogitsLoss": _weighted("weight", "reduction", "pos_weight"),
    "NLLLoss": _weighted("weight", "ignore_index", "reduction"),
    "CrossEntropyLoss": _weighted("weight", "ignore_index", "reduction", "label_smoothing"),
}
