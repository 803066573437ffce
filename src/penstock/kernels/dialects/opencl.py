"""OpenCL C: for GPUs, and for CPUs, whose threads have vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.drivers.driver import KERNEL_COUNTERS
from penstock.kernels.dialects import vector_functions
from penstock.kernels.dialects.c_dialect import CDialect
from penstock.kernels.dialects.philox import philox_of_vectors
from penstock.kernels.dialects.thread_prelude import TANH, THREAD_NAMES, THREAD_WORDS
from penstock.kernels.ir import FIRST_TASK
from penstock.kernels.source import C_TYPES, KernelSource

_PRELUDE = """
#define KERNEL __kernel void
#define GLOBAL __global
#define LOCAL __local
#define LOCAL_AT __local
#define CONSTANT __constant
#define DEVICE static inline
#define CALLED static inline
#ifdef __AVX512F__  // or LLVM divides vectors of 512 bits, where it does not inline a function
#define PIECE static __attribute__((min_vector_width(512)))
#else
#define PIECE static
#endif
#define RESTRICT restrict
#define BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#define DEVICE_BARRIER barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#ifndef FENCE
#define FENCE __sync_synchronize()
#endif
#define GROUP(axis) ((int)get_group_id(axis))
#define THREAD ((int)get_local_id(0))
#define THREADS ((int)get_local_size(0))
#define FLOAT_BITS(x) as_uint(x)
#define BITS_FLOAT(u) as_float(u)
"""
# float32 to bfloat16, rounded to nearest even; a NaN stays a NaN. The macros evaluate their arguments twice.
# PoCL from 3.1 on crashes where vload_half8 reads float16 that is not aligned to 16 bytes: it gets variables.
_HALVES = """
#define BFLOAT16_OF(x, u) (((x) != (x) ? (u) | 0x400000 : (u) + 0x7fff + ((u) >> 16 & 1)) >> 16)
#define TO_BFLOAT16(x) ((ushort)BFLOAT16_OF(x, FLOAT_BITS(x)))
#define FROM_BFLOAT16(u) BITS_FLOAT((uint)(u) << 16)
#define TO_BFLOAT16_8(x) __builtin_convertvector(BFLOAT16_OF(x, as_uint8(x)), ushort8)
#define FROM_BFLOAT16_8(u) as_float8(__builtin_convertvector(u, uint8) << 16)
#define TO_BFLOAT16_16(x) __builtin_convertvector(BFLOAT16_OF(x, as_uint16(x)), ushort16)
#define FROM_BFLOAT16_16(u) as_float16(__builtin_convertvector(u, uint16) << 16)
static inline float round_half(float x) {
    ushort u;
    vstore_half(x, 0, (half *)&u);
    return vload_half(0, (half *)&u);
}
#ifdef __F16C__  // an instruction of x86, where PoCL would call functions
static inline float8 from_halves_8(ushort8 u) {
    return as_float8(__builtin_ia32_vcvtph2ps256(as_short8(u)));
}
static inline ushort8 to_halves_8(float8 x) {
    return as_ushort8(__builtin_ia32_vcvtps2ph256(x, 0));
}
#else
static inline float8 from_halves_8(ushort8 u) {
    return vload_half8(0, (half *)&u);
}
static inline ushort8 to_halves_8(float8 x) {
    ushort8 u;
    vstore_half8(x, 0, (half *)&u);
    return u;
}
#endif
#ifdef __AVX512F__
static inline float16 from_halves_16(ushort16 u) {
    return as_float16(__builtin_ia32_vcvtph2ps512_mask(as_short16(u), (float16)(0), -1, 4));
}
static inline ushort16 to_halves_16(float16 x) {
    return as_ushort16(__builtin_ia32_vcvtps2ph512_mask(x, 0, (short16)(0), -1));
}
#else
static inline float16 from_halves_16(ushort16 u) {
    return (float16)(from_halves_8(u.lo), from_halves_8(u.hi));
}
static inline ushort16 to_halves_16(float16 x) {
    return (ushort16)(to_halves_8(x.lo), to_halves_8(x.hi));
}
#endif
static inline float8 round_half8(float8 x) {
    return from_halves_8(to_halves_8(x));
}
static inline float16 round_half16(float16 x) {
    return from_halves_16(to_halves_16(x));
}
#if __OPENCL_C_VERSION__ == 200  // of kernels with counters; there PoCL 3.0 has these for variables alone
#define HALVES_IN(SPACE) \\
static inline __attribute__((overloadable)) float half_at(size_t index, const SPACE half *from) { \\
    ushort u = ((const SPACE ushort *)from)[index]; \\
    return vload_half(0, (half *)&u); \\
} \\
static inline __attribute__((overloadable)) void put_half(float x, size_t index, SPACE half *to) { \\
    ushort u; \\
    vstore_half(x, 0, (half *)&u); \\
    ((SPACE ushort *)to)[index] = u; \\
}
HALVES_IN(__global)
HALVES_IN(__local)
HALVES_IN(__private)
#undef vload_half
#undef vstore_half
#define vload_half half_at
#define vstore_half put_half
#endif
"""
# Vectors in memory with the alignment of their items. PoCL calls vload8 and convert_int8 as functions, which
# costs more than their work; these are plain instructions.
_ITEM_BYTES = {"float": 4, "int": 4, "uint": 4, "long": 8, "ulong": 8, "short": 2, "ushort": 2}
_ITEM_BYTES |= {"char": 1, "uchar": 1}


def _loose(item: str, width: int, size: int) -> str:
    return f"typedef {item}{width} loose_{item}{width} __attribute__((aligned({size})));\n"


_VECTORS = "".join(_loose(item, 8, size) for item, size in _ITEM_BYTES.items())
_VECTORS += f"#ifdef cl_khr_fp64\n{_loose('double', 8, 8)}#endif\n"
_VECTORS_OF_16 = {f"loose_{item}16": _loose(item, 16, size) for item, size in _ITEM_BYTES.items()}
# Of `a != a ? a : a > b ? a : b`, LLVM makes two comparisons and a choice: that takes twice as long where
# results are compared next. The instruction of x86 is `a > b ? a : b` for all values. LLVM leaves it alone.
_EXTREMES = """
#ifdef __AVX__
#define larger_8(a, b) __builtin_ia32_maxps256(a, b)
#define smaller_8(a, b) __builtin_ia32_minps256(a, b)
#else
#define larger_8(a, b) ((a) > (b) ? (a) : (b))
#define smaller_8(a, b) ((a) < (b) ? (a) : (b))
#endif
#ifdef __AVX512F__
#define larger_16(a, b) __builtin_ia32_maxps512(a, b, 4)
#define smaller_16(a, b) __builtin_ia32_minps512(a, b, 4)
#else
#define larger_16(a, b) ((a) > (b) ? (a) : (b))
#define smaller_16(a, b) ((a) < (b) ? (a) : (b))
#endif
#define larger_4(a, b) ((a) > (b) ? (a) : (b))
#define smaller_4(a, b) ((a) < (b) ? (a) : (b))
#define larger_2 larger_4
#define smaller_2 smaller_4
"""

# Without an extension, OpenCL has only pointers to float16; PoCL loses what is written after barriers through
# those to private memory. So the conversion works on bits.
_THREADS = """
#define BITS_DOUBLE(u) as_double(u)
#define DOUBLE_BITS(x) as_ulong(x)
#define BFLOAT16_PAIR(a, b) TWO_SHORTS(TO_BFLOAT16(a), TO_BFLOAT16(b))
#define UNIT_FLOAT(word, mask) BITS_FLOAT(((word) & (mask)) | 0x3f800000)
#define LOCAL_ADD(counter, more) atomic_add(&counter, more)
#define LOAD_ONCE_4 LOAD_4
#define UNKNOWN_ONE 1
#define WAIT_FOR_EARLIER
#define FORGET(word)
#define NEGATE_INT8(x) ((char)(0 - (uchar)(x)))
#define NEGATE_INT16(x) ((short)(0 - (ushort)(x)))
#define MAXIMUM(a, b) (((a) > (b)) | ((a) != (a)) ? (a) : (b))
#define MINIMUM(a, b) (((a) < (b)) | ((a) != (a)) ? (a) : (b))
#define QUICK_EXP(x) exp(x)
#define RECIPROCAL(x) (1 / (x))
#define QUICK_DIVIDE(a, b) ((a) / (b))
#define FMA(a, b, c) mad(a, b, c)
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

