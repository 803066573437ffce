"""Linear layers whose weights are packed integers, for inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, overload

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.layers import Linear, Where
from penstock.nn.module import Module
from penstock.nn.parameter import Parameter
from penstock.tensor.arithmetic import isfinite
from penstock.tensor.core import Tensor, realize_together
from penstock.tensor.creation import zeros
from penstock.tensor.dtypes import uint32
from penstock.tensor.jit import jit
from penstock.tensor.manipulation import concat
from penstock.tensor.recording import no_grad, only_recording
from penstock.tensor.reduction import all as all_

M = TypeVar("M", bound=Module)
BITS = {"int4": 4, "int8": 8}
GROUPS = (32, 64)
_AT_ONCE = 1 << 24  # weights that are quantized at a time, with a word of temporaries for each
_quantized = jit(F.quantized)


class QuantizedLinear(Module):
    """`Linear` with a weight of 4 or 8 bits, and a scale for each group of inputs.

    `packed` has the integers, 8 or 4 to a word, and `scales` the scales, in the dtype of the layer. Gradients
    pass to the input, and to the bias if it requires one. The weight is not trained.

    >>> layer = ps.quantize(ps.nn.Linear(64, 8), "int4")
    >>> layer.packed.shape, layer.scales.shape, layer(ps.ones((3, 64))).shape
    ((8, 8), (8, 2), (3, 8))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        bits: int = 4,
        group: int = 32,
        device: Where = None,
    ) -> None:
        """A layer of zeros, whose values are loaded; `ps.quantize` makes layers of others."""
        if in_features < 1 or out_features < 1:
            raise ValueError(
                f"a linear layer needs sizes of 1 or more, and {in_features}, {out_features} were given"
            )
        if bits not in BITS.values() or group not in GROUPS:
            raise ValueError(
                f"integers have 4 or 8 bits, and groups {' or '.join(map(str, GROUPS))} of them; {bits} and "
                f"{group} were given"
            )
        self.in_features, self.out_features, self.bits, self.group = in_features, out_features, bits, group
        groups = -(-in_features // group)
        self.packed = zeros((out_features, groups * group * bits // 32), dtype=uint32, device=device)
        self.scales = zeros((out_features, groups), device=device)
        self.bias = Parameter(zeros((out_features,), device=device)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The weight that the integers stand for, (out_features, in_features), computed anew at each use."""
        with only_recording():  # it may be large, and only its dtype be of interest
            return F.dequantized(self.packed, self.scales, self.bits, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight."""
        return F.quantized_linear(x, self.packed, self.scales, self.bits, self.bias)

    def extra_repr(self) -> str:
        """Its sizes."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, bits={self.bits}, group={self.group}"


def quantized_layer(weight: Tensor, bias: Tensor | None, bits: int, group: int) -> QuantizedLinear:
    """A layer with a weight that is rounded to integers, and the bias itself."""
    outputs, inputs = weight.shape
    layer = QuantizedLinear(inputs, outputs, False, bits, group, weight.device)
    layer.bias = bias  # type: ignore[assignment]
    with no_grad():
        each = max(1, _AT_ONCE // inputs)
        # Jitted: otherwise the many operations on a large weight would be computed one by one.
        parts = [
            _quantized(weight[start : start + each], bits=bits, group=group)
            for start in range(0, outputs, each)
        ]
        layer.packed, layer.scales = (concat(same) for same in zip(*parts, strict=True))
        realize_together([layer.packed, layer.scales])
        if not bool(all_(isfinite(layer.scales))):
            raise ValueError(
                f"a weight of shape {weight.shape} is not finite, or too large for {weight.dtype}"
            )
    return layer


@overload
def quantize(model: Linear, dtype: str, group: int = ...) -> QuantizedLinear: ...


@overload
def quantize(model: M, dtype: str, group: int = ...) -> M: ...


def quantize(model: Module, dtype: str, group: int = 32) -> Module:
    """Replace the weights of linear layers by integers of 4 or 8 bits, for inference.

    The layers are replaced in the model, which is returned; a `Linear` by itself stays as it is, and the
    result is a `QuantizedLinear`. A language model whose head has the weight of its embedding gets a
    quantized copy of it as head. Embeddings and everything else stay as they are.

    `dtype` is "int4" or "int8". Each `group` of 32 or 64 inputs has a scale, so with groups of 32 and scales
    of 16 bits, a weight takes 4.5 or 8.5 bits. Inputs whose number is no multiple of the group are filled up
    with zeros. Quantize a model in the dtype of its activations, before functions that use it are jitted.

    >>> model = ps.nn.Sequential(ps.nn.Linear(64, 32), ps.nn.ReLU(), ps.nn.Linear(32, 2))
    >>> ps.quantize(model, "int4")
    Sequential(
      (0): QuantizedLinear(in_features=64, out_features=32, bias=True, bits=4, group=32)
      (1): ReLU()
      (2): QuantizedLinear(in_features=32, out_features=2, bias=True, bits=4, group=32)
    )
    """
    if not isinstance(model, Module):
        raise TypeError(f"quantize takes a module, and {type(model).__name__} was given")
    if dtype not in BITS or group not in GROUPS:
        raise ValueError(
            f"quantize takes {' or '.join(map(repr, BITS))} and groups of {' or '.join(map(str, GROUPS))}, "
            f"and {dtype!r} and {group} were given"
        )

    def layer(linear: Linear) -> QuantizedLinear:
        return quantized_layer(linear.weight, linear.bias, BITS[dtype], group)

    if isinstance(model, Linear):
        return layer(model)
    replace_linear(model, layer)
    for module in list(model.modules()):
        module._quantize_rest(lambda weight: quantized_layer(weight, None, BITS[dtype], group))
    return model


def replace_linear(model: Module, make: Callable[[Linear], Module]) -> None:
    """Replace all linear layers inside a model, wherever they are among its parts."""
    made: dict[int, tuple[Linear, Module]] = {}  # by layer, which may be in several places; kept, for its id
    seen: set[int] = set()

    def replaced(part: Any) -> Any:
        """What takes the place of a part: mostly the part itself, with other parts inside."""
        if type(part) is Linear:
            if id(part) not in made:
                made[id(part)] = part, make(part)
                made[id(part)][1]._hooks = part._hooks
            return made[id(part)][1]
        if id(part) in seen or isinstance(part, Tensor):
            return part
        seen.add(id(part))
        if isinstance(part, tuple):
            items = [replaced(item) for item in part]
            if all(new is old for new, old in zip(items, part, strict=True)):
                return part
            return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)
        if isinstance(part, Module) or (dataclasses.is_dataclass(part) and not isinstance(part, type)):
            for name, old in list(vars(part).items()):
                if (new := replaced(old)) is not old:
                    setattr(part, name, new)
        elif isinstance(part, dict):
            part.update({key: replaced(item) for key, item in part.items()})
        elif isinstance(part, list):
            part[:] = [replaced(item) for item in part]
        return part

    replaced(model)
    for module in model.modules():
        module._computed = False
