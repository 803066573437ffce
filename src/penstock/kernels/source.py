"""The text of a kernel, and how it is called: what every kernel writer shares.

Kernels are written in a C that OpenCL and CUDA both take, with the words in which the two differ as macros.
Buffers come first, then the place of each in its memory, then scalars. Places count in units of `UNIT`
bytes, so that values of one arena are named by its one buffer and small numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNIT = 256  # bytes; every value in an arena begins at a multiple
MOST_PARAMETER_BYTES = 1000  # OpenCL promises 1024 for all parameters of a kernel

C_TYPES = {
    "bool": "uchar",
    "int8": "char",
    "uint8": "uchar",
    "int16": "short",
    "uint16": "ushort",
    "int32": "int",
    "uint32": "uint",
    "int64": "long",
    "uint64": "ulong",
    "bfloat16": "ushort",
    "float16": "half",
    "float32": "float",
    "float64": "double",
}
_STORED = {"bool": "uint8", "bfloat16": "uint16"}  # where C has no type of its own

OPENCL_PRELUDE = """
#define KERNEL __kernel void
#define GLOBAL __global
#define LOCAL __local
#define LOCAL_AT __local
#define CONSTANT __constant
#define DEVICE static inline
#define CALLED static inline
#define RESTRICT restrict
#define BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#define DEVICE_BARRIER barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#define GROUP(axis) ((int)get_group_id(axis))
#define THREAD ((int)get_local_id(0))
#define THREADS ((int)get_local_size(0))
#define FLOAT_BITS(x) as_uint(x)
#define BITS_FLOAT(u) as_float(u)
"""
# What OpenCL has and CUDA has not, without a header: NVRTC comes with none. OpenCL's `long` has 64 bits, and
# CUDA's has 32 on Windows; its `char` has a sign, which C leaves open. A half is bits in memory only.
CUDA_PRELUDE = """
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
#define DEVICE static __device__ __forceinline__
#define CALLED static __device__ __noinline__
#define RESTRICT __restrict__
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
CUDA_HALVES_PRELUDE = """
struct half { ushort bits; };
static __device__ inline float vload_half(size_t index, const half *from) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(from[index].bits));
    return x;
}
static __device__ inline void vstore_half(float x, size_t index, half *to) {
    ushort bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    to[index].bits = bits;
}
static __device__ inline float round_half(float x) {
    half y;
    vstore_half(x, 0, &y);
    return vload_half(0, &y);
}
static __device__ inline ushort TO_BFLOAT16(float x) {
#if __CUDA_ARCH__ >= 800
    ushort bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    uint u = FLOAT_BITS(x);
    return (x != x ? u | 0x400000 : u + 0x7fff + (u >> 16 & 1)) >> 16;
#endif
}
#define FROM_BFLOAT16(u) BITS_FLOAT((uint)(u) << 16)
"""
# A float as the nearest bfloat16, of two the even one; a NaN stays one. The values are names.
# PoCL from 3.1 on crashes where vload_half8 reads halves that are not aligned to 16 bytes: it gets variables.
HALVES_PRELUDE = """
#define BFLOAT16_OF(x, u) (((x) != (x) ? (u) | 0x400000 : (u) + 0x7fff + ((u) >> 16 & 1)) >> 16)
#define TO_BFLOAT16(x) ((ushort)BFLOAT16_OF(x, FLOAT_BITS(x)))
#define FROM_BFLOAT16(u) BITS_FLOAT((uint)(u) << 16)
#define TO_BFLOAT16_8(x) __builtin_convertvector(BFLOAT16_OF(x, as_uint8(x)), ushort8)
#define FROM_BFLOAT16_8(u) as_float8(__builtin_convertvector(u, uint8) << 16)
static inline float round_half(float x) {
    ushort u;
    vstore_half(x, 0, (half *)&u);
    return vload_half(0, (half *)&u);
}
static inline float8 from_halves_8(ushort8 u) {
    return vload_half8(0, (half *)&u);
}
static inline ushort8 to_halves_8(float8 x) {
    ushort8 u;
    vstore_half8(x, 0, (half *)&u);
    return u;
}
static inline float8 round_half8(float8 x) {
    return from_halves_8(to_halves_8(x));
}
"""
# Vectors in memory that is aligned for their items only. PoCL calls vload8 and convert_int8 as functions,
# which costs more than they do; these are plain instructions.
_ITEM_BYTES = {"float": 4, "int": 4, "uint": 4, "long": 8, "ulong": 8, "short": 2, "ushort": 2}
_ITEM_BYTES |= {"char": 1, "uchar": 1}
_LOOSE = [
    f"typedef {c_type}8 loose_{c_type}8 __attribute__((aligned({size})));"
    for c_type, size in _ITEM_BYTES.items()
]
_LOOSE += ["#ifdef cl_khr_fp64", "typedef double8 loose_double8 __attribute__((aligned(8)));", "#endif"]
VECTOR_PRELUDE = "\n".join(_LOOSE) + "\n"


