"""Models in ONNX's format: the format's own node tests, whole models, training, and what is refused."""

from __future__ import annotations

import copy
import pickle
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import DRIVERS, SMALL, WEBGPU_KINDS, examples, one_opencl
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import penstock as ps
from penstock.errors import CaptureError, OnnxError, UnsupportedModel
from penstock.runtime import Device

NODES = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "onnx_nodes.py"))

# Why node tests are refused. Whatever else is refused, or is wrong, fails.
REFUSED = (
    "dtype float8",
    "dtype float4",
    "dtype int2",
    "dtype int4",
    "dtype uint2",
    "dtype uint4",
    "dtype string",
    "type optional",
    "type sequence",
    "operator ai.onnx.ml.",
    "operator ai.onnx.preview.training.",
    "operator BitCast",
    "operator CausalConvWithState without some inputs",
    "operator DeformConv",
    "operator ImageDecoder",
    "operator LinearAttention without some inputs",
    "operator MelWeightMatrix",
    "operator Optional",
    "operator RegexFullMatch",
    "operator RoiAlign",
    "operator Scan",  # of opset 8
    "operator Sequence",
    "operator SplitToSequence",
    "operator String",
    "operator TfIdfVectorizer",
    "ScatterElements: reduction m",
    "ScatterND: reduction m",
)


@cache
def node_tests() -> list[Any]:
    return list(NODES["cases"]())


def check_nodes(cases: list[Any], device: Device) -> None:
    passed = 0
    for case in cases:
        try:
            reason = NODES["check"](case, device)
        except Exception as error:
            raise AssertionError(f"{case.name} is neither right nor refused: {error}") from error
        assert reason is None or reason.startswith(REFUSED), f"{case.name} is refused: {reason}"
        passed += reason is None
    assert passed > len(cases) * 3 // 4


KINDS = ["host", "opencl-svm" if "opencl-svm" in DRIVERS else "opencl-mapped"]


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("kind", [*KINDS, *WEBGPU_KINDS])
def test_node_tests_pass_or_are_refused(kind: str) -> None:
    """In the whole suite all of them on the host, and an eighth of them on OpenCL."""
    device = Device.over(DRIVERS[kind](), SMALL)
    steps = {"host": examples(1, quick=10), KINDS[1]: examples(8, quick=40)}
    check_nodes(node_tests()[:: steps.get(kind, 20)], device)
    device.close()


# Whole models


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any] | None]],
    outputs: list[str],
    initializers: dict[str, np.ndarray] | None = None,
    opset: int = 18,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_value_info(name, onnx.TypeProto()) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()],
    )
    bare = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(bare)


