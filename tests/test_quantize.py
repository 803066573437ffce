"""Weights as packed integers: their values, products with them on every driver, layers, files and models."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from conftest import NATIVE, examples, one_opencl
from hypothesis import given, settings
from hypothesis import strategies as st
from test_matmul_kernel import GUARD, guarded, launch, way_of

import penstock as ps
from penstock import Device, nn
from penstock.compiler.passes import fused
from penstock.drivers.opencl import OpenCLDriver
from penstock.errors import CheckpointError
from penstock.graph.dtypes import checked, float64
from penstock.graph.node import placeholder
from penstock.graph.quantization import computes_row, packed_matmul
from penstock.graph.shaping import pad
from penstock.kernels.lower import write
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.tensor import core

Floats = npt.NDArray[np.float64]
EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of half a unit in the last place
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


class Packed(NamedTuple):
    """Packed integers with their scales, and the matrix that they stand for by NumPy."""

    words: npt.NDArray[np.uint32]
    scales: npt.NDArray[Any]
    matrix: Floats
    steps: Floats  # the scale of each item


def drawn(rows: int, columns: int, bits: int, group: int, seed: int, dtype: str = "float16") -> Packed:
    draw = np.random.default_rng(seed)
    numbers = draw.integers(0, 2**bits, (rows, columns), dtype=np.uint32)
    numbers[0, :2] = 0, 2**bits - 1
    scales = ps.asarray(draw.normal(0, 0.01, (rows, columns // group)), device="host").astype(dtype).numpy()
    places = np.arange(0, 32, bits, dtype=np.uint32)
    if bits == 4:  # even ones in the lower half of a word, odd ones in the upper
        places = places.reshape(2, 4).T.reshape(-1)
    words = (numbers.reshape(rows, -1, 32 // bits) << places).sum(axis=-1, dtype=np.uint32)
    steps = np.repeat(scales.astype(np.float64), group, axis=1)
    return Packed(words, scales, (numbers.astype(np.float64) - 2 ** (bits - 1)) * steps, steps)


def assert_product(result: npt.NDArray[Any], x: Floats, packed: Packed, bits: int, dtype: str) -> None:
    """Whether `x @ matrix.T` is as exact as sums in float32 are, of weights in a dtype, rounded to it once.

    What is added up is at most 3.5 * 2^bits times the scale and the item of x: an integer is between 1 and 2
    in units of 2^bits, and 1.5 is subtracted for each. An item passes through at most K / 8 + 64 additions.
    """
    wanted = x @ packed.matrix.T
    additions = x.shape[1] / 8 + 64
    added = np.abs(x) @ np.abs(packed.steps).T * 3.5 * 2**bits
    bound = additions * 2.0**-24 * added + EPSILON[dtype] * np.abs(wanted) + 1e-30
    # Weights may be unpacked to the dtype, in memory or for tensor cores.
    bound += EPSILON[dtype] * np.abs(x) @ np.abs(packed.matrix).T
    error = np.abs(result.astype(np.float64) - wanted)
    assert (error <= bound).all(), float((error / bound).max())


def product(x: Floats, packed: Packed, bits: int, dtype: str, device: Device | str) -> tuple[Any, Floats]:
    """The product on a device, and the items of `x` as they are there."""
    given_x = ps.asarray(x.astype(np.float32), device=device).astype(dtype)
    words, scales = (ps.asarray(array, device=device) for array in (packed.words, packed.scales))
    result = F.quantized_linear(given_x, words, scales, bits)
    assert str(result.dtype) == dtype
    return result.astype("float32").numpy(), given_x.astype("float32").numpy().astype(np.float64)


def test_only_modules_are_quantized() -> None:
    with pytest.raises(TypeError, match="takes a module, and list was given"):
        ps.quantize([1.0], "int4")  # type: ignore[type-var]


@pytest.mark.parametrize(("rows", "bits", "group"), [(1, 4, 32), (5, 8, 32), (16, 4, 64), (17, 8, 64)])
def test_products_on_every_driver(device: Device, rows: int, bits: int, group: int) -> None:
    packed = drawn(70, 320, bits, group, rows, "float32")
    x = np.random.default_rng(1).normal(size=(rows, 320))
    result, exact = product(x, packed, bits, "float32", device)
    assert_product(result, exact, packed, bits, "float32")


@one_opencl
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activations_of_half_precision(device: Device, dtype: str) -> None:
    for rows, bits in ((1, 4), (3, 8), (9, 4), (32, 8)):
        packed = drawn(37, 736, bits, 32, rows, dtype)
        x = np.random.default_rng(2).normal(size=(rows, 736))
        result, exact = product(x, packed, bits, dtype, device)
        assert_product(result, exact, packed, bits, dtype)


@pytest.fixture(scope="module")
def driver() -> Iterator[OpenCLDriver]:
    opened = OpenCLDriver(NATIVE, "packed")
    yield opened
    opened.close()


@pytest.mark.parametrize(("rows", "bits"), [(1, 4), (1, 8), (2, 4), (6, 8), (13, 4)])
def test_kernels_for_gpus_in_opencl(driver: OpenCLDriver, rows: int, bits: int) -> None:
    """They run on a CPU, too. What lies around all values is NaN, and stays so."""
    packed = drawn(21, 2080 if rows == 1 else 352, bits, 32, rows, "float32")
    columns = packed.matrix.shape[1]
    x = np.random.default_rng(4).normal(size=(rows, columns)).astype(np.float32)
    arrays = [x, packed.words, packed.scales]
    nodes = [placeholder(array.shape, checked(array.dtype)) for array in arrays]
    capabilities = way_of(driver, "gpu")
    (group,) = fused([packed_matmul(*nodes)], capabilities)
    lowering = write(group, capabilities, "gpu")
    assert lowering is not None
    given_arrays = [guarded(arrays[nodes.index(node)].view(np.float32)) for node in group.inputs]
    out = guarded(np.zeros((rows, 21), np.float32))
    result, *_ = launch(driver, lowering.launches[0].source, [out, *given_arrays])
    assert np.isnan([result[:GUARD], result[-GUARD:]]).all()
    assert_product(result[GUARD:-GUARD].reshape(rows, 21), x.astype(np.float64), packed, bits, "float32")


@settings(max_examples=examples(25, 5))
@given(data=st.data())
def test_products_of_any_sizes(data: st.DataObject) -> None:
    rows, outputs = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40))
    bits, group = data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from([32, 64]))
    groups, device = data.draw(st.integers(1, 9)), data.draw(st.sampled_from(["opencl:0", "host"]))
    packed = drawn(outputs, groups * group, bits, group, data.draw(st.integers(0, 99)), "float32")
    missing = data.draw(st.integers(0, group - 1))  # inputs that the last group has no room for
    x = np.random.default_rng(3).normal(size=(rows, groups * group))
    x[:, x.shape[1] - missing :] = 0
    words, scales = (ps.asarray(array, device=device) for array in (packed.words, packed.scales))
    given_x = ps.asarray(x[:, : x.shape[1] - missing].astype(np.float32), device=device)
    result = F.quantized_linear(given_x, words, scales, bits).numpy()
    assert_product(result, x.astype(np.float32).astype(np.float64), packed, bits, "float32")


@settings(max_examples=examples(40, 10))
@given(
    outputs=st.integers(1, 9),
    inputs=st.integers(1, 150),
    group=st.sampled_from([32, 64]),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    size=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_weights_are_rounded_to_steps(
    outputs: int, inputs: int, group: int, bits: int, dtype: str, size: float
) -> None:
    draw = np.random.default_rng(outputs * inputs)
    weight = ps.asarray(draw.normal(0, size, (outputs, inputs)).astype(np.float32), device="host").astype(
        dtype
    )
    packed, scales = F.quantized(weight, bits, group)
    assert (packed.dtype, str(scales.dtype)) == (ps.uint32, dtype)
    assert scales.shape == (outputs, -(-inputs // group))
    exact = weight.astype("float32").numpy().astype(np.float64)
    steps = np.repeat(scales.astype("float32").numpy().astype(np.float64), group, axis=1)[:, :inputs]
    rounded = F.dequantized(packed, scales.astype("float32"), bits, inputs).numpy().astype(np.float64)
    error = np.abs(rounded - exact)
    largest = 2.0 ** (bits - 1) - (bits == 8)
    # A step is rounded to the dtype after two operations in float32; float16 has steps of 2^-24 near 0.
    rounding = np.maximum((EPSILON[dtype] + 4 * 2.0**-24) * np.abs(steps), 2.0**-25 * (dtype == "float16"))
    of_extreme = largest * rounding + 1e-30
    # Half a step for each item; a whole one where -8 is the largest of a group, and 8 would be needed, too.
    assert (error <= np.abs(steps) * (1 if bits == 4 else 0.501) + of_extreme).all()
    inner = exact / np.where(steps == 0, 1, steps) <= largest - 0.5
    assert (error <= np.abs(steps) * 0.501 + of_extreme)[inner].all()
    for row in range(outputs):
        for start in range(0, inputs, group):
            sizes = np.abs(exact[row, start : start + group])
            ends = start + np.flatnonzero(sizes == sizes.max())  # with both signs, only one of them
            assert (error[row, ends] <= of_extreme[row, ends]).any(), "the largest of a group is kept"


def test_a_product_reads_packed_bytes_and_stores_no_weight() -> None:
    layer = nn.Linear(256, 512, device="opencl:0")
    layer = ps.quantize(layer, "int4")
    text = str(ps.explain(F.relu(layer(ps.ones((4, 256), device="opencl:0") + 1))))
    steps = [line for line in text.splitlines() if "packed_matmul" in line]
    assert len(steps) == 1
    # 256 * 512 / 2 bytes of integers, 4 for each group's scale and for each bias, and x.
    assert f"{(65536 + 8 * 512 * 4 + 512 * 4 + 4 * 256 * 4) / 1024:.1f} KiB read" in steps[0], text
    assert "relu" in steps[0] or "maximum" in steps[0] or "where" in steps[0], "the epilogue is in its kernel"
    many = str(ps.explain(layer(ps.ones((40, 256), device="opencl:0") + 1)))
    assert "packed_matmul" not in many
    assert "bitwise_and" in many, "the weight is unpacked to memory once"


# Layers and models


class Net(nn.Module):
    """Layers in attributes, lists, dicts and tuples, of which two places have the same layer."""

    def __init__(self) -> None:
        self.first = nn.Linear(40, 64)
        self.parts: dict[str, Any] = {
            "list": [nn.Linear(64, 64, bias=False)],
            "tuple": (nn.Linear(64, 64), 1),
        }
        self.again = self.parts["list"][0]
        self.tail = nn.Sequential(nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x: ps.Tensor) -> ps.Tensor:
        x = self.parts["tuple"][0](self.parts["list"][0](self.first(x)))
        return self.tail(self.again(x))


def test_the_layers_of_a_users_module_are_replaced() -> None:
    ps.random.manual_seed(3)
    net, called = Net(), []
    net.first.register_forward_hook(lambda *_: called.append(1))
    x = ps.random.default_generator.normal((5, 40))
    exact = net(x).numpy()
    assert ps.quantize(net, "int8", group=64) is net
    layers = [module for module in net.modules() if isinstance(module, nn.QuantizedLinear)]
    assert len(layers) == 4
    assert not any(type(module) is nn.Linear for module in net.modules())
    assert net.again is net.parts["list"][0]
    assert (net.parts["tuple"][0].bits, net.parts["tuple"][0].group, net.parts["tuple"][1]) == (8, 64, 1)
    assert np.abs(net(x).numpy() - exact).max() < 0.02 * np.abs(exact).max()
    assert len(called) == 2, "hooks stay"
    assert "QuantizedLinear(in_features=40, out_features=64, bias=True, bits=8, group=64)" in repr(net)
    rows = str(nn.summary(net, x))
    assert "QuantizedLinear" in rows
    again = ps.quantize(net, "int4")
    assert next(module for module in again.modules() if isinstance(module, nn.QuantizedLinear)).bits == 8


def test_copies_files_and_moves_keep_the_integers(tmp_path: Path) -> None:
    net = ps.quantize(Net(), "int4")
    x = ps.random.default_generator.normal((3, 40))
    wanted = net(x).numpy()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        np.testing.assert_array_equal(other(x).numpy(), wanted)
    ps.save(net, tmp_path / "net.safetensors")
    fresh = ps.quantize(Net(), "int4")
    fresh.load_state_dict(ps.load(tmp_path / "net.safetensors"))
    np.testing.assert_array_equal(fresh(x).numpy(), wanted)
    with pytest.raises(KeyError, match="packed"):
        Net().load_state_dict(ps.load(tmp_path / "net.safetensors"))
    state = net.state_dict()
    assert state["first.packed"].dtype == np.uint32
    moved = net.to("host")
    np.testing.assert_allclose(moved(x.to_device("host")).numpy(), wanted, rtol=1e-4, atol=1e-5)
    moved.bfloat16()
    assert (moved.first.packed.dtype, moved.first.scales.dtype) == (ps.uint32, ps.bfloat16)
    assert moved.first(ps.ones((1, 40), dtype="bfloat16", device="host")).dtype == ps.bfloat16


def test_gradients_pass_to_the_input_and_never_to_the_weight() -> None:
    layer = ps.quantize(nn.Linear(96, 10), "int4")
    for rows in (2, 30):
        x = ps.random.default_generator.normal((rows, 96))
        slope = ps.random.default_generator.normal((rows, 10))
        gradient = ps.grad(lambda x, slope=slope: (layer(x) * slope).sum())(x).numpy()
        wanted = slope.numpy().astype(np.float64) @ layer.weight.numpy().astype(np.float64)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    with pytest.raises(TypeError, match="gradients are for floating point"):
        layer.packed.requires_grad_()
    layer.scales.requires_grad_()
    with pytest.raises(TypeError, match="a quantized weight is not trained: integers have no gradient"):
        layer(ps.ones((2, 96)))


def test_an_adapter_beside_a_quantized_layer_is_trained() -> None:
    ps.random.manual_seed(5)
    base = ps.quantize(nn.Linear(64, 64), "int4")
    down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
    optimizer = ps.optim.Adam([*down.parameters(), *up.parameters()], lr=0.02)
    x, target = (ps.random.default_generator.normal((32, 64)) for _ in range(2))
    before = base.state_dict()

    @ps.jit
    def step(x: ps.Tensor) -> ps.Tensor:
        loss = ((base(base(x)) + up(down(x)) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(x).item() for _ in range(40)]
    assert losses[-1] < 0.9 * losses[0]
    for name, array in base.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_weight_that_is_only_looked_at_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ps.quantize(nn.Linear(64, 64), "int8")
    monkeypatch.setattr(core, "MAX_PENDING_BYTES", 1)
    weight = layer.weight
    assert (weight.shape, weight.dtype) == ((64, 64), ps.float32)
    assert weight._node.value is None
    assert (weight + 1)._node.value is not None, "as anything else of that size"


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes 'int4' or 'int8' and groups of 32 or 64, and 'int2' and 32"):
        ps.quantize(nn.Linear(4, 4), "int2")
    with pytest.raises(ValueError, match="'int4' and 48 were given"):
        ps.quantize(nn.Linear(4, 4), "int4", group=48)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        nn.QuantizedLinear(4, 4, bits=5)
    layer = nn.Linear(4, 4, device="host")
    layer.weight = nn.Parameter(ps.asarray(np.full((4, 4), np.inf, np.float32), device="host"))
    with pytest.raises(ValueError, match=r"shape \(4, 4\) is not finite, or too large for float32"):
        ps.quantize(layer, "int8")


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_is_quantized_saved_and_loaded(tied: bool, tmp_path: Path) -> None:
    ps.random.manual_seed(4)
    model = ps.models.build({**LLAMA, "tie_word_embeddings": tied}, device="host")
    prompt = [3, 1, 4, 1, 5, 9]
    before = model.generate(prompt, 4, temperature=0).ids  # with programs of the weights before
    ids = ps.asarray(np.arange(40)[None], device="host")
    exact, quantized = copy.deepcopy(model), ps.quantize(copy.deepcopy(model), "int4")
    ps.quantize(model, "int4")
    assert isinstance(model.lm_head, nn.QuantizedLinear)
    assert model.embed_tokens.weight.dtype == ps.float32  # type: ignore[attr-defined]
    result = model(ids).numpy()
    for path, layer in exact.named_modules():
        if isinstance(layer, nn.Linear) and path != "lm_head":
            layer.weight = nn.Parameter(model.get_submodule(path).weight)  # type: ignore[attr-defined]
    rows = exact.features(ids)[0] @ model.lm_head.weight.T
    np.testing.assert_allclose(result[0], rows.numpy(), rtol=1e-3, atol=1e-3)
    after = model.generate(prompt, 8, temperature=0).ids
    assert after == quantized.generate(prompt, 8, temperature=0).ids
    assert len(before) == 4
    model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["weights"]["model.layers.1.mlp.up_proj"] == [4, 32]
    loaded = ps.models.load(tmp_path, device="host")
    np.testing.assert_array_equal(loaded(ids).numpy(), result)
    assert loaded.generate(prompt, 8, temperature=0).ids == after
    half = ps.models.load(tmp_path, device="host", dtype="bfloat16")
    assert half.head_weight.dtype == ps.bfloat16
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quant_method is 'gptq', and only folders"):
        ps.models.load(tmp_path, device="host")
    config["quantization_config"] = {"quant_method": "penstock", "weights": {"lm_head": [3, 32]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="integers have 4 or 8 bits"):
        ps.models.load(tmp_path, device="host")
    with pytest.raises(ValueError, match="quantized=True is for GGUF files"):
        ps.models.load(tmp_path, quantized=True)


def test_a_gpt_without_biases_is_loaded_with_zeros(tmp_path: Path) -> None:
    model = nn.GPT(40, context=16, width=32, layers=1, heads=2, bias=False, device="host")
    ids = ps.asarray(np.arange(10)[None], device="host")
    result = ps.quantize(model, "int8")(ids).numpy()
    model.save(tmp_path)
    np.testing.assert_allclose(ps.models.load(tmp_path, device="host")(ids).numpy(), result, atol=1e-5)


def trained(steps: int) -> tuple[ps.models.LanguageModel, npt.NDArray[np.int64]]:
    """A small model that knows a text well, and the text."""
    ps.random.manual_seed(6)
    model = ps.models.build({**LLAMA, "num_hidden_layers": 1, "initializer_range": 0.1})
    text = np.tile(np.random.default_rng(7).integers(0, 64, 48), 12)
    optimizer = ps.optim.AdamW(model.parameters(), lr=3e-3)
    inputs, targets = (ps.asarray(text[at : at + 512].reshape(16, 32)) for at in (0, 1))

    @ps.jit
    def step() -> ps.Tensor:
        loss = model.loss(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(steps):
        step()
    return model, text


@pytest.mark.slow
def test_the_perplexity_of_a_trained_model_changes_little() -> None:
    model, text = trained(30)
    exact = ps.models.evaluate(model, text, context=32)
    assert exact.perplexity < 4, "it has learned the text"
    for dtype, most in (("int8", 0.01), ("int4", 0.25)):
        result = ps.models.evaluate(ps.quantize(copy.deepcopy(model), dtype), text, context=32)
        assert math.log(result.perplexity / exact.perplexity) < most, dtype


def test_only_packed_products_compute_their_row() -> None:
    """Anything may read a vector: here a border, which has a single input."""
    vector = placeholder((4,), float64)
    assert not computes_row(pad(vector, ((2, 4, 1),), (8,)), ps.devices()[0].capabilities)
