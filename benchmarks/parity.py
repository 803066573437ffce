"""Layers, losses, optimizers and schedulers against PyTorch: results and gradients.

    python benchmarks/parity.py [name ...]

Prints the largest difference of each, relative to the largest value, and fails if it exceeds the bound.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps

Array = npt.NDArray[Any]
Case = Callable[..., float]
_BOUND = 2e-5  # of float32, after some hundred operations


def difference(result: Any, wanted: Any) -> float:
    """How far results are from PyTorch's, relative to the largest of these."""
    if isinstance(wanted, (tuple, list)):
        return max((difference(a, b) for a, b in zip(result, wanted, strict=True)), default=0.0)
    if wanted is None:
        assert result is None
        return 0.0
    theirs = wanted.detach().numpy().astype(np.float64)
    ours = (result.numpy() if isinstance(result, ps.Tensor) else np.asarray(result)).astype(np.float64)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    if not theirs.size:
        return 0.0
    assert (np.isfinite(ours) == np.isfinite(theirs)).all(), "what is finite differs"
    known = np.isfinite(theirs)
    if not known.any():
        return 0.0
    return float(np.abs(ours - theirs)[known].max() / max(1.0, np.abs(theirs[known]).max()))


def parts(result: Any) -> Any:
    """The tensors of a result, in order."""
    if isinstance(result, (tuple, list)):
        return [part for item in result for part in parts(item)]
    return [] if result is None else [result]


