"""The WGSL functions that kernels use, most of them from `functions.wgsl` beside this module.

They are what the language lacks, or guarantees only to a few digits.

WGSL lets a compiler assume that there are neither NaNs nor infinities, and its own functions may have as few
as 11 exact bits. So NaNs are detected by their bits, and functions are polynomials after a range reduction;
all coefficients are least-squares fits, weighted to minimise the largest error. No formula depends on the
rounding of a sum or product: a compiler may fuse or reorder them. Where a value is split in two, its bits are
masked.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.kernels.dialects.wgsl_expressions import SUFFIXES

# Integer division by 0 gives 0, as in NumPy; by -1 it might overflow.
_SIGNED = """
fn below_0_{T}(x: {T}) -> bool { return {below}; }

fn floor_divide_{T}(a: {T}, b: {T}) -> {T} {
    if (b == 0{s}) { return 0{s}; }
    if (b == -1{s}) { return 0{s} - a; }
    let q = a / b;
    return select(q, q - 1{s}, q * b != a && below_0_{T}(a) != below_0_{T}(b));
}

fn remainder_{T}(a: {T}, b: {T}) -> {T} {
    if (b == 0{s} || b == -1{s}) { return 0{s}; }
    let r = a - a / b * b;
    return select(r, r + b, r != 0{s} && below_0_{T}(a) != below_0_{T}(b));
}
"""
_UNSIGNED = """
fn floor_divide_{T}(a: {T}, b: {T}) -> {T} {
    if (b == 0{s}) { return 0{s}; }
    return a / b;
}

fn remainder_{T}(a: {T}, b: {T}) -> {T} {
    if (b == 0{s}) { return 0{s}; }
    return a % b;
}
"""
_BELOW = {"i32": "x < 0i", "i64": "x < 0li", "u32": "", "u64": ""}
_OF_TYPES = [
    (_SIGNED if type[0] == "i" else _UNSIGNED)
    .replace("{T}", type)
    .replace("{s}", SUFFIXES[type])
    .replace("{below}", below)
    for type, below in _BELOW.items()
]
_PIECES = {
    re.findall(r"^(?:fn|struct) (\w+)", piece, re.M)[0]: piece
    for text in (Path(__file__).with_name("functions.wgsl").read_text("utf-8"), *_OF_TYPES)
    for piece in text.strip().split("\n\n")
}


def functions_for(text: str) -> str:
    """The functions that a text uses, directly or indirectly."""
    used: dict[str, str] = {}
    texts = [text]
    while texts:
        for name in dict.fromkeys(re.findall(r"\b\w+\b", texts.pop())):
            if name in _PIECES and name not in used:
                used[name] = _PIECES[name]
                texts.append(_PIECES[name])
    return "\n".join(used[name] for name in _PIECES if name in used)
