struct Matrix { const ushort *items; long stride; };  // of one head; `stride` items from row to row

// The last key that a query sees.
template <int QUERIES, int KEYS, bool CAUSAL> DEVICE int last_key(int query) {
    int own = query + KEYS - QUERIES;
    return CAUSAL && own < KEYS - 1 ? own : KEYS - 1;
}

// Replace scores by their weights, and add these up. Exponentials are relative to a score that is not far
// below the greatest one so far. It follows only where they would become large, since all sums have to be
// changed then.
template <int N, int M> DEVICE void weigh(
    float (&s)[N][4], float (&most)[2], float (&total)[2], float (&result)[M][4], float factor) {
    float now[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        now[h] = most[h];
#pragma unroll
        for (int j = 0; j < N; j++) now[h] = fmaxf(now[h], fmaxf(s[j][2 * h], s[j][2 * h + 1]));
        now[h] = fmaxf(now[h], __shfl_xor_sync(ALL_LANES, now[h], 1));
        now[h] = fmaxf(now[h], __shfl_xor_sync(ALL_LANES, now[h], 2));
    }
    if (__any_sync(ALL_LANES, fmaxf(now[0] - most[0], now[1] - most[1]) * factor > 8)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float fade = power_of_two((most[h] - now[h]) * factor);
            most[h] = now[h];
            total[h] *= fade;
#pragma unroll
            for (int j = 0; j < M; j++) {
                result[j][2 * h] *= fade;
                result[j][2 * h + 1] *= fade;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float shift = most[h] * factor, sum = 0;
#pragma unroll
        for (int j = 0; j < N; j++) {
            s[j][2 * h] = power_of_two(s[j][2 * h] * factor - shift);
            s[j][2 * h + 1] = power_of_two(s[j][2 * h + 1] * factor - shift);
            sum += s[j][2 * h] + s[j][2 * h + 1];
        }
        total[h] += sum;
    }
}

template <bool HALF, int D, int TILE, int STAGES, bool CAUSAL, int QUERIES, int KEYS>
DEVICE void attention_forward(
    ushort *out, long out_stride, float *lse, Matrix q, Matrix k, Matrix v, int block, float scale) {
    auto last = last_key<QUERIES, KEYS, CAUSAL>;
    const int bytes = TILE * 128 * Panels<D>::count, own_bytes = 2048 * Panels<D>::count;
    const int most_bytes = STAGES * 2 * bytes > 4 * own_bytes ? STAGES * 2 * bytes : 4 * own_bytes;
    __shared__ __align__(1024) uchar memory[most_bytes];
    uint shared = (uint)__cvta_generic_to_shared(memory);
    Ring<STAGES, 2 * bytes> here{shared}, next{shared};
    int lane = THREAD % 32, row = block * 64 + THREAD / 32 * 16;
    const float factor = scale * 1.44269504f;
    uint left[D / 16][4];
    float result[D / 8][4], most[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
    int visible = last(block * 64 + 63) + 1;
    auto begin = [&](int first) {
        if (first < visible) {
            tile_begin<TILE, D, KEYS % TILE == 0>(next.at, k.items, k.stride, KEYS - first);
            tile_begin<TILE, D, KEYS % TILE == 0>(next.at + bytes, v.items, v.stride, KEYS - first);
            k.items += TILE * k.stride;
            v.items += TILE * v.stride;
        }
        copies_step();
        next.turn();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) begin(stage * TILE);
    left_rows<D>(left, q.items, q.stride, row, QUERIES);
    clear(result);
    for (int first = 0; first < visible; first += TILE) {
        copies_end<STAGES - 2>();
        __syncthreads();
        float s[TILE / 8][4];
        uint weights[TILE / 16][4];
        product_with_turned<HALF, TILE, D>(s, left, here.at);
        begin(first + (STAGES - 1) * TILE);
        products_end<0>();
        settled(s);
        if (first + TILE - 1 > last(row)) {
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int key = first + j * 8 + lane % 4 * 2 + e % 2;
                    if (key > last(row + lane / 4 + e / 2 * 8)) s[j][e] = -INFINITY;
                }
        }
        weigh(s, most, total, result, factor);
        left_of<HALF>(weights, s);
        add_product<HALF, TILE, D>(result, weights, here.at + bytes);
        products_end<0>();
        settled(result);
        here.turn();
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        total[h] += __shfl_xor_sync(ALL_LANES, total[h], 1);
        total[h] += __shfl_xor_sync(ALL_LANES, total[h], 2);
        int query = row + lane / 4 + h * 8;
        if (lane % 4 == 0 && query < QUERIES) lse[query] = most[h] * scale + 0.693147181f * __log2f(total[h]);
    }
    __syncthreads();
    uint own = shared + THREAD / 32 * own_bytes;
    store_rows<HALF, D>(out, out_stride, row, QUERIES, own, result, 1 / total[0], 1 / total[1]);
}

// The gradients of 64 keys and values, over the queries that see them.
template <bool HALF, int D, int TILE, int STAGES, bool CAUSAL, int QUERIES, int KEYS>
DEVICE void attention_key_gradients(
    ushort *dk, long dk_stride, ushort *dv, long dv_stride, Matrix q, Matrix k, Matrix v, Matrix gradient,
    const float2 *rows, int block, float scale) {
    auto last = last_key<QUERIES, KEYS, CAUSAL>;
    const int bytes = TILE * 128 * Panels<D>::count, own_bytes = 2048 * Panels<D>::count;
    const int most_bytes = STAGES * 2 * bytes > 4 * own_bytes ? STAGES * 2 * bytes : 4 * own_bytes;
    __shared__ __align__(1024) uchar memory[most_bytes];
    __shared__ __align__(16) float2 row_memory[STAGES * TILE];
    uint shared = (uint)__cvta_generic_to_shared(memory);
    uint shared_rows = (uint)__cvta_generic_to_shared(row_memory);
    int lane = THREAD % 32, row = block * 64 + THREAD / 32 * 16;
    const float factor = scale * 1.44269504f;
    uint key[D / 16][4], value[D / 16][4];
    float to_key[D / 8][4], to_value[D / 8][4];
    int first = CAUSAL && block * 64 > KEYS - QUERIES ? (block * 64 - (KEYS - QUERIES)) / TILE * TILE : 0;
    Ring<STAGES, 2 * bytes> here{shared}, next{shared};
    Ring<STAGES, TILE * 8> rows_here{shared_rows}, rows_next{shared_rows};
    q.items += first * q.stride;
    gradient.items += first * gradient.stride;
    const bool whole = QUERIES % TILE == 0;
    auto begin = [&](int first) {
        int left = QUERIES - first;
        if (left > 0) {
            tile_begin<TILE, D, whole>(next.at, q.items, q.stride, left);
            tile_begin<TILE, D, whole>(next.at + bytes, gradient.items, gradient.stride, left);
            if (THREAD < TILE)
                copy_begin<8>(rows_next.at + THREAD * 8, rows + first + THREAD, whole || THREAD < left);
            q.items += TILE * q.stride;
            gradient.items += TILE * gradient.stride;
        }
        copies_step();
        next.turn();
        rows_next.turn();
    };
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ahead++) begin(first + ahead * TILE);
    left_rows<D>(key, k.items, k.stride, row, KEYS);
    left_rows<D>(value, v.items, v.stride, row, KEYS);
    clear(to_key);
    clear(to_value);
    for (; first < QUERIES; first += TILE) {
        copies_end<STAGES - 2>();
        __syncthreads();
        float s[TILE / 8][4], ds[TILE / 8][4];
        uint weights[TILE / 16][4], slopes[TILE / 16][4];
        product_with_turned<HALF, TILE, D>(s, key, here.at);
        product_with_turned<HALF, TILE, D>(ds, value, here.at + bytes);
        begin(first + (STAGES - 1) * TILE);
        products_end<1>();
        settled(s);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            // The logarithm of the sum, and the sum of result * gradient, of two neighbours.
            float4 two = shared_floats(rows_here.at + (j * 4 + lane % 4) * 16);
#pragma unroll
            for (int e = 0; e < 4; e++) s[j][e] = power_of_two(s[j][e] * factor - (e % 2 ? two.z : two.x));
        }
        if (CAUSAL && last(first) < row + 15) {
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int query = first + j * 8 + lane % 4 * 2 + e % 2;
                    if (last(query) < row + lane / 4 + e / 2 * 8) s[j][e] = 0;
                }
        }
        left_of<HALF>(weights, s);
        add_product<HALF, TILE, D>(to_value, weights, here.at + bytes);
        products_end<1>();
        settled(ds);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            float4 two = shared_floats(rows_here.at + (j * 4 + lane % 4) * 16);