class Parity:
    """A run of all comparisons."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.random = torch, np.random.default_rng(3)

    def floats(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def function(
        self, ours: Callable[..., Any], theirs: Callable[..., Any], *arrays: Any, jit: bool = True
    ) -> float:
        """Values and gradients of a function, jitted and not."""
        torch = self.torch
        inputs = [torch.tensor(a) if isinstance(a, np.ndarray) else a for a in arrays]
        floats = [at for at, a in enumerate(arrays) if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
        for at in floats:
            inputs[at].requires_grad_()
        wanted = parts(theirs(*inputs))
        ups = [self.floats(*part.shape) for part in wanted]
        sum((part * torch.tensor(up)).sum() for part, up in zip(wanted, ups, strict=True)).backward()
        slopes = [
            torch.zeros_like(inputs[at]) if inputs[at].grad is None else inputs[at].grad for at in floats
        ]

        def run(*given: Any) -> Any:
            results: list[ps.Tensor] = []

            def total(*given: Any) -> Any:
                results[:] = parts(ours(*given))
                return sum(ps.sum(part * ps.asarray(up)) for part, up in zip(results, ups, strict=True))

            value, grads = ps.value_and_grad(total, tuple(floats))(*given)
            if not floats:
                value.backward()
            return [*results, *grads]

        given = [ps.asarray(a) if isinstance(a, np.ndarray) else a for a in arrays]
        worst = difference(run(*given), [*wanted, *slopes])
        return max(worst, difference(ps.jit(run)(*given), [*wanted, *slopes])) if jit else worst

    def module(self, theirs: Any, *arrays: Any, train: bool = False, **kwargs: Any) -> float:
        """Results, gradients of inputs and parameters, and buffers of a module and its counterpart."""
        torch = self.torch
        theirs.train(train)
        theirs.zero_grad()
        ours = ps.nn.from_torch(theirs)
        names = [name for name, _ in theirs.named_parameters()]
        assert [name for name, _ in ours.named_parameters()] == names, "the names of the parameters differ"
        given = [ps.asarray(a) if isinstance(a, np.ndarray) else a for a in arrays]
        inputs = [torch.tensor(a) if isinstance(a, np.ndarray) else a for a in arrays]
        for own, other in zip(given, inputs, strict=True):
            if isinstance(own, ps.Tensor) and own.dtype.kind == "f":
                own.requires_grad_()
                other.requires_grad_()
        result, wanted = parts(ours(*given, **kwargs)), parts(theirs(*inputs, **kwargs))
        ups = [self.floats(*part.shape) for part in wanted]
        sum(
            (ps.sum(part * ps.asarray(up)) for part, up in zip(result, ups, strict=True)), ps.asarray(0.0)
        ).backward()
        sum((part * torch.tensor(up)).sum() for part, up in zip(wanted, ups, strict=True)).backward()
        worst = difference(result, wanted)
        for own, other in zip(given, inputs, strict=True):
            if isinstance(own, ps.Tensor) and own.requires_grad and other.grad is not None:
                worst = max(worst, difference(own.grad, other.grad))
        grads = dict(theirs.named_parameters())
        for name, tensor in ours.named_parameters():
            if grads[name].grad is not None:
                assert tensor.grad is not None, name
                worst = max(worst, difference(tensor.grad, grads[name].grad))
        buffers = dict(theirs.named_buffers())
        for name, tensor in ours.named_buffers():
            if name in buffers:
                worst = max(worst, difference(tensor, buffers[name]))
        theirs.load_state_dict({k: self.torch.from_numpy(np.array(v)) for k, v in ours.state_dict().items()})
        return worst


def layers(p: Parity) -> dict[str, Case]:
    """Every layer, with weights from PyTorch."""
    n, x, ids = p.torch.nn, p.floats, p.random.integers
    images, rows = x(4, 6, 5, 7), x(5, 6)
    plain = (
        "ReLU ReLU6 SELU Sigmoid LogSigmoid Tanh Tanhshrink SiLU Mish Softsign Hardsigmoid Hardswish GELU ELU"
    )
    plain += " CELU LeakyReLU Softplus Hardtanh Softshrink Hardshrink PReLU"
    cases: dict[str, Case] = {
        name: lambda name=name: p.module(getattr(n, name)(), rows * 2) for name in plain.split()
    }
    cases |= {
        "GELU tanh": lambda: p.module(n.GELU("tanh"), rows),
        "ELU 0.5": lambda: p.module(n.ELU(0.5), rows),
        "Softplus 2": lambda: p.module(n.Softplus(2.0, 3.0), rows * 3),
        "Threshold": lambda: p.module(n.Threshold(0.1, -2.0), rows),
        "Softmax": lambda: p.module(n.Softmax(dim=0), rows),
        "LogSoftmax": lambda: p.module(n.LogSoftmax(dim=1), rows),
        "Softmin": lambda: p.module(n.Softmin(dim=1), rows),
        "GLU": lambda: p.module(n.GLU(dim=1), images),
        "PReLU channels": lambda: p.module(n.PReLU(6), images),
        "Linear": lambda: p.module(n.Linear(6, 3), rows),
        "weight_norm": lambda: normed(p, 0),
        "weight_norm of all": lambda: normed(p, None),
        "Linear no bias": lambda: p.module(n.Linear(6, 3, bias=False), rows),
        "Embedding": lambda: p.module(n.Embedding(9, 4), ids(0, 9, (3, 5))),
        "Embedding padded": lambda: p.module(n.Embedding(9, 4, padding_idx=2), ids(0, 4, (3, 5))),
        "Flatten": lambda: p.module(n.Flatten(1, 2), images),
        "Unflatten": lambda: p.module(n.Unflatten(1, (2, 3)), images),
        "Identity": lambda: p.module(n.Identity(), rows),
        "LayerNorm": lambda: p.module(n.LayerNorm((5, 7)), images),
        "LayerNorm plain": lambda: p.module(n.LayerNorm(7, elementwise_affine=False), images),
        "RMSNorm": lambda: p.module(n.RMSNorm(7), images),
        "GroupNorm": lambda: p.module(n.GroupNorm(3, 6), images),
        "Upsample nearest": lambda: p.module(n.Upsample(scale_factor=2), images),
        "Upsample nearest size": lambda: p.module(n.Upsample(size=(3, 11)), images),
        "Upsample bilinear": lambda: p.module(n.Upsample(scale_factor=2, mode="bilinear"), images),
        "Upsample bilinear size": lambda: p.module(n.Upsample(size=(3, 11), mode="bilinear"), images),
        "Upsample corners": lambda: p.module(
            n.Upsample(size=(8, 3), mode="bilinear", align_corners=True), images
        ),
        "Upsample linear": lambda: p.module(n.Upsample(scale_factor=1.5, mode="linear"), x(2, 3, 8)),
        "Upsample trilinear": lambda: p.module(
            n.Upsample(scale_factor=2, mode="trilinear"), x(2, 3, 2, 3, 4)
        ),
        "Sequential": lambda: p.module(n.Sequential(n.Linear(6, 4), n.ReLU(), n.Linear(4, 2)), rows),
    }
    inputs = {1: x(4, 6, 5), 2: images, 3: x(3, 6, 2, 3, 4)}
    for axes, given in inputs.items():
        for train in (True, False):
            batch, instance = getattr(n, f"BatchNorm{axes}d"), getattr(n, f"InstanceNorm{axes}d")
            mode = f"{axes}d {'training' if train else 'in use'}"

            def run(make: Any, given: Any = given, train: bool = train, **settings: Any) -> float:
                return p.module(make(6, **settings), given, train=train)

            cases[f"BatchNorm{mode}"] = lambda run=run, make=batch: run(make)
            cases[f"BatchNorm{mode} momentum None"] = lambda run=run, make=batch: run(make, momentum=None)
            cases[f"InstanceNorm{mode}"] = lambda run=run, make=instance: run(make)
            cases[f"InstanceNorm{mode} tracked"] = lambda run=run, make=instance: run(
                make, affine=True, track_running_stats=True
            )
    cases["BatchNorm1d rows"] = lambda: p.module(n.BatchNorm1d(6), rows, train=True)
    return cases | convolutions(p) | recurrent(p) | attention(p)


def convolutions(p: Parity) -> dict[str, Case]:
    """Convolutions and pooling with random settings."""
    n, integers = p.torch.nn, p.random.integers
    cases: dict[str, Case] = {}

    def one_of(*choices: Any) -> Any:
        return choices[int(integers(len(choices)))]

    for axes in (1, 2, 3):
        for number in range(6):
            groups = one_of(1, 2)
            images = p.floats(2, 2 * groups, *integers(6, 9, axes))
            sizes, apart = one_of(1, 2, 3), one_of(1, 2)
            both = {
                "stride": one_of(1, 2, 3),
                "groups": groups,
                "dilation": apart,
                "bias": one_of(True, False),
            }
            own = {"padding": one_of(0, 1, 2), "padding_mode": one_of("zeros", "reflect", "circular")}
            pool = {"stride": one_of(None, 1, 2), "padding": sizes // 2, "ceil_mode": one_of(True, False)}
            modules = {
                "Conv": (2 * groups, 3 * groups, sizes, {**both, **own}),
                "ConvTranspose": (
                    2 * groups,
                    3 * groups,
                    sizes,
                    {**both, "padding": one_of(0, 1) * (sizes > 1)},
                ),
                "MaxPool": (sizes, pool),
                "AvgPool": (sizes, {**pool, "count_include_pad": one_of(True, False)}),
                "AdaptiveAvgPool": (one_of(1, 3, 4), {}),
                "MaxUnpool": (sizes, {}),
                "AdaptiveMaxPool": (one_of(1, 3, 4), {}),
            }
            for kind, (*given, settings) in modules.items():
                module = getattr(n, f"{kind}{axes}d")(*given, **settings)
                if kind == "MaxUnpool":
                    cases[f"{module} #{number}"] = lambda axes=axes, x=images: unpooled(p, axes, x)
                    continue
                cases[f"{module} #{number}"] = lambda m=module, x=images: p.module(m, x)
    return cases


def unpooled(p: Parity, axes: int, images: Array) -> float:
    """Max unpooling, also of overlapping windows."""
    own, other, name = ps.nn.functional, p.torch.nn.functional, f"pool{axes}d"
    worst = 0.0
    for settings in ({"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}):
        items, index = getattr(other, f"max_{name}")(p.torch.tensor(images), **settings, return_indices=True)
        worst = max(
            worst,
            p.function(
                lambda x, i, s=settings: getattr(own, f"max_un{name}")(x, i, **s, output_size=images.shape),
                lambda x, i, s=settings: getattr(other, f"max_un{name}")(x, i, **s, output_size=images.shape),
                items.numpy(),
                index.numpy(),
            ),
        )
    return worst


def normed(p: Parity, dim: int | None) -> float:
    """A convolution with weight norm."""
    utils, n = p.torch.nn.utils.parametrizations, p.torch.nn
    theirs = utils.weight_norm(n.Conv1d(3, 4, 2), dim=dim)
    ours = ps.nn.utils.parametrizations.weight_norm(ps.nn.Conv1d(3, 4, 2), dim=dim)
    names = [name for name, _ in theirs.named_parameters()]
    assert sorted(name for name, _ in ours.named_parameters()) == sorted(names)
    ours.load_state_dict(theirs.state_dict())
    x = p.floats(2, 3, 6)
    result, wanted = ours(ps.asarray(x)), theirs(p.torch.tensor(x))
    ps.sum(result * result).backward()
    (wanted * wanted).sum().backward()
    own = dict(ours.named_parameters())
    slopes = [own[name].grad for name in names]
    return difference([result, *slopes], [wanted, *(w.grad for _, w in theirs.named_parameters())])


def recurrent(p: Parity) -> dict[str, Case]:
    """Recurrent layers, cells, and sequences of several lengths."""
    n, x = p.torch.nn, p.floats
    cases: dict[str, Case] = {}
    for kind in ("RNN", "LSTM", "GRU"):
        make, cell = getattr(n, kind), getattr(n, f"{kind}Cell")
        settings: dict[str, dict[str, Any]] = {
            "": {},
            " 2 layers": {"num_layers": 2},
            " bidirectional": {"num_layers": 2, "bidirectional": True},
            " batch first": {"batch_first": True},
            " no bias": {"bias": False},
        }
        for name, given in settings.items():
            cases[kind + name] = lambda make=make, given=given: p.module(make(4, 3, **given), x(5, 2, 4))
        cases[f"{kind} unbatched"] = lambda make=make: p.module(make(4, 3), x(5, 4))
        cases[f"{kind}Cell"] = lambda cell=cell: p.module(cell(4, 3), x(2, 4))
        cases[f"{kind} packed"] = lambda make=make: packed(p, make(4, 3, num_layers=2, bidirectional=True))
    cases["RNN relu"] = lambda: p.module(n.RNN(4, 3, nonlinearity="relu"), x(5, 2, 4))
    cases["LSTM with states"] = lambda: with_states(p, n.LSTM(4, 3, num_layers=2))
    return cases


def packed(p: Parity, theirs: Any) -> float:
    """Sequences of several lengths, packed."""
    ours, values, lengths = ps.nn.from_torch(theirs), p.floats(6, 3, 4), [2, 6, 4]
    own, other = ps.nn.utils.rnn, p.torch.nn.utils.rnn
    mine, end = ours(own.pack_padded_sequence(ps.asarray(values), lengths))
    wanted, last = theirs(other.pack_padded_sequence(p.torch.tensor(values), lengths, enforce_sorted=False))
    result = own.pad_packed_sequence(mine)[0]
    worst = difference([result, *parts(end)], [other.pad_packed_sequence(wanted)[0], *parts(last)])
    ps.sum(result * result).backward()
    (other.pad_packed_sequence(wanted)[0] ** 2).sum().backward()
    grads = dict(theirs.named_parameters())
    return max([worst, *(difference(t.grad, grads[name].grad) for name, t in ours.named_parameters())])


def with_states(p: Parity, theirs: Any) -> float:
    """An LSTM that is given its first states."""
    ours = ps.nn.from_torch(theirs)
    return p.function(
        lambda x, h, c: ours(x, (h, c)),
        lambda x, h, c: theirs(x, (h, c)),
        p.floats(5, 2, 4),
        p.floats(2, 2, 3),
        p.floats(2, 2, 3),
    )


def attention(p: Parity) -> dict[str, Case]:
    """Attention and transformer layers, with masks."""
    n, x, torch, f = p.torch.nn, p.floats, p.torch, p.torch.nn.functional
    ours: Any = ps.nn.functional.scaled_dot_product_attention
    q, k, v = x(2, 4, 5, 8), x(2, 4, 7, 8), x(2, 4, 7, 6)
    seen = p.random.random((2, 4, 5, 7)) < 0.6
    seen[0, 0, 0] = False
    added = x(5, 7)
    few = (x(2, 2, 7, 8), x(2, 2, 7, 8))

    def sdpa(*arrays: Any, mask: Any = None, **settings: Any) -> float:
        own, other = (
            {} if mask is None else {"attn_mask": make(mask)} for make in (ps.asarray, torch.tensor)
        )
        return p.function(
            lambda *given: ours(*given, **own, **settings),
            lambda *given: f.scaled_dot_product_attention(*given, **other, **settings),
            *arrays,
        )

    layer, width = n.TransformerEncoderLayer, 8
    cases: dict[str, Case] = {
        "attention": lambda: sdpa(q, k, v),
        "attention causal": lambda: sdpa(q, k[:, :, :5], v[:, :, :5], is_causal=True),
        "attention causal, more keys": lambda: sdpa(q, k, v, is_causal=True),
        "attention causal, more queries": lambda: sdpa(k, q, q[..., :6], is_causal=True),
        "attention boolean mask": lambda: sdpa(q, k, v, mask=seen),
        "attention added mask": lambda: sdpa(q, k, v, mask=added),
        "attention grouped": lambda: sdpa(q, *few, enable_gqa=True),
        "attention scale": lambda: sdpa(q, k, v, scale=0.3),
        "attention of a learned mask": lambda: p.function(
            lambda q, k, v, m: ours(q, k, v, attn_mask=m),
            lambda q, k, v, m: f.scaled_dot_product_attention(q, k, v, attn_mask=m),
            q,
            k,
            v,
            added,
        ),
        "MultiheadAttention": lambda: p.module(
            n.MultiheadAttention(8, 2), x(5, 3, 8), x(4, 3, 8), x(4, 3, 8)
        ),
        "MultiheadAttention batch first": lambda: p.module(
            n.MultiheadAttention(8, 2, batch_first=True),
            x(3, 5, 8),
            x(3, 4, 8),
            x(3, 4, 8),
            need_weights=False,
        ),
        "MultiheadAttention widths": lambda: p.module(
            n.MultiheadAttention(8, 2, kdim=6, vdim=4), x(5, 3, 8), x(4, 3, 6), x(4, 3, 4)
        ),
        "TransformerEncoderLayer": lambda: p.module(layer(width, 2, 16, batch_first=True), x(3, 5, 8)),
        "TransformerEncoderLayer norm first": lambda: p.module(
            layer(width, 2, 16, activation="gelu", norm_first=True), x(5, 3, 8)
        ),
        "TransformerEncoder": lambda: p.module(
            n.TransformerEncoder(layer(width, 2, 16, norm_first=True), 2, n.LayerNorm(8), False), x(5, 3, 8)
        ),
        "TransformerDecoderLayer": lambda: p.module(
            n.TransformerDecoderLayer(width, 2, 16), x(5, 3, 8), x(4, 3, 8)
        ),
        "TransformerDecoder": lambda: p.module(
            n.TransformerDecoder(n.TransformerDecoderLayer(width, 2, 16), 2), x(5, 3, 8), x(4, 3, 8)
        ),
    }
    for name, mask in {"boolean": np.triu(np.ones((5, 5)), 1) > 0, "added": x(5, 5)}.items():
        cases[f"MultiheadAttention {name} mask"] = lambda mask=mask: masked(p, mask)
    return cases


def masked(p: Parity, mask: Array) -> float:
    """Self-attention with both kinds of mask, with and without the weights."""
    theirs = p.torch.nn.MultiheadAttention(8, 2)
    ours, torch, values = ps.nn.from_torch(theirs), p.torch, p.floats(5, 3, 8)
    padding = np.zeros((3, 5), bool)
    padding[1, 3:] = True
    extra = padding if mask.dtype == bool else np.where(padding, -np.inf, 0).astype(np.float32)
    worst = 0.0
    for needed in (True, False):
        given = [ps.asarray(values)] * 3
        result = ours(*given, ps.asarray(extra), needed, ps.asarray(mask))
        wanted = theirs(*[torch.tensor(values)] * 3, torch.tensor(extra), needed, torch.tensor(mask))
        worst = max(worst, difference(result, wanted))
    return worst


def losses(p: Parity) -> dict[str, Case]:
    """Every loss, with its settings."""
    x, own, other, random = p.floats, ps.nn.functional, p.torch.nn.functional, p.random
    a, b = x(4, 6), x(4, 6)
    chances, wanted = random.random((4, 6)).astype(np.float32), random.random((4, 6)).astype(np.float32)
    labels, weights = random.integers(0, 6, 4), random.random(6).astype(np.float32)
    labels[1] = 3

    def same(name: str, *arrays: Any, **settings: Any) -> float:
        return p.function(
            lambda *given: getattr(own, name)(*given, **settings),
            lambda *given: getattr(other, name)(*given, **settings),
            *arrays,
        )

    cases: dict[str, Case] = {}
    for reduction in ("mean", "sum", "none"):
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
            cases[f"{name} {reduction}"] = lambda n=name, r=reduction: same(n, a, b, reduction=r)
        cases |= {
            f"bce {reduction}": lambda r=reduction: same(
                "binary_cross_entropy", chances, wanted, reduction=r
            ),
            f"bce logits {reduction}": lambda r=reduction: same(
                "binary_cross_entropy_with_logits", a * 5, wanted, reduction=r
            ),
            f"kl {reduction}": lambda r=reduction: same("kl_div", a, chances, reduction=r),
            f"cross_entropy {reduction}": lambda r=reduction: weighted(p, a, labels, r, None, {}),
            f"cross_entropy weights {reduction}": lambda r=reduction: weighted(
                p, a, labels, r, weights, {"label_smoothing": 0.1, "ignore_index": 3}
            ),
            f"cross_entropy chances {reduction}": lambda r=reduction: weighted(
                p, a, chances, r, weights, {"label_smoothing": 0.1}
            ),
            f"cross_entropy images {reduction}": lambda r=reduction: p.function(
                lambda x, i: own.cross_entropy(x, i, reduction=r),
                lambda x, i: other.cross_entropy(x, i, reduction=r),
                x(2, 6, 3),
                random.integers(0, 6, (2, 3)),
            ),
            f"nll {reduction}": lambda r=reduction: weighted(p, a, labels, r, weights, {}, "nll_loss"),
            f"ctc {reduction}": lambda r=reduction: ctc(p, r),
        }
    return cases | {
        "huber 0.3": lambda: same("huber_loss", a, b, delta=0.3),
        "smooth 0.3": lambda: same("smooth_l1_loss", a, b, beta=0.3),
        "bce weight": lambda: weighted(p, chances, wanted, "mean", weights, {}, "binary_cross_entropy"),
        "bce pos_weight": lambda: p.function(
            lambda x, t: own.binary_cross_entropy_with_logits(x, t, pos_weight=ps.asarray(weights)),
            lambda x, t: other.binary_cross_entropy_with_logits(x, t, pos_weight=p.torch.tensor(weights)),
            a,
            wanted,
        ),
        "kl log": lambda: same("kl_div", a, b, log_target=True, reduction="batchmean"),
        "cosine_similarity": lambda: same("cosine_similarity", a, b),
        "cosine_embedding": lambda: same("cosine_embedding_loss", a, b, np.array([1, -1, 1, -1]), 0.1),
        "normalize": lambda: same("normalize", a),
        "normalize 0": lambda: same("normalize", a, p=0.0, dim=0),
        "normalize 3": lambda: same("normalize", a, p=3.0, dim=0),
    }


def weighted(
    p: Parity,
    x: Array,
    target: Array,
    reduction: str,
    weights: Any,
    more: dict[str, Any],
    name: str = "cross_entropy",
) -> float:
    """A loss with a weight for each class."""
    own, other = getattr(ps.nn.functional, name), getattr(p.torch.nn.functional, name)
    ours, theirs = (None if weights is None else make(weights) for make in (ps.asarray, p.torch.tensor))
    if target.dtype.kind == "f":
        fixed = ps.asarray(target), p.torch.tensor(target)
        return p.function(
            lambda x: own(x, fixed[0], weight=ours, reduction=reduction, **more),
            lambda x: other(x, fixed[1], weight=theirs, reduction=reduction, **more),
            x,
        )
    return p.function(
        lambda x, t: own(x, t, weight=ours, reduction=reduction, **more),
        lambda x, t: other(x, t, weight=theirs, reduction=reduction, **more),
        x,
        target,
    )


def ctc(p: Parity, reduction: str) -> float:
    """Through log_softmax: the gradient of PyTorch's ctc_loss by itself is that of the softmax before it."""
    targets = p.random.integers(1, 5, (3, 4))
    targets[0, 1] = targets[0, 0]  # a label that comes twice needs a blank between
    lengths, spoken = [9, 7, 5], [4, 2, 3]
    own, other = ps.nn.functional, p.torch.nn.functional
    return p.function(
        lambda x, t: own.ctc_loss(own.log_softmax(x), t, lengths, spoken, reduction=reduction),
        lambda x, t: other.ctc_loss(other.log_softmax(x, -1), t, lengths, spoken, reduction=reduction),
        p.floats(9, 3, 5),
        targets,
    )


