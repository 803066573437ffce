// What `wgmma` wants to know of a place in a tile: that, 1024 bytes from 8 rows to the next, and the order of
// chunks.
DEVICE ulong described(uint tile, int bytes) {
    return 0x4000004000000000ul | (((tile >> 4) | 64 << 16) + (bytes >> 4));
}
template <bool HALF, int ROWS, int D> DEVICE void product_with_turned(
    float (&sums)[ROWS / 8][4], const uint (&left)[D / 16][4], uint tile) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        ulong right = described(tile, step / 4 * (ROWS * 128) + step % 4 * 32);
        wgmma<HALF, 0>(sums, left[step], right, step > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <bool HALF, int ROWS, int D> DEVICE void add_product(
    float (&sums)[D / 8][4], const uint (&left)[ROWS / 16][4], uint tile) {
    const int first = D < 64 ? D / 8 : 8, second = D / 8 - first;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        wgmma<HALF, 1>(*(float (*)[first][4])sums, left[step], described(tile, step * 2048), 1);
        if constexpr (second > 0) {
            ulong right = described(tile, ROWS * 128 + step * 2048);
            wgmma<HALF, 1>(*(float (*)[second][4])(sums + first), left[step], right, 1);
        }
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All products but the last LEFT ones have ended.
template <int LEFT> DEVICE void products_end() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}
// Nothing that uses these sums may be moved before the wait for them.
template <int N> DEVICE void settled(float (&sums)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++)
        asm volatile("" : "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3]) :: "memory");
}
