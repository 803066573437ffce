"""What each primitive is in C, on single values and on vectors, and which dtypes it can have there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.kernels import ir
from penstock.kernels.source import C_TYPES

# {0}, {1} and {2} are the inputs, {T} their type, {U} the same without a sign.
_COMPARISONS = {
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
# For an extreme: whether a value takes the place of another. A NaN takes that of every number.
_EXTREMES = {"greater_or_nan": (">", "<="), "less_or_nan": ("<", ">=")}
_SAME = {"positive": "({0})", "stop": "({0})"}
_FUNCTIONS = """exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh
atanh floor ceil trunc atan2 hypot copysign nextafter pow"""
_FLOAT = {
    "add": "({0} + {1})",
    "subtract": "({0} - {1})",
    "multiply": "({0} * {1})",
    "divide": "({0} / {1})",
    "negative": "(-{0})",
    "maximum_number": "({0} > {1} ? {0} : {1})",  # where the first is a NaN, the second
    "minimum_number": "({0} < {1} ? {0} : {1})",
    "abs": "fabs({0})",
    "round": "rint({0})",
    "round_bfloat16": "FROM_BFLOAT16(TO_BFLOAT16({0}))",
    "round_float16": "round_half({0})",
}
for _name in _FUNCTIONS.split():
    _FLOAT[_name] = f"{_name}({{0}}, {{1}})" if _name in _FUNCTIONS.split()[-5:] else f"{_name}({{0}})"
# Where tanh is 1 to the last bit; PoCL's stays below.
_TANH_LIMIT = {"float32": "9.1f", "float64": "20.0"}
_FLOAT_SCALAR = {
    "tanh": "({0} > {limit} ? ({T})1 : {0} < -{limit} ? ({T})-1 : tanh({0}))",
    "sign": "(isnan({0}) ? {0} : ({T})(({0} > 0) - ({0} < 0)))",
    "maximum": "(({0} > {1}) | ({0} != {0}) ? {0} : {1})",
    "minimum": "(({0} < {1}) | ({0} != {0}) ? {0} : {1})",
}
_FLOAT_VECTOR = {
    "exp": "exp_8({0})",
    "tanh": "tanh_8({0})",
    "sin": "sin_8({0})",
    "cos": "cos_8({0})",
    "tan": "tan_8({0})",
    "abs": "as_{T}(as_int{width}({0}) & 0x7fffffff)",
    "sign": "({0} > 0 ? ({T})(1) : {0} < 0 ? ({T})(-1) : {0} != {0} ? {0} : ({T})(0))",
    "maximum": "(({0} > {1}) | ({0} != {0}) ? {0} : {1})",
    "minimum": "(({0} < {1}) | ({0} != {0}) ? {0} : {1})",
    "isnan": "({0} != {0})",
    "isinf": "((as_int{width}({0}) & 0x7fffffff) == 0x7f800000)",
    "isfinite": "((as_int{width}({0}) & 0x7f800000) != 0x7f800000)",
    "signbit": "(as_int{width}({0}) < 0)",
    "round_bfloat16": "FROM_BFLOAT16_{width}(TO_BFLOAT16_{width}({0}))",
    "round_float16": "round_half{width}({0})",
}
# For a GPU: in fewer instructions than the compiler would need; see `thread_prelude.py`.
Patterns = Mapping[str, str]
THREAD_PATTERNS: Patterns = {
    "tanh": "tanh_1({0})",
    "maximum": "MAXIMUM({0}, {1})",
    "minimum": "MINIMUM({0}, {1})",
}
QUICK_PATTERNS: Patterns = {
    **THREAD_PATTERNS,
    "exp": "QUICK_EXP({0})",
    "divide": "QUICK_DIVIDE({0}, {1})",
}
_FLOAT_TESTS = ("isnan", "isinf", "isfinite", "signbit")
_WHOLE = {
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "bitwise_invert": "(~{0})",
    "maximum": "({0} > {1} ? {0} : {1})",
    "minimum": "({0} < {1} ? {0} : {1})",
}
# Without a sign, C lets numbers wrap around as NumPy does; with one, it leaves open what happens.
_WRAPPING = {"add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "negative": "0 - {0}"}
_WHOLE_SCALAR = {
    "bitwise_left_shift": "((ulong){1} >= {bits} ? ({T})0 : ({T})(({U}){0} << {1}))",
}
_SIGNED_SCALAR = {
    "bitwise_right_shift": "({0} >> ((ulong){1} >= {bits} ? {bits} - 1 : (int){1}))",
    "abs": "({0} < 0 ? ({T})(0 - ({U}){0}) : {0})",
    "sign": "(({0} > 0) - ({0} < 0))",
    # Division by 0 gives 0, as in NumPy; by -1 it might overflow, which stops a CPU.
    "floor_divide": "({1} == 0 ? ({T})0 : {1} == -1 ? ({T})(0 - ({U}){0}) : "
    "({T})({0} / {1} - ({0} % {1} != 0 && ({0} < 0) != ({1} < 0))))",
    "remainder": "({1} == 0 || {1} == -1 ? ({T})0 : "
    "({T})({0} % {1} + ({0} % {1} != 0 && ({0} < 0) != ({1} < 0) ? {1} : 0)))",
}
_UNSIGNED_SCALAR = {
    "bitwise_right_shift": "((ulong){1} >= {bits} ? ({T})0 : ({T})({0} >> {1}))",
    "abs": "({0})",
    "sign": "({T})({0} != 0)",
    "floor_divide": "({1} == 0 ? ({T})0 : {0} / {1})",
    "remainder": "({1} == 0 ? ({T})0 : {0} % {1})",
}
# Truth values are 0 and 1 by themselves; in a vector they are 0 and -1, all bits set.
_BOOL = {
    "logical_and": "({0} & {1})",
    "logical_or": "({0} | {1})",
    "logical_xor": "({0} ^ {1})",
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "add": "({0} | {1})",
    "multiply": "({0} & {1})",
    "maximum": "({0} | {1})",
    "minimum": "({0} & {1})",
    "equal": "~({0} ^ {1})",
    "not_equal": "({0} ^ {1})",
}
_VECTOR_DTYPES = ("bool", "int32", "uint32", "int64", "uint64", "float32")
NEUTRAL = {"sum": "0", "prod": "1", "any": "0", "all": "1"}
# What takes in one more value, for each reduction.
COMBINE = {
    "sum": "add",
    "prod": "multiply",
    "max": "maximum",
    "min": "minimum",
    "any": "logical_or",
    "all": "logical_and",
}


def c_type(given: ir.Type) -> str:
    """The C type of a value."""
    name = "int" if given.dtype == "bool" else C_TYPES[given.dtype]
    return name if given.width == 1 else f"{name}{given.width}"


def has_vectors(dtype: str) -> bool:
    """Whether values of a dtype are computed in vectors."""
    return dtype in _VECTOR_DTYPES


def expression(
    operation: str, result: ir.Type, of: ir.Type, inputs: tuple[str, ...], patterns: Patterns | None = None
) -> str | None:
    """The C expression of a primitive on inputs of type `of`; None if it has none.

    For float32, `patterns` are other ones.
    """
    if operation == "cast":
        return _cast(result, of, inputs[0])
    if operation == "where":
        return _where(result, inputs)
    pattern = _pattern(operation, of)
    if patterns and of.dtype == "float32":
        pattern = patterns.get(operation, pattern)
    if pattern is None:
        return None
    unsigned = ir.Type(f"u{of.dtype}", of.width) if of.dtype[0] == "i" else of
    bits = 8 * np.dtype(of.dtype).itemsize
    return pattern.format(
        *inputs, T=c_type(of), U=c_type(unsigned), width=of.width, bits=bits, limit=_TANH_LIMIT.get(of.dtype)
    )


def combine(reduction: str, type: ir.Type, one: str, other: str, patterns: Patterns | None = None) -> str:
    """One value from two, for a reduction."""
    found = expression(COMBINE[reduction], type, type, (one, other), patterns)
    assert found is not None
    return found


def neutral(reduction: str, type: ir.Type) -> str:
    """What a reduction starts from."""
    if reduction in NEUTRAL:
        number = NEUTRAL[reduction]
    elif type.dtype.startswith("float"):
        number = "-INFINITY" if reduction == "max" else "INFINITY"
    elif type.dtype == "bool":
        number = "0" if reduction == "max" else "1"
    else:
        limits = np.iinfo(type.dtype)
        suffix = "ul" if type.dtype == "uint64" else ""
        number = (
            f"{limits.max}{suffix}" if reduction == "min" else f"(-{limits.max} - 1)" if limits.min else "0"
        )
    if type.dtype == "bool" and type.width > 1 and number == "1":
        number = "-1"
    return number if type.width == 1 else f"({c_type(type)})({number})"


def _pattern(operation: str, of: ir.Type) -> str | None:
    vector, kind = of.width > 1, "b" if of.dtype == "bool" else of.dtype[0]
    if operation in _SAME:
        return _SAME[operation]
    if operation in _EXTREMES:
        better, not_better = _EXTREMES[operation]
        return (
            f"(!({{0}} {not_better} {{1}}) & ({{1}} == {{1}}))" if kind == "f" else f"({{0}} {better} {{1}})"
        )
    if kind == "b":
        if operation in ("logical_not", "bitwise_invert"):
            return "(~{0})" if vector else "(!{0})"
        if operation == "equal" and not vector:
            return "({0} == {1})"
        return _BOOL.get(operation)
    if operation in _COMPARISONS:
        return _truth(f"({{0}} {_COMPARISONS[operation]} {{1}})", of)
    if kind == "f":
        if operation in _FLOAT_TESTS:
            return _FLOAT_VECTOR[operation] if vector else f"({operation}({{0}}) != 0)"
        return (_FLOAT_VECTOR if vector else _FLOAT_SCALAR).get(operation) or _FLOAT.get(operation)
    if operation in _WRAPPING:
        return _wrapping(_WRAPPING[operation], vector)
    if vector or operation in _WHOLE:
        return _WHOLE.get(operation)
    signed = _SIGNED_SCALAR if kind == "i" else _UNSIGNED_SCALAR
    return _WHOLE_SCALAR.get(operation) or signed.get(operation)


def _wrapping(pattern: str, vector: bool) -> str:
    convert = "as_{U}({%s})" if vector else "({U}){%s}"
    inside = pattern.replace("{0}", convert % "0").replace("{1}", convert % "1")
    return f"as_{{T}}({inside})" if vector else f"(({{T}})({inside}))"


def _truth(comparison: str, of: ir.Type) -> str:
    """A comparison as a truth value: vectors' comparisons have the width of what they compare."""
    wide = of.width > 1 and np.dtype(of.dtype).itemsize != 4
    return f"__builtin_convertvector({comparison}, int{of.width})" if wide else comparison


def _cast(result: ir.Type, of: ir.Type, value: str) -> str | None:
    if result.dtype == "bool":
        return _truth(f"({value} != 0)", of) if of.dtype != "bool" else value
    if of.dtype[0] == "f" and result.dtype[0] != "f":
        return None  # C leaves open what becomes of numbers out of range
    if result.width == 1:
        return f"({c_type(result)})({value})"
    value = f"({value} & 1)" if of.dtype == "bool" else value
    return f"__builtin_convertvector({value}, {c_type(result)})"


def _where(result: ir.Type, inputs: tuple[str, ...]) -> str:
    condition, yes, no = inputs
    if result.width == 1:
        return f"({condition} ? {yes} : {no})"
    if result.dtype == "bool":
        return f"(({condition} & {yes}) | (~{condition} & {no}))"
    if np.dtype(result.dtype).itemsize == 8:
        condition = f"__builtin_convertvector({condition}, long{result.width})"
    return f"({condition} ? {yes} : {no})"
