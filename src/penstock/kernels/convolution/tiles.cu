DEVICE uint shared_address(const void *memory) { return (uint)__cvta_generic_to_shared(memory); }
// Begin to copy 16 bytes to shared memory; zeros if they are not there. Windows overlap, so what is read
// stays in the cache of the multiprocessor.
DEVICE void begin_copy(uint to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void end_step() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}
DEVICE void load_tiles(uint (&words)[4], uint from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
}
DEVICE void load_turned_tiles(uint (&words)[4], uint from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
}
DEVICE uint shared_word(uint from) {
    uint word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}
// Products of four warps together, from shared memory, run beside what follows.
template <class T, int WARPS_M, int N> struct Warpgroups {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static constexpr bool used = T::BYTES == 2 && WARPS_M % 4 == 0 && N % 8 == 0;
#else
    static constexpr bool used = false;
#endif
};
DEVICE void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int M, int N> DEVICE void wait_for_products(float (&sums)[M][N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int j = 0; j < N; j++)  // nothing that uses them may be moved before the wait
        asm volatile("" : "+f"(sums[0][j][0]), "+f"(sums[0][j][1]), "+f"(sums[0][j][2]), "+f"(sums[0][j][3])
            :: "memory");
}
// What `wgmma` wants to know of a tile: where it is, how far from 8 rows to the next, and how it is swizzled.
template <int ROW> DEVICE ulong tile_at(uint from) {
    return (ROW == 64 ? 0x8000002000010000ul : 0x4000004000400000ul) | (from >> 4);
}

template <class T> DEVICE void round_factors(uint (&words)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) words[e] = T::factor(words[e]);
}

