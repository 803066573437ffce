"""Macros for the kernels of GPUs: lanes, and memory in words of 4 bytes.

A thread accesses up to 16 bytes at once, as words, and unpacks its items from them. As all accesses are to
words, whatever the dtypes, no compiler can assume that values of different dtypes do not alias.
"""

from __future__ import annotations

THREAD_WORDS = """
#define EACH_LANE(n) _Pragma("unroll") for (int l_ = 0; l_ < n; l_++)
#define LOAD_1(words, at, from) words[at] = *(GLOBAL const uint *)(from);
#define LOAD_2(words, at, from) \\
    { uint2 all_ = *(GLOBAL const uint2 *)(from); words[at] = all_.x; words[at + 1] = all_.y; }
#define LOAD_4(words, at, from) \\
    { uint4 all_ = *(GLOBAL const uint4 *)(from); \\
      words[at] = all_.x; words[at + 1] = all_.y; words[at + 2] = all_.z; words[at + 3] = all_.w; }
#define LOAD_ONCE_1 LOAD_1
#define LOAD_ONCE_2 LOAD_2
#define STORE_1(words, at, to) *(GLOBAL uint *)(to) = words[at];
#define STORE_2(words, at, to) \\
    { uint2 all_; all_.x = words[at]; all_.y = words[at + 1]; *(GLOBAL uint2 *)(to) = all_; }
#define STORE_4(words, at, to) \\
    { uint4 all_; all_.x = words[at]; all_.y = words[at + 1]; all_.z = words[at + 2]; \\
      all_.w = words[at + 3]; *(GLOBAL uint4 *)(to) = all_; }
#define ITEM_UINT8(words, k) ((uchar)(words[(k) / 4] >> 8 * ((k) % 4)))
#define ITEM_INT8(words, k) ((char)ITEM_UINT8(words, k))
#define ITEM_BOOL(words, k) ITEM_UINT8(words, k)
#define ITEM_UINT16(words, k) ((ushort)(words[(k) / 2] >> 16 * ((k) % 2)))
#define ITEM_INT16(words, k) ((short)ITEM_UINT16(words, k))
#define ITEM_FLOAT16(words, k) half_float(ITEM_UINT16(words, k))
#define ITEM_BFLOAT16(words, k) FROM_BFLOAT16(ITEM_UINT16(words, k))
#define ITEM_UINT32(words, k) (words[k])
#define ITEM_INT32(words, k) ((int)words[k])
#define ITEM_FLOAT32(words, k) BITS_FLOAT(words[k])
#define ITEM_UINT64(words, k) ((ulong)words[2 * (k) + 1] << 32 | words[2 * (k)])
#define ITEM_INT64(words, k) ((long)ITEM_UINT64(words, k))
#define ITEM_FLOAT64(words, k) BITS_DOUBLE(ITEM_UINT64(words, k))
#define TWO_SHORTS(a, b) ((uint)(ushort)(a) | (uint)(ushort)(b) << 16)
#define FLOAT16_PAIR(a, b) TWO_SHORTS(float_half(a), float_half(b))
#define FOUR_BYTES(a, b, c, d) \\
    TWO_SHORTS((uint)(uchar)(a) | (uint)(uchar)(b) << 8, (uint)(uchar)(c) | (uint)(uchar)(d) << 8)
"""
# tanh to 3 units in the last place: a polynomial, by a Chebyshev fit, where exp would cancel.
TANH = """
DEVICE float tanh_1(float x) {
    float z = x * x;
    float p = FMA(z, FMA(z, -5.617152728e-3f, 2.055340632e-2f), -5.370970716e-2f);
    p = x * FMA(z, FMA(z, FMA(z, p, 1.333099022e-1f), -3.333325488e-1f), 9.999999957e-1f);
    float far = FMA(-2.0f, RECIPROCAL(QUICK_EXP(x + x) + 1.0f), 1.0f);
    return z < 0.390625f ? p : far;
}
"""
# The words of a text that needs this prelude, with spaces in between.
THREAD_NAMES = (
    "EACH_LANE( FMA( UNIT_FLOAT( LOCAL_ADD( FOLD_THREADS( MAXIMUM( MINIMUM( tanh_1( QUICK_ NEGATE_ "
    "RECIPROCAL( UNKNOWN_ONE"
)