def optimizers(p: Parity) -> dict[str, Case]:
    """The parameters after some steps, jitted and not; Muon's iteration is in bfloat16 in PyTorch."""
    settings: dict[str, list[dict[str, Any]]] = {
        "SGD": [
            {},
            {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
            {"momentum": 0.9, "nesterov": True},
        ],
        "Adam": [{}, {"weight_decay": 0.1, "betas": (0.8, 0.9)}, {"amsgrad": True, "betas": (0.8, 0.5)}],
        "AdamW": [{}, {"weight_decay": 0.3}, {"amsgrad": True, "betas": (0.8, 0.5)}],
        "Adamax": [{}, {"weight_decay": 0.1}],
        "NAdam": [{}, {"weight_decay": 0.1, "momentum_decay": 0.1}],
        "RAdam": [{}, {"weight_decay": 0.1, "betas": (0.8, 0.9)}],
        "RMSprop": [{}, {"momentum": 0.5, "centered": True, "weight_decay": 0.1}],
        "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}],
        "Adadelta": [{"lr": 1.0}, {"rho": 0.8, "weight_decay": 0.1}],
        "Adafactor": [{}, {"weight_decay": 0.1, "d": 2.0}],
    }
    cases: dict[str, Case] = {}
    for name, several in settings.items():
        for given in several:
            cases[f"{name} {given or ''}"] = lambda name=name, given=given: trajectory(p, name, given)
    for name in ("SGD", "AdamW"):
        cases[f"{name} add_param_group"] = lambda name=name: trajectory(p, name, {}, added=3)
    cases["Muon"] = lambda: trajectory(p, "Muon", {}) / 1000
    cases["Muon match"] = lambda: trajectory(p, "Muon", {"adjust_lr_fn": "match_rms_adamw"}) / 1000
    return cases


def trajectory(p: Parity, name: str, settings: dict[str, Any], steps: int = 8, added: int = 0) -> float:
    """The largest difference of parameters along some steps, in two groups of different rates.

    The second group is there from the start, or is `added` after so many steps.
    """
    shapes = [(5, 4), (3, 4)] if name == "Muon" else [(3, 4), (3,)]
    first, slopes = (
        [p.floats(*shape) for shape in shapes],
        [[p.floats(*s) for s in shapes] for _ in range(steps)],
    )
    worst = 0.0
    for wrap in (None, ps.jit):
        own = [ps.asarray(array).requires_grad_() for array in first]
        other = [p.torch.tensor(array, requires_grad=True) for array in first]
        more = {"lr": 0.05} | settings
        groups = [
            [{"params": [tensors[0]]}, {"params": [tensors[1]], "lr": 0.02}] for tensors in (own, other)
        ]
        first_groups = [several[: 1 if added else 2] for several in groups]
        ours = getattr(ps.optim, name)(first_groups[0], **more)
        theirs = getattr(p.torch.optim, name)(first_groups[1], **more)

        def step(*grads: ps.Tensor, own: Any = own, ours: Any = ours) -> None:
            sum((ps.sum(w * g) for w, g in zip(own, grads, strict=True)), ps.asarray(0.0)).backward()
            ours.step()

        captured: Any = step if wrap is None else wrap(step)
        for number, grads in enumerate(slopes):
            if added and number == added:
                own[1].grad = None  # the gradients are still there
                ours.add_param_group(groups[0][1])
                theirs.add_param_group(groups[1][1])
            captured(*map(ps.asarray, grads))
            for tensor, grad in zip(other, grads, strict=True):
                tensor.grad = p.torch.tensor(grad)
            theirs.step()
            worst = max(worst, difference(own, other))
    return worst


def schedulers(p: Parity) -> dict[str, Case]:
    """The rates of some steps of each scheduler."""
    settings: dict[str, dict[str, Any]] = {
        "StepLR": {"step_size": 3, "gamma": 0.5},
        "MultiStepLR": {"milestones": [2, 5, 5], "gamma": 0.5},
        "ExponentialLR": {"gamma": 0.9},
        "ConstantLR": {},
        "LinearLR": {"total_iters": 7},
        "PolynomialLR": {"total_iters": 8, "power": 2.0},
        "CosineAnnealingLR": {"T_max": 6, "eta_min": 0.01},
        "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2, "eta_min": 0.001},
        "OneCycleLR": {"max_lr": 0.5, "total_steps": 20},
        "OneCycleLR ": {"max_lr": 0.5, "total_steps": 20, "three_phase": True, "anneal_strategy": "linear"},
        "LambdaLR": {"lr_lambda": lambda epoch: 1 / (epoch + 1)},
        "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.9 + 0.01 * epoch},
    }
    cases: dict[str, Case] = {
        name: lambda name=name, given=given: rates(p, lambda s, o: getattr(s, name.strip())(o, **given))
        for name, given in settings.items()
    }
    cases["SequentialLR"] = lambda: rates(
        p, lambda s, o: s.SequentialLR(o, [s.LinearLR(o, total_iters=4), s.CosineAnnealingLR(o, 10)], [4])
    )
    cases["ChainedScheduler"] = lambda: rates(
        p, lambda s, o: s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, 0.9)])
    )
    cases["ReduceLROnPlateau"] = lambda: rates(
        p,
        lambda s, o: s.ReduceLROnPlateau(o, factor=0.5, patience=2, cooldown=1),
        [5, 4, 4, 4, 4, 3, 3, 3, 3, 3, 9, 9],
    )
    return cases