#pragma unroll
            for (int e = 0; e < 4; e++) ds[j][e] = s[j][e] * (ds[j][e] - (e % 2 ? two.w : two.y));
        }
        left_of<HALF>(slopes, ds);
        add_product<HALF, TILE, D>(to_key, slopes, here.at);
        products_end<0>();
        settled(to_value);
        settled(to_key);
        here.turn();
        rows_here.turn();
    }
    __syncthreads();
    uint own = shared + THREAD / 32 * own_bytes;
    store_rows<HALF, D>(dv, dv_stride, row, KEYS, own, to_value, 1, 1);
    store_rows<HALF, D>(dk, dk_stride, row, KEYS, own, to_key, scale, scale);
}

// The gradients of 64 queries, over the keys that they see. What the gradients of keys need of each query is
// left in `rows`: log2(e) times the logarithm of the sum, and the sum of result * gradient.
template <bool HALF, int D, int TILE, int STAGES, bool CAUSAL, int QUERIES, int KEYS>
DEVICE void attention_query_gradients(
    ushort *dq, long dq_stride, float2 *rows, Matrix q, Matrix k, Matrix v, Matrix gradient, const float *lse,
    Matrix result, int block, float scale) {
    auto last = last_key<QUERIES, KEYS, CAUSAL>;
    const int bytes = TILE * 128 * Panels<D>::count, own_bytes = 2048 * Panels<D>::count;
    const int most_bytes = STAGES * 2 * bytes > 4 * own_bytes ? STAGES * 2 * bytes : 4 * own_bytes;
    __shared__ __align__(1024) uchar memory[most_bytes];
    uint shared = (uint)__cvta_generic_to_shared(memory);
    Ring<STAGES, 2 * bytes> here{shared}, next{shared};
    int lane = THREAD % 32, row = block * 64 + THREAD / 32 * 16;
    const float factor = scale * 1.44269504f;
    uint query[D / 16][4], slope[D / 16][4];
    float to_query[D / 8][4];
    int visible = last(block * 64 + 63) + 1;
    auto begin = [&](int first) {
        if (first < visible) {
            tile_begin<TILE, D, KEYS % TILE == 0>(next.at, k.items, k.stride, KEYS - first);
            tile_begin<TILE, D, KEYS % TILE == 0>(next.at + bytes, v.items, v.stride, KEYS - first);
            k.items += TILE * k.stride;
            v.items += TILE * v.stride;
        }
        copies_step();
        next.turn();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) begin(stage * TILE);
    left_rows<D>(query, q.items, q.stride, row, QUERIES);
    left_rows<D>(slope, gradient.items, gradient.stride, row, QUERIES);
    float2 of[2];
    {
        uint both[D / 16][4];
        left_rows<D>(both, result.items, result.stride, row, QUERIES);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int own_row = row + lane / 4 + h * 8;
            float sum = 0;
#pragma unroll
            for (int step = 0; step < D / 16; step++)
#pragma unroll
                for (int e = h; e < 4; e += 2) {
                    uint x = both[step][e], y = slope[step][e];
                    sum += low_of<HALF>(x) * low_of<HALF>(y) + high_of<HALF>(x) * high_of<HALF>(y);
                }
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            of[h] = own_row < QUERIES ? make_float2(lse[own_row] * 1.44269504f, sum) : make_float2(0, 0);
            if (lane % 4 == 0 && own_row < QUERIES) rows[own_row] = of[h];
        }
    }
    clear(to_query);
    for (int first = 0; first < visible; first += TILE) {
        copies_end<STAGES - 2>();
        __syncthreads();
        float s[TILE / 8][4], ds[TILE / 8][4];
        uint slopes[TILE / 16][4];
        product_with_turned<HALF, TILE, D>(s, query, here.at);
        product_with_turned<HALF, TILE, D>(ds, slope, here.at + bytes);
        begin(first + (STAGES - 1) * TILE);
        products_end<1>();
        settled(s);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[j][e] = power_of_two(s[j][e] * factor - of[e / 2].x);
        if (first + TILE - 1 > last(row)) {
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int key = first + j * 8 + lane % 4 * 2 + e % 2;
                    if (key > last(row + lane / 4 + e / 2 * 8)) s[j][e] = 0;
                }
        }
        products_end<0>();
        settled(ds);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) ds[j][e] = s[j][e] * (ds[j][e] - of[e / 2].y);
        left_of<HALF>(slopes, ds);
        add_product<HALF, TILE, D>(to_query, slopes, here.at);
        products_end<0>();
        settled(to_query);
        here.turn();
    }
    __syncthreads();
    uint own = shared + THREAD / 32 * own_bytes;
    store_rows<HALF, D>(dq, dq_stride, row, QUERIES, own, to_query, scale, scale);
}
