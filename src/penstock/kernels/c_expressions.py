"""What each elementwise primitive is in C, and which dtypes it can have there."""

from __future__ import annotations

import numpy as np

from penstock.device.driver import Capabilities
from penstock.fusion.groups import VIEWS
from penstock.graph.creating import SEQUENCE
from penstock.graph.elementwise import CAST, FULL
from penstock.graph.node import DType, Node

C_TYPES = {"bool": "uchar", "int32": "int", "int64": "long", "float32": "float", "float64": "double"}

# {0}, {1} and {2} are the inputs, {type} the type of the result.
_ANY = {
    "add": "({0} + {1})",
    "subtract": "({0} - {1})",
    "multiply": "({0} * {1})",
    "negative": "(-{0})",
    "positive": "({0})",
    "stop": "({0})",
    "equal": "({0} == {1})",
    "not_equal": "({0} != {1})",
    "less": "({0} < {1})",
    "less_equal": "({0} <= {1})",
    "greater": "({0} > {1})",
    "greater_equal": "({0} >= {1})",
    "where": "({0} ? {1} : {2})",
}
_FUNCTIONS = """exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh
atanh floor ceil trunc"""
_FLOAT = {
    "divide": "({0} / {1})",
    "abs": "fabs({0})",
    "sign": "(isnan({0}) ? {0} : ({type})(({0} > 0) - ({0} < 0)))",
    "maximum": "(isnan({0}) || isnan({1}) ? ({type})NAN : fmax({0}, {1}))",
    "minimum": "(isnan({0}) || isnan({1}) ? ({type})NAN : fmin({0}, {1}))",
    "round": "rint({0})",
    "pow": "pow({0}, {1})",
    "isnan": "(isnan({0}) != 0)",
    "isinf": "(isinf({0}) != 0)",
    "isfinite": "(isfinite({0}) != 0)",
} | {name: f"{name}({{0}})" for name in _FUNCTIONS.split()}
_BOOL = {
    "logical_not": "(!{0})",
    "logical_and": "({0} & {1})",
    "logical_or": "({0} | {1})",
    "logical_xor": "({0} ^ {1})",
}
# On truth values, NumPy's sums and products are "or" and "and".
_BOOL_ARITHMETIC = {"add": "({0} | {1})", "multiply": "({0} & {1})"}


# For vectors, whose comparisons give masks of all bits.
_VECTOR = {
    "sign": "select(sign({0}), {0}, isnan({0}))",
    "maximum": "select(fmax({0}, {1}), ({type})(NAN), isnan({0}) | isnan({1}))",
    "minimum": "select(fmin({0}, {1}), ({type})(NAN), isnan({0}) | isnan({1}))",
}


def vector_template(node: Node) -> str | None:
    """The C expression of a float32 node on vectors of float; None if it has none there."""
    name = node.primitive.name
    if any(part.dtype != np.float32 for part in (node, *node.inputs)):
        return None
    return _VECTOR.get(name) or _ANY.get(name) or _FLOAT.get(name)


def template(node: Node) -> str | None:
    """The C expression of an elementwise node; None if it has none there."""
    name, kind = node.primitive.name, node.inputs[-1].dtype.kind if node.inputs else node.dtype.kind
    if kind == "b":
        return (
            _BOOL.get(name)
            or _BOOL_ARITHMETIC.get(name)
            or (_ANY.get(name) if name not in ("subtract", "negative") else None)
        )
    return _ANY.get(name) or (_FLOAT.get(name) if kind == "f" else None)


def renders(node: Node, capabilities: Capabilities) -> bool:
    """Whether a kernel on a device with these capabilities can hold the node."""
    dtypes = {node.dtype, *(parent.dtype for parent in node.inputs)}
    if not all(_has(dtype, capabilities) for dtype in dtypes) or node.size >= 1 << 31:
        return False
    if node.primitive is CAST:
        return node.inputs[0].dtype.kind != "f" or node.dtype.kind == "f"  # out of range, C leaves it open
    return node.primitive in VIEWS or node.primitive in (FULL, SEQUENCE) or template(node) is not None


def _has(dtype: DType, capabilities: Capabilities) -> bool:
    return str(dtype) in C_TYPES and (str(dtype) != "float64" or capabilities.float64)
