"""What each primitive is in WGSL, on single values, and which dtypes it can have there.

WGSL has whole numbers of 32 bits, and of 64 where the device has them. Smaller ones are computed in 32 bits
and cut after every operation that may leave their range. Truth values are of a type of their own.
"""

from __future__ import annotations

import numpy as np

from penstock.kernels.dialects.c_expressions import COMBINE

_TYPES = {
    "bool": "bool",
    "int8": "i32",
    "int16": "i32",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u32",
    "uint16": "u32",
    "uint32": "u32",
    "uint64": "u64",
    "bfloat16": "f32",
    "float16": "f32",
    "float32": "f32",
}
SUFFIXES = {"i32": "i", "u32": "u", "i64": "li", "u64": "lu"}
# {0}, {1} and {2} are the inputs, {T} their type, {zero} and {one} its numbers.
_SAME = {"positive": "{0}", "stop": "{0}"}
_COMPARISONS = {
    "equal": "({0} == {1})",
    "not_equal": "(!({0} == {1}))",  # a NaN is not WGSL's != to anything
    "less": "({0} < {1})",
    "less_equal": "({0} <= {1})",
    "greater": "({0} > {1})",
    "greater_equal": "({0} >= {1})",
}
# For an extreme: whether a value takes the place of another. A NaN takes that of every number.
_EXTREMES = {"greater_or_nan": ">", "less_or_nan": "<"}
# Compilers may assume that there is no NaN, and put sums in another order: x - x is 0 on Mesa, (x + 1) - 1
# is x. No such rule applies to a product with a number that they do not know: with 1, from `Words.opening`.
_FLOAT = {
    "add": "fma({0}, ONE, {1})",
    "subtract": "fma({0}, ONE, -{1})",
    "multiply": "({0} * {1})",
    "divide": "({0} / {1})",
    "negative": "(-{0})",
    "abs": "abs({0})",
    "sqrt": "sqrt({0})",
    "floor": "floor({0})",
    "ceil": "ceil({0})",
    "trunc": "trunc({0})",
    "round": "round({0})",
    "sign": "sign_1({0})",
    "maximum": "largest({0}, {1})",
    "minimum": "smallest({0}, {1})",
    "copysign": "with_sign({0}, {1})",
    "nextafter": "next_after({0}, {1})",
    "isnan": "is_nan({0})",
    "isinf": "((bitcast<u32>({0}) & 0x7fffffffu) == 0x7f800000u)",
    "isfinite": "is_finite({0})",
    "signbit": "(bitcast<u32>({0}) >= 0x80000000u)",
    "round_bfloat16": "round_bfloat({0})",
    "round_float16": "round_half({0})",
}
# Functions of the prelude, which are more exact than the language's own.
_OWN = "exp expm1 log log1p log2 log10 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh"
_FLOAT |= {name: f"{name}_1({{0}})" for name in _OWN.split()}
_FLOAT |= {name: f"{name}_1({{0}}, {{1}})" for name in ("atan2", "hypot", "pow")}
_WHOLE = {
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "maximum": "select({1}, {0}, {0} > {1})",
    "minimum": "select({1}, {0}, {0} < {1})",
}
# Those that may leave the range of a small dtype.
_WRAPPING = {
    "add": "({0} + {1})",
    "subtract": "({0} - {1})",
    "multiply": "({0} * {1})",
    "negative": "({zero} - {0})",
    "bitwise_invert": "(~{0})",
    "floor_divide": "floor_divide_{T}({0}, {1})",
    "remainder": "remainder_{T}({0}, {1})",
    "bitwise_left_shift": "select({0} << (u32({1}) & {mask}u), {zero}, {large})",
}
_SIGNED = {"sign": "select(select({zero}, {one}, {0} != {zero}), -{one}, below_0_{T}({0}))"}
_SIGNED_WRAPPING = {"abs": "select({0}, {zero} - {0}, below_0_{T}({0}))"}
_UNSIGNED = {"abs": "{0}", "sign": "select({zero}, {one}, {0} != {zero})"}
# A number with a sign is shifted to its sign at the least.
_RIGHT_SHIFT = "({0} >> select(u32({1}) & {mask}u, {mask}u, {large}))"
_UNSIGNED_RIGHT_SHIFT = "select({0} >> (u32({1}) & {mask}u), {zero}, {large})"
_BOOL = {
    "logical_and": "({0} && {1})",
    "logical_or": "({0} || {1})",
    "logical_xor": "({0} != {1})",
    "logical_not": "(!{0})",
    "bitwise_and": "({0} && {1})",
    "bitwise_or": "({0} || {1})",
    "bitwise_xor": "({0} != {1})",
    "bitwise_invert": "(!{0})",
    "add": "({0} || {1})",
    "multiply": "({0} && {1})",
    "maximum": "({0} || {1})",
    "minimum": "({0} && {1})",
    "equal": "({0} == {1})",
    "not_equal": "({0} != {1})",
}
_NEUTRAL = {"sum": 0, "prod": 1, "any": 0, "all": 1}


def wgsl_type(dtype: str) -> str:
    """The type in which values of a dtype are computed."""
    return _TYPES[dtype]


