"""Networks: every function and layer against PyTorch's values, stored by tests/data/make_reference.py."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS

import penstock as ps
from penstock import Device, nn
from penstock.errors import CheckpointError
from penstock.graph import attention as graph_attention
from penstock.graph import cross_entropy
from penstock.nn import functional as F  # noqa: N812

REFERENCE = np.load(Path(__file__).parent / "data" / "reference.npz")
OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))


@pytest.fixture(scope="module", params=[OPENCL, "host-far", *CUDA_KINDS, *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    ps.random.manual_seed(7)


def at(device: Device, array: Any) -> ps.Tensor:
    return ps.asarray(np.asarray(array, np.float32), device=device)


# Functions

FUNCTIONS: dict[str, Callable[..., ps.Tensor]] = {
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, "tanh"),
    "gelu_exact": F.gelu,
    "erf": F.erf,
    "tanh": ps.tanh,
    "softmax": F.softmax,
    "softmax_1": lambda x: F.softmax(x, 1),
    "log_softmax": F.log_softmax,
    "log_softmax_0": lambda x: F.log_softmax(x, 0),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-3),
    "layer_norm_plain": lambda x: F.layer_norm(x, 8),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w, 1e-3),
    "rms_norm_plain": lambda x: F.rms_norm(x, 8, eps=1e-5),
    "linear": F.linear,
    "linear_plain": F.linear,
    "linear_relu": lambda x, w, b: F.linear(x, w, b, activation="relu"),
    "linear_gelu": lambda x, w, b: F.gelu(F.linear(x, w, b), "tanh"),
    "add_relu": F.add_relu,
    "mul_relu": F.mul_relu,
    "affine": F.affine,
    "mse_loss": F.mse_loss,
    "embedding": lambda w, i: F.embedding(i, w),
    "cross_entropy": lambda x, i: F.cross_entropy(x.reshape(-1, 11), i.reshape(-1)),
    "cross_entropy_smooth": lambda x, i: F.cross_entropy(ps.moveaxis(x, 2, 1), i, label_smoothing=0.1),
    "cross_entropy_ignore": lambda x, i: F.cross_entropy(ps.moveaxis(x, 2, 1), i, ignore_index=4),
    "linear_cross_entropy": lambda x, w, i: F.linear_cross_entropy(
        x.reshape(-1, 8), w, i.reshape(-1), label_smoothing=0.1
    ),
    "attention": F.scaled_dot_product_attention,
    "attention_causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "attention_short": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, lower_right=True
    ),
    "attention_one": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, lower_right=True
    ),
}


def check(name: str, device: Device, wrap: Callable[[Any], Any] = lambda function: function) -> None:
    """The value and all gradients of a function are those of the reference."""
    count = sum(re.fullmatch(rf"{name}\.in\d", key) is not None for key in REFERENCE.files)
    inputs = [ps.asarray(REFERENCE[f"{name}.in{k}"], device=device) for k in range(count)]
    fractions = [k for k in range(count) if inputs[k].dtype == ps.float32]
    up = ps.asarray(REFERENCE[f"{name}.up"], device=device)

    def compute(*inputs: ps.Tensor) -> tuple[ps.Tensor, Any]:
        def total(*inputs: ps.Tensor) -> ps.Tensor:
            results.append(FUNCTIONS[name](*inputs))
            return ps.sum(results[-1] * up)

        results: list[ps.Tensor] = []
        _, grads = ps.value_and_grad(total, tuple(fractions))(*inputs)
        return results[-1], grads

    out, grads = wrap(compute)(*inputs)
    close(out, REFERENCE[f"{name}.out"])
    for k, grad in zip(fractions, grads, strict=True):
        close(grad, REFERENCE[f"{name}.grad{k}"])


def close(result: ps.Tensor, wanted: Any) -> None:
    assert result.shape == wanted.shape
    np.testing.assert_allclose(result.numpy(), wanted, rtol=2e-5, atol=3e-6)


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_gradients_are_pytorchs(name: str, device: Device) -> None:
    check(name, device, ps.jit)


@pytest.mark.slow(OPENCL, "webgpu")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_the_same_without_jit(name: str, device: Device) -> None:
    check(name, device)


def test_every_function_is_checked() -> None:
    attentions = {"scaled_dot_product_attention", "packed_attention"}  # the latter in test_attention.py
    checked = {name.split("_exact")[0] for name in FUNCTIONS} | attentions | {"named_activation"}
    for file in ("test_nn.py", "test_functions.py", "test_convolution.py", "test_quantize.py"):
        text = (Path(__file__).parent / file).read_text()
        checked |= set(re.findall(r"\bF\.(\w+)", text))
        checked |= {f"{name}{axes}d" for name in re.findall(r'f"(\w+)\{axes\}d"', text) for axes in (1, 2, 3)}
    assert set(F.__all__) <= checked | {"prelu", "dropout3d"}  # which are tested as layers


@pytest.mark.slow("attention", "attention_short", "webgpu", "attention_causal")
@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if "attention" in name] + ["linear_cross_entropy"]
)
def test_work_in_parts_gives_the_same(name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_attention, "_ROW_ITEMS", 1)  # parts of 16 rows, the last of them shorter
    monkeypatch.setattr(cross_entropy, "_rows_at_once", lambda *_: 16)
    check(name, device, ps.jit)
    check(name, device)


def arena_bytes(*tensors: ps.Tensor) -> float:
    match = re.search(r"arena of ([\d.]+) (B|KiB|MiB)", ps.explain(*tensors))
    assert match is not None
    return float(match[1]) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[match[2]]


def parts(training: bool) -> list[float]:
    """The bytes of the arena for attention, and for the loss of a linear layer, of 512 rows of 512 items."""
    q, k, v, x, w = (ps.asarray(np.zeros((512, 8), np.float32)).requires_grad_() for _ in range(5))
    mixed = F.scaled_dot_product_attention(q, k, v)
    loss = F.linear_cross_entropy(x, w, ps.zeros((512,), dtype=ps.int64))
    if not training:
        return [arena_bytes(mixed), arena_bytes(loss)]
    ps.sum(mixed).backward()
    loss.backward()
    return [arena_bytes(q.grad, k.grad, v.grad), arena_bytes(loss, x.grad, w.grad)]


@pytest.mark.parametrize(
    "training",
    [False, True],
)
def test_parts_never_hold_all_scores_or_logits(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = 4 * 512 * 512
    assert min(parts(training)) >= everything
    monkeypatch.setattr(graph_attention, "_ROW_ITEMS", 512 * 128)
    monkeypatch.setattr(cross_entropy, "_rows_at_once", lambda *_: 128)
    ps.default_device().subgraphs.clear()
    assert max(parts(training)) < everything * 0.75


def test_extremes_stay_finite() -> None:
    x = at(ps.default_device(), [[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    for function in (F.sigmoid, F.softmax, F.log_softmax, F.silu, F.gelu, F.erf, lambda x: F.gelu(x, "tanh")):
        assert np.isfinite(function(x).numpy()).all()
    targets = ps.asarray(np.array([0, 1]))
    assert F.cross_entropy(x, targets).item() == pytest.approx(math.log(3) / 2)


def test_the_loss_of_ignored_targets_alone_is_that_of_pytorch() -> None:
    x = at(ps.default_device(), np.ones((2, 3)))
    assert math.isnan(F.cross_entropy(x, ps.asarray(np.array([-100, -100]))).item())


# Dropout


def test_dropout_zeroes_some_items_and_scales_the_others() -> None:
    x = ps.ones((1000, 50))
    result = F.dropout(x, 0.2).numpy()
    assert set(np.unique(result)) == {0, np.float32(1.25)}
    assert np.mean(result == 0) == pytest.approx(0.2, abs=0.01)
    assert np.mean(result) == pytest.approx(1, abs=0.02)
    assert (F.dropout(x, 0.2).numpy() != result).any(), "another mask each time"
    ps.random.manual_seed(7)
    np.testing.assert_array_equal(F.dropout(x, 0.2).numpy(), result)


def test_dropout_is_off_in_use_and_at_zero() -> None:
    x = ps.ones((4, 4))
    layer = nn.Dropout(0.5)
    assert (layer(x).numpy() == 0).any()
    assert layer.eval()(x) is x
    assert F.dropout(x, 0.0) is x
    assert F.dropout(x, 0.5, training=False) is x


def test_a_jitted_function_follows_the_mode() -> None:
    layer, x = nn.Sequential(nn.Dropout(0.5)), ps.ones((64, 64))
    captures = []

    @ps.jit
    def run(x: ps.Tensor) -> ps.Tensor:
        captures.append(None)
        return layer(x) * 1.0

    for _ in range(3):
        assert (run(x).numpy() == 0).any()
        layer.eval()
        assert (run(x).numpy() == 1).all()
        layer.train()
    assert len(captures) == 2, "one for each mode"


@pytest.mark.parametrize("wrap", [lambda function: function, ps.jit], ids=["plain", "jit"])
def test_the_gradient_has_the_mask_of_the_value(wrap: Callable[[Any], Any]) -> None:
    x = ps.asarray(np.full((64, 64), 3, np.float32))

    def both(x: ps.Tensor) -> tuple[ps.Tensor, ps.Tensor]:
        values: list[ps.Tensor] = []

        def total(x: ps.Tensor) -> ps.Tensor:
            values.append(F.dropout(x, 0.25))
            return ps.sum(values[0] * values[0])

        _, grad = ps.value_and_grad(total)(x)
        return values[0], grad

    function = wrap(both)
    seen = []
    for _ in range(2):
        value, grad = (tensor.numpy() for tensor in function(x))
        np.testing.assert_allclose(grad, value * 2 / 0.75, rtol=1e-6)
        seen.append(value)
    assert 0.2 < np.mean(seen[0] == 0) < 0.3
    assert (seen[0] != seen[1]).any()


def test_dropout_is_drawn_where_the_tensor_is(device: Device) -> None:
    result = F.dropout(at(device, np.ones((100, 10))), 0.5)
    assert result.device is device
    assert 0.3 < np.mean(result.numpy() == 0) < 0.7


# Fused calls


def steps(tensor: ps.Tensor) -> int:
    match = re.search(r"^(\d+) steps", ps.explain(tensor), re.MULTILINE)
    assert match is not None
    return int(match[1])


def test_fused_calls_compile_to_what_the_unfused_form_does() -> None:
    x, y, weight = (ps.asarray(np.ones((32, 32), np.float32)) for _ in range(3))
    bias, scale = (ps.asarray(np.ones(32, np.float32)) for _ in range(2))
    pairs = [
        (F.linear(x, weight, bias), x @ weight.T + bias),
        (F.linear(x, weight, bias, activation="relu"), ps.maximum(x @ weight.T + bias, 0)),
        (F.linear(x, weight, bias, activation="tanh"), ps.tanh(x @ weight.T + bias)),
        (F.linear(x, weight, activation="gelu"), F.gelu(x @ weight.T)),
        (F.add_relu(x, y), ps.maximum(x + y, 0)),
        (F.mul_relu(x, y), ps.maximum(x * y, 0)),
        (F.affine(x, scale, bias), x * scale + bias),
    ]
    for fused, unfused in pairs:
        assert steps(fused) == steps(unfused) == 1
    for whole in (
        F.softmax(x),
        F.log_softmax(x),
        F.layer_norm(x, scale.shape, scale, bias),
        F.rms_norm(x, scale.shape, scale),
    ):
        assert steps(whole) == 1


# Layers


@pytest.mark.parametrize(
    ("layer", "function"),
    [
        (nn.ReLU(), F.relu),
        (nn.Sigmoid(), F.sigmoid),
        (nn.Tanh(), ps.tanh),
        (nn.SiLU(), F.silu),
        (nn.GELU(), F.gelu),
        (nn.GELU("tanh"), lambda x: F.gelu(x, "tanh")),
        (nn.Softmax(), F.softmax),
        (nn.Softmax(0), lambda x: F.softmax(x, 0)),
    ],
)
def test_activations_are_layers_too(layer: nn.Module, function: Callable[[ps.Tensor], ps.Tensor]) -> None:
    x = at(ps.default_device(), np.linspace(-3, 3, 12).reshape(3, 4))
    np.testing.assert_array_equal(layer(x).numpy(), function(x).numpy())
    assert layer.parameters() == []


def test_layers_are_their_functions() -> None:
    x = at(ps.default_device(), np.linspace(-3, 3, 12).reshape(3, 4))
    linear, bare = nn.Linear(4, 5), nn.Linear(4, 5, bias=False)
    np.testing.assert_array_equal(linear(x).numpy(), F.linear(x, linear.weight, linear.bias).numpy())
    np.testing.assert_array_equal(bare(x).numpy(), F.linear(x, bare.weight).numpy())
    assert (linear.weight.shape, bare.bias) == ((5, 4), None)
    for layer in (linear, nn.Linear(4, 5)):
        assert np.abs(layer.weight.numpy()).max() <= 0.5
        assert len(np.unique(layer.weight.numpy())) == 20
    norm, rms = nn.LayerNorm(4, eps=0.1), nn.RMSNorm(4, eps=0.1)
    norm.load_state_dict({"weight": [1, 2, 3, 4], "bias": [4, 3, 2, 1]})
    np.testing.assert_array_equal(
        norm(x).numpy(), F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, 0.1).numpy()
    )
    np.testing.assert_array_equal(
        rms(x).numpy(), F.rms_norm(x, rms.normalized_shape, rms.weight, 0.1).numpy()
    )
    assert nn.LayerNorm(4, bias=False).bias is None
    table = nn.Embedding(6, 4)
    index = ps.asarray(np.array([[5, 0], [5, 1]]))
    np.testing.assert_array_equal(table(index).numpy(), table.weight.numpy()[index.numpy()])
    both = nn.Sequential(linear, nn.ReLU())
    np.testing.assert_array_equal(both(x).numpy(), F.relu(linear(x)).numpy())
    assert (len(both), both[0]) == (2, linear)


def test_attention_is_causal_and_has_heads() -> None:
    layer = nn.CausalSelfAttention(8, 2)
    x = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    changed = x.copy()
    changed[:, 4:] += 1
    before, after = (layer(ps.asarray(array)).numpy() for array in (x, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(before[:, 4:] - after[:, 4:]) > 1e-4).any(axis=-1).all()


def test_bad_sizes_shapes_and_dtypes_are_named() -> None:
    x, ids = ps.ones((2, 3)), ps.zeros((2, 3), dtype=ps.int64)
    model = nn.GPT(vocab_size=5, context=4, width=8, layers=1, heads=2)
    for message, function in {
        "sizes of 1 or more, and 0, 2": lambda: nn.Linear(0, 2),
        r"\(2, 3\) and \(4, 5\)|3 .* 4": lambda: nn.Linear(4, 5)(x),
        "a width of 8 cannot be divided among 3": lambda: nn.CausalSelfAttention(8, 3),
        "8 cannot be divided among 3 heads": lambda: nn.GPT(vocab_size=5, width=8, heads=3),
        "a vocab_size of 1 or more": lambda: nn.GPT(vocab_size=0),
        "a width of 1 or more": lambda: nn.GPT(vocab_size=2, width=-8),
        "heads of 1 or more": lambda: nn.GPT(vocab_size=2, heads=0),
        "an embedding needs sizes of 1 or more, and 0, 2": lambda: nn.Embedding(0, 2),
        r"layer_norm: .*\(4,\) does not fit items of shape \(2, 3\)": lambda: nn.LayerNorm(4)(x),
        r"rms_norm: .*\(4,\) does not fit items of shape \(2, 1\)": lambda: nn.RMSNorm(4)(x[:, :1]),
        "a context of 1 or more": lambda: nn.GPT(vocab_size=2, context=0),
        "layers of 1 or more": lambda: nn.GPT(vocab_size=2, layers=0),
        r"length up to 4\), and \(2, 6\)": lambda: model(ps.zeros((2, 6), dtype=ps.int64)),
        r"up to 4\), and \(4,\)": lambda: model(ps.zeros((4,), dtype=ps.int64)),
        "a probability from 0 to 1, and 1.1": lambda: nn.Dropout(1.1),
        "a probability from .* -0.1": lambda: F.dropout(x, -0.1),
        "'none' or 'tanh', and 'sin'": lambda: F.gelu(x, "sin"),
        "'sin' is no activation": lambda: F.linear(x, x, activation="sin"),
        r"attention: shapes \(2, 3\), \(2, 2\)": lambda: F.scaled_dot_product_attention(x, x[:, :2], x),
        r"mse_loss: shapes \(2, 3\) and \(3, 2\)": lambda: F.mse_loss(x, x.T),
        "targets of shape": lambda: F.cross_entropy(x, ids),
        r"label_smoothing is from 0 to 1, and 2": lambda: F.cross_entropy(x, ids[:, 0], label_smoothing=2),
        "ignore_index=1 is for classes": lambda: F.cross_entropy(x, x, ignore_index=1),
        r"weights of shape \(7, .* for losses": lambda: F.binary_cross_entropy(x, x, ps.ones((7, *x.shape))),
        r"weights of shape \(9, .* for losses": lambda: F.binary_cross_entropy_with_logits(
            x, x, pos_weight=ps.ones((9, *x.shape))
        ),
        r"from 0 to 4, and \[7\]": lambda: model.generate([7], 1).ids,
        r"and \[\] was given": lambda: model.generate([], 1).ids,
        "a temperature is 0 or more": lambda: model.generate([1], 1, temperature=-1).ids,
        "top_k is an integer of 1 or more": lambda: model.generate([1], 1, top_k=0).ids,
        r"top_p is in \(0, 1\]": lambda: model.generate([1], 1, top_p=0.0).ids,
    }.items():
        with pytest.raises(ValueError, match=message):
            function()
    with pytest.raises(TypeError, match="integers, and float32"):
        F.embedding(x, x)
    with pytest.raises(TypeError, match="targets are integers, and float32"):
        F.cross_entropy(x, x[:, 0])
    with pytest.raises(NotImplementedError, match="Module has no forward"):
        nn.Module()(x)


# The tree


class Tied(nn.Module):
    def __init__(self) -> None:
        self.first = nn.Linear(3, 3)
        self.rest = [nn.Linear(3, 2), (nn.Dropout(0.5), nn.RMSNorm(2))]
        self.second = self.first
        self.table = ps.arange(4)
        self.name = "not a part"


def test_a_module_is_a_tree_of_its_parts() -> None:
    model = Tied()
    assert [name for name, _ in model.named_tensors()] == [
        "first.weight",
        "first.bias",
        "rest.0.weight",
        "rest.0.bias",
        "rest.1.1.weight",
        "table",
    ]
    assert [name for name, _ in model.named_parameters()] == [n for n, _ in model.named_tensors()][:-1]
    assert len(model.parameters()) == 5
    assert {type(module) for module in model.modules()} == {Tied, nn.Linear, nn.Dropout, nn.RMSNorm}


def test_training_is_a_mode_of_all_inside() -> None:
    model = Tied()
    assert all(module.training for module in model.modules())
    assert model.eval() is model
    assert not any(module.training for module in model.modules())
    assert model.train() is model
    assert all(module.training for module in model.modules())


def test_a_state_goes_into_another_module_and_is_a_copy() -> None:
    first, second = Tied(), Tied()
    state = first.state_dict()
    assert list(state) == [name for name, _ in first.named_tensors()]
    second.load_state_dict(state)
    for name, array in second.state_dict().items():
        np.testing.assert_array_equal(array, state[name])
    state["first.weight"] += 1
    assert (first.first.weight.numpy() != state["first.weight"]).all()
    assert (second.first.weight.numpy() != state["first.weight"]).all()
    assert second.first.weight.requires_grad
    ps.sum(second.first(ps.ones((1, 3)))).backward()
    assert second.first.weight.grad is not None
    assert second.first.weight.grad.tolist() == [[1, 1, 1]] * 3


def test_a_loaded_state_is_not_shared_with_the_array() -> None:
    model = nn.Linear(2, 1, bias=False)
    given = np.ones((1, 2), np.float32)
    model.load_state_dict({"weight": given})
    given[:] = 9
    assert model.weight.tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda state: state.pop("first.bias"), KeyError, "lacks .*first.bias"),
        (lambda state: state.update(more=np.zeros(1)), KeyError, "has .*more"),
        (
            lambda state: state.update({"rest.1.1.weight": np.zeros(3)}),
            ValueError,
            r"rest.1.1.weight has .*\(2,\)",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    change: Callable[[dict[str, Any]], Any], error: type[Exception], message: str
) -> None:
    model = Tied()
    before = model.state_dict()
    state = {name: array + 1 for name, array in before.items()}
    change(state)
    with pytest.raises(error, match=message):
        model.load_state_dict(state)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_to_a_dtype_moves_fractions_and_keeps_parameters() -> None:
    model = Tied()
    before = model.state_dict()
    kept = model.parameters()
    assert model.to(ps.float16) is model
    assert [parameter.dtype for parameter in model.parameters()] == [ps.float16] * 5
    assert model.table.dtype == ps.int64
    assert all(parameter is other for parameter, other in zip(model.parameters(), kept, strict=True))
    np.testing.assert_array_equal(model.first.weight.numpy(), before["first.weight"].astype(np.float16))
    assert model.first(ps.ones((1, 3), dtype=ps.float16)).dtype == ps.float16
    model.to("float32")
    assert model.first.weight.dtype == ps.float32
    with pytest.raises(TypeError, match="int32 was given"):
        model.to(ps.int32)


def test_a_captured_function_sees_another_dtype() -> None:
    model = nn.Linear(4, 4, bias=False)
    function = ps.jit(lambda x: model(x))
    x = ps.ones((1, 4))
    before = function(x).numpy()
    model.to(ps.float16)
    np.testing.assert_allclose(function(x).numpy(), before, rtol=1e-2)


def test_to_a_device_moves_everything(device: Device) -> None:
    model = Tied()
    x = np.ones((2, 3), np.float32)
    before, state = model.first(ps.asarray(x)).numpy(), model.state_dict()
    assert model.to(device) is model
    assert all(tensor.device is device for _, tensor in model.named_tensors())
    assert len(model.parameters()) == 5
    result = model.first(ps.asarray(x, device=device))
    assert result.device is device
    np.testing.assert_allclose(result.numpy(), before, rtol=1e-5)
    ps.sum(result).backward()
    assert model.first.weight.grad is not None
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, state[name])


@pytest.mark.slow("webgpu")
def test_layers_are_made_on_the_device_they_are_given(device: Device) -> None:
    model = nn.GPT(vocab_size=5, context=4, width=8, layers=1, heads=2, dropout=0.5, device=device)
    assert all(tensor.device is device for _, tensor in model.named_tensors())
    loss = model.loss(*(ps.zeros((1, 4), dtype=ps.int64, device=device) for _ in range(2)))
    loss.backward()
    assert np.isfinite(loss.item())


# The GPT


def reference_gpt(device: Device) -> nn.GPT:
    model = nn.GPT(vocab_size=27, context=16, width=24, layers=2, heads=2, device=device)
    prefix = "gpt.start."
    model.load_state_dict(
        {k.removeprefix(prefix): REFERENCE[k] for k in REFERENCE.files if k.startswith(prefix)}
    )
    return model


@pytest.mark.slow
def test_the_losses_of_the_first_50_steps_are_pytorchs(device: Device) -> None:
    model = reference_gpt(device)
    optimizer = ps.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    @ps.jit
    def step(batch: ps.Tensor) -> ps.Tensor:
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        optimizer.backward(loss)
        optimizer.step()
        return loss

    batches = [ps.asarray(batch.astype(np.int64), device=device) for batch in REFERENCE["gpt.batches"]]
    close(model(batches[0][:, :-1]), REFERENCE["gpt.logits"])
    losses = [step(batch).item() for batch in batches]
    np.testing.assert_allclose(losses, REFERENCE["gpt.losses"], rtol=0, atol=1e-4)


def test_the_loss_in_parts_is_the_loss_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference_gpt(ps.default_device())
    batch = ps.asarray(REFERENCE["gpt.batches"][0].astype(np.int64))
    x, targets = batch[:, :-1], batch[:, 1:]
    whole = F.cross_entropy(ps.moveaxis(model(x), -1, 1), targets).item()
    assert whole == pytest.approx(float(REFERENCE["gpt.losses"][0]), abs=1e-5)
    monkeypatch.setattr(graph_attention, "_ROW_ITEMS", 1)
    assert model.loss(x, targets).item() == pytest.approx(whole, abs=1e-6)


def test_generating_with_the_cache_is_what_the_whole_model_says() -> None:
    model = reference_gpt(ps.default_device())
    prompt = REFERENCE["gpt.batches"][0][0][:5].astype(int).tolist()
    result = model.generate(prompt, 8, temperature=0).ids
    ids = list(prompt)
    logits = model(ps.asarray(np.array([prompt + result]))).numpy()[0]
    for k, item in enumerate(result):
        assert item == int(np.argmax(logits[len(ids) - 1 + k]))


def test_generating_goes_beyond_the_context_and_repeats_with_its_seed() -> None:
    model = nn.GPT(vocab_size=11, context=4, width=8, layers=1, heads=2, dropout=0.3)
    first = model.generate([3, 4, 5, 6], 12, seed=5).ids
    assert first == model.generate([3, 4, 5, 6], 12, seed=5).ids
    assert first != model.generate([3, 4, 5, 6], 12, seed=6).ids
    with pytest.warns(ps.errors.PenstockWarning, match="has 6 tokens, and the model reads the last 4"):
        assert first == model.generate([1, 2, 3, 4, 5, 6], 12, seed=5).ids
    assert all(0 <= token < 11 for token in first)
    assert model.training, "the mode is what it was"
    likely = model.generate([1], 6, temperature=0).ids
    assert likely == model.generate([1], 6, top_k=1).ids == model.generate([1], 6, top_p=1e-6).ids


def test_dropout_in_a_gpt_is_for_training_alone() -> None:
    model = nn.GPT(vocab_size=11, context=4, width=8, layers=1, heads=2, dropout=0.5)
    ids = ps.asarray(np.array([[1, 2, 3]]))
    assert (model(ids).numpy() != model(ids).numpy()).any()
    model.eval()
    np.testing.assert_array_equal(model(ids).numpy(), model(ids).numpy())


def test_a_pretrained_model_comes_back_whole(tmp_path: Path) -> None:
    model = reference_gpt(ps.default_device())
    model.save_pretrained(tmp_path / "saved")
    again = nn.GPT.from_pretrained(tmp_path / "saved")
    for (name, array), (other, copy) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == other
        np.testing.assert_array_equal(array, copy)
    assert (again.context, again.heads, again.eps) == (16, 2, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 48}, r"wte.weight has the shape \(27, 24\), and \(27, 48\) by config.json"),
        ({"n_layer": 3}, "the number of layers is 2, and 3 by config.json"),
        ({"n_head": 5}, "24 cannot be divided among 5 heads"),
        ({"vocab_size": "27"}, "vocab_size is an integer of 1 or more, not '27'"),
        ({"activation_function": "relu"}, "the activation 'relu' is not GPT-2's"),
        ({"model_type": "bert"}, "the model_type 'bert' is not known; there are gpt2, llama"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx has to be False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings has to be True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_pretrained_model_of_another_kind_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    reference_gpt(ps.default_device()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        nn.GPT.from_pretrained(tmp_path)


def test_broken_pretrained_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        nn.GPT.from_pretrained(tmp_path)
    reference_gpt(ps.default_device()).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        nn.GPT.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the model_type None is not known"):
        nn.GPT.from_pretrained(tmp_path)


# Halves


@pytest.mark.parametrize("dtype", [ps.float16, ps.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "silu", "softmax", "log_softmax", "layer_norm", "rms_norm"])
def test_halves_are_rounded_only_at_the_end(name: str, dtype: Any, device: Device) -> None:
    more = {"normalized_shape": 200} if name.endswith("norm") else {}
    function = partial(getattr(F, name), **more)
    values = np.random.default_rng(0).normal(size=(5, 200)).astype(np.float32)
    half = ps.asarray(values, device=device).astype(dtype)
    result, exact = function(half), function(half.astype(ps.float32))
    assert result.dtype is dtype
    wanted = exact.astype(dtype).numpy().astype(np.float32)
    apart = result.numpy().astype(np.float32) - wanted
    # A last bit may differ where a kernel's exp or tanh is NumPy's but for its own last bit.
    assert np.mean(apart != 0) < 0.01
    np.testing.assert_allclose(apart, 0, atol=2**-7 * np.abs(wanted).max())


def test_the_loss_of_halves_is_float32(device: Device) -> None:
    logits = np.random.default_rng(0).normal(size=(64, 100)).astype(np.float32)
    half = ps.asarray(logits, device=device).astype(ps.bfloat16).requires_grad_()
    target = ps.asarray(np.arange(64) % 100, device=device)
    loss = F.cross_entropy(half, target)
    loss.backward()
    assert loss.dtype is ps.float32
    assert half.grad is not None
    assert half.grad.dtype is ps.bfloat16
    rounded = half.detach().numpy().astype(np.float64)
    chances = np.exp(rounded) / np.exp(rounded).sum(1, keepdims=True)
    assert loss.item() == pytest.approx(-np.log(chances[np.arange(64), np.arange(64) % 100]).mean(), abs=1e-5)