# Before kernels of threads, where only FMA contracts a product and a sum.
_NO_CONTRACTION = "#pragma OPENCL FP_CONTRACT OFF"

# Names for users' own kernels.
_RAW_WORDS = """\
#define GROUP_0 ((int)get_group_id(0))
#define GROUP_1 ((int)get_group_id(1))
#define GROUP_2 ((int)get_group_id(2))
#define GROUPS_0 ((int)get_num_groups(0))
#define THREAD \\
    ((int)(get_local_id(0) + get_local_size(0) * (get_local_id(1) + get_local_size(1) * get_local_id(2))))
#define LOCAL __local
#define BARRIER barrier(CLK_LOCAL_MEM_FENCE)
"""


# Tasks that the workgroups of a CPU's kernel share: see `ir.SharedTasks`. Of its counters, the first counts
# tasks that are done, the second, in another cache line, workgroups that have ended, and the others tasks
# that were taken. A wait is long after about a millisecond: the core of who does the task is taken, too.
_TASKS = f"""
#define COUNTERS {KERNEL_COUNTERS}
#ifdef __x86_64__
#define PAUSE __builtin_ia32_pause()
#else
#define PAUSE FENCE
#endif
#define END_TASKS(counters) end_tasks(counters, sizeof(counters) / sizeof(int))
static inline int next_task(__global int *counters, int number) {{
    return __atomic_fetch_add(&counters[{FIRST_TASK} + number], 1, __ATOMIC_RELAXED);
}}
static inline void task_done(__global int *counters) {{
    FENCE;
    __atomic_fetch_add(&counters[0], 1, __ATOMIC_RELEASE);
}}
static inline bool are_done(__global int *counters, int tasks) {{
    for (int pauses = 0; pauses < 1 << 15; pauses++) {{
        if (__atomic_load_n(&counters[0], __ATOMIC_ACQUIRE) >= tasks) return true;
        PAUSE;
    }}
    return false;
}}
static inline void end_tasks(__global int *counters, int length) {{
    int ended = __atomic_fetch_add(&counters[{FIRST_TASK // 2}], 1, __ATOMIC_ACQ_REL) + 1;
    for (int at = 0; at < length && ended == (int)get_num_groups(0); at++) counters[at] = 0;
}}
"""


