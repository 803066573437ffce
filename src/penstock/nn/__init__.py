"""Networks: modules, layers, and the functions that they are made of."""

from penstock.nn import functional
from penstock.nn.gpt import GPT, Block, CausalSelfAttention
from penstock.nn.layers import (
    GELU,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    ReLU,
    RMSNorm,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from penstock.nn.module import Module

__all__ = [
    "GELU",
    "GPT",
    "Block",
    "CausalSelfAttention",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "functional",
]
