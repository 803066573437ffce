"""Modules as objects: printing, parts, hooks, files, PyTorch's modules, initialization."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import nn
from penstock.nn import functional as F  # noqa: N812

HOST = "host"


def ones(*shape: int) -> ps.Tensor:
    return ps.ones(shape, device=HOST)


class Net(nn.Module):
    """Layers of several kinds, in and out of containers."""

    def __init__(self) -> None:
        self.blocks = [nn.Linear(3, 3, device=HOST) for _ in range(3)]
        self.head = nn.Sequential(nn.BatchNorm1d(3, device=HOST), nn.ReLU(), nn.Linear(3, 2, device=HOST))
        self.scale = nn.Parameter(ones(2))

    def forward(self, x: ps.Tensor) -> ps.Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        result: ps.Tensor = self.head(x) * self.scale
        return result


def test_a_module_prints_its_layers_with_sizes() -> None:
    assert repr(Net()) == (
        "Net(\n"
        "  (blocks.0-2): 3 x Linear(in_features=3, out_features=3, bias=True)\n"
        "  (head): Sequential(\n"
        "    (0): BatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)\n"
        "    (1): ReLU()\n"
        "    (2): Linear(in_features=3, out_features=2, bias=True)\n"
        "  )\n"
        "  (scale): float32[2]\n"
        ")"
    )
    assert repr(nn.LSTM(2, 3, num_layers=2)) == "LSTM(2, 3, num_layers=2)"
    assert repr(nn.CrossEntropyLoss(label_smoothing=0.1)).startswith("CrossEntropyLoss(ignore_index=-100")
    loop = nn.Sequential(nn.ReLU())
    loop.me = loop
    assert "Sequential(...)" in repr(loop)


def test_a_summary_has_shapes_and_parameters_and_computes_nothing() -> None:
    model = Net()
    model.head[2].requires_grad_(False)
    before = model.state_dict()
    result = nn.summary(model, ones(4, 3))
    assert [(row.path, row.output, row.parameters) for row in result.rows] == [
        ("", "[4, 2]", 3 * 12 + 6 + 8 + 2),
        *[(f"blocks.{number}", "[4, 3]", 12) for number in range(3)],
        ("head", "[4, 2]", 14),
        ("head.0", "[4, 3]", 6),
        ("head.1", "[4, 3]", 0),
        ("head.2", "[4, 2]", 8),
    ]
    assert result.parameters - result.trained == 8
    assert "52 parameters (8 frozen) in 208 bytes, and 32 of buffers" in str(result)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    assert model._hooks is None or not (model._hooks.before or model._hooks.after)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same_and_train_apart(way: Any) -> None:
    model = Net()
    twin = way(model)
    x = ps.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), device=HOST)
    np.testing.assert_array_equal(model.eval()(x).numpy(), twin.eval()(x).numpy())
    assert isinstance(twin.scale, nn.Parameter)
    assert list(twin.state_dict()) == list(model.state_dict())
    with ps.no_grad():
        twin.scale[...] = 0.0
    assert model.scale.tolist() == [1, 1]


def test_parameters_and_buffers() -> None:
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    assert names[-1] == "scale"
    assert [name for name, _ in model.named_buffers()] == [
        f"head.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    assert model.requires_grad_(False) is model
    assert [name for name, _ in model.named_parameters()] == names, "frozen parameters are still parameters"
    assert not any(tensor.requires_grad for tensor in model.parameters())
    model.requires_grad_()
    assert all(tensor.requires_grad for tensor in model.parameters())
    model.register_buffer("table", ps.arange(3, device=HOST))
    model.register_buffer("cache", ones(2), persistent=False)
    assert "table" in model.state_dict()
    assert "cache" not in model.state_dict()
    assert "cache" in dict(model.named_buffers())
    assert model.get_submodule("head.2") is model.head[2]
    assert model.get_parameter("blocks.1.bias") is model.blocks[1].bias
    with pytest.raises(KeyError, match=r"there is no module 'tail'; there are '', 'blocks\.0'"):
        model.get_submodule("tail")
    with pytest.raises(TypeError, match="made of a tensor, and list"):
        nn.Parameter([1.0])  # type: ignore[arg-type]
    seen: list[str] = []
    model.apply(lambda module: seen.append(type(module).__name__))
    assert seen[-1] == "Net"
    assert [type(part).__name__ for part in model.children()] == ["Linear"] * 3 + ["Sequential"]


@dataclass
class Pair:
    first: ps.Tensor
    second: Any


def test_parameters_in_dataclasses_and_arrays_of_objects() -> None:
    model = nn.Module()
    model.pair = Pair(nn.Parameter(ones(1)), [nn.Linear(1, 1, device=HOST)])
    assert list(model.state_dict()) == ["pair.first", "pair.second.0.weight", "pair.second.0.bias"]
    model.bad = np.array([nn.Linear(1, 1, device=HOST), None], object)
    with pytest.raises(TypeError, match="bad is a ndarray, whose items have no names"):
        model.parameters()


def test_containers() -> None:
    layers = nn.ModuleList([nn.Linear(1, 1, device=HOST), nn.ReLU()])
    layers.append(nn.Tanh()).insert(1, nn.GELU())
    assert [type(layer).__name__ for layer in layers] == ["Linear", "GELU", "ReLU", "Tanh"]
    del layers[1]
    layers[-1] = nn.Sigmoid()
    assert (len(layers), repr(layers[2])) == (3, "Sigmoid()")
    assert list(layers.state_dict()) == ["0.weight", "0.bias"]
    assert isinstance(layers[1:], nn.ModuleList)
    named = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False, device=HOST)})
    named["b"] = nn.ReLU()
    assert (list(named), "b" in named, list(named.state_dict())) == (["a", "b"], True, ["a.weight"])
    assert type(named.pop("b")).__name__ == "ReLU"
    weights = nn.ParameterList([nn.Parameter(ones(2))])
    tables = nn.ParameterDict({"w": nn.Parameter(ones(3))})
    assert (list(weights.state_dict()), list(tables.state_dict())) == (["0"], ["w"])
    pair = nn.Sequential({"first": nn.Identity(), "second": nn.Flatten()})
    assert pair(ones(2, 3, 4)).shape == (2, 12)
    assert pair[:1](ones(2, 3)).shape == (2, 3)
    assert nn.Unflatten(1, (3, -1))(ones(2, 12)).shape == (2, 3, 4)
    with pytest.raises(TypeError, match="ModuleList holds modules, and int was given"):
        layers.append(3)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match=r"text without a dot, and 'a\.b'"):
        named["a.b"] = nn.ReLU()
    with pytest.raises(IndexError, match="has 3 parts, and index 3"):
        layers[3]


def test_hooks() -> None:
    layer = nn.Linear(2, 2, bias=False, device=HOST)
    layer.load_state_dict({"weight": [[1, 2], [3, 4]]})
    before = layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    after = layer.register_forward_hook(lambda module, args, result: result + 1)
    slopes: list[Any] = []

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        slopes.append((inputs[0].tolist(), outputs[0].tolist()))
        return (inputs[0] * 10,)

    with layer.register_full_backward_hook(hook):
        x = ones(1, 2).requires_grad_()
        result = layer(x)
        assert result.tolist() == [[7, 15]]
        ps.sum(result).backward()
    assert slopes == [([[4, 6]], [[1, 1]])]
    assert x.grad is not None
    assert x.grad.tolist() == [[80, 120]], "the hook's gradient, then the doubling before the layer"
    before.remove()
    after.remove()
    assert layer(ones(1, 2)).tolist() == [[3, 7]]


# States and files


def test_a_state_of_pytorch_has_tied_tensors_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            self.tokens = nn.Embedding(3, 2, device=HOST)
            self.head = nn.Linear(2, 3, bias=False, device=HOST)
            self.head.weight = self.tokens.weight

    model, table = Tied(), np.arange(6, dtype=np.float32).reshape(3, 2)
    assert list(model.state_dict()) == ["tokens.weight"]
    model.load_state_dict({"tokens.weight": table, "head.weight": table.copy()})
    assert model.head.weight.tolist() == table.tolist()
    model.load_state_dict({"head.weight": table + 1})
    with pytest.raises(ValueError, match=r"head.weight is the same tensor as tokens.weight .* two values"):
        model.load_state_dict({"tokens.weight": table, "head.weight": table + 1})
    assert model.tokens.weight.tolist() == (table + 1).tolist()
    result = model.load_state_dict({"more": table}, strict=False)
    assert result == (["tokens.weight"], ["more"])


def test_values_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    model = Net()
    optimizer = ps.optim.AdamW(model.parameters(), lr=0.25)
    value = {
        "model": model,
        "optimizer": optimizer,
        "half": ps.asarray([1.5, 2.5], dtype=ps.bfloat16, device=HOST),
        "array": np.arange(3),
        "list": [1, 2.5, None, "text", (True, -math.inf)],
        "empty": {},
        "scalar": np.float64(0.1),
    }
    path = tmp_path / "state.safetensors"
    ps.save(value, path)
    result = ps.load(path, device=HOST)
    assert list(result) == list(value)
    assert result["half"].dtype == ps.bfloat16
    assert result["half"].tolist() == [1.5, 2.5]
    assert result["array"].tolist() == [0, 1, 2]
    assert result["list"] == value["list"]
    assert (result["empty"], float(result["scalar"])) == ({}, 0.1)
    other = Net()
    other.load_state_dict(result["model"])
    for name, array in other.state_dict().items():
        np.testing.assert_array_equal(array, model.state_dict()[name])
    again = ps.optim.AdamW(other.parameters())
    again.load_state_dict(result["optimizer"])
    assert again.lr == 0.25
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"], "nothing unfinished is left"


def test_files_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(TypeError, match=r"a.0 is of type set, which cannot be saved"):
        ps.save({"a": [{1}]}, path)
    with pytest.raises(TypeError, match="the value has the key 3; keys in a file are strings"):
        ps.save({3: 1}, path)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        ps.save(loop, path)
    assert not path.exists()
    with pytest.raises(ps.errors.CheckpointError, match="cannot be read"):
        ps.load(path)
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(ps.errors.CheckpointError, match="cannot be read"):
        ps.load(path)
    from safetensors.numpy import save_file

    save_file({"w": np.ones(2, np.float32)}, path)  # another library's
    assert ps.load(path)["w"].tolist() == [1, 1]
    save_file({"w": np.ones(2)}, path, {"format": "penstock values 1", "values": '{"exec": "w"}'})
    with pytest.raises(ps.errors.CheckpointError, match=r"is damaged: .* unknown kind 'exec'"):
        ps.load(path)


# PyTorch's modules, by stand-ins with the names of its classes


class Theirs:
    """What `from_torch` asks of a module of PyTorch."""

    training = False

    def __init__(self, state: dict[str, Any], children: dict[str, Any], **attributes: Any) -> None:
        self._state, self._children = state, children
        vars(self).update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def named_parameters(self) -> list[Any]:
        return []

    def named_children(self) -> Any:
        return self._children.items()

    def get_submodule(self, path: str) -> Any:
        return self._children[path]


def torch_class(name: str) -> type[Theirs]:
    return type(name, (Theirs,), {"__module__": "torch.nn.modules.some"})


def test_modules_of_pytorch_become_ours() -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    linear = torch_class("Linear")({}, {}, in_features=3, out_features=2, bias=None)
    act = torch_class("GELU")({}, {}, approximate="none")
    both = torch_class("Sequential")({"0.weight": weight}, {"0": linear, "1": act})
    made = nn.from_torch(both, device=HOST)
    assert repr(made[0]) == "Linear(in_features=3, out_features=2, bias=False)"  # type: ignore[index]
    assert not made.training
    x = ones(1, 3)
    np.testing.assert_allclose(made(x).numpy(), F.gelu(x @ ps.asarray(weight.T, device=HOST), "none").numpy())
    strange = torch_class("Sequential")({}, {"0": linear, "body": torch_class("LPPool2d")({}, {})})
    with pytest.raises(ValueError, match="no counterpart of PyTorch's LPPool2d at 'body'"):
        nn.from_torch(strange)
    with pytest.raises(ValueError, match="no counterpart of PyTorch's Net"):
        nn.from_torch(Net())


# First values, and gradients as a whole


def test_first_values() -> None:
    ps.random.manual_seed(3)
    weight = nn.Parameter(ones(200, 100))
    spreads = {
        nn.init.xavier_uniform_: math.sqrt(2 / 300),
        nn.init.xavier_normal_: math.sqrt(2 / 300),
        nn.init.kaiming_uniform_: math.sqrt(2 / 100),
        lambda t: nn.init.kaiming_normal_(t, mode="fan_out", nonlinearity="relu"): math.sqrt(2 / 200),
        lambda t: nn.init.normal_(t, 0.0, 0.3): 0.3,
        lambda t: nn.init.uniform_(t, -1.0, 1.0): 1 / math.sqrt(3),
        nn.init.trunc_normal_: 0.8796,  # of a normal number between -2 and 2
    }
    for draw, spread in spreads.items():
        assert draw(weight) is weight
        values = weight.numpy()
        assert values.std() == pytest.approx(spread, rel=0.03)
        assert abs(values.mean()) < 0.03
    assert np.abs(weight.numpy()).max() <= 2
    assert weight.requires_grad
    nn.init.orthogonal_(weight, 2.0)
    np.testing.assert_allclose(weight.numpy().T @ weight.numpy(), 4 * np.eye(100), atol=1e-4)
    assert (nn.init.eye_(weight).numpy() == np.eye(200, 100)).all()
    assert (nn.init.zeros_(weight).numpy() == 0).all()
    with pytest.raises(ValueError, match="there is no gain for 'sin'"):
        nn.init.calculate_gain("sin")


@pytest.mark.parametrize("kind", [1.0, 2.0, math.inf])
def test_gradients_are_clipped_together(kind: float) -> None:
    tensors = [ones(3).requires_grad_(), ones(2, 2).requires_grad_(), ones(1).requires_grad_()]
    values = [np.array([3.0, -4, 0], np.float32), np.full((2, 2), 2.0, np.float32)]
    for tensor, array in zip(tensors, values, strict=False):
        tensor.grad = ps.asarray(array, device=HOST)
    norm = np.linalg.norm(np.concatenate([array.ravel() for array in values]), kind)
    total = nn.utils.clip_grad_norm_(tensors, 2.0, kind)
    assert total is not None
    assert total.item() == pytest.approx(norm)
    for tensor, array in zip(tensors, values, strict=False):
        assert tensor.grad is not None
        np.testing.assert_allclose(tensor.grad.numpy(), array * 2 / norm, rtol=1e-5)
    nn.utils.clip_grad_value_(tensors, 0.25)
    assert np.abs(tensors[0].grad.numpy()).max() <= 0.25  # type: ignore[union-attr]
    assert tensors[2].grad is None
    assert nn.utils.clip_grad_norm_(tensors[2], 1.0) is None


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_large_gradients_in_half_precision_are_clipped(half: str, kind: float) -> None:
    weight = nn.Parameter(ps.ones((400,)).astype(getattr(ps, half)))
    weight.grad = (ps.ones((400,)) * 256).astype(getattr(ps, half))
    total = 256 * 400 ** (1 / kind)
    assert nn.utils.clip_grad_norm_(weight, total / 2, kind).item() == pytest.approx(total, rel=1e-3)
    assert weight.grad is not None
    assert weight.grad.dtype == getattr(ps, half)
    assert weight.grad.astype(ps.float32).numpy() == pytest.approx(np.full(400, 128), rel=1e-2)


def test_parameters_as_a_vector() -> None:
    tensors = [ones(2, 2).requires_grad_(), ones(3).requires_grad_()]
    vector = nn.utils.parameters_to_vector(tensors)
    assert vector.shape == (7,)
    nn.utils.vector_to_parameters(ps.arange(7, device=HOST).astype(ps.float32), tensors)
    assert tensors[1].tolist() == [4, 5, 6]
    assert tensors[1].requires_grad
    with pytest.raises(ValueError, match="have 7 items, and a vector of shape"):
        nn.utils.vector_to_parameters(ones(6), tensors)


def test_losses_and_activations_are_modules() -> None:
    x, target = ps.asarray(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), device=HOST), ones(2, 3)
    labels = ps.asarray(np.array([0, 2]), device=HOST)
    pairs = [
        (nn.L1Loss(), F.l1_loss, (x, target)),
        (nn.HuberLoss(delta=0.5), lambda *a: F.huber_loss(*a, delta=0.5), (x, target)),
        (nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits, (x, target)),
        (nn.CrossEntropyLoss(weight=ones(3)), lambda *a: F.cross_entropy(*a, weight=ones(3)), (x, labels)),
        (nn.NLLLoss(), F.nll_loss, (x, labels)),
        (nn.KLDivLoss("sum"), lambda *a: F.kl_div(*a, "sum"), (x, target)),
        (nn.CosineSimilarity(dim=0), lambda *a: F.cosine_similarity(*a, dim=0), (x, target)),
        (nn.LeakyReLU(0.3), lambda a: F.leaky_relu(a, 0.3), (x,)),
        (nn.Hardtanh(), F.hardtanh, (x,)),
        (nn.LogSoftmax(dim=0), lambda a: F.log_softmax(a, 0), (x,)),
        (nn.PReLU(3, device=HOST), lambda a: F.leaky_relu(a, 0.25), (x,)),
    ]
    for module, function, args in pairs:
        np.testing.assert_array_equal(module(*args).numpy(), function(*args).numpy())
    assert list(nn.CrossEntropyLoss(weight=ones(3)).state_dict()) == ["weight"]
