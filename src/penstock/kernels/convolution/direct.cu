// Convolutions of groups of few channels, without tensor cores. The weight is (KD, KH, KW, IN, GROUPS * OUT).

// A thread has V neighbouring channels of P neighbouring pixels of the result; V > 1 with a channel in a group.
template <class T, class S, int V, int P>
DEVICE void convolution_direct(
    typename T::Bits *out, const typename T::Bits *x, const typename T::Bits *weight, int batch) {
    constexpr int CHANNELS = S::GROUPS * S::OUT, PARTS = CHANNELS / V, RUNS = (S::OW + P - 1) / P;
    int task = GROUP(0) * THREADS + THREAD;
    int channel = task % PARTS * V, left = task / PARTS % RUNS * P, line = task / (PARTS * RUNS);
    if (line >= batch * S::OD * S::OH) return;
    int down = line % S::OH, deep = line / S::OH % S::OD, image = line / (S::OH * S::OD);
    int source = V > 1 ? channel : channel / S::OUT * S::IN;
    float sums[P][V];
#pragma unroll
    for (int p = 0; p < P; p++)
#pragma unroll
        for (int v = 0; v < V; v++) sums[p][v] = 0;
    for (int kz = 0; kz < S::KD; kz++) {
        int z = deep * S::SD - S::PD + kz * S::AD;
        if (S::TRANSPOSED) {
            z = deep + S::PD - kz * S::AD;
            if (z % S::SD) continue;
            z /= S::SD;
        }
        if ((uint)z >= S::D) continue;
        for (int ky = 0; ky < S::KH; ky++) {
            int y = down * S::SH - S::PH + ky * S::AH;
            if (S::TRANSPOSED) {
                y = down + S::PH - ky * S::AH;
                if (y % S::SH) continue;
                y /= S::SH;
            }
            if ((uint)y >= S::H) continue;
            long line_place = (long)((image * S::D + z) * S::H + y) * (S::W * S::GROUPS * S::IN);
            const typename T::Bits *row = x + line_place + source;
            const typename T::Bits *taps = weight + (kz * S::KH + ky) * (S::KW * S::IN * CHANNELS) + channel;
#pragma unroll
            for (int kx = 0; kx < S::KW; kx++) {
                float factors[S::IN][V];
#pragma unroll
                for (int in = 0; in < S::IN; in++)
                    read_items<T, V>(factors[in], taps + (kx * S::IN + in) * CHANNELS);
#pragma unroll
                for (int p = 0; p < P; p++) {
                    int at = (left + p) * S::SW - S::PW + kx * S::AW;
                    bool there = true;
                    if (S::TRANSPOSED) {
                        at = left + p + S::PW - kx * S::AW;
                        there = at % S::SW == 0;
                        at /= S::SW;
                    }
                    if (there && (uint)at < S::W) {
                        float items[S::IN * V];  // of several channels, or of all channels of a group
                        read_items<T, S::IN * V>(items, row + at * (S::GROUPS * S::IN));
#pragma unroll
                        for (int in = 0; in < S::IN; in++)
#pragma unroll
                            for (int v = 0; v < V; v++) sums[p][v] += items[in * V + v] * factors[in][v];
                    }
                }
            }
        }
    }
#pragma unroll
    for (int p = 0; p < P; p++)
        if (left + p < S::OW)
            write_items<T, V>(out + ((long)line * S::OW + left + p) * CHANNELS + channel, sums[p]);
}

// Of the gradient by the weight, the sums over the pixels of a split: (splits, KD, KH, KW, IN, GROUPS * OUT).
// A workgroup has LANES pixels at a time, of THREADS / LANES runs of V channels, and ITEMS items of the window.
template <class T, class S, int V, int LANES, int RUNS, int ITEMS> DEVICE void convolution_direct_weight(
    float *sums_out, const typename T::Bits *x, const typename T::Bits *g, int batch, int split_pixels) {
    constexpr int CHANNELS = S::GROUPS * S::OUT, K = S::KD * S::KH * S::KW * S::IN;
    constexpr int CHANNEL_TILES = (CHANNELS / V + RUNS - 1) / RUNS, ITEM_TILES = (K + ITEMS - 1) / ITEMS;
    __shared__ float shared[LANES * RUNS * V];
    int block = GROUP(0), run = THREAD % RUNS, lane = THREAD / RUNS;
    int channel = (block % CHANNEL_TILES * RUNS + run) * V;
    int first = ITEM_TILES > 1 ? block / CHANNEL_TILES % ITEM_TILES * ITEMS : 0;
    int split = block / (CHANNEL_TILES * ITEM_TILES);
    int begin = split * split_pixels, end = min(begin + split_pixels, batch * (S::OD * S::OH * S::OW));
    int source = V > 1 ? channel : channel / S::OUT * S::IN;
    float sums[ITEMS][V];
#pragma unroll
    for (int item = 0; item < ITEMS; item++)
#pragma unroll
        for (int v = 0; v < V; v++) sums[item][v] = 0;
    if (channel < CHANNELS)
        for (int pixel = begin + lane; pixel < end; pixel += LANES) {
            int across = pixel % S::OW * S::SW - S::PW, down = pixel / S::OW % S::OH * S::SH - S::PH;
            int deep = pixel / (S::OW * S::OH) % S::OD * S::SD - S::PD, image = pixel / (S::OW * S::OH * S::OD);
            float slopes[V];
            read_items<T, V>(slopes, g + (long)pixel * CHANNELS + channel);
#pragma unroll
            for (int item = 0; item < ITEMS; item++) {
                int in = (first + item) % S::IN, tap = (first + item) / S::IN;
                int at_x = across + tap % S::KW * S::AW, at_y = down + tap / S::KW % S::KH * S::AH;
                int at_z = deep + tap / (S::KW * S::KH) * S::AD;
                if ((uint)at_x < S::W && (uint)at_y < S::H && (uint)at_z < S::D && first + item < K) {
                    float items[V];
                    long place = (long)((image * S::D + at_z) * S::H + at_y) * S::W + at_x;
                    read_items<T, V>(items, x + place * (S::GROUPS * S::IN) + source + in);
#pragma unroll
                    for (int v = 0; v < V; v++) sums[item][v] += slopes[v] * items[v];
                }
            }
        }
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
#pragma unroll
        for (int v = 0; v < V; v++) shared[(lane * RUNS + run) * V + v] = sums[item][v];
        BARRIER;
        int at = block % CHANNEL_TILES * (RUNS * V) + THREAD;
        if (THREAD < RUNS * V && at < CHANNELS && first + item < K) {
            float sum = 0;
            for (int other = 0; other < LANES; other++) sum += shared[other * (RUNS * V) + THREAD];
            sums_out[((long)split * K + first + item) * CHANNELS + at] = sum;
        }
        BARRIER;
    }
}
