// Keys of a head, in `count` pages that are `page_stride` items apart; values lie `values` items after them.
struct Pages { const ushort *items; const int *table; long page_stride, stride, values; int count; };

// Begin to copy keys and values at ROWS positions from `first` on, where a page begins, to two tiles. From
// `end` on they are 0.
template <int ROWS, int D, int PAGE> DEVICE void pages_begin(
    uint keys, uint values, const Pages &pages, int first, int end) {
    const int chunks = D / 8, step = TEAM / chunks;
    auto copy = [&](int row, int chunk, const int *table, long offset) {
        bool there = first + row < end;
        uint page = there ? *table : 0;
        page = page < pages.count ? page : 0;
        const ushort *from = pages.items + (page * pages.page_stride + offset);
        uint to = chunk_place<ROWS>(row, chunk);
        copy_begin<16>(keys + to, from, there);
        copy_begin<16>(values + to, from + pages.values, there);
    };
    const int *table = pages.table + first / PAGE;
    if constexpr (TEAM % chunks == 0 && (PAGE % step == 0 || step % PAGE == 0)) {
        int row = THREAD / chunks, chunk = THREAD % chunks;  // a thread's next chunk is in its own column
        long offset = row % PAGE * pages.stride + chunk * 8;
        table += row / PAGE;
#pragma unroll
        for (int at = 0; at < ROWS; at += step)
            if (ROWS % step == 0 || row + at < ROWS)
                copy(row + at, chunk, table + at / PAGE, offset + at % PAGE * pages.stride);
    } else {
        for (int task = THREAD; task < ROWS * chunks; task += TEAM) {
            int row = task / chunks, chunk = task % chunks;
            copy(row, chunk, table + row / PAGE, row % PAGE * pages.stride + chunk * 8);
        }
    }
}

// 64 queries of a head, of which each sees the positions up to its own in `positions`; with a WINDOW, so many
// of them. If they are CAPPED, scores s become cap * tanh(s / cap).
template <bool HALF, int D, int TILE, int STAGES, int QUERIES, int PAGE, int WINDOW, bool CAPPED>
DEVICE void attention_from_prompt(
    ushort *out, long out_stride, Matrix q, Pages pages, const int *positions, int block, float scale,
    float cap) {
    const int bytes = TILE * 128 * Panels<D>::count, own_bytes = 2048 * Panels<D>::count;
    const int most_bytes = STAGES * 2 * bytes > 4 * own_bytes ? STAGES * 2 * bytes : 4 * own_bytes;
    __shared__ __align__(1024) uchar memory[most_bytes];
    uint shared = (uint)__cvta_generic_to_shared(memory);
    Ring<STAGES, 2 * bytes> here{shared}, next{shared};
    auto position = [&](int query) { return positions[query < QUERIES ? query : QUERIES - 1]; };
    int lane = THREAD % 32, row = block * 64 + THREAD / 32 * 16;
    int own[2] = {position(row + lane / 4), position(row + lane / 4 + 8)};
    int two[2] = {position(block * 64 + lane), position(block * 64 + lane + 32)};
    int least = __reduce_min_sync(ALL_LANES, min(two[0], two[1]));
    int end = __reduce_max_sync(ALL_LANES, max(two[0], two[1])) + 1;
    int first = WINDOW && least >= WINDOW ? (least - WINDOW + 1) / TILE * TILE : 0, coming = first;
    const float factor = (CAPPED ? cap : scale) * 1.44269504f, inner = CAPPED ? scale / cap * 2.88539008f : 0;
    uint left[D / 16][4];
    // The greatest score is finite, as the first tile may have nothing that a query sees.
    float result[D / 8][4], most[2] = {-1e30f, -1e30f}, total[2] = {0, 0};
    auto begin = [&]() {
        if (coming < end) pages_begin<TILE, D, PAGE>(next.at, next.at + bytes, pages, coming, end);
        coming += TILE;
        copies_step();
        next.turn();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) begin();
    left_rows<D>(left, q.items, q.stride, row, QUERIES);
    clear(result);
    for (; first < end; first += TILE) {
        copies_end<STAGES - 2>();
        __syncthreads();
        float s[TILE / 8][4];
        uint weights[TILE / 16][4];
        product_with_turned<HALF, TILE, D>(s, left, here.at);
        begin();
        products_end<0>();
        settled(s);
        if (CAPPED) {
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[j][e] = 1 - __fdividef(2, 1 + power_of_two(s[j][e] * inner));
        }
        if (first + TILE - 1 > least || (WINDOW && first <= end - 1 - WINDOW)) {
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int key = first + j * 8 + lane % 4 * 2 + e % 2, last = own[e / 2];
                    if (key > last || (WINDOW && key <= last - WINDOW)) s[j][e] = -INFINITY;
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
    }
    __syncthreads();
    uint memory_of_warp = shared + THREAD / 32 * own_bytes;
    store_rows<HALF, D>(out, out_stride, row, QUERIES, memory_of_warp, result, 1 / total[0], 1 / total[1]);
}