// Add the products of M tiles with N tiles, of which two are in the words of `b` together.
template <class T, int M, int N>
DEVICE void add_products(float (&sums)[M][N][4], const uint (&a)[M][4], const uint (&b)[N / 2][4]) {
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            T::multiply(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
}

// Where 16 bytes of a row of ROW bytes are: swizzled so that 8 rows are in all banks.
template <int ROW> DEVICE uint place_of(int row, int unit) {
    return row * ROW + (ROW == 64 ? ((unit ^ (row >> 1)) & 3) << 4 : ((unit ^ row) & 7) << 4);
}

template <bool MANY> struct Bits { typedef uint Mask; };
template <> struct Bits<true> { typedef ulong Mask; };
// Items of 16 bytes that a thread reads of windows, one after the other: channels of an item of the window.
template <class T, class S, int ROW> struct Reader {
    static constexpr int STEP = ROW / T::BYTES, UNIT = 16 / T::BYTES;
    typedef typename Bits<(S::KD * S::KH * S::KW > 32)>::Mask Mask;
    // Where channels divide evenly, the items of a window come first: neighbours read the same pixels.
    static constexpr bool WINDOW_FIRST = S::IN % STEP == 0;
    Axis az, ay, ax;
    int channel, item, jz, jy, jx;
    __device__ __forceinline__ Reader(Axis z, Axis y, Axis x, int unit)
        : az(z), ay(y), ax(x), channel(unit * UNIT), item(0), jz(0), jy(0), jx(0) {
        if (!WINDOW_FIRST) carry();
    }
    __device__ __forceinline__ int steps() const {
        int items = az.taps * ay.taps * ax.taps;
        return WINDOW_FIRST ? items * (S::IN / STEP) : (items * S::IN + STEP - 1) / STEP;
    }
    __device__ __forceinline__ bool next_item() {  // whether it was the last
        item++;
        if (++jx < ax.taps) return false;
        jx = 0;
        if (++jy < ay.taps) return false;
        jy = 0;
        return ++jz >= az.taps;
    }
    __device__ __forceinline__ void carry() {
        while (channel >= S::IN) {
            channel -= S::IN;
            next_item();
        }
    }
    __device__ __forceinline__ void next() {
        if (WINDOW_FIRST) {
            if (next_item()) {
                item = jz = 0;
                channel += STEP;
            }
        } else {
            channel += STEP;
            carry();
        }
    }
    __device__ __forceinline__ bool inside() const { return WINDOW_FIRST || jz < az.taps; }
    // Which items of a window that begins here are in the image, as bits.
    __device__ __forceinline__ Mask items_inside(int z0, int y0, int x0) const {
        Mask row = 0, whole = 0;
        for (int j = 0; j < ax.taps; j++) row |= (Mask)((uint)(x0 + j * ax.step) < S::W) << j;
        for (int k = 0; k < az.taps; k++)
            for (int j = 0; j < ay.taps; j++)
                if ((uint)(z0 + k * az.step) < S::D && (uint)(y0 + j * ay.step) < S::H)
                    whole |= row << (k * ay.taps + j) * ax.taps;
        return whole;
    }
    __device__ __forceinline__ int weight_place() const {
        int tap = ((az.tap + jz * az.tap_step) * S::KH + ay.tap + jy * ay.tap_step) * S::KW + ax.tap
            + jx * ax.tap_step;
        return tap * S::IN + channel;
    }
};

// The convolution of images (batch, D, H, W, GROUPS * IN) with a weight (GROUPS * OUT, KD, KH, KW, IN), or its
// transpose: (batch, OD, OH, OW, GROUPS * OUT). A workgroup has ROWS pixels of the result, all of the same
// remainders by the stride if it is a transpose, and COLUMNS channels of a group.
template <class T, class S, int ROWS, int COLUMNS, int WARPS_M, int WARPS_N, int ROW, int STAGES>
DEVICE void convolution_tiles(void *out, const void *x, const void *weight, int batch) {
    constexpr int COUNT = 32 * WARPS_M * WARPS_N, UNITS = ROW / 16, PASS = COUNT / UNITS;
    constexpr int BYTES = (ROWS + COLUMNS) * ROW;  // of a stage
    constexpr int M = ROWS / WARPS_M / 16, N = COLUMNS / WARPS_N / 8;
    constexpr bool TOGETHER = Warpgroups<T, WARPS_M, N>::used && WARPS_N == 1;
    constexpr int COLUMN_TILES = (S::OUT + COLUMNS - 1) / COLUMNS;
    constexpr int PZ = S::TRANSPOSED ? S::SD : 1, PY = S::TRANSPOSED ? S::SH : 1;
    constexpr int PX = S::TRANSPOSED ? S::SW : 1;
    __shared__ __align__(1024) uchar memory[STAGES * BYTES];
    int block = GROUP(0);
    int column = block % COLUMN_TILES * COLUMNS;
    block /= COLUMN_TILES;
    int rx = block % PX, ry = block / PX % PY, rz = block / (PX * PY) % PZ;
    block /= PX * PY * PZ;
    int group = block % S::GROUPS, first_row = block / S::GROUPS * ROWS;
    int cz = (S::OD - rz + PZ - 1) / PZ, cy = (S::OH - ry + PY - 1) / PY, cx = (S::OW - rx + PX - 1) / PX;
    int rows = batch * cz * cy * cx;
    if (first_row >= rows) return;
    Axis az = axis_of<S::TRANSPOSED, S::KD, S::SD, S::AD, S::PD, S::ED>(rz);
    Axis ay = axis_of<S::TRANSPOSED, S::KH, S::SH, S::AH, S::PH, S::EH>(ry);
    Axis ax = axis_of<S::TRANSPOSED, S::KW, S::SW, S::AW, S::PW, S::EW>(rx);
    int unit = THREAD % UNITS, own = THREAD / UNITS;
    Reader<T, S, ROW> reader(az, ay, ax, unit);

    const uchar *from[ROWS / PASS];
    typename Reader<T, S, ROW>::Mask seen[ROWS / PASS];
#pragma unroll
    for (int i = 0; i < ROWS / PASS; i++) {
        int row = first_row + own + i * PASS;
        int across = row % cx, down = row / cx % cy, deep = row / (cx * cy) % cz, image = row / (cx * cy * cz);
        int z0 = deep * az.scale + az.first, y0 = down * ay.scale + ay.first, x0 = across * ax.scale + ax.first;
        int pixel = ((image * S::D + z0) * S::H + y0) * S::W + x0;
        from[i] = (const uchar *)x + ((long)pixel * (S::GROUPS * S::IN) + group * S::IN) * T::BYTES;
        seen[i] = row < rows ? reader.items_inside(z0, y0, x0) : 0;
    }
    constexpr int LENGTH = S::KD * S::KH * S::KW * S::IN;  // of a row of the weight
    const uchar *matrix = (const uchar *)weight + (long)(group * S::OUT + column + own) * LENGTH * T::BYTES;
    uint start = shared_address(memory);

    auto fetch = [&](int stage) {
        uint tile = start + stage * BYTES;
        int more = (reader.jz * az.step * S::H + reader.jy * ay.step) * S::W + reader.jx * ax.step;
        long at = ((long)more * (S::GROUPS * S::IN) + reader.channel) * T::BYTES;
        bool inside = reader.inside();
#pragma unroll
        for (int i = 0; i < ROWS / PASS; i++)
            begin_copy(tile + place_of<ROW>(own + i * PASS, unit), from[i] + at,
                       inside && seen[i] >> reader.item & 1);
        const uchar *place = matrix + reader.weight_place() * T::BYTES;
#pragma unroll
        for (int i = 0; i < COLUMNS; i += PASS)
            if (COLUMNS % PASS == 0 || own + i < COLUMNS)
                begin_copy(tile + ROWS * ROW + place_of<ROW>(own + i, unit), place + (long)i * LENGTH * T::BYTES,
                           inside && (S::OUT % COLUMNS == 0 || column + own + i < S::OUT));
        reader.next();
    };

    float sums[M][N][4];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < N; j++) sums[i][j][0] = sums[i][j][1] = sums[i][j][2] = sums[i][j][3] = 0;
    int lane = THREAD % 32, warp = THREAD / 32;
    int warp_row = warp % WARPS_M * (M * 16), warp_column = warp / WARPS_M * (N * 8);
    int steps = reader.steps();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (stage < steps) fetch(stage);
        end_step();
    }
    int stage = 0;
    for (int step = 0; step < steps; step++) {
        wait_for_copies<STAGES - 2>();
        if constexpr (TOGETHER) show_to_tensor_cores();
        BARRIER;
        int last = stage == 0 ? STAGES - 1 : stage - 1;
        uint left = start + stage * BYTES, right = left + ROWS * ROW;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        if constexpr (TOGETHER) {
            begin_products();
#pragma unroll
            for (int part = 0; part < UNITS; part += 2)
                multiply_together<T, 0>(sums[0], tile_at<ROW>(left + warp / 4 * (64 * ROW) + part * 16),
                                        tile_at<ROW>(right + part * 16));
            end_products();
        }
        if (step + STAGES - 1 < steps) fetch(last);
        end_step();
        if constexpr (TOGETHER) {
            wait_for_products(sums);
            continue;
        }
#pragma unroll
        for (int part = 0; part < UNITS; part += 2) {
            uint a[M][4], b[N / 2][4];
#pragma unroll
            for (int i = 0; i < M; i++) {
                load_tiles(a[i], left + place_of<ROW>(warp_row + i * 16 + lane % 16, part + lane / 16));
                round_factors<T>(a[i]);
            }
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                int row = warp_column + j * 16 + lane % 8 + lane / 16 * 8;
                load_tiles(b[j], right + place_of<ROW>(row, part + lane / 8 % 2));
                round_factors<T>(b[j]);
            }
            add_products<T>(sums, a, b);
        }
    }

