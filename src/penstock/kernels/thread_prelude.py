"""Words that the kernels of GPUs use: lanes, memory in words of 4 bytes, and sums over the threads of a row.

A thread reads and writes up to 16 bytes at once, as words, and takes its items out of them. As all memory is
read and written in words, whatever the dtypes, no compiler can think that a value and one that is written
over it lie apart because their types differ.
"""

from __future__ import annotations

_WORDS = """
#define EACH_LANE(n) _Pragma("unroll") for (int l_ = 0; l_ < n; l_++)
#define LOAD_1(words, at, from) words[at] = *(GLOBAL const uint *)(from);
#define LOAD_2(words, at, from) \\
    { uint2 all_ = *(GLOBAL const uint2 *)(from); words[at] = all_.x; words[at + 1] = all_.y; }
#define LOAD_4(words, at, from) \\
    { uint4 all_ = *(GLOBAL const uint4 *)(from); \\
      words[at] = all_.x; words[at + 1] = all_.y; words[at + 2] = all_.z; words[at + 3] = all_.w; }
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
#define FOUR_BYTES(a, b, c, d) \\
    TWO_SHORTS((uint)(uchar)(a) | (uint)(uchar)(b) << 8, (uint)(uchar)(c) | (uint)(uchar)(d) << 8)
"""
# tanh to 3 units in the last place: a polynomial, by a Chebyshev fit, where exp would cancel.
_TANH = """
DEVICE float tanh_1(float x) {
    float z = x * x;
    float p = -5.370970716e-2f + z * (2.055340632e-2f - z * 5.617152728e-3f);
    p = x * (9.999999957e-1f + z * (-3.333325488e-1f + z * (1.333099022e-1f + z * p)));
    float far = 1.0f - 2.0f * RECIPROCAL(QUICK_EXP(x + x) + 1.0f);
    return z < 0.390625f ? p : far;
}
"""
# Without an extension, C has pointers to halves only; through those to memory of a thread, PoCL loses what is
# written after barriers.
_OPENCL = """
#define BITS_DOUBLE(u) as_double(u)
#define DOUBLE_BITS(x) as_ulong(x)
#define BFLOAT16_PAIR(a, b) TWO_SHORTS(TO_BFLOAT16(a), TO_BFLOAT16(b))
#define FLOAT16_PAIR(a, b) TWO_SHORTS(float_half(a), float_half(b))
#define LOCAL_NEXT(counter) atomic_inc(&counter)
#define FORGET(word)
#define NEGATE_INT8(x) ((char)(0 - (uchar)(x)))
#define NEGATE_INT16(x) ((short)(0 - (ushort)(x)))
#define MAXIMUM(a, b) (((a) > (b)) | ((a) != (a)) ? (a) : (b))
#define MINIMUM(a, b) (((a) < (b)) | ((a) != (a)) ? (a) : (b))
#define QUICK_EXP(x) exp(x)
#define QUICK_EXP_LESS(x, less) exp((x) - (less))
#define RECIPROCAL(x) (1 / (x))
#define QUICK_DIVIDE(a, b) ((a) / (b))
#define FOLD_THREADS(type, x, combined, array, threads) \\
    array[THREAD] = x; \\
    for (int half_ = threads / 2; half_ > 0; half_ /= 2) { \\
        BARRIER; \\
        if (THREAD % threads < half_) { \\
            type other_ = array[THREAD + half_]; \\
            array[THREAD] = x = combined; \\
        } \\
    } \\
    BARRIER; \\
    x = array[THREAD / threads * threads];
DEVICE float half_float(ushort u) {
    uint size = u & 0x7fff;
    float x = size < 0x400 ? size * 5.9604644775390625e-8f  // 2 to the power of -24
                           : BITS_FLOAT((size << 13) + (size < 0x7c00 ? 0x38000000 : 0x70000000));
    return u & 0x8000 ? -x : x;
}
DEVICE ushort float_half(float x) {
    uint u = FLOAT_BITS(x), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7e00;
    if (size >= 0x477ff000) return sign | 0x7c00;
    if (size < 0x38800000) return sign | (uint)rint(BITS_FLOAT(size) * 16777216.0f);
    return sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
}
"""
# The threads of a warp exchange numbers, all in the same order, so that all have the same result.
_CUDA = """
#define BITS_DOUBLE(u) __longlong_as_double(u)
#define DOUBLE_BITS(x) ((ulong)__double_as_longlong(x))
#define FLOAT16_PAIR(a, b) TWO_SHORTS(float_half(a), float_half(b))
#define LOCAL_NEXT(counter) atomicAdd(&counter, 1)
#define FORGET(word) asm volatile("" : "+r"(word))
#define FOLD_THREADS(type, x, combined, array, threads) \\
    _Pragma("unroll") for (int half_ = (threads < 32 ? threads : 32) / 2; half_ > 0; half_ /= 2) { \\
        type other_ = __shfl_xor_sync(0xffffffff, x, half_); \\
        x = combined; \\
    } \\
    if (threads > 32) { \\
        if (THREAD % 32 == 0) array[THREAD / 32] = x; \\
        BARRIER; \\
        x = array[THREAD / threads * (threads / 32) + THREAD % (threads / 32)]; \\
        _Pragma("unroll") for (int half_ = threads / 64; half_ > 0; half_ /= 2) { \\
            type other_ = __shfl_xor_sync(0xffffffff, x, half_); \\
            x = combined; \\
        } \\
    }
// The compiler must not see what is negated: widened, the smallest number would lose its sign.
DEVICE char NEGATE_INT8(char x) {
    int y = -x;
    asm("" : "+r"(y));
    return (char)y;
}
DEVICE short NEGATE_INT16(short x) {
    int y = -x;
    asm("" : "+r"(y));
    return (short)y;
}
DEVICE float QUICK_EXP(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}
DEVICE float QUICK_EXP_LESS(float x, float less) {  // of the difference; the product is made once for a row
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, 1.44269504f, -1.44269504f * less)));
    return y;
}
DEVICE float QUICK_DIVIDE(float a, float b) {  // to 2 units in the last place, of bfloat16's smallest, too
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
DEVICE float RECIPROCAL(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float MAXIMUM(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return a != a || b != b ? a + b : fmaxf(a, b);
#endif
}
DEVICE float MINIMUM(float a, float b) { return -MAXIMUM(-a, -b); }
DEVICE uint BFLOAT16_PAIR(float a, float b) {
    uint pair;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
#else
    uint u = FLOAT_BITS(a), v = FLOAT_BITS(b);
    pair = (a != a ? u | 0x400000 : u + 0x7fff + (u >> 16 & 1)) >> 16;
    pair |= (b != b ? v | 0x400000 : v + 0x7fff + (v >> 16 & 1)) & 0xffff0000;
#endif
    return pair;
}
DEVICE float half_float(ushort u) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(u));
    return x;
}
DEVICE ushort float_half(float x) {
    ushort u;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(u) : "f"(x));
    return u;
}
"""
THREAD_PRELUDES = {"opencl": _WORDS + _OPENCL + _TANH, "cuda": _WORDS + _CUDA + _TANH}
# A text that has none of these words needs no prelude.
THREAD_WORDS = (
    "EACH_LANE(",
    "LOCAL_NEXT(",
    "FOLD_THREADS(",
    "MAXIMUM(",
    "MINIMUM(",
    "tanh_1(",
    "QUICK_",
    "NEGATE_",
)