def rates(p: Parity, make: Callable[[Any, Any], Any], metrics: Sequence[float] = ()) -> float:
    """The largest difference of rates and momenta along some steps."""
    values = []
    for library, weight in (
        (ps, ps.zeros((2,)).requires_grad_()),
        (p.torch, p.torch.zeros(2, requires_grad=True)),
    ):
        optimizer = library.optim.SGD([weight], lr=0.1, momentum=0.9)
        scheduler = make(library.optim.lr_scheduler, optimizer)
        group, seen = optimizer.param_groups[0], []
        for number in range(len(metrics) or 18):
            seen.append((group["lr"], group["momentum"]))
            if library is p.torch:
                optimizer.step()
            scheduler.step(*metrics[number : number + 1])
        values.append(np.array(seen))
    return float(np.abs(values[0] - values[1]).max())


def main() -> None:
    """Compare everything, or what has an argument in its name."""
    torch = importlib.import_module("torch")

    torch.manual_seed(0)
    p, wanted, failed = Parity(torch), sys.argv[1:], []
    for name, run in (layers(p) | losses(p) | optimizers(p) | schedulers(p)).items():
        if wanted and not any(part in name for part in wanted):
            continue
        try:
            result = run()
        except Exception as error:  # the others are of interest too
            print(f"{name:<44} {type(error).__name__}: {error}")
            failed.append(name)
            continue
        print(f"{name:<44} {result:.1e}")
        if result > _BOUND:
            failed.append(name)
    print(f"{len(failed)} differ by more than {_BOUND}: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
