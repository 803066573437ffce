"""LoRA: a linear layer stays as it is, and a product of two thin matrices beside it is trained."""

from __future__ import annotations

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.dropping import Dropout
from penstock.nn.layers import Linear
from penstock.nn.module import Module
from penstock.nn.parameter import Parameter
from penstock.nn.state import assign
from penstock.tensor.core import Tensor
from penstock.tensor.creation import zeros
from penstock.tensor.dtypes import float32
from penstock.tensor.info import isdtype
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import astype
from penstock.tensor.recording import no_grad


class Adapter(Linear):
    """A thin matrix. It is no plain `Linear`, so that what replaces these in a model leaves it as it is."""


class LoRA(Module):
    """`base_layer(x) + alpha / rank * lora_B(lora_A(dropout(x)))`, of which only the last part is trained.

    The base layer is frozen. It is any module with `in_features` and `out_features`: a `Linear`, or one whose
    weights are quantized. `lora_B` starts as 0, so that at first nothing changes.

    >>> layer = ps.nn.LoRA(ps.nn.Linear(6, 4), rank=2)
    >>> [name for name, tensor in layer.named_parameters() if tensor.requires_grad]
    ['lora_A.weight', 'lora_B.weight']
    """

    def __init__(self, base_layer: Module, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0) -> None:
        sizes = [getattr(base_layer, name, None) for name in ("in_features", "out_features")]
        if not all(isinstance(size, int) for size in sizes):
            raise TypeError(
                f"LoRA is for layers with in_features and out_features, not for {type(base_layer).__name__}"
            )
        if rank < 1 or not 0 < alpha < float("inf"):
            raise ValueError(f"a rank is 1 or more, alpha above 0, and {rank} and {alpha} were given")
        self.in_features, self.out_features = map(int, sizes)  # type: ignore[arg-type]
        self.rank, self.alpha = rank, alpha
        self.base_layer = base_layer.requires_grad_(False)
        self.dropout = Dropout(dropout)
        tensors = [tensor for _, tensor in base_layer.named_tensors()]
        floating = [tensor.dtype for tensor in tensors if isdtype(tensor.dtype, "real floating")]
        device, dtype = tensors[0].device, (floating or [float32])[0]
        self.lora_A = Adapter(self.in_features, rank, False, device).to(dtype)
        self.lora_B = Adapter(rank, self.out_features, False, device)
        self.lora_B.weight = Parameter(zeros((self.out_features, rank), dtype=dtype, device=device))

    @property
    def scale(self) -> float:
        """By what the product of the two matrices is multiplied."""
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """The output of the base layer, with what was learned beside it."""
        low = F.linear(self.dropout(x), astype(self.lora_A.weight, x.dtype))
        result: Tensor = self.base_layer(x)
        return result + F.linear(low, astype(self.lora_B.weight, x.dtype)) * self.scale

    @property
    def base_weight(self) -> Tensor:
        """The weight that the adapter can be merged into; a TypeError if the base layer has no such."""
        weight = vars(self.base_layer).get("weight")  # not a property that computes it
        shape = (self.out_features, self.in_features)
        if isinstance(weight, Tensor) and weight.shape == shape and isdtype(weight.dtype, "real floating"):
            return weight
        raise TypeError(
            f"{type(self.base_layer).__name__} has no floating-point weight of shape {shape} that an adapter "
            "could be merged into; load the model without quantized weights"
        )

    def merged(self) -> Module:
        """The base layer, with `scale * lora_B.weight @ lora_A.weight`, in float32, added to its weight."""
        weight = self.base_weight
        with no_grad():
            low, high = (astype(part.weight, float32) for part in (self.lora_A, self.lora_B))
            total = astype(weight, float32) + matmul(high, low) * self.scale
            assign(weight, astype(total, weight.dtype))
        return self.base_layer

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"rank={self.rank}, alpha={self.alpha:g}"