#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first_row + warp_row + i * 16 + lane / 4 + half * 8;
            long to = row;
            if (S::TRANSPOSED) {
                int across = row % cx, down = row / cx % cy, deep = row / (cx * cy) % cz;
                int image = row / (cx * cy * cz);
                to = ((image * S::OD + deep * PZ + rz) * S::OH + down * PY + ry) * S::OW + across * PX + rx;
            }
            to = to * (S::GROUPS * S::OUT) + group * S::OUT;
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                float *upper = sums[i][j] + half * 2, *lower = sums[i][j + 1] + half * 2;
                int begin = column + warp_column + j * 8;
                if constexpr (T::BYTES == 4) {
                    float *items = (float *)out + to;
                    int at = begin + lane % 4 * 2;
                    if (row < rows && at < S::OUT) *(float2 *)(items + at) = make_float2(upper[0], upper[1]);
                    if (row < rows && at + 8 < S::OUT)
                        *(float2 *)(items + at + 8) = make_float2(lower[0], lower[1]);
                } else {  // an even thread has four items of the first tile, its neighbour of the second
                    uint mine = T::pair(upper[0], upper[1]), other = T::pair(lower[0], lower[1]);
                    bool odd = lane % 2;
                    uint given = __shfl_xor_sync(0xffffffffu, odd ? mine : other, 1);
                    int at = begin + (odd ? 8 : 0) + lane % 4 / 2 * 4;
                    uint2 items = odd ? make_uint2(given, other) : make_uint2(mine, given);
                    if (row < rows && at < S::OUT) *(uint2 *)((ushort *)out + to + at) = items;
                }
            }
        }
}

// LINES lines of WIDTH items in shared memory, each for a pixel. Of 16 bits, they are in panels of 64 columns,
// swizzled; others are so far apart that the tiles of a product are in all banks.
template <class T, int WIDTH, int LINES> struct Lines {
    static constexpr int APART = T::BYTES == 2 ? 128 : WIDTH * 4 + 32;
    static constexpr int BYTES = (T::BYTES == 2 ? (WIDTH + 63) / 64 : 1) * LINES * APART;
    static __device__ __forceinline__ uint place(int line, int unit) {
        if (T::BYTES == 2) return unit / 8 * (LINES * 128) + line * 128 + (((unit ^ line) & 7) << 4);
        return line * APART + unit * 16;
    }
};

