const int TEAM = 128;  // threads of a group: four warps
const uint ALL_LANES = 0xffffffffu;
template <int D> struct Panels { static const int count = (D + 63) / 64; };

template <bool HALF> DEVICE uint pair(float low, float high) {
    uint both;
    if (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
template <bool HALF> DEVICE float low_of(uint both) {
    float x;
    if (HALF) asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(x) : "r"(both));
    else x = __uint_as_float(both << 16);
    return x;
}
template <bool HALF> DEVICE float high_of(uint both) {
    float x;
    if (HALF) asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(both));
    else x = __uint_as_float(both & 0xffff0000u);
    return x;
}
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// One after the other of STAGES places in shared memory. The address of the first, which takes long to find,
// is not asked for again.
template <int STAGES, int BYTES> struct Ring {
    uint at;
    int stage = 0;
    __device__ __forceinline__ void turn() {
        bool last = stage == STAGES - 1;
        at += last ? -(STAGES - 1) * BYTES : BYTES;
        stage = last ? 0 : stage + 1;
    }
};
DEVICE float4 shared_floats(uint from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
    return x;
}

// Where a chunk of 8 columns of a row lies in a tile of so many rows, in bytes.
template <int ROWS> DEVICE uint chunk_place(int row, int chunk) {
    return (chunk >> 3) * (ROWS * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
}

// Begin to copy 8 or 16 bytes to shared memory; zeros if they are not there.
template <int BYTES> DEVICE void copy_begin(uint to, const void *from, bool there) {
    int bytes = there ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
            :: "r"(to), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
            :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
// What was begun since the last call is one step of copying.
DEVICE void copies_step() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All steps of this thread but the last LEFT have ended. A barrier has to follow, for the other threads.
template <int LEFT> DEVICE void copies_end() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Begin to copy ROWS rows of D columns, from `first` on, to a tile; unless WHOLE, only `left` are there.
template <int ROWS, int D, bool WHOLE> DEVICE void tile_begin(
    uint tile, const ushort *first, long stride, int left) {
    const int chunks = D / 8;
    if constexpr (TEAM % chunks == 0) {  // the next chunk of a thread is in its own column
        const int step = TEAM / chunks;
        int row = THREAD / chunks, chunk = THREAD % chunks;
        const ushort *from = first + row * stride + chunk * 8;
        uint to = tile + chunk_place<ROWS>(row, chunk);
#pragma unroll
        for (int at = 0; at < ROWS; at += step)
            if (ROWS % step == 0 || row + at < ROWS)
                copy_begin<16>(to + at * 128, from + at * stride, WHOLE || row + at < left);
    } else {
        for (int task = THREAD; task < ROWS * chunks; task += TEAM) {
            int row = task / chunks, chunk = task % chunks;
            const ushort *from = first + row * stride + chunk * 8;
            copy_begin<16>(tile + chunk_place<ROWS>(row, chunk), from, WHOLE || row < left);
        }
    }
}

// The left operand of this warp: 16 rows of a matrix of D columns, from `first` on; from `rows` on it is 0.
// It must be loaded as it is: NVRTC 13.0 lets a loop write over one that was made of shuffled words.
template <int D> DEVICE void left_rows(
    uint (&left)[D / 16][4], const ushort *matrix, long stride, int first, int rows) {
    int lane = THREAD % 32, row = first + lane / 4;
#pragma unroll
    for (int step = 0; step < D / 16; step++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const ushort *from = matrix + (row + e % 2 * 8) * stride + step * 16 + e / 2 * 8 + lane % 4 * 2;
            left[step][e] = row + e % 2 * 8 < rows ? *(const uint *)from : 0;
        }
}
// A result as the left operand of the next product.
template <bool HALF, int N> DEVICE void left_of(uint (&left)[N / 2][4], const float (&sums)[N][4]) {
#pragma unroll
    for (int step = 0; step < N / 2; step++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float *two = sums[2 * step + e / 2] + e % 2 * 2;
            left[step][e] = pair<HALF>(two[0], two[1]);
        }
}
template <int N> DEVICE void clear(float (&sums)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0;
}

// Write this warp's 16 rows of a result, times a factor for the upper and one for the lower 8, through shared
// memory of its own: to the rows of a matrix from `first` on, up to `rows`.
template <bool HALF, int D> DEVICE void store_rows(
    ushort *matrix, long stride, int first, int rows, uint own, const float (&sums)[D / 8][4], float upper,
    float lower) {
    int lane = THREAD % 32, row = lane / 4;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        uint to = own + chunk_place<16>(row, j) + lane % 4 * 4;  // 8 rows further the order is the same
        uint first_two = pair<HALF>(sums[j][0] * upper, sums[j][1] * upper);
        uint last_two = pair<HALF>(sums[j][2] * lower, sums[j][3] * lower);
        asm volatile("st.shared.b32 [%0], %1;" :: "r"(to), "r"(first_two) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" :: "r"(to + 1024), "r"(last_two) : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int task = lane; task < 2 * D; task += 32) {
        int of = task / (D / 8), chunk = task % (D / 8);
        float4 items = shared_floats(own + chunk_place<16>(of, chunk));  // bits
        if (first + of < rows)
            asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                :: "l"(matrix + (first + of) * stride + chunk * 8), "f"(items.x), "f"(items.y), "f"(items.z),
                "f"(items.w) : "memory");
    }
}