def number(dtype: str, value: int) -> str:
    """A small whole number as a value of a dtype."""
    kind = _TYPES[dtype]
    if kind == "bool":
        return "true" if value else "false"
    return f"{value}.0" if kind == "f32" else f"{value}{SUFFIXES[kind]}"


def converted(dtype: str, whole: str) -> str:
    """A whole number of 32 bits with a sign, given by a text, as a value of a dtype."""
    if dtype == "bool":
        return f"({whole} != 0)"
    result = cast(dtype, "int32", f"({whole})")
    assert result is not None
    return result


def wgsl_expression(operation: str, result: str, of: str, inputs: tuple[str, ...]) -> str | None:
    """The expression of a primitive on inputs of dtype `of`; None if it has none."""
    if operation == "cast":
        return cast(result, of, inputs[0])
    if operation == "where":
        return f"select({inputs[2]}, {inputs[1]}, {inputs[0]})"
    pattern = _pattern(operation, of)
    if pattern is None:
        return None
    bits = 8 * np.dtype(of).itemsize
    wide = bits == 64
    text = pattern.format(
        *inputs,
        T=_TYPES[of],
        zero=number(of, 0),
        one=number(of, 1),
        mask=63 if wide else 31,
        # Without a sign, amounts below 0 are large, too.
        large=f"{'bitcast<u64>' if wide else 'u32'}({inputs[-1]}) >= {bits}{'lu' if wide else 'u'}",
    )
    signed = of.startswith("int")
    wraps = operation in _WRAPPING or (signed and operation in _SIGNED_WRAPPING)
    return _cut(of, text) if wraps and of[0] in "iu" else text


def wgsl_combine(reduction: str, dtype: str, one: str, other: str) -> str:
    """One value from two, for a reduction."""
    if reduction == "sum" and _TYPES[dtype] == "f32":
        return f"({one} + {other})"  # in whatever order
    found = wgsl_expression(COMBINE[reduction], dtype, dtype, (one, other))
    assert found is not None
    return found


def wgsl_neutral(reduction: str, dtype: str) -> str:
    """What a reduction starts from."""
    if reduction in _NEUTRAL:
        return number(dtype, _NEUTRAL[reduction])
    if dtype == "bool":
        return number(dtype, reduction == "min")
    if _TYPES[dtype] == "f32":
        return f"bits_float({'0x7f800000u' if reduction == 'min' else '0xff800000u'})"
    limits, suffix = np.iinfo(dtype), SUFFIXES[_TYPES[dtype]]
    if reduction == "min":
        return f"{limits.max}{suffix}"
    return f"(-{limits.max}{suffix} - 1{suffix})" if limits.min else f"0{suffix}"


def cast(result: str, of: str, value: str) -> str | None:
    """A value of one dtype as one of another."""
    target, source = _TYPES[result], _TYPES[of]
    if target == "bool":
        if source == "f32":
            return f"((bitcast<u32>({value}) & 0x7fffffffu) != 0u)"
        return value if source == "bool" else f"({value} != {number(of, 0)})"
    if source == "bool":
        return f"select({number(result, 0)}, {number(result, 1)}, {value})"
    if target == "f32":
        return value if source == "f32" else f"f32({value})"
    if source == "f32":
        return None  # WGSL's numbers out of range are not NumPy's
    same = np.iinfo(result).min <= np.iinfo(of).min and np.iinfo(result).max >= np.iinfo(of).max
    text = _moved(target, source, value)
    return text if same else _cut(result, text)


def _moved(target: str, source: str, value: str) -> str:
    """A whole number as one of another type: the bits that there is room for."""
    if target == source:
        return value
    if target[1:] == source[1:]:
        return f"bitcast<{target}>({value})"
    if target[1:] == "32":
        return f"{target}({value})"
    # Naga widens by the sign of the target, and not of the source.
    wide = f"{source[0]}64({value})"
    return wide if source[0] == target[0] else f"bitcast<{target}>({wide})"


def _pattern(operation: str, of: str) -> str | None:
    if operation in _SAME:
        return _SAME[operation]
    if of == "bool":
        return _BOOL.get(operation)
    if operation in _COMPARISONS:
        return _COMPARISONS[operation]
    if operation in _EXTREMES:
        better = f"({{0}} {_EXTREMES[operation]} {{1}})"
        floats = _TYPES[of] == "f32"
        return f"(!is_nan({{1}}) && (is_nan({{0}}) || {better}))" if floats else better
    if _TYPES[of] == "f32":
        return _FLOAT.get(operation)
    if operation in _WHOLE or operation in _WRAPPING:
        return _WHOLE.get(operation) or _WRAPPING[operation]
    signed = of.startswith("int")
    if operation == "bitwise_right_shift":
        return _RIGHT_SHIFT if signed else _UNSIGNED_RIGHT_SHIFT
    return (_SIGNED | _SIGNED_WRAPPING if signed else _UNSIGNED).get(operation)


def _cut(dtype: str, value: str) -> str:
    """The bits of a value that a small dtype has."""
    bits = 8 * np.dtype(dtype).itemsize
    if bits >= 32:
        return value
    if dtype[0] == "u":
        return f"({value} & {(1 << bits) - 1:#x}u)"
    return f"(({value} << {32 - bits}u) >> {32 - bits}u)"