# Functions of vectors that take less time than PoCL's, to 1 and 3 units in the last
# place. exp: x is n log(2)
# plus a rest; n comes from the low bits of a sum that rounds, and goes into the exponent; what would be
# subnormal is 0. tanh: a polynomial where exp would cancel. The coefficients are Chebyshev fits.
FUNCTIONS_PRELUDE = """
static inline float8 exp_8(float8 x) {
    float8 c = x > 88.7228394f ? (float8)(88.7228394f) : x < -87.3365479f ? (float8)(-87.3365479f) : x;
    float8 t = c * 1.44269504f + 12582912.0f;
    float8 n = t - 12582912.0f;
    float8 r = c - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float8 p = 4.166644833e-2f + r * (8.364383390e-3f + r * 1.393545454e-3f);
    p = 1.0f + (r + r * r * (5.000000015e-1f + r * (1.666656960e-1f + r * p)));
    float8 y = as_float8(as_int8(p) + (as_int8(t) << 23));
    return x > 88.7228394f ? (float8)(INFINITY) : x < -87.3365479f ? (float8)(0.0f) : x != x ? x : y;
}
static inline float8 tanh_8(float8 x) {
    float8 z = x * x;
    float8 p = -5.370970716e-2f + z * (2.055340632e-2f - z * 5.617152728e-3f);
    p = x * (9.999999957e-1f + z * (-3.333325488e-1f + z * (1.333099022e-1f + z * p)));
    return z < 0.390625f ? p : 1.0f - 2.0f / (exp_8(x + x) + 1.0f);
}
"""
# sin, cos and tan of PoCL are wrong in all lanes of a vector in which one is 2^23 or more, infinite or NaN.
# There, and from 2^22 on, each lane is computed by itself.
ANGLES_PRELUDE = """
#define EACH_BY_ITSELF(name, x) (float8)( \\
    name(x.s0), name(x.s1), name(x.s2), name(x.s3), name(x.s4), name(x.s5), name(x.s6), name(x.s7))
#define HAS_LARGE(x) any((as_int8(x) & 0x7fffffff) >= 0x4a800000)
static inline float8 sin_8(float8 x) { return HAS_LARGE(x) ? EACH_BY_ITSELF(sin, x) : sin(x); }
static inline float8 cos_8(float8 x) { return HAS_LARGE(x) ? EACH_BY_ITSELF(cos, x) : cos(x); }
static inline float8 tan_8(float8 x) { return HAS_LARGE(x) ? EACH_BY_ITSELF(tan, x) : tan(x); }
"""


def digest(text: str) -> str:
    """A short name for a text: the same one in every process, so that compilers' caches find it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class KernelSource:
    """One kernel: its text without prelude, its parameters, and the threads that it wants."""

    name: str
    text: str
    buffers: tuple[str, ...]  # dtypes; outputs first
    scalars: tuple[str, ...]  # dtypes
    grid: tuple[int, ...]
    group: tuple[int, ...]
    arrays: tuple[tuple[str, str, int], ...] = ()  # of the group's memory: dtype, name, items
    resident: int = 1  # groups that a unit of a GPU should have room for at a time
    complete: bool = False  # the text is whole: it needs no prelude, and is compiled by itself
    sizes: int = 0  # of its scalars, the first, which are sizes of this launch
    placed: bool = True  # it takes the places of its buffers; else each begins where its value does

    @property
    def signature(self) -> tuple[str, ...]:
        """The parameters, as `Device.compile` wants them."""
        stored = [_STORED.get(dtype, dtype) for dtype in self.buffers]
        places = ["int32"] * len(stored) if self.placed else []
        return (*(f"{dtype}*" for dtype in stored), *places, *self.scalars)


def declared(dtype: str, name: str, length: int) -> str:
    """The line that names an array in the memory of a group."""
    return f"    LOCAL {C_TYPES[dtype]} {name}[{length}];"


def head(
    name: str,
    outputs: Sequence[tuple[str, str]],
    inputs: Sequence[tuple[str, str]],
    scalars: Sequence[tuple[str, str]] = (),
) -> str:
    """The first lines of a kernel, up to its open brace and the places of its buffers: (dtype, name) each."""
    parameters = [f"GLOBAL {C_TYPES[dtype]} *{given}" for dtype, given in outputs]
    parameters += [f"GLOBAL const {C_TYPES[dtype]} *{given}" for dtype, given in inputs]
    parameters += [f"int {given}_place" for _, given in (*outputs, *inputs)]
    parameters += [f"{C_TYPES[dtype]} {given}" for dtype, given in scalars]
    lines = [f"KERNEL {name}({', '.join(parameters)}) {{"]
    for dtype, given in (*outputs, *inputs):
        items = UNIT // np.dtype(_STORED.get(dtype, dtype)).itemsize
        lines.append(f"    {given} += (size_t){given}_place * {items};")
    return "\n".join(lines) + "\n"
