"""Neural networks: modules, layers, and their functions."""

from typing import TYPE_CHECKING, Any

from penstock.nn import functional, init, utils
from penstock.nn.activations import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softmin,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
)
from penstock.nn.attention import MultiheadAttention
from penstock.nn.containers import ModuleDict, ModuleList, ParameterDict, ParameterList, Sequential
from penstock.nn.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from penstock.nn.dropping import AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d
from penstock.nn.layers import Embedding, Flatten, Identity, Linear, Unflatten, Upsample
from penstock.nn.lora import LoRA
from penstock.nn.losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CosineEmbeddingLoss,
    CosineSimilarity,
    CrossEntropyLoss,
    CTCLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
)
from penstock.nn.module import Module
from penstock.nn.normalization import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)
from penstock.nn.parameter import Parameter
from penstock.nn.pooling import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    Fold,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    MaxUnpool1d,
    MaxUnpool2d,
    MaxUnpool3d,
    Unfold,
)
from penstock.nn.quantizing import QuantizedLinear
from penstock.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from penstock.nn.summary import summary
from penstock.nn.transformer import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

if TYPE_CHECKING:
    from penstock.models.gpt2 import GPT, Block, CausalSelfAttention

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "GPT",
    "GRU",
    "LSTM",
    "RNN",
    "SELU",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AlphaDropout",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Block",
    "CTCLoss",
    "CausalSelfAttention",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CosineEmbeddingLoss",
    "CosineSimilarity",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Embedding",
    "Flatten",
    "Fold",
    "GRUCell",
    "GroupNorm",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "HuberLoss",
    "Identity",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "KLDivLoss",
    "L1Loss",
    "LSTMCell",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LoRA",
    "LogSigmoid",
    "LogSoftmax",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MaxUnpool1d",
    "MaxUnpool2d",
    "MaxUnpool3d",
    "Mish",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiheadAttention",
    "NLLLoss",
    "PReLU",
    "Parameter",
    "ParameterDict",
    "ParameterList",
    "QuantizedLinear",
    "RMSNorm",
    "RNNCell",
    "ReLU",
    "ReLU6",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "Softmin",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Threshold",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "Unflatten",
    "Unfold",
    "Upsample",
    "from_torch",
    "functional",
    "init",
    "summary",
    "utils",
]


def from_torch(module: Any, device: Any = None) -> Module:
    """Convert a module of PyTorch to a Penstock module that computes the same, with copies of its weights.

    A ValueError names a layer that has no counterpart, and its path. A class of your own has to be written
    with `ps.nn`; then load the `state_dict()` of PyTorch's module. `ps.nn.from_torch(torch.nn.Linear(3, 2))`
    is a `ps.nn.Linear(3, 2)`.

    >>> try:
    ...     ps.nn.from_torch(7)
    ... except ValueError as error:
    ...     print(error)
    there is no counterpart of PyTorch's int; write it with ps.nn, and load its state
    """
    from penstock.nn.torch_modules import converted

    return converted(module, device)


def __getattr__(name: str) -> Any:
    """GPT and its parts, which are a family of `penstock.models` and keep their names here."""
    if name not in ("GPT", "Block", "CausalSelfAttention"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.models import gpt2

    return getattr(gpt2, name)
