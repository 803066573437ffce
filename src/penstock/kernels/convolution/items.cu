// Items of images and weights: how they are read, multiplied and written. A word has two of 16 bits, or one.
struct Bfloat16 {
    static constexpr int BYTES = 2;
    static constexpr bool HALF = false;
    typedef ushort Bits;
    static __device__ __forceinline__ float widened(ushort bits) { return __uint_as_float((uint)bits << 16); }
    static __device__ __forceinline__ uint pair(float low, float high) {
        uint both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    static __device__ __forceinline__ uint factor(uint word) { return word; }
    static __device__ __forceinline__ void multiply(float (&s)[4], const uint (&a)[4], uint b0, uint b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
struct Float16 {
    static constexpr int BYTES = 2;
    static constexpr bool HALF = true;
    typedef ushort Bits;
    static __device__ __forceinline__ float widened(ushort bits) {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
    static __device__ __forceinline__ uint pair(float low, float high) {
        uint both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    static __device__ __forceinline__ uint factor(uint word) { return word; }
    static __device__ __forceinline__ void multiply(float (&s)[4], const uint (&a)[4], uint b0, uint b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
struct Float32 {  // on tensor cores, factors are rounded to 10 bits of fraction
    static constexpr int BYTES = 4;
    typedef uint Bits;
    static __device__ __forceinline__ float widened(uint bits) { return __uint_as_float(bits); }
    static __device__ __forceinline__ uint factor(uint word) {
        uint rounded;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
        return rounded;
    }
    static __device__ __forceinline__ void multiply(float (&s)[4], const uint (&a)[4], uint b0, uint b1) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// V neighbouring items, whose place is a multiple of V.
template <class T, int V> DEVICE void read_items(float (&items)[V], const typename T::Bits *from) {
    typename T::Bits bits[V];
    if constexpr (V * T::BYTES == 16) *(uint4 *)bits = *(const uint4 *)from;
    else if constexpr (V * T::BYTES == 8) *(uint2 *)bits = *(const uint2 *)from;
    else
#pragma unroll
        for (int v = 0; v < V; v++) bits[v] = from[v];
#pragma unroll
    for (int v = 0; v < V; v++) items[v] = T::widened(bits[v]);
}
template <class T, int V> DEVICE void write_items(typename T::Bits *to, const float (&items)[V]) {
    if constexpr (T::BYTES == 4) {
        if constexpr (V == 4) *(float4 *)to = make_float4(items[0], items[1], items[2], items[3]);
        else
#pragma unroll
            for (int v = 0; v < V; v++) to[v] = __float_as_uint(items[v]);
    } else if constexpr (V == 8) {
        *(uint4 *)to = make_uint4(T::pair(items[0], items[1]), T::pair(items[2], items[3]),
                                  T::pair(items[4], items[5]), T::pair(items[6], items[7]));
    } else {
#pragma unroll
        for (int v = 0; v < V; v++) to[v] = (ushort)T::pair(items[v], 0);
    }
}

// Along an axis, item j of the window of a result i is item i * scale + first + j * step of the image, and is
// multiplied by item tap + j * tap_step of the weight.
struct Axis {
    int scale, first, step, taps, tap, tap_step;
};
// Of a convolution; or of its transpose, for results i * STRIDE + remainder: only every APART-th item of the
// weight reaches these.
template <bool TRANSPOSED, int SIZE, int STRIDE, int DILATION, int PADDING, int APART>
DEVICE Axis axis_of(int remainder) {
    if constexpr (!TRANSPOSED) return Axis{STRIDE, -PADDING, DILATION, SIZE, 0, 1};
    int tap = 0, before = remainder + PADDING;
#pragma unroll
    for (int k = APART - 1; k >= 0; k--)
        if ((before - k * DILATION) % STRIDE == 0) tap = k;
    bool reached = (before - tap * DILATION) % STRIDE == 0 && tap < SIZE;
    int taps = reached ? (SIZE - tap + APART - 1) / APART : 0;
    return Axis{1, (before - tap * DILATION) / STRIDE, -(APART * DILATION / STRIDE), taps, tap, APART};
}