// Of the gradient by the weight, the sums over the pixels of a split: (splits, GROUPS * OUT, KD, KH, KW, IN),
// for images (batch, D, H, W, GROUPS * IN) and gradients (batch, OD, OH, OW, GROUPS * OUT). A workgroup has
// ROWS channels of the gradient and COLUMNS of windows, and reads PIXELS at a time.
template <class T, class S, int ROWS, int COLUMNS, int WARPS_M, int WARPS_N, int PIXELS, int STAGES>
DEVICE void convolution_weight_tiles(float *sums_out, const void *x, const void *g, int batch, int split_pixels) {
    constexpr int COUNT = 32 * WARPS_M * WARPS_N, UNIT = 16 / T::BYTES, K = S::KD * S::KH * S::KW * S::IN;
    typedef Lines<T, ROWS, PIXELS> Left;
    typedef Lines<T, COLUMNS, PIXELS> Right;
    constexpr int BYTES = Left::BYTES + Right::BYTES, M = ROWS / WARPS_M / 16, N = COLUMNS / WARPS_N / 8;
    constexpr bool TOGETHER = Warpgroups<T, WARPS_M, N>::used && ROWS % 64 == 0;
    constexpr int LEFT_UNITS = ROWS / UNIT, RIGHT_UNITS = COLUMNS / UNIT;
    constexpr int LEFT_TASKS = (PIXELS * LEFT_UNITS + COUNT - 1) / COUNT;
    constexpr int RIGHT_TASKS = (PIXELS * RIGHT_UNITS + COUNT - 1) / COUNT;
    constexpr int ROW_TILES = (S::OUT + ROWS - 1) / ROWS, COLUMN_TILES = (K + COLUMNS - 1) / COLUMNS;
    __shared__ __align__(1024) uchar memory[STAGES * BYTES];
    int block = GROUP(0);
    int column = block % COLUMN_TILES * COLUMNS;
    block /= COLUMN_TILES;
    int row = block % ROW_TILES * ROWS;
    block /= ROW_TILES;
    int group = block % S::GROUPS, split = block / S::GROUPS;
    int begin = split * split_pixels, end = min(begin + split_pixels, batch * (S::OD * S::OH * S::OW));
    uint start = shared_address(memory);

    // What a thread reads of windows: where it is in a window, and in a pixel.
    int kz[RIGHT_TASKS], ky[RIGHT_TASKS], kx[RIGHT_TASKS], channel[RIGHT_TASKS];
#pragma unroll
    for (int i = 0; i < RIGHT_TASKS; i++) {
        int task = THREAD + i * COUNT, at = column + task % RIGHT_UNITS * UNIT, tap = at / S::IN;
        kx[i] = tap % S::KW * S::AW - S::PW;
        ky[i] = tap / S::KW % S::KH * S::AH - S::PH;
        kz[i] = tap / (S::KW * S::KH) * S::AD - S::PD;
        channel[i] = group * S::IN + at % S::IN;
        if (at >= K) kx[i] = -(1 << 30);
    }
    auto fetch = [&](int stage, int first) {
        uint tile = start + stage * BYTES;
#pragma unroll
        for (int i = 0; i < LEFT_TASKS; i++) {
            int task = THREAD + i * COUNT, line = task / LEFT_UNITS, at = row + task % LEFT_UNITS * UNIT;
            int pixel = first + line;
            bool there = pixel < end && at < S::OUT;
            long from = (long)(pixel * (S::GROUPS * S::OUT) + group * S::OUT + at) * T::BYTES;
            if (PIXELS * LEFT_UNITS % COUNT == 0 || line < PIXELS)
                begin_copy(tile + Left::place(line, task % LEFT_UNITS), (const uchar *)g + from, there);
        }
#pragma unroll
        for (int i = 0; i < RIGHT_TASKS; i++) {
            int task = THREAD + i * COUNT, line = task / RIGHT_UNITS, pixel = first + line;
            int across = pixel % S::OW * S::SW + kx[i], down = pixel / S::OW % S::OH * S::SH + ky[i];
            int deep = pixel / (S::OW * S::OH) % S::OD * S::SD + kz[i], image = pixel / (S::OW * S::OH * S::OD);
            bool there = pixel < end && (uint)across < S::W && (uint)down < S::H && (uint)deep < S::D;
            int place = ((image * S::D + deep) * S::H + down) * S::W + across;
            long from = (long)(place * (S::GROUPS * S::IN) + channel[i]) * T::BYTES;
            if (PIXELS * RIGHT_UNITS % COUNT == 0 || line < PIXELS)
                begin_copy(tile + Left::BYTES + Right::place(line, task % RIGHT_UNITS), (const uchar *)x + from,
                           there);
        }
    };

    float sums[M][N][4];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < N; j++) sums[i][j][0] = sums[i][j][1] = sums[i][j][2] = sums[i][j][3] = 0;
    int lane = THREAD % 32, warp = THREAD / 32;
    int warp_row = warp % WARPS_M * (M * 16), warp_column = warp / WARPS_M * (N * 8);
    int steps = (end - begin + PIXELS - 1) / PIXELS;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (stage < steps) fetch(stage, begin + stage * PIXELS);
        end_step();
    }
    int stage = 0;
    for (int step = 0; step < steps; step++) {
        wait_for_copies<STAGES - 2>();
        if constexpr (TOGETHER) show_to_tensor_cores();
        BARRIER;
        int last = stage == 0 ? STAGES - 1 : stage - 1;
        uint left = start + stage * BYTES, right = left + Left::BYTES;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        if constexpr (TOGETHER) {
            begin_products();
#pragma unroll
            for (int part = 0; part < PIXELS / 16; part++)
#pragma unroll
                for (int j = 0; j < N; j += 8)
                    multiply_together<T, 1>(*(float (*)[8][4])sums[0][j],
                        tile_at<128>(left + (warp % WARPS_M / 4 * PIXELS + part * 16) * 128),
                        tile_at<128>(right + ((warp / WARPS_M * N + j) / 8 * PIXELS + part * 16) * 128));
            end_products();
        }
        if (step + STAGES - 1 < steps) fetch(last, begin + (step + STAGES - 1) * PIXELS);
        end_step();
        if constexpr (TOGETHER) {
            wait_for_products(sums);
            continue;
        }
#pragma unroll
        for (int part = 0; part < PIXELS; part += 32 / T::BYTES) {
            uint a[M][4], b[N / 2][4];
#pragma unroll
            for (int i = 0; i < M; i++) {
                if constexpr (T::BYTES == 4) {
                    uint from = left + (part + lane % 4) * Left::APART + (warp_row + i * 16 + lane / 4) * 4;
                    a[i][0] = shared_word(from), a[i][1] = shared_word(from + 32);
                    a[i][2] = shared_word(from + 4 * Left::APART);
                    a[i][3] = shared_word(from + 4 * Left::APART + 32);
                } else {
                    int line = part + lane / 16 * 8 + lane % 8, at = warp_row / 8 + i * 2 + lane / 8 % 2;
                    load_turned_tiles(a[i], left + Left::place(line, at));
                }
                round_factors<T>(a[i]);
            }
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                if constexpr (T::BYTES == 4) {
                    int at = warp_column + j * 16 + lane / 4;
                    uint from = right + (part + lane % 4) * Right::APART + at * 4;
                    b[j][0] = shared_word(from), b[j][1] = shared_word(from + 4 * Right::APART);
                    b[j][2] = shared_word(from + 32), b[j][3] = shared_word(from + 4 * Right::APART + 32);
                } else {
                    int line = part + lane / 8 % 2 * 8 + lane % 8, at = warp_column / 8 + j * 2 + lane / 16;
                    load_turned_tiles(b[j], right + Right::place(line, at));
                }
                round_factors<T>(b[j]);
            }
            add_products<T>(sums, a, b);
        }
    }
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int line = row + warp_row + i * 16 + lane / 4 + half * 8;
            float *to = sums_out + ((long)split * (S::GROUPS * S::OUT) + group * S::OUT + line) * K;
#pragma unroll
            for (int j = 0; j < N; j++) {
                int at = column + warp_column + j * 8 + lane % 4 * 2;
                if (line < S::OUT && at < K)
                    *(float2 *)(to + at) = make_float2(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
            }
        }
}

// The sum of so many arrays of SIZE items. Eight threads share an item.
template <class T, int SIZE> DEVICE void convolution_sum_splits(
    typename T::Bits *out, const float *parts, int splits) {
    __shared__ float sums[256];
    int item = GROUP(0) * 32 + THREAD % 32;
    float sum = 0;
    if (item < SIZE)
#pragma unroll 4
        for (int split = THREAD / 32; split < splits; split += 8) sum += parts[(long)split * SIZE + item];
    sums[THREAD] = sum;
    BARRIER;
    if (THREAD < 32 && item < SIZE) {
        float whole[1] = {0};
        for (int part = 0; part < 8; part++) whole[0] += sums[part * 32 + THREAD];
        write_items<T, 1>(out + item, whole);
    }
}
