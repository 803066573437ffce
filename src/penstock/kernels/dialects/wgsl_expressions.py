"""The WGSL expressions of primitives on scalars, by dtype.

WGSL has integers of 32 bits, and of 64 where the device has them. Smaller integers are computed in 32 bits,
and wrapped after every operation that may leave their range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.kernels.dialects import patterns

_TYPES = {
    "bool": "bool",
    **dict.fromkeys(("int8", "int16", "int32"), "i32"),
    **dict.fromkeys(("uint8", "uint16", "uint32"), "u32"),
    **dict.fromkeys(("bfloat16", "float16", "float32"), "f32"),
    "int64": "i64",
    "uint64": "u64",
}
SUFFIXES = {"i32": "i", "u32": "u", "i64": "li", "u64": "lu"}
# {0}, {1} and {2} are the inputs, {T} their type, {zero} and {one} its literals.
_SAME = {"positive": "{0}", "stop": "{0}"}
_COMPARISONS = patterns.COMPARISONS | {"not_equal": "(!({0} == {1}))"}  # `!=` is false for a NaN
# Functions of the prelude, which are more precise than the language's own.
_OWN = "exp expm1 log log1p log2 log10 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sign"
# Compilers may assume that there is no NaN, and reorder sums and products: on Mesa x - x is 0, and
# (x + 1) - 1 is x. They may not where a factor is unknown: ONE, which is 1. And they know nothing of a value
# after an unknown word was added to its bits: ZERO, which is 0 (see `Words.opening`). So the bits of a value
# do not depend on what it is fused with.
_FLOAT = {
    **_SAME,
    **_COMPARISONS,
    **patterns.ARITHMETIC,
    **{name: f"{name}({{0}})" for name in ("abs", "floor", "ceil", "trunc", "round")},
    **{name: f"opaque({name}_1({{0}}), ZERO)" for name in _OWN.split()},
    **{name: f"opaque({name}_1({{0}}, {{1}}), ZERO)" for name in ("atan2", "hypot", "pow")},
    "sqrt": "opaque(sqrt({0}), ZERO)",
    "multiply": "opaque({0} * {1}, ZERO)",
    "divide": "opaque({0} / {1}, ZERO)",
    "add": "opaque(fma({0}, ONE, {1}), ZERO)",
    "subtract": "opaque(fma({0}, ONE, -{1}), ZERO)",
    # A NaN beats every number.
    "greater_or_nan": "(!is_nan({1}) && (is_nan({0}) || ({0} > {1})))",
    "less_or_nan": "(!is_nan({1}) && (is_nan({0}) || ({0} < {1})))",
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
_NEVER_OF_ITSELF = ("less", "greater", "not_equal")
# Operations that may leave the range of a small dtype.
_WRAPPING_BITS = ("bitwise_invert", "bitwise_left_shift")
_WRAPPING = ("add", "subtract", "multiply", "negative", "floor_divide", "remainder", *_WRAPPING_BITS)
_INTEGER = {
    **_SAME,
    **_COMPARISONS,
    **patterns.EXTREMES,
    **patterns.BITS,
    **patterns.infix(add="+", subtract="-", multiply="*"),
    "maximum": "select({1}, {0}, {0} > {1})",
    "minimum": "select({1}, {0}, {0} < {1})",
    "negative": "({zero} - {0})",
    "floor_divide": "floor_divide_{T}({0}, {1})",
    "remainder": "remainder_{T}({0}, {1})",
    "bitwise_left_shift": "select({0} << (u32({1}) & {mask}u), {zero}, {large})",
}
# By the first letter of a type.
_PATTERNS = {
    "b": {**_SAME, **patterns.of_booleans("&&", "||", "!="), **patterns.infix(equal="==")},
    "f": _FLOAT,
    "i": {
        **_INTEGER,
        "abs": "select({0}, {zero} - {0}, below_0_{T}({0}))",
        "sign": "select(select({zero}, {one}, {0} != {zero}), -{one}, below_0_{T}({0}))",
        # A signed integer is shifted until only its sign is left.
        "bitwise_right_shift": "({0} >> select(u32({1}) & {mask}u, {mask}u, {large}))",
    },
    "u": {
        **_INTEGER,
        "abs": "{0}",
        "sign": "select({zero}, {one}, {0} != {zero})",
        "bitwise_right_shift": "select({0} >> (u32({1}) & {mask}u), {zero}, {large})",
        "unit_float": "bits_float(({0} & {1}) | 0x3f800000u)",
    },
}


def type_name(dtype: str) -> str:
    """The type that values of a dtype are computed in."""
    return _TYPES[dtype]


def number(dtype: str, value: int) -> str:
    """An integer as a literal of a dtype."""
    kind = _TYPES[dtype]
    if kind == "bool":
        return "true" if value else "false"
    return f"{value}.0" if kind == "f32" else f"{value}{SUFFIXES[kind]}"


def converted(dtype: str, integer: str) -> str:
    """An int32 expression converted to a dtype."""
    if dtype == "bool":
        return f"({integer} != 0)"
    result = cast(dtype, "int32", f"({integer})")
    assert result is not None
    return result


def expression(operation: str, result: str, of: str, inputs: Sequence[str]) -> str | None:
    """The expression of a primitive on inputs of dtype `of`, if there is any."""
    if operation == "cast":
        return cast(result, of, inputs[0])
    if operation == "where":
        return f"select({inputs[2]}, {inputs[1]}, {inputs[0]})"
    pattern = _PATTERNS[_TYPES[of][0]].get(operation)
    if pattern is None:
        return None
    if operation in _NEVER_OF_ITSELF and inputs[0] == inputs[1] and (operation, of[0]) != ("not_equal", "f"):
        # As nobody knows: a compiler that does takes what is multiplied with it for 0, NaN or not.
        return "(ZERO != 0u)"
    bits = 8 * np.dtype(of).itemsize
    wide = bits == 64
    text = pattern.format(
        *inputs,
        T=_TYPES[of],
        zero=number(of, 0),
        one=number(of, 1),
        mask=63 if wide else 31,
        # Unsigned, so that negative amounts are large.
        large=f"{'bitcast<u64>' if wide else 'u32'}({inputs[-1]}) >= {bits}{'lu' if wide else 'u'}",
    )
    wraps = operation in _WRAPPING or (operation == "abs" and of[0] == "i")
    return _cut(of, text) if wraps and of[0] in "iu" else text


def neutral(reduction: str, dtype: str) -> str:
    """The identity element of a reduction."""
    value = patterns.identity(reduction, dtype)
    if isinstance(value, float):
        return f"bits_float({'0x7f800000u' if value > 0 else '0xff800000u'})"
    if value < 0:  # WGSL has no literal for the smallest integer
        return f"({number(dtype, value + 1)} - {number(dtype, 1)})"
    return number(dtype, value)


def cast(result: str, of: str, value: str) -> str | None:
    """A value converted from a dtype to another, if it has an expression."""
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
        return _to_integer(result, value)
    same = np.iinfo(result).min <= np.iinfo(of).min and np.iinfo(result).max >= np.iinfo(of).max
    text = _moved(target, source, value)
    return text if same else _cut(result, text)


def _to_integer(dtype: str, value: str) -> str:
    """The nearest integer towards 0 that the dtype has; 0 for NaN, which comparisons may not tell."""
    limits, kind, zero = np.iinfo(dtype), _TYPES[dtype], number(dtype, 0)
    low, top = f"f32({float(limits.min)!r})", f"f32({float(limits.max + 1)!r})"
    whole = f"select({zero}, {kind}({value}), {value} > {low} && {value} < {top})"
    bounded = f"select({whole}, {neutral('max', dtype)}, {value} <= {low})"
    bounded = f"select({bounded}, {neutral('min', dtype)}, {value} >= {top})"
    return f"select({bounded}, {zero}, (bitcast<u32>({value}) & 0x7fffffffu) > 0x7f800000u)"


def _moved(target: str, source: str, value: str) -> str:
    """An integer converted to another type: the bits that fit."""
    if target == source:
        return value
    if target[1:] == source[1:]:
        return f"bitcast<{target}>({value})"
    if target[1:] == "32":
        return f"{target}({value})"
    if source[0] == "u":  # naga extends by the sign of the target type, not of the source
        return f"u64({value})" if target[0] == "u" else f"bitcast<i64>(u64({value}))"
    wide = f"widened({value})"
    return wide if target[0] == "i" else f"bitcast<u64>({wide})"


def _cut(dtype: str, value: str) -> str:
    """A value wrapped to the range of a small dtype."""
    bits = 8 * np.dtype(dtype).itemsize
    if bits >= 32:
        return value
    if dtype[0] == "u":
        return f"({value} & {(1 << bits) - 1:#x}u)"
    return f"(({value} << {32 - bits}u) >> {32 - bits}u)"
