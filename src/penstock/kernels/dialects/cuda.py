"""CUDA C, which NVRTC compiles without any header."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.drivers.driver import BEGIN_EARLY, NO_CONTRACTION, WAIT_FIRST
from penstock.kernels import ir
from penstock.kernels.dialects.c_dialect import CDialect
from penstock.kernels.dialects.thread_prelude import TANH, THREAD_NAMES, THREAD_WORDS
from penstock.kernels.source import C_TYPES, KernelSource

# Names that OpenCL has and CUDA lacks; NVRTC comes without headers. OpenCL's `long` has 64 bits, and CUDA's
# 32 on Windows; OpenCL's `char` is signed, which C leaves open. float16 is bits in memory only.
_PRELUDE = """
#ifdef _WIN32
#define long long long
#endif
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
#define char signed char
#define KERNEL extern "C" __global__ void
#define GLOBAL
#define LOCAL __shared__
#define LOCAL_AT
#define CONSTANT static __constant__
#define COUNTERS static __device__
#define DEVICE static __device__ __forceinline__
#define CALLED static __device__ __noinline__
#define RESTRICT __restrict__
// A kernel may be launched while those that it depends on still run, and waits for them before it reads what
// they write. What depends on it may be launched at once, too.
#if __CUDA_ARCH__ >= 900
#define BEGIN_EARLY asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define WAIT_FOR_EARLIER asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define BEGIN_EARLY
#define WAIT_FOR_EARLIER
#endif
#define BARRIER __syncthreads()
#define DEVICE_BARRIER __syncthreads()
#define GROUP(axis) ((int)GROUP_##axis)
#define GROUP_0 blockIdx.x
#define GROUP_1 blockIdx.y
#define GROUP_2 blockIdx.z
#define THREAD ((int)threadIdx.x)
#define THREADS ((int)blockDim.x)
#define FLOAT_BITS(x) __float_as_uint(x)
#define BITS_FLOAT(u) __uint_as_float(u)
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
"""
_HALVES = """
struct half { ushort bits; };
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
DEVICE float vload_half(size_t index, const half *from) { return half_float(from[index].bits); }
DEVICE void vstore_half(float x, size_t index, half *to) { to[index].bits = float_half(x); }
DEVICE float round_half(float x) { return half_float(float_half(x)); }
DEVICE ushort TO_BFLOAT16(float x) {
#if __CUDA_ARCH__ >= 800
    ushort bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    uint u = FLOAT_BITS(x);
    return (x != x ? u | 0x400000 : u + 0x7fff + (u >> 16 & 1)) >> 16;
#endif
}
DEVICE uint BFLOAT16_PAIR(float a, float b) {
#if __CUDA_ARCH__ >= 800
    uint pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
#else
    return TO_BFLOAT16(a) | (uint)TO_BFLOAT16(b) << 16;
#endif
}
#define FROM_BFLOAT16(u) BITS_FLOAT((uint)(u) << 16)
"""
# The threads of a warp exchange values in the same order, so that all have the same result.
_THREADS = """
#define FMA(a, b, c) fma(a, b, c)
#define BITS_DOUBLE(u) __longlong_as_double(u)
#define DOUBLE_BITS(x) ((ulong)__double_as_longlong(x))
#define LOCAL_ADD(counter, more) atomicAdd(&counter, more)
// Large matrices would drive what is read again out of the cache of a multiprocessor. Not `.nc`, which might
// be moved before the wait for the kernel that wrote them.
#define LOAD_ONCE_4(words, at, from) \\
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" \\
        : "=r"(words[at]), "=r"(words[at + 1]), "=r"(words[at + 2]), "=r"(words[at + 3]) : "l"(from));
#define UNKNOWN_ONE ((int)gridDim.z)
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
DEVICE int NEGATED(int x) {
    int y = -x;
    asm("" : "+r"(y));
    return y;
}
#define NEGATE_INT8(x) ((char)NEGATED(x))
#define NEGATE_INT16(x) ((short)NEGATED(x))
DEVICE float QUICK_EXP_2(float x) {  // a power of 2
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float QUICK_EXP(float x) { return QUICK_EXP_2(x * 1.44269504f); }
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
// A number from 1 to 2, with bits of a word as its fraction. Written in C it takes two instructions.
DEVICE float UNIT_FLOAT(uint word, uint mask) {
    uint bits;
    asm("lop3.b32 %0, %1, %2, 0x3f800000, 0xea;" : "=r"(bits) : "r"(word), "r"(mask));
    return BITS_FLOAT(bits);
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
"""
# Pairs of 16-bit floats in a word, and products of tiles. An integer of 4 bits is put into the fraction of
# 128 or 1024, from which 136 or 1032 is subtracted; -0 is added to a product.
_TILES = """
#define PAIR_FUNCTIONS(NAME, type, size, one, less) \\
DEVICE uint INTEGERS_##NAME(uint word) { \\
    uint pair; \\
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(pair) : "r"(word), "r"(size)); \\
    asm("fma.rn." type "x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(one), "r"(less)); \\
    return pair; \\
} \\
DEVICE uint SCALED_##NAME(uint pair, uint scale) { \\
    asm("fma.rn." type "x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(scale), "r"(0x80008000)); \\
    return pair; \\
} \\
DEVICE void MULTIPLY_TILES_##NAME(float &t0, float &t1, float &t2, float &t3, \\
    uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) { \\
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 " \\
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \\
        : "+f"(t0), "+f"(t1), "+f"(t2), "+f"(t3) \\
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); \\
}
#define PACK_LOW(a, b) __byte_perm(a, b, 0x5410)
#define PACK_HIGH(a, b) __byte_perm(a, b, 0x7632)
PAIR_FUNCTIONS(BFLOAT16, "bf16", 0x43004300, 0x3f803f80, 0xc308c308)
PAIR_FUNCTIONS(FLOAT16, "f16", 0x64006400, 0x3c003c00, 0xe408e408)
"""
# Copies to local memory that go on while a thread computes, past the cache of a multiprocessor.
_COPIES = """
DEVICE void COPY_AHEAD(void *to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"((uint)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory");
}
#define END_COPIES asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT_FOR_COPIES(left) asm volatile("cp.async.wait_group %0;" :: "n"(left) : "memory")
DEVICE void LOAD_TILES(uint &t0, uint &t1, uint &t2, uint &t3, const void *line) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(t0), "=r"(t1), "=r"(t2), "=r"(t3) : "r"((uint)__cvta_generic_to_shared(line)) : "memory");
}
DEVICE void LOAD_PART(uint &w0, uint &w1, uint &w2, uint &w3, const void *part) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w0), "=r"(w1), "=r"(w2), "=r"(w3) : "r"((uint)__cvta_generic_to_shared(part)) : "memory");
}
"""
# The last of `count` workgroups sets the counter back to 0. A barrier before orders what all threads of a
# workgroup wrote before this thread's operation, as in CUDA's own barriers of grids.
_LAST = """
DEVICE int COMES_LAST(const int *counter, int count) {
    uint before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(counter), "r"(count - 1) : "memory");
    return before == count - 1;
}
"""
# An array has the same address in the local memory of all workgroups. A barrier orders local memory only: the
# release that is the default would also wait for what a thread has written to device memory.
_CLUSTERS = """
#define CLUSTER_BARRIER asm volatile("fence.release.sync_restrict::shared::cta.cluster;" \\
    "barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory")
