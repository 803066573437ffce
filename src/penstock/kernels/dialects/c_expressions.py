"""The C expressions of primitives on scalars and on vectors, by dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.kernels import ir
from penstock.kernels.dialects import patterns, vector_functions
from penstock.kernels.source import C_TYPES

# {0}, {1} and {2} are the inputs, {T} their type, {U} its unsigned type.
_SAME = {"positive": "({0})", "stop": "({0})"}
_DIVISIONS = ("remainder", "floor_divide")  # of floating-point numbers, which only a CPU has
_TESTS = ("isnan", "isinf", "isfinite", "signbit")
_TRUTHS = frozenset((*patterns.COMPARISONS, *patterns.EXTREMES, *_TESTS))  # whose results are booleans
_UNARY = """erf exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh
atanh floor ceil trunc"""
_FLOAT = {
    **_SAME,
    **patterns.COMPARISONS,
    **patterns.ARITHMETIC,
    **{name: f"{name}({{0}})" for name in _UNARY.split()},
    **{name: f"{name}({{0}}, {{1}})" for name in ("atan2", "hypot", "copysign", "nextafter", "pow")},
    # A NaN beats every number.
    "greater_or_nan": "(!({0} <= {1}) & ({1} == {1}))",
    "less_or_nan": "(!({0} >= {1}) & ({1} == {1}))",
    # The inner `?:` is a single instruction of a CPU.
    "maximum": "({0} != {0} ? {0} : {0} > {1} ? {0} : {1})",
    "minimum": "({0} != {0} ? {0} : {0} < {1} ? {0} : {1})",
    "maximum_number": "({0} > {1} ? {0} : {1})",  # the second where the first is a NaN
    "minimum_number": "({0} < {1} ? {0} : {1})",
    "round": "rint({0})",
}
# Beyond it, tanh rounds to 1; PoCL's stays below.
_TANH_LIMIT = {"float32": "9.1f", "float64": "20.0"}
_FLOAT_SCALAR = {
    **_FLOAT,
    **{name: f"({name}({{0}}) != 0)" for name in _TESTS},
    "abs": "fabs({0})",
    "tanh": "({0} > {limit} ? ({T})1 : {0} < -{limit} ? ({T})-1 : tanh({0}))",
    "sign": "(isnan({0}) ? {0} : ({T})(({0} > 0) - ({0} < 0)))",
    "round_bfloat16": "FROM_BFLOAT16(TO_BFLOAT16({0}))",
    "round_float16": "round_half({0})",
    **{f"paired_{dtype}": f"{dtype.upper()}_PAIR({{0}}, {{1}})" for dtype in ir.HALF_PRECISION},
}


def _in_vectors(item: str) -> dict[str, str]:
    """Functions of vectors of floating-point items."""
    divisions = {name: f"{name}({{0}}, {{1}})" for name in _DIVISIONS}
    calls = {name: (_FLOAT | divisions)[name] for name in vector_functions.FUNCTIONS[item]}
    return {name: call.replace(name, f"{name}_{{T}}", 1) for name, call in calls.items()}


_FLOAT_VECTOR = {
    **_FLOAT,
    "maximum": "({0} != {0} ? {0} : larger_{width}({0}, {1}))",
    "minimum": "({0} != {0} ? {0} : smaller_{width}({0}, {1}))",
    **_in_vectors("float"),
    "abs": "as_{T}(as_int{width}({0}) & 0x7fffffff)",
    "sign": "({0} > 0 ? ({T})(1) : {0} < 0 ? ({T})(-1) : {0} != {0} ? {0} : ({T})(0))",
    "isnan": "({0} != {0})",
    "isinf": "((as_int{width}({0}) & 0x7fffffff) == 0x7f800000)",
    "isfinite": "((as_int{width}({0}) & 0x7f800000) != 0x7f800000)",
    "signbit": "(as_int{width}({0}) < 0)",
    "round_bfloat16": "FROM_BFLOAT16_{width}(TO_BFLOAT16_{width}({0}))",
    "round_float16": "round_half{width}({0})",
}
_DOUBLE_VECTOR = {
    **_FLOAT,
    **_in_vectors("double"),
    "abs": "as_{T}(as_long{width}({0}) & 0x7fffffffffffffff)",
    "sign": _FLOAT_VECTOR["sign"],
    "isnan": "({0} != {0})",
    "isinf": "((as_long{width}({0}) & 0x7fffffffffffffff) == 0x7ff0000000000000)",
    "isfinite": "((as_long{width}({0}) & 0x7ff0000000000000) != 0x7ff0000000000000)",
    "signbit": "(as_long{width}({0}) < 0)",
}
Patterns = Mapping[str, str]
# Functions of scalars on a CPU: a lane of those of vectors. PoCL's own differ in the last bit, and whether an
# item is computed in a vector or in the remainder after it depends on the kernel.
_EXACT = ("sqrt", "floor", "ceil", "trunc")


def _of_a_lane(vectors: Mapping[str, str], type_: str) -> Mapping[str, str]:
    names = [name for name in (*_UNARY.split(), *_DIVISIONS, "atan2", "hypot", "pow") if name not in _EXACT]
    given = f"({type_})({{0}})", f"({type_})({{1}})"
    return {name: vectors[name].format(*given, T=type_, width=8) + ".s0" for name in names}


CPU_SCALAR_PATTERNS: Mapping[str, Patterns] = {
    "float32": _of_a_lane(_FLOAT_VECTOR, "float8"),
    "float64": _of_a_lane(_DOUBLE_VECTOR, "double8"),
}
# For a GPU, in fewer instructions than the compiler needs; also by whether functions are quick.
_THREAD = {"tanh": "tanh_1({0})", "maximum": "MAXIMUM({0}, {1})", "minimum": "MINIMUM({0}, {1})"}
QUICK: Patterns = {"exp": "QUICK_EXP({0})", "divide": "QUICK_DIVIDE({0}, {1})"}
THREAD_PATTERNS: Mapping[bool, Mapping[str, Patterns]] = {
    False: {"float32": _THREAD},
    True: {"float32": {**_THREAD, **QUICK}},
}


def _wrapping(result: str, operand: str) -> dict[str, str]:
    """In unsigned arithmetic, which wraps around as NumPy does; signed overflow is undefined in C."""
    a, b = operand % "{0}", operand % "{1}"
    sums = {"add": f"{a} + {b}", "subtract": f"{a} - {b}", "multiply": f"{a} * {b}", "negative": f"0 - {a}"}
    return {name: result % pattern for name, pattern in sums.items()}


_INTEGER = {
    **_SAME,
    **patterns.COMPARISONS,
    **patterns.EXTREMES,
    **patterns.BITS,
    "maximum": "({0} > {1} ? {0} : {1})",
    "minimum": "({0} < {1} ? {0} : {1})",
}
_INTEGER_VECTOR = {
    **_INTEGER,
    **_wrapping("as_{T}(%s)", "as_{U}(%s)"),
    "bitwise_left_shift": "(as_{U}({1}) < {bits} ? as_{T}(as_{U}({0}) << as_{U}({1})) : ({T})(0))",
}
_SIGNED_VECTOR = {
    **_INTEGER_VECTOR,
    "bitwise_right_shift": "({0} >> as_{T}(as_{U}({1}) < {bits} ? as_{U}({1}) : ({U})({bits} - 1)))",
}
_UNSIGNED_VECTOR = {
    **_INTEGER_VECTOR,
    "bitwise_right_shift": "({1} < {bits} ? {0} >> {1} : ({T})(0))",
}
_INTEGER_SCALAR = {
    **_INTEGER,
    **_wrapping("(({T})(%s))", "({U})%s"),
    "bitwise_left_shift": "((ulong){1} >= {bits} ? ({T})0 : ({T})(({U}){0} << {1}))",
}
_SIGNED_SCALAR = {
    **_INTEGER_SCALAR,
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
    **_INTEGER_SCALAR,
    "bitwise_right_shift": "((ulong){1} >= {bits} ? ({T})0 : ({T})({0} >> {1}))",
    "abs": "({0})",
    "sign": "({T})({0} != 0)",
    "floor_divide": "({1} == 0 ? ({T})0 : {0} / {1})",
    "remainder": "({1} == 0 ? ({T})0 : {0} % {1})",
    "unit_float": "UNIT_FLOAT({0}, {1})",
    # Pairs of 16-bit floats in a word, of CUDA.
    **{f"integers_{dtype}": f"INTEGERS_{dtype.upper()}({{0}})" for dtype in ir.HALF_PRECISION},
    "pack_low": "PACK_LOW({0}, {1})",
    "pack_high": "PACK_HIGH({0}, {1})",
    **{f"scaled_{dtype}": f"SCALED_{dtype.upper()}({{0}}, {{1}})" for dtype in ir.HALF_PRECISION},
}
# A scalar boolean is 0 or 1; in a vector it is 0 or -1, all bits set.
_BOOL = {**_SAME, **patterns.EXTREMES, **patterns.of_booleans("&", "|", "^")}
_BOOL_VECTOR = _BOOL | {"logical_not": "(~{0})", "bitwise_invert": "(~{0})", "equal": "~({0} ^ {1})"}
# By the first letter of a dtype, and whether it is a vector.
_PATTERNS: dict[tuple[str, bool], Patterns] = {
    ("b", False): _BOOL | patterns.infix(equal="=="),
    ("b", True): _BOOL_VECTOR,
    ("f", False): _FLOAT_SCALAR,
    ("f", True): _FLOAT_VECTOR,
    ("i", False): _SIGNED_SCALAR,
    ("i", True): _SIGNED_VECTOR,
    ("u", False): _UNSIGNED_SCALAR,
    ("u", True): _UNSIGNED_VECTOR,
}
_VECTOR_DTYPES = ("bool", "int32", "uint32", "int64", "uint64", "float32", "float64")


def c_type(given: ir.Type) -> str:
    """The C type of a value."""
    name = "int" if given.dtype == "bool" else C_TYPES[given.dtype]
    return name if given.width == 1 else f"{name}{given.width}"


def has_vectors(dtype: str) -> bool:
    """Whether values of a dtype are computed in vectors."""
    return dtype in _VECTOR_DTYPES


def expression(
    operation: str,
    result: ir.Type,
    of: ir.Type,
    inputs: Sequence[str],
    first: Mapping[str, Patterns] | None = None,
) -> str | None:
    """The C expression of a primitive on inputs of type `of`, if there is any.

    Patterns in `first`, by dtype, take precedence.
    """
    if operation == "cast":
        return _cast(result, of, inputs[0])
    if operation == "where":
        return _where(result, inputs)
    is_wide_float = of.dtype == "float64" and of.width > 1
    pattern = (_DOUBLE_VECTOR if is_wide_float else _PATTERNS[of.dtype[0], of.width > 1]).get(operation)
    if first is not None:
        pattern = first.get(of.dtype, {}).get(operation, pattern)
    if pattern is None:
        return None
    unsigned = ir.Type(f"u{of.dtype}", of.width) if of.dtype[0] == "i" else of
    bits, limit = 8 * np.dtype(of.dtype).itemsize, _TANH_LIMIT.get(of.dtype)
    text = pattern.format(*inputs, T=c_type(of), U=c_type(unsigned), width=of.width, bits=bits, limit=limit)
    return _truth(text, of) if operation in _TRUTHS else text


def neutral(reduction: str, type: ir.Type) -> str:
    """The identity element of a reduction."""
    value = patterns.identity(reduction, type.dtype)
    if isinstance(value, float):
        text = "INFINITY" if value > 0 else "-INFINITY"
    elif value < 0:
        text = f"({value + 1} - 1)"  # C has no literal for the smallest integer
    else:
        text = f"{value}ul" if value >= 1 << 63 else str(value)
    if type.width == 1:
        return text
    return f"({c_type(type)})({'-' if type.dtype == 'bool' and value else ''}{text})"


def _truth(comparison: str, of: ir.Type) -> str:
    """A comparison as a boolean: in vectors, it has the item size of its operands."""
    other = of.width > 1 and of.dtype != "bool" and np.dtype(of.dtype).itemsize != 4
    return f"__builtin_convertvector({comparison}, int{of.width})" if other else comparison


def _cast(result: ir.Type, of: ir.Type, value: str) -> str | None:
    if result.dtype == "bool":
        return _truth(f"({value} != 0)", of) if of.dtype != "bool" else value
    if of.dtype[0] == "f" and result.dtype[0] != "f":
        return _to_integer(result, of, value)
    if result.width == 1:
        return f"({c_type(result)})({value})"
    value = f"({value} & 1)" if of.dtype == "bool" else value
    return f"__builtin_convertvector({value}, {c_type(result)})"


def _to_integer(result: ir.Type, of: ir.Type, value: str) -> str:
    """The nearest integer towards 0 that the type has; 0 for NaN. C does not define it out of range."""
    limits, suffix, name = np.iinfo(result.dtype), "f" if of.dtype == "float32" else "", c_type(result)
    low, top = f"{float(limits.min)!r}{suffix}", f"{float(limits.max + 1)!r}{suffix}"
    least, most = neutral("max", result), neutral("min", result)
    below, above = f"({value} <= {low})", f"({value} >= {top})"
    inside = f"(({value} > {low}) & ({value} < {top}))"
    if result.width == 1:
        return f"({above} ? ({name}){most} : {below} ? ({name}){least} : {inside} ? ({name})({value}) : 0)"
    size, zero = np.dtype(result.dtype).itemsize, f"({c_type(of)})(0)"
    if size < 4:  # a floating-point number may be any of its integers
        ends = [f"({c_type(of)})({float(limit)!r}{suffix})" for limit in (limits.max, limits.min)]
        bounded = f"({above} ? {ends[0]} : {below} ? {ends[1]} : {inside} ? {value} : {zero})"
        return f"__builtin_convertvector({bounded}, {name})"
    if size != np.dtype(of.dtype).itemsize:
        mask = f"{'long' if size == 8 else 'int'}{result.width}"
        below, above = (f"__builtin_convertvector({test}, {mask})" for test in (below, above))
    whole = f"__builtin_convertvector(({inside} ? {value} : {zero}), {name})"
    return f"({above} ? {most} : {below} ? {least} : {whole})"


def _where(result: ir.Type, inputs: Sequence[str]) -> str:
    condition, yes, no = inputs
    if result.width > 1 and result.dtype == "bool":
        return f"(({condition} & {yes}) | (~{condition} & {no}))"
    if result.width > 1 and np.dtype(result.dtype).itemsize == 8:
        condition = f"__builtin_convertvector({condition}, long{result.width})"
    return f"({condition} ? {yes} : {no})"