def residual_network() -> onnx.ModelProto:
    """A stem, a block with a shortcut, and a head, as exporters write a ResNet."""
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    weights: dict[str, np.ndarray] = {"stem.weight": drawn(6, 3, 3, 3), "short.weight": drawn(8, 6, 1, 1)}
    weights |= {"conv1.weight": drawn(8, 6, 3, 3), "conv2.weight": drawn(8, 8, 3, 3)}
    weights |= {"head.weight": drawn(5, 8), "head.bias": drawn(5, 1)[:, 0]}
    for name, channels in (("stem", 6), ("conv1", 8), ("conv2", 8)):
        scale, shift, mean, var = drawn(4, channels)
        weights |= {f"{name}.scale": 1 + scale, f"{name}.shift": shift}
        weights |= {f"{name}.mean": mean, f"{name}.var": 1 + var**2}

    def conv(x: str, name: str, kernel: int, stride: int) -> onnx.NodeProto:
        pads = [kernel // 2] * 4
        return helper.make_node("Conv", [x, f"{name}.weight"], [name], pads=pads, strides=[stride] * 2)

    def norm(name: str) -> onnx.NodeProto:
        rest = [f"{name}.{part}" for part in ("scale", "shift", "mean", "var")]
        return helper.make_node("BatchNormalization", [name, *rest], [f"{name}.out"])

    nodes = [
        *(conv("x", "stem", 3, 1), norm("stem"), helper.make_node("Relu", ["stem.out"], ["a"])),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        *(conv("b", "conv1", 3, 2), norm("conv1"), helper.make_node("Relu", ["conv1.out"], ["c"])),
        *(conv("c", "conv2", 3, 1), norm("conv2"), conv("b", "short", 1, 2)),
        helper.make_node("Add", ["conv2.out", "short"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "head.weight", "head.bias"], ["y"], transB=1),
    ]
    return model_of(nodes, {"x": (TensorProto.FLOAT, ["batch", 3, 16, 16])}, ["y"], weights)


def transformer() -> onnx.ModelProto:
    """A block of attention whose reshapes and positions follow from the shape of its input, as exported."""
    random = np.random.default_rng(1)
    width, heads, words = 8, 2, 11
    sizes = {
        "tokens": (words, width),
        "places": (16, width),
        "qkv": (width, 3 * width),
        "out": (width, width),
    }
    weights = {name: (0.5 * random.standard_normal(s)).astype(np.float32) for name, s in sizes.items()}
    weights |= {"scale": np.linspace(0.5, 1.5, width, dtype=np.float32), "shift": np.zeros(width, np.float32)}
    weights |= {"zero": np.asarray(0), "one": np.asarray(1), "first": np.asarray([0])}
    weights |= {"heads": np.asarray([3, heads, width // heads]), "rest": np.asarray([-1])}
    weights |= {
        "never": np.asarray(-np.inf, np.float32),
        "root": np.asarray((width // heads) ** 0.5, np.float32),
    }
    node = helper.make_node
    nodes = [
        node("Gather", ["tokens", "ids"], ["embedded"]),
        node("Shape", ["ids"], ["shape"]),
        node("Gather", ["shape", "one"], ["time"]),
        node("Range", ["zero", "time", "one"], ["steps"]),
        node("Gather", ["places", "steps"], ["at"]),
        node("Add", ["embedded", "at"], ["x"]),
        node("LayerNormalization", ["x", "scale", "shift"], ["normed"], axis=-1),
        node("MatMul", ["normed", "qkv"], ["all"]),
        node("Concat", ["shape", "heads"], ["by_head"], axis=0),
        node("Reshape", ["all", "by_head"], ["split"]),
        node("Transpose", ["split"], ["turned"], perm=[2, 0, 3, 1, 4]),
        node("Split", ["turned"], ["q1", "k1", "v1"], axis=0, num_outputs=3),
        *(node("Squeeze", [f"{n}1", "first"], [n]) for n in "qkv"),
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["raw"]),
        node("Div", ["raw", "root"], ["scores"]),
        node("Unsqueeze", ["steps", "one1"], ["rows"]),
        node("Less", ["rows", "steps"], ["later"]),
        node("Where", ["later", "never", "scores"], ["masked"]),
        node("Softmax", ["masked"], ["shares"], axis=-1),
        node("MatMul", ["shares", "v"], ["mixed"]),
        node("Transpose", ["mixed"], ["back"], perm=[0, 2, 1, 3]),
        node("Concat", ["shape", "rest"], ["flat"], axis=0),
        node("Reshape", ["back", "flat"], ["joined"]),
        node("MatMul", ["joined", "out"], ["y"]),
    ]
    weights["one1"] = np.asarray([1])
    return model_of(nodes, {"ids": (TensorProto.INT64, ["batch", "time"])}, ["y"], weights)


def check_against_reference(made: onnx.ModelProto, device: Device, *inputs: np.ndarray) -> ps.nn.Module:
    """Outside jit and inside."""
    model = ps.onnx.load(made, device=device)
    names = [value.name for value in made.graph.input]
    [wanted] = ReferenceEvaluator(made).run(None, dict(zip(names, inputs, strict=True)))
    tensors = [ps.asarray(array, device=device) for array in inputs]
    np.testing.assert_allclose(model(*tensors).numpy(), wanted, rtol=1e-4, atol=1e-5)
    jitted = ps.jit(lambda *given: model(*given))
    np.testing.assert_allclose(jitted(*tensors).numpy(), wanted, rtol=1e-4, atol=1e-5)
    return model


@one_opencl
def test_a_residual_network_gives_what_the_reference_gives(device: Device) -> None:
    images = np.random.default_rng(2).standard_normal((2, 3, 16, 16)).astype(np.float32)
    model = check_against_reference(residual_network(), device, images)
    assert "stem.weight" in dict(model.named_parameters())
    assert "stem.mean" in dict(model.named_buffers())  # measured, and not trained


@one_opencl
def test_a_transformer_gives_what_the_reference_gives_for_any_shape(device: Device) -> None:
    random = np.random.default_rng(3)
    for shape in ((2, 5), (1, 9)):
        check_against_reference(transformer(), device, random.integers(0, 11, shape))


def test_a_control_flow_that_the_host_knows_is_unrolled() -> None:
    node = helper.make_node
    value = helper.make_tensor_value_info
    number = (TensorProto.FLOAT, [])
    then = helper.make_graph([node("Exp", ["last"], ["r"])], "then", [], [value("r", *number)])
    other = helper.make_graph([node("Neg", ["last"], ["r"])], "else", [], [value("r", *number)])
    half = numpy_helper.from_array(np.asarray(0.5, np.float32), "half")
    body = helper.make_graph(
        [
            node("Mul", ["v", "half"], ["v2"]),
            node("Identity", ["c"], ["c2"]),
            node("Identity", ["v2"], ["kept"]),
        ],
        "body",
        [value("i", TensorProto.INT64, []), value("c", TensorProto.BOOL, []), value("v", *number)],
        [value("c2", TensorProto.BOOL, []), value("v2", *number), value("kept", *number)],
        [half],
    )
    nodes = [
        node("Loop", ["count", "", "x"], ["last", "all"], body=body),
        node("Size", ["all"], ["size"]),
        node("Equal", ["size", "three"], ["is_three"]),
        node("If", ["is_three"], ["y"], then_branch=then, else_branch=other),
    ]
    initial = {"count": np.asarray(3), "three": np.asarray(3)}
    made = model_of(nodes, {"x": number}, ["y", "all"], initial)
    model = ps.onnx.load(made)
    y, kept = ps.jit(lambda x: model(x))(ps.asarray(np.float32(8)))
    assert kept.tolist() == [4, 2, 1]
    assert y.item() == pytest.approx(np.exp(1), rel=1e-6)
    assert [name for name, _ in model.named_parameters()] == ["last.body.half"]


# Modules


def small(dtype: Any = np.float64) -> onnx.ModelProto:
    """Two layers with a norm between them."""
    random = np.random.default_rng(4)
    weights = {"w": random.standard_normal((3, 4)), "b": random.standard_normal(4)}
    weights |= {"scale": 1 + 0.1 * random.standard_normal(4), "v": random.standard_normal((4, 2))}
    node = helper.make_node
    nodes = [
        node("Gemm", ["x", "w", "b"], ["h"]),
        node("LayerNormalization", ["h", "scale"], ["n"], axis=-1, epsilon=1e-3),
        node("Tanh", ["n"], ["t"]),
        node("MatMul", ["t", "v"], ["y"]),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    arrays = {name: array.astype(dtype) for name, array in weights.items()}
    return model_of(nodes, {"x": (kind, ["batch", 3])}, ["y"], arrays)


def test_gradients_pass_a_loaded_model() -> None:
    made = small()
    model = ps.onnx.load(made, device="host")
    x = np.random.default_rng(5).standard_normal((5, 3))
    ps.sum(model(ps.asarray(x, device="host")) ** 2).backward()

    def loss(name: str, array: np.ndarray) -> float:
        moved = copy.deepcopy(made)
        for tensor in moved.graph.initializer:
            if tensor.name == name:
                tensor.CopyFrom(numpy_helper.from_array(array, name))
        [y] = ReferenceEvaluator(moved).run(None, {"x": x})
        return float(np.sum(y**2))

    for name, parameter in model.named_parameters():
        value, slope = parameter.numpy(), np.zeros(parameter.shape)
        for index in np.ndindex(value.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = value.copy()
                moved[index] += step
                ends.append(loss(name, moved))
            slope[index] = (ends[0] - ends[1]) / 2e-5
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.numpy(), slope, rtol=1e-5, atol=1e-6)


@one_opencl
def test_a_loaded_model_is_trained_by_a_jitted_step(device: Device) -> None:
    model = ps.onnx.load(small(np.float32), device=device)
    model.get_parameter("v").requires_grad_(False)
    before = model.state_dict()
    optimizer = ps.optim.Adam(model.parameters(), lr=3e-2)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = ps.mean((model(x) - y) ** 2)
        loss.backward()
        optimizer.step()
        return loss

    random = np.random.default_rng(6)
    x = ps.asarray(random.standard_normal((16, 3)).astype(np.float32), device=device)
    y = ps.asarray(random.standard_normal((16, 2)).astype(np.float32), device=device)
    losses = [step(x, y).item() for _ in range(40)]
    assert losses[-1] < 0.7 * losses[0]
    after = model.state_dict()
    assert np.array_equal(before["v"], after["v"])
    assert not np.array_equal(before["w"], after["w"])


def test_the_state_goes_out_and_in() -> None:
    first, second = ps.onnx.load(small(), device="host"), ps.onnx.load(small(), device="host")
    x = ps.asarray(np.ones((2, 3)), device="host")
    with ps.no_grad():
        for _, parameter in first.named_parameters():
            parameter += 1
    assert set(first.state_dict()) == {"w", "b", "scale", "v"}
    assert not np.array_equal(first(x).numpy(), second(x).numpy())
    second.load_state_dict(first.state_dict())
    for other in (second, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert np.array_equal(first(x).numpy(), other(x).numpy())


def test_inputs_are_given_by_position_or_by_name(tmp_path: Path) -> None:
    made = model_of(
        [helper.make_node("Sub", ["a", "b"], ["y"]), helper.make_node("Identity", ["a"], ["z"])],
        {"a": (TensorProto.FLOAT, ["n"]), "b": (TensorProto.FLOAT, ["n"])},
        ["y", "z"],
    )
    path = tmp_path / "model.onnx"
    onnx.save(made, path)
    for source in (made, made.SerializeToString(), path, str(path)):
        model = ps.onnx.load(source)
        y, z = model([3, 4], b=np.asarray([1, 1], np.float32))
        assert y.tolist() == [2, 3]
        assert z.tolist() == [3, 4]
    assert "a: float32[n], b: float32[n] -> y, z" in repr(model)
    moved = model.to("host")
    assert moved([1], [1])[0].tolist() == [0]


def test_a_shape_may_be_an_input() -> None:
    made = model_of(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        {"x": (TensorProto.FLOAT, [None]), "shape": (TensorProto.INT64, [2])},
        ["y"],
    )
    model, x = ps.onnx.load(made), ps.arange(6.0, dtype=ps.float32)
    assert model(x, ps.asarray([2, 3])).shape == (2, 3)
    jitted = ps.jit(lambda x, shape: model(x, shape))
    assert jitted(x, (3, -1)).shape == (3, 2)
    assert jitted(x, (6, 1)).shape == (6, 1)
    with pytest.raises(CaptureError, match=r"Reshape \(opset 18\).*'shape'.*Python numbers"):
        jitted(x, ps.asarray([2, 3]))


# What is refused


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ps.onnx.load(tmp_path / "nowhere.onnx")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(small().SerializeToString()[:-20])
    with pytest.raises(OnnxError, match=r"broken\.onnx"):
        ps.onnx.load(broken)
    with pytest.raises(OnnxError):
        ps.onnx.load(b"no model")
    with pytest.raises(OnnxError, match="not valid"):
        ps.onnx.load(b"")
    with pytest.raises(TypeError, match="int was given"):
        ps.onnx.load(3)  # type: ignore[arg-type]


def test_operators_that_are_not_computed_are_named() -> None:
    floats = (TensorProto.FLOAT, [2])
    strange = helper.make_node("Strange", ["x"], ["y"], domain="com.example")
    graph = helper.make_graph(
        [strange],
        "graph",
        [helper.make_tensor_value_info("x", *floats)],
        [helper.make_tensor_value_info("y", *floats)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.example", 2)]
    with pytest.raises(UnsupportedModel, match=r"com\.example\.Strange \(opset 2\)"):
        ps.onnx.load(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    old = model_of([helper.make_node("Add", ["x", "x"], ["y"])], {"x": floats}, ["y"], opset=6)
    with pytest.raises(UnsupportedModel, match=r"Add \(opset 6, supported since 7\)"):
        ps.onnx.load(old)


def test_dtypes_and_attributes_that_are_not_computed_are_named() -> None:
    words = model_of([helper.make_node("Identity", ["x"], ["y"])], {"x": (TensorProto.STRING, [2])}, ["y"])
    with pytest.raises(UnsupportedModel, match="input 'x' is of string"):
        ps.onnx.load(words)
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E5M2)
    eights = ps.onnx.load(model_of([cast], {"x": (TensorProto.FLOAT, [2])}, ["y"], opset=19))
    with pytest.raises(UnsupportedModel, match="float8e5m2") as raised:
        eights(ps.zeros(2))
    assert raised.value.reason == "dtype float8e5m2"


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "words"),
    [
        ((), {}, TypeError, "inputs x were not given"),
        ((np.zeros((2, 3)), 1), {}, TypeError, r"1 inputs \(x\), and 2 were given"),
        ((), {"z": np.zeros((2, 3))}, TypeError, "no input 'z'; it has x"),
        ((np.zeros((2, 3)),), {"x": np.zeros((2, 3))}, TypeError, "given twice"),
        ((np.zeros((2, 4)),), {}, ValueError, r"x: float64\[batch, 3\] was given the shape \(2, 4\)"),
        ((np.zeros(3),), {}, ValueError, r"the shape \(3,\)"),
        ((np.zeros((2, 3), np.float32),), {}, TypeError, "is of float64, and float32 was given"),
        (("text",), {}, TypeError, "input 'x' is a tensor"),
    ],
)
def test_wrong_inputs(args: Any, kwargs: Any, error: type[Exception], words: str) -> None:
    model = ps.onnx.load(small(), device="host")
    with pytest.raises(error, match=words):
        model(*args, **kwargs)


def test_lengths_of_one_name_are_the_same() -> None:
    made = model_of(
        [helper.make_node("Concat", ["a", "b"], ["y"], axis=0)],
        {"a": (TensorProto.FLOAT, ["n"]), "b": (TensorProto.FLOAT, ["n"])},
        ["y"],
    )
    with pytest.raises(ValueError, match="'n' is 2 in input 'a' and 3 in 'b'"):
        ps.onnx.load(made)(ps.zeros(2), ps.zeros(3))


def test_the_package_is_imported_only_where_it_is_needed() -> None:
    code = "import sys, penstock as ps; ps.onnx; assert 'onnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'penstock\[onnx\]'"):
        ps.onnx.load("model.onnx")
