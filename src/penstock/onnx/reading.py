"""From a file, bytes or a ModelProto to a graph of nodes that Penstock computes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, inliner

from penstock.errors import OnnxError, UnsupportedModel
from penstock.onnx import operators  # noqa: F401 - registers them
from penstock.onnx.dtypes import array_of, dtype_of
from penstock.onnx.graph import Graph, Step, used_names
from penstock.onnx.registry import Node, choose, oldest

NEWEST = 28  # the opset whose node tests the operators pass; a later one may mean other things by a name
Arrays = dict[str, npt.NDArray[Any]]
_SAME = {"ai.onnx": ""}  # two names of one domain


@dataclass(frozen=True)
class Input:
    """What a model says of an input: each length is a number, a name that stands for it, or not known."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class Read:
    """A model as it was read."""

    graph: Graph
    inputs: tuple[Input, ...]
    initializers: Arrays  # by name, also those of inner graphs


def read(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> Read:
    """The graph of a model, in which every operator is one that Penstock computes."""
    model = _parsed(source)
    try:
        # Of a file that it can be read from, since a model of more than 2 GiB has no bytes of its own.
        onnx.checker.check_model(os.fspath(source) if isinstance(source, (str, os.PathLike)) else model)
    except onnx.checker.ValidationError as error:
        raise OnnxError(f"the model is not valid: {error}") from error
    opsets = _opsets(model.opset_import)
    model = _inlined(model, opsets)
    _refuse_unknown(model.graph, opsets)
    reader = _Reader(opsets)
    inputs = tuple(
        _input(value) for value in model.graph.input if value.name not in _initialized(model.graph)
    )
    for value in model.graph.output:
        _tensor_type(value, "output")
    return Read(reader.graph(model.graph, ""), inputs, reader.initializers)


def _parsed(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> onnx.ModelProto:
    if isinstance(source, onnx.ModelProto):
        return source
    if not isinstance(source, (str, os.PathLike, bytes, bytearray)):
        raise TypeError(f"a path, bytes or a ModelProto is loaded, and {type(source).__name__} was given")
    try:
        if isinstance(source, (bytes, bytearray)):
            return onnx.load_model_from_string(bytes(source))
        return onnx.load_model(Path(source))
    except DecodeError as error:
        what = "these bytes" if isinstance(source, (bytes, bytearray)) else f"{os.fspath(source)!r}"
        raise OnnxError(f"{what} cannot be read as an ONNX model: {error}") from error
    except onnx.checker.ValidationError as error:  # of tensors in files of their own
        raise OnnxError(f"{source!r} cannot be read: {error}") from error


def _opsets(imported: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    opsets = {_SAME.get(entry.domain, entry.domain): entry.version for entry in imported}
    if opsets.get("", 0) > NEWEST:
        raise UnsupportedModel(
            f"the model is made for opset {opsets['']}, and Penstock knows those up to {NEWEST}; export it "
            f"with opset_version={NEWEST}, or convert it with onnx.version_converter",
            reason="opset",
        )
    return opsets


def _inlined(model: onnx.ModelProto, opsets: Mapping[str, int]) -> onnx.ModelProto:
    """Without the model's own functions, and those operators that ONNX says how to compute by others."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    unknown = {
        (node.domain, node.op_type)
        for node in _nodes(model.graph)
        if choose(_SAME.get(node.domain, node.domain), node.op_type, opsets.get(node.domain, 1)) is None
    }
    schemas = {key: schema for key in unknown if (schema := _function(*key, opsets)) is not None}
    if not schemas:
        return model
    model = _with_defaults(model, schemas)
    try:
        return inliner.inline_selected_functions(model, sorted(schemas), inline_schema_functions=True)
    except RuntimeError as error:  # inputs that are left out, whose type the inliner asks for
        names = ", ".join(name for _, name in sorted(schemas))
        raise UnsupportedModel(
            f"ONNX's inliner cannot write {names} as other operators ({error}); give all optional inputs",
            reason=f"operator {names} without some inputs",
        ) from error


def _function(domain: str, name: str, opsets: Mapping[str, int]) -> Any:
    """The schema of an operator that ONNX writes as others; None for any other."""
    try:
        schema: Any = onnx.defs.get_schema(name, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def _with_defaults(model: onnx.ModelProto, schemas: Mapping[tuple[str, str], Any]) -> onnx.ModelProto:
    """A copy in which attributes that were left out have their defaults, which the inliner does not know."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in _nodes(copy.graph):
        schema = schemas.get((node.domain, node.op_type))
        given = {attribute.name for attribute in node.attribute}
        for name, attribute in schema.attributes.items() if schema else ():
            if name not in given and attribute.default_value.name:
                node.attribute.append(attribute.default_value)
    return copy


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, also those of inner graphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)


def _refuse_unknown(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> None:
    """An error with every operator that is not computed."""
    unknown: dict[str, str] = {}
    for node in _nodes(graph):
        domain = _SAME.get(node.domain, node.domain)
        opset = opsets.get(domain, 1)
        if choose(domain, node.op_type, opset) is None:
            name = f"{domain}.{node.op_type}" if domain else node.op_type
            since = oldest(domain, node.op_type)
            unknown[name] = f"{name} (opset {opset}" + (f", supported since {since})" if since else ")")
    if unknown:
        raise UnsupportedModel(
            f"the model has operators that Penstock does not compute: {', '.join(unknown.values())}; "
            f"docs/onnx.md lists those that it does, and onnx.version_converter changes a model's opset",
            reason=f"operator {next(iter(unknown))}",
        )


def _initialized(graph: onnx.GraphProto) -> set[str]:
    return {tensor.name for tensor in graph.initializer}


def _input(value: onnx.ValueInfoProto) -> Input:
    kind = _tensor_type(value, "input")
    dtype = dtype_of(kind.elem_type, f"input {value.name!r}")
    if not kind.HasField("shape"):
        return Input(value.name, dtype, None)
    lengths = (
        entry.dim_value if entry.HasField("dim_value") else entry.dim_param or None
        for entry in kind.shape.dim
    )
    return Input(value.name, dtype, tuple(lengths))


def _tensor_type(value: onnx.ValueInfoProto, what: str) -> onnx.TypeProto.Tensor:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        name = str(kind).removesuffix("_type").replace("_", " ")
        raise UnsupportedModel(
            f"{what} {value.name!r} is of the type {name}; Penstock computes with tensors",
            reason=f"type {name}",
        )
    if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
        dtype_of(value.type.tensor_type.elem_type, f"{what} {value.name!r}")
    return value.type.tensor_type


class _Reader:
    """Turns graphs into steps, and gathers their initializers."""

    def __init__(self, opsets: Mapping[str, int]) -> None:
        self.opsets = opsets
        self.initializers: Arrays = {}

    def graph(self, proto: onnx.GraphProto, prefix: str) -> Graph:
        """A graph; `prefix` tells the initializers of an inner one from those of others."""
        if proto.sparse_initializer:
            raise UnsupportedModel(
                "the model has sparse initializers; Penstock has dense tensors", reason="sparse tensors"
            )
        renamed = {tensor.name: prefix + tensor.name for tensor in proto.initializer}
        for tensor in proto.initializer:
            self.initializers[renamed[tensor.name]] = array_of(tensor, f"initializer {tensor.name!r}")
        nodes = [self.node(node, renamed) for node in proto.node]
        inputs = [value.name for value in proto.input if value.name not in renamed]
        outputs = [renamed.get(value.name, value.name) for value in proto.output]
        return Graph(tuple(inputs), tuple(outputs), _steps(nodes, outputs))

    def node(self, node: onnx.NodeProto, renamed: Mapping[str, str]) -> Node:
        domain = _SAME.get(node.domain, node.domain)
        where = node.name or next(filter(None, node.output), node.op_type)
        attributes = {
            entry.name: self.attribute(entry, f"{where}.{entry.name}", renamed) for entry in node.attribute
        }
        return Node(
            domain,
            node.op_type,
            self.opsets.get(domain, 1),
            node.name,
            attributes,
            tuple(renamed.get(name, name) for name in node.input),
            tuple(node.output),
        )

    def attribute(self, entry: onnx.AttributeProto, where: str, renamed: Mapping[str, str]) -> Any:
        value = helper.get_attribute_value(entry)
        if isinstance(value, onnx.GraphProto):
            return _with_names(self.graph(value, f"{where}."), renamed)
        if isinstance(value, onnx.TensorProto):
            return array_of(value, where)
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if isinstance(value, (onnx.SparseTensorProto, onnx.TypeProto)):
            return value
        return list(value) if not isinstance(value, (int, float)) else value


def _with_names(graph: Graph, renamed: Mapping[str, str]) -> Graph:
    """An inner graph that reads initializers of the outer one by the names that they have there."""
    if all(name == other for name, other in renamed.items()):
        return graph
    nodes = []
    for step in graph.steps:
        attributes = {
            name: _with_names(value, renamed) if isinstance(value, Graph) else value
            for name, value in step.node.attributes.items()
        }
        inputs = tuple(renamed.get(name, name) for name in step.node.inputs)
        nodes.append(replace(step.node, inputs=inputs, attributes=attributes))
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    return replace(graph, outputs=outputs, steps=_steps(nodes, outputs))


def _steps(nodes: list[Node], outputs: Iterable[str]) -> tuple[Step, ...]:
    """The nodes, each with what is not used after it. What the nodes do not make is not theirs to release."""
    kept = set(outputs)
    steps = []
    for node in reversed(nodes):
        used = {*used_names(node), *filter(None, node.outputs)}
        steps.append((node, used - kept))
        kept |= used
    made = {name for node in nodes for name in node.outputs}
    return tuple(Step(node, tuple(sorted(last & made))) for node, last in reversed(steps))