class OpenCL(CDialect):
    """OpenCL C."""

    name = "opencl"
    label = "OpenCL C"
    # PoCL's compiler fails on barriers in several branches, even if all threads take the same branch.
    barriers_in_branches = False
    raw_types = C_TYPES
    raw_words = _RAW_WORDS
    raw_global = "__global "
    raw_restrict = "restrict"
    raw_opening = "__kernel void"
    prelude = _PRELUDE
    optional_preludes: Mapping[str, str] = {
        **vector_functions.TEXTS,
        **philox_of_vectors(8),
        **philox_of_vectors(16),
        **dict.fromkeys(("larger_", "smaller_"), _EXTREMES),
        "COUNTERS": _TASKS,
        "loose_": _VECTORS,
        **_VECTORS_OF_16,
        **dict.fromkeys(("BFLOAT16", "round_half", "_halves_"), _HALVES),
        **CDialect.optional_preludes,
        **dict.fromkeys(THREAD_NAMES.split(), THREAD_WORDS + _THREADS + TANH),
    }

    def contracts(self, source: KernelSource) -> bool:
        """Where it is the user's own, or has vectors: a CPU's compiler does not contract two statements."""
        return isinstance(source.body, str) or source.body.kernel.vectors

    def whole_text(self, sources: Sequence[KernelSource], preludes: Mapping[str, str]) -> str:
        text = super().whole_text(sources, preludes)
        return text if any(map(self.contracts, sources)) else f"{_NO_CONTRACTION}\n{text}"
