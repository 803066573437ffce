"""Makes reference.npz, what PyTorch computes, for test_nn.py and test_optim.py.

Run it where PyTorch is installed: `python tests/data/make_reference.py`. The tests only read the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

draw = np.random.default_rng(20240607)
store: dict[str, np.ndarray] = {}


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (draw.standard_normal(shape) * scale).astype(np.float32)


def case(name: str, function: Callable[..., torch.Tensor], *arrays: np.ndarray) -> None:
    """Store the inputs, the output, the gradient given to the output, and those of the fractions."""
    inputs = [torch.tensor(array) for array in arrays]
    for tensor in inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    out = function(*inputs)
    up = torch.tensor(normal(*out.shape)) if out.ndim else torch.tensor(1.0)
    out.backward(up)
    store[f"{name}.out"], store[f"{name}.up"] = out.detach().numpy(), up.numpy()
    for at, tensor in enumerate(inputs):
        store[f"{name}.in{at}"] = arrays[at]
        if tensor.grad is not None:
            store[f"{name}.grad{at}"] = tensor.grad.numpy()


def attention(offset: int | None) -> Callable[..., torch.Tensor]:
    """Attention by its definition; if causal, the first query is at the key `offset`."""

    def compute(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if offset is not None:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(offset)
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ value

    return compute


def functions() -> None:
    x = normal(3, 5, 8, scale=2.0)
    x.flat[:6] = [0, -0.0, 6, -6, 0.49, -0.51]  # also where formulas change
    for name, function in {
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "gelu": lambda t: F.gelu(t, approximate="tanh"),
        "gelu_exact": F.gelu,
        "erf": torch.erf,
        "tanh": torch.tanh,
        "softmax": lambda t: F.softmax(t, -1),
        "softmax_1": lambda t: F.softmax(t, 1),
        "log_softmax": lambda t: F.log_softmax(t, -1),
        "log_softmax_0": lambda t: F.log_softmax(t, 0),
    }.items():
        case(name, function, x)
    weight, bias = normal(8), normal(8)
    case("layer_norm", lambda t, w, b: F.layer_norm(t, (8,), w, b, 1e-3), x, weight, bias)
    case("layer_norm_plain", lambda t: F.layer_norm(t, (8,)), x)
    case("rms_norm", lambda t, w: F.rms_norm(t, (8,), w, 1e-3), x, weight)
    case("rms_norm_plain", lambda t: F.rms_norm(t, (8,), eps=1e-5), x)
    small, matrix, row = normal(3, 5, 8), normal(6, 8), normal(6)
    case("linear", F.linear, small, matrix, row)
    case("linear_plain", F.linear, small, matrix)
    case("linear_relu", lambda t, w, b: F.relu(F.linear(t, w, b)), small, matrix, row)
    case("linear_gelu", lambda t, w, b: F.gelu(F.linear(t, w, b), approximate="tanh"), small, matrix, row)
    y = normal(3, 5, 8)
    case("add_relu", lambda a, b: F.relu(a + b), x, y)
    case("mul_relu", lambda a, b: F.relu(a * b), x, y)
    case("affine", lambda a, b, c: a * b + c, x, weight, bias)
    case("mse_loss", F.mse_loss, x, y)
    index = np.array([[1, 3, 1], [0, 1, 5]])
    case("embedding", lambda w, i: F.embedding(i, w), normal(6, 8), index)


def losses() -> None:
    logits, target = normal(2, 20, 11, scale=3.0), draw.integers(0, 11, (2, 20))
    target[0, 3] = target[1, 7] = -100
    target[0, 5:9] = 4

    def loss(**options: float) -> Callable[..., torch.Tensor]:
        return lambda t, i: F.cross_entropy(t.reshape(-1, t.shape[-1]), i.reshape(-1), **options)

    case("cross_entropy", loss(), logits, target)
    case("cross_entropy_smooth", loss(label_smoothing=0.1), logits, target)
    case("cross_entropy_ignore", loss(ignore_index=4), logits, np.where(target < 0, 4, target))
    case(
        "linear_cross_entropy",
        lambda t, w, i: loss(label_smoothing=0.1)(t @ w.T, i),
        normal(2, 20, 8),
        normal(11, 8),
        target,
    )
    query, key, value = normal(2, 2, 40, 4), normal(2, 2, 40, 4), normal(2, 2, 40, 4)
    case("attention", attention(None), query, key, value)
    case("attention_causal", attention(0), query, key, value)
    case("attention_short", attention(6), normal(2, 2, 34, 4), key, value)
    case("attention_one", attention(39), normal(2, 2, 1, 4), key, value)


# The GPT by its definition, with the names of penstock's parameters


def gpt(state: dict[str, torch.Tensor], ids: torch.Tensor, layers: int, heads: int) -> torch.Tensor:
    batch, length = ids.shape
    x = state["tokens.weight"][ids] + state["positions.weight"][:length]
    width = x.shape[-1]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    for k in range(layers):
        block = f"blocks.{k}"
        parts = linear(norm(x, f"{block}.norm1"), f"{block}.attention.qkv").split(width, dim=-1)
        split = (batch, length, heads, width // heads)
        query, key, value = (part.reshape(split).transpose(1, 2) for part in parts)
        mixed = attention(0)(query, key, value).transpose(1, 2).reshape(batch, length, width)
        x = x + linear(mixed, f"{block}.attention.out")
        up = F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.up"), approximate="tanh")
        x = x + linear(up, f"{block}.down")
    return norm(x, "norm") @ state["tokens.weight"].T


TEXT = b"a penstock takes water from a pool to a turbine; the gate meters the flow, and the wheel turns. "


def training() -> None:
    """The first weights of a small GPT, 50 batches, and the losses of 50 steps on them."""
    vocabulary, context, width, layers, heads = 27, 16, 24, 2, 2
    shapes = {"tokens.weight": (vocabulary, width), "positions.weight": (context, width)}
    for k in range(layers):
        block = f"blocks.{k}"
        shapes |= {f"{block}.norm1.weight": (width,), f"{block}.norm1.bias": (width,)}
        shapes |= {
            f"{block}.attention.qkv.weight": (3 * width, width),
            f"{block}.attention.qkv.bias": (3 * width,),
        }
        shapes |= {f"{block}.attention.out.weight": (width, width), f"{block}.attention.out.bias": (width,)}
        shapes |= {f"{block}.norm2.weight": (width,), f"{block}.norm2.bias": (width,)}
        shapes |= {f"{block}.up.weight": (4 * width, width), f"{block}.up.bias": (4 * width,)}
        shapes |= {f"{block}.down.weight": (width, 4 * width), f"{block}.down.bias": (width,)}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    start = {name: normal(*shape, scale=0.15) for name, shape in shapes.items()}
    for name in start:
        if "norm" in name and name.endswith("weight"):
            start[name] += 1
    store.update({f"gpt.start.{name}": array for name, array in start.items()})

    letters = sorted(set(TEXT))
    assert len(letters) <= vocabulary
    text = np.array([letters.index(letter) for letter in TEXT * 2])
    places = draw.integers(0, len(TEXT), (50, 4))
    batches = np.stack([[text[at : at + context + 1] for at in row] for row in places]).astype(np.int64)
    store["gpt.batches"] = batches.astype(np.uint8)

    state = {name: torch.tensor(array).requires_grad_() for name, array in start.items()}
    optimizer = torch.optim.AdamW(state.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    result = []
    for batch in torch.tensor(batches):
        logits = gpt(state, batch[:, :-1], layers, heads)
        loss = F.cross_entropy(logits.reshape(-1, vocabulary), batch[:, 1:].reshape(-1))
        if not result:
            store["gpt.logits"] = logits.detach().numpy()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    store["gpt.losses"] = np.array(result)


# Optimizers


def loss_of(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return ((torch.tanh(x @ weight.T + bias) - y) ** 2).mean() * 4


def trajectories() -> None:
    """Both parameters after each of 12 steps, for every optimizer."""
    x, y, weight, bias = normal(12, 6, 4), normal(12, 6, 3), normal(3, 4), normal(3)
    store.update({"optim.x": x, "optim.y": y, "optim.weight": weight, "optim.bias": bias})
    kinds: dict[str, tuple[Callable[..., torch.optim.Optimizer], float | None]] = {
        "sgd": (lambda w, b: torch.optim.SGD([w, b], lr=0.1), None),
        "sgd_decay": (lambda w, b: torch.optim.SGD([w, b], lr=0.1, weight_decay=0.1), None),
        "momentum": (lambda w, b: torch.optim.SGD([w, b], lr=0.05, momentum=0.9, weight_decay=0.01), None),
        "adam": (lambda w, b: torch.optim.Adam([w, b], lr=0.02), None),
        "adam_decay": (
            lambda w, b: torch.optim.Adam([w, b], lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1),
            None,
        ),
        "adamw": (lambda w, b: torch.optim.AdamW([w, b], lr=0.02, betas=(0.9, 0.95), weight_decay=0.3), None),
        "groups": (
            lambda w, b: torch.optim.AdamW(
                [{"params": [w], "weight_decay": 0.5}, {"params": [b]}], lr=0.02, weight_decay=0.0
            ),
            None,
        ),
        "clip": (lambda w, b: torch.optim.SGD([w, b], lr=0.1), 2.0),
        "schedule": (lambda w, b: torch.optim.AdamW([w, b], lr=0.05, weight_decay=0.2), None),
    }
    for name, (make, clip) in kinds.items():
        tensors = [torch.tensor(array).requires_grad_() for array in (weight, bias)]
        optimizer = make(*tensors)
        schedule = warm_cosine(optimizer) if name == "schedule" else None
        rows = []
        norms = []
        for at in range(12):
            optimizer.zero_grad()
            loss_of(torch.tensor(x[at]), torch.tensor(y[at]), *tensors).backward()
            if clip is not None:
                norms.append(torch.nn.utils.clip_grad_norm_(tensors, clip).item())
            optimizer.step()
            if schedule is not None:
                schedule.step()
            rows.append(np.concatenate([tensor.detach().numpy().reshape(-1) for tensor in tensors]))
        store[f"optim.{name}"] = np.stack(rows)
        if clip is not None:
            assert min(norms) < clip < max(norms), (min(norms), max(norms))


def warm_cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Three steps of warm-up, then a cosine down to 0.01 until step 10."""
    up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 4, total_iters=3)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7, eta_min=0.01)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], milestones=[3])


def rates() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    schedule = warm_cosine(optimizer)
    result = []
    for _ in range(11):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    store["optim.rates"] = np.array(result)


if __name__ == "__main__":
    functions()
    losses()
    training()
    trajectories()
    rates()
    path = Path(__file__).with_name("reference.npz")
    np.savez_compressed(path, **store)
    print(f"{path}: {len(store)} arrays, {path.stat().st_size / 1024:.0f} KiB")