DEVICE float CLUSTER_LOAD(const float *array, int index, int rank) {
    float x;
    asm volatile("{ .reg .u32 at; mapa.shared::cluster.u32 at, %1, %2; ld.shared::cluster.f32 %0, [at]; }"
        : "=f"(x) : "r"((uint)__cvta_generic_to_shared(array + index)), "r"(rank));
    return x;
}
DEVICE float CLUSTER_SUM(const float *array, int index, int count) {
    float sum = 0;
    _Pragma("unroll") for (int rank = 0; rank < count; rank++) sum += CLUSTER_LOAD(array, index, rank);
    return sum;
}
"""

# Names for users' own kernels.
_RAW_WORDS = """\
#define GROUP_0 ((int)blockIdx.x)
#define GROUP_1 ((int)blockIdx.y)
#define GROUP_2 ((int)blockIdx.z)
#define GROUPS_0 ((int)gridDim.x)
#define THREAD ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)))
#define LOCAL __shared__
#define BARRIER __syncthreads()
"""
_PLAIN_TYPES = {
    "char": "signed char",
    "uchar": "unsigned char",
    "ushort": "unsigned short",
    "uint": "unsigned int",
    "long": "long long",
    "ulong": "unsigned long long",
    "half": "unsigned short",
}


class Cuda(CDialect):
    """CUDA C."""

    name = "cuda"
    label = "CUDA C"
    compiles_side_by_side = True
    shuffles = True
    device_atomics = True
    threads_may_end = True
    raw_types: Mapping[str, str] = {dtype: _PLAIN_TYPES.get(word, word) for dtype, word in C_TYPES.items()}
    raw_words = _RAW_WORDS
    raw_global = ""
    raw_restrict = "__restrict__"
    raw_opening = 'extern "C" __global__ void __launch_bounds__({})'
    prelude = _PRELUDE
    optional_preludes: Mapping[str, str] = {
        **dict.fromkeys(("BFLOAT16", "round_half"), _HALVES),
        **CDialect.optional_preludes,
        **dict.fromkeys(THREAD_NAMES.split(), THREAD_WORDS + _THREADS + TANH),
        "half *": _HALVES,
        "MULTIPLY_TILES": _TILES,
        "COPY_AHEAD": _COPIES,
        "COMES_LAST": _LAST,
        "CLUSTER_": _CLUSTERS,
    }

    def contracts(self, source: KernelSource) -> bool:
        """Where they are written by hand."""
        return isinstance(source.body, str)

    def whole_text(self, sources: Sequence[KernelSource], preludes: Mapping[str, str]) -> str:
        text = super().whole_text(sources, preludes)
        return text if any(map(self.contracts, sources)) else NO_CONTRACTION + text

    def text(self, source: KernelSource) -> str:
        """A kernel's text with its launch bounds, or NVRTC gives each thread too many registers.

        Its first statement waits for the kernels that it depends on, unless a later one does; a user's own
        kernel has none.
        """
        before, opening, rest = source.text.partition(f"KERNEL {source.name}(")
        if not opening:
            return source.text
        bounds = [math.prod(source.group), *([source.resident] if source.resident > 1 else ())]
        parameters, brace, body = rest.partition("{")
        cluster = f" __cluster_dims__({source.cluster}, 1, 1)" if source.cluster > 1 else ""
        opening = f"KERNEL __launch_bounds__({', '.join(map(str, bounds))}){cluster} {source.name}("
        later = not isinstance(source.body, str) and _waits(source.body.kernel)
        begin = BEGIN_EARLY if later else WAIT_FIRST
        return f"{before}{opening}{parameters}{brace}{begin}{body}"


def _waits(kernel: ir.KernelIR) -> bool:
    """Whether a statement of a kernel, or of each of its functions, waits for earlier launches."""
    if kernel.functions:
        return all(_waits(function.kernel) for function in kernel.functions)
    return any(isinstance(statement, ir.WaitForEarlier) for statement in ir.walk(kernel.body))
